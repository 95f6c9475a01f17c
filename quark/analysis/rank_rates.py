"""What a run gets done each second, over all ranks that keep records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quark_core.records import EventRecord, MetricRecord
from quark_core.records.query import Query
from quark_core.runs.reading import read_rows, read_series

if TYPE_CHECKING:
    from quark_core.backends.contract import SupportsRead
    from quark_core.backends.run_summary import RunSummary

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
