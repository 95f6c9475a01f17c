"""What `quark show` prints of a run beside its summary: metrics, ranks, hardware, artifacts."""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.table import Table

from quark.analysis.rank_performance import measure_paces, measure_rates
from quark.cli.store_access import print_json
from quark.cli.texts import FOLD, RIGHT, Text, make_table
from quark.projects import find_inherited
from quark_core.config.objective import find_mode, read_objective
from quark_core.formatting import format_bytes, format_count, join_first
from quark_core.records import ArtifactRecord, BatchDiagnosticRecord, SystemTelemetryRecord
from quark_core.records.json_object import flatten_json
from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.records.names import KEPT_SOURCES, decode_name
from quark_core.records.query import Query
from quark_core.runs.console_lines import read_newest_events
from quark_core.runs.following import read_series
from quark_core.runs.reading import encode_key
from quark_core.runs.run_report import describe_amount, read_summaries
from quark_core.runs.run_search import summarize_run
from quark_core.sessions.run_config import CONFIG_READS
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from quark.analysis.rank_performance import RankPace, RankPaces, RunRates
    from quark.cli.texts import Console
    from quark_core.backends.contract import SupportsRead
    from quark_core.backends.edits import Inherited
    from quark_core.backends.run_summary import MetricSummary as StoredSummary
    from quark_core.backends.run_summary import RunSummary, StoredRun
    from quark_core.backends.series import Series
    from quark_core.config.objective import ObjectiveMode
    from quark_core.records import ArtifactRecord, BatchDiagnosticRecord, SystemTelemetryRecord
    from quark_core.records.columns import Columns
    from quark_core.runs.run_report import AggregateSummary, AggregateTable

# More than any terminal shows.
_CURVE_POINTS = 500
# The points of so many are read batch by batch, as often as there are curves.
_MANY_METRICS = 10_000
# Rates from here on are written without decimals.
_WHOLE = 10_000


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """One metric of a run.

    Attributes:
        key: Its stored key.
        count: Number of values.
        first, last: The values that came first and last, None if not finite.
        best: The least or greatest finite value, None where it is not known
            which is better.
        best_at: Step (or epoch) of the best value.
        direction: "min", "max" or None.
        low, high: Least and greatest finite value.
        non_finite: How many values are NaN or infinite.
        x: Steps, or epochs where there are no steps, of the points to draw.
        y: Their values.
    """

    key: str
    count: int
    first: float | None
    last: float | None
    best: float | None
    best_at: int | None
    direction: str | None
    low: float | None
    high: float | None
    non_finite: int
    x: NDArray[Any]
    y: NDArray[Any]

    @property
    def name(self) -> str:
        """The metric as it was logged."""
        return decode_name(self.key)

    def to_dict(self) -> dict[str, Any]:
        """JSON-like values, without the points."""
        values = {"name": self.name, **asdict(self)}
        del values["x"], values["y"]
        return values


def summarize_metrics(
    reader: SupportsRead, run: RunSummary, *, after: str | None = None, limit: int | None = None
) -> list[MetricSummary]:
    """One summary per metric of a run, sorted by key, without reading every point.

    Of a run with very many metrics no curve is read: it is then not known where
    the best value is.

    Args:
        reader: What the run is read from.
        run: The run.
        after: Only metrics whose keys come after this.
        limit: At most so many.
    """
    keys = list(run.metrics)
    start = 0 if after is None else bisect_right(keys, encode_key(after, "after"))
    chosen = keys[start : None if limit is None else start + limit]
    with_curves = len(keys) <= _MANY_METRICS
    objective = read_objective(run.config)
    return [
        _summarize(
            run.metrics[key],
            read_series(reader, run.run_id, key, _CURVE_POINTS) if with_curves else None,
            find_mode(key, objective),
        )
        for key in chosen
    ]


