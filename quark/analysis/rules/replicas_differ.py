"""Replicas of a model that part, though they should be the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case
from quark.analysis.curves import ParameterHistory
from quark.analysis.observations import (
    Figure,
    at_step,
    count_longest,
    count_names,
    count_run,
    observe,
    say,
)
from quark.analysis.rule import BaseRule, Finding, Verdict
from quark_core.records.kinds.findings import AlertCategory, EvidenceRecord

_LEAST_PROBES = 2
_LONGER = 3  # times the longest time apart that ended, where replicas come together again
_ROUNDING = 1e-6  # of a norm: less is the order in which numbers are added
_MOSTLY = 0.9
_NAMED = 5
_FARTHER = 1.5  # times what the updates so far can have moved two ranks apart
_LEAST_GROWING = 6  # probes
_PARTS = 3  # of the probes: the first is held against the last
_GROWN, _GROWING_SHARE = 4.0, 0.5  # times as many updates apart at the end; share of parameters
_FEWEST = 2  # parameters, all of which differ from the first probe on

Mask = NDArray[np.bool_]
Pair = tuple[ParameterHistory, ParameterHistory]


@dataclass(frozen=True)
class _Parting:
    """Where one parameter of two ranks is no longer the same, to the end.

    Attributes:
        rank: The other rank.
        step: First probe that shows it.
        is_first: Whether that is the first probe of all.
        shares_gradients: Whether the gradients are the same all the same.
        starts_apart: Whether no common start can lie before the first probe.
        goes_apart: Whether the two are many more updates apart at the end than at the start.
        norms: Of both at the last probe.
    """

    rank: int
    name: str
    module: str
    order: int
    step: int
    last: int
    is_first: bool
    shares_gradients: bool
    starts_apart: bool
    goes_apart: bool
    norms: tuple[float, float]

    @property
    def distance(self) -> float:
        """How far the norms are apart, as a share."""
        low, high = sorted(abs(norm) for norm in self.norms)
        return (high - low) / high if high > 0 else 0.0


class ReplicasDiffer(BaseRule):
    """Fires where ranks that began with the same weights, or share gradients, have others.

    The bits of each parameter are compared, as a digest of them, and its norm
    where there is none. Parts of a sharded parameter differ by design; so do
    weights that come together again, as with averaging now and then, and some
    that are different from the first probe on with gradients of their own. Where
    that holds of every single one, and no common start can have been, or they go
    apart farther and farther, nothing is shared: each rank trains a model of its own.
    """

    rule_id = "replicas_differ"
    category: AlertCategory = "optimization"
    needs = 'it needs summaries of parameters of several ranks (ranks="all")'
    data = ("parameter summaries of several ranks",)
    tables = ("parameters",)

    def judge(self, case: Case) -> Verdict | None:
        """Hold the parameters of each rank against those of the lowest one."""
        replicas = case.run.replicas
        pairs = [(rank, *pair) for rank, pair in _list_pairs(replicas)]
        if not pairs:
            return None
        if all(_is_sharded(first) or _is_sharded(other) for _, first, other in pairs):
            return self.stay_quiet("the parameters are sharded, so that ranks have other parts")
        found = [
            parting
            for rank, first, other in pairs
            if not _is_sharded(first) and not _is_sharded(other)
            if (parting := _find_parting(rank, first, other)) is not None
        ]
        if not found:
            return self.stay_quiet(f"{len(replicas)} ranks have the same parameters, or come "
                                   "together again")  # fmt: skip
        wrong = [item for item in found if not item.is_first or item.shares_gradients]
        if not wrong and _is_never_shared(pairs, found, case):
            return Verdict(findings=(_describe_strangers(found, case),))
        if not wrong:
            return self.stay_quiet(
                "what differs does so from the first probe on, with gradients of its own: each "
                "rank has its own part by design"
            )
        return Verdict(findings=(_describe(wrong, case),))


def _list_pairs(
    replicas: Mapping[int, Mapping[str, ParameterHistory]],
) -> Iterator[tuple[int, Pair]]:
    """What the lowest rank and another one have both, at the steps that both have."""
    ranks = sorted(replicas)
    for rank in ranks[1:]:
        for name, other in replicas[rank].items():
            first = replicas[ranks[0]].get(name)
            if first is None:
                continue
            common = np.intersect1d(first.step, other.step)
            if len(common):
                yield rank, (first, other)


def _is_never_shared(
    pairs: list[tuple[int, ParameterHistory, ParameterHistory]],
    found: list[_Parting],
    case: Case,
) -> bool:
    """Whether ranks hold a whole model each that has nothing of the others, from its start on.

    Stages of a pipeline have other parameters; experts share the rest of the model; what is
    averaged now and then, though never at a probe, has a common start.
    """
    replicas = list(case.run.replicas.values())
    if any(set(item) != set(replicas[0]) for item in replicas[1:]):
        return False
    if len(replicas[0]) < _FEWEST or len(found) < len(pairs):
        return False
    progress = case.outcome.train
    if progress is None or not progress.has_fallen:
        return False
    ranks = {rank for rank, *_ in pairs}
    return {item.rank for item in found if item.starts_apart} == ranks or all(
        _go_apart([item for item in found if item.rank == rank]) for rank in ranks
    )


def _go_apart(found: list[_Parting]) -> bool:
    """Whether most of a rank's parameters go farther and farther from those of the lowest one."""
    return sum(item.goes_apart for item in found) > _GROWING_SHARE * len(found)


