"""The speed of each rank, the rank that the others wait for, and the total throughput."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quark_core.ranks.statistics import compare_ranks
from quark_core.records import EventRecord, MetricRecord, SystemTelemetryRecord, format_time
from quark_core.records.query import Query
from quark_core.runs.following import read_series
from quark_core.runs.reading import read_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from quark_core.backends.contract import SupportsRead
    from quark_core.backends.run_summary import RunSummary
    from quark_core.records.columns import Columns

_MAX_STEPS = 1000
_MIN_STEPS = 50
_MAX_ROWS = 200_000
# What is less late than this, or less often the last, is chance.
_LATE_SHARE = 0.05
_LATE_STEPS = 0.5
_ABOVE_CHANCE = 1.5  # times the share of the steps at which ranks that are alike are the slowest
_SILENT_S = 30.0
# What is less far behind than this is chance, or is on its way from its process to the store.
_BEHIND_STEPS = 10
_BEHIND_RECORDS = 2
_ON_ITS_WAY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPace:
    """One rank in the newest steps of a run.

    Attributes:
        rank: The rank.
        host: Its host, where it has said so.
        records: Its metrics and telemetry in these steps.
        last_step: Its newest step, or None.
        last_seen: Time of its newest record or event.
        step_ms: Median time of a step, or None where none is known.
        step_p90_ms: 90 % of its steps take no longer.
        data_ms: Median time until a step's batch was ready, or None.
        slowest: Share of the steps, of those that several ranks have, at which
            it took longest; None where there are none.
        behind_ms: How much longer than the median of the other ranks its
            median step takes.
        steps_behind: How many steps before the newest one of all ranks it is, less those
            that it does in the time until it is heard of; where `last_step` is None, but
            it has logged steps before, at least so many. None where it logs no steps.
        is_behind: Whether that is more than chance.
    """

    rank: int
    host: str | None
    records: int
    last_step: int | None
    last_seen: str
    step_ms: float | None = None
    step_p90_ms: float | None = None
    data_ms: float | None = None
    slowest: float | None = None
    behind_ms: float | None = None
    steps_behind: int | None = None
    is_behind: bool = False

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPaces:
    """The ranks of a run's newest attempt, in its newest steps.

    Attributes:
        ranks: The ranks, sorted.
        first_step: The first of the steps that were looked at.
        is_timed: Whether the times are those of telemetry; otherwise they are
            from one step's first metric to the next one's.
    """

    ranks: tuple[RankPace, ...]
    first_step: int
    is_timed: bool

    def find_late(self) -> RankPace | None:
        """The rank that takes longer than the others at most steps, or None."""
        timed = [rank for rank in self.ranks if rank.behind_ms is not None and rank.step_ms]
        late = max(timed, key=lambda rank: rank.behind_ms or 0.0, default=None)
        if late is None or late.step_ms is None or late.behind_ms is None:
            return None
        usual_ms = late.step_ms - late.behind_ms
        is_late = late.behind_ms > _LATE_SHARE * max(usual_ms, 0.0)
        # One of two ranks is the slowest at half of the steps by chance.
        least = max(_LATE_STEPS, _ABOVE_CHANCE / len(timed))
        return late if is_late and (late.slowest or 0.0) >= least else None

    def find_behind(self) -> list[RankPace]:
        """Ranks that are steps behind, at whatever pace, but those that are silent."""
        silent = {rank.rank for rank, _ in self.find_silent()}
        return [rank for rank in self.ranks if rank.is_behind and rank.rank not in silent]

    def find_silent(self) -> list[tuple[RankPace, float]]:
        """Ranks that were last seen long before the latest one, and by how many seconds."""
        from datetime import datetime

        seen = [datetime.fromisoformat(rank.last_seen) for rank in self.ranks]
        latest = max(seen)
        gaps = [(latest - moment).total_seconds() for moment in seen]
        return [(rank, gap) for rank, gap in zip(self.ranks, gaps, strict=True) if gap > _SILENT_S]


def measure_paces(reader: SupportsRead, summary: RunSummary) -> RankPaces | None:
    """How the ranks of a run get on; None where it has one rank only.

    Reads a bounded number of rows, those of the newest steps.

    Args:
        reader: What the run is read from.
        summary: The run.
    """
    import numpy as np

    run_id = summary.run_id
    query = Query(any_of={"event_type": ("rank_joined", "rank_left")})
    events = reader.read(run_id, EventRecord.KIND, query)
    events = _keep_newest_attempt(events)
    joined = sorted({int(rank) for rank in events["rank"]})
    if len(joined) < 2:
        return None
    per_step = len(joined) * max(1, len(summary.metrics))
    span = min(_MAX_STEPS, max(_MIN_STEPS, _MAX_ROWS // per_step))
    first_step = max(0, (summary.newest_step or 0) - span + 1)
    window = Query(step_min=first_step)
    telemetry = _keep_newest_attempt(reader.read(run_id, SystemTelemetryRecord.KIND, window))
    metrics = _keep_newest_attempt(reader.read(run_id, MetricRecord.KIND, window))
    times = _take_times(telemetry)
    is_timed = len(np.unique(times["rank"])) > 1
    if not is_timed:
        times = _derive_times(metrics)
    shares = _count_slowest(times)
    medians = {
        rank: float(np.median(times["value"][times["rank"] == rank]))
        for rank in joined
        if (times["rank"] == rank).any()
    }
    found = []
    places = _Places.measure(reader, run_id, joined, (telemetry, metrics), span, medians)
    for rank in joined:
        parts = [part.take(part["rank"] == rank) for part in (telemetry, metrics, events)]
        seen = max((int(part["time_us"].max()) for part in parts if part.count), default=0)
        own = times["value"][times["rank"] == rank]
        data = parts[0]["data_time_ms"]
        data = data[np.isfinite(data)]
        others = [median for other, median in medians.items() if other != rank]
        found.append(
            RankPace(
                rank=rank,
                host=_find_host(parts[2]),
                records=parts[0].count + parts[1].count,
                last_step=places.last_step.get(rank),
                last_seen=format_time(seen),
                step_ms=medians.get(rank),
                step_p90_ms=float(np.percentile(own, 90)) if len(own) else None,
                data_ms=float(np.median(data)) if len(data) else None,
                slowest=shares.get(rank, 0.0) if shares and rank in medians else None,
                behind_ms=(
                    medians[rank] - float(np.median(others)) if rank in medians and others else None
                ),
                steps_behind=places.steps_behind.get(rank),
                is_behind=rank in places.behind,
            )
        )
    return RankPaces(ranks=tuple(found), first_step=first_step, is_timed=is_timed)


@dataclass(slots=True)
class _Places:
    """How far the ranks are: rank -> newest step, and steps behind the furthest one."""

    last_step: dict[int, int]
    steps_behind: dict[int, int]
    behind: set[int]

    @classmethod
    def measure(
        cls,
        reader: SupportsRead,
        run_id: str,
        joined: Sequence[int],
        parts: Sequence[Columns],
        span: int,
        medians: Mapping[int, float],
    ) -> _Places:
        """Measure it.

        Args:
            reader: What the run is read from.
            run_id: The run.
            joined: Its ranks.
            parts: Records of the newest steps.
            span: How many steps those are.
            medians: Rank -> median time of a step in milliseconds, where it is known.
        """
        import numpy as np

        rank, step, time_us = (
            np.concatenate([part[name] for part in parts]) for name in ("rank", "step", "time_us")
        )
        places = cls({}, {}, set())
        newest_us: dict[int, int] = {}
        interval: dict[int, float] = {}
        for one in joined:
            own = (rank == one) & (step >= 0)
            if not own.any():
                continue
            steps = np.unique(step[own])
            places.last_step[one] = int(steps[-1])
            newest_us[one] = int(time_us[own].max())
            interval[one] = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
        if not places.last_step:
            return places
        front = max(places.last_step, key=lambda one: (places.last_step[one], -one))
        for one, last in places.last_step.items():
            late_s = min(_ON_ITS_WAY_S, max(0.0, (newest_us[front] - newest_us[one]) / 1e6))
            done_meanwhile = 1e3 * late_s / medians[one] if medians.get(one) else 0.0
            behind = max(0, int(places.last_step[front] - last - done_meanwhile))
            places.steps_behind[one] = behind
            if behind >= max(_BEHIND_STEPS, _BEHIND_RECORDS * interval[one] + 1):
                places.behind.add(one)
        places._look_further(reader, run_id, joined, span)
        return places

    def _look_further(
        self, reader: SupportsRead, run_id: str, joined: Sequence[int], span: int
    ) -> None:
        """Find those of the ranks without newest steps that had some at the run's beginning."""
        missing = [rank for rank in joined if rank not in self.last_step]
        if not missing:
            return
        for kind in (SystemTelemetryRecord.KIND, MetricRecord.KIND):
            early = _keep_newest_attempt(reader.read(run_id, kind, Query(step_max=span - 1)))
            for rank in missing:
                if (early["rank"] == rank).any():
                    self.steps_behind[rank] = span
                    self.behind.add(rank)


