"""Config of AnalyzerEngine, PhaseAnalyzer and comparisons: thresholds and metric keys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, Literal, Self, TypeVar, get_args

from quark.analysis.metric_roles import PART_KEYS
from quark_core.config.objective import MetricDirection, ObjectiveMode, check_objective
from quark_core.errors import SchemaValidationError
from quark_core.records.checks import check_choice


@dataclass(frozen=True)
class NotedThresholds:
    """Base of frozen dataclasses of numbers, whose defaults are only a scale.

    Raises:
        SchemaValidationError: A field that is no finite number of 0 or more, or
            no whole one where it counts something.
    """

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Note which fields are passed."""
        made = super().__new__(cls)
        names = [item.name for item in fields(cls)]
        object.__setattr__(made, "_passed", frozenset(names[: len(args)]) | set(values))
        return made

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise SchemaValidationError(
                    f"{item.name} must be a number, not {type(value).__name__}"
                )
            if not isfinite(value) or value < 0:
                raise SchemaValidationError(
                    f"{item.name} must be finite and not negative, got {value!r:.60}"
                )
            if item.type == "int" and value != int(value):
                raise SchemaValidationError(
                    f"{item.name} must be a whole number, got {value!r:.60}"
                )

    @property
    def passed(self) -> frozenset[str]:
        """Names of the fields that the caller passed.

        If all fields were passed, as by `dataclasses.replace`, these are the fields that differ
        from the default.
        """
        passed: frozenset[str] = getattr(self, "_passed", frozenset())
        if len(passed) < len(fields(self)):
            return passed
        return frozenset(
            item.name for item in fields(self) if getattr(self, item.name) != item.default
        )


AnalyzerMode = Literal["adaptive", "absolute"]


@dataclass(frozen=True)
class AnalyzerThresholds(NotedThresholds):
    """Thresholds of the analysis rules.

    In adaptive mode, a default only scales the severity. A threshold that you pass is also a hard
    limit. In absolute mode, all thresholds are limits.

    Fields with `warning`, `error` and `critical` in their names set the severity.

    Attributes:
        exploding_gradient_warning_norm, exploding_gradient_error_norm,
            exploding_gradient_critical_norm: L2 norm of a layer's gradient.
        vanishing_gradient_norm: L2 norm below which a layer's gradient counts as vanished.
        vanishing_gradient_warning_ratio, vanishing_gradient_error_ratio,
            vanishing_gradient_critical_ratio: Share of gradient samples that vanished, from 0 to 1.
        vanishing_gradient_min_samples: Minimum number of gradient samples.
        stagnant_layer_gradient_norm: L2 norm below which a layer counts as stagnant.
        stagnant_layer_warning_probes, stagnant_layer_error_probes, stagnant_layer_critical_probes:
            Number of consecutive sampled steps.
        activation_collapse_warning_dead_unit_ratio, activation_collapse_error_dead_unit_ratio,
            activation_collapse_critical_dead_unit_ratio: Share of units with zero output, from 0 to
            1.
        activation_collapse_warning_saturation_ratio, activation_collapse_error_saturation_ratio,
            activation_collapse_critical_saturation_ratio: Share of saturated elements, from 0 to 1.
        activation_collapse_warning_std, activation_collapse_error_std,
            activation_collapse_critical_std: Standard deviation of a layer's output below which the
            rule fires.
        overfitting_warning_gap, overfitting_error_gap, overfitting_critical_gap: Validation loss
            minus training loss.
        overfitting_min_points: Minimum number of steps with both losses.
        runtime_warning_step_time_ms, runtime_error_step_time_ms, runtime_critical_step_time_ms:
            Mean step time in milliseconds.
        runtime_warning_data_fraction, runtime_error_data_fraction, runtime_critical_data_fraction:
            Share of the step time spent waiting for data, from 0 to 1.
        runtime_warning_jitter_ratio, runtime_error_jitter_ratio, runtime_critical_jitter_ratio:
            Standard deviation of the step time divided by its mean.
    """

    exploding_gradient_warning_norm: float = 10.0
    exploding_gradient_error_norm: float = 25.0
    exploding_gradient_critical_norm: float = 50.0
    vanishing_gradient_norm: float = 1e-4
    vanishing_gradient_warning_ratio: float = 0.5
    vanishing_gradient_error_ratio: float = 0.75
    vanishing_gradient_critical_ratio: float = 0.9
    vanishing_gradient_min_samples: int = 4
    stagnant_layer_gradient_norm: float = 1e-4
    stagnant_layer_warning_probes: int = 2
    stagnant_layer_error_probes: int = 4
    stagnant_layer_critical_probes: int = 6
    activation_collapse_warning_dead_unit_ratio: float = 0.8
    activation_collapse_error_dead_unit_ratio: float = 0.92
    activation_collapse_critical_dead_unit_ratio: float = 0.98
    activation_collapse_warning_saturation_ratio: float = 0.9
    activation_collapse_error_saturation_ratio: float = 0.97
    activation_collapse_critical_saturation_ratio: float = 0.995
    activation_collapse_warning_std: float = 0.05
    activation_collapse_error_std: float = 0.01
    activation_collapse_critical_std: float = 0.001
    overfitting_warning_gap: float = 0.2
    overfitting_error_gap: float = 0.4
    overfitting_critical_gap: float = 0.7
    overfitting_min_points: int = 3
    runtime_warning_step_time_ms: float = 250.0
    runtime_error_step_time_ms: float = 500.0
    runtime_critical_step_time_ms: float = 1000.0
    runtime_warning_data_fraction: float = 0.4
    runtime_error_data_fraction: float = 0.6
    runtime_critical_data_fraction: float = 0.75
    runtime_warning_jitter_ratio: float = 0.25
    runtime_error_jitter_ratio: float = 0.5
    runtime_critical_jitter_ratio: float = 0.75


