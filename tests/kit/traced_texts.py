"""Reads the numbers of findings back: does each sum again, on the records and on nothing else.

It shares no reading of records with the analyzers: rows are taken as they were
logged, and what the figures of a text claim is computed once more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import numpy as np

from quark.analysis import rule, rules
from quark.analysis.config import AnalyzerThresholds
from quark.analysis.curves import strip_prefixes
from quark.analysis.observations import Figure, Source, Text
from quark.analysis.rule import Finding

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_CLOSE = 1e-9
_OPERATIONS = {
    "ratio": lambda a, b: a / b if b else float("nan"),
    "difference": lambda a, b: a - b,
    "product": lambda a, b: a * b,
    "sum": lambda *parts: sum(parts),
    "root of the sum of squares": lambda *parts: np.linalg.norm(parts),
}

Points = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


class Records:
    """What a run has logged, by what it is of.

    Args:
        rows: Kind -> its records, in the order of persistence.
    """

    def __init__(self, rows: Mapping[str, Sequence[Any]]) -> None:
        self._rows = {kind: _take_lowest_rank(some) for kind, some in rows.items()}
        self._every = rows
        self.steps = {
            place
            for some in rows.values()
            for row in some
            for place in (row.step, row.epoch)
            if place is not None
        }
        self.names = {name for name in self._list_names() if name}

    def take(self, source: Source) -> Points:
        """Steps and values of a source, by step."""
        if source.kind == "metric":
            return self._take_metric(source.name)
        if source.kind in ("activation", "gradient"):
            return self._take_layer(source)
        kind = source.kind
        rows = self._rows.get(kind, [])
        if source.rank is not None:
            rows = [row for row in self._every.get(kind, []) if row.rank == source.rank]
        if kind == "parameter":
            # Of several rows of one step the last one counts.
            rows = [row for row in rows if strip_prefixes(row.parameter_name) == source.name]
            rows = list({row.step: row for row in rows}.values())
        values = [_read(row, source) for row in rows]
        return _sort([-1 if row.step is None else row.step for row in rows], values)

    def _take_metric(self, key: str) -> Points:
        rows = [row for row in self._rows.get("metric", []) if row.metric_key == key]
        if any(row.step is not None for row in rows):
            rows = [row for row in rows if row.step is not None]
            return _sort([row.step for row in rows], [row.value for row in rows])
        ends: dict[int, int] = {}
        for row in self._rows.get("metric", []):
            if row.step is not None and row.epoch is not None:
                ends[row.epoch] = max(row.step, ends.get(row.epoch, row.step))
        if any(row.epoch in ends for row in rows):
            rows = [row for row in rows if row.epoch in ends]
            return _sort([ends[row.epoch] for row in rows], [row.value for row in rows])
        return _sort([row.epoch for row in rows], [row.value for row in rows])

    def _take_layer(self, source: Source) -> Points:
        calls: dict[int, list[Any]] = {}
        for row in self._rows.get("layer", []):
            own = strip_prefixes(row.module_name) == source.name
            if own and row.summary_type == source.kind and row.step is not None:
                calls.setdefault(row.step, []).append(row)
        return _sort(list(calls), [_join_calls(some, source.field) for some in calls.values()])

    def _list_names(self) -> Iterator[str]:
        for some in self._every.values():
            for row in some:
                yield f"rank {row.rank}"
                for field in ("metric_key", "module_name", "module_type", "parameter_name"):
                    yield strip_prefixes(str(getattr(row, field, "") or ""))
                yield from map(str, getattr(row, "class_counts", None) or ())
                yield from map(str, getattr(row, "sample_ids", None) or ())


def find_untraced(findings: Iterable[Finding], records: Records) -> list[str]:
    """What is wrong with the numbers in some findings' texts; empty where each was traced."""
    return [
        f"{finding.title}: {said}"
        for finding in findings
        for text in finding.texts
        for said in _find_in_text(text, records)
    ]


