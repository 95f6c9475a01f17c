"""One training step that is being timed."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.records import SystemTelemetryRecord
from quark_core.writers.device_timing import DeviceEvent, DeviceMarks, PendingSteps, StepTimes


class StepTelemetryScope:
    """Times one step, from `start_step` to `finish` or to the end of the `with` block.

    `SystemTelemetry.start_step` makes it. It belongs to the thread that
    trains; its methods cost microseconds and never wait for a store or a GPU.

    Attributes:
        step: The step's counter.
        epoch: The epoch's, or None.
    """

    __slots__ = (
        "_counts",
        "_end_s",
        "_finish_step",
        "_finished",
        "_metadata",
        "_pending",
        "_ready",
        "_ready_s",
        "_result",
        "_sampled",
        "_start",
        "_start_s",
        "epoch",
        "step",
    )

    def __init__(
        self,
        finish_step: Callable[
            [StepTelemetryScope, bool, bool, str | None], SystemTelemetryRecord | None
        ],
        step: int,
        epoch: int | None,
        *,
        sampled: bool,
        metadata: dict[str, Any] | None = None,
        pending: PendingSteps | None = None,
    ) -> None:
        self._finish_step = finish_step
        self.step = step
        self.epoch = epoch
        self._sampled = sampled
        self._metadata = metadata
        self._pending = pending
        self._finished = False
        self._counts: dict[str, float] | None = None
        self._result: SystemTelemetryRecord | None = None
        self._start: DeviceEvent | None = None
        self._ready: DeviceEvent | None = None
        self._ready_s: float | None = None
        if pending is not None:
            self._start = pending.mark()
        self._start_s = perf_counter() if sampled else 0.0

    def mark_data_ready(self) -> None:
        """Say that the batch is on its device: data time ends here and compute time begins.

        A later call moves the mark. After `finish` it does nothing.
        """
        if self._sampled and not self._finished:
            self._ready_s = perf_counter()
            if self._pending is not None:
                self._ready = self._pending.mark()

    def count(
        self,
        *,
        tokens: float | None = None,
        samples: float | None = None,
        flops: float | None = None,
    ) -> None:
        """Say what the step does, in this process; it is added to what was said of it before.

        It counts in place of what `tokens_per_step` and the like say. A tensor on
        a GPU makes the caller wait for it. After `finish` it does nothing.

        Raises:
            SchemaValidationError: Not a finite number that is not negative; the message names it.
        """
        if self._finished:
            return
        from quark_core.writers.throughput import check_counts

        said = self._counts or {}
        for name, amount in check_counts(
            {"tokens": tokens, "samples": samples, "flops": flops}
        ).items():
            said[name] = said.get(name, 0.0) + amount
        self._counts = said

    def finish(
        self, *, overflow_occurred: bool = False, skipped_step: bool = False
    ) -> SystemTelemetryRecord | None:
        """End the step and record it; a second call returns what the first did and records nothing.

        Args:
            overflow_occurred: The gradients overflowed; counted on every step.
            skipped_step: The optimizer's step was skipped; counted on every step.

        Returns:
            The record; None on a step that the cadence leaves out, and where
            times are measured on a GPU, whose records follow when it has
            finished the step. Without `mark_data_ready` only the time of the
            whole step is known.

        Raises:
            SchemaValidationError: A flag is no truth value; the step goes on.
            InvalidRunStateError: The telemetry is closed or the run has ended.
        """
        return self._finish(overflow_occurred, skipped_step, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._finish(False, False, None if exc_type is None else exc_type.__name__)
        except QuarkError:
            # The user's exception must not be replaced by ours.
            if error is None:
                raise

    def _finish(
        self, overflow_occurred: object, skipped_step: object, raised: str | None
    ) -> SystemTelemetryRecord | None:
        if self._finished:
            return self._result
        if self._sampled:
            self._end_s = perf_counter()
        overflow = overflow_occurred is not False and check_flag(
            overflow_occurred, "overflow_occurred"
        )
        skipped = skipped_step is not False and check_flag(skipped_step, "skipped_step")
        self._finished = True
        self._result = self._finish_step(self, overflow, skipped, raised)
        return self._result

    @property
    def counts(self) -> dict[str, float] | None:
        """What the step has said that it does, or None."""
        return self._counts

    @property
    def start_s(self) -> float | None:
        """When it began, by `perf_counter`; None of a step that the cadence leaves out."""
        return self._start_s if self._sampled else None

    @property
    def sampled(self) -> bool:
        """Whether the cadence asks for a record of this step."""
        return self._sampled

    @property
    def metadata(self) -> dict[str, Any] | None:
        """JSON values that were given with the step, or None."""
        return self._metadata

    def measure_wall_times(self) -> StepTimes:
        """Times by the host's clock, once finished."""
        if self._ready_s is None:
            return StepTimes((self._end_s - self._start_s) * 1000.0, None, None)
        data_ms = (self._ready_s - self._start_s) * 1000.0
        compute_ms = (self._end_s - self._ready_s) * 1000.0
        return StepTimes(data_ms + compute_ms, data_ms, compute_ms)

    def mark_end(self) -> DeviceMarks | None:
        """The moments on the device, the end marked now; None where one could not be marked."""
        if self._pending is None or self._start is None:
            return None
        if self._ready_s is not None and self._ready is None:
            return None
        end = self._pending.mark()
        return None if end is None else DeviceMarks(self._start, self._ready, end)


def check_flag(value: Any, argument: str) -> bool:
    """A truth value, also of numpy or torch; one on a GPU makes the caller wait for it.

    Raises:
        SchemaValidationError: Neither a truth value nor 0 or 1.
    """
    try:
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            value = value.item()
        if isinstance(value, (bool, int, float)) and value in (0, 1):
            return bool(value)
    except Exception as error:
        # A foreign object may raise anything while it is read.
        raise SchemaValidationError(
            f"{argument} must be True or False, but cannot be read: {type(error).__name__}"
        ) from error
    raise SchemaValidationError(f"{argument} must be True or False, not a {type(value).__name__}")
