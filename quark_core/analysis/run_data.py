"""A run's records as analyzers want them: curves by metric, histories by layer and parameter.

Everything is read as columns, once, when it is first asked for, from any
backend that reads. Where several ranks have written, the lowest one speaks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.curves import Curve
from quark_core.analysis.histories import (
    History,
    LayerHistory,
    ParameterHistory,
    collect_layers,
    collect_parameters,
    factorize,
    strip_prefixes,
)
from quark_core.query import Query
from quark_core.records import (
    BatchDiagnosticRecord,
    LayerSummaryRecord,
    MetricRecord,
    ParameterSummaryRecord,
    SystemTelemetryRecord,
)

if TYPE_CHECKING:
    from quark_core.columns import Columns

__all__ = [
    "History",
    "LayerHistory",
    "ParameterHistory",
    "ReadColumns",
    "RunData",
    "factorize",
    "strip_prefixes",
]

ReadColumns = Callable[[str, Query], "Columns"]
"""Reads the rows of one kind, in persistence order."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class RunData:
    """One run, read through columns.

    Args:
        read: Reads rows of one kind.
        run_id: The run.
        ended: Whether the run is over; of one that goes on, the last points may
            be the beginning of anything.
        config: The run's configuration, where there is one.

    Attributes:
        newest_us: Microseconds since the epoch of the newest record read so far.
    """

    def __init__(
        self,
        read: ReadColumns,
        run_id: str,
        *,
        ended: bool = True,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._read = read
        self.run_id = run_id
        self.ended = ended
        self.config = config or {}
        self.newest_us = 0

    @cached_property
    def metrics(self) -> Mapping[str, Curve]:
        """Every metric by its stored key, non-finite values included."""
        columns = self._read_lowest_rank(MetricRecord.KIND)
        codes, names = factorize(columns["metric_key"])
        step, epoch, value = columns["step"], columns["epoch"], columns["value"]
        order = np.argsort(codes, kind="stable")
        ends = np.searchsorted(codes[order], np.arange(len(names) + 1))
        return {
            name: _make_curve(name, *(array[order[low:high]] for array in (step, epoch, value)))
            for name, low, high in zip(names, ends[:-1], ends[1:], strict=True)
        }

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
        return collect_parameters(self._read_lowest_rank(ParameterSummaryRecord.KIND))

    @cached_property
    def batches(self) -> Columns:
        """Rows of batch diagnostics, in persistence order."""
        return self._read_lowest_rank(BatchDiagnosticRecord.KIND)

    @cached_property
    def telemetry(self) -> Columns:
        """Rows of telemetry, in persistence order."""
        return self._read_lowest_rank(SystemTelemetryRecord.KIND)

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
        return collect_layers(self._read_lowest_rank(LayerSummaryRecord.KIND))

    def _read_lowest_rank(self, kind: str) -> Columns:
        columns = self._read(kind, Query())
        if columns.count:
            self.newest_us = max(self.newest_us, int(columns["time_us"].max()))
        ranks = columns["rank"]
        if columns.count and bool((ranks != ranks[0]).any()):
            columns = columns.take(ranks == ranks.min())
        return columns


def _make_curve(key: str, step: Integers, epoch: Integers, value: Floats) -> Curve:
    """A curve over steps, or over epochs where no point has a step."""
    unit, over = "step", step
    if len(step) and bool((step < 0).any()):
        if bool((step >= 0).any()):
            kept = step >= 0
            step, epoch, value = step[kept], epoch[kept], value[kept]
            over = step
        else:
            unit, over = "epoch", epoch
    if len(over) > 1 and bool((over[1:] < over[:-1]).any()):
        order = np.argsort(over, kind="stable")
        over, epoch, value = over[order], epoch[order], value[order]
    return Curve(key, over, value, epoch, unit)