def _find_in_text(text: str, records: Records) -> Iterator[str]:
    figures = text.figures if isinstance(text, Text) else ()
    names = text.names if isinstance(text, Text) else ()
    rest = str(text)
    for name in sorted(set(names), key=len, reverse=True):
        yield from _find_in_name(name, records)
        # Not inside of a longer number: a class may be called 0.
        rest = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w|\.\d)", " ", rest)
    shown = {number for figure in figures for number in _NUMBER.findall(str(figure))}
    for number in _NUMBER.findall(rest):
        if number not in shown:
            yield f"{number} is no figure: {str(text)!r}"
    for figure in figures:
        told = _evaluate(figure, records)
        if isinstance(told, str):
            yield f"{told}: {str(text)!r}"
        elif not _is_same(told, figure.value):
            yield f"{figure.value!r} is {told!r} by {figure.arithmetic}: {str(text)!r}"


def _find_in_name(name: str, records: Records) -> Iterator[str]:
    rest = name
    for known in sorted(records.names, key=len, reverse=True):
        rest = rest.replace(known, " ")
    if _NUMBER.search(rest):
        yield f"{name!r} is nothing that the run has logged"


def _evaluate(figure: Figure, records: Records) -> float | str:
    """The value of a figure by the records, or what is wrong with it."""
    if figure.arithmetic == "step":
        known = figure.value in records.steps
        return figure.value if known else f"{figure.value} is no step of the run"
    if figure.arithmetic == "limit":
        known = any(_is_same(figure.value, constant) for constant in _list_constants())
        return figure.value if known else f"{figure.value} is no constant of a rule"
    if figure.arithmetic == "count of names":
        places = {str(step) for step in records.steps}
        strange = [name for name in figure.names if name not in records.names | places]
        return f"{strange[0]!r} was not logged" if strange else float(len(figure.names))
    if figure.operands:
        parts = [_evaluate(part, records) for part in figure.operands]
        wrong = [part for part in parts if isinstance(part, str)]
        return wrong[0] if wrong else float(_OPERATIONS[figure.arithmetic](*parts))
    if figure.source is None or figure.function is None:
        return f"{figure.value} has no source"
    steps, values = records.take(figure.source)
    kept = np.isfinite(values)
    kept &= steps >= figure.first if figure.first is not None else True
    kept &= steps <= figure.last if figure.last is not None else True
    return float(figure.function(values[kept])) if kept.any() else float("nan")


def _is_same(one: float, other: float) -> bool:
    if np.isnan(one) or np.isnan(other):
        return bool(np.isnan(one) and np.isnan(other))
    return bool(abs(one - other) <= _CLOSE * max(abs(one), abs(other), 1e-300))


def _list_constants() -> Iterator[float]:
    thresholds = AnalyzerThresholds()
    yield from (float(getattr(thresholds, name)) for name in thresholds.__dataclass_fields__)
    for module in (
        rule,
        *(import_module(item.name) for item in iter_modules(rules.__path__, f"{rules.__name__}.")),
    ):
        for value in vars(module).values():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield float(value)


def _take_lowest_rank(rows: Sequence[Any]) -> list[Any]:
    lowest = min((row.rank for row in rows), default=0)
    return [row for row in rows if row.rank == lowest]


def _read(row: Any, source: Source) -> float:
    if source.field == "class_counts":
        return float((row.class_counts or {}).get(source.name, 0))
    if source.field == "sequence_lengths":
        return float(max(row.sequence_lengths)) if row.sequence_lengths else np.nan
    if source.field == "gradient_rms":
        norm = row.gradient_norm
        return np.nan if norm is None else norm / np.sqrt(row.element_count)
    value = getattr(row, source.field)
    return np.nan if value is None else float(value)


def _join_calls(rows: Sequence[Any], field: str) -> float:
    """Several calls of a module at one step: norms together, shares on average."""
    if field in ("rms", "norm"):
        norms = np.array([np.nan if row.norm is None else row.norm for row in rows])
        with np.errstate(over="ignore"):
            norm = float(norms[0]) if len(norms) == 1 else float(np.sqrt((norms**2).sum()))
        count = sum(row.element_count for row in rows)
        return norm / float(np.sqrt(count)) if field == "rms" else norm
    values = [getattr(row, field) for row in rows]
    known = [float(value) for value in values if value is not None and np.isfinite(value)]
    if field in ("nan_count", "inf_count"):
        return sum(known)
    return float(sum(known) / len(known)) if known else np.nan


def _sort(steps: Sequence[int], values: Sequence[float]) -> Points:
    order = np.argsort(np.array(steps, dtype=np.int64), kind="stable")
    return (
        np.array(steps, dtype=np.int64)[order],
        np.array(values, dtype=np.float64)[order],
    )
