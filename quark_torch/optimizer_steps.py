"""Follows the steps of optimizers and keeps what parameters were before the last one."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from quark_torch.parameter_list import take_local

__all__ = ["GradientMark", "OptimizerSteps", "StepOutcome", "find_version"]

# Until the second snapshot little is known of the loop: so many steps are copied on a guess.
_GUESSED_COPIES = 32
_REMEMBERED_INTERVALS = 4


class GradientMark(NamedTuple):
    """That a gradient was there when its optimizer's step ended, and its version then."""

    version: int | None


class StepOutcome(NamedTuple):
    """What is known of one optimizer since the last snapshot.

    Attributes:
        steps: Steps that it began.
        missing: Why there is no update, or None where there is one.
    """

    steps: int
    missing: str | None


class _Kept:
    """A parameter and a copy of it from before the step."""

    __slots__ = ("buffer", "parameter")

    def __init__(self, parameter: torch.Tensor, local: torch.Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.buffer = torch.empty_like(local)

    def fits(self, parameter: torch.Tensor, local: torch.Tensor) -> bool:
        buffer = self.buffer
        return (
            self.parameter() is parameter
            and buffer.shape == local.shape
            and buffer.dtype == local.dtype
            and buffer.device == local.device
        )


class _Watch:
    """One optimizer: its steps since the last snapshot and what is kept of it."""

    __slots__ = (
        "begun",
        "copies_from",
        "disabled",
        "finished",
        "generation",
        "handles",
        "intervals",
        "is_held",
        "is_ready",
        "kept",
        "marks",
        "optimizer",
    )

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.handles: list[Any] = []
        self.generation = 0
        self.begun = self.finished = 0
        # The fewest steps that lay between two snapshots lately: from the step
        # of that number on, any may be the last one.
        self.copies_from = 1
        self.intervals: deque[int] = deque(maxlen=_REMEMBERED_INTERVALS)
        self.is_held = self.is_ready = False
        self.disabled: str | None = None
        self.kept: dict[int, _Kept] = {}
        self.marks: dict[int, GradientMark] = {}

    def roll(self, generation: int) -> None:
        """Begin a new interval between snapshots."""
        # What came before the first snapshot tells nothing of the loop.
        if self.begun and self.generation:
            self.intervals.append(self.begun)
            self.copies_from = min(self.intervals)
        self.generation = generation
        self.begun = self.finished = 0
        self.is_held = self.is_ready = False
        self.marks.clear()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def free(self) -> None:
        self.kept.clear()
        self.marks.clear()
        self.is_held = self.is_ready = False


class _StepHook:
    """Called by an optimizer; holds only weakly what it calls, and never changes a step."""

    __slots__ = ("_index", "_is_post", "_pass_on_untraced", "_steps")

    def __init__(self, steps: OptimizerSteps | None, index: int, *, is_post: bool) -> None:
        # A compiled step runs it between its graphs, which it would break into pieces otherwise.
        self._pass_on_untraced: Callable[[], None] = torch.compiler.disable(  # type: ignore[no-untyped-call]
            self._pass_on
        )
        self._steps = None if steps is None else weakref.ref(steps)
        self._index = index
        self._is_post = is_post

    def __call__(self, _optimizer: object, _arguments: object, _keywords: object) -> None:
        if torch.compiler.is_compiling():
            self._pass_on_untraced()
        else:
            self._pass_on()

    def _pass_on(self) -> None:
        steps = None if self._steps is None else self._steps()
        if steps is None:
            return
        if self._is_post:
            steps.end(self._index)
        else:
            steps.begin(self._index)

    def __deepcopy__(self, _memo: object) -> _StepHook:
        return _make_inert()

    def __reduce__(self) -> tuple[Callable[[], _StepHook], tuple[()]]:
        return _make_inert, ()


def _make_inert() -> _StepHook:
    """A hook of nobody: what a copy of an optimizer gets."""
    return _StepHook(None, 0, is_post=False)


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
        self._watches = [_Watch(optimizer) for optimizer in optimizers]
        self._generation = 0
        self._copying = True
        self._last_step: int | None = None
        self._increment: int | None = None
        self._guard = guard

    def attach(self) -> None:
        """Begin to follow the optimizers."""
        for index, watch in enumerate(self._watches):
            try:
                watch.handles = [
                    watch.optimizer.register_step_pre_hook(_StepHook(self, index, is_post=False)),
                    watch.optimizer.register_step_post_hook(_StepHook(self, index, is_post=True)),
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

    def begin(self, index: int) -> None:
        """An optimizer is about to step."""
        watch = self._watches[index]
        if watch.generation != self._generation:
            watch.roll(self._generation)
        watch.begun += 1
        watch.is_held = watch.is_ready = False
        if not self._copying or watch.begun < watch.copies_from or watch.disabled is not None:
            return
        if self._is_over():
            self.close()
            return
        if self._increment is None and watch.begun > _GUESSED_COPIES:
            watch.kept.clear()
            return
        try:
            with self._guard():
                watch.is_held = self._copy(index, watch)
        except Exception as error:  # noqa: BLE001 - the user's step must go on
            watch.free()
            watch.disabled = "copy_failed"
            self._on_failure(watch.disabled, error)

    def end(self, index: int) -> None:
        """An optimizer has made its step."""
        watch = self._watches[index]
        watch.finished += 1
        if not watch.is_held:
            return
        watch.is_held, watch.is_ready = False, True
        try:
            with self._guard():
                watch.marks = {
                    id(parameter): GradientMark(find_version(take_local(gradient)[0]))
                    for parameter in self._choose(index)
                    if (gradient := parameter.grad) is not None
                }
                self._on_end(index)
        except Exception as error:  # noqa: BLE001 - the user's step must go on
            self._on_failure("gradients_unread", error)

    def review(self, index: int) -> StepOutcome:
        """What one optimizer has done since the last snapshot."""
        watch = self._watches[index]
        if watch.disabled is not None:
            return StepOutcome(watch.begun, watch.disabled)
        if watch.generation != self._generation or not watch.begun:
            return StepOutcome(0, "no_optimizer_step")
        missing: str | None = None
        if watch.is_held or watch.finished < watch.begun:
            missing = "optimizer_step_failed"
        elif not watch.is_ready:
            missing = "step_not_foreseen"
        return StepOutcome(watch.begun, missing)

    def has_stepped(self, index: int) -> bool:
        """Whether an optimizer has ended a step since the last snapshot."""
        watch = self._watches[index]
        return watch.generation == self._generation and watch.finished > 0

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

    def foresee(self, step: int) -> bool:
        """A snapshot was asked for at this step; whether the next one may be due."""
        last = self._last_step
        if last is not None and step > last:
            self._increment = step - last
        self._last_step = step
        self._copying = self._increment is None or self._is_due(step + self._increment)
        self._generation += 1
        return self._copying

    def close(self) -> None:
        """Leave the optimizers and free the copies."""
        self._copying = False
        with self._guard():
            for watch in self._watches:
                watch.remove()
                watch.free()

    def _copy(self, index: int, watch: _Watch) -> bool:
        """Copy what is chosen of an optimizer into buffers that are kept."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        if not self._copies:
            return True
        kept: dict[int, _Kept] = {}
        sources: list[torch.Tensor] = []
        with torch.no_grad():
            for parameter in self._choose(index):
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