@dataclass(frozen=True, kw_only=True)
class AnalyzerEngineConfig:
    """Options of AnalyzerEngine.

    If the run has none of the listed metric keys, a metric is chosen by its name.

    Attributes:
        thresholds: Thresholds of the rules.
        replace_existing_outputs: Whether `analyze()` replaces the results of earlier analyses.
        step_time_metric_keys, data_time_metric_keys, compute_time_metric_keys: Keys of timings in
            milliseconds. The first key that the run has is used.
        train_loss_metric_keys, val_loss_metric_keys, train_accuracy_metric_keys,
            val_accuracy_metric_keys: Keys of losses and accuracies. The first key that the run has
            is used.
        mode: `adaptive` compares a run with its own history and outcome. `absolute` applies the
            thresholds of the six threshold rules literally.
        rules: IDs of the rules to run. None runs all rules.
        excluded_rules: IDs of rules to skip.
        objective: Metric that measures the run's quality. Defaults to the run's objective, then to
            a loss or score found by name.
        objective_mode: `min` or `max`. Defaults to the direction implied by the objective's name.

    Raises:
        SchemaValidationError: A field has the wrong type, or the mode is unknown.
    """

    thresholds: AnalyzerThresholds = field(default_factory=AnalyzerThresholds)
    replace_existing_outputs: bool = True
    step_time_metric_keys: tuple[str, ...] = ("system/runtime/step_time_ms", "system/step_time_ms")
    data_time_metric_keys: tuple[str, ...] = ("system/runtime/data_time_ms", "system/data_time_ms")
    compute_time_metric_keys: tuple[str, ...] = (
        "system/runtime/compute_time_ms",
        "system/compute_time_ms",
    )
    train_loss_metric_keys: tuple[str, ...] = PART_KEYS["train loss"]
    val_loss_metric_keys: tuple[str, ...] = PART_KEYS["validation loss"]
    train_accuracy_metric_keys: tuple[str, ...] = PART_KEYS["train accuracy"]
    val_accuracy_metric_keys: tuple[str, ...] = PART_KEYS["validation accuracy"]
    mode: AnalyzerMode = "adaptive"
    rules: tuple[str, ...] | None = None
    excluded_rules: tuple[str, ...] = ()
    objective: str | None = None
    objective_mode: ObjectiveMode | None = None

    def __post_init__(self) -> None:
        _check_common(self, AnalyzerThresholds)
        check_choice(self.mode, "mode", get_args(AnalyzerMode))
        named = check_objective(self.objective, self.objective_mode)
        object.__setattr__(self, "objective", None if named is None else named.metric)
        rules = {"excluded_rules": self.excluded_rules, "rules": self.rules}
        for name, texts in rules.items():
            if texts is not None:
                object.__setattr__(self, name, check_texts(texts, name))


def _check_common(
    config: AnalyzerEngineConfig | PhaseAnalyzerConfig, thresholds: type[NotedThresholds]
) -> None:
    """Check what both analyzers have."""
    if not isinstance(config.thresholds, thresholds):
        raise SchemaValidationError(
            f"thresholds must be {thresholds.__name__}, not {type(config.thresholds).__name__}"
        )
    if not isinstance(config.replace_existing_outputs, bool):
        raise SchemaValidationError("replace_existing_outputs must be True or False")
    for item in fields(config):
        if item.name.endswith("_keys"):
            texts = check_texts(getattr(config, item.name), item.name)
            object.__setattr__(config, item.name, texts)


AnyConfig = TypeVar("AnyConfig")


def check_config(config: object, kind: type[AnyConfig]) -> AnyConfig:
    """The config that was passed, or the default one.

    Raises:
        SchemaValidationError: It is of another type.
    """
    if config is None:
        return kind()
    if not isinstance(config, kind):
        article = "an" if kind is AnalyzerEngineConfig else "a"
        raise SchemaValidationError(
            f"config must be {article} {kind.__name__}, not {type(config).__name__}"
        )
    return config


def check_texts(values: object, argument: str) -> tuple[str, ...]:
    """Return several texts as a tuple.

    Raises:
        SchemaValidationError: One text in place of several, or something else.
    """
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise SchemaValidationError(f"{argument} must be a tuple of str, got {values!r:.60}")
    texts = tuple(values)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise SchemaValidationError(f"{argument} must contain non-empty str, got {text!r:.60}")
    return texts


