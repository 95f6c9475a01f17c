"""Gradients that grow without bound, with time or with the depth of the network."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case, Progress, measure_progress
from quark.analysis.curves import SMALLEST, Curve, take_early, trailing_median
from quark.analysis.metric_roles import find_gradient_norm, is_loss, is_player_loss
from quark.analysis.observations import (
    Figure,
    FigureKind,
    Source,
    Text,
    at_step,
    between_steps,
    count_names,
    list_stretches,
    observe,
    rank_by,
    say,
)
from quark.analysis.rule import BaseRule, Finding, Limit, Verdict, grade
from quark_core.records.kinds.findings import AlertCategory, AlertSeverity, EvidenceRecord

RECOVERED = 0.5
"""Of the rise of the loss is left at most before another one counts by itself."""

LOSS_FACTOR = 5.0
"""Times the start, or what was won, above the highest of the first losses."""

_LEAST_LOSSES = 3
_TOP_PART, _MOST_TOP_POINTS = 5, 10  # the first losses: a fifth of them
_LASTING_PART, _LEAST_LASTING = 100, 3  # a hundredth of the losses has to be so high
_MOST_LASTING = 30  # of a long run: so many in a row are no accident
_HEAD_PART = 10  # a tenth of the run: what is over by then may have been how it found its way
_HUGE = 100.0  # times the start, or what was won: beyond any such way
_LAST_POINTS = 5  # before the loss ceases to be finite
_LEAST_BEFORE = 8  # losses from which on those before the last ones have a level of their own
_GROWN_NOISE = 6.0  # deviations above that level: the end was growth
_GROWN_SHARE = 0.5  # of the start, or of what was won: there the growth began
_CALM = 3.0  # times their median: gradients below it did not explode
_LOSS_CONFIDENCE = 0.7  # the loss alone does not show gradients
# Title, inference and check, where nothing of gradients was recorded.
_LOSS_ALONE = (
    "The loss explodes",
    "Steps this far uphill are too large for what the loss looks like there.",
    "Lower the learning rate or lengthen the warm-up; look at the data of these steps; "
    "quark.watch(session, model, optimizer) shows which layers it comes from.",
)


def read_loss(case: Case, series: list[Curve]) -> Finding | None:
    """An explosion that only the loss shows: huge values, or growth that ends as NaN."""
    loss, progress = case.train_loss, case.outcome.train
    if loss is None or progress is None or len(loss.finite) < _LEAST_LOSSES:
        return None
    values = loss.finite.value
    few = max(1, min(_MOST_TOP_POINTS, len(values) // _TOP_PART))
    unit = max(abs(progress.start), progress.fall, SMALLEST)
    # Where the first losses are the explosion, only the very first says what is high.
    top = progress.first if progress.blows_up else float(np.max(values[:few]))
    limit = max(top, progress.start) + LOSS_FACTOR * unit
    breaks = case.outcome.non_finite_step
    if breaks is not None:
        span = _find_growth(loss.finite, progress, unit, limit, breaks)
    else:
        span = _find_high_losses(loss.finite, limit)
        # Where gradients were watched and stayed calm, the loss alone says divergence.
        if span is not None and series and _highest_seen(series, span[0]) < _CALM:
            return None
        # What a policy loses follows the rewards that it gets.
        if case.outcome.rewarded:
            return None
        if span is not None and _finds_its_way(loss.finite, progress, span, unit):
            return None
    if span is None:
        return None
    first, end = span
    highest = case.measure_curve(loss.key, "highest")
    said = "and came down after it"
    if breaks is not None:
        said = "and then ceased to be finite"
    elif progress.final > limit:
        said = "and stayed there"
    title, inference, check = (
        _LOSS_ALONE
        if not series
        else (
            "Gradients explode",
            "Steps this far uphill come from exploding gradients; no probe of the gradients "
            "themselves shows it.",
            "Watch the gradients more often (quark.watch), clip their norm, lower the rate.",
        )
    )
    return Finding(
        culprit=loss.key,
        severity="critical" if breaks is not None else "error",
        title=title,
        fact=say(
            "The loss rose from {before} to {peak} {said} ({steps}).",
            before=case.measure_before(case.find_source(loss.key), first),
            peak=highest, said=said, steps=between_steps(first, end),
        ),
        inference=inference,
        suggested_check=check,
        evidence=(
            observe("metric", loss.key, say("highest finite loss {peak}", peak=highest),
                    highest.value, limit, first, end),
        ),
        confidence=_LOSS_CONFIDENCE,
    )  # fmt: skip


def _finds_its_way(loss: Curve, progress: Progress, span: tuple[int, int], unit: float) -> bool:
    """Whether an early burst is over in time and the training is good after it.

    Large first steps may throw a training off before it settles in a wider valley.
    """
    values = loss.value
    head = loss.step[: max(1, len(values) // _HEAD_PART)]
    if span[0] > int(head[-1]) or float(values.max()) > progress.first + _HUGE * unit:
        return False
    return progress.final < RECOVERED * progress.first and progress.first > 0


def _find_growth(
    loss: Curve, progress: Progress, unit: float, limit: float, breaks: int
) -> tuple[int, int] | None:
    """From where to where a loss grew before it ceased to be finite; None where it did not."""
    tail = loss.value[-_LAST_POINTS:]
    before = progress.start
    if len(loss) > _LEAST_BEFORE:
        before = float(np.median(loss.value[:-_LAST_POINTS]))
    has_grown = float(tail.max()) > before + max(unit, _GROWN_NOISE * progress.noise)
    if not has_grown and not (tail > limit).any():
        return None
    rows = np.flatnonzero(tail > before + _GROWN_SHARE * unit)
    return (int(loss.step[-len(tail) :][rows[0]]) if len(rows) else breaks), breaks


def _find_high_losses(loss: Curve, limit: float) -> tuple[int, int] | None:
    """From where to where a loss is beyond a limit, for long enough: the highest such stretch."""
    least = max(_LEAST_LASTING, min(_MOST_LASTING, len(loss) // _LASTING_PART))
    stretches = list_stretches(loss.value > limit, least)
    if not stretches:
        return None
    low, high = max(stretches, key=lambda part: float(loss.value[part[0] : part[1]].max()))
    return int(loss.step[low]), int(loss.step[high - 1])


def _highest_seen(series: list[Curve], step: int) -> float:
    """Highest ratio of any gradient to its median before a step, from then on."""
    best = 0.0
    for curve in series:
        before = curve.value[(curve.step < step) & np.isfinite(curve.value)]
        after = curve.value[curve.step >= step]
        if len(before) and len(after):
            after = np.where(np.isfinite(after), after, np.inf)
            best = max(best, float(after.max() / max(float(np.median(before)), SMALLEST)))
        elif not len(before):
            return np.inf
    return best


Floats = NDArray[np.float64]

_FACTOR = 10.0  # times the run's own recent median
_EARLY_FACTOR = 3.0  # times the level of the first probes: late noise about nothing is none
_WINDOW = 20  # probes before, whose median is the recent one
_LEAST_PROBES = 2  # that a surge lasts, where the loss stays finite
_STAYS = 0.5  # of what began it: what was high raises the median after it
_LEAST_POINTS = 3  # of a gradient's history
_ERROR_FACTOR, _CRITICAL_FACTOR = 25.0, 1e3
_MOST_EVIDENCE, _MOST_OTHERS = 5, 3
_RECORDED: dict[str, tuple[FigureKind, str]] = {
    "layer": ("gradient", "rms"),
    "parameter": ("parameter", "gradient_norm"),
    "metric": ("metric", "value"),
}  # what a surge is of -> kind and field of the records that show it
_TWICE = 2.0  # times the level before: worse, where gradients stay a thousand times too large
_FIRST_CHUNK = 64  # probes of a surge that are looked at first

_GROWTH = 8.0  # times, from the first to the last hidden layer
_GROWTH_TOGETHER = 200.0  # times, forward times backward: more than eightfold each
_LEAST_LAYERS = 5
_STEADY = 0.8  # rank correlation with the depth
_KINDS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "LazyLinear")
_DEPTH_PROBES = 5  # finite ones, from the first on, whose median is a layer's level
_ELASTICITY = 120.0  # percent of the loss for a percent of a weight
_START_PROBES = 3  # while the weights are those of the initialisation
_MOST_NAMED = 10
_CONFIDENCE = 0.8  # of a start without any history

_LIMIT = Limit(
    "exploding_gradient",
    "norm",
    title="Gradient norm beyond its limit",
    check="Look at the learning rate, clip the gradient's norm.",
    words="gradient norm",
)


@dataclass(frozen=True)
class _Surge:
    """A gradient that rises far above its own history.

    Attributes:
        name, kind: What it is of, and whether that is a layer, a parameter or a metric.
        since: The step after the last probe before it.
        first, last: Steps.
        level: The highest finite level, infinite where there is none.
        baseline: The median of the probes before.
        is_finite: Whether all of it is finite.
    """

    name: str
    kind: str
    since: int
    first: int
    last: int
    level: float
    baseline: float
    is_finite: bool

    @property
    def ratio(self) -> float:
        """Its highest level over the baseline; infinite where it is not finite."""
        return self.level / self.baseline if self.is_finite else np.inf


class ExplodingGradients(BaseRule):
    """Fires where gradients surge over their own history and the loss suffers for it.

    A surge is ten times the median of the probes before and three times the
    level of the first ones, in two probes in a row, or in one where the loss
    shows it too. Of several the one that did the damage is told, with the
    others as evidence. Where none surges at a probe the loss itself is read: it explodes,
    or ends as NaN after growth. What explodes in its first steps is held
    against its first value. A network that is too large from its start has no
    history of its own: there, gradients that grow from layer to layer on their
    way back, as the activations do on theirs, count.
    """

    rule_id = "exploding_gradients"
    category: AlertCategory = "optimization"
    needs = "there are no gradients and no gradient norm"
    data = ("layer gradients", "parameter gradients")
    threshold = _FACTOR

    def find_limits(self, case: Case) -> tuple[Finding, ...]:
        """Limits on the norm of a layer's gradient."""
        return _LIMIT.find_layers(case, case.run.gradients, "norm")

    def judge(self, case: Case) -> Verdict | None:
        """Look for surges of the gradients, then of the loss, then for a start that is too large.

        Silent of single high probes, of two players whose figures stay finite, of
        surges after which the loss does not rise, of gradients that were that high
        at the first probes, and of a loss that rises while the gradients that were
        watched stay calm.
        """
        series = collect_gradients(case)
        if not series:
            return None
        surges = [surge for item in series for surge in _find_surges(item, case)]
        if surges and _list_players(case) and not _breaks(surges, case):
            return self.stay_quiet(
                "gradients rose far above their own history in a game of two players: those of "
                "one rise, and its loss, when the other one learns"
            )
        if surges:
            return Verdict(findings=(_describe(_group(surges, case), case),))
        finding = read_loss(case, series) or read_depth(case) or read_start(case)
        if finding is not None:
            return Verdict(findings=(finding,))
        ratios = [_highest_ratio(item.value) for item in series]
        highest = max((ratio for ratio in ratios if ratio is not None), default=None)
        return self.stay_quiet(
            "no gradient rose far above its own history"
            if highest is None or highest < _FACTOR
            else "a gradient rose far above its own history, but not for long, or the loss did not "
            "suffer",
            highest,
        )


