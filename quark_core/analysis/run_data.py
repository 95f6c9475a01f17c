"""A run's records as analyzers want them: curves by metric, histories by layer and parameter.

Everything is read as columns, once, when it is first asked for, from any
backend that reads. Where several ranks have written, the lowest one speaks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quark_core.analysis.curves import Curve
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

_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class History:
    """Figures of one thing over its probes, ascending by step.

    Attributes:
        name: Its name, without the prefixes of wrappers.
        kind: Its class.
        step: Steps of the probes, each once.
        figures: Name of a field -> its values, NaN where there is none.
    """

    name: str
    kind: str
    step: Integers
    figures: Mapping[str, Floats] = field(repr=False)

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, name: str) -> Floats:
        return self.figures[name]

    def curve(self, name: str) -> Curve:
        """One figure as a curve."""
        return Curve(
            f"{self.name}:{name}", self.step, self.figures[name], np.full(len(self.step), -1)
        )


@dataclass(frozen=True)
class LayerHistory(History):
    """Activations, or gradients, of one module.

    Figures: mean, std, norm, rms (norm over the root of the element count),
    dead_unit_ratio, saturation_ratio, zero_ratio, minimum, maximum, nan_count,
    inf_count, element_count, calls.

    Attributes:
        summary_type: activation or gradient.
        order: Place among the modules, by first record.
    """

    summary_type: str = "activation"
    order: int = 0


@dataclass(frozen=True)
class ParameterHistory(History):
    """One parameter.

    Figures: the numeric fields of ParameterSummaryRecord, such as value_norm,
    gradient_norm, update_norm, update_to_parameter_ratio, learning_rate,
    weight_decay, non_finite_value_count, non_finite_gradient_count,
    element_count, and in_optimizer (1, 0, or NaN where not known).

    Attributes:
        module_name: The module that holds it.
        role: weight, bias or other.
        requires_grad: Whether it is trained at all, at its last probe.
        in_optimizer: Whether an optimizer has it, at its last probe; None where not known.
        order: Place among the parameters, by first record.
    """

    module_name: str = ""
    role: str = "weight"
    requires_grad: bool = True
    in_optimizer: bool | None = None
    order: int = 0


class RunData:
    """One run, read through columns.

    Args:
        read: Reads rows of one kind.
        run_id: The run.
        ended: Whether the run is over; of one that goes on, the last points may
            be the beginning of anything.
        config: The run's configuration, where there is one.
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
        columns = self._read_lowest_rank(ParameterSummaryRecord.KIND)
        codes, names = factorize(columns["parameter_name"])
        out: dict[str, ParameterHistory] = {}
        numeric = {name: columns[name] for name in _PARAMETER_FIGURES}
        in_optimizer = columns["in_optimizer"]
        for name, code in _in_order(codes, names):
            rows = _last_of_each_step(columns["step"], code)
            last = int(rows[-1])
            figures = {key: _as_floats(array[rows]) for key, array in numeric.items()}
            figures["in_optimizer"] = _as_floats(in_optimizer[rows])
            known = in_optimizer[last]
            plain = strip_prefixes(name)
            out[plain] = ParameterHistory(
                plain,
                str(columns["module_type"][last]),
                columns["step"][rows],
                figures,
                module_name=strip_prefixes(str(columns["module_name"][last])),
                role=str(columns["parameter_role"][last]),
                requires_grad=bool(columns["requires_grad"][last]),
                in_optimizer=None if known is None else bool(known),
                order=len(out),
            )
        return out

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
        columns = self._read_lowest_rank(LayerSummaryRecord.KIND)
        if columns.count == 0:
            return {}
        modules, names = factorize(columns["module_name"])
        kinds, kind_names = factorize(columns["summary_type"])
        plain = [strip_prefixes(name) for name in names]
        out: dict[tuple[str, str], LayerHistory] = {}
        numeric = {name: _as_floats(columns[name]) for name in _LAYER_FIGURES}
        steps, types = columns["step"], columns["module_type"]
        for code_name, code in _in_order(modules * len(kind_names) + kinds, None):
            module, kind = divmod(code_name, len(kind_names))
            rows = code[steps[code] >= 0]
            if not len(rows):
                continue
            history = _merge_calls(steps[rows], {key: v[rows] for key, v in numeric.items()})
            name, summary_type = plain[module], kind_names[kind]
            out[name, summary_type] = LayerHistory(
                name,
                str(types[rows[0]]),
                history[0],
                history[1],
                summary_type=summary_type,
                order=len(out),
            )
        return out

    def _read_lowest_rank(self, kind: str) -> Columns:
        columns = self._read(kind, Query())
        ranks = columns["rank"]
        if columns.count and bool((ranks != ranks[0]).any()):
            columns = columns.take(ranks == ranks.min())
        return columns


