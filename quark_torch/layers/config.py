"""The configuration of HookEngine: its modules and its schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from quark_core.api import SchemaValidationError, check_index
from quark_torch.checks import check_flags, check_scaler, check_type, take_texts
from quark_torch.layer_filter import LayerFilterConfig
from quark_torch.schedule import HookScheduleConfig

_OPTIONAL = ("raise_on_error", "compiled")


@dataclass(frozen=True, slots=True)
class HookEngineConfig:
    """Options of HookEngine.

    Attributes:
        schedule: Steps to sample.
        filters: Modules to record.
        capture_forward: Whether to record activations, the outputs of modules.
        capture_backward: Whether to record the gradients of the loss with respect to activations.
        batch_size: Number of records that `flush()` returns and that are written together.
        raise_on_error: Whether a failure of the instrumentation raises in the forward or backward
            pass. Defaults to the session's `strict_mode`.
        dead_unit_epsilon: Magnitude up to which an activation counts as zero in `zero_ratio` and
            `dead_unit_ratio`.
        saturation_threshold: Share of a module's range from which an activation is saturated, above
            0.5 and below 1. None disables saturation ratios. The default of 0.95 means |x| >= 0.95
            for Tanh, and the same relative to the bounds for Hardtanh. For Sigmoid and Hardsigmoid
            it means x <= 0.05 or x >= 0.95, for ReLU6 x >= 5.7.
        saturation_module_types: Class names of the modules with a saturation ratio. Modules with an
            unknown range count as -1 to 1.
        capture_all_outputs: Whether to record each tensor that a module returns, instead of the
            first floating-point tensor.
        grad_scaler: GradScaler in use, or a function that returns its scale. Gradients are divided
            by the scale, which is `grad_scale` in the metadata. If None, a GradScaler is detected
            at its first step. A `grad_scaler_found` event reports sampled steps before that, whose
            gradients include the scale.
        compiled: Whether to install hooks for `torch.compile`, which stay in the model. Defaults to
            the modules that are compiled at creation. Use True if you compile the model later.
        include_eval: Whether to also record calls in `eval()` mode of the whole model, and calls
            without gradients.
        max_calls_per_step: Maximum number of recorded calls per module and step. An event reports
            omitted ones. A compiled module has at most 16.

    Raises:
        SchemaValidationError: A value is invalid. The message names the field.
    """

    schedule: HookScheduleConfig = field(default_factory=HookScheduleConfig)
    filters: LayerFilterConfig = field(default_factory=LayerFilterConfig)
    capture_forward: bool = True
    capture_backward: bool = True
    batch_size: int = 100
    raise_on_error: bool | None = None
    dead_unit_epsilon: float = 0.0
    saturation_threshold: float | None = 0.95
    saturation_module_types: tuple[str, ...] = (
        "Sigmoid",
        "Tanh",
        "Hardsigmoid",
        "Hardtanh",
        "ReLU6",
    )
    capture_all_outputs: bool = False
    grad_scaler: Any = None
    compiled: bool | None = None
    include_eval: bool = field(default=False, kw_only=True)
    max_calls_per_step: int = field(default=100, kw_only=True)

    def __post_init__(self) -> None:
        check_type(self.schedule, "schedule", HookScheduleConfig)
        check_type(self.filters, "filters", LayerFilterConfig)
        flags = ("capture_forward", "capture_backward", "capture_all_outputs", "include_eval")
        optional = [name for name in _OPTIONAL if getattr(self, name) is not None]
        check_flags(**{name: getattr(self, name) for name in (*flags, *optional)})
        check_scaler(self.grad_scaler)
        counts = {}
        for name in ("batch_size", "max_calls_per_step"):
            counts[name] = check_index(getattr(self, name), name)
            if not counts[name]:
                raise SchemaValidationError(f"{name} must be a positive integer")
        epsilon = _take_number(self.dead_unit_epsilon, "dead_unit_epsilon")
        if epsilon < 0.0:
            raise SchemaValidationError(f"dead_unit_epsilon must not be negative, got {epsilon!r}")
        threshold: object = self.saturation_threshold
        if threshold is not None:
            threshold = _take_number(threshold, "saturation_threshold")
            if not 0.5 < threshold < 1.0:
                raise SchemaValidationError(
                    f"saturation_threshold must be above 0.5 and below 1, got {threshold!r}"
                )
        types = take_texts(self.saturation_module_types, "saturation_module_types")
        for name, made in (
            *counts.items(),
            ("dead_unit_epsilon", epsilon),
            ("saturation_threshold", threshold),
            ("saturation_module_types", types),
        ):
            object.__setattr__(self, name, made)


def _take_number(value: object, name: str) -> float:
    if isinstance(value, bool):
        raise SchemaValidationError(f"{name} must be a number, not bool")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise SchemaValidationError(
            f"{name} must be a number, not {type(value).__name__}"
        ) from None
    if not math.isfinite(number):
        raise SchemaValidationError(f"{name} must be finite, got {number!r}")
    return number