def _list_players(case: Case) -> list[Curve]:
    """Losses of two players, as of a generator and a discriminator."""
    metrics = case.run.metrics.items()
    return [curve for key, curve in metrics if is_loss(key) and is_player_loss(key)]


def _breaks(surges: list[_Surge], case: Case) -> bool:
    """Whether something ceases to be finite, or all the losses of the players end far up."""
    players = _list_players(case)
    ends = [float(curve.value[-1]) for curve in players if len(curve)]
    if not (np.isfinite(ends).all() and all(item.is_finite for item in surges)):
        return True
    found = [measure_progress(curve) for curve in players]
    return all(each is not None and each.has_blown_up for each in found)


def collect_gradients(case: Case) -> list[Curve]:
    """Norms of gradients: of layers, of weights, and as the run logs it."""
    out = []
    for history in case.run.gradients.values():
        values = history["rms"].copy()
        bad = (np.nan_to_num(history["nan_count"]) + np.nan_to_num(history["inf_count"])) > 0
        values[bad] = np.inf
        out.append(Curve.over_steps(f"layer {history.name}", history.step, values))
    if not out:
        for parameter in case.run.parameters.values():
            values = parameter["gradient_norm"].copy()
            values[np.nan_to_num(parameter["non_finite_gradient_count"]) > 0] = np.inf
            known = ~np.isnan(values)
            if known.any():
                name = f"parameter {parameter.name}"
                out.append(Curve.over_steps(name, parameter.step[known], values[known]))
    logged = find_gradient_norm(case.run.metrics)
    if logged is not None:
        out.append(Curve(f"metric {logged.key}", logged.step, logged.value, logged.epoch))
    return out


