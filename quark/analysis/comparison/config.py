"""How runs are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from quark_core.config.objective import MetricDirection
from quark_core.errors import SchemaValidationError
from quark_core.records.checks import check_choice

TargetDirection = Literal["at_least", "at_most"]


@dataclass(frozen=True, slots=True)
class MetricTargetSpec:
    """A value that a metric is meant to reach; the comparison says when each side did.

    Attributes:
        metric_key: The metric, as it was logged or as it is stored.
        target_value: The value.
        direction: at_least or at_most.

    Raises:
        SchemaValidationError: An argument that is none of these; the message names it.
    """

    metric_key: str
    target_value: float
    direction: TargetDirection

    def __post_init__(self) -> None:
        if not isinstance(self.metric_key, str) or not self.metric_key:
            raise SchemaValidationError("metric_key must be a metric's name, a str that is not ''")
        _check_number(self.target_value, "target_value")
        check_choice(self.direction, "direction", get_args(TargetDirection))


@dataclass(frozen=True, slots=True)
class ComparisonEngineConfig:
    """Options of `ComparisonEngine`; the defaults suit runs of any kind.

    Attributes:
        metric_targets: Values to be reached. The first one's metric is the headline.
        headline_metric: The metric that the runs are about. None takes the first
            target's, else the objective that a run was started with, else the
            validation loss, else the training loss.
        headline_share: All other metrics together get what it lacks to 1 of the
            error rate, or all of it where the headline differs. Above 0, below 1.
        directions: Metric -> higher, lower or none, over what its name says.
        error_rate: How often the verdict of the headline may say better or worse
            where nothing differs. Intervals are of the level that it lacks to 1.
        relative_tolerance: Share of the reference within which a metric counts as equivalent.
        rate_tolerance: The same for rates between 0 and 1, such as accuracy, as a difference.
        tolerances: Metric -> the same as a difference in its own unit.
        seed_deviations: Metric -> standard deviation between seeds, where it
            is known from elsewhere. Lets single runs be told apart.
        tail_fraction: Last part of a run's own curve, of which the tail median is.
        tail_points: It has at least so many points, but at most half of a curve.
        persistence: Points in a row that must meet a target.
        pairing: auto pairs runs whose seeds match on both sides; never does not.
        alert_window: Share of the common range within which alerts are the same.
        layer_factor: Factor by which a layer must differ to be notable.

    Raises:
        SchemaValidationError: An option out of its range; the message names it.
    """

    metric_targets: tuple[MetricTargetSpec, ...] = ()
    headline_metric: str | None = None
    headline_share: float = 0.8
    directions: Mapping[str, MetricDirection] = field(default_factory=dict, hash=False)
    error_rate: float = 0.05
    relative_tolerance: float = 0.01
    rate_tolerance: float = 0.01
    tolerances: Mapping[str, float] = field(default_factory=dict, hash=False)
    seed_deviations: Mapping[str, float] = field(default_factory=dict, hash=False)
    tail_fraction: float = 0.25
    tail_points: int = 5
    persistence: int = 3
    pairing: Literal["auto", "never"] = "auto"
    alert_window: float = 0.1
    layer_factor: float = 2.0

    def __post_init__(self) -> None:
        targets = self.metric_targets
        if not isinstance(targets, (list, tuple)) or not all(
            isinstance(target, MetricTargetSpec) for target in targets
        ):
            raise SchemaValidationError("metric_targets must be a tuple of MetricTargetSpec")
        object.__setattr__(self, "metric_targets", tuple(targets))
        self._check_numbers()
        check_choice(self.pairing, "pairing", ("auto", "never"))
        self._check_tables()

    def _check_numbers(self) -> None:
        for name in ("headline_share", "error_rate", "tail_fraction", "alert_window"):
            value = _check_number(getattr(self, name), name)
            if not 0 < value < 1:
                raise SchemaValidationError(f"{name} must lie between 0 and 1, got {value}")
        for name in ("relative_tolerance", "rate_tolerance"):
            _check_not_negative(getattr(self, name), name)
        if _check_number(self.layer_factor, "layer_factor") <= 1:
            raise SchemaValidationError("layer_factor must be above 1")
        for name in ("tail_points", "persistence"):
            number = getattr(self, name)
            if type(number) is not int or number < 1:
                raise SchemaValidationError(f"{name} must be a positive integer")

    def _check_tables(self) -> None:
        """What is given by metric."""
        for name in ("directions", "tolerances", "seed_deviations"):
            table = getattr(self, name)
            if not isinstance(table, Mapping):
                raise SchemaValidationError(
                    f"{name} must be a dict by metric, not {type(table).__name__}"
                )
        for key, direction in self.directions.items():
            check_choice(direction, f"directions[{key!r}]", get_args(MetricDirection))
        for name in ("tolerances", "seed_deviations"):
            for key, value in getattr(self, name).items():
                _check_not_negative(value, f"{name}[{key!r}]")


def _check_not_negative(value: object, argument: str) -> None:
    if _check_number(value, argument) < 0:
        raise SchemaValidationError(f"{argument} must not be negative")


def _check_number(value: object, argument: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise SchemaValidationError(f"{argument} must be a finite number, got {value!r:.40}")
    return float(value)
