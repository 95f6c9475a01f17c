"""Curves of metrics and histories of layers and parameters over steps, with robust statistics.

Every estimate here is scale-free or keeps the unit of its curve, takes
medians in place of means, and has no random part.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from quark_core.records.columns import Columns

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_NORMAL = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
_TREND_POINTS = 400
_MANY = 20_000
_EARLY_POINTS, _EARLY_PART = 5, 4
_ROUNDING = 1e-6  # of the largest value: what differs by less is the same

SMALLEST = 1e-300
"""In place of 0 under a fraction: what is divided by it is beyond every threshold."""


def take_lowest_rank(rows: Columns) -> Columns:
    """The rows of the lowest rank that has any: it speaks for the run."""
    if rows.count and (ranks := rows["rank"]).min() != ranks.max():
        return rows.take(ranks == ranks.min())
    return rows


@dataclass(frozen=True)
class Curve:
    """Values over steps, ascending.

    Attributes:
        key: What it is of, such as a metric's key.
        step: Steps; epochs where `unit` says so. Several points may share one.
        value: Values, which may be NaN or infinite.
        epoch: Epochs, -1 where there is none.
        unit: `step` or `epoch`.
    """

    key: str
    step: Integers
    value: Floats
    epoch: Integers
    unit: str = "step"

    def __len__(self) -> int:
        return len(self.value)

    @classmethod
    def over_steps(cls, key: str, step: Integers, value: Floats) -> Curve:
        """A curve of which no epochs are known."""
        return cls(key, step, value, np.full(len(step), -1))

    @classmethod
    def of_rows(cls, key: str, rows: Columns, name: str) -> Curve:
        """A figure of rows that have a step, such as those of telemetry."""
        rows = rows.take(rows["step"] >= 0)
        order = np.argsort(rows["step"], kind="stable")
        value = as_floats(rows[name])[order]
        return cls.over_steps(key, rows["step"][order], value)

    @cached_property
    def finite(self) -> Curve:
        """Only the points whose value is finite."""
        kept = np.isfinite(self.value)
        return self if bool(kept.all()) else self.take(kept)

    @cached_property
    def merged(self) -> Curve:
        """Finite points with one value a step: the mean of its points."""
        curve = self.finite
        if len(curve) < 2 or bool((np.diff(curve.step) > 0).all()):
            return curve
        steps, first, group = np.unique(curve.step, return_index=True, return_inverse=True)
        counts = np.bincount(group)
        means = np.bincount(group, weights=curve.value, minlength=len(steps)) / counts
        if not np.isfinite(means).all():
            # The sum of the largest numbers is none any more, though their mean is.
            shares = curve.value / counts[group]
            means = np.asarray(np.bincount(group, weights=shares), dtype=np.float64)
        return Curve(curve.key, steps, means, curve.epoch[first], self.unit)

    def find_best(self, *, rises: bool = False) -> tuple[float, int]:
        """The best finite value that was logged, and its first step: what texts call the best.

        Levels of smoothed curves are what rules judge by. Every one has a lowest level of its
        own, so none of them is told.

        Args:
            rises: Whether the highest is the best.
        """
        curve = self.finite
        at = int(np.argmax(curve.value) if rises else np.argmin(curve.value))
        return float(curve.value[at]), int(curve.step[at])

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64] | slice) -> Curve:
        """Only these points."""
        return Curve(self.key, self.step[rows], self.value[rows], self.epoch[rows], self.unit)

    def thin(self, most: int) -> Curve:
        """At most so many points: medians of equally many neighbours, at their first step."""
        size = -(-len(self) // most)
        if size <= 1:
            return self
        whole = len(self) // size * size
        value = np.median(self.value[:whole].reshape(-1, size), axis=1)
        step, epoch = self.step[:whole:size], self.epoch[:whole:size]
        if whole < len(self):
            value = np.append(value, np.median(self.value[whole:]))
            step, epoch = np.append(step, self.step[whole]), np.append(epoch, self.epoch[whole])
        return Curve(self.key, step, value, epoch, self.unit)

    def between(self, first: int | None, last: int | None) -> Curve:
        """Points from one step to another, both included; None is no bound."""
        low = 0 if first is None else int(np.searchsorted(self.step, first, "left"))
        high = len(self) if last is None else int(np.searchsorted(self.step, last, "right"))
        return self.take(slice(low, high))


def spread(values: Floats) -> float:
    """A robust standard deviation: 1.4826 times the median distance from the median."""
    if len(values) == 0:
        return 0.0
    return float(_NORMAL * np.median(np.abs(values - np.median(values))))


def estimate_noise(values: Floats) -> float:
    """Standard deviation of what is not trend, from second differences.

    The second differences of a straight line are 0, and those of white noise
    have the deviation sqrt(6) times its own (Gasser, Sroka, Jennen-Steinmetz
    1986); their median absolute value does not see single outliers.
    """
    if len(values) < 4:
        return 0.0
    second = np.diff(values, n=2)
    return float(_NORMAL * np.median(np.abs(second)) / np.sqrt(6.0))


def find_resolution(values: Floats) -> float:
    """The smallest step between two of these values, as of a share of n samples; 0 of one value."""
    steps = np.diff(np.unique(values))
    scale = float(np.abs(values).max(initial=0.0))
    steps = steps[steps > _ROUNDING * scale]
    return float(steps.min()) if len(steps) else 0.0


def take_early(values: Floats) -> Floats:
    """The first values, a history's early level: a quarter of them, five at most, at least one."""
    return values[: max(1, min(_EARLY_POINTS, len(values) // _EARLY_PART))]


def smooth(values: Floats, window: int) -> Floats:
    """Centred running median, then a running mean of the same width; the ends are shorter."""
    if window < 3 or len(values) < 3:
        return values.astype(np.float64, copy=True)
    return _running_mean(median_filter(values, window), window)


def median_filter(values: Floats, window: int) -> Floats:
    """Centred running median; at the ends over what there is."""
    half = min(window // 2, (len(values) - 1) // 2)
    if half < 1:
        return values.astype(np.float64, copy=True)
    padded = np.concatenate([np.full(half, np.nan), values, np.full(half, np.nan)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    out = np.empty(len(values))
    inner = slice(half, len(values) - half)
    out[inner] = np.median(windows[inner], axis=1)
    for index in (*range(half), *range(len(values) - half, len(values))):
        out[index] = np.median(values[max(0, index - half) : index + half + 1])
    return out


def trailing_median(values: Floats, window: int) -> Floats:
    """Median of the `window` values before each one; NaN for the first, fewer at the start.

    Of more than 20,000 values it is that of the whole block before each value's own.
    """
    count = len(values)
    if count > _MANY:
        whole = count // window * window
        medians = np.median(values[:whole].reshape(-1, window), axis=1)
        out = np.repeat(np.concatenate([medians[:1], medians]), window)[:count]
        out[0] = np.nan
        return out
    out = np.full(count, np.nan)
    out[1:window] = _growing_medians(values[: window - 1])[: max(0, count - 1)]
    if count > window:
        windows = np.lib.stride_tricks.sliding_window_view(values, window)
        out[window:] = np.median(windows[:-1], axis=1)
    return out


def local_spread(values: Floats, window: int) -> Floats:
    """Robust deviation of the whole block of `window` values before each value's own block.

    Values of the first block have its own.
    """
    count = len(values)
    if count < 2 * window:
        return np.full(count, spread(values))
    whole = count // window * window
    blocks = values[:whole].reshape(-1, window)
    middle = np.median(blocks, axis=1, keepdims=True)
    scales = _NORMAL * np.median(np.abs(blocks - middle), axis=1)
    before = np.concatenate([scales[:1], scales])
    return np.repeat(before, window)[:count]


def fit_slope(steps: NDArray[np.generic], values: Floats) -> float:
    """Slope by Theil and Sen: the median slope over pairs of points, at most 400 of them."""
    x = np.asarray(steps, dtype=np.float64)
    if len(x) < 2:
        return 0.0
    if len(x) > _TREND_POINTS:
        chosen = np.linspace(0, len(x) - 1, _TREND_POINTS).astype(np.int64)
        x, values = x[chosen], values[chosen]
    rows, columns = np.triu_indices(len(x), 1)
    run = x[columns] - x[rows]
    kept = run > 0
    if not kept.any():
        return 0.0
    return float(np.median((values[columns] - values[rows])[kept] / run[kept]))


def _growing_medians(values: Floats) -> list[float]:
    """Median of the first value, of the first two, and so on."""
    out: list[float] = []
    known: list[float] = []
    for value in values.tolist():
        if value != value or (out and out[-1] != out[-1]):
            out.append(np.nan)
            continue
        insort(known, value)
        half = len(known) // 2
        middle = known[half] if len(known) % 2 else (known[half - 1] + known[half]) / 2
        out.append(middle)
    return out


def _running_mean(values: Floats, window: int) -> Floats:
    half = window // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low = np.maximum(index - half, 0)
    high = np.minimum(index + half + 1, len(values))
    return np.asarray((sums[high] - sums[low]) / (high - low))


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
        return Curve.over_steps(f"{self.name}:{name}", self.step, self.figures[name])


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

    @property
    def owner(self) -> str:
        """The module that holds it, or itself where none does."""
        return self.module_name or self.name

    @property
    def size(self) -> float:
        """How many elements it has; 0 where that is not known."""
        return float(np.nanmax(self["element_count"], initial=0.0))


def list_owners(items: Iterable[ParameterHistory]) -> list[str]:
    """The modules that hold some parameters, each once."""
    return list(dict.fromkeys(item.owner for item in items))


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