def _find_surges(curve: Curve, case: Case) -> list[_Surge]:
    """The surges of a gradient that last and after which the loss gets worse."""
    shown = np.where(np.isnan(curve.value), np.inf, curve.value)
    if len(shown) < _LEAST_POINTS or not np.isfinite(shown[0]):
        return []
    baseline = trailing_median(shown, _WINDOW)
    early, first = float(np.median(take_early(shown))), float(shown[0])
    if early > _FACTOR * first and _blows_up(case):
        early = first  # what explodes at once is no level of its own
    with np.errstate(divide="ignore", invalid="ignore"):
        is_high = (shown > _FACTOR * baseline) & (shown > _EARLY_FACTOR * early)
    kind, _, name = curve.key.partition(" ")
    found: list[_Surge] = []
    end = 0
    for begin in np.flatnonzero(is_high).tolist():
        if begin < end:
            continue
        base = max(float(baseline[begin]), SMALLEST)
        length = _count_staying(shown[begin:], max(_STAYS * _FACTOR * base, _EARLY_FACTOR * early))
        end = begin + length
        since = int(curve.step[begin - 1]) + 1
        after = int(curve.step[end]) if end < len(shown) else None
        if length < _LEAST_PROBES and not _is_confirmed(case, since, after):
            continue
        part = shown[begin:end]
        finite = part[np.isfinite(part)]
        surge = _Surge(
            name, kind, since, int(curve.step[begin]), int(curve.step[end - 1]),
            float(finite.max()) if len(finite) else np.inf, base, len(finite) == len(part),
        )  # fmt: skip
        if case.outcome.worsens_after(since) or (
            after is None and surge.ratio > _CRITICAL_FACTOR and _ends_worse(case, since)
        ):
            found.append(surge)
    return found