def _keep_newest_attempt(columns: Columns) -> Columns:
    attempts = columns["attempt"]
    return columns if not columns.count else columns.take(attempts == attempts.max())


def _take_times(telemetry: Columns) -> Mapping[str, NDArray[Any]]:
    """Step times that telemetry has measured: step, rank and value in milliseconds."""
    import numpy as np

    rows = np.isfinite(telemetry["step_time_ms"]) & (telemetry["step"] >= 0)
    return {
        "step": telemetry["step"][rows],
        "rank": telemetry["rank"][rows],
        "value": telemetry["step_time_ms"][rows],
    }


def _derive_times(metrics: Columns) -> Mapping[str, NDArray[Any]]:
    """From the first record of one step to that of the next, shared out over the steps between."""
    import numpy as np

    rank, step, time_us = metrics["rank"], metrics["step"], metrics["time_us"]
    order = np.lexsort((time_us, step, rank))
    rank, step, time_us = rank[order], step[order], time_us[order]
    first = np.ones(len(rank), dtype=np.bool_)
    first[1:] = (rank[1:] != rank[:-1]) | (step[1:] != step[:-1])
    rank, step, time_us = rank[first], step[first], time_us[first]
    follows = rank[1:] == rank[:-1]
    gap = np.maximum(step[1:] - step[:-1], 1)
    took = (time_us[1:] - time_us[:-1]) / 1e3 / gap
    rows = follows & (took >= 0)
    return {"step": step[1:][rows], "rank": rank[1:][rows], "value": took[rows]}


