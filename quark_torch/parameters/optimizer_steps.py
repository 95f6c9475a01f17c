"""Follows the steps of optimizers and keeps what parameters were before the last one."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quark_torch.parameters.listing import find_inner_optimizers, take_local

# Until the second snapshot little is known of the loop: so many steps are copied on a guess.
_GUESSED_COPIES = 32
_REMEMBERED_INTERVALS = 4


class GradientMark(NamedTuple):
    """That a gradient was there when its optimizer's step ended, and its version then."""

    version: int | None


class _Kept:
    """A parameter and a copy of it from before the step."""

    __slots__ = ("address", "buffer", "parameter", "sample")

    def __init__(self, parameter: torch.Tensor, local: torch.Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.buffer = torch.empty_like(local)
        self.address = -1
        self.sample: torch.Tensor | None = None

    def find_sample(self) -> torch.Tensor | None:
        """Some elements of the parameter where they are now, of which the last step was told."""
        parameter = self.parameter()
        if parameter is None:
            return None
        local = take_local(parameter)[0]
        address = local.data_ptr()
        if address != self.address:
            self.address, self.sample = address, take_sample(local)
        return self.sample

    def fits(self, parameter: torch.Tensor, local: torch.Tensor) -> bool:
        buffer = self.buffer
        return (
            self.parameter() is parameter
            and buffer.shape == local.shape
            and buffer.dtype == local.dtype
            and buffer.device == local.device
        )


@dataclass(slots=True, eq=False)
class _Watch:
    """One optimizer: its steps since the last snapshot and what is kept of it.

    A wrapper such as SAM is one with what it wraps, its members: whichever of
    them begins a step first, that is the step, and what steps within it is a
    part of it.
    """

    optimizer: torch.optim.Optimizer
    members: list[torch.optim.Optimizer] = field(init=False)
    index: int = 0
    # The member that is in its step.
    stepping: object = None
    handles: list[Any] = field(default_factory=list)
    generation: int = 0
    begun: int = 0
    finished: int = 0
    # The fewest steps that lay between two snapshots lately: from the step
    # of that number on, any may be the last one.
    copies_from: int = 1
    intervals: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_INTERVALS))
    is_held: bool = False
    is_ready: bool = False
    disabled: str | None = None
    kept: dict[int, _Kept] = field(default_factory=dict)
    marks: dict[int, GradientMark] = field(default_factory=dict)
    look: tuple[list[int], list[torch.Tensor], WeightLook] | None = None

    def __post_init__(self) -> None:
        self.members = [self.optimizer, *find_inner_optimizers(self.optimizer)]

    def roll(self, generation: int) -> None:
        """Begin a new interval between snapshots."""
        # What came before the first snapshot tells nothing of the loop.
        if self.begun and self.generation:
            self.intervals.append(self.begun)
            self.copies_from = min(self.intervals)
        self.generation = generation
        self.begun = self.finished = 0
        self.stepping = None
        self.is_held = self.is_ready = False
        self.marks.clear()
        self.look = None

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def remove_before(self) -> None:
        """Take out the hooks that come before a step; from within one that comes after it."""
        for handle in self.handles[::2]:
            handle.remove()

    def free(self) -> None:
        self.kept.clear()
        self.marks.clear()
        self.look = None
        self.is_held = self.is_ready = False


def _look(watch: _Watch) -> tuple[list[int], list[torch.Tensor], WeightLook]:
    """What is kept of an optimizer's parameters, a sample of each, and what it was."""
    with torch.no_grad():
        found = [
            (identity, sample)
            for identity, kept in watch.kept.items()
            if (sample := kept.find_sample()) is not None
        ]
        samples = [sample for _, sample in found]
        return [identity for identity, _ in found], samples, look_at(samples)


