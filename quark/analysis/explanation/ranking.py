"""Who did it: each difference with its standing, from pairs, history, and being the only one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quark.analysis.explanation.attribution import Attribution
from quark.analysis.explanation.differences import Difference
from quark.analysis.explanation.results import (
    Cause,
    ChangeVerdict,
    Effect,
    NoiseFloor,
    Parting,
    Remark,
    Standing,
)
from quark.analysis.explanation.timing import fits_parting, weigh_parting
from quark.analysis.explanation.traits import Place, is_incidental
from quark.analysis.observations import format_number
from quark.provenance.numeric_facts import NUMERIC_PACKAGES
from quark_core.records import EvidenceRecord

_AGREEMENT = 0.8
"""Share of resamples that must hold one cause for the largest before it is probable."""

_MOST_SHARE = 0.25
"""Share of the change below which an effect cannot be what brought it about."""

_LEAST_SHARE = 0.4
"""Share of the change from which on an effect may explain it."""

_LEAST_TO_ACQUIT = 60
"""Runs from which on a regression may say that something has no effect: with fewer it is drawn
to none of its own."""

_KINDS = ("seed", "data", "config", "code", "launch", "switch", "package", "hardware")
_CHANGES = ("better", "worse", "changed")
_STANDINGS: tuple[Standing, ...] = ("probable", "possible", "unlikely")

_NEVER_RECORDED = (
    Remark("switch", "environment variables", "few are recorded, by a fixed list"),
    Remark("data", "files without a fingerprint", "what else the code has read"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """What is judged.

    Attributes:
        verdict: Whether there is a change.
        change: By how much the metric changed, or None.
        floor: What chance does, or None.
        differences: What differs.
        unknown: What was not recorded.
        pairs: Difference -> what runs say that differ in it alone.
        attribution: What a regression says, or None.
        parting: Where the curves part.
        has_hidden: Whether something that was not recorded differs for sure.
    """

    verdict: ChangeVerdict
    change: float | None
    floor: NoiseFloor | None
    differences: Sequence[Difference]
    unknown: Sequence[Remark]
    pairs: Mapping[Place, Effect]
    attribution: Attribution | None
    parting: Parting
    has_hidden: bool = False


def rank_causes(case: Case) -> tuple[Cause, ...]:
    """The causes, the most likely first."""
    judged = [(_judge(case, each), each) for each in case.differences]
    judged.sort(key=lambda pair: _order(pair[0], pair[1], case))
    return tuple(cause for cause, _ in judged)


def list_never_recorded(case: Case, causes: Sequence[Cause]) -> tuple[Remark, ...]:
    """What no run records and may be to blame, where nothing that is recorded explains a change."""
    explained = any(cause.standing != "unlikely" for cause in causes)
    return () if explained or case.verdict not in _CHANGES else _NEVER_RECORDED


def _judge(case: Case, difference: Difference) -> Cause:
    pieces: list[tuple[Standing, EvidenceRecord]] = []
    pairs = case.pairs.get(difference.key)
    history = None
    together: tuple[Place, ...] = ()
    if case.attribution is not None:
        history = case.attribution.effects.get(difference.key)
        together = case.attribution.together.get(difference.key, ())
    pieces += _weigh_pairs(case, difference, pairs)
    pieces += _weigh_history(case, difference, history, settled=bool(pieces))
    pieces += _weigh_alone(case, difference)
    pieces += _weigh_timing(case, difference)
    pieces += _weigh_kind(case, difference)
    standing = _decide(case, [standing for standing, _ in pieces])
    words = [piece.summary for _, piece in pieces]
    if difference.words and difference.words not in words:
        words.insert(0, difference.words)
    if not pieces:
        words.append("no other run tells")
    return Cause(
        difference.kind,
        difference.place,
        difference.before,
        difference.after,
        standing,
        pairs or history,
        "; ".join(words),
        tuple(piece for _, piece in pieces),
        tuple(place for _, place in together),
        difference.repeats,
    )


def _decide(case: Case, standings: Sequence[Standing]) -> Standing:
    """The first piece of evidence that says more than possible decides: they come in order."""
    told: Standing = next(
        (standing for standing in standings if standing != "possible"), "possible"
    )
    if told == "probable" and case.verdict in ("cannot_tell", "no_difference"):
        return "possible"
    return told


def _weigh_pairs(
    case: Case, difference: Difference, effect: Effect | None
) -> list[tuple[Standing, EvidenceRecord]]:
    if effect is None or case.change is None:
        return []
    pairs = f"{effect.count} pair{'s' if effect.count != 1 else ''} of runs differ in this alone"
    standing = judge_effect(effect, case.change)
    words = f"{pairs}: {_show(effect)}"
    if standing == "unlikely" and effect.low is not None and effect.high is not None:
        reach = max(abs(effect.low), abs(effect.high))
        if effect.low <= 0.0 <= effect.high:
            words = f"{pairs}: no effect seen (|d| < {_short(reach)})"
    return [(standing, _note("pairs", difference, words, effect))]


def judge_effect(effect: Effect, change: float) -> Standing:
    """Whether what runs say that differ in one thing alone explains a change."""
    if effect.low is None or effect.high is None:
        return "possible"
    size, reach = abs(change), max(abs(effect.low), abs(effect.high))
    towards = effect.difference * (1.0 if change > 0 else -1.0)
    if effect.low <= 0.0 <= effect.high:
        return "unlikely" if reach < _MOST_SHARE * size else "possible"
    if towards > _LEAST_SHARE * size:
        return "probable"
    return "unlikely" if towards < 0.0 or reach < _MOST_SHARE * size else "possible"


def _weigh_history(
    case: Case, difference: Difference, effect: Effect | None, *, settled: bool
) -> list[tuple[Standing, EvidenceRecord]]:
    if effect is None or case.change is None or effect.low is None or effect.high is None:
        return []
    size = abs(case.change)
    agreement = effect.agreement or 0.0
    towards = effect.difference * (1.0 if case.change > 0 else -1.0)
    standing: Standing = "possible"
    told = f"{effect.count} runs of the project: {_show(effect)}"
    reach = max(abs(effect.low), abs(effect.high))
    if agreement >= _AGREEMENT and towards > _LEAST_SHARE * size:
        standing = "probable"
        told += f", the largest one in {100 * agreement:.0f} % of resamples"
    elif reach < _MOST_SHARE * size and effect.count >= _LEAST_TO_ACQUIT:
        standing = "unlikely"
        told = f"{effect.count} runs of the project: no effect seen (|d| < {_short(reach)})"
    elif settled:
        return []
    return [(standing, _note("history", difference, told, effect))]


def _weigh_alone(case: Case, difference: Difference) -> list[tuple[Standing, EvidenceRecord]]:
    """The only thing that differs did it, where enough was recorded to say so."""
    others = [
        each
        for each in case.differences
        if each is not difference
        and each.kind != "seed"
        and not each.is_aside
        and not each.may_follow
        and not is_incidental(each.key)
    ]
    if difference.kind == "seed" or difference.is_aside or others:
        return []
    if is_incidental(difference.key):
        words = "nothing else that is recorded differs, but by its name it is no setting"
        return [("possible", _note("alone", difference, words, None))]
    if case.has_hidden:
        words = "nothing else that is recorded differs, but something else does"
        return [("possible", _note("alone", difference, words, None))]
    if difference.may_follow:
        words = "nothing else that is recorded differs, but it may follow from what is not"
        return [("possible", _note("alone", difference, words, None))]
    named = [each.place for each in case.differences if is_incidental(each.key)]
    missing = sorted({remark.kind for remark in case.unknown if not remark.place})
    words = "nothing else that is recorded differs"
    if named:
        words += f", but for {', '.join(named)}"
    if missing:
        words += f" (not recorded: {', '.join(missing)})"
    return [("probable", _note("alone", difference, words, None))]


def _weigh_timing(case: Case, difference: Difference) -> list[tuple[Standing, EvidenceRecord]]:
    words = weigh_parting(difference, case.parting)
    if words is None:
        return []
    fits = fits_parting(difference, case.parting)
    others = [
        each
        for each in case.differences
        if each is not difference and fits_parting(each, case.parting) is not False
    ]
    standing: Standing = "unlikely" if fits is False and others else "possible"
    piece = EvidenceRecord(
        "timing", difference.place, words, step_start=case.parting.step, record_kind="metric",
        record_name=case.parting.metric_key, field="value",
    )  # fmt: skip
    return [(standing, piece)]


def _weigh_kind(case: Case, difference: Difference) -> list[tuple[Standing, EvidenceRecord]]:
    if difference.kind == "seed":
        others = [each for each in case.differences if each.kind != "seed"]
        if case.verdict in _CHANGES and (others or case.floor is not None):
            words = "the change is more than seeds do"
            return [("unlikely", _note("noise", difference, words, None))]
        if not others:
            return [("probable", _note("alone", difference, "nothing else differs", None))]
    if difference.is_aside:
        return [("unlikely", _note("kind", difference, difference.words, None))]
    if difference.may_follow and any(not each.may_follow for each in case.differences):
        words = "may follow from what else differs"
        return [("possible", _note("kind", difference, words, None))]
    return []


def _order(cause: Cause, difference: Difference, case: Case) -> tuple[object, ...]:
    share = 0.0
    if cause.effect is not None and case.change:
        share = cause.effect.difference / case.change
    agreement = 0.0 if cause.effect is None else cause.effect.agreement or 0.0
    return (
        _STANDINGS.index(cause.standing),
        _rank_effect(cause.effect, case),
        fits_parting(difference, case.parting) is not True,
        -agreement,
        -share,
        is_incidental(difference.key),
        difference.may_follow,
        _KINDS.index(cause.kind),
        cause.kind == "package" and not _is_numeric(difference),
        cause.place,
    )


def _rank_effect(effect: Effect | None, case: Case) -> int:
    """What may explain the change by its size comes first, and what nobody knows next."""
    if effect is None:
        return 1
    bounds = [abs(bound) for bound in (effect.low, effect.high) if bound is not None]
    reach = max(bounds, default=abs(effect.difference))
    return 0 if reach >= _MOST_SHARE * abs(case.change or 0.0) else 2


def _is_numeric(difference: Difference) -> bool:
    name = difference.place.lower().replace("_", "-")
    return name in NUMERIC_PACKAGES or name.startswith(("python", "cuda", "blas", "nvidia-"))


def _note(kind: str, difference: Difference, summary: str, effect: Effect | None) -> EvidenceRecord:
    return EvidenceRecord(
        kind, difference.place, summary, None if effect is None else effect.difference
    )


def _show(effect: Effect) -> str:
    text = _sign(effect.difference)
    if effect.low is not None and effect.high is not None:
        text += f" ({_short(effect.low)} to {_short(effect.high)})"
    return text


def _sign(value: float) -> str:
    return f"{'+' if value >= 0 else ''}{_short(value)}"


def _short(value: float) -> str:
    return format_number(float(f"{value:.3g}"))
