"""Samples whose labels are wrong: the better the rest is learned, the worse they get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case, Progress, improves_clearly, measure_progress
from quark.analysis.curves import ParameterHistory
from quark.analysis.observations import between_steps, count_names, observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_LEAST_BATCHES = 60
_LEAST_SIGHTS = 3  # batches of a part of the run that a sample was in
_MOST_BATCHES = 1200  # of a part
_PARTS = 4  # of the run; the first one is what nothing is known in
_ROUNDS = 40  # of the estimate, from which on it hardly moves
_FIRST_POINTS = 3  # batches whose loss is that of guessing
_EARLY_POINTS, _MOST_DIFFERENT = 20, 1.7  # batches, and times it that none of them is
_WORSE = 1.3  # times the loss of guessing
_LEARNED = 0.7  # share of the loss of guessing that the usual sample is below
_ERRORS = 4.0  # standard errors of its estimate above the usual sample
_RIDGE = 1e-6  # of samples that are always together
_STRETCHES = 8  # of a part, each with a level of its own
_BATCHES_FOR_EACH, _MOST_FITTED = 3, 160  # of the samples that are looked at closely
_LEAST_SAMPLES, _LEAST_SHARE = 3, 0.005
_ERROR_SHARE = 0.1
_NAMED, _SAMPLE_CHARACTERS = 8, 40
_LEAST_LOSSES, _LEAST_VALIDATIONS = 30, 6
_AT_GUESSES, _NEAR = 0.03, 0.005  # share by which a loss differs from that of guesses; clearly so
_LATE_PART = 3  # the last third
_STILL = 0.01  # share by which a loss that came down to guesses may fall in all that follows
_KNOWN = 0.1  # of the way from a guess's share of right answers to all
_MOVING = 1e-4  # update over weight
_CONFIDENCE = 0.85  # a kind of its own looks alike where it contradicts the rest


@dataclass(frozen=True)
class _Suspects:
    """Samples that a part of the run shows to be worse than guessed: their losses, the worst first.

    Attributes:
        losses: Sample -> its estimated loss.
        guessing: The loss of guessing.
        usual: The loss of the usual sample.
        first, last: Steps of the part.
        known: How many samples there are.
    """

    losses: dict[str, float]
    guessing: float
    usual: float
    first: int
    last: int
    known: int


class MislabelledData(BaseRule):
    """Fires where labels contradict the inputs: of a few samples, or of all of them.

    Of a few: the model is surely wrong on them while it is right on the rest.

    Batch diagnostics tell the losses of batches and who was in them; out of
    these the loss of each sample is estimated. A hard sample is at most as
    bad as a guess. One whose label is wrong is worse than that, and so ever
    more as the rest is learned. Of all, as of files that were sorted apart:
    the training loss creeps below that of guesses, by heart, and the
    validation stays at it.
    """

    rule_id = "mislabelled_data"
    category: AlertCategory = "generalization"
    needs = (
        f"it needs {_LEAST_BATCHES} batches with sample ids (DataDiagnostics), or a training and a "
        "validation loss of a classifier"
    )
    data = ("batch diagnostics with sample ids", "val/loss")
    threshold = _WORSE

    def judge(self, case: Case) -> Verdict | None:
        """Look for samples with a loss beyond that of guessing once the others are learned.

        Silent where nothing is learned yet, where samples differ before anything
        is (outliers of a regression), of the rarest class while its loss is that
        of its share, and of samples that are only hard.
        """
        of_all = _judge_all(case)
        if of_all is not None:
            return Verdict(findings=(of_all,))
        batches = case.run.batches
        if batches.count < _LEAST_BATCHES:
            return None
        kept = np.flatnonzero(
            np.isfinite(batches["loss"])
            & (batches["step"] >= 0)
            & np.array([ids is not None for ids in batches["sample_ids"].tolist()])
        )
        if len(kept) < _LEAST_BATCHES:
            return None
        kept = kept[np.argsort(batches["step"][kept], kind="stable")]
        guessing = _find_guessing(case, kept)
        if guessing is None:
            return self.stay_quiet("the samples' losses differ before anything is learned")
        parts = np.array_split(kept, _PARTS)
        # At the end wrong labels may be known by heart.
        spans = (np.concatenate(parts[1:]), np.concatenate(parts[1:-1]))
        found = [
            suspects for part in spans if (suspects := _look(case, part, guessing)) is not None
        ]
        worst = max(found, key=lambda item: len(item.losses), default=None)
        if worst is None:
            return self.stay_quiet("not enough is learned, or is seen often, to tell labels apart")
        highest = max(worst.losses.values(), default=worst.usual) / worst.guessing
        least = max(_LEAST_SAMPLES, round(_LEAST_SHARE * worst.known))
        if len(worst.losses) < least:
            return self.stay_quiet("no samples are worse than guessed once others are", highest)
        return Verdict(
            findings=(_describe(case, worst),), observed=highest, threshold=self.threshold
        )


def _judge_all(case: Case) -> Finding | None:
    """Whether all that is learned is learned by heart, with losses that guesses have.

    Weights that move and layers that live are asked for: a training that does not work stays
    there as well.
    """
    train, validation, chance = case.outcome.train, case.outcome.validation, case.guess_loss
    if train is None or validation is None or chance is None or chance <= 0:
        return None
    if train.points < _LEAST_LOSSES or validation.points < _LEAST_VALIDATIONS:
        return None
    level = _find_level(validation, chance)
    if level is None or abs(level - chance) > _AT_GUESSES * chance:
        return None
    if float(validation.smoothed.value.min()) < (1.0 - _AT_GUESSES) * chance:
        return None
    late = train.values.value[-max(1, len(train.values) // _LATE_PART) :]
    end = float(np.median(late))
    # What the training gains beyond guesses, the validation does not.
    is_by_heart = level - end >= _ERRORS * train.drift_error
    if min(chance, level) - end < _NEAR * chance or not (is_by_heart and train.has_fallen):
        return None
    share, guess = case.outcome.accuracy, float(np.exp(-chance))
    if share is not None and share > guess + _KNOWN * (1.0 - guess):
        return None
    if case.validation_accuracy is not None and improves_clearly(case.validation_accuracy):
        return None
    if case.ends_with_dead_layer or not _moves(case):
        return None
    return _describe_all(case, train, validation)


def _find_level(validation: Progress, chance: float) -> float | None:
    """Where the validations stay; None where they fall.

    A fall that ends where guesses are, of a start that was worse than guesses, is none: from
    then on they have to stay.
    """
    values = validation.values
    if validation.has_fallen:
        if validation.first <= (1.0 + _AT_GUESSES) * chance:
            return None
        values = values.take(slice(len(values) // _LATE_PART, None))
        later = measure_progress(values)
        if later is None or later.points < _LEAST_VALIDATIONS:
            return None
        if later.has_fallen and later.relative_fall > _STILL:
            return None
    return float(np.median(values.value))


def _moves(case: Case) -> bool:
    """Whether the usual weight moves as weights do that are trained, and most may move."""
    weights = [item for item in case.run.parameters.values() if item.role == "weight"]
    frozen = [item for item in weights if not item.requires_grad]
    if _count_elements(frozen) > 0.5 * _count_elements(weights):
        return False  # too little of the model trains to say that it is the labels
    ratios = [
        float(np.nanmedian(np.append(item["update_to_parameter_ratio"], np.nan)))
        for item in case.run.parameters.values()
        if item.role == "weight" and bool((item["update_to_parameter_ratio"] > 0).any())
    ]
    return not case.run.parameters or (bool(ratios) and float(np.median(ratios)) >= _MOVING)


def _count_elements(parameters: Sequence[ParameterHistory]) -> float:
    return sum(item.size for item in parameters)


def _describe_all(case: Case, train: Progress, validation: Progress) -> Finding:
    first, last = int(train.values.step[0]), int(train.values.step[-1])
    return Finding(
        culprit=validation.key,
        severity="error",
        title="Labels do not follow from the inputs",
        fact=say(
            "{train} went from {start} to {end} ({steps}), and {validation} stayed at {level} in "
            "{count} validations, which guesses have.",
            train=train.key, start=case.measure_curve(train.key, "level at the start"),
            end=case.measure_curve(train.key, "level at the end"),
            steps=between_steps(first, last), validation=validation.key,
            level=case.measure_curve(validation.key, "median"),
            count=case.measure_curve(validation.key, "count"),
        ),
        inference="The weights move, and what they learn is single samples by heart: nothing of it "
        "holds for others.",
        suggested_check="Look at some inputs beside their labels as the model gets them: files "
        "that are listed in another order, a join by row number, labels that were shuffled alone.",
        evidence=(
            observe("metric", validation.key, "share of its first value at the end",
                    validation.final / validation.start, 1.0 - _AT_GUESSES, first, last),
        ),
        confidence=_CONFIDENCE,
    )  # fmt: skip


def _find_guessing(case: Case, rows: Integers) -> float | None:
    """The loss of guessing: that of the first batches, or of the rarest class by its share.

    None where the first batches differ much: then some samples are worse than others from the
    start, as outliers of a regression are.
    """
    batches = case.run.batches
    guessing = float(np.median(batches["loss"][rows[:_FIRST_POINTS]]))
    soon = batches["loss"][rows[:_EARLY_POINTS]]
    if not guessing > 0 or float(soon.max()) > _MOST_DIFFERENT * guessing:
        return None
    total: dict[str, int] = {}
    for counts in batches["class_counts"][rows].tolist():
        for label, count in (counts or {}).items():
            total[label] = total.get(label, 0) + int(count)
    seen = [count for count in total.values() if count > 0]
    if len(seen) > 1:
        guessing = max(guessing, -float(np.log(min(seen) / sum(seen))))
    return guessing


@dataclass(frozen=True)
class _Members:
    """Which samples were in which batches, in pairs.

    Attributes:
        names: The samples.
        sample, batch: Numbers of the pairs' samples and batches.
        sizes, losses: Of the batches.
    """

    names: list[str]
    sample: Integers
    batch: Integers
    sizes: Integers
    losses: Floats

    @classmethod
    def read(cls, case: Case, rows: Integers) -> _Members:
        """Those of some batches."""
        batches = case.run.batches
        ids = [tuple(map(str, item)) for item in batches["sample_ids"][rows].tolist()]
        names = list(dict.fromkeys(name for item in ids for name in item))
        numbers = {name: number for number, name in enumerate(names)}
        sample = np.array([numbers[name] for item in ids for name in item], dtype=np.int64)
        sizes = np.array([max(len(item), 1) for item in ids])
        return cls(
            names, sample, np.repeat(np.arange(len(ids)), [len(item) for item in ids]), sizes,
            batches["loss"][rows],
        )  # fmt: skip

    def estimate(self) -> tuple[Floats, Integers]:
        """The loss of each sample, roughly, and how many batches it was in.

        A batch's loss is the mean over its samples: what it is off is given back to each of
        them, again and again (simultaneous iterative reconstruction).
        """
        count = len(self.names)
        sights = np.bincount(self.sample, minlength=count)
        guess = np.full(count, float(np.median(self.losses)))
        for _ in range(_ROUNDS):
            sums = np.bincount(self.batch, weights=guess[self.sample], minlength=len(self.sizes))
            off = (self.losses - sums / self.sizes)[self.batch]
            guess = guess + np.bincount(self.sample, weights=off, minlength=count) / sights
        return guess, sights

    def fit(self, chosen: Integers) -> tuple[Floats, Floats]:
        """How much the chosen samples' losses are above the others', with standard errors.

        By least squares, with a level of the others for each stretch of the run.
        """
        place = np.full(len(self.names), -1)
        place[chosen] = np.arange(len(chosen))
        kept = place[self.sample] >= 0
        count = len(self.losses)
        design = np.zeros((count, len(chosen) + _STRETCHES))
        rows = self.batch[kept]
        np.add.at(design, (rows, place[self.sample[kept]]), 1.0 / self.sizes[rows])
        stretch = np.arange(count) * _STRETCHES // count
        design[np.arange(count), len(chosen) + stretch] = 1.0
        inverse = np.linalg.inv(design.T @ design + _RIDGE * np.eye(design.shape[1]))
        found = inverse @ (design.T @ self.losses)
        free = max(count - design.shape[1], 1)
        variance = float(((self.losses - design @ found) ** 2).sum()) / free
        errors = np.sqrt(np.maximum(np.diag(inverse), 0.0) * variance)
        return found[: len(chosen)], errors[: len(chosen)]


def _look(case: Case, rows: Integers, guessing: float) -> _Suspects | None:
    """The suspects of a part of the run; None where it cannot tell."""
    rows = rows[-_MOST_BATCHES:]
    members = _Members.read(case, rows)
    rough, sights = members.estimate()
    often = sights >= _LEAST_SIGHTS
    if often.sum() < _LEAST_BATCHES // 2:
        return None
    usual = float(np.median(rough[often]))
    if usual > _LEARNED * guessing:
        return None
    # Few enough for the batches to tell them apart.
    most = min(_MOST_FITTED, len(rows) // _BATCHES_FOR_EACH)
    order = np.argsort(-np.where(often, rough, -np.inf), kind="stable")
    chosen = order[: min(most, int(often.sum()))]
    above, error = members.fit(chosen)
    loss = usual + above
    is_worse = (loss > _WORSE * guessing) & (above > _ERRORS * error)
    worst = np.argsort(-loss, kind="stable")
    found = {members.names[chosen[at]]: float(loss[at]) for at in worst if is_worse[at]}
    steps = case.run.batches["step"][rows]
    return _Suspects(found, guessing, usual, int(steps.min()), int(steps.max()), int(often.sum()))


def _describe(case: Case, found: _Suspects) -> Finding:
    share = len(found.losses) / found.known
    named = [name[:_SAMPLE_CHARACTERS] for name in list(found.losses)[:_NAMED]]
    span = {"first": found.first, "last": found.last}
    return Finding(
        culprit="batch loss",
        severity="error" if share >= _ERROR_SHARE else "warning",
        title="Samples are mislabeled",
        fact=say(
            "{count} samples get a worse loss than a guess while the others are learned ({steps}; "
            "the median loss of batches is {usual}, and was {first} at first): {named}.",
            count=count_names(found.losses), steps=between_steps(found.first, found.last),
            usual=case.measure("batch", "", "median", "loss", **span),
            first=case.measure("batch", "", "level at the start", "loss"),
            named=", ".join(named),
        ),
        inference="The model has learned a rule that these samples contradict: their labels are "
        "wrong, or they are of another kind.",
        suggested_check="Look at these samples and their labels; correct them or leave them out.",
        evidence=tuple(
            observe("sample", name[:_SAMPLE_CHARACTERS], "its estimated loss against a guess's",
                    loss, found.guessing, found.first, found.last)
            for name, loss in list(found.losses.items())[:_NAMED]
        ),
        step=found.first,
        step_end=found.last,
        confidence=_CONFIDENCE,
        affected=tuple(named),
    )  # fmt: skip
