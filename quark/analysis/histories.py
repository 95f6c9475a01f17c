"""Figures of layers and parameters over their probes, and how rows become them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from quark.analysis.curves import Curve

if TYPE_CHECKING:
    from quark_core.records.columns import Columns

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

_LAYER_FIGURES = (
    "mean", "std", "norm", "dead_unit_ratio", "saturation_ratio", "zero_ratio",
    "minimum", "maximum", "nan_count", "inf_count", "element_count", "sample_variation_ratio",
)  # fmt: skip
_PARAMETER_FIGURES = (
    "element_count", "value_mean", "value_std", "value_min", "value_max", "value_norm",
    "value_near_zero_ratio", "gradient_mean", "gradient_std", "gradient_min", "gradient_max",
    "gradient_norm", "gradient_near_zero_ratio", "update_mean", "update_std", "update_min",
    "update_max", "update_norm", "update_to_parameter_ratio", "non_finite_value_count",
    "non_finite_gradient_count", "learning_rate", "weight_decay",
)  # fmt: skip
_MARKS = ("skipped", "carried_over", "evaluation_mode")
_NOTES = (*_MARKS, "no_optimizer_step", "sharded")
_SHARDS = ("local_shard", "local_partial")


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

    def take(self, rows: NDArray[np.bool_]) -> Self:
        """Only these probes."""
        figures = {key: values[rows] for key, values in self.figures.items()}
        return replace(self, step=self.step[rows], figures=figures)

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
    inf_count, element_count, sample_variation_ratio, calls.

    Attributes:
        summary_type: activation or gradient.
        order: Place among the modules, by first record.
        outside_optimizer: Whether the module has parameters that should train
            and none of them is in the optimizer that the hooks were given.
        evaluations: Steps after which the module was seen in an evaluation,
            and whether it was in training mode there.
    """

    summary_type: str = "activation"
    order: int = 0
    outside_optimizer: bool = False
    evaluations: Mapping[int, bool] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class ParameterHistory(History):
    """One parameter.

    Figures: the numeric fields of ParameterSummaryRecord, such as value_norm,
    gradient_norm, update_norm, update_to_parameter_ratio, learning_rate,
    weight_decay, non_finite_value_count, non_finite_gradient_count,
    element_count, gradient_rms (norm over the root of the element count);
    in_optimizer and requires_grad (1, 0, or NaN where not known); and what the
    metadata says, 1 or 0: no_optimizer_step (no optimizer stepped since the
    probe before), skipped (a GradScaler left the step out), carried_over (the
    gradient still held what an earlier step of the optimizer had used),
    evaluation_mode (the step was made in evaluation mode), sharded (it is a part
    of the parameter), and accumulated (micro-batches in the gradient, NaN where
    not known).

    Attributes:
        module_name: The module that holds it.
        role: weight, bias or other.
        requires_grad: Whether it is trained at all, at its last probe.
        in_optimizer: Whether an optimizer has it, at its last probe; None where not known.
        optimizer: Class of its optimizer, or None.
        order: Place among the parameters, by first record.
        digests: Of each probe what the bits of its elements add up to, or None.
    """

    module_name: str = ""
    role: str = "weight"
    requires_grad: bool = True
    in_optimizer: bool | None = None
    optimizer: str | None = None
    order: int = 0
    digests: tuple[Any, ...] = field(default=(), repr=False)


def collect_layers(columns: Columns) -> dict[tuple[str, str], LayerHistory]:
    """Layers by name and type of summary, in the order of their first rows."""
    if columns.count == 0:
        return {}
    modules, names = factorize(columns["module_name"])
    kinds, kind_names = factorize(columns["summary_type"])
    plain = [strip_prefixes(name) for name in names]
    out: dict[tuple[str, str], LayerHistory] = {}
    numeric = {name: as_floats(columns[name]) for name in _LAYER_FIGURES}
    steps, types = columns["step"], columns["module_type"]
    metadata = columns["metadata"]
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
            outside_optimizer=_is_outside(metadata[rows[-1]]),
            evaluations=_find_evaluations(metadata[rows]),
        )
    return out


def collect_parameters(columns: Columns) -> dict[str, ParameterHistory]:
    """Parameters by name, in the order of their first rows."""
    codes, names = factorize(columns["parameter_name"])
    out: dict[str, ParameterHistory] = {}
    numeric = {name: columns[name] for name in _PARAMETER_FIGURES}
    in_optimizer = columns["in_optimizer"]
    for name, code in _in_order(codes, names):
        rows = _last_of_each_step(columns["step"], code)
        last = int(rows[-1])
        figures = {key: as_floats(array[rows]) for key, array in numeric.items()}
        figures["in_optimizer"] = as_floats(in_optimizer[rows])
        with np.errstate(invalid="ignore", divide="ignore"):
            figures["gradient_rms"] = figures["gradient_norm"] / np.sqrt(figures["element_count"])
        figures["requires_grad"] = columns["requires_grad"][rows].astype(np.float64)
        figures |= _read_notes(columns["metadata"][rows])
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
            optimizer=columns["optimizer_name"][last],
            order=len(out),
            digests=tuple(
                known.get("digest") if known else None for known in columns["metadata"][rows]
            ),
        )
    return out


def _read_notes(metadata: NDArray[Any]) -> dict[str, Floats]:
    """What the metadata of a parameter's probes say, as figures."""
    notes = {name: np.zeros(len(metadata)) for name in _NOTES}
    notes["accumulated"] = np.full(len(metadata), np.nan)
    for row, known in enumerate(metadata.tolist()):
        if not known:
            continue
        notes["no_optimizer_step"][row] = known.get("update_missing") == "no_optimizer_step"
        notes["sharded"][row] = known.get("scope") in _SHARDS
        for name in _MARKS:
            notes[name][row] = bool(known.get(name))
        count = known.get("accumulated")
        if isinstance(count, int):
            notes["accumulated"][row] = count
    return notes


def _is_outside(metadata: Any) -> bool:
    return metadata is not None and metadata.get("in_optimizer") is False


def _find_evaluations(metadata: NDArray[Any]) -> dict[int, bool]:
    """Step -> whether the module was in training mode in an evaluation seen there."""
    found: dict[int, bool] = {}
    for known in metadata.tolist():
        seen = known.get("evaluation") if known else None
        if isinstance(seen, dict) and isinstance(seen.get("step"), int):
            earlier = seen.get("earlier")
            for step, is_training in earlier if isinstance(earlier, list) else ():
                found[step] = bool(is_training)
            found[seen["step"]] = bool(seen.get("training"))
    return found


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
    out: dict[str, Floats] = {}
    if bool((steps[1:] > steps[:-1]).all()):
        out.update(figures)
        with np.errstate(invalid="ignore", divide="ignore"):
            out["rms"] = out["norm"] / np.sqrt(out["element_count"])
        out["calls"] = np.ones(len(steps))
        return steps, out
    unique, group, counts = np.unique(steps, return_inverse=True, return_counts=True)
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


def as_floats(values: NDArray[Any]) -> Floats:
    """Numbers with NaN for None; of whole numbers -1 stands for None."""
    if values.dtype == np.float64:
        return values
    if values.dtype == object:
        return np.array([np.nan if value is None else float(value) for value in values])
    out = values.astype(np.float64)
    out[values < 0] = np.nan
    return out
