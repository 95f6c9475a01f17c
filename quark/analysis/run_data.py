"""A run's records as analyzers want them: curves by metric, histories by layer and parameter.

Everything is read as columns, once, when it is first asked for, from any
backend that reads, part by part and in bounded memory: of very long runs a
sample is kept, as `quark.analysis.reduction` says. Where several ranks
have written, the lowest one speaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from quark.analysis.curves import Curve
from quark.analysis.histories import (
    LayerHistory,
    ParameterHistory,
    collect_layers,
    collect_parameters,
)
from quark.analysis.reduction import (
    TABLE_ROWS,
    MetricSamples,
    RowSample,
    make_curve,
    sample_probes,
    sample_rows,
)
from quark_core.records import (
    BatchDiagnosticRecord,
    LayerSummaryRecord,
    MetricRecord,
    ParameterSummaryRecord,
    SystemTelemetryRecord,
)
from quark_core.records.columns import Columns
from quark_core.records.query import Query

if TYPE_CHECKING:
    from quark_core.backends.contract import StoredRun

ReadColumns = Callable[[str, Query], "Columns"]
"""Reads the rows of one kind, in persistence order."""

IterateColumns = Callable[[str, Query], "Iterable[Columns]"]
"""The same in parts."""

Collected = TypeVar("Collected")

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class CurveSource(Protocol):
    """Where a run's metrics are curves already.

    Attributes:
        newest_us: Time of the newest point, microseconds since the epoch.
    """

    @property
    def newest_us(self) -> int:
        """See the class."""

    def load(self) -> Mapping[str, Curve]:
        """Every metric by its stored key."""


_MOMENT = "time"


class RunData:
    """One run, read through columns.

    Args:
        read: Reads rows of one kind.
        iterate: Reads them in parts, so that not all are in memory; without it
            they are read at once.
        run_id: The run.
        ended: Whether the run is over; of one that goes on, the last points may
            be the beginning of anything.
        config: The run's configuration, where there is one.
        stored: The run as its store knows it; None of one that goes on in this process.
        find_curves: Finds where metrics are curves already; None of it reads every point.
        with_torch: Whether the run's process has PyTorch, so that there is a model to watch.

    Attributes:
        newest_us: Microseconds since the epoch of the newest record read so far.
    """

    def __init__(
        self,
        read: ReadColumns,
        run_id: str,
        *,
        iterate: IterateColumns | None = None,
        ended: bool = True,
        config: Mapping[str, Any] | None = None,
        stored: StoredRun | None = None,
        find_curves: Callable[[], CurveSource | None] | None = None,
        with_torch: bool = False,
    ) -> None:
        self._iterate = iterate or (lambda kind, query: (read(kind, query),))
        self.run_id = run_id
        self.ended = ended
        self.config = config or {}
        self.stored = stored
        self.with_torch = with_torch
        self._find_curves = find_curves
        self.newest_us = 0
        # Kinds that several ranks have written.
        self._shared: set[str] = set()

    @cached_property
    def metrics(self) -> Mapping[str, Curve]:
        """Every metric by its stored key, non-finite values included."""
        source = None if self._find_curves is None else self._find_curves()
        if source is not None:
            self.newest_us = max(self.newest_us, source.newest_us)
            return source.load()
        samples = self._collect(MetricRecord.KIND, _sample_metrics)
        return {name: make_curve(name, points) for name, points in samples.take()}

    @cached_property
    def activations(self) -> Mapping[str, LayerHistory]:
        """Activations by module, in the order of the modules' first records."""
        return {name: item for (name, kind), item in self._layers.items() if kind == "activation"}

    @cached_property
    def gradients(self) -> Mapping[str, LayerHistory]:
        """Gradients of the modules' outputs by module, in the order of the activations."""
        order = {name: index for index, name in enumerate(self.activations)}
        found = [item for (_, kind), item in self._layers.items() if kind == "gradient"]
        found.sort(key=lambda item: order.get(item.name, len(order) + item.order))
        return {item.name: item for item in found}

    @cached_property
    def parameters(self) -> Mapping[str, ParameterHistory]:
        """Parameters by name, in the order of their first records."""
        kind = ParameterSummaryRecord.KIND
        return collect_parameters(self._collect(kind, partial(sample_probes, kind)))

    @cached_property
    def replicas(self) -> Mapping[int, Mapping[str, ParameterHistory]]:
        """Parameters by rank, where several ranks have written some; empty where one has."""
        if not self.parameters or ParameterSummaryRecord.KIND not in self._shared:
            return {}
        kind = ParameterSummaryRecord.KIND
        parts = (part for part in self._iterate(kind, Query()) if part.count)
        columns = sample_probes(kind, parts)
        ranks = columns["rank"]
        return {
            int(rank): collect_parameters(columns.take(ranks == rank)) for rank in np.unique(ranks)
        }

    @cached_property
    def batches(self) -> Columns:
        """Rows of batch diagnostics, in persistence order."""
        return self.read_rows(BatchDiagnosticRecord.KIND)

    @cached_property
    def telemetry(self) -> Columns:
        """Rows of telemetry of steps, in persistence order."""
        return self.read_rows(SystemTelemetryRecord.KIND)

    def read_rows(self, kind: str) -> Columns:
        """Rows of any kind of record, of the lowest rank, in persistence order.

        Args:
            kind: As "telemetry". Of more than `TABLE_ROWS` rows every second,
                fourth and so on.
        """
        return self._collect(kind, partial(sample_rows, kind))

    @cached_property
    def rank_telemetry(self) -> Mapping[int, Columns]:
        """Rows of telemetry of every rank, by rank, in persistence order.

        All ranks together have as many rows as one alone may have.
        """
        kind = SystemTelemetryRecord.KIND
        samples: dict[int, RowSample] = {}
        for part in self._read_parts(kind):
            ranks = part["rank"]
            for rank in np.unique(ranks).tolist():
                if rank not in samples:
                    samples[rank] = RowSample(kind, TABLE_ROWS)
                    for sample in samples.values():
                        sample.keep_to(TABLE_ROWS // len(samples))
                samples[rank].add(part.take(ranks == rank))
        return {rank: samples[rank].finish() for rank in sorted(samples)}

    def has_any(self, tables: Iterable[str]) -> bool:
        """Whether at least one of these tables of the run has rows.

        Args:
            tables: Names of attributes, such as "activations" or "telemetry".
        """
        found = (getattr(self, name) for name in tables)
        return any(table.count if isinstance(table, Columns) else table for table in found)

    def place_on_steps(self, curve: Curve) -> Curve:
        """A curve over epochs, put at the last step that another metric has in each epoch.

        Returns it as it is where it is over steps already or no metric has both.
        """
        if curve.unit == "step" or not len(curve):
            return curve
        ends = self._epoch_ends
        known = np.array([int(epoch) in ends for epoch in curve.epoch])
        if not known.any():
            return curve
        kept = curve.take(known)
        steps = np.array([ends[int(epoch)] for epoch in kept.epoch], dtype=np.int64)
        return Curve(curve.key, steps, kept.value, kept.epoch, "step")

    @cached_property
    def _epoch_ends(self) -> Mapping[int, int]:
        ends: dict[int, int] = {}
        for curve in self.metrics.values():
            if curve.unit != "step" or not len(curve) or int(curve.epoch.max()) < 0:
                continue
            for epoch in np.unique(curve.epoch[curve.epoch >= 0]).tolist():
                last = int(curve.step[curve.epoch == epoch][-1])
                ends[epoch] = max(last, ends.get(epoch, last))
        return ends

    @cached_property
    def last_step(self) -> int | None:
        """The highest step that any metric or probe has, or None."""
        steps = [int(curve.step[-1]) for curve in self.metrics.values() if curve.unit == "step"]
        tables = (self.activations, self.gradients, self.parameters)
        steps += [int(item.step[-1]) for table in tables for item in table.values()]
        return max(steps, default=None)

    @cached_property
    def probe_steps(self) -> Integers:
        """Steps at which any layer or parameter was looked at, ascending."""
        tables = (self.activations, self.gradients, self.parameters)
        steps = [item.step for table in tables for item in table.values()]
        return np.unique(np.concatenate(steps)) if steps else np.empty(0, dtype=np.int64)

    @cached_property
    def _layers(self) -> Mapping[tuple[str, str], LayerHistory]:
        kind = LayerSummaryRecord.KIND
        return collect_layers(self._collect(kind, partial(sample_probes, kind)))

    def _collect(self, kind: str, collect: Callable[[Iterable[Columns]], Collected]) -> Collected:
        """What is made of the rows of the lowest rank."""
        lowest: int | None = None
        while True:
            try:
                return collect(self._iterate_rank(kind, lowest))
            except _LowerRank as found:
                lowest = found.rank

    def _read_parts(self, kind: str) -> Iterator[Columns]:
        """All rows of a kind, but those that tell of a moment rather than of a step.

        The machine is looked at whether training goes on or not, so that those say nothing of it.
        """
        for part in self._iterate(kind, Query()):
            if kind == SystemTelemetryRecord.KIND and part.count:
                part = part.take(part["boundary"].astype(str) != _MOMENT)
            yield part

    def _iterate_rank(self, kind: str, lowest: int | None) -> Iterator[Columns]:
        """Rows of one rank, by default of the first; raises where a lower one comes later."""
        for part in self._read_parts(kind):
            if not part.count:
                continue
            self.newest_us = max(self.newest_us, int(part["time_us"].max()))
            ranks = part["rank"]
            least = int(ranks.min())
            if lowest is None:
                lowest = least
            elif least < lowest:
                self._shared.add(kind)
                raise _LowerRank(least)
            if bool((ranks != lowest).any()):
                self._shared.add(kind)
                part = part.take(ranks == lowest)
            if part.count:
                yield part


class _LowerRank(Exception):
    """An attempt that came later has a lower rank than all before it: begin anew."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


def _sample_metrics(parts: Iterable[Columns]) -> MetricSamples:
    samples = MetricSamples()
    for part in parts:
        samples.add(part)
    return samples
