"""One run under examination: its data, the settings, and facts that several rules need."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from quark_core.analysis.analyzer_config import AnalyzerEngineConfig, AnalyzerThresholds
from quark_core.analysis.curves import Curve
from quark_core.analysis.metric_roles import (
    find_train_accuracy,
    find_train_loss,
    find_validation_accuracy,
    find_validation_loss,
)
from quark_core.analysis.outcome import Outcome, judge_outcome
from quark_core.analysis.run_data import RunData

__all__ = ["Case"]

_DEAD = 0.9
_LAST_PROBES = 3


class Case:
    """A run with everything that rules ask for.

    Attributes:
        run: Its data.
        config: Settings.
    """

    def __init__(self, run: RunData, config: AnalyzerEngineConfig) -> None:
        self.run = run
        self.config = config

    @property
    def thresholds(self) -> AnalyzerThresholds:
        """The thresholds."""
        return self.config.thresholds

    @cached_property
    def train_loss(self) -> Curve | None:
        """Training loss with all its points; of batch diagnostics where no metric has it."""
        found = find_train_loss(self.run.metrics, self.config.train_loss_metric_keys)
        if found is not None:
            return self.run.place_on_steps(found)
        batches = self.run.batches
        if batches.count == 0:
            return None
        step, loss = batches["step"], batches["loss"]
        kept = step >= 0
        order = np.argsort(step[kept], kind="stable")
        return Curve(
            "batch loss", step[kept][order], loss[kept][order], batches["epoch"][kept][order]
        )

    @cached_property
    def validation_loss(self) -> Curve | None:
        """Validation loss with all its points."""
        keys = self.config.val_loss_metric_keys
        found = find_validation_loss(self.run.metrics, keys)
        return None if found is None else self.run.place_on_steps(found)

    @cached_property
    def train_accuracy(self) -> Curve | None:
        """Training accuracy with all its points."""
        keys = self.config.train_accuracy_metric_keys
        found = find_train_accuracy(self.run.metrics, keys)
        return None if found is None else self.run.place_on_steps(found)

    @cached_property
    def validation_accuracy(self) -> Curve | None:
        """Validation accuracy with all its points."""
        keys = self.config.val_accuracy_metric_keys
        found = find_validation_accuracy(self.run.metrics, keys)
        return None if found is None else self.run.place_on_steps(found)

    @cached_property
    def ends_with_dead_layer(self) -> bool:
        """Whether nine tenths of a layer's units give nothing at its last three probes."""
        return any(
            float(np.nan_to_num(item["dead_unit_ratio"][-_LAST_PROBES:]).mean()) > _DEAD
            for item in self.run.activations.values()
            if len(item)
        )

    @cached_property
    def outcome(self) -> Outcome:
        """How the training went, by its losses and accuracies."""
        return judge_outcome(
            self.train_loss,
            self.validation_loss,
            (self.train_accuracy, self.validation_accuracy),
            self.run.metrics,
        )
