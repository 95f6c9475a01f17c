"""Writes one run of the exam through the SDK, as a user's training would."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.diagnosis.clocks import StepClock, draw_clock
from benchmarks.diagnosis.scenario import Draw
from quark import (
    HookEngine,
    HookEngineConfig,
    HookScheduleConfig,
    MetricsLogger,
    ParameterDiagnostics,
    ParameterDiagnosticsConfig,
    SystemTelemetry,
    SystemTelemetryConfig,
    TrainingSession,
)

_QUIET = SystemTelemetryConfig(capture_cpu=False, capture_gpu=False)
# Below this share of the wall time on a core, others on the machine slowed the steps.
_CALM_SHARE = 0.9


class SilentRecorder:
    """Takes what a Recorder takes and keeps nothing: for twins, which leave no run."""

    every = 5

    def start(self, model: Any = None, optimizer: Any = None, **options: Any) -> None:
        """Nothing is written."""

    @contextmanager
    def step(self, step: int, *, epoch: int | None = None) -> Iterator[bool]:  # noqa: ARG002
        """No step is probed."""
        yield False

    def log(self, values: Mapping[str, float], **place: Any) -> None:
        """Nothing is written."""

    def validate(self, step: int, values: Mapping[str, float], **place: Any) -> None:
        """Nothing is written."""

    def time(self, step: int, **times: float) -> None:
        """Nothing is written."""


class Recorder:
    """One run: session, metrics, telemetry, layers and parameters behind five calls.

    `start` comes first; the campaign makes the recorder and closes it.

    Args:
        directory: Storage folder of the run, used for nothing else.
        draw: Of the run; timing is drawn from it where the scenario does not say.
        every: Steps from probe to probe, of layers and of parameters.
    """

    def __init__(self, directory: Path, draw: Draw, *, every: int = 5) -> None:
        self.directory = directory
        self.draw = draw
        self.every = every
        self.run_id: str | None = None
        self._session: TrainingSession | None = None
        self._metrics: MetricsLogger | None = None
        self._telemetry: SystemTelemetry | None = None
        self._hooks: HookEngine | None = None
        self._parameters: ParameterDiagnostics | None = None
        self._clock: StepClock | None = None
        self._real = False
        self._wall_s = 0.0
        self._core_s = 0.0
        self._validated: list[int] = []
        self._step = 0
        self._epoch: int | None = None

    def start(
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        config: Mapping[str, Any] | None = None,
        layers: bool = True,
        parameters: bool = True,
        timing: str | StepClock = "drawn",
        grad_scaler: Any = None,
    ) -> None:
        """Start the run.

        Args:
            model, optimizer: As for HookEngine; without a model only metrics
                and times are written.
            config: Of the run.
            layers, parameters: Whether each kind of probe is made.
            timing: `simulated` by a healthy clock, or by the given one; `real`:
                the steps are measured; `manual`: the scenario calls `time`;
                `none`; `drawn`: simulated or none.
            grad_scaler: As for HookEngine.
        """
        self._session = TrainingSession.start_run(
            project="diagnosis",
            config={"scenario": self.draw.name, "seed": self.draw.seed, **(config or {})},
            storage_dir=self.directory,
        )
        self.run_id = self._session.run_id
        self._metrics = MetricsLogger(self._session)
        schedule = HookScheduleConfig(every_n_steps=self.every)
        if model is not None and layers:
            hooks = HookEngineConfig(schedule=schedule, grad_scaler=grad_scaler)
            self._hooks = HookEngine(self._session, model, optimizer, config=hooks)
        if model is not None and parameters:
            kept = ParameterDiagnosticsConfig(schedule=schedule, grad_scaler=grad_scaler)
            self._parameters = ParameterDiagnostics(self._session, model, optimizer, config=kept)
        self._choose_timing(timing)

    @contextmanager
    def step(self, step: int, *, epoch: int | None = None) -> Iterator[bool]:
        """Around forward, backward and `optimizer.step()`; yields whether it is probed."""
        self._step, self._epoch = step, epoch
        probed = False
        wall, core = time.perf_counter(), time.thread_time()
        scope = None
        if self._real and self._telemetry is not None:
            scope = self._telemetry.start_step(step, epoch=epoch)
            scope.mark_data_ready()
        if self._hooks is None:
            yield False
        else:
            with self._hooks.step(step, epoch=epoch) as probed:
                yield probed
        if self._parameters is not None:
            self._parameters.snapshot(step, epoch=epoch)
        if scope is not None:
            scope.finish()
            self._wall_s += time.perf_counter() - wall
            self._core_s += time.thread_time() - core
        if self._clock is not None:
            whole, data, compute = self._clock.take(step, probed=probed)
            self._write_times(step, whole, data, compute)

    def log(
        self, values: Mapping[str, float], *, step: int | None = None, epoch: int | None = None
    ) -> None:
        """Log metrics; of the present step where neither step nor epoch is given."""
        assert self._metrics is not None, "start() comes first"
        if step is None and epoch is None:
            step, epoch = self._step, self._epoch
        for key, value in values.items():
            self._metrics.log(key, float(value), step=step, epoch=epoch)

    def validate(self, step: int, values: Mapping[str, float], *, epoch: int | None = None) -> None:
        """Log metrics of held-out data."""
        self._validated.append(step)
        self.log(values, step=step, epoch=epoch)

    @property
    def val_every(self) -> int | None:
        """Steps from one validation to the next; None with less than two."""
        gaps = sorted(b - a for a, b in pairwise(self._validated))
        return gaps[len(gaps) // 2] if gaps else None

    def time(
        self,
        step: int,
        *,
        step_ms: float,
        data_ms: float | None = None,
        compute_ms: float | None = None,
        skipped: bool = False,
        overflow: bool = False,
    ) -> None:
        """Record what a step took; only with the timing `manual`, which it implies."""
        self._clock, self._real = None, False
        self._open_telemetry().record_step(
            step,
            step_time_ms=step_ms,
            data_time_ms=data_ms,
            compute_time_ms=compute_ms,
            skipped_step=skipped,
            overflow_occurred=overflow,
        )

    def mark_skipped(self, step: int) -> None:
        """Record that the optimizer's step was skipped for an overflow."""
        self._open_telemetry().record_step(step, skipped_step=True, overflow_occurred=True)

    @property
    def was_contended(self) -> bool:
        """Whether times were measured while others had the core: they are then no evidence."""
        return self._real and self._core_s < _CALM_SHARE * self._wall_s

    def close(self) -> None:
        """End the run; safe at any moment."""
        for writer in (self._hooks, self._parameters, self._telemetry, self._metrics):
            if writer is not None:
                writer.close()
        if self._session is not None:
            self._session.end_run()
            self._session = None

    def _choose_timing(self, timing: str | StepClock) -> None:
        if isinstance(timing, StepClock):
            self._clock = timing
            return
        # Of its own stream, so that a scenario's draws do not move with it.
        rng = self.draw.stream("timing")
        if timing == "drawn":
            timing = "simulated" if rng.uniform() < 0.7 else "none"
        if timing == "simulated":
            self._clock = draw_clock(rng)
        elif timing == "real":
            self._real = True
            self._open_telemetry()
        elif timing not in {"manual", "none"}:
            raise ValueError(f"there is no timing {timing!r}")

    def _open_telemetry(self) -> SystemTelemetry:
        assert self._session is not None, "start() comes first"
        if self._telemetry is None:
            self._telemetry = SystemTelemetry(self._session, config=_QUIET)
        return self._telemetry

    def _write_times(self, step: int, whole: float, data: float, compute: float) -> None:
        self._open_telemetry().record_step(
            step,
            epoch=self._epoch,
            step_time_ms=whole,
            data_time_ms=data,
            compute_time_ms=compute,
        )
