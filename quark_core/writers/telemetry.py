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
    """Records step times, CPU, RAM, GPUs, gradient overflows and skipped steps.

    `record_step` and a scope of `start_step` take microseconds: they read
    nothing themselves, but use the newest reading of a sampler in the
    background, whose age is in the record's metadata as `reading_age_ms`.
    Where figures are missing, `unavailable` in the metadata says why, on the
    first such record and whenever the reason changes. A key of the caller's
    own metadata wins over one of ours.

    Mirrored into metrics (`emit_scalar_metrics`) are the times of each
    record, the machine's figures at the first record after each reading, and
    the counts when they have changed: one point for each thing measured,
    however quick the steps are.

    On each node the process of local rank 0 samples the node. Other ranks that
    keep records record their steps only, unless `every_rank` asks for more. Counts
    are of this writer: they begin at 0 with each attempt, and in a forked child. Every
    method may be called from any thread.

    Args:
        session: A TrainingSession, or the RunContext of one.
        config: What is measured, and how often.
        batch_size: As for every writer.
        tokens_per_step, samples_per_step, flops_per_step: What a step of this process does, a
            number or a function that is asked at the end of each step (None where it does not
            know); a step's own `scope.count(tokens=…)` wins. Of each the rate is kept as
            a metric, `system/runtime/tokens_per_s` and so on, at recorded steps.
        flops_per_token: FLOPs by tokens, such as 6 times the parameters of a transformer, where
            they are not given by steps.
        precision: Of the matrix products, which the share of the peak (MFU) is of: fp8, bf16,
            fp16, tf32, fp32, or a torch dtype.
        peak_flops_per_s: What the process's device can do at most; by default as its name says.

    Raises:
        SchemaValidationError: A bad argument; the message names it.
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
        """Begin to time a step; use the scope in a `with`, or call its `finish`.

        Args:
            step: Step counter; it may go backwards.
            epoch: Epoch counter, or None.
            metadata: JSON values, taken as they are now; not looked at on a
                step that the cadence leaves out.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
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
        """Record a step whose times the caller knows; returns at once.

        Args:
            step: Step counter; it may go backwards.
            epoch: Epoch counter, or None.
            step_time_ms, data_time_ms, compute_time_ms: Milliseconds of the whole
                step, until its batch was ready, and from then on; or None.
            overflow_occurred: The gradients overflowed; counted on every step.
            skipped_step: The optimizer's step was skipped; counted on every step.
            metadata: JSON values, taken as they are now; not looked at, like the
                timestamp, on a step that the cadence leaves out.
            timestamp: ISO 8601 text; now by default.

        Returns:
            The record; None on a step that the cadence leaves out.

        Raises:
            SchemaValidationError: A bad argument; the message names it, and
                nothing is counted.
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
        """Read the machine now, on any rank, and record it.

        Takes milliseconds; the first call takes 0.1 s, because shares of time
        need two readings, and the time that the GPU driver takes to open. A
        driver that hangs costs 2 s.

        Args:
            step: Step counter; with it the record's boundary is `step`, else `time`.
            epoch: Epoch counter. Without either, nothing is mirrored into
                metrics, which need one.
            metadata: JSON values, taken as they are now.
            timestamp: ISO 8601 text; now by default.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
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
        """Deliver every accepted record of this run to the primary store; as for every writer.

        Waits a second at most for steps that a GPU has not finished; what is
        left then is recorded with the times of the host.

        Raises:
            SessionStoreError: The store did not acknowledge in time.
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
        """Flush, then return the run's telemetry that fits, in persistence order.

        Args:
            boundary: Only `step`, or only `time`.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.
            limit: The newest N.
            all_attempts: Also what a later attempt, resumed from an earlier
                step, has hidden.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
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
        """Take no more records and let go of the sampler; reading still works.

        Steps that a GPU has not finished after a second are recorded with the
        times of the host. A second call does nothing.

        Raises:
            SessionStoreError: In strict mode, the primary's first delivery error.
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