def _summarize(
    metric: StoredSummary, series: Series | None, direction: ObjectiveMode | None
) -> MetricSummary:
    best = best_at = None
    if direction is not None and metric.low is not None:
        downwards = direction == "min"
        best = metric.low if downwards else metric.high
        best_at = None if series is None else _find_best(series, downwards=downwards)
    x, y = (np.empty(0), np.empty(0)) if series is None else list_points(series)
    return MetricSummary(
        key=metric.key,
        count=metric.count,
        first=metric.first,
        last=metric.last,
        best=best,
        best_at=best_at,
        direction=direction,
        low=metric.low,
        high=metric.high,
        non_finite=metric.non_finite,
        x=x,
        y=y,
    )


def _find_best(series: Series, *, downwards: bool) -> int:
    """Step of the best value, or its epoch where it has no step."""
    extremes = series.low if downwards else series.high
    entry = int(np.nanargmin(extremes) if downwards else np.nanargmax(extremes))
    step = int((series.low_step if downwards else series.high_step)[entry])
    return step if step >= 0 else int(series.epoch[entry])


def list_points(series: Series) -> tuple[NDArray[Any], NDArray[Any]]:
    """The points of a curve to draw: all of them, or the extremes of each entry."""
    if series.exact:
        return np.where(series.step >= 0, series.step, series.epoch), series.last
    ends = [
        (np.where(steps >= 0, steps, series.epoch), values)
        for steps, values in ((series.low_step, series.low), (series.high_step, series.high))
    ]
    x = np.stack([x for x, _ in ends], axis=1)
    y = np.stack([y for _, y in ends], axis=1)
    order = np.argsort(x, axis=1, kind="stable")
    return np.take_along_axis(x, order, 1).ravel(), np.take_along_axis(y, order, 1).ravel()


_ROWS = 16


def print_ranks(console: Console, paces: RankPaces) -> None:
    """Print the ranks of a run, of many the slowest, and a line on who is late."""
    late = paces.find_late()
    silent = {rank.rank for rank, _ in paces.find_silent()}
    behind = {rank.rank for rank in paces.find_behind()}
    shown = paces.ranks
    if len(shown) > _ROWS:
        slowest = sorted(
            shown,
            key=lambda rank: (rank.rank not in silent | behind, -(rank.behind_ms or 0)),
        )
        shown = tuple(sorted(slowest[:_ROWS], key=lambda rank: rank.rank))
    has_hosts = len({rank.host for rank in paces.ranks}) > 1
    hosts = ("host",) if has_hosts else ()
    figures = ("step ms", "p90", "behind", "slowest", "data ms", "records", "step", "seen")
    table = make_table(
        {"rank": RIGHT, hosts: FOLD | {"min_width": 6}, figures: RIGHT}, collapse_padding=True
    )
    for rank in shown:
        is_marked = rank is late or rank.rank in silent or rank.rank in behind
        table.add_row(
            str(rank.rank),
            *([Text(rank.host or "-")] if has_hosts else []),
            _describe_ms(rank.step_ms),
            _describe_ms(rank.step_p90_ms),
            _describe_ms(rank.behind_ms, signed=True),
            "-" if rank.slowest is None else f"{100 * rank.slowest:.0f} %",
            _describe_ms(rank.data_ms),
            str(rank.records),
            "-" if rank.last_step is None else str(rank.last_step),
            rank.last_seen[11:19],
            style="yellow" if is_marked else None,
        )
    console.print(table)
    if len(shown) < len(paces.ranks):
        console.print(f"The slowest {len(shown)} of {len(paces.ranks)} ranks.", style="dim")
    for line in describe_late(paces):
        console.print(line, highlight=False)


