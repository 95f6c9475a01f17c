"""Runs put together: seeds of one configuration, runs of one group, of one value of a field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from quark.analysis.health import has_result
from quark_core.backends.run_summary import RunSummary
from quark_core.errors import SchemaValidationError
from quark_core.records.runs import is_seed

GROUPINGS = ("config", "group", "structure", "code")
"""What runs are grouped by, beside `field.NAME` and `config.KEY`."""

_DIGEST_CHARACTERS = 8
_MOST_KEYS = 6
_VALUE_CHARACTERS = 24
_MISSING = object()


@dataclass(frozen=True, slots=True)
class GroupedRuns:
    """Runs that have something in common.

    Attributes:
        key: What they have in common: a digest, a path, a value as text; None where they lack it.
        label: The same for people: of configurations, the settings in which they differ.
        runs: The runs, in the order in which they were given.
        values: Finite values of the metric, one of each run that has one and neither failed nor
            was lost: what such a run ended with is no result.
    """

    key: str | None
    label: str
    runs: tuple[RunSummary, ...]
    values: tuple[float, ...] = ()

    @property
    def mean(self) -> float | None:
        """Mean of the values, or None without any."""
        return fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """Sample deviation of the values, or None of fewer than two."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def low(self) -> float | None:
        """The smallest value, or None."""
        return min(self.values, default=None)

    @property
    def high(self) -> float | None:
        """The largest value, or None."""
        return max(self.values, default=None)

    @property
    def newest_at(self) -> str:
        """When the newest of them was started."""
        return max(run.stored.run.created_at for run in self.runs)

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {
            "key": self.key,
            "label": self.label,
            "runs": [run.run_id for run in self.runs],
            "count": len(self.runs),
            "measured": len(self.values),
            "mean": self.mean,
            "deviation": self.deviation,
            "low": self.low,
            "high": self.high,
            "newest_at": self.newest_at,
        }


def check_grouping(by: object, argument: str = "by") -> str:
    """Return what runs are to be grouped by, or refuse it.

    Raises:
        SchemaValidationError: None of the words, nor a field or a key.
    """
    named = isinstance(by, str) and any(
        by.startswith(scope) and len(by) > len(scope) for scope in ("field.", "config.")
    )
    if not isinstance(by, str) or not (named or by in GROUPINGS):
        raise SchemaValidationError(
            f"{argument} must be one of {', '.join(map(repr, GROUPINGS))}, or field.NAME or "
            f"config.KEY, got {by!r:.60}"
        )
    return by


def group_runs(
    runs: Sequence[RunSummary], by: str, measure: Callable[[RunSummary], float | None]
) -> list[GroupedRuns]:
    """Groups of some runs, each where its first run was; runs that lack it come last.

    A run that is in several groups by path is in each of them.

    Args:
        runs: The runs.
        by: As `check_grouping` takes it.
        measure: The value of a run that is summed up, or None.
    """
    found: dict[str | None, list[RunSummary]] = {}
    for run in runs:
        for key in _list_keys(run, by):
            found.setdefault(key, []).append(run)
    labels = _label_configs(found) if by == "config" else {}
    groups = []
    for key, members in found.items():
        ended = [run for run in members if has_result(run.stored)]
        values = [value for run in ended if (value := measure(run)) is not None]
        groups.append(
            GroupedRuns(
                key,
                labels.get(key) or _label(key, by),
                tuple(members),
                tuple(value for value in values if math.isfinite(value)),
            )
        )
    return sorted(groups, key=lambda group: group.key is None)


def _list_keys(run: RunSummary, by: str) -> Iterable[str | None]:
    stored = run.stored
    if by == "group":
        return stored.run.groups or (None,)
    if by in ("config", "structure", "code"):
        return (getattr(stored.digests, by),)
    scope, _, name = by.partition(".")
    if scope == "field":
        value = stored.fields.get(name, _MISSING)
    else:
        value = _flatten(run).get(name, _MISSING)
    return (None if value is _MISSING else _spell(value),)


def _label(key: str | None, by: str) -> str:
    if key is None:
        return "none"
    return key[:_DIGEST_CHARACTERS] if by in ("config", "structure", "code") else key


def _label_configs(found: dict[str | None, list[RunSummary]]) -> dict[str | None, str]:
    """Each configuration by the settings in which these differ."""
    configs = {key: _flatten(runs[0]) for key, runs in found.items() if key is not None}
    if len(configs) < 2:
        return {}
    paths = list({p: None for config in configs.values() for p in config})
    differing = [
        path
        for path in paths
        if len({_spell(config.get(path, _MISSING)) for config in configs.values()}) > 1
    ]
    labels: dict[str | None, str] = {}
    for key, config in configs.items():
        said = [f"{path}={_shorten(config[path])}" for path in differing if path in config]
        more = f" and {len(said) - _MOST_KEYS} more" if len(said) > _MOST_KEYS else ""
        labels[key] = " ".join(said[:_MOST_KEYS]) + more
    return labels


def _flatten(run: RunSummary) -> dict[str, Any]:
    from quark_core.search.evaluation import flatten_values

    return {path: value for path, value in flatten_values(run.config) if not is_seed(path)}


def _spell(value: object) -> str:
    if value is _MISSING:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shorten(value: object) -> str:
    text = " ".join(_spell(value).split())
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 1]}…"
