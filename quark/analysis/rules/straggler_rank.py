"""A rank that all others wait for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case
from quark.analysis.observations import Figure, between_steps, count_names, observe, say
from quark.analysis.rule import BaseRule, Finding, Verdict, grade
from quark_core.records.kinds.findings import AlertCategory

Floats = NDArray[np.float64]

_LEAST_STEPS = 20  # that all ranks have timed
_WARM_UP = 3  # steps that compile and fill caches
_WINDOWS, _LEAST_WINDOW = 10, 5  # stretches of the run, and the steps of the shortest
_LASTING = 0.3  # share of the windows, to the end, that it is slow in
_MOSTLY = 0.8  # of these windows: one may be an exception
_SLOWER = 0.25  # of the others' step, by which it is slower
_LEAST_MS = 2.0  # less is the clock's and the machine's
_ERROR, _CRITICAL = 0.6, 1.5
_FIELDS = ("data_time_ms", "compute_time_ms", "step_time_ms")
_DOES = {
    "data_time_ms": "waits for its data",
    "compute_time_ms": "computes",
    "step_time_ms": "takes for a step",
}


@dataclass(frozen=True)
class _Straggler:
    rank: int
    field: str
    share: float
    first: int
    last: int


class StragglerRank(BaseRule):
    """Fires where one rank is slower than the others for good, by a quarter of their step.

    In a step that ends for all ranks at once, the others wait: then the time
    to the data, or that of the computation before the exchange, tells who is
    late. Medians over windows leave evaluations and checkpoints of one rank out.
    """

    rule_id = "straggler_rank"
    category: AlertCategory = "runtime"
    needs = f"it needs times of {_LEAST_STEPS} steps of two ranks (ranks='all')"
    data = ("step times of several ranks",)
    tables = ("rank_telemetry",)
    threshold = _SLOWER

    def judge(self, case: Case) -> Verdict | None:
        """Look for a rank whose data, computation or step takes longer than the others' to the end.

        Silent of ranks that differ by less than a quarter of a step or two
        milliseconds, of what passes, and of single slow steps.
        """
        ranks = case.run.rank_telemetry
        highest, looked, found = 0.0, False, []
        for field in _FIELDS:
            steps, times = _align(case, field)
            if len(times) < 2 or len(steps) < _LEAST_STEPS:
                continue
            looked = True
            whole = _align(case, "step_time_ms")[1]
            for rank in times:
                share, straggler = _look(rank, field, steps, times, whole)
                highest = max(highest, share)
                if straggler is not None:
                    found.append(straggler)
        if not looked or len(ranks) < 2:
            return None
        if not found:
            return self.stay_quiet("all ranks take about the same time", highest)
        worst = max(found, key=lambda item: (item.share, -_FIELDS.index(item.field)))
        return Verdict(
            findings=(_describe(case, worst),), observed=worst.share, threshold=self.threshold
        )


def _align(case: Case, field: str) -> tuple[NDArray[np.int64], dict[int, Floats]]:
    """Times of each rank at the steps that all of them have, without the first ones."""
    known: dict[int, dict[int, float]] = {}
    for rank, rows in case.run.rank_telemetry.items():
        steps, values = rows["step"], rows[field]
        kept = (steps >= 0) & np.isfinite(values)
        if kept.any():
            known[rank] = dict(zip(steps[kept].tolist(), values[kept].tolist(), strict=True))
    if not known:
        return np.empty(0, dtype=np.int64), {}
    common = sorted(set.intersection(*(set(times) for times in known.values())))[_WARM_UP:]
    return np.array(common, dtype=np.int64), {
        rank: np.array([times[step] for step in common]) for rank, times in known.items()
    }


def _look(
    rank: int,
    field: str,
    steps: NDArray[np.int64],
    times: dict[int, Floats],
    whole: dict[int, Floats],
) -> tuple[float, _Straggler | None]:
    """By which share of the others' step a rank is slower at the end, and whether for long."""
    size = max(_LEAST_WINDOW, len(steps) // _WINDOWS)
    parts = [slice(low, low + size) for low in range(0, len(steps) - size // 2, size)]
    others = [other for other in times if other != rank]
    shares = []
    for part in parts:
        own = float(np.median(times[rank][part]))
        # The slowest of the others: two late ranks are no single straggler.
        usual = max(float(np.median(times[other][part])) for other in others)
        step = _take_step(whole, others, times, part)
        late = own - usual
        shares.append(late / step if late >= _LEAST_MS and step > 0 else 0.0)
    is_slow = np.array(shares) >= _SLOWER
    least = max(2, round(_LASTING * len(parts)))
    if len(parts) < least or is_slow[-least:].mean() < _MOSTLY or not is_slow[-1]:
        return max(shares, default=0.0), None
    start = len(parts) - least
    while start > 0 and is_slow[start - 1]:
        start -= 1
    while not is_slow[start]:
        start += 1
    share = float(np.median(np.array(shares)[start:]))
    first, last = int(steps[parts[start].start]), int(steps[-1])
    return share, _Straggler(rank, field, share, first, last)


def _take_step(
    whole: dict[int, Floats], others: list[int], times: dict[int, Floats], part: slice
) -> float:
    """A usual step of the other ranks; of what is compared where steps are not timed."""
    source = whole if all(other in whole for other in others) else times
    found = [source[other][part] for other in others]
    return float(np.median(np.concatenate(found))) if found else 0.0


def _describe(case: Case, found: _Straggler) -> Finding:
    others = [rank for rank in case.run.rank_telemetry if rank != found.rank]
    own, *rest = (_measure(case, rank, found) for rank in (found.rank, *others))
    usual = max(rest, key=lambda figure: figure.value)
    rank = f"rank {found.rank}"
    is_data = found.field == "data_time_ms"
    return Finding(
        culprit=rank,
        severity=grade(found.share, 0.0, _ERROR, _CRITICAL),
        title="One rank is late for its data" if is_data else "One rank is slower than the others",
        fact=say(
            "{rank} {does} {own} ms (median), the slowest of the {count} others {usual} ms "
            "({steps}).",
            rank=rank, does=_DOES[found.field], own=own, usual=usual,
            count=count_names(f"rank {other}" for other in others),
            steps=between_steps(found.first, found.last),
        ),
        inference="All ranks wait for it where they exchange gradients: the whole training is as "
        "slow as this rank.",
        suggested_check="Look at its share of the data, its loader's workers and its storage."
        if is_data
        else "Look at its node and device: clock, heat, another job, a slower link; and whether "
        "it has longer samples.",
        evidence=(
            observe("telemetry", rank, say("{field} of this rank", field=found.field), own.value,
                    usual.value, found.first, found.last),
        ),
    )  # fmt: skip


def _measure(case: Case, rank: int, found: _Straggler) -> Figure:
    return case.measure(
        "telemetry", "", "median", found.field, first=found.first, last=found.last,
        rank=rank,
    )  # fmt: skip
