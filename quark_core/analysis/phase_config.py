"""Settings of PhaseAnalyzer: thresholds and metric keys."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from quark_core.analysis.analyzer_config import check_texts
from quark_core.analysis.metric_roles import (
    TRAIN_ACCURACY_KEYS,
    TRAIN_LOSS_KEYS,
    VALIDATION_ACCURACY_KEYS,
    VALIDATION_LOSS_KEYS,
)
from quark_core.analysis.noted_thresholds import NotedThresholds
from quark_core.errors import SchemaValidationError

__all__ = ["PhaseAnalyzerConfig", "PhaseAnalyzerThresholds"]


@dataclass(frozen=True)
class PhaseAnalyzerThresholds(NotedThresholds):
    """Thresholds of the phases; changes are shares of the level, 0.01 being one per cent.

    A default is only a scale: what counts is a change against the run's own
    noise and its own fall. What the caller passes must hold as well. A field
    counts as passed when it was an argument; where all fields were, as by
    `dataclasses.replace`, those that differ from the default do.

    Attributes:
        initialization_points: Points at the start that are initialization at least.
        rapid_learning_min_relative_change: Fall of the loss over a stretch of
            rapid learning.
        stagnation_max_relative_change: Change of the loss over a stretch of stagnation.
        overfitting_min_gap: Validation less training loss, or training less
            validation accuracy.
        overfitting_min_train_relative_change: Fall of the training loss since
            the validation loss was lowest.
        overfitting_min_validation_regression: Rise of the validation loss
            above its lowest level.
        divergence_min_relative_regression: Rise of the training loss above the
            level before it.
        divergence_from_best_ratio: Rise above the lowest level, as a share of
            the fall until then, or of the level where nothing had fallen.

    Raises:
        SchemaValidationError: A field that is no finite number of 0 or more.
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
        """A threshold that the caller passed, or None."""
        return float(getattr(self, name)) if name in self.passed else None


@dataclass(frozen=True, kw_only=True)
class PhaseAnalyzerConfig:
    """Settings of a PhaseAnalyzer.

    Attributes:
        thresholds: See PhaseAnalyzerThresholds.
        replace_existing_outputs: Whether `analyze()` replaces the phases that
            were stored before.
        train_loss_metric_keys, val_loss_metric_keys,
        train_accuracy_metric_keys, val_accuracy_metric_keys: The first key
            that the run has counts; where it has none of them, a metric whose
            name says it is taken.

    Raises:
        SchemaValidationError: A field of another type.
    """

    thresholds: PhaseAnalyzerThresholds = field(default_factory=PhaseAnalyzerThresholds)
    replace_existing_outputs: bool = True
    train_loss_metric_keys: tuple[str, ...] = TRAIN_LOSS_KEYS
    val_loss_metric_keys: tuple[str, ...] = VALIDATION_LOSS_KEYS
    train_accuracy_metric_keys: tuple[str, ...] = TRAIN_ACCURACY_KEYS
    val_accuracy_metric_keys: tuple[str, ...] = VALIDATION_ACCURACY_KEYS

    def __post_init__(self) -> None:
        if not isinstance(self.thresholds, PhaseAnalyzerThresholds):
            raise SchemaValidationError(
                f"thresholds must be PhaseAnalyzerThresholds, not {type(self.thresholds).__name__}"
            )
        if not isinstance(self.replace_existing_outputs, bool):
            raise SchemaValidationError("replace_existing_outputs must be True or False")
        for item in fields(self):
            if item.name.endswith("_keys"):
                texts = check_texts(getattr(self, item.name), item.name)
                object.__setattr__(self, item.name, texts)