def _blows_up(case: Case) -> bool:
    """Whether the loss leaves its first value at once, or breaks, or ends far above it."""
    loss = case.outcome.loss
    if case.outcome.non_finite_step is not None:
        return True
    return loss is not None and (loss.blows_up or loss.has_blown_up)


def _ends_worse(case: Case, since: int) -> bool:
    """Whether the loss ends at twice its level before a step, however noisy it has become."""
    loss = case.outcome.loss
    return loss is not None and 0 < _TWICE * loss.level_before(since) < loss.final


def _count_staying(values: Floats, limit: float) -> int:
    """How many of the first values are beyond a limit."""
    size = _FIRST_CHUNK
    while True:
        below = np.flatnonzero(~(values[:size] > limit))
        if len(below) or size >= len(values):
            return max(1, int(below[0])) if len(below) else len(values)
        size *= 2


def _is_confirmed(case: Case, since: int, after: int | None) -> bool:
    """Whether the loss shows what a single probe does: it breaks then, or blows up for good."""
    outcome = case.outcome
    if outcome.non_finite_step is not None:
        return after is None or since <= outcome.non_finite_step <= after
    loss = outcome.loss
    if loss is None or not outcome.is_poor:
        return False
    unit = max(abs(loss.start), loss.fall, SMALLEST)
    return loss.highest_after(since, after) > loss.level_before(since) + LOSS_FACTOR * unit


