"""Timed and aggregated figures of a run: windows of all ranks and attempts together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

from quark_core.formatting import format_seconds
from quark_core.records import EventRecord
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.provenance import AggregateRecord
from quark_core.records.names import decode_name
from quark_core.records.query import Query
from quark_core.records.running_statistics import Tally
from quark_core.runs.reading import encode_key, read_rows
from quark_core.runs.run_search import summarize_run
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark_core.backends.contract import SupportsRead
    from quark_core.backends.run_summary import StoredRun

_SHOWN_QUANTILES = (0.5, 0.99)
_MOST_WINDOWS = 50_000
_FIGURES = ("key", "keep", "unit", "clock", "count", "mean", "deviation", "low", "high")
_FURTHER_FIGURES = ("first", "last", "total", "share", "failed", "non_finite")
_METRIC_FIGURES = ("first", "last", "low", "high", "count", "last_step")


class AggregateSummary:
    """What is known of all values of one key, whatever windows, ranks and attempts had them.

    Attributes:
        key: The key, as it was given.
        keep: stat, ring, value or timer.
        unit: Unit of the values, or None; of a timer `s`.
        clock: Of a timer what its times were measured by, else None.
        count: How many finite values; of a timer without the first of each process.
        first: The first value; of a timer the longest first block of all processes.
        last: The newest value.
        failed: Blocks that were left by an exception.
        non_finite: Values that were NaN or infinite.
        values: The newest values of a ring, oldest first.
        share: Of a timer, the part of the wall clock that went into it, blocks of several
            threads added, or None.
    """

    def __init__(self, key: str, keep: str, unit: str | None) -> None:
        self.key = key
        self.keep = keep
        self.unit = unit
        self.clock: str | None = None
        self.first: float | None = None
        self.last: float | None = None
        self.failed = 0
        self.values: tuple[float, ...] = ()
        self.share: float | None = None
        self._tally = Tally()
        self._firsts: list[float] = []
        self._last_us = -1
        self._first_us = 0

    def add(self, record: AggregateRecord) -> None:
        """Count a window."""
        tally = self._tally
        tally.add(_make_tally(record))
        self.failed += record.failed
        if record.first is not None:
            self._firsts.append(record.first)
            if self.keep == "timer":
                self.first = max(self._firsts)
            elif self.first is None or record.started_us < self._first_us:
                self.first, self._first_us = record.first, record.started_us
        if self.clock is None or record.clock == "wall_clock":
            self.clock = record.clock
        if record.time_us >= self._last_us:
            self._last_us = record.time_us
            if record.last is not None:
                self.last = record.last
            if record.values:
                self.values = record.values

    @property
    def count(self) -> int:
        """How many finite values there are."""
        return self._tally.count

    @property
    def non_finite(self) -> int:
        """How many values were not finite."""
        return self._tally.non_finite

    @property
    def mean(self) -> float | None:
        """Mean of the values, or None without any."""
        return self._tally.mean if self.count else None

    @property
    def deviation(self) -> float | None:
        """Their standard deviation, or None."""
        return self._tally.deviation

    @property
    def low(self) -> float | None:
        """The smallest, or None."""
        return self._tally.low if self.count else None

    @property
    def high(self) -> float | None:
        """The largest, or None."""
        return self._tally.high if self.count else None

    @property
    def total(self) -> float:
        """Sum of all values; of a timer with the first blocks."""
        return self._tally.total + (sum(self._firsts) if self.keep == "timer" else 0.0)

    def quantile(self, share: float) -> float | None:
        """A value that such a share of all values do not exceed, within 6 %; None without any.

        Args:
            share: From 0 to 1, such as 0.99. A ring knows its newest values only.
        """
        if self.values and self.keep == "ring":
            ordered = sorted(self.values)
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        return self._tally.find_quantile(share)

    def to_dict(self) -> dict[str, Any]:
        """All figures as JSON values."""
        return {
            **{name: getattr(self, name) for name in _FIGURES},
            "p50": self.quantile(0.5),
            "p99": self.quantile(0.99),
            **{name: getattr(self, name) for name in _FURTHER_FIGURES},
            "values": list(self.values),
        }

    def __repr__(self) -> str:
        return f"AggregateSummary({self.key!r}, {self.keep}, count={self.count}, mean={self.mean})"


class AggregateTable(Sequence[AggregateSummary]):
    """Summaries of a run's keys: timers first, the one that took the most before the others.

    `table["forward"]` is one of them, `str(table)` a table for people, and
    `table.to_dict()` rows of which pandas makes a frame.
    """

    def __init__(self, summaries: Iterable[AggregateSummary]) -> None:
        self._summaries = tuple(summaries)

    @overload
    def __getitem__(self, place: int | str) -> AggregateSummary: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[AggregateSummary]: ...
    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, str):
            return self._summaries[place]
        for summary in self._summaries:
            if summary.key == place:
                return summary
        raise KeyError(place)

    def __len__(self) -> int:
        return len(self._summaries)

    @property
    def timers(self) -> tuple[AggregateSummary, ...]:
        """Those of `metrics.timer`."""
        return tuple(each for each in self._summaries if each.keep == "timer")

    def to_dict(self) -> list[dict[str, Any]]:
        """One row for each key."""
        return [each.to_dict() for each in self._summaries]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("key", "share", "count", "mean", "p50", "p99", "first", "total", "failed")
        ]
        rows += [_show_row(each) for each in self._summaries]
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if place else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )

    def __repr__(self) -> str:
        return f"AggregateTable({', '.join(each.key for each in self._summaries)})"


def build_query(key: str | None, rank: int | None, *, all_attempts: bool = False) -> Query:
    """The query of aggregates of one key, or of all.

    Raises:
        SchemaValidationError: A bad argument; the message names it.
    """
    equals = {"key": None if key is None else encode_key(key, "key")}
    return Query.build(equals=equals, rank=rank, all_attempts=all_attempts)


def read_summaries(
    reader: SupportsRead, run_id: str, *, windows: int = _MOST_WINDOWS
) -> AggregateTable:
    """What a stored run has timed and aggregated; nothing where its backend has none of it.

    Args:
        reader: What the run is read from.
        run_id: The run.
        windows: Of how many records at most, the newest: a run of weeks on many ranks has millions.

    Raises:
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """
    found: Any = read_rows(reader, run_id, AggregateRecord.KIND, Query(limit=windows)).to_records()
    return summarize_records(found)


def summarize_records(records: Iterable[AggregateRecord]) -> AggregateTable:
    """Windows put together, each key one summary."""
    summaries: dict[tuple[str, str], AggregateSummary] = {}
    spans: dict[str, tuple[int, int]] = {}
    for record in records:
        place = (record.key, record.keep)
        summary = summaries.get(place)
        if summary is None:
            summary = AggregateSummary(decode_name(record.key), record.keep, record.unit)
            summaries[place] = summary
        summary.add(record)
        start, end = spans.get(record.writer_id, (record.started_us, record.time_us))
        spans[record.writer_id] = (min(start, record.started_us), max(end, record.time_us))
    span_s = sum(end - start for start, end in spans.values()) / 1e6
    for summary in summaries.values():
        if summary.keep == "timer" and span_s > 0:
            summary.share = summary.total / span_s
    return AggregateTable(
        sorted(
            summaries.values(),
            key=lambda each: (each.keep != "timer", -each.total if each.keep == "timer" else 0.0,
                              each.key),
        )
    )  # fmt: skip


def _make_tally(record: AggregateRecord) -> Tally:
    tally = Tally()
    tally.non_finite = record.non_finite
    if record.count and record.mean is not None:
        tally.count, tally.mean = record.count, record.mean
        tally.m2 = float("inf") if record.m2 is None else record.m2
        tally.low = record.mean if record.low is None else record.low
        tally.high = record.mean if record.high is None else record.high
        tally.decode_buckets(record.buckets)
    return tally


def describe_amount(value: float | None, unit: str | None) -> str:
    """A figure in few digits; of seconds in the unit that suits."""
    if unit == "s" or value is None:
        return format_seconds(value)
    return f"{value:.4g}"


def _show_row(each: AggregateSummary) -> tuple[str, ...]:
    unit = each.unit
    return (
        each.key,
        "-" if each.share is None else f"{100 * each.share:.1f} %",
        f"{each.count:,}",
        describe_amount(each.mean, unit),
        *(describe_amount(each.quantile(share), unit) for share in _SHOWN_QUANTILES),
        describe_amount(each.first, unit),
        describe_amount(each.total, unit) if each.keep == "timer" else "-",
        f"{each.failed:,}" if each.failed else "",
    )


_MOST_EVENTS = 1_000
_MOST_ERRORS = 20
_ERRORS = frozenset({"error", "critical"})
_VERSION = "version"


class ShortReport:
    """A run in short; `str()` is text for people, `to_dict()` and `to_json()` are for programs.

    Made by `session.report(short=True)` and `quark report RUN --short`.

    Args:
        contents: What `to_dict()` gives.
        aggregates: What was timed and aggregated.
    """

    def __init__(self, contents: dict[str, Any], aggregates: AggregateTable) -> None:
        self._contents = contents
        self._aggregates = aggregates

    def to_dict(self) -> dict[str, Any]:
        """A new dict: `id`, `name`, `description`, `project`, `status`, `version`, `commit`,
        `revision`, `tags`, `groups`, `parameters`, `metadata`, `metrics`, `timers`,
        `aggregates`, `errors`, `started`, `ended`, `attempts`.
        """  # noqa: D205 - the keys are the summary
        return dict(self._contents)

    def to_json(self, *, indent: int | None = 2) -> str:
        """The same as JSON text; numbers that are not finite are null."""
        return json.dumps(_make_finite(self._contents), indent=indent, ensure_ascii=False)

    def __str__(self) -> str:
        has = self._contents
        title = has["name"] or has["id"]
        lines = [f"{title} ({has['id']}): {has['status']}, {has['project']}"]
        facts = {
            "version": has["version"],
            "commit": (has["commit"] or "")[:10],
            "tags": ", ".join(has["tags"]),
            "groups": ", ".join(has["groups"]),
            "notes": has["description"],
        }
        lines += [f"  {name}: {value}" for name, value in facts.items() if value]
        for name in ("parameters", "metadata"):
            if has[name]:
                lines.append(f"{name}:")
                lines += [f"  {key}: {_show(value)}" for key, value in has[name].items()]
        if has["metrics"]:
            lines.append("metrics:")
            lines += [f"  {key}: {_tell(metric)}" for key, metric in has["metrics"].items()]
        lines += [f"error: {each['message']}" for each in has["errors"]]
        told = [clean_line(line) for line in lines]
        if len(self._aggregates):
            told += ["", *map(clean_line, str(self._aggregates).splitlines())]
        return "\n".join(told)

    def __repr__(self) -> str:
        return f"ShortReport({self._contents['id']})"


def read_short_report(reader: SupportsRead, stored: StoredRun) -> ShortReport:
    """A stored run in short.

    Raises:
        SessionStoreError: The store cannot be read.
    """
    run = stored.run
    run_id = str(run.id)
    table = read_summaries(reader, run_id)
    rows = {each.key: each.to_dict() for each in table}
    timers = {each.key for each in table.timers}
    return ShortReport(
        {
            "id": run_id,
            "name": run.name,
            "description": run.notes,
            "project": stored.project.name,
            "status": stored.state,
            "version": stored.fields.get(_VERSION),
            "commit": run.git_commit,
            "revision": stored.fields.get("revision", 0),
            "tags": list(run.tags),
            "groups": list(run.groups),
            "parameters": {} if stored.config is None else _thaw(stored.config.values),
            "metadata": {key: value for key, value in stored.fields.items() if key != _VERSION},
            "metrics": {
                decode_name(key): {name: getattr(metric, name) for name in _METRIC_FIGURES}
                for key, metric in summarize_run(reader, run_id).metrics.items()
            },
            "timers": {key: row for key, row in rows.items() if key in timers},
            "aggregates": {key: row for key, row in rows.items() if key not in timers},
            "errors": _read_errors(reader, run_id),
            "started": run.created_at,
            "ended": run.ended_at,
            "attempts": run.attempt + 1,
        },
        table,
    )


def _read_errors(reader: SupportsRead, run_id: str) -> list[dict[str, Any]]:
    """The newest things that went wrong, of the newest events."""
    found: Any = read_rows(reader, run_id, EventRecord.KIND, Query(limit=_MOST_EVENTS))
    errors = []
    for record in found.to_records():
        if record.severity not in _ERRORS:
            continue
        payload = dict(record.payload or {})
        message = str(payload.get("message") or record.event_type)
        errors.append({"at": record.timestamp, "type": record.event_type, "message": message,
                       "step": record.step})  # fmt: skip
    return errors[-_MOST_ERRORS:]


def _thaw(values: JsonObject) -> dict[str, Any]:
    return {key: _thaw(value) if isinstance(value, JsonObject) else value
            for key, value in values.items()}  # fmt: skip


def _make_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _make_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_make_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0.0:
        return None
    return value


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(_make_finite(value), ensure_ascii=False)


def _tell(metric: dict[str, Any]) -> str:
    def show(value: float | None) -> str:
        return "-" if value is None else f"{value:.6g}"

    return (
        f"{show(metric['last'])} (first {show(metric['first'])}, {show(metric['low'])} to "
        f"{show(metric['high'])}, {metric['count']:,} points)"
    )