class _StepHook:
    """Called by an optimizer; holds only weakly what it calls, and never changes a step."""

    __slots__ = ("_is_post", "_pass_on_untraced", "_steps")

    def __init__(self, steps: OptimizerSteps | None, *, is_post: bool) -> None:
        # A compiled step runs it between its graphs, which it would break into pieces otherwise.
        self._pass_on_untraced: Callable[[object], None] = torch.compiler.disable(  # type: ignore[no-untyped-call]
            self._pass_on
        )
        self._steps = None if steps is None else weakref.ref(steps)
        self._is_post = is_post

    def __call__(self, optimizer: object, _arguments: object, _keywords: object) -> None:
        if torch.compiler.is_compiling():
            self._pass_on_untraced(optimizer)
        else:
            self._pass_on(optimizer)

    def _pass_on(self, optimizer: object) -> None:
        steps = None if self._steps is None else self._steps()
        if steps is None:
            return
        if self._is_post:
            steps.end(optimizer)
        else:
            steps.begin(optimizer)

    def __deepcopy__(self, _memo: object) -> _StepHook:
        return _make_inert()

    def __reduce__(self) -> tuple[Callable[[], _StepHook], tuple[()]]:
        return _make_inert, ()


def _make_inert() -> _StepHook:
    """A hook of nobody: what a copy of an optimizer gets."""
    return _StepHook(None, is_post=False)


