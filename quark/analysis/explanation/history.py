"""The runs of a project, each with its traits and the end of one metric: what history knows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import xor
from typing import Any

from quark.analysis.explanation.traits import (
    Place,
    RunTraits,
    describe_traits,
    encode_seeds,
    encode_value,
    tells_runs_apart,
)
from quark.analysis.explanation.unnamed_arguments import settle_arguments
from quark_core.backends.contract import StoredRun, SupportsRead
from quark_core.backends.run_pages import MOST_COLUMNS, MOST_PAGE_RUNS
from quark_core.backends.run_summary import MetricSummary, RunSummary
from quark_core.errors import SchemaValidationError
from quark_core.records.runs import digest_config
from quark_core.runs.run_search import build_page_search, build_search, find_page, find_runs

_MOST_RUNS = 2_000
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class PastRun:
    """One run of the project.

    Attributes:
        run_id: The run.
        traits: What it was made of.
        value: The metric's last value, or None where it has none that is finite.
        first: Its first value, likewise.
        state: Its status, or lost.
        config_digest: Of its configuration without seeds, or None without one.
        seed: Its seeds as a text, or None.
        fields: What was noted of it.
        groups: The groups that it is in.
        started_at: When it began.
        extreme: The metric's smallest or largest value, whichever its end is nearer to.
    """

    run_id: str
    traits: RunTraits
    value: float | None
    first: float | None
    state: str
    config_digest: str | None
    seed: bytes | None
    fields: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    started_at: str = ""
    extreme: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it came to its end and has the metric."""
        return self.state == "completed" and self.value is not None

    def sign_rest(self, place: Place | None = None) -> frozenset[tuple[Place, bytes]]:
        """All that it was made of, seeds, names and one trait left out.

        Runs of which it is equal differ in that trait alone, as far as anything was recorded.
        """
        text = None if place is None else self.texts.get(place)
        return self._signed if text is None else self._signed.difference(((place, text),))

    def hash_rest(self, place: Place) -> int:
        """A number that is equal where `sign_rest` is, and hardly ever else; it is soon told."""
        text = self.texts.get(place)
        if text is None or not tells_runs_apart(place):
            return self._hashed
        return self._hashed ^ hash((place, text))

    @cached_property
    def texts(self) -> dict[Place, bytes]:
        """Each trait's value as `encode_value` has it."""
        return {place: encode_value(value) for place, value in self.traits.values.items()}

    @cached_property
    def _signed(self) -> frozenset[tuple[Place, bytes]]:
        return frozenset(item for item in self.texts.items() if tells_runs_apart(item[0]))

    @cached_property
    def _hashed(self) -> int:
        return reduce(xor, map(hash, self._signed), 0)


def load_history(
    reader: SupportsRead,
    project: str,
    metric_key: str | None,
    data_keys: Sequence[str] = (),
) -> list[PastRun]:
    """The newest runs of a project, newest first, without reading a point.

    Args:
        reader: The store.
        project: The project.
        metric_key: The metric whose ends are wanted, as it is stored.
        data_keys: Fingerprints of data that tell runs apart.

    Raises:
        SessionStoreError: The store cannot be read.
    """
    found = find_runs(reader, build_search(project=project, limit=_MOST_RUNS))
    data = _load_data(reader, project, data_keys)
    return settle_arguments([_make(each, metric_key, data.get(each.run_id, {})) for each in found])


def _load_data(
    reader: SupportsRead, project: str, keys: Sequence[str]
) -> dict[str, dict[Place, Any]]:
    """Digests of the data by run; nothing where the store cannot be asked for them."""
    out: dict[str, dict[Place, Any]] = {}
    columns = [f"fingerprint.{key}" for key in keys[:MOST_COLUMNS] if _PLAIN.fullmatch(key)]
    after: str | None = None
    while columns and len(out) < _MOST_RUNS:
        try:
            page = find_page(
                reader,
                build_page_search(
                    project=project, columns=columns, limit=MOST_PAGE_RUNS, after=after
                ),
            )
        except SchemaValidationError:
            return {}
        for row in page.rows:
            out[row.run_id] = {
                ("data", column.partition(".")[2]): value
                for column, value in zip(columns, row.values, strict=True)
                if value is not None
            }
        after = page.next
        if after is None:
            break
    return out


def _make(summary: RunSummary, metric_key: str | None, data: Mapping[Place, Any]) -> PastRun:
    stored = summary.stored
    traits = describe_traits(stored)
    if data:
        traits = replace(traits, values={**traits.values, **data})
    metric = None if metric_key is None else summary.metrics.get(metric_key)
    return PastRun(
        summary.run_id,
        traits,
        None if metric is None else metric.last,
        None if metric is None else metric.first,
        stored.state,
        find_config_digest(stored),
        encode_seeds(traits),
        stored.fields,
        stored.run.groups,
        stored.run.created_at,
        None if metric is None else _find_extreme(metric),
    )


def _find_extreme(metric: MetricSummary) -> float | None:
    bounds = [bound for bound in (metric.low, metric.high) if bound is not None]
    if metric.last is None or not bounds:
        return None
    last = metric.last
    return min(bounds, key=lambda bound: abs(bound - last))


def find_config_digest(stored: StoredRun) -> str | None:
    """The digest of a run's configuration, or None where it has none."""
    if stored.digests.config is not None or stored.config is None or not stored.config.values:
        return stored.digests.config
    return digest_config(stored.config.values)