def _group(surges: list[_Surge], case: Case) -> list[list[_Surge]]:
    """Surges by what they did: the group of the one that did the damage first.

    Those that overlap are one, and so are those between which the loss has not
    come back.
    """
    loss = case.outcome.loss
    groups: list[list[_Surge]] = []
    for surge in sorted(surges, key=lambda item: (item.first, item.since)):
        if groups:
            last = max(item.last for item in groups[-1])
            if surge.since <= last + 1 or not _has_recovered(loss, groups[-1][0], surge):
                groups[-1].append(surge)
                continue
        groups.append([surge])
    if len(groups) < 2 or loss is None:
        return groups
    breaks = case.outcome.non_finite_step
    ends = [group[0].since for group in groups[1:]]
    damages = [
        loss.highest_after(group[0].since, end - 1 if end is not None else None)
        - loss.level_before(group[0].since)
        for group, end in zip(groups, [*ends, None], strict=True)
    ]
    if breaks is not None:
        started = [index for index, group in enumerate(groups) if group[0].since <= breaks]
        damages[started[-1] if started else 0] = np.inf
    worst = int(np.argmax(damages))
    return [groups[worst], *groups[:worst], *groups[worst + 1 :]]


def _has_recovered(loss: Progress | None, before: _Surge, after: _Surge) -> bool:
    """Whether the loss had come back from one surge before another."""
    if loss is None:
        return True
    base = loss.level_before(before.since)
    rise = loss.highest_after(before.since, after.since - 1) - base
    return loss.level_before(after.since) - base <= RECOVERED * max(rise, 0.0)


def _describe(groups: list[list[_Surge]], case: Case) -> Finding:
    surges = groups[0]
    begin = min(surge.first for surge in surges)
    early = [surge for surge in surges if surge.first == begin]
    # A layer with weights says more than what lies between two of them.
    holders = {item.module_name for item in case.run.parameters.values()}
    weighty = [surge for surge in early if surge.name in holders]
    ranked = rank_by({surge.name: surge.ratio for surge in weighty or early})
    worst = next(surge for surge in early if surge.name == ranked[0])
    last = max(surge.last for surge in surges)
    severity: AlertSeverity = "critical"
    if case.outcome.non_finite_step is None:
        severity = grade(worst.ratio, 0.0, _ERROR_FACTOR, _CRITICAL_FACTOR)
    loss = case.outcome.loss
    others = tuple(dict.fromkeys(item.name for item in surges if item.name != worst.name))
    told = sorted(surges, key=lambda item: (item.first, -item.ratio))[:_MOST_EVIDENCE]
    told += [max(group, key=lambda item: item.ratio) for group in groups[1 : 1 + _MOST_OTHERS]]
    evidence = [
        observe(item.kind, item.name, _format_peak(item, case), item.ratio, _FACTOR, item.first,
                item.last)
        for item in told
    ]  # fmt: skip
    if loss is not None:
        evidence.append(_observe_loss(case, worst.since))
    more = say(", and so did {count} more", count=count_names(others)) if others else say("")
    where = worst.name if worst.kind != "metric" else f"the metric {worst.name}"
    return Finding(
        culprit=worst.name,
        severity=severity,
        title="Gradients explode",
        fact=say(
            "The gradient of {where} {course}{more} ({steps}).",
            where=where, course=_format_peak(worst, case), more=more,
            steps=between_steps(begin, last),
        ),
        inference="The steps are too large for the loss's curvature there, and the loss got worse "
        "after it.",
        suggested_check="Look at the learning rate and the data at that step; clip the gradient's "
        "norm, lower the rate or lengthen the warm-up.",
        evidence=tuple(evidence),
        step=begin,
        step_end=last,
        affected=others,
    )  # fmt: skip