def describe_late(paces: RankPaces) -> list[str]:
    """Lines on the rank that the others wait for, and on those that were not seen lately."""
    lines = []
    measure = "" if paces.is_timed else ", measured by metric timestamps"
    since = f"from step {paces.first_step} on{measure}"
    late = paces.find_late()
    if late is not None and late.step_ms is not None and late.behind_ms is not None:
        usual_ms = late.step_ms - late.behind_ms
        more = f" ({100 * late.behind_ms / usual_ms:.0f} %)" if usual_ms > 0 else ""
        lines.append(
            f"Rank {late.rank} is late: its steps take {late.behind_ms:.3g} ms{more} longer than "
            f"those of the other ranks. It is the slowest in {100 * (late.slowest or 0):.0f} % of "
            f"the steps ({since}).{_blame_data(late, paces)}"
        )
    behind = paces.find_behind()
    if behind:
        lines.append(_describe_behind(behind, paces))
    elif late is None and any(rank.step_ms is not None for rank in paces.ranks):
        lines.append(f"No rank is late ({since}).")
    lines += [
        f"Rank {rank.rank} was last seen {gap_s:.0f} s before the latest rank"
        + (f", at step {rank.last_step}." if rank.last_step is not None else ".")
        for rank, gap_s in paces.find_silent()
    ]
    return lines


def _describe_behind(behind: Sequence[RankPace], paces: RankPaces) -> str:
    """Which ranks are at an earlier step than the others."""
    newest = max(rank.last_step for rank in paces.ranks if rank.last_step is not None)
    counts = sorted({rank.steps_behind or 0 for rank in behind})
    steps = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    least = "at least " if any(rank.last_step is None for rank in behind) else ""
    names = join_first([rank.rank for rank in behind], _ROWS)
    one = len(behind) == 1
    return (
        f"Rank{'' if one else 's'} {names} {'is' if one else 'are'} {least}{steps} steps "
        f"behind the rank that is at step {newest}."
    )


