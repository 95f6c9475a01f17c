"""One call for everything: layers, parameters and telemetry of a training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from torch import nn

from quark_core.errors import InvalidRunStateError, SchemaValidationError
from quark_core.query import check_index
from quark_core.writers.step_scope import StepTelemetryScope
from quark_core.writers.telemetry import SystemTelemetry
from quark_core.writers.telemetry_config import SystemTelemetryConfig
from quark_torch.hook_config import HookEngineConfig
from quark_torch.hook_engine import HookEngine
from quark_torch.layer_filter import LayerFilterConfig
from quark_torch.parameter_config import ParameterDiagnosticsConfig
from quark_torch.parameter_diagnostics import ParameterDiagnostics
from quark_torch.schedule import HookScheduleConfig

__all__ = ["TrainingWatch", "watch"]


class TrainingWatch:
    """Watches a training loop; made by `watch`.

    Attributes:
        hooks: The HookEngine, or None.
        parameters: The ParameterDiagnostics, or None.
        telemetry: The SystemTelemetry, or None.
    """

    def __init__(
        self,
        hooks: HookEngine | None,
        parameters: ParameterDiagnostics | None,
        telemetry: SystemTelemetry | None,
    ) -> None:
        self.hooks = hooks
        self.parameters = parameters
        self.telemetry = telemetry
        self._closed = False
        self._step: int | None = None
        self._epoch: int | None = None
        self._metadata: Mapping[str, Any] | None = None
        self._scope: StepTelemetryScope | None = None

    def step(
        self, step: int, *, epoch: int | None = None, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Begin a training step, and end the one before it; the first line of the loop's body.

        A step's parameters are looked at when it ends, after its optimizer's
        step and before the next `zero_grad`.

        Args:
            step: Step counter.
            epoch: Epoch counter, or None.
            metadata: JSON values for the records of telemetry and parameters.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
            InvalidRunStateError: The watch is closed, or the run has ended.
        """
        if self._closed:
            raise InvalidRunStateError("step: this watch is closed")
        checked = check_index(step, "step")
        if checked is None:
            raise SchemaValidationError("step must be given")
        self._end_step()
        self._step, self._epoch, self._metadata = checked, epoch, metadata
        if self.telemetry is not None:
            self._scope = self.telemetry.start_step(checked, epoch=epoch, metadata=metadata)
        if self.hooks is not None:
            self.hooks.begin_step(checked, epoch=epoch)

    def mark_data_ready(self) -> None:
        """Say that the step's batch is on its device; what came before was waiting for data."""
        if self._scope is not None:
            self._scope.mark_data_ready()

    def close(self) -> None:
        """End the last step and close what watches; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._end_step()
        finally:
            self._close_writers()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # A step that was broken off says nothing of its parameters.
        self._closed = True
        self._step = None
        self._close_writers()

    def _end_step(self) -> None:
        if self._step is None:
            return
        step, self._step = self._step, None
        if self.hooks is not None:
            self.hooks.end_step()
        if self.parameters is not None:
            self.parameters.snapshot(step, epoch=self._epoch, metadata=self._metadata)
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.finish()

    def _close_writers(self) -> None:
        for writer in (self.hooks, self.parameters, self.telemetry):
            if writer is not None:
                writer.close()


def watch(
    session: object,
    model: nn.Module,
    optimizer: Any | Sequence[Any] | None = None,
    *,
    every_n_steps: int = 50,
    layers: bool = True,
    parameters: bool = True,
    distributions: bool = False,
    telemetry: bool = True,
    include_types: Sequence[str] = (),
    include_name_patterns: Sequence[str] = (),
) -> TrainingWatch:
    """Watch layers, parameters and telemetry of a training loop with one line in it.

        with quark.watch(session, model, optimizer, every_n_steps=50) as watch:
            for step, batch in enumerate(loader):
                watch.step(step)
                ...

    Args:
        session: A TrainingSession, or the RunContext of one.
        model: The model that is trained.
        optimizer: Its optimizer, or several.
        every_n_steps: At which steps layers, parameters and the machine are looked at.
        layers: Whether activations and gradients of layers are summed up.
        parameters: Whether weights, gradients and updates are.
        distributions: Whether parameters also get histograms.
        telemetry: Whether steps are timed and the machine is read.
        include_types, include_name_patterns: As of `LayerFilterConfig`.

    Raises:
        SchemaValidationError: A bad argument; the message names it.
    """
    flags = {
        "layers": layers,
        "parameters": parameters,
        "distributions": distributions,
        "telemetry": telemetry,
    }
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise SchemaValidationError(
                f"{name} must be True or False, not a {type(flag).__name__}"
            )
    schedule = HookScheduleConfig(every_n_steps=every_n_steps)
    engine = diagnostics = None
    if layers:
        filters = LayerFilterConfig(
            include_types=include_types,  # type: ignore[arg-type] # checked there
            include_name_patterns=include_name_patterns,  # type: ignore[arg-type]
        )
        config = HookEngineConfig(schedule=schedule, filters=filters)
        engine = HookEngine(session, model, optimizer, config=config)
    if parameters:
        diagnostics = ParameterDiagnostics(
            session,
            model,
            optimizer,
            config=ParameterDiagnosticsConfig(
                schedule=schedule,
                capture_distributions=distributions,
                distribution_types=("value", "gradient", "update"),
            ),
        )
    sampled = None
    if telemetry:
        sampled = SystemTelemetry(
            session, config=SystemTelemetryConfig(sample_every_n_steps=every_n_steps)
        )
    return TrainingWatch(engine, diagnostics, sampled)
