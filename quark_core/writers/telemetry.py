"""SystemTelemetry and SystemMetrics: how long steps take, and what the hardware does meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from math import inf
from time import time_ns
from typing import TYPE_CHECKING, Any, Unpack

from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord, SystemTelemetryRecord
from quark_core.records.base import check_timestamp
from quark_core.records.checks import check_choice
from quark_core.records.json_object import JsonObject
from quark_core.records.query import Query, ReadBounds, check_step, spell_out
from quark_core.records.schema import TELEMETRY_BOUNDARIES
from quark_core.runs.open_run import OpenRun
from quark_core.runs.step_counters import read_step
from quark_core.system.hardware_readings import HardwareReading, find_local_rank
from quark_core.system.hardware_sampler import Watch, shared_sampler
from quark_core.writers.scalars import to_amount
from quark_core.writers.step_timing import StepTelemetryScope, StepTimes, check_flag
from quark_core.writers.telemetry_recording import (
    SystemTelemetryConfig,
    TelemetryRecording,
    find_node,
    lay_out_figures,
    merge_metadata,
    take_metadata,
)

if TYPE_CHECKING:
    from quark_core.writers.step_timing import Amount

_INT64_MAX = 2**63 - 1
_NO_TIMES = StepTimes(None, None, None)


class SystemTelemetry(TelemetryRecording):
    """Recorder of step times and of CPU, memory and GPU metrics.

    `record_step` and the scopes of `start_step` take microseconds: they use the newest reading of a
    background sampler. Its age is in the metadata as `reading_age_ms`. If values are missing,
    `unavailable` in the metadata gives the reason. Metadata that you pass overrides these keys.

    With `emit_scalar_metrics`, step times are also logged as metrics, and system values and counts
    when they change.

    On each node, the process of local rank 0 reads the system metrics. Other recording ranks record
    only their steps, unless `every_rank` is set. Counts start at 0 in each attempt and forked
    child. Thread-safe.

    Args:
        session: A TrainingSession, or its RunContext.
        config: Options. Defaults to `SystemTelemetryConfig()`.
        batch_size: Number of records that `flush()` returns and that are written together. Defaults
            to 20.
        tokens_per_step, samples_per_step, flops_per_step: Work of a step in this process: a number,
            or a function called at the end of each step. `scope.count(tokens=…)` overrides it. The
            rates are logged as metrics such as `system/runtime/tokens_per_s`.
        flops_per_token: FLOPs per token, such as 6 times the number of parameters of a transformer.
        precision: Precision of the matrix products, for the MFU: fp8, bf16, fp16, tf32, fp32 or a
            torch dtype. Defaults to bf16.
        peak_flops_per_s: Peak of the device. Defaults to the peak implied by its name.

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
    """

    def __init__(
        self,
        session: object,
        *,
        config: SystemTelemetryConfig | None = None,
        batch_size: int = 20,
        tokens_per_step: Amount = None,
        samples_per_step: Amount = None,
        flops_per_step: Amount = None,
        flops_per_token: float | None = None,
        precision: object = "bf16",
        peak_flops_per_s: float | None = None,
    ) -> None:
        amounts = (tokens_per_step, samples_per_step, flops_per_step, flops_per_token)
        make = None
        if amounts.count(None) < len(amounts) or peak_flops_per_s is not None:
            from quark_core.writers.step_timing import make_throughput

            make = partial(
                make_throughput,
                tokens_per_step=tokens_per_step,
                samples_per_step=samples_per_step,
                flops_per_step=flops_per_step,
                flops_per_token=flops_per_token,
                precision=precision,
                peak_flops_per_s=peak_flops_per_s,
            )
        super().__init__(session, config=config, batch_size=batch_size, throughput=make)

    def start_step(
        self, step: int, *, epoch: int | None = None, metadata: Mapping[str, Any] | None = None
    ) -> StepTelemetryScope:
        """Start to time a step; use the scope in a `with` block, or call its `finish`.

        Args:
            step: Step; it may decrease.
            epoch: Epoch, or None.
            metadata: JSON values; copied. Ignored if the step is not sampled.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            InvalidRunStateError: The telemetry is closed or the run has ended.
        """
        if self._closed or self._run.refusal is not None:
            self._check_open("start_step")
        if type(step) is not int or step < 0 or step > _INT64_MAX:
            step = _require_step(self._run, step)
        if epoch is not None and (type(epoch) is not int or epoch < 0 or epoch > _INT64_MAX):
            epoch = check_step(epoch, "epoch")
        if step % self._every:
            return StepTelemetryScope(self._finish_step, step, epoch, sampled=False)
        if self._captures and not (self._watching and shared_sampler.running):
            self._start_watching()
        if not self._clock_is_open:
            self._open_clock()
        if self._pending is not None:
            self._pending.poll()
        return StepTelemetryScope(
            self._finish_step,
            step,
            epoch,
            sampled=True,
            metadata=take_metadata(metadata),
            pending=self._pending,
        )

    def record_step(
        self,
        step: int,
        *,
        epoch: int | None = None,
        step_time_ms: float | None = None,
        data_time_ms: float | None = None,
        compute_time_ms: float | None = None,
        overflow_occurred: bool = False,
        skipped_step: bool = False,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> SystemTelemetryRecord | None:
        """Record a step with known times; returns at once.

        Args:
            step: Step; it may decrease.
            epoch: Epoch, or None.
            step_time_ms, data_time_ms, compute_time_ms: Milliseconds of the whole step, of its part
                until the batch was ready, and of the rest. Or None.
            overflow_occurred: Whether gradients overflowed. Counted at each step. Defaults to
                False.
            skipped_step: Whether the optimizer skipped its step. Counted at each step. Defaults to
                False.
            metadata: JSON values; copied. Ignored, like the timestamp, if the step is not sampled.
            timestamp: Time as ISO 8601 text. Defaults to now.

        Returns:
            The record, or None if the step is not sampled.

        Raises:
            SchemaValidationError: An argument is invalid, and nothing is counted. The message names
                it.
            InvalidRunStateError: The telemetry is closed or the run has ended.
        """
        if self._closed or self._run.refusal is not None:
            self._check_open("record_step")
        if type(step) is not int or step < 0 or step > _INT64_MAX:
            step = _require_step(self._run, step)
        if epoch is not None and (type(epoch) is not int or epoch < 0 or epoch > _INT64_MAX):
            epoch = check_step(epoch, "epoch")
        if step_time_ms is not None:
            step_time_ms = _check_time(step_time_ms, "step_time_ms")
        if data_time_ms is not None:
            data_time_ms = _check_time(data_time_ms, "data_time_ms")
        if compute_time_ms is not None:
            compute_time_ms = _check_time(compute_time_ms, "compute_time_ms")
        overflow = skipped = False
        if overflow_occurred is not False:
            overflow = check_flag(overflow_occurred, "overflow_occurred")
        if skipped_step is not False:
            skipped = check_flag(skipped_step, "skipped_step")
        if self._throughput is not None:
            self._throughput.count_step(None, None, step_time_ms)
        if step % self._every:
            if overflow or skipped:
                self._count(overflow, skipped)
            return None
        own = take_metadata(metadata)
        time_us = time_ns() // 1000 if timestamp is None else check_timestamp(timestamp)
        counts = self._count(overflow, skipped)
        figures, items = self._find_figures()
        if self._throughput is not None:
            self._put_rates(step, epoch, time_us)
        return self._put(
            "step",
            step,
            epoch,
            time_us,
            figures,
            counts,
            merge_metadata(items, own),
            StepTimes(step_time_ms, data_time_ms, compute_time_ms),
        )

    def sample(
        self,
        *,
        step: int | None = None,
        epoch: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> SystemTelemetryRecord:
        """Read the system metrics now, on any rank, and record them.

        Takes milliseconds. The first call takes 0.1 s plus the time to open the GPU driver. A
        driver that hangs costs 2 s.

        Args:
            step: Step. With a step, `boundary` of the record is `step`, else `time`.
            epoch: Epoch. Without step and epoch, no metrics are logged.
            metadata: JSON values; copied.
            timestamp: Time as ISO 8601 text. Defaults to now.

        Returns:
            The record.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            InvalidRunStateError: The telemetry is closed or the run has ended.
        """
        self._check_open("sample")
        step = read_step(self._run, step)
        epoch = check_step(epoch, "epoch")
        own = take_metadata(metadata)
        given_us = None if timestamp is None else check_timestamp(timestamp)
        reading = None
        if self._config.capture_cpu or self._config.capture_gpu:
            reading = shared_sampler.read_now(
                processor=self._config.capture_cpu, gpus=self._config.capture_gpu
            )
        figures = self._lay_out(reading)
        items: dict[str, Any] = {}
        if figures.unavailable is not None:
            items["unavailable"] = figures.unavailable
        return self._put(
            "time" if step is None else "step",
            step,
            epoch,
            time_ns() // 1000 if given_us is None else given_us,
            figures,
            (self._overflow_count, self._skipped_step_count),
            merge_metadata(items, own),
            _NO_TIMES,
        )

    def flush(self) -> tuple[SystemTelemetryRecord, ...]:
        """Deliver all accepted records of this run to the primary store.

        Waits up to one second for steps on a GPU. Steps that are then unfinished are recorded with
        host times.

        Raises:
            SessionStoreError: The store did not answer in time.
        """
        self.settle()
        return super().flush()

    @spell_out(ReadBounds, before="limit")
    def read(
        self,
        *,
        boundary: str | None = None,
        limit: int | None = None,
        all_attempts: bool = False,
        **bounds: Unpack[ReadBounds],
    ) -> tuple[SystemTelemetryRecord, ...]:
        """Flush, then read the run's telemetry in order of storage.

        Args:
            boundary: `step` or `time`. Defaults to both.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.
            limit: Maximum number of records; the newest are kept. Defaults to all.
            all_attempts: If True, include records that a later attempt replaced. Defaults to False.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            SessionStoreError: The store cannot be read.
        """
        if boundary is not None:
            check_choice(boundary, "boundary", TELEMETRY_BOUNDARIES)
        query = Query.build(
            equals={"boundary": boundary},
            **bounds,
            limit=limit,
            all_attempts=all_attempts,
        )
        self.settle()
        return self._run.read(self.KIND, query).to_records()  # type: ignore[return-value]

    def close(self) -> None:
        """Accept no more records and release the sampler; reading still works.

        Waits up to one second for steps on a GPU. Steps that are then unfinished are recorded with
        host times. A second call does nothing.

        Raises:
            SessionStoreError: In strict mode, the primary store's first delivery error.
        """
        self.settle()
        try:
            super().close()
        finally:
            shared_sampler.unwatch(self._watch)


def _require_step(run: OpenRun, step: object) -> int:
    checked = read_step(run, step)
    if checked is None:
        raise SchemaValidationError("step is required")
    return checked


def _check_time(value: float, argument: str) -> float:
    if type(value) is not float:
        value = to_amount(value, argument, "telemetry.record_step")
    if not 0.0 <= value < inf:
        raise SchemaValidationError(
            f"{argument} must be a finite, non-negative number of milliseconds, got {value}"
        )
    return value


# Nothing heavy is imported between the start and the first log.
_BEGIN_AFTER_S = 1.0
# A thread wakes a little early or late.
_INTERVAL_SHARE = 0.9
# Of overflows and skipped steps this knows nothing.
_NO_COUNTS = (0, 0)


class SystemMetrics:
    """Records processors, memory, disks, network and GPUs at an interval.

    The records are `SystemTelemetryRecord` of the boundary `time`, at the step that training has
    come to; `metadata` has disks and network. Where a SystemTelemetry of the user's records the
    machine, nothing is recorded twice. On each node the process of local rank 0 does it, on the
    thread that reads the machine for all: what hangs there holds up nobody. Nothing is recorded
    in a forked child, nor of a run of less than a second.

    Args:
        run: The run.
        interval_s: Seconds between two records.
    """

    def __init__(self, run: OpenRun, interval_s: float) -> None:
        self._run = run
        self._interval_s = interval_s
        self._channel = run.stream.channel(SystemTelemetryRecord.KIND)
        self._origin = run.origin.head
        self._node = find_node()
        self._last_s = 0.0
        self._has_waited = False
        self._told: dict[str, str] | None = None
        self._seen = 0
        self._watch = Watch(
            interval_s,
            processor=True,
            gpus=True,
            traffic=True,
            wanted=lambda: not run.is_over,
            begin_at_s=time.monotonic() + min(_BEGIN_AFTER_S, interval_s),
            on_reading=self._note,
        )

    def start(self) -> None:
        """Record from now on, where this process is the one of its node that does."""
        if find_local_rank() == 0:
            shared_sampler.watch(self._watch)

    def stop(self) -> None:
        """Record no more."""
        shared_sampler.unwatch(self._watch)

    def _note(self, reading: HardwareReading) -> None:
        """Record a reading; called by the thread that reads."""
        run = self._run
        now_s = time.monotonic()
        if run.is_over or now_s - self._last_s < _INTERVAL_SHARE * self._interval_s:
            return
        processor = reading.processor
        if not self._has_waited and processor and processor.cpu_usage_percent is None:
            self._has_waited = True  # shares of time need a second reading, which follows soon
            return
        self._last_s = now_s
        if self._is_done_by_user():
            return
        figures = lay_out_figures(
            reading, capture_cpu=True, capture_gpu=True, gpu_index=None, device_index=None
        )
        metadata: dict[str, object] = dict(reading.traffic or {})
        if figures.unavailable != self._told:
            self._told = figures.unavailable
            if figures.unavailable is not None:
                metadata["unavailable"] = figures.unavailable
        step, epoch = self._find_place()
        self._channel.put(
            SystemTelemetryRecord(  # type: ignore[call-arg]
                *self._origin,
                self._channel.take_sequence(),
                time.time_ns() // 1000,
                "time",
                step,
                epoch,
                *_NO_TIMES,
                *figures.machine,  # type: ignore[arg-type]
                *_NO_COUNTS,
                figures.gpus,
                self._node,
                JsonObject(metadata) if metadata else None,
            )
        )
        self._seen = self._channel.count_drawn()

    def _is_done_by_user(self) -> bool:
        """Whether a writer of the user's has recorded the machine since the last time."""
        drawn = self._channel.count_drawn()
        has_moved, self._seen = drawn != self._seen, drawn
        return has_moved and any(
            isinstance(writer, TelemetryRecording) and writer.records_machine
            for writer in list(self._run.writers)
        )

    def _find_place(self) -> tuple[int | None, int | None]:
        """Step and epoch of the newest metric."""
        channel = self._run.stream.channel(MetricRecord.KIND)
        try:
            item = channel.items[-1]
        except IndexError:
            item = channel.newest
        if item is None:
            return None, None
        return (item[2], item[3]) if type(item) is tuple else (item.step, item.epoch)
