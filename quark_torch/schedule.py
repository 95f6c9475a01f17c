"""At which steps something is looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from quark_core.api import SchemaValidationError, check_index


@dataclass(frozen=True, slots=True)
class HookScheduleConfig:
    """Steps at which layers or parameters are sampled.

    Attributes:
        every_n_steps: Interval in steps, counted from `start_step`. None disables it.
        start_step: First step of the interval.
        stop_step: Last step of the interval, or None.
        explicit_steps: Additional steps, also outside these bounds.

    Raises:
        SchemaValidationError: A value is invalid. The message names the field.
    """

    every_n_steps: int | None = 1
    start_step: int = 0
    stop_step: int | None = None
    explicit_steps: tuple[int, ...] = ()
    _explicit: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        every = check_index(self.every_n_steps, "every_n_steps")
        if every == 0:
            raise SchemaValidationError("every_n_steps must be a positive integer or None, got 0")
        start = _require(self.start_step, "start_step")
        stop = check_index(self.stop_step, "stop_step")
        if stop is not None and stop < start:
            raise SchemaValidationError(
                f"stop_step must not be before start_step, got {stop} and {start}"
            )
        given: object = self.explicit_steps
        if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
            raise SchemaValidationError(
                f"explicit_steps must be an iterable of steps, not {type(given).__name__}"
            )
        steps = tuple(_require(step, "explicit_steps") for step in given)
        for name, value in (
            ("every_n_steps", every),
            ("start_step", start),
            ("stop_step", stop),
            ("explicit_steps", steps),
            ("_explicit", frozenset(steps)),
        ):
            object.__setattr__(self, name, value)

    @property
    def never_fires(self) -> bool:
        """Whether no step is sampled."""
        return self.every_n_steps is None and not self._explicit

    def is_due(self, step: int) -> bool:
        """Return whether a step is sampled.

        Args:
            step: Step.
        """
        every = self.every_n_steps
        if every is not None:
            past = step - self.start_step
            stop = self.stop_step
            if past >= 0 and not past % every and (stop is None or step <= stop):
                return True
        return step in self._explicit


def _require(value: object, argument: str) -> int:
    number = check_index(value, argument)
    if number is None:
        raise SchemaValidationError(f"{argument} must be a non-negative integer, not None")
    return number
