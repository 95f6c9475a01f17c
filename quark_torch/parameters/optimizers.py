"""The optimizers and GradScalers that step on a model: their modules and step counts."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from quark_torch.parameters.listing import find_inner_optimizers, hold_parameters

OnChange = Callable[[list[torch.optim.Optimizer]], None]

# Between an optimizer's step and the GradScaler's there are at most so many calls.
_MAX_FRAMES = 10
# At so many steps a GradScaler is looked for, at first and where somebody needs to know it.
_FIRST_LOOKS = 16
_LOOKS = 4
_SCALER_STEP = torch.amp.GradScaler.step.__code__


class _Known(NamedTuple):
    """An optimizer that was looked at: how many groups it had, and whether it is the model's."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    group_count: int
    is_own: bool


class OptimizerFinder:
    """Follows which optimizers a model has, where some were named at first, and its GradScaler.

    One that nobody has named, and that steps on a parameter of the model,
    takes the place of those that hold a parameter which it holds too, and of
    those whose parameters the model has no more. One that had to go and steps
    again comes back beside the others. An optimizer whose step is compiled is
    not seen.

    A GradScaler is seen when it first makes a step of an optimizer of the model.

    Holds the model and the optimizers weakly.

    Args:
        model: The model.
        optimizers: Those that were named; without one, none is looked for.
        on_change: Called with the optimizers as they are from now on, before
            the first step of the new one; it may raise nothing.
        on_scaler: Called with each GradScaler that is switched on and was not
            seen in the step before, while its scale is still that of the
            gradients; None where it is known.

    Attributes:
        on_step: Called before each step of an optimizer of the model; it may
            raise nothing. None for nothing.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        on_change: OnChange,
        on_scaler: Callable[[Any], None] | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._on_change = on_change
        self._on_scaler = on_scaler
        self._scaler: Any = None
        self._looks = 0 if on_scaler is None else _FIRST_LOOKS
        self._current: list[weakref.ref[torch.optim.Optimizer]] = []
        self._known: dict[int, _Known] = {}
        self._replaced: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.on_step: Callable[[], None] | None = None
        self._handle: Any = None
        self._leader: OptimizerFinder | None = None
        self._led: list[OptimizerFinder] = []
        self._take(optimizers)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that are followed now."""
        return [one for reference in self._current if (one := reference()) is not None]

    def attach(self) -> None:
        """Begin to look at every optimizer's steps; costs each a fraction of a microsecond."""
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(_make_hook(self))

    def detach(self) -> None:
        """Look no more."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def lead(self, other: OptimizerFinder) -> None:
        """See for another finder of the same model too, which looks no more by itself."""
        other.detach()
        other._leader = self
        self._led.append(other)

    def name(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Take these in place of those that are followed."""
        self._replaced.update(one for one in self.optimizers if one not in optimizers)
        self._take(optimizers)
        self._on_change(list(optimizers))

    def look_again(self) -> None:
        """Look for another GradScaler at the next steps: what is read now depends on its scale."""
        if self._leader is not None:
            self._leader.look_again()
        elif self._on_scaler is not None:
            self._looks = max(self._looks, _LOOKS)

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        known = self._known.get(id(optimizer))
        if (
            known is None
            or known.optimizer() is not optimizer
            or known.group_count != len(optimizer.param_groups)
        ):
            known = self._meet(optimizer)
        if known.is_own:
            for one in (self, *self._led):
                if one.on_step is not None:
                    one.on_step()
        if self._looks and known.is_own and self._on_scaler is not None:
            self._looks -= 1
            scaler = _find_stepping_scaler()
            if scaler is not None and scaler is not self._scaler and scaler.is_enabled():
                self._scaler = scaler
                for one in (self, *self._led):
                    if one._on_scaler is not None:
                        one._on_scaler(scaler)

    def _meet(self, optimizer: torch.optim.Optimizer) -> _Known:
        """An optimizer steps that was not looked at, or not since it has got other groups."""
        model = self._model()
        own = set() if model is None else {id(parameter) for parameter in model.parameters()}
        held = hold_parameters(optimizer) & own
        self._know(optimizer, own)
        if held and self._current and optimizer not in self.optimizers:
            self._adopt(optimizer, held, own)
        return self._known[id(optimizer)]

    def _adopt(self, new: torch.optim.Optimizer, held: set[int], own: set[int]) -> None:
        comes_back = new in self._replaced
        inner = find_inner_optimizers(new)
        found: list[torch.optim.Optimizer] = []
        for old in self.optimizers:
            theirs = hold_parameters(old) & own
            is_replaced = not comes_back and (not theirs or theirs & held)
            if not is_replaced and old not in inner:
                found.append(old)
                continue
            self._replaced.add(old)
            if new not in found:
                found.append(new)
        if new not in found:
            found.append(new)
        for one in (self, *self._led):
            one._take(found)
            one._on_change(found)

    def _take(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._current = [weakref.ref(one) for one in optimizers]
        for one in self._replaced:
            self._known.pop(id(one), None)
        model = self._model()
        own = set() if model is None else {id(parameter) for parameter in model.parameters()}
        for optimizer in optimizers:
            for one in (optimizer, *find_inner_optimizers(optimizer)):
                self._know(one, own)

    def _know(self, optimizer: torch.optim.Optimizer, own: set[int]) -> None:
        held = hold_parameters(optimizer)
        groups = getattr(optimizer, "param_groups", ())
        known = _Known(weakref.ref(optimizer), len(groups), not held.isdisjoint(own))
        self._known[id(optimizer)] = known


def _make_hook(finder: OptimizerFinder) -> Callable[[torch.optim.Optimizer, Any, Any], None]:
    """What every optimizer of the process calls: a function, which is called fastest.

    It holds its finder weakly, and changes no step.
    """
    reference = weakref.ref(finder)

    def see(optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        # A compiled step would be broken into pieces by it.
        if torch.compiler.is_compiling():
            return
        found = reference()
        if found is not None:
            found.see(optimizer)

    return see


def _find_stepping_scaler() -> Any:
    """The GradScaler whose step the optimizer's step is a part of, or None."""
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame.f_code is _SCALER_STEP:
            return frame.f_locals.get("self")
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


class _Site(Protocol):
    """An instrumented module, as HookEngine has them."""

    name: str
    module: weakref.ref[nn.Module]


class OptimizerMembership:
    """Tells modules whose own trainable parameters are in no optimizer.

    The answer is worked out again when an optimizer has got another group of parameters.

    Args:
        optimizers: The model's optimizers.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = [weakref.ref(one) for one in optimizers]
        self._counted = -1
        self._outside: frozenset[str] = frozenset()

    def follow(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Ask these from now on."""
        self._optimizers = [weakref.ref(one) for one in optimizers]
        self._counted = -1
        self._outside = frozenset()

    def find_outside(self, sites: Sequence[_Site]) -> frozenset[str]:
        """Names of the modules that are left out; none where no optimizer was given."""
        if not self._optimizers:
            return self._outside
        known = [one for reference in self._optimizers if (one := reference()) is not None]
        groups = 0
        for one in known:
            groups += len(one.param_groups)
        if groups != self._counted:
            self._counted = groups
            self._outside = _list_outside(known, sites)
        return self._outside


def list_foreign(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> list[tuple[int, torch.optim.Optimizer]]:
    """The optimizers, with their indexes, that have no parameter of a model that has some."""
    own = {id(parameter) for parameter in model.parameters()}
    return [
        (index, one)
        for index, one in enumerate(optimizers)
        if own and own.isdisjoint(hold_parameters(one))
    ]


def describe_foreign(index: int, optimizer: torch.optim.Optimizer) -> str:
    """What is told of an optimizer of another model."""
    return (
        f"{type(optimizer).__name__} (optimizer {index}) has no parameters of this model. Was "
        "it created for another model, or before the model's parameters were replaced?"
    )


def _list_outside(
    optimizers: Sequence[torch.optim.Optimizer], sites: Sequence[_Site]
) -> frozenset[str]:
    inside = {
        id(each) for one in optimizers for group in one.param_groups for each in group["params"]
    }
    if not inside:
        return frozenset()
    out = set()
    for site in sites:
        module = site.module()
        if module is None:
            continue
        trained = [each for each in module.parameters(recurse=False) if each.requires_grad]
        if trained and not any(id(each) in inside for each in trained):
            out.add(site.name)
    return frozenset(out)


# Before an optimizer's first step: so many steps of the loop are waited for it.
_FIRST_WAIT = 32


class _Rhythm:
    """One optimizer: how many of the loop's steps lie between two of its own."""

    __slots__ = ("count", "has_stepped", "interval", "since")

    def __init__(self) -> None:
        self.count = 0
        self.interval: int | None = None
        self.since = 0
        self.has_stepped = False

    @property
    def is_active(self) -> bool:
        """Whether it has stepped before, and as lately as it is wont to."""
        return self.interval is not None and self.since < 2 * self.interval


class OptimizerPace:
    """Moves what is due at a step of the loop to the step in which the optimizers step.

    A loop may count micro-batches, samples or epochs. What is due is what the
    loop's own counter says: a multiple of `every_n_steps`, or the first step
    past one. Parameters are then looked at where the optimizers have stepped
    since: all that step at least as often as something is due, or one, where
    none does. One that has not stepped for twice as long as it is wont to is
    not waited for. Layers are looked at in the step in which that is expected.

    Not for several threads.

    Args:
        every_n_steps: The cadence, in steps of the loop.

    Attributes:
        is_waiting: Whether a look at the parameters is due and has not taken place.
        is_last: Whether the loop's step that is to end is its last one.
    """

    def __init__(self, every_n_steps: int) -> None:
        self._every = every_n_steps
        self._last: int | None = None
        # The first multiple past the last step, and the longest interval of an optimizer.
        self._next_due = 0
        self._longest = 1
        self._increment = 1
        self._rhythms: list[_Rhythm] = []
        self._waited = 0
        self._wants_layers = False
        self._has_taken = False
        self.is_waiting = False
        self.is_last = False

    def skip(self, step: int) -> None:
        """The loop begins with this step: what was due before it is due now."""
        if self._last is None:
            self._last = min(step, 0) - 1

    def probes(self, step: int) -> bool:
        """Whether layers are looked at in a step of the loop that begins."""
        # Asked at every step of the loop, most of which are nothing.
        if not (self._wants_layers or step >= self._next_due or self._is_due(step)):
            return False
        if self._wants_layers and not self.is_waiting:
            # The optimizers stepped earlier than was expected.
            return True
        together, any_of = self._choose()
        if together:
            # What they did before something was due counts no more.
            return all(
                (self.is_waiting and each.has_stepped) or _steps_next(each) for each in together
            )
        return not any_of or any(_steps_next(each) for each in any_of)

    def end(self, step: int, counts: Sequence[int], was_skipped: Callable[[], bool]) -> bool:
        """A step of the loop has ended.

        Args:
            step: The loop's counter.
            counts: How many steps each optimizer has made so far; empty where
                none can be followed.
            was_skipped: Asked whether a GradScaler left the optimizers' step out.

        Returns:
            Whether parameters are to be looked at now.
        """
        last = self._last
        is_due = last is None or not last <= step < self._next_due
        if not (is_due or self._wants_layers or self.is_waiting):
            # Most steps are of this kind, and have to cost next to nothing.
            self._note(step, counts)
            return False
        was_probed = self.probes(step)
        if is_due:
            is_due = self._is_due(step)
            self._next_due = (step // self._every + 1) * self._every
        if is_due:
            self._wants_layers = True
            if not self.is_waiting:
                self.is_waiting, self._waited = True, 0
                for rhythm in self._rhythms:
                    rhythm.has_stepped = False
        if was_probed:
            self._wants_layers = False
        self._note(step, counts)
        if not self.is_waiting:
            return False
        self._waited += 1
        is_time = self._have_stepped() or was_skipped() or (self.is_last and not self._has_taken)
        if is_time:
            self.is_waiting, self._has_taken = False, True
        return is_time

    def _note(self, step: int, counts: Sequence[int]) -> None:
        """Keep how far the loop and its optimizers have come."""
        last, self._last = self._last, step
        if last is not None and step > last:
            self._increment = step - last
        rhythms = self._rhythms
        if len(counts) != len(rhythms):
            rhythms = (rhythms + [_Rhythm() for _ in counts])[: len(counts)]
            self._rhythms = rhythms
        for rhythm, count in zip(rhythms, counts, strict=True):
            if count == rhythm.count:
                rhythm.since += 1
                continue
            rhythm.count, rhythm.has_stepped = count, True
            rhythm.interval, rhythm.since = rhythm.since + 1, 0
            if rhythm.interval > self._longest:
                self._longest = rhythm.interval

    @property
    def is_soon(self) -> bool:
        """Whether the next step of an optimizer may be one that is looked at."""
        if self.is_waiting or self._last is None:
            return True
        if self._next_due > self._last + self._longest * self._increment:
            return False
        ahead = [
            each.interval - each.since
            for each in self._rhythms
            if each.interval is not None and each.interval > each.since
        ]
        return self._next_due <= self._last + min(ahead, default=1) * self._increment

    def _is_due(self, step: int) -> bool:
        past = step % self._every
        last = self._last
        return not past or (last is not None and last < step - past)

    def _choose(self) -> tuple[list[_Rhythm], list[_Rhythm]]:
        """The optimizers that are waited for together, and those of which one is enough."""
        active = [each for each in self._rhythms if each.is_active]
        longest = max(1, self._every // self._increment)
        return [each for each in active if (each.interval or 0) <= longest], active

    def _have_stepped(self) -> bool:
        if not self._rhythms:
            return True
        together, any_of = self._choose()
        if together:
            return all(each.has_stepped for each in together)
        if any_of:
            return any(each.has_stepped for each in any_of)
        has_begun = any(each.interval is not None for each in self._rhythms)
        return has_begun or self._has_taken or self._waited >= _FIRST_WAIT


def _steps_next(rhythm: _Rhythm) -> bool:
    return rhythm.interval is not None and rhythm.since + 1 >= rhythm.interval