def _format_peak(surge: _Surge, case: Case) -> Text:
    """From which level to which a gradient rose, by what was recorded; NaN is told as such."""
    kind, field = _RECORDED[surge.kind]
    source = Source(kind, surge.name, field)
    base = case.measure_before(source, surge.first, _WINDOW)
    peak = case.measure(kind, surge.name, "highest", field, first=surge.first, last=surge.last)
    ratio = peak / base
    if not surge.is_finite and not ratio.value >= _FACTOR:
        return say("ceased to be finite; its median before was {base}", base=base)
    return say(
        "rose from {base}, the median before, to {peak}, {ratio} times as much{ends}",
        base=base, peak=peak, ratio=ratio,
        ends=say("" if surge.is_finite else ", and ceased to be finite"),
    )  # fmt: skip


def _observe_loss(case: Case, step: int) -> EvidenceRecord:
    item = case.outcome.loss
    assert item is not None
    if case.outcome.non_finite_step is not None:
        return observe(
            "metric", item.key, "the loss ceased to be finite", start=case.outcome.non_finite_step
        )
    source = case.find_source(item.key)
    before = case.measure_before(source, step)
    highest = case.measure_curve(item.key, "highest", first=step)
    return observe(
        "metric", item.key,
        say("the loss went from {before} to {highest}", before=before, highest=highest),
        highest.value, before.value, step,
    )  # fmt: skip


