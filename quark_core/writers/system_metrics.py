"""SystemMetrics: what the machine does, recorded of every run without being asked for."""

from __future__ import annotations

import time

from quark_core.records import MetricRecord, SystemTelemetryRecord
from quark_core.records.json_object import JsonObject
from quark_core.runs.open_run import OpenRun
from quark_core.system.hardware.readings import HardwareReading, find_local_rank
from quark_core.system.hardware.sampler import Watch, shared_sampler
from quark_core.writers.telemetry_recording import (
    TelemetryRecording,
    find_node,
    lay_out_figures,
)

# Nothing heavy is imported between the start and the first log.
_BEGIN_AFTER_S = 1.0
# A thread wakes a little early or late.
_INTERVAL_SHARE = 0.9
# Of steps, and of overflows and skipped steps, this knows nothing.
_NO_TIMES = (None, None, None)
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
        origin = run.origin
        self._origin = (origin.run_id, origin.writer_id, origin.attempt, origin.rank)
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
