"""Samples that come sorted, in the same order in every epoch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case
from quark.analysis.curves import Curve
from quark.analysis.metric_roles import find_learning_rate
from quark.analysis.observations import Text, at_step, between_steps, count_names, observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory

Floats = NDArray[np.float64]

_LEAST_EPOCHS, _LEAST_PLACES = 4, 8  # whole epochs that are compared, and points of each
_ALIKE = 0.9  # correlation of the courses of odd and even epochs
_SMOOTH = 0.5  # correlation of neighbours in the course: samples that are alike follow each other
_AMPLITUDE = 0.1  # deviation of the course, of the level of the loss
_RISES = 2  # of the learning rate: a schedule with restarts makes a course of its own
_RISEN = 1.5  # times the rate before
_LEAST_BATCHES, _LEAST_PASSES = 60, 2  # with labels; and how often the classes come round
_OF_ONE, _MOSTLY = 0.9, 0.5  # share of a batch that is of one class; of batches that are so
_LIKE_THE_LAST = 0.5  # of the way from chance to all: batches of the class of the one before
_UNEVEN = 4.0  # times the variance of shares of classes that random batches would have
_NEIGHBOURS = 0.6  # correlation of a batch's shares with those of the one before
_NEARLY_ALL = 0.9  # of the samples are of classes that come round
_OFTEN, _SELDOM = 1.5, 0.75  # times its share of all samples: where a class has come, or has gone


class UnshuffledData(BaseRule):
    """Fires where the training loss takes the same course in every epoch, by stretches.

    Samples that are sorted by class, and not shuffled, are learned and
    forgotten in turn: the loss jumps where the next class begins. Batches that
    are the same in every epoch but drawn at random go up and down from one to
    the next, and are no fault.
    """

    rule_id = "unshuffled_data"
    category: AlertCategory = "generalization"
    needs = (
        f"it needs the training loss of {_LEAST_EPOCHS} epochs, with their numbers and "
        f"{_LEAST_PLACES} points of each, or {_LEAST_BATCHES} batches with labels (DataDiagnostics)"
    )
    data = ("train/loss with epochs", "batch diagnostics with labels")
    threshold = _ALIKE

    def judge(self, case: Case) -> Verdict | None:
        """Hold the courses of the last epochs against each other.

        Silent where the learning rate rises again and again, as it makes a
        course by itself, and where the course is small against the loss.
        """
        labels = _read_labels(case)
        sorted_batches = None if labels is None else _judge_batches(case, labels)
        if sorted_batches is not None:
            return Verdict(findings=(sorted_batches,))
        loss = case.train_loss
        found = None if loss is None else _fold(loss.merged)
        if loss is None or found is None:
            return None
        rows, first, last = found
        course, alike = _compare(rows)
        level = float(np.median(np.abs(rows)))
        if _restarts(case):
            return self.stay_quiet("the learning rate restarts, and the loss follows it", alike)
        spread = float(np.std(course))
        if alike < _ALIKE or spread < _AMPLITUDE * level or _correlate_neighbours(course) < _SMOOTH:
            return self.stay_quiet("the loss does not depend on the place in the epoch", alike)
        finding = _describe(case, loss, first, last, alike)
        return Verdict(findings=(finding,), observed=alike, threshold=_ALIKE)


@dataclass(frozen=True, slots=True)
class _Labels:
    """How many samples of each class the batches have, in the order of their steps."""

    steps: NDArray[np.int64]
    names: list[str]
    counts: Floats  # (batches, classes)

    @property
    def shares(self) -> Floats:
        shares: Floats = self.counts / self.counts.sum(axis=1, keepdims=True)
        return shares


def _read_labels(case: Case) -> _Labels | None:
    batches = case.run.batches
    if batches.count < _LEAST_BATCHES:
        return None
    order = np.argsort(batches["step"], kind="stable")
    steps = batches["step"][order]
    counted = batches["class_counts"][order].tolist()
    if not all(sum(counts.values()) for counts in counted) or int(steps.min()) < 0:
        return None
    names = sorted({name for counts in counted for name in counts})
    places = {name: place for place, name in enumerate(names)}
    table = np.zeros((len(counted), len(names)))
    for row, counts in enumerate(counted):
        for name, count in counts.items():
            table[row, places[name]] = count
    return _Labels(steps, names, table)


def _judge_batches(case: Case, labels: _Labels) -> Finding | None:
    """Whether batches are of the same classes as before for long, round after round.

    None where they are drawn of few classes on purpose, as the order of the classes is random
    then; where classes come one after the other once, as in continual learning; and where
    nearly all samples are of one class.
    """
    shares = labels.shares
    tops = shares.argmax(axis=1)
    pure = float((shares.max(axis=1) >= _OF_ONE).mean())
    stays = tops[1:] == tops[:-1]
    like_the_last = float(stays.mean())
    known, counts = np.unique(tops, return_counts=True)
    by_chance = float(((counts / counts.sum()) ** 2).sum())
    # Each class begins anew in every pass.
    _, rounds = np.unique(tops[1:][~stays], return_counts=True)
    passes = float(np.median(rounds)) if len(rounds) == len(known) else 0.0
    is_sorted = pure >= _MOSTLY and passes >= _LEAST_PASSES
    if is_sorted and like_the_last >= by_chance + _LIKE_THE_LAST * (1.0 - by_chance):
        return _describe_batches(case, labels, pure, like_the_last)
    return _judge_mixes(case, labels)


def _judge_mixes(case: Case, labels: _Labels) -> Finding | None:
    """The same of batches of several classes: samples that a buffer hardly shuffles."""
    shares = labels.shares
    usual = labels.counts.sum(axis=0) / labels.counts.sum()
    away = shares - usual
    energy = float((away**2).sum(axis=1).mean())
    by_chance = float(((1.0 - (usual**2).sum()) / labels.counts.sum(axis=1)).mean())
    if energy <= 0.0 or energy < _UNEVEN * by_chance:
        return None
    alike = float((away[1:] * away[:-1]).sum() / (away**2).sum())
    rounds = np.array([_count_rounds(*pair) for pair in zip(shares.T, usual, strict=True)])
    # Samples that are sorted by something else, such as their length, have classes that stay.
    come_round = float(usual[rounds >= _LEAST_PASSES].sum())
    if alike < _NEIGHBOURS or come_round < _NEARLY_ALL:
        return None
    return _describe_mixes(case, labels, energy / by_chance, alike)


def _count_rounds(share: Floats, usual: float) -> int:
    """How often a class comes that was nearly gone before."""
    marks = np.where(share > _OFTEN * usual, 1, np.where(share < _SELDOM * usual, -1, 0))
    marks = marks[marks != 0]
    return int((np.diff(marks) > 0).sum())


def _describe_batches(case: Case, labels: _Labels, pure: float, stays: float) -> Finding:
    first, last = int(labels.steps[0]), int(labels.steps[-1])
    tops = labels.counts.argmax(axis=1)
    names = [labels.names[place] for place in np.unique(tops)]
    largest = labels.names[int(np.bincount(tops).argmax())]
    return Finding(
        culprit="batch labels",
        severity="warning",
        title="Samples are sorted by class",
        fact=say(
            "Most batches are of one class, which is that of the batch before, and the "
            "{count} classes come round again and again ({steps}); {most} samples are of {name}.",
            count=count_names(names), steps=between_steps(first, last),
            most=case.count_class(largest), name=largest,
        ),
        inference="Each class is learned while it lasts, and lost again with the next one.",
        suggested_check="Shuffle the samples anew in each epoch (shuffle=True, a random sampler; "
        "a large shuffle buffer for streams), and look at whether files are sorted by class.",
        evidence=(
            observe("class", largest, "share of batches of the class of the one before", stays,
                    _LIKE_THE_LAST, first, last),
            observe("class", largest, "share of batches that are of one class", pure,
                    _MOSTLY, first, last),
        ),
    )  # fmt: skip


def _describe_mixes(case: Case, labels: _Labels, uneven: float, alike: float) -> Finding:
    first, last = int(labels.steps[0]), int(labels.steps[-1])
    largest = labels.names[int(labels.counts.sum(axis=0).argmax())]
    return Finding(
        culprit="batch labels",
        severity="warning",
        title="Samples are nearly sorted by class",
        fact=say(
            "Batches have much of few classes, and the next batch has the same; the {count} "
            "classes come round again and again ({steps}); {most} samples are of {name}.",
            count=count_names(labels.names), steps=between_steps(first, last),
            most=case.count_class(largest), name=largest,
        ),
        inference="Samples are shuffled among their neighbours alone: what is learned of some "
        "classes is lost again with the next ones.",
        suggested_check="Shuffle the samples anew in each epoch, over all of them: a shuffle "
        "buffer must hold far more samples than lie together of one class; or write them shuffled.",
        evidence=(
            observe("class", largest, "variance of the shares of classes, in times of chance",
                    uneven, _UNEVEN, first, last),
            observe("class", largest, "correlation of a batch's classes with those of the one "
                    "before", alike, _NEIGHBOURS, first, last),
        ),
    )  # fmt: skip


def _fold(loss: Curve) -> tuple[Floats, int, int] | None:
    """The last half of the epochs, a row each, with the first and last step of the last one."""
    if not len(loss) or loss.unit != "step" or int(loss.epoch.min()) < 0:
        return None
    bounds = np.flatnonzero(np.diff(loss.epoch, prepend=-1, append=-1))
    parts = [(low, high) for low, high in pairwise(bounds.tolist()) if high > low]
    size = int(np.median([high - low for low, high in parts]))
    whole = [(low, high) for low, high in parts if high - low == size]
    whole = whole[-max(_LEAST_EPOCHS, len(whole) // 2) :]
    if size < _LEAST_PLACES or len(whole) < _LEAST_EPOCHS:
        return None
    rows = np.stack([loss.value[low:high] for low, high in whole])
    low, high = whole[-1]
    return rows, int(loss.step[low]), int(loss.step[high - 1])


def _compare(rows: Floats) -> tuple[Floats, float]:
    """The course of the usual epoch without its trend, and how alike odd and even ones are."""
    places = np.arange(rows.shape[1], dtype=np.float64)
    places -= places.mean()
    centred = rows - rows.mean(axis=1, keepdims=True)
    slope = centred @ places / float(places @ places)
    centred = centred - slope[:, None] * places
    odd, even = (np.median(centred[start::2], axis=0) for start in (0, 1))
    return np.median(centred, axis=0), _correlate(odd, even)


def _correlate(one: Floats, other: Floats) -> float:
    if not (float(np.std(one)) > 0 and float(np.std(other)) > 0):
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def _correlate_neighbours(course: Floats) -> float:
    return _correlate(course[:-1], course[1:])


def _restarts(case: Case) -> bool:
    """Whether a learning rate rises several times."""
    logged = find_learning_rate(case.run.metrics)
    rates = [] if logged is None else [logged.finite.value]
    rates += [item["learning_rate"] for item in case.run.parameters.values()]
    for rate in rates:
        known = rate[np.isfinite(rate) & (rate > 0)]
        if len(known) > 1 and int((known[1:] > _RISEN * known[:-1]).sum()) >= _RISES:
            return True
    return False


def _describe(case: Case, loss: Curve, first: int, last: int, alike: float) -> Finding:
    span = {"first": first, "last": last}
    fact: Text = say(
        "{key} takes the same course in every epoch: from {highest} down to {lowest} and back in "
        "the last one ({steps}), which begins at step {step}.",
        key=loss.key, highest=case.measure_curve(loss.key, "highest", **span),
        lowest=case.measure_curve(loss.key, "lowest", **span),
        steps=between_steps(first, last), step=at_step(first),
    )  # fmt: skip
    return Finding(
        culprit=loss.key,
        severity="warning",
        title="Samples are sorted",
        fact=fact,
        inference="Samples that are alike follow each other, and in the same order every time: "
        "each kind is learned while it lasts, and lost again with the next one.",
        suggested_check="Shuffle the samples anew in each epoch (shuffle=True, a random sampler; "
        "a large shuffle buffer for streams), and look at whether files are sorted by class.",
        evidence=(
            observe("metric", loss.key, "correlation of the courses of odd and even epochs",
                    alike, _ALIKE, first, last),
        ),
        step=int(loss.step[0]),
        step_end=last,
    )  # fmt: skip
