"""At which of a loop's steps its optimizers step, and so when a probe that is due takes place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
