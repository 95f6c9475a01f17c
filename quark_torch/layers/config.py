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
    """Configuration of `HookEngine`.

    Attributes:
        schedule: The steps that are probed.
        filters: The modules that are instrumented.
        capture_forward: Record activations: what modules return.
        capture_backward: Record the gradients of the loss in them.
        batch_size: Bounds what `flush()` returns and how many records are
            written together.
        raise_on_error: Whether a failure of the instrumentation ends the
            user's forward or backward; None for the session's `strict_mode`.
        dead_unit_epsilon: An activation that does not exceed it in magnitude
            counts as zero, in `zero_ratio` and `dead_unit_ratio`.
        saturation_threshold: From which share of its module's range on an
            activation is saturated, above 0.5 and below 1; None for no
            saturation ratios. Of a range around 0 each end is times the
            threshold: |x| >= 0.95 for Tanh, and Hardtanh by its own bounds. Of
            a range from 0 both ends count: x <= 0.05 or x >= 0.95 for Sigmoid
            and Hardsigmoid; of ReLU6 only the upper one, x >= 5.7, since 0 is
            inactivity there.
        saturation_module_types: Class names, bare or qualified, of the modules
            that get a saturation ratio; those without a range known here count
            as ranging from -1 to 1.
        capture_all_outputs: Record every tensor that a module returns, and not
            only the first one of floating point numbers.
        grad_scaler: A `torch.amp.GradScaler`, or a function that returns the
            present scale: gradients are divided by it, and `grad_scale` in the
            metadata says by what. For None a GradScaler is found by itself
            when it first makes a step; an event `grad_scaler_found` tells of
            probed steps before it, whose gradients carry the scale.
        compiled: Install the hooks for `torch.compile`, which stay in the
            model while the engine is open. None does so for those modules that
            are compiled when the engine is made; True is for a model that is
            compiled after it.
        include_eval: Also record what is no training: calls while the model is
            in `eval()` mode, and calls without gradients, unless an activation
            checkpoint makes them. The mode is that of the whole model; layers
            of a training model that are in `eval()` mode, such as frozen batch
            norms, are recorded.
        max_calls_per_step: So many calls of each module are recorded in one
            step; an event tells of those that were left out. Of a compiled
            module there are 16 at most.

    Raises:
        SchemaValidationError: A bad value; the message names the field.
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