@dataclass(frozen=True)
class PhaseAnalyzerThresholds(NotedThresholds):
    """Thresholds of the phases; changes are relative, so 0.01 is one percent.

    A default only sets a scale: a change is compared with the run's own noise and progress. A
    threshold that you pass must be met in addition.

    Attributes:
        initialization_points: Minimum number of points in the initialization phase.
        rapid_learning_min_relative_change: Minimum fall of the loss in a phase of rapid learning.
        stagnation_max_relative_change: Maximum change of the loss in a phase of stagnation.
        overfitting_min_gap: Validation loss minus training loss, or training accuracy minus
            validation accuracy.
        overfitting_min_train_relative_change: Fall of the training loss since the validation loss
            was lowest.
        overfitting_min_validation_regression: Rise of the validation loss above its minimum.
        divergence_min_relative_regression: Rise of the training loss above its previous level.
        divergence_from_best_ratio: Rise above the minimum, as a share of the fall before it. If
            nothing had fallen, as a share of the level.

    Raises:
        SchemaValidationError: A field is not a finite number of at least 0.
    """

    initialization_points: int = 2
    rapid_learning_min_relative_change: float = 0.18
    stagnation_max_relative_change: float = 0.01
    overfitting_min_gap: float = 0.12
    overfitting_min_train_relative_change: float = 0.015
    overfitting_min_validation_regression: float = 0.015
    divergence_min_relative_regression: float = 0.15
    divergence_from_best_ratio: float = 0.25

    def limit(self, name: str) -> float | None:
        """Return a threshold that the caller passed, or None."""
        return float(getattr(self, name)) if name in self.passed else None


@dataclass(frozen=True, kw_only=True)
class PhaseAnalyzerConfig:
    """Options of PhaseAnalyzer.

    If the run has none of the listed metric keys, a metric is chosen by its name.

    Attributes:
        thresholds: Thresholds of the phases.
        replace_existing_outputs: Whether `analyze()` replaces the phases that were stored before.
        train_loss_metric_keys, val_loss_metric_keys, train_accuracy_metric_keys,
            val_accuracy_metric_keys: Keys of losses and accuracies. The first key that the run has
            is used.

    Raises:
        SchemaValidationError: A field has the wrong type.
    """

    thresholds: PhaseAnalyzerThresholds = field(default_factory=PhaseAnalyzerThresholds)
    replace_existing_outputs: bool = True
    train_loss_metric_keys: tuple[str, ...] = PART_KEYS["train loss"]
    val_loss_metric_keys: tuple[str, ...] = PART_KEYS["validation loss"]
    train_accuracy_metric_keys: tuple[str, ...] = PART_KEYS["train accuracy"]
    val_accuracy_metric_keys: tuple[str, ...] = PART_KEYS["validation accuracy"]

    def __post_init__(self) -> None:
        _check_common(self, PhaseAnalyzerThresholds)


TargetDirection = Literal["at_least", "at_most"]


@dataclass(frozen=True, slots=True)
class MetricTargetSpec:
    """Target value of a metric; a comparison reports when each side reached it.

    Attributes:
        metric_key: Metric name, as logged or as stored.
        target_value: Value to reach.
        direction: `at_least` or `at_most`.

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
    """

    metric_key: str
    target_value: float
    direction: TargetDirection

    def __post_init__(self) -> None:
        if not isinstance(self.metric_key, str) or not self.metric_key:
            raise SchemaValidationError("metric_key must be a metric name, a non-empty str")
        _check_number(self.target_value, "target_value")
        check_choice(self.direction, "direction", get_args(TargetDirection))


@dataclass(frozen=True, slots=True)
class ComparisonEngineConfig:
    """Options of ComparisonEngine.

    Attributes:
        metric_targets: Values to reach. The metric of the first target is the headline.
        headline_metric: Metric that decides. Defaults to the first target's metric, then the
            objective, the validation loss and the training loss.
        headline_share: Share of the error rate that the headline metric gets, between 0 and 1. The
            other metrics share the rest. They get all of it if the headline differs.
        directions: Metric -> `higher`, `lower` or `none`. Overrides the direction implied by the
            name.
        error_rate: Probability of a wrong `better` or `worse` for the headline. Confidence
            intervals have the level `1 - error_rate`.
        relative_tolerance: Relative difference within which a metric is equivalent.
        rate_tolerance: Absolute difference within which a rate between 0 and 1, such as accuracy,
            is equivalent.
        tolerances: Metric -> absolute tolerance in the unit of the metric.
        seed_deviations: Metric -> known standard deviation between seeds. It allows verdicts on
            single runs.
        tail_fraction: Last part of a curve over which the tail median is taken.
        tail_points: Minimum number of points in the tail, up to half of the curve.
        persistence: Number of consecutive points that must meet a target.
        pairing: `auto` pairs runs if the seeds on both sides match. `never` does not.
        alert_window: Share of the common step range within which alerts match.
        layer_factor: Factor by which a layer must differ to be reported.

    Raises:
        SchemaValidationError: An option is out of range. The message names it.
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
                raise SchemaValidationError(f"{name} must be between 0 and 1, got {value}")
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