_LAYER_FIGURES = (
    "mean", "std", "norm", "dead_unit_ratio", "saturation_ratio", "zero_ratio",
    "minimum", "maximum", "nan_count", "inf_count", "element_count",
)  # fmt: skip
_PARAMETER_FIGURES = (
    "element_count", "value_mean", "value_std", "value_min", "value_max", "value_norm",
    "value_near_zero_ratio", "gradient_mean", "gradient_std", "gradient_min", "gradient_max",
    "gradient_norm", "gradient_near_zero_ratio", "update_mean", "update_std", "update_min",
    "update_max", "update_norm", "update_to_parameter_ratio", "non_finite_value_count",
    "non_finite_gradient_count", "learning_rate", "weight_decay",
)  # fmt: skip


def strip_prefixes(name: str) -> str:
    """A module's name without what wrappers put into it."""
    for prefix in _PREFIXES:
        while name.startswith(prefix):
            name = name[len(prefix) :]
        name = name.replace("." + prefix, ".")
    return name


def factorize(texts: NDArray[Any]) -> tuple[Integers, list[str]]:
    """Number of each text's first appearance, and the texts in that order."""
    values = texts.tolist()
    names = list(dict.fromkeys(values))
    lookup = {name: index for index, name in enumerate(names)}
    codes = np.fromiter(map(lookup.__getitem__, values), np.int64, len(values))
    return codes, names


def _in_order(codes: Integers, names: list[str] | None) -> list[tuple[Any, Integers]]:
    """Rows of each code, by first appearance."""
    if not len(codes):
        return []
    order = np.argsort(codes, kind="stable")
    present, starts = np.unique(codes[order], return_index=True)
    groups = np.split(order, starts[1:])
    firsts = [int(group[0]) for group in groups]
    ranked = sorted(range(len(groups)), key=firsts.__getitem__)
    return [
        (int(present[index]) if names is None else names[int(present[index])], groups[index])
        for index in ranked
    ]


def _last_of_each_step(steps: Integers, rows: Integers) -> Integers:
    """Of these rows the last one of each step, ascending by step."""
    own = steps[rows]
    order = np.argsort(own, kind="stable")
    own = own[order]
    last = np.append(own[1:] != own[:-1], True)
    return np.asarray(rows[order[last]])


def _merge_calls(
    steps: Integers, figures: Mapping[str, Floats]
) -> tuple[Integers, Mapping[str, Floats]]:
    """One row a step: sizes and norms of several calls together, ratios on average."""
    unique, group, counts = np.unique(steps, return_inverse=True, return_counts=True)
    out: dict[str, Floats] = {}
    single = bool((counts == 1).all())
    for name, values in figures.items():
        if single:
            out[name] = values[np.argsort(group, kind="stable")]
        elif name == "norm":
            out[name] = np.sqrt(_sum(group, values**2, len(unique)))
        elif name in ("nan_count", "inf_count", "element_count"):
            out[name] = _sum(group, values, len(unique))
        elif name in ("minimum", "maximum"):
            pick = np.fmin if name == "minimum" else np.fmax
            made = np.full(len(unique), np.nan)
            pick.at(made, group, values)
            out[name] = made
        else:
            known = _sum(group, np.isfinite(values).astype(np.float64), len(unique))
            with np.errstate(invalid="ignore", divide="ignore"):
                out[name] = _sum(group, np.nan_to_num(values), len(unique)) / known
    with np.errstate(invalid="ignore", divide="ignore"):
        out["rms"] = out["norm"] / np.sqrt(out["element_count"])
    out["calls"] = counts.astype(np.float64)
    return unique, out


def _sum(group: Integers, values: Floats, size: int) -> Floats:
    return np.asarray(np.bincount(group, weights=values, minlength=size), dtype=np.float64)


def _as_floats(values: NDArray[Any]) -> Floats:
    """Numbers with NaN for None; of whole numbers -1 stands for None."""
    if values.dtype == np.float64:
        return values
    if values.dtype == object:
        return np.array([np.nan if value is None else float(value) for value in values])
    out = values.astype(np.float64)
    out[values < 0] = np.nan
    return out


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
