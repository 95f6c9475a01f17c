"""Settings of AnalyzerEngine: thresholds, metric keys, and how they are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from quark_core.analysis.metric_roles import (
    TRAIN_ACCURACY_KEYS,
    TRAIN_LOSS_KEYS,
    VALIDATION_ACCURACY_KEYS,
    VALIDATION_LOSS_KEYS,
)
from quark_core.analysis.noted_thresholds import NotedThresholds
from quark_core.errors import SchemaValidationError

__all__ = ["AnalyzerEngineConfig", "AnalyzerMode", "AnalyzerThresholds"]

AnalyzerMode = Literal["adaptive", "absolute"]


@dataclass(frozen=True)
class AnalyzerThresholds(NotedThresholds):
    """Thresholds of the rules, in the units of what they are held against.

    In the adaptive mode a default is only the scale of severities; what the
    caller passes is a hard limit as well, at the levels that were passed. In
    the absolute mode all of them are limits. A field counts as passed when it
    was an argument; where all fields were, as by `dataclasses.replace`, those
    that differ from the default do.

    Attributes:
        exploding_gradient_warning_norm, exploding_gradient_error_norm,
        exploding_gradient_critical_norm: Euclidean norms of a layer's gradient.
        vanishing_gradient_norm: A layer's gradient with a smaller norm has vanished.
        vanishing_gradient_warning_ratio, vanishing_gradient_error_ratio,
        vanishing_gradient_critical_ratio: Share of gradient samples that have vanished.
        vanishing_gradient_min_samples: Fewer samples say nothing.
        stagnant_layer_gradient_norm: A layer with smaller gradients stands still.
        stagnant_layer_warning_probes, stagnant_layer_error_probes,
        stagnant_layer_critical_probes: Probes in a row that it does.
        activation_collapse_warning_dead_unit_ratio, ..._error_..., ..._critical_...:
            Share of units that give nothing, 0 to 1.
        activation_collapse_warning_saturation_ratio, ...: Share of saturated elements.
        activation_collapse_warning_std, ...: Standard deviation of a layer's
            output that is too small; the critical one is the smallest.
        overfitting_warning_gap, overfitting_error_gap, overfitting_critical_gap:
            Validation less training loss.
        overfitting_min_points: Fewer pairs of both losses say nothing.
        runtime_warning_step_time_ms, ...: Mean milliseconds of a step.
        runtime_warning_data_fraction, ...: Share of a step that waits for data.
        runtime_warning_jitter_ratio, ...: Deviation of step times over their mean.
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
    """Settings of an AnalyzerEngine.

    Attributes:
        thresholds: See AnalyzerThresholds.
        replace_existing_outputs: Whether `analyze()` replaces what it found before.
        step_time_metric_keys, data_time_metric_keys, compute_time_metric_keys:
            Keys of timings in milliseconds; the first one that the run has counts.
        train_loss_metric_keys, val_loss_metric_keys,
        train_accuracy_metric_keys, val_accuracy_metric_keys: Likewise;
            where the run has none of them, a metric whose name says it is taken.
        mode: `adaptive` judges a run by its own history and outcome; `absolute`
            reads the thresholds of the six documented rules literally.
        rules: Ids of the rules to run; None for all.
        excluded_rules: Ids of rules to leave out.

    Raises:
        SchemaValidationError: A field of another type, or an unknown mode.
    """

    thresholds: AnalyzerThresholds = field(default_factory=AnalyzerThresholds)
    replace_existing_outputs: bool = True
    step_time_metric_keys: tuple[str, ...] = ("system/runtime/step_time_ms", "system/step_time_ms")
    data_time_metric_keys: tuple[str, ...] = ("system/runtime/data_time_ms", "system/data_time_ms")
    compute_time_metric_keys: tuple[str, ...] = (
        "system/runtime/compute_time_ms",
        "system/compute_time_ms",
    )
    train_loss_metric_keys: tuple[str, ...] = TRAIN_LOSS_KEYS
    val_loss_metric_keys: tuple[str, ...] = VALIDATION_LOSS_KEYS
    train_accuracy_metric_keys: tuple[str, ...] = TRAIN_ACCURACY_KEYS
    val_accuracy_metric_keys: tuple[str, ...] = VALIDATION_ACCURACY_KEYS
    mode: AnalyzerMode = "adaptive"
    rules: tuple[str, ...] | None = None
    excluded_rules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.thresholds, AnalyzerThresholds):
            raise SchemaValidationError(
                f"thresholds must be AnalyzerThresholds, not {type(self.thresholds).__name__}"
            )
        if self.mode not in get_args(AnalyzerMode):
            raise SchemaValidationError(f"mode must be adaptive or absolute, got {self.mode!r}")
        if not isinstance(self.replace_existing_outputs, bool):
            raise SchemaValidationError("replace_existing_outputs must be True or False")
        for item in fields(self):
            if item.name.endswith("_keys") or item.name == "excluded_rules":
                texts = check_texts(getattr(self, item.name), item.name)
                object.__setattr__(self, item.name, texts)
        if self.rules is not None:
            object.__setattr__(self, "rules", check_texts(self.rules, "rules"))


def check_texts(values: object, argument: str) -> tuple[str, ...]:
    """Return several texts as a tuple.

    Raises:
        SchemaValidationError: One text in place of several, or something else.
    """
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise SchemaValidationError(f"{argument} must be a tuple of texts, got {values!r:.60}")
    texts = tuple(values)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise SchemaValidationError(f"{argument} must hold non-empty texts, got {text!r:.60}")
    return texts
