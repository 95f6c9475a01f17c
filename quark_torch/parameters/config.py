"""The configuration of ParameterDiagnostics: its parameters and its schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Any, get_args

from quark_core.api import (
    ParameterDistributionType,
    ParameterRole,
    SchemaValidationError,
    check_index,
    to_float,
)
from quark_torch.checks import (
    check_flags,
    check_scaler,
    check_type,
    take_patterns,
    take_texts,
)
from quark_torch.schedule import HookScheduleConfig

_MAX_BINS = 4096
_TYPES = get_args(ParameterDistributionType)
_ROLES = get_args(ParameterRole)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterDiagnosticsConfig:
    """Options of ParameterDiagnostics.

    Attributes:
        schedule: Steps to record.
        batch_size: Number of records of each kind that `flush()` returns and that are written
            together.
        capture_summaries: Whether to record statistics.
        capture_distributions: Whether to record histograms.
        distribution_types: Histograms to record: `value`, `gradient`, `update`.
        histogram_bins: Number of bins, 1 to 4096.
        near_zero_epsilon: Magnitude up to which an element counts as near zero.
        max_histogram_values: Maximum number of evenly spaced elements in a histogram.
        include_parameter_patterns: Regular expressions, one of which must be found in the
            parameter's name without prefixes of wrappers. Each name of a tied parameter counts.
            Defaults to all parameters.
        exclude_parameter_patterns: Regular expressions that must not be found.
        include_parameter_roles: Any of `weight`, `bias` and `other`. Defaults to all.
        grad_scaler: GradScaler in use, or a function that returns its scale. Scaled gradients are
            divided by it, and skipped steps are recognized. Needs the optimizer. If None, a
            GradScaler is detected at its first step.

    Raises:
        SchemaValidationError: A value is invalid. The message names the field.
    """

    schedule: HookScheduleConfig = field(default_factory=HookScheduleConfig)
    batch_size: int = 100
    capture_summaries: bool = True
    capture_distributions: bool = False
    distribution_types: tuple[str, ...] = ("value",)
    histogram_bins: int = 32
    near_zero_epsilon: float = 1e-8
    max_histogram_values: int = 100_000
    include_parameter_patterns: tuple[str, ...] = ()
    exclude_parameter_patterns: tuple[str, ...] = ()
    include_parameter_roles: tuple[str, ...] = ()
    grad_scaler: Any = None

    def __post_init__(self) -> None:
        check_type(self.schedule, "schedule", HookScheduleConfig)
        check_flags(
            capture_summaries=self.capture_summaries,
            capture_distributions=self.capture_distributions,
        )
        check_scaler(self.grad_scaler)
        for name in ("batch_size", "histogram_bins", "max_histogram_values"):
            number = check_index(getattr(self, name), name)
            if not number:
                raise SchemaValidationError(f"{name} must be a positive integer, got {number}")
            object.__setattr__(self, name, number)
        if self.histogram_bins > _MAX_BINS:
            raise SchemaValidationError(
                f"histogram_bins must be from 1 to {_MAX_BINS}, got {self.histogram_bins}"
            )
        epsilon = to_float(
            self.near_zero_epsilon, "near_zero_epsilon", "ParameterDiagnosticsConfig"
        )
        if not isfinite(epsilon) or epsilon < 0:
            raise SchemaValidationError(
                f"near_zero_epsilon must be a finite, non-negative number, got {epsilon}"
            )
        object.__setattr__(self, "near_zero_epsilon", epsilon)
        for name in ("include_parameter_patterns", "exclude_parameter_patterns"):
            object.__setattr__(self, name, take_patterns(getattr(self, name), name))
        for name, known in (("distribution_types", _TYPES), ("include_parameter_roles", _ROLES)):
            object.__setattr__(self, name, _check_words(getattr(self, name), name, known))
        if self.capture_distributions and not self.distribution_types:
            raise SchemaValidationError(
                "distribution_types must contain value, gradient or update if "
                "capture_distributions is True"
            )

    @property
    def captures_updates(self) -> bool:
        """Whether any statistic of updates is requested."""
        return self.capture_summaries or (
            self.capture_distributions and "update" in self.distribution_types
        )


def _check_words(values: object, name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(take_texts(values, name)))
    for word in found:
        if word not in known:
            raise SchemaValidationError(
                f"{name} must contain only {', '.join(map(repr, known))}, got {word!r:.60}"
            )
    return found