def _start_apart(first: ParameterHistory, other: ParameterHistory) -> bool:
    """Whether the first probe shows two ranks farther apart than updates can have brought them.

    See `_measure_apart`.
    """
    steps = int(max(first.step[0], other.step[0])) + 1
    updates = [item["update_norm"][np.isfinite(item["update_norm"])][:2] for item in (first, other)]
    if not all(len(known) for known in updates):
        return False
    moved = steps * sum(float(known.max()) for known in updates)
    apart = _measure_apart(first, other, np.array([0]), np.array([0]))
    return bool(apart[0] > _FARTHER * moved)


def _measure_apart(
    first: ParameterHistory,
    other: ParameterHistory,
    own: NDArray[np.int64],
    theirs: NDArray[np.int64],
) -> NDArray[np.float64]:
    """How far two ranks are apart at least, at these rows; 0 where that is not known.

    The distance of two vectors is at least the difference of their norms, of their extremes,
    and of their means times the root of their length. The length follows from norm, mean and
    deviation.
    """
    mean, std, norm = (float(first[f"value_{name}"][0]) for name in ("mean", "std", "norm"))
    square = mean**2 + std**2
    length = norm**2 / square if square > 0 else 0.0
    apart = [
        np.abs(first[f"value_{name}"][own] - other[f"value_{name}"][theirs]) * factor
        for name, factor in (("norm", 1.0), ("min", 1.0), ("max", 1.0), ("mean", length**0.5))
    ]
    return np.asarray(np.nan_to_num(apart, posinf=0.0).max(axis=0))


def _is_diverging(
    first: ParameterHistory,
    other: ParameterHistory,
    own: NDArray[np.int64],
    theirs: NDArray[np.int64],
) -> bool:
    """Whether two ranks are many more updates apart in the last third than in the first.

    What is averaged after every so many steps is never more than so many updates apart.
    """
    moved = first["update_norm"][own] + other["update_norm"][theirs]
    known = np.isfinite(moved) & (moved > _ROUNDING * np.abs(first["value_norm"][own]))
    if known.sum() < _LEAST_GROWING:
        return False
    updates = _measure_apart(first, other, own, theirs)[known] / moved[known]
    third = len(updates) // _PARTS
    early, late = float(np.median(updates[:third])), float(np.median(updates[-third:]))
    return late > max(_GROWN * early, _FARTHER)


def _is_sharded(item: ParameterHistory) -> bool:
    return bool(item["sharded"].any())


def _find_parting(rank: int, first: ParameterHistory, other: ParameterHistory) -> _Parting | None:
    common = np.intersect1d(first.step, other.step)
    own, theirs = np.searchsorted(first.step, common), np.searchsorted(other.step, common)
    differs = _compare(first, other, own, theirs)
    lasting = count_run(differs)
    if lasting < min(_LEAST_PROBES, len(common)):
        return None
    row = len(common) - lasting
    if lasting < _LONGER * count_longest(differs[:row]):
        return None  # they come together again, as they did before
    gradients, others = first["gradient_norm"][own], other["gradient_norm"][theirs]
    known = (gradients > 0) & (others > 0)
    alike = np.abs(gradients - others) <= _ROUNDING * np.maximum(gradients, others)
    return _Parting(
        rank,
        first.name,
        first.owner,
        first.order,
        int(common[row]),
        int(common[-1]),
        row == 0,
        bool(known.any()) and float(alike[known].mean()) >= _MOSTLY,
        _start_apart(first, other),
        _is_diverging(first, other, own, theirs),
        (float(first["value_norm"][own[-1]]), float(other["value_norm"][theirs[-1]])),
    )