def _count_slowest(times: Mapping[str, NDArray[Any]]) -> dict[int, float]:
    """Rank -> share of the steps that several ranks have at which it took longest."""
    import numpy as np

    compared = compare_ranks(times, "step time", "step")
    slowest = compared.high_rank[compared.count > 1]
    if not len(slowest):
        return {}
    ranks, counts = np.unique(slowest, return_counts=True)
    return {int(r): float(c) / len(slowest) for r, c in zip(ranks, counts, strict=True)}


def _find_host(events: Columns) -> str | None:
    for payload in reversed(events["payload"].tolist()):
        if payload is not None and payload.get("host"):
            return str(payload["host"])
    return None


RATES = {
    "tokens_per_s": "system/runtime/tokens_per_s",
    "samples_per_s": "system/runtime/samples_per_s",
    "flops_per_s": "system/runtime/flops_per_s",
    "mfu_percent": "system/runtime/mfu_percent",
}
"""Name of a rate -> the metric that `SystemTelemetry` keeps it in, of each rank by itself."""

_MOST_RANKS = 1_024
_TYPE = "throughput_measured"


@dataclass(frozen=True, slots=True)
class RunRates:
    """The newest rates of a run.

    Attributes:
        tokens_per_s, samples_per_s, flops_per_s: Sums over the ranks that have logged them.
        mfu_percent: FLOPs of all of them, in percent of what all their devices can do at most.
        ranks: How many have logged.
        world_size: How many processes the launch has, as far as is known.
    """

    tokens_per_s: float | None
    samples_per_s: float | None
    flops_per_s: float | None
    mfu_percent: float | None
    ranks: int
    world_size: int

    @property
    def scale(self) -> float:
        """How much all processes do, where those that have logged are as quick as the others."""
        return max(1.0, self.world_size / max(1, self.ranks))

    def to_dict(self) -> dict[str, float | int | None]:
        """A new dict of JSON-like values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def measure_rates(reader: SupportsRead, run: RunSummary) -> RunRates | None:
    """The newest rates of a run, of all its ranks together; None where it has none."""
    present = [name for name, key in RATES.items() if key in run.metrics]
    if not present:
        return None
    ranks = read_series(reader, run.run_id, RATES[present[0]], 1).ranks[:_MOST_RANKS] or (0,)
    sums: dict[str, float] = {}
    peaks = 0.0
    for rank in ranks:
        own = {name: _read_newest(reader, run.run_id, RATES[name], rank) for name in present}
        for name, value in own.items():
            if value is not None:
                sums[name] = sums.get(name, 0.0) + value
        flops, mfu = own.get("flops_per_s"), own.get("mfu_percent")
        if flops and mfu:
            peaks += 100.0 * flops / mfu
    mfu_percent = 100.0 * sums["flops_per_s"] / peaks if peaks else None
    return RunRates(
        sums.get("tokens_per_s"),
        sums.get("samples_per_s"),
        sums.get("flops_per_s"),
        mfu_percent,
        len(ranks),
        max(len(ranks), _read_world_size(reader, run.run_id)),
    )


def _read_newest(reader: SupportsRead, run_id: str, key: str, rank: int) -> float | None:
    query = Query(equals={"metric_key": key}, rank=rank, limit=1)
    found = read_rows(reader, run_id, MetricRecord.KIND, query)
    return float(found["value"][-1]) if found.count else None


def _read_world_size(reader: SupportsRead, run_id: str) -> int:
    query = Query(equals={"event_type": _TYPE}, limit=1)
    for record in read_rows(reader, run_id, EventRecord.KIND, query).to_records():
        size = (getattr(record, "payload", None) or {}).get("world_size")
        if isinstance(size, int) and size > 0:
            return size
    return 1