class OptimizerSteps:
    """Follows the steps of optimizers, and copies parameters before those that matter.

    A snapshot says only after the step which step it was. So it is foretold:
    the next snapshot is as far from the last as that was from the one before,
    and an optimizer makes as many steps in between as it did lately. Where
    the next one is due, parameters are copied before each step that may be the
    last one. A wrong guess costs the update of one snapshot, which then says so.

    Args:
        optimizers: The optimizers.
        copies: Whether anything is copied; without it steps are only followed.
        choose: Of an optimizer's index, the parameters to copy.
        is_due: Of a step, whether a snapshot is taken there.
        is_over: Whether the run has ended.
        on_failure: Told of an exception, with the name of what went wrong; it
            may raise.
        on_end: Called with an optimizer's index after a step that may be the
            last one before a snapshot.
        guard: The lock that is held while copies are made and compared.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        copies: bool,
        choose: Callable[[int], Sequence[torch.Tensor]],
        is_due: Callable[[int], bool],
        is_over: Callable[[], bool],
        on_failure: Callable[[str, Exception], None],
        on_end: Callable[[int], None],
        guard: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._copies = copies
        self._choose = choose
        self._is_due = is_due
        self._is_over = is_over
        self._on_failure = on_failure
        self._on_end = on_end
        self._watches: list[_Watch] = []
        self._by_member: dict[int, _Watch] = {}
        self._is_attached = False
        self._totals: list[int] = []
        self._generation = 0
        self._copying = True
        self._is_leaving = False
        self._last_step: int | None = None
        self._increment: int | None = None
        self._is_guessing = True
        self._guard = guard
        self.follow(optimizers)

    def attach(self) -> None:
        """Begin to follow the optimizers."""
        self._is_attached = True
        for watch in self._watches:
            self._attach(watch)
        # One that takes another's place goes on from its number.
        totals = [*self._totals, *(0 for _ in self._watches)][: len(self._watches)]
        self._totals = totals if all(watch.handles for watch in self._watches) else []

    def follow(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Take these in place of those before; what is kept of one that stays is kept."""
        before = {id(watch.optimizer): watch for watch in self._watches}
        watches = []
        for index, optimizer in enumerate(optimizers):
            watch = before.pop(id(optimizer), None) or _Watch(optimizer)
            watch.index = index
            watches.append(watch)
        for watch in before.values():
            watch.remove()
            watch.free()
        self._watches = watches
        self._by_member = {id(member): watch for watch in watches for member in watch.members}
        if self._is_attached:
            self.attach()

    def _attach(self, watch: _Watch) -> None:
        if watch.handles:
            return
        try:
            for member in watch.members:
                watch.handles += [
                    member.register_step_pre_hook(_StepHook(self, is_post=False)),
                    member.register_step_post_hook(_StepHook(self, is_post=True)),
                ]
        except Exception as error:  # noqa: BLE001 - a foreign optimizer may lack anything
            watch.disabled = "optimizer_has_no_step_hooks"
            self._on_failure(watch.disabled, error)

    @property
    def kept_bytes(self) -> int:
        """Memory of the kept copies."""
        return sum(
            kept.buffer.element_size() * kept.buffer.numel()
            for watch in self._watches
            for kept in watch.kept.values()
        )

    def begin(self, optimizer: object) -> None:
        """An optimizer is about to step."""
        watch = self._by_member.get(id(optimizer))
        if watch is None:
            return
        if watch.generation != self._generation:
            watch.roll(self._generation)
        if watch.stepping is not None and watch.stepping is not optimizer:
            return
        watch.stepping = optimizer
        watch.begun += 1
        watch.is_held = watch.is_ready = False
        if not self._copying or watch.begun < watch.copies_from or watch.disabled is not None:
            return
        if self._is_over():
            # PyTorch goes through these hooks right now, and allows no change of them.
            self._is_leaving = True
            self._free_all()
            return
        if self._is_guessing and watch.begun > _GUESSED_COPIES:
            watch.kept.clear()
            return
        try:
            with self._guard():
                watch.is_held = self._copy(watch)
        except Exception as error:  # noqa: BLE001 - the user's step must go on
            watch.free()
            watch.disabled = "copy_failed"
            self._on_failure(watch.disabled, error)

    def end(self, optimizer: object) -> None:
        """An optimizer has made its step."""
        watch = self._by_member.get(id(optimizer))
        if watch is None or watch.stepping is not optimizer:
            return
        watch.stepping = None
        if self._is_leaving:
            watch.remove_before()
            return
        watch.finished += 1
        if self._totals:
            self._totals[watch.index] += 1
        if not watch.is_held:
            return
        watch.is_held, watch.is_ready = False, True
        try:
            with self._guard():
                watch.marks = {
                    id(parameter): GradientMark(find_version(take_local(gradient)[0]))
                    for parameter in self._choose(watch.index)
                    if (gradient := parameter.grad) is not None
                }
                if self._copies:
                    watch.look = _look(watch)
                self._on_end(watch.index)
        except Exception as error:  # noqa: BLE001 - the user's step must go on
            self._on_failure("gradients_unread", error)

    def explain_missing(self, index: int) -> str | None:
        """Why one optimizer has no update since the last snapshot; None where it has one."""
        watch = self._watches[index]
        if watch.disabled is not None:
            return watch.disabled
        if watch.generation != self._generation or not watch.begun:
            return "no_optimizer_step"
        if watch.is_held or watch.finished < watch.begun:
            return "optimizer_step_failed"
        return None if watch.is_ready else "step_not_foreseen"

    def has_stepped(self, index: int) -> bool:
        """Whether an optimizer has ended a step since the last snapshot."""
        watch = self._watches[index]
        return watch.generation == self._generation and watch.finished > 0

    def find_steps(self, index: int) -> tuple[int | None, bool]:
        """How many steps an optimizer has ended, if it is known, and whether one lately.

        Lately is in the interval between two snapshots that are asked for
        which has just ended, or has not ended yet.
        """
        if not 0 <= index < len(self._watches):
            return None, False
        watch = self._watches[index]
        is_late = watch.generation >= self._generation - 1 and watch.finished > 0
        return self._totals[index] if self._totals else None, is_late

    def find_before(
        self, index: int, parameter: torch.Tensor, local: torch.Tensor
    ) -> torch.Tensor | None:
        """What a parameter was before the last step of its optimizer, if it was kept."""
        kept = self._watches[index].kept.get(id(parameter))
        return kept.buffer if kept is not None and kept.fits(parameter, local) else None

    def find_mark(self, index: int, parameter: torch.Tensor) -> GradientMark | None:
        """What a parameter's gradient was when the last step of its optimizer ended."""
        watch = self._watches[index]
        if watch.generation != self._generation or not watch.is_ready:
            return None
        return watch.marks.get(id(parameter))

    def find_changed(self, index: int) -> frozenset[int]:
        """The parameters, by `id`, that were changed since the last step of their optimizer ended.

        Such as by clipping weights. It is seen by their versions, and by a
        sample of their elements.
        """
        watch = self._watches[index]
        if watch.look is None or not watch.is_ready:
            return frozenset()
        identities, samples, look = watch.look
        with torch.no_grad():
            changed = {identities[place] for place in find_changed(samples, look)}
        for identity, sample in zip(identities, samples, strict=True):
            kept = watch.kept.get(identity)
            if kept is None or kept.find_sample() is not sample:
                # Its memory is another one now.
                changed.add(identity)
        return frozenset(changed)

    def foresee(self, step: int) -> bool:
        """A snapshot was asked for at this step; whether the next one may be due."""
        last = self._last_step
        if last is not None and step > last:
            self._increment = step - last
            self._is_guessing = False
        self._last_step = step
        self._copying = self._increment is None or self._is_due(step + self._increment)
        self._generation += 1
        return self._copying

    def prepare(self, *, copying: bool, is_waiting: bool) -> None:
        """As `foresee`, for who knows by itself when the next snapshot may be taken.

        Args:
            copying: Whether the next step of an optimizer may be the last one
                before a snapshot.
            is_waiting: Whether one is due and not taken yet, so that what has
                been kept still counts.
        """
        self._is_guessing = False
        self._copying = copying
        if not is_waiting:
            self._generation += 1

    @property
    def totals(self) -> list[int]:
        """How many steps each optimizer has ended; empty where one of them cannot be followed."""
        return self._totals

    def close(self) -> None:
        """Leave the optimizers and free the copies."""
        for watch in self._watches:
            watch.remove()
        self._free_all()

    def _free_all(self) -> None:
        self._copying = False
        with self._guard():
            for watch in self._watches:
                watch.free()

    def _copy(self, watch: _Watch) -> bool:
        """Copy what is chosen of an optimizer into buffers that are kept."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        if not self._copies:
            return True
        kept: dict[int, _Kept] = {}
        sources: list[torch.Tensor] = []
        with torch.no_grad():
            for parameter in self._choose(watch.index):
                local = take_local(parameter)[0]
                if not _can_copy(local):
                    continue
                known = watch.kept.get(id(parameter))
                if known is None or not known.fits(parameter, local):
                    known = _Kept(parameter, local)
                kept[id(parameter)] = known
                sources.append(local)
            watch.kept = kept
            if sources:
                torch._foreach_copy_([entry.buffer for entry in kept.values()], sources)
        return True


def _can_copy(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and tensor.numel() > 0
    )


def find_version(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None where torch does not count it."""
    return None if tensor.is_inference() else tensor._version