def _compare(
    first: ParameterHistory,
    other: ParameterHistory,
    own: NDArray[np.int64],
    theirs: NDArray[np.int64],
) -> Mask:
    """At which common probes the two are not the same."""
    out = np.zeros(len(own), dtype=np.bool_)
    norms, others = first["value_norm"][own], other["value_norm"][theirs]
    with np.errstate(invalid="ignore"):
        apart = np.abs(norms - others) > _ROUNDING * np.maximum(np.abs(norms), np.abs(others))
    for row, (left, right) in enumerate(zip(own.tolist(), theirs.tolist(), strict=True)):
        digests = first.digests[left], other.digests[right]
        known = None not in digests
        out[row] = digests[0] != digests[1] if known else bool(apart[row])
    return out


def _describe(found: list[_Parting], case: Case) -> Finding:
    first = min(found, key=lambda item: (item.step, item.order, item.rank))
    names = list(dict.fromkeys(item.module for item in sorted(found, key=lambda one: one.order)))
    others = tuple(name for name in names if name != first.module)
    is_rounding = max(item.distance for item in found) <= _ROUNDING
    apart = sorted({item.name for item in found} - {first.name})
    begin = (
        "from the first probe on, though their gradients are the same"
        if first.is_first
        else say("from step {step} on", step=at_step(first.step))
    )
    return Finding(
        culprit=first.module,
        severity="info" if is_rounding else "error",
        title="Replicas differ",
        fact=say(
            "{name} of {rank} is not that of the lowest rank {begin}; at step {last} their norms "
            "are {theirs} and {own}{more}.",
            name=first.name, rank=f"rank {first.rank}", begin=begin, last=at_step(first.last),
            theirs=_measure_norm(first, case, None), own=_measure_norm(first, case, first.rank),
            more=say(", and {count} more parameters differ", count=count_names(apart))
            if apart else say(""),
        ),
        inference="Each rank trains a separate model, of which one is saved."
        if not is_rounding
        else "The difference is as small as that of numbers added in another order.",
        suggested_check="Look at what is not synchronised from there on: a no_sync() that does not "
        "end, a parameter that DDP does not know, changes of weights on one rank only, a seed or "
        "a checkpoint that only one rank has loaded.",
        evidence=_list_evidence(found),
        step=first.step,
        step_end=first.last,
        affected=others,
    )  # fmt: skip


def _describe_strangers(found: list[_Parting], case: Case) -> Finding:
    first = min(found, key=lambda item: (item.step, item.order, item.rank))
    names = list(dict.fromkeys(item.module for item in sorted(found, key=lambda one: one.order)))
    apart = sorted({item.name for item in found})
    is_other_start = any(item.starts_apart for item in found)
    return Finding(
        culprit=first.module,
        severity="warning",
        title="Each rank trains a separate model",
        fact=say(
            "All {count} parameters of {rank} are others than those of the lowest rank from the "
            "first probe on, with gradients of their own; at step {last} the norms of {name} are "
            "{theirs} and {own}. {how}",
            count=count_names(apart), rank=f"rank {first.rank}", last=at_step(first.last),
            name=first.name, theirs=_measure_norm(first, case, None),
            own=_measure_norm(first, case, first.rank),
            how="They are farther apart than updates can have brought them."
            if is_other_start
            else "They go farther and farther apart, by many more updates than at first.",
        ),
        inference=say(
            "The ranks {began} exchange nothing: of several trainings one is saved, and each sees "
            "a part of the data.",
            began="began with different weights and" if is_other_start else "may have begun "
            "alike, but they",
        ),
        suggested_check="See that the model is wrapped (DDP, FSDP) and that it is the wrapper that "
        "is called, not the module in it, or that gradients are averaged; that the process group "
        "is the one of the launch, and that all ranks begin with the same weights. Members "
        "of an ensemble are meant to be so: give each a run of its own.",
        evidence=_list_evidence(found),
        step=first.step,
        step_end=first.last,
        affected=tuple(name for name in names if name != first.module),
    )  # fmt: skip


def _list_evidence(found: list[_Parting]) -> tuple[EvidenceRecord, ...]:
    return tuple(
        observe("parameter", item.name, say("{rank} differs", rank=f"rank {item.rank}"),
                item.distance, _ROUNDING, item.step, item.last)
        for item in sorted(found, key=lambda one: (one.step, one.order))[:_NAMED]
    )  # fmt: skip


def _measure_norm(found: _Parting, case: Case, rank: int | None) -> Figure:
    """The norm of a parameter of a rank, or of the lowest one, at the last probe."""
    return case.measure(
        "parameter", found.name, "value", "value_norm", first=found.last,
        last=found.last, rank=rank,
    )  # fmt: skip