def _blame_data(late: RankPace, paces: RankPaces) -> str:
    """Whether most of what a rank is late by is waiting for data."""
    others = sorted(r.data_ms for r in paces.ranks if r is not late and r.data_ms is not None)
    if late.data_ms is None or late.behind_ms is None or not others:
        return ""
    waits_ms = late.data_ms - others[len(others) // 2]
    return " It waits for data." if waits_ms > 0.5 * late.behind_ms else ""


def _describe_ms(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.3g}" if signed else f"{value:.4g}"


_ARTIFACTS = 8
# What the run has kept of its code is among them, and is not shown.
_ARTIFACTS_READ = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One view of a run, read once for people and for programs.

    Attributes:
        stored: The run.
        summary: The same with its metrics summed up by the store.
        metrics: Those that are shown.
        inherited: Fields and tags of its own, its groups and its project.
        telemetry, batch: The newest of each, or None.
        rates: What it gets done each second, or None.
        artifacts: The newest ones.
        fingerprints: The newest of each subject and key.
        aggregates: Its timers and other aggregates.
        paces: How its ranks go on, or None.
        events: The newest ones.
    """

    stored: StoredRun
    summary: RunSummary
    metrics: Sequence[MetricSummary]
    inherited: Inherited
    telemetry: SystemTelemetryRecord | None
    batch: BatchDiagnosticRecord | None
    rates: RunRates | None
    artifacts: Sequence[ArtifactRecord]
    fingerprints: Sequence[FingerprintRecord]
    aggregates: AggregateTable
    paces: RankPaces | None
    events: Columns

    @classmethod
    def read(
        cls,
        reader: SupportsRead,
        stored: StoredRun,
        *,
        events: int,
        after: str | None = None,
        limit: int | None = None,
    ) -> RunView:
        """Read a run.

        Args:
            reader: What it is read from.
            stored: The run.
            events: How many events, the newest of them.
            after: Only metrics whose keys come after this.
            limit: At most so many metrics.
        """
        run_id = str(stored.run.id)
        summary = summarize_run(reader, run_id)
        return cls(
            stored=stored,
            summary=summary,
            metrics=summarize_metrics(reader, summary, after=after, limit=limit),
            inherited=find_inherited(reader, stored),
            telemetry=_read_newest(reader, run_id, SystemTelemetryRecord),
            batch=_read_newest(reader, run_id, BatchDiagnosticRecord),
            rates=measure_rates(reader, summary),
            artifacts=_read_artifacts(reader, run_id),
            fingerprints=_read_fingerprints(reader, run_id),
            aggregates=read_summaries(reader, run_id),
            paces=measure_paces(reader, summary),
            events=read_newest_events(reader, run_id, events),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-like values."""
        inherited = self.inherited
        return {
            **self.stored.to_dict(),
            "inherited": {"fields": dict(inherited.fields), "tags": list(inherited.tags)},
            "metrics": [metric.to_dict() for metric in self.metrics],
            "telemetry": None if self.telemetry is None else self.telemetry.to_dict(),
            "throughput": None if self.rates is None else self.rates.to_dict(),
            "artifacts": [record.to_dict() for record in self.artifacts],
            "fingerprints": [record.to_dict() for record in self.fingerprints],
            "aggregates": self.aggregates.to_dict(),
            "ranks": [] if self.paces is None else [rank.to_dict() for rank in self.paces.ranks],
            "events": [record.to_dict() for record in self.events.to_records()],
        }


def print_contents(console: Console, view: RunView) -> None:
    """Print a line on the hardware and the newest artifacts; nothing where there is nothing."""
    from quark.cli.artifacts import make_artifact_table

    lines = [
        ("hardware", None if view.telemetry is None else _describe_hardware(view.telemetry)),
        ("throughput", None if view.rates is None else describe_rates(view.rates)),
        ("newest batch", None if view.batch is None else _describe_batch(view.batch)),
        *(("fingerprint", line) for line in _describe_fingerprints(view.fingerprints)),
    ]
    for label, line in lines:
        if line:
            console.print(Text.assemble((f"{label}  ", "bold"), line))
    if view.artifacts:
        console.print(make_artifact_table(view.artifacts))
        if len(view.artifacts) == _ARTIFACTS:
            console.print(f"The newest {_ARTIFACTS}; `quark artifacts` lists all.", style="dim")


def describe_rates(rates: RunRates) -> str:
    """What a run gets done each second, in one line."""
    told = []
    for value, unit in ((rates.tokens_per_s, "tokens/s"), (rates.samples_per_s, "samples/s")):
        if value is not None:
            told.append(f"{value:,.4g} {unit}" if value < _WHOLE else f"{value:,.0f} {unit}")
    if rates.flops_per_s is not None:
        told.append(f"{rates.flops_per_s / 1e12:.4g} TFLOP/s")
    if rates.mfu_percent is not None:
        told.append(f"MFU {rates.mfu_percent:.1f} %")
    if rates.ranks < rates.world_size:
        told.append(f"of {rates.ranks} of {rates.world_size} processes")
    elif rates.ranks > 1:
        told.append(f"of {rates.ranks} ranks together")
    return ", ".join(told)


def _read_newest(reader: SupportsRead, run_id: str, kind: type[Any]) -> Any:
    found = reader.read(run_id, kind.KIND, Query(limit=1)).to_records()
    return found[0] if found else None


def _describe_batch(record: BatchDiagnosticRecord) -> str:
    """Such as `step 120, loss 0.31, 64 samples of 10 classes`."""
    parts = [] if record.step is None else [f"step {record.step}"]
    parts.append(f"loss {record.loss:.4g}")
    if record.batch_size is not None:
        classes = f" of {len(record.class_counts)} classes" if record.class_counts else ""
        parts.append(f"{record.batch_size} samples{classes}")
    return ", ".join(parts)


def _read_artifacts(reader: SupportsRead, run_id: str) -> tuple[ArtifactRecord, ...]:
    found = reader.read(run_id, ArtifactRecord.KIND, Query(limit=_ARTIFACTS_READ))
    shown = [record for record in found.to_records() if record.artifact_type != KEPT_SOURCES]  # type: ignore[attr-defined]
    return tuple(shown[-_ARTIFACTS:])  # type: ignore[arg-type]


def _describe_hardware(record: SystemTelemetryRecord) -> str:
    """The newest figures, such as `step 12.5 ms (data 8 %), CPU 34 %, RAM 40 %, GPU 0 97 %`."""
    parts = []
    if record.step_time_ms is not None:
        part = f"step {record.step_time_ms:.4g} ms"
        if record.data_time_ms is not None and record.step_time_ms > 0:
            part += f" (data {100 * record.data_time_ms / record.step_time_ms:.0f} %)"
        parts.append(part)
    if record.cpu_usage_percent is not None:
        parts.append(f"CPU {record.cpu_usage_percent:.0f} %")
    if record.ram_usage_percent is not None:
        parts.append(f"RAM {record.ram_usage_percent:.0f} %")
    if record.process_rss_bytes is not None:
        parts.append(f"process {format_bytes(record.process_rss_bytes)}")
    for gpu in record.gpus or ():
        part = f"GPU {gpu.index}"
        if gpu.utilization_percent is not None:
            part += f" {gpu.utilization_percent:.0f} %"
        if gpu.memory_used_bytes is not None:
            part += f" {format_bytes(gpu.memory_used_bytes)}"
        parts.append(part)
    for count, noun in (
        (record.overflow_count, "overflow"),
        (record.skipped_step_count, "skipped step"),
    ):
        if count:
            since = " since it was resumed" if record.attempt else ""
            parts.append(f"{format_count(count, noun)}{since}")
    return ", ".join(parts)


_MOST_ROWS = 40
_NAME_WIDTH = 12


def print_aggregates(console: Console, table: AggregateTable) -> None:
    """Print the timers, those that took the most first, and the aggregates; nothing of none."""
    timers = table.timers
    others = [each for each in table if each.keep != "timer"]
    if timers:
        console.print(_make_timers(timers[:_MOST_ROWS]))
    if others:
        console.print(_make_others(others[:_MOST_ROWS]))
    left = max(0, len(timers) - _MOST_ROWS) + max(0, len(others) - _MOST_ROWS)
    if left:
        console.print(f"{left} more; --json prints all.", style="dim")


def _make_timers(timers: Sequence[AggregateSummary]) -> Table:
    has_failed = any(each.failed for each in timers)
    columns = ("share", "count", "mean", "p50", "p99", "first", *(("failed",) * has_failed))
    table = _begin("timer", columns)
    for each in timers:
        share = "-" if each.share is None else f"{100 * each.share:.1f} %"
        figures = (each.mean, each.quantile(0.5), each.quantile(0.99), each.first)
        name = Text(each.key)
        if each.clock == "cuda_events":
            name.append(" (GPU)", style="dim")
        table.add_row(
            name,
            share,
            f"{each.count:,}",
            *(describe_amount(figure, "s") for figure in figures),
            *((f"{each.failed:,}",) * has_failed),
        )
    return table


def _make_others(others: Sequence[AggregateSummary]) -> Table:
    table = _begin("aggregate", ("kept", "count", "mean", "std dev", "min", "max", "last"))
    for each in others:
        figures = (each.mean, each.deviation, each.low, each.high, each.last)
        name = Text(each.key)
        if each.non_finite:
            name.append(f"  {each.non_finite} not finite", style="red")
        told = (describe_amount(figure, each.unit) for figure in figures)
        table.add_row(name, each.keep, f"{each.count:,}", *told)
    return table


def _begin(head: str, columns: Sequence[str]) -> Table:
    return make_table({head: FOLD | {"min_width": _NAME_WIDTH}, tuple(columns): RIGHT})


_MOST_READ = 1000
_MOST_SHOWN = 12
_DIGEST_CHARACTERS = 12
_STREAM = "stream"
_SUBJECTS = ("data", "output", "code", "environment")
_COUNTS = {"files": "files", "rows": "rows", "length": "items", "samples": "samples"}
_TROUBLES = ("unreadable", "changed", "failed", "not_the_same_twice", "unseen")
_MOST_KEYS = 8


def _read_fingerprints(reader: SupportsRead, run_id: str) -> list[FingerprintRecord]:
    """The newest fingerprint of each subject and key, those of data first.

    Data that came may have the key of the data that were given: they are two.
    """
    found: Iterable[object] = reader.read(
        run_id, FingerprintRecord.KIND, Query(limit=_MOST_READ)
    ).to_records()
    newest = {
        (one.subject, one.key, one.level.startswith(_STREAM)): one
        for one in found
        if isinstance(one, FingerprintRecord)
    }
    return sorted(newest.values(), key=lambda one: (_SUBJECTS.index(one.subject), one.key))


def _describe_fingerprints(records: Sequence[FingerprintRecord]) -> list[str]:
    """Such as `data train  7e281994496c  stream:contents, 60000 samples, pass 3`."""
    lines = [_describe(record) for record in records[:_MOST_SHOWN]]
    if len(records) > _MOST_SHOWN:
        lines.append(f"and {len(records) - _MOST_SHOWN} more; `quark show --json` prints all")
    return lines


def _describe(record: FingerprintRecord) -> str:
    metadata: Mapping[str, Any] = record.metadata or {}
    if (record.subject, record.key) == ("environment", CONFIG_READS):
        return clean_line(_describe_reads(metadata))
    parts = [record.level]
    if record.step is not None:
        parts.append(f"step {record.step}")
    for name, word in _COUNTS.items():
        count = metadata.get(name)
        if isinstance(count, int):
            parts.append(f"{count} {word.removesuffix('s') if count == 1 else word}")
    if isinstance(metadata.get("pass"), int):
        parts.append(f"pass {metadata['pass']}")
    parts.extend(name.replace("_", " ") for name in _TROUBLES if metadata.get(name))
    digest = record.digest[:_DIGEST_CHARACTERS]
    return clean_line(f"{record.subject} {record.key}  {digest}  {', '.join(parts)}")


def _describe_reads(metadata: Mapping[str, Any]) -> str:
    """Such as `configuration  2 of 3 keys were read, never: log_every`."""
    read, known = (
        [str(key) for key in found] if isinstance(found, list) else []
        for found in (metadata.get("read"), metadata.get("known"))
    )
    unread = sorted({*known} - {*read})
    never = join_first(unread, _MOST_KEYS)
    return f"configuration  {len(read)} of {len(known)} keys were read" + (
        f", never: {never}" if never else ""
    )


def print_origins(stored: StoredRun, key: str, *, as_json: bool) -> None:
    """Print the origins of a setting and of those below it, a line for each.

    Args:
        stored: The run.
        key: The setting, dots between nested keys; "" for all.
        as_json: Whether as JSON: setting -> its value and origins, the newest first.

    Raises:
        click.ClickException: The run has no such setting.
    """
    config = stored.config
    settings: dict[str, Any] = {} if config is None else dict(flatten_json(config.values))
    chosen = {
        path: value
        for path, value in settings.items()
        if not key or path == key or path.startswith(f"{key}.")
    }
    if not chosen:
        raise click.ClickException(clean_line(_describe_absence(key, settings)))
    known = {} if config is None else config.group_origins()
    if as_json:
        print_json(
            {
                path: {
                    "value": value,
                    "origins": [origin.to_dict() for origin in known.get(path, ())],
                }
                for path, value in chosen.items()
            }
        )
        return
    from quark.configuration.layering.layered_config import tell_chain

    for path, value in chosen.items():
        chain = [(each.source, each.place, each.value) for each in known.get(path, ())]
        click.echo(clean_line(tell_chain(path, chain or [("origin not recorded", None, value)])))


def _describe_absence(key: str, settings: dict[str, Any]) -> str:
    if not settings:
        return "this run has no config"
    near = difflib.get_close_matches(key, list(settings), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"this run has no config value {key!r}{hint}"
