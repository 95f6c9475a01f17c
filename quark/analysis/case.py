"""One run under examination: its data, the settings, and facts that several rules need."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from quark.analysis.config import AnalyzerEngineConfig, AnalyzerThresholds
from quark.analysis.curves import Curve
from quark.analysis.figures import BATCH_LOSS
from quark.analysis.histories import LayerHistory
from quark.analysis.metric_roles import (
    find_named,
    find_train_accuracy,
    find_train_loss,
    find_validation_accuracy,
    find_validation_loss,
    is_held_out,
    is_loss,
    is_player_loss,
    is_reward,
    is_score,
)
from quark.analysis.outcome import (
    PERCENT_FROM,
    Outcome,
    improves_clearly,
    judge_outcome,
    measure_progress,
    negate,
)
from quark.analysis.run_data import RunData
from quark_core.config.objective import Objective, find_mode, infer_mode, read_objective

_DEAD = 0.97  # share of a layer's units
_LAST_PROBES = 3
_LINEAR = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding")

_FIRST_POINTS = 20  # of an accuracy: what is known before much is learned
_LEAST_KNOWN, _ABOVE_GUESSES = 0.2, 0.02  # a share of right answers, and how far beyond guesses
_MOST_LOSS = 50.0  # exp(-loss) is nothing beyond it
_ACCURACY_LEARNED = 0.2  # by which a validation accuracy has risen, with a loss that stands still
_LEARNED = 0.02  # share by which a validation loss has fallen
_TASK_LEARNED = 0.06  # share by which the loss of another task has
_CREEPS = 1e-2  # of a validation loss: a little is still a fall
_AT_GUESSES = 0.03  # share by which a loss may differ from that of guesses
_BEGINS = 1.5  # times the loss of guesses: with so much, at most, begins who knows nothing
_ABOVE_ALL = 0.15  # of the way from a guess's share of right answers to all: more is known
_CLASSES = ("num_classes", "n_classes", "classes", "num_labels", "n_labels", "vocab_size")
_CONSISTENT = 0.4  # times exp(-loss): guesses have an accuracy of its size
_SIZE = re.compile(r"(^|[/_.-])(reg|regulari[sz]ation|penalty|decay|l1|l2|weight|norm)([/_.-]|$)")


@dataclass(frozen=True)
class NamedMetric:
    """The metric that the user named to judge the run by.

    Attributes:
        metric: Its name, as the user wrote it.
        mode: Whether it is better when lower or higher.
        curve: Its points, or None where the run has none.
    """

    metric: str
    mode: Literal["min", "max"]
    curve: Curve | None

    @property
    def is_loss(self) -> bool:
        """Whether rules may look at it as at a loss."""
        return self.mode == "min" and self.curve is not None

    @property
    def is_reward(self) -> bool:
        """Whether it is a reward, which may rise whatever the losses do; no accuracy is."""
        if self.mode != "max" or self.curve is None:
            return False
        return is_reward(self.metric) or infer_mode(self.metric) is None

    def replaces(self, loss: Curve | None, *, held_out: bool) -> bool:
        """Whether rules look at it in place of the loss that was found by its name, if any.

        What is no loss by its name, such as an error rate, only stands in where there is none:
        naming it takes nothing away of what the losses say.
        """
        is_meant = self.is_loss and is_held_out(self.metric) is held_out
        return is_meant and (loss is None or is_loss(self.metric))


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
    def as_documented(self) -> Case:
        """The same run, with every documented threshold read literally."""
        return Case(self.run, replace(self.config, mode="absolute"))

    @cached_property
    def objective(self) -> NamedMetric | None:
        """What the settings name, else what the run was started with, or None."""
        named = read_objective(self.run.config)
        if self.config.objective is not None:
            named = Objective(self.config.objective, self.config.objective_mode)
        if named is None:
            return None
        found = find_named(self.run.metrics, named.metric)
        curve = None if found is None else self.run.place_on_steps(found[1])
        return NamedMetric(named.metric, find_mode(named.metric, named) or "min", curve)

    @cached_property
    def scores(self) -> tuple[Curve, ...]:
        """Rewards and the like, which are better when higher, but for accuracies."""
        known = (self.train_accuracy, self.validation_accuracy)
        accuracies = {curve.key for curve in known if curve is not None}
        named = self.objective
        meant = None if named is None or not named.is_reward or named.curve is None else named.curve
        return tuple(
            self.run.place_on_steps(curve)
            for key, curve in self.run.metrics.items()
            if len(curve)
            and key not in accuracies
            and (is_score(key) or (meant is not None and key == meant.key))
        )

    @cached_property
    def train_loss(self) -> Curve | None:
        """Training loss with all its points; of batch diagnostics where no metric has it."""
        found = find_train_loss(self.run.metrics, self.config.train_loss_metric_keys)
        named = self.objective
        if named is not None and named.replaces(found, held_out=False):
            found = named.curve
        if found is not None:
            return self.run.place_on_steps(found)
        batches = self.run.batches
        if batches.count == 0:
            return None
        step, loss = batches["step"], batches["loss"]
        kept = step >= 0
        order = np.argsort(step[kept], kind="stable")
        return Curve(
            BATCH_LOSS, step[kept][order], loss[kept][order], batches["epoch"][kept][order]
        )

    @cached_property
    def validation_loss(self) -> Curve | None:
        """Validation loss with all its points."""
        keys = self.config.val_loss_metric_keys
        found = find_validation_loss(self.run.metrics, keys)
        named = self.objective
        if named is not None and named.replaces(found, held_out=True):
            found = named.curve
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
        """Whether (nearly) all units of a layer give nothing at its last three probes.

        A layer that was set to zero and has never left it is none: nothing of it has died.
        """
        return any(
            float(np.nan_to_num(item["dead_unit_ratio"][-_LAST_PROBES:]).mean()) >= _DEAD
            and not is_zero_throughout(item)
            for item in self.run.activations.values()
            if len(item)
        )

    @cached_property
    def chance_loss(self) -> float | None:
        """The cross-entropy of guesses, in nats; None where the run does not say its classes.

        The entropy of the labels in the batch diagnostics, or the logarithm of
        the number of classes in the configuration.
        """
        total: Counter[str] = Counter()
        batches = self.run.batches
        for counts in batches["class_counts"].tolist() if batches.count else ():
            for name, count in (counts or {}).items():
                if isinstance(count, (int, float)):
                    total[name] += int(count)
        seen = np.array([count for count in total.values() if count > 0], dtype=np.float64)
        if len(seen) > 1:
            shares = seen / seen.sum()
            return float(-(shares * np.log(shares)).sum())
        for key, value in self.run.config.items():
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if key.lower() in _CLASSES and is_number and value > 1:
                return float(np.log(value))
        return None

    @cached_property
    def output_layer(self) -> tuple[LayerHistory, int] | None:
        """The last layer with a bias that is called, and how many outputs it has, or None.

        They are the elements of its bias: the classes, where it is a classifier's.
        """
        counts = {
            item.module_name: int(np.nanmax(item["element_count"], initial=0.0))
            for item in self.run.parameters.values()
            if item.role == "bias"
        }
        called = [name for name in self.run.activations if counts.get(name)]
        return (self.run.activations[called[-1]], counts[called[-1]]) if called else None

    @cached_property
    def output_count(self) -> int | None:
        """How many outputs the last layer has; None of one, or where it is not known."""
        if self.output_layer is not None:
            return self.output_layer[1] if self.output_layer[1] > 1 else None
        biases = [item for item in self.run.parameters.values() if item.role == "bias"]
        if not biases or self.run.activations:
            return None
        count = int(np.nanmax(biases[-1]["element_count"], initial=0.0))
        return count if count > 1 else None

    @cached_property
    def guess_loss(self) -> float | None:
        """`chance_loss`, or that of guesses among as many classes as there are outputs."""
        if self.chance_loss is not None or self.output_count is None:
            return self.chance_loss
        return float(np.log(self.output_count))

    @cached_property
    def outcome(self) -> Outcome:
        """How the training went, by its losses and accuracies, and what else the user named."""
        outcome = judge_outcome(
            self.train_loss,
            self.validation_loss,
            (self.train_accuracy, self.validation_accuracy),
            self.run.metrics,
        )
        named = self.objective
        if named is None or named.curve is None or named.is_loss:
            return outcome
        progress = measure_progress(negate(named.curve))
        if progress is None or not progress.has_fallen:
            return outcome
        return replace(
            outcome,
            other_progress=True,
            rewarded=outcome.rewarded or named.is_reward,
            has_metrics=True,
        )


def is_zero_throughout(item: LayerHistory) -> bool:
    """Whether a layer of weights gives nothing from its first probe to its last one.

    It was set to zero on purpose; that it has not left it is the matter of its updates.
    """
    return item.kind in _LINEAR and bool((np.nan_to_num(item["dead_unit_ratio"]) >= _DEAD).all())


def knows_something(case: Case, start: float) -> bool:
    """Whether the accuracy is twice that of guesses with this cross-entropy, exp(-loss)."""
    curve = case.train_accuracy or case.validation_accuracy
    if curve is None or not len(curve.finite):
        return False
    level = float(np.median(curve.finite.value[:_FIRST_POINTS]))
    share = level / 100.0 if level > PERCENT_FROM else level
    guesses = float(np.exp(-min(start, _MOST_LOSS)))
    return share > 2.0 * guesses + _ABOVE_GUESSES and share > _LEAST_KNOWN


def knows_as_guesses_do(case: Case, final: float) -> bool:
    """Whether the accuracy at the end is that of guesses with this cross-entropy, exp(-loss)."""
    curve = case.validation_accuracy or case.train_accuracy
    if curve is None or not len(curve.finite) or final <= 0:
        return False
    level = float(np.median(curve.finite.value[-_FIRST_POINTS:]))
    share = level / 100.0 if level > PERCENT_FROM else level
    guesses = float(np.exp(-min(final, _MOST_LOSS)))
    return _CONSISTENT * guesses <= share <= 2.0 * guesses + _ABOVE_GUESSES


def find_guesses(case: Case) -> float | None:
    """The loss of guesses, where the losses end at it and nothing is known better; else None.

    It is that of the labels, or of as many classes as the last layer has outputs: a loss that
    happens to end within three hundredths of that is a rare one. The training's may lie a little
    below it, for what is learned by heart.
    """
    chance = case.guess_loss
    known = [item for item in (case.outcome.train, case.outcome.validation) if item is not None]
    if chance is None or chance <= 0 or not known or case.outcome.rewarded:
        return None
    if case.chance_loss is None and known[0].start > _BEGINS * chance:
        return None  # no classifier begins so far above: its loss is another one
    levels = [item.final for item in known]
    if min(levels) < (1.0 - _AT_GUESSES) * chance or min(levels) > (1.0 + _AT_GUESSES) * chance:
        return None
    share = case.outcome.accuracy
    guess = float(np.exp(-chance))
    if share is not None and share > guess + _ABOVE_ALL * (1.0 - guess):
        return None
    return chance


def improves_otherwise(case: Case) -> bool:
    """Whether something that is no loss gets better: the training accuracy, or a reward."""
    if case.train_accuracy is not None:
        return improves_clearly(case.train_accuracy)
    if case.outcome.rewarded or _has_other_loss_that_falls(case):
        return True
    accuracy = case.validation_accuracy
    if accuracy is None:
        # With little left to win the training's noise hides what the validation shows.
        validation = case.outcome.validation
        if validation is None:
            return False
        if validation.has_fallen and validation.relative_fall > _LEARNED:
            return True
        return validation.drift > max(2.0 * validation.drift_error, _CREEPS * validation.start)
    progress = measure_progress(negate(accuracy))
    return progress is not None and progress.has_fallen and progress.fall > _ACCURACY_LEARNED


def _has_other_loss_that_falls(case: Case) -> bool:
    """Whether one of several losses falls: of two players, or of several tasks."""
    known = [curve.key for curve in (case.train_loss, case.validation_loss) if curve is not None]
    for key, curve in case.run.metrics.items():
        if "loss" not in key.lower() or key in known or _SIZE.search(key.lower()):
            continue
        # Two players that are equally good have losses that stand still.
        if is_player_loss(key):
            return True
        progress = measure_progress(curve)
        if progress is not None and progress.has_fallen and progress.relative_fall > _TASK_LEARNED:
            return True
    return False