_SAMPLED = 256


class WeightLook(NamedTuple):
    """What samples of parameters were at a moment.

    Attributes:
        versions: How often each was changed in place; None where torch does
            not count it. What goes through `.data` is not counted.
        elements: Of each device the elements of its samples, joined.
    """

    versions: list[int | None]
    elements: dict[torch.device, Tensor]


def take_sample(local: Tensor) -> Tensor | None:
    """Some elements of a parameter, evenly spaced, as a view that stays with it.

    None where its memory has gaps.
    """
    if local.is_contiguous():
        flat = local.detach().view(-1)
    elif local.dim() == 4 and local.is_contiguous(memory_format=torch.channels_last):
        flat = local.detach().permute(0, 2, 3, 1).view(-1)
    else:
        return None
    return flat[:: max(1, flat.numel() // _SAMPLED)]


def look_at(samples: Sequence[Tensor]) -> WeightLook:
    """Look at samples now; called without gradients."""
    versions = [None if each.is_inference() else each._version for each in samples]
    alike: dict[torch.device, list[Tensor]] = {}
    for each in samples:
        alike.setdefault(each.device, []).append(each)
    # One copy for all of them, which costs as much as one for each of a few.
    return WeightLook(versions, {device: torch.cat(views) for device, views in alike.items()})


def find_changed(samples: Sequence[Tensor], before: WeightLook) -> list[int]:
    """The places of those samples that are not what they were when they were looked at."""
    now = look_at(samples)
    changed = {
        place
        for place, pair in enumerate(zip(before.versions, now.versions, strict=True))
        if pair[0] != pair[1]
    }
    for device, elements in now.elements.items():
        if torch.equal(elements, before.elements[device]):
            continue
        places = [place for place, each in enumerate(samples) if each.device == device]
        sizes = [samples[place].numel() for place in places]
        olds, news = torch.split(before.elements[device], sizes), torch.split(elements, sizes)
        changed.update(
            place
            for place, old, new in zip(places, olds, news, strict=True)
            if not _is_same(old, new)
        )
    return sorted(changed)


def _is_same(old: Tensor, new: Tensor) -> bool:
    """Whether all is equal but for NaN, which equals nothing."""
    return bool(((old == new) | (old.isnan() & new.isnan())).all())