def _highest_ratio(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    if len(finite) < _LEAST_POINTS:
        return None
    base = trailing_median(finite, _WINDOW)[1:]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = finite[1:] / base
    ratios = ratios[np.isfinite(ratios)]
    return float(ratios.max()) if len(ratios) else None


def read_depth(case: Case) -> Finding | None:
    """Gradients that explode with the depth, at the first probes; None where they do not.

    Both the activations, forward, and the gradients, backward, have to grow
    eightfold between the first and the last of the hidden layers, and both
    together two hundredfold; the output has the scale of the targets.
    """
    names = [
        name
        for name, item in case.run.activations.items()
        if item.kind in _KINDS and name in case.run.gradients and len(case.run.gradients[name])
    ]
    if len(names) < _LEAST_LAYERS:
        return None
    with np.errstate(invalid="ignore"):
        forward = np.array([_take_first_level(case.run.activations[name]["std"]) for name in names])
        backward = np.array([_take_first_level(case.run.gradients[name]["rms"]) for name in names])
    forward, backward = forward[:-1], backward[:-1]
    grown = _divide_or_zero(float(forward[-1]), float(forward[0]))
    back = _divide_or_zero(float(backward[0]), float(backward[-1]))
    steady = min(_correlate_ranks(forward), -_correlate_ranks(backward))
    if steady < _STEADY:
        return None
    if grown < _GROWTH or back < _GROWTH or grown * back < _GROWTH_TOGETHER:
        return None
    culprit = names[int(np.nanargmax(backward))]
    first = int(case.run.gradients[culprit].step[0])
    return Finding(
        culprit=culprit,
        severity="error",
        title="Gradients explode with the depth",
        fact=say(
            "At step {step} the gradient of {first} is {back} times that of {last} (root mean "
            "square of an element), and the activations of {last} are {grown} times those of "
            "{first}.",
            step=at_step(first), first=names[0], last=names[-2],
            back=_take_first(case, "gradient", names[0]) / _take_first(case, "gradient", names[-2]),
            grown=_take_first(case, "activation", names[-2])
            / _take_first(case, "activation", names[0]),
        ),
        inference="The weights are too large from the start: every layer amplifies its input.",
        suggested_check="Another initialisation (He, Xavier), normalisation, residual branches "
        "that begin small.",
        evidence=(
            observe("layer", culprit, "gradient of the first layers over that of the last", back,
                    _GROWTH, first),
            observe("layer", names[-1], "activation of the last layers over that of the first",
                    grown, _GROWTH, first),
        ),
        affected=tuple(name for name in names if name != culprit)[:_MOST_NAMED],
    )  # fmt: skip


def read_start(case: Case) -> Finding | None:
    """Gradients that are explosive at the first probes, without regard to any history.

    The norm of a weight's gradient times the weight's norm, over the loss, says
    by how many percent the loss changes for a percent of the weight. It has no
    unit; the loss has to be positive throughout for it to have a meaning.
    """
    progress = case.outcome.train
    if case.outcome.non_finite_step is not None and (found := _find_infinite_start(case)):
        return found
    if progress is None or not min(progress.best, progress.final) > 0 or progress.start <= 0:
        return None
    highest, culprit, first, weight, latest = 0.0, "", 0, "", 0
    for item in case.run.parameters.values():
        if item.role != "weight":
            continue
        products = (item["gradient_norm"] * item["value_norm"])[:_START_PROBES]
        known = products[np.isfinite(products)]
        level = float(np.median(known)) / progress.start if len(known) else 0.0
        if level > highest:
            highest, culprit, first = level, item.owner, int(item.step[0])
            weight, latest = item.name, int(item.step[:_START_PROBES][-1])
    if highest < _ELASTICITY:
        return None
    loss = case.measure_curve(progress.key, "level at the start")
    gradient, norm = (
        case.measure("parameter", weight, "median", field, last=latest)
        for field in ("gradient_norm", "value_norm")
    )
    return Finding(
        culprit=culprit,
        severity="error",
        title="Gradients explode from the start",
        fact=say(
            "At the first probes, from step {first} on, a percent of the weights of {culprit} "
            "changes the loss by {elasticity} percent: their gradient's norm is {gradient}, their "
            "own {norm}, and the loss {loss}.",
            first=at_step(first), culprit=culprit, elasticity=gradient * norm / loss,
            gradient=gradient, norm=norm, loss=loss,
        ),
        inference="Signals are amplified many times on their way, as by a recurrence whose weights "
        "are too large.",
        suggested_check="Smaller or orthogonal initial weights, a gated cell, gradient clipping.",
        evidence=(
            observe("layer", culprit, "norms of gradient and weight over the loss", highest,
                    _ELASTICITY, first),
        ),
        confidence=_CONFIDENCE,
    )  # fmt: skip


def _find_infinite_start(case: Case) -> Finding | None:
    """Gradients that are not finite at the first probe already, while the loss still is."""
    loss = case.train_loss
    if loss is None:
        return None
    at = dict(zip(loss.step.tolist(), loss.value.tolist(), strict=True))
    found: dict[str, int] = {}
    for item in case.run.parameters.values():
        if item["non_finite_gradient_count"][0] > 0 and np.isfinite(
            at.get(int(item.step[0]), np.nan)
        ):
            found.setdefault(item.owner, int(item.step[0]))
    if not found:
        return None
    culprit, first = next(iter(found.items()))
    return Finding(
        culprit=culprit,
        severity="critical",
        title="Gradients explode from the start",
        fact=say(
            "At step {first} the gradient of {culprit} is not finite, while the loss is {loss}; "
            "the loss ceased to be finite at step {end}.",
            first=at_step(first),
            culprit=culprit,
            loss=case.measure_curve(loss.key, "value", first=first, last=first),
            end=at_step(case.outcome.non_finite_step or first),
        ),
        inference="Signals are amplified many times on their way, as by a recurrence whose weights "
        "are too large.",
        suggested_check="Smaller or orthogonal initial weights, a gated cell, gradient clipping.",
        evidence=tuple(
            observe("layer", name, "its gradient is not finite at its first probe", start=step)
            for name, step in list(found.items())[:_MOST_EVIDENCE]
        ),
        step=first,
        affected=tuple(name for name in found if name != culprit)[:_MOST_NAMED],
    )


def _correlate_ranks(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Rank correlation with the place, by Spearman."""
    ranks = np.argsort(np.argsort(values))
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1]) if len(values) > 2 else 0.0


def _take_first_level(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    known = values[np.isfinite(values)][:_DEPTH_PROBES]
    return float(np.median(known)) if len(known) else np.nan


def _take_first(case: Case, kind: FigureKind, name: str) -> Figure:
    """A layer's level at its first probes."""
    table = case.run.activations if kind == "activation" else case.run.gradients
    last = int(table[name].step[:_DEPTH_PROBES][-1])
    field = "std" if kind == "activation" else "rms"
    return case.measure(kind, name, "median", field, last=last)


def _divide_or_zero(one: float, other: float) -> float:
    return float(one / other) if other > 0 and np.isfinite(one) else 0.0
