"""The bounded contents of a report on one run: the page's answers, and what is omitted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import numpy as np

from quark.page.pack import decode_pack
from quark.page.routes.analyses import AnalysisDesk
from quark.page.routes.curves import ChangeDesk, pack_series
from quark.page.routes.findings import pack_evidence
from quark.page.routes.measurements import GridDesk
from quark.page.routes.parameters import MAX_KEYS, Parameters
from quark.page.routes.records import list_events
from quark.page.routes.run_analysis import Analysis, LocalAnalyzer
from quark.page.routes.run_details import tell_run
from quark_core.config.redaction import redact_arguments, redact_text, redact_values
from quark_core.errors import QuarkError
from quark_core.formatting import format_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark.page.routes.page_source import PageSource
    from quark_core.backends.run_summary import RunSummary

MOST_RUNS = 20
"""So many runs fit into one report."""

_MOST_FINDINGS = 100
_MOST_EVIDENCE = 40
_MOST_VALUES = 500
_MOST_CHARACTERS = 2_000
_MAP_ROWS, _MAP_BINS = "200", "240"
# A share below this everywhere says that there is nothing to see.
_LEAST_SHARE = 0.05

# The most telling first: kind, field, summary type, whether it is a share.
_MAPS = (
    ("layer", "norm", "gradient", False),
    ("parameter", "gradient_norm", "", False),
    ("parameter", "update_to_parameter_ratio", "", False),
    ("layer", "dead_unit_ratio", "activation", True),
    ("layer", "norm", "activation", False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What of a run goes into a report.

    Attributes:
        config: Its configuration, environment, command line and paths.
        logs: Its events and log lines.
        curves: So many metrics at most are drawn.
        entries: Of so many entries each.
        maps: So many maps of layers or parameters.
        events: So many events and log lines, the newest.
    """

    config: bool = True
    logs: bool = True
    curves: int = 60
    entries: int = 600
    maps: int = 3
    events: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContents:
    """One run of a report.

    Attributes:
        data: JSON-like values, as the page has them of a run.
        packs: Name -> pack of curves or cells, which `data` names.
    """

    data: Mapping[str, Any]
    packs: Mapping[str, bytes] = field(default_factory=dict)

    def list_lines(self) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
        """Name of each metric -> steps and values of its newest curve, the main metric first."""
        lines: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
        for name in self.data["curves"]:
            head, columns = decode_pack(self.packs[name])
            for place, curve in enumerate(head["curves"]):
                lines[curve["name"]] = (columns[f"{place}.step"], columns[f"{place}.mean"])
        main = (self.data["run"].get("main") or {}).get("name")
        first = {main: lines[main]} if main in lines else {}
        return {**first, **lines}


class _SettledDesk(AnalysisDesk):
    """Knows one analysis, which is there already."""

    def __init__(self, source: PageSource, analysis: Analysis) -> None:
        super().__init__(source, LocalAnalyzer(source.open_run))
        self._analysis = analysis

    def find(self, summary: RunSummary) -> Analysis | None:  # noqa: ARG002
        return self._analysis

    def request(self, summary: RunSummary) -> Analysis | None:  # noqa: ARG002
        return self._analysis


def gather_run(
    source: PageSource,
    run_id: str,
    options: ReportOptions,
    analysis: Analysis | None = None,
) -> RunContents:
    """All that a report has of one run.

    Args:
        source: Where it lies.
        run_id: The run.
        options: What goes in.
        analysis: What is known of it; else what is stored, else it is analyzed in memory.

    Raises:
        RunNotFoundError: There is no such run.
        SessionStoreError: The store cannot be read.
    """
    summary = source.summarize(run_id)
    settled = analysis or AnalysisDesk(source, LocalAnalyzer(source.open_run)).settle(summary)
    desk = _SettledDesk(source, settled)
    data = tell_run(source, desk, ChangeDesk(source, desk), run_id)
    for name in ("absent", "cursor", "delivery", "progress", "ranks"):
        del data[name]
    lacks = _leave_out(data, options)
    findings = data["analysis"]["findings"]
    if len(findings) > _MOST_FINDINGS:
        lacks.append(f"{len(findings) - _MOST_FINDINGS:,} less severe findings")
        del findings[_MOST_FINDINGS:]
    packs: dict[str, bytes] = {}
    packs.update(_gather_evidence(source, desk, run_id, findings, options))
    data["curves"] = _gather_curves(source, desk, data, packs, lacks, options)
    data["maps"] = _gather_maps(source, desk, data, packs, options)
    data["events"] = _gather_events(source, run_id, options, lacks)
    if not options.logs:
        data["run"]["traceback"] = None
    data["config_notes"] = list(data["config_notes"])
    if data["contents"].get("artifact"):
        lacks.append("artifacts: `quark artifacts` copies them")
    return RunContents(
        data=_redact({**data, "holds": _list_held(data, options), "lacks": lacks}), packs=packs
    )


def _leave_out(data: dict[str, Any], options: ReportOptions) -> list[str]:
    """Take out what is not wanted, or too much of it."""
    if not options.config:
        data["config"] = data["fields"] = data["environment"] = None
        data["config_notes"], data["config_origins"] = [], {}
        for name in ("path", "host", "user_command", "resume"):
            data["run"][name] = None
        return [
            "config, environment, command line and paths, because of --no-config; findings may "
            "still contain config values"
        ]
    lacks = []
    for name in ("config", "fields", "environment"):
        data[name], cut = _cut_values(data[name])
        if cut:
            lacks.append(f"{cut:,} values of the {name}, or parts of them, over {_MOST_VALUES}")
    return lacks


def _cut_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """At most so many values, none very long; and how many were cut."""
    from quark_core.search.evaluation import flatten_values

    pairs = list(flatten_values(values))
    long = sum(_cut(value) is not value for _, value in pairs)
    if len(pairs) <= _MOST_VALUES and not long:
        return dict(values), 0
    kept = {key: _cut(value) for key, value in pairs[:_MOST_VALUES]}
    return kept, max(0, len(pairs) - _MOST_VALUES) + long


def _cut(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and len(value) > _MOST_VALUES:
        return [*value[:_MOST_VALUES], "…"]
    if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
        return f"{value[:_MOST_CHARACTERS]} …"
    return value


def _gather_evidence(
    source: PageSource,
    desk: AnalysisDesk,
    run_id: str,
    findings: Sequence[Mapping[str, Any]],
    options: ReportOptions,
) -> Iterator[tuple[str, bytes]]:
    """What shows the findings, the worst first, each curve once."""
    pieces = [piece for finding in findings for piece in finding["evidence"] if piece["read"]]
    addresses = dict.fromkeys(piece["read"] for piece in pieces)
    for address in islice(addresses, _MOST_EVIDENCE):
        kind, _, query = address.partition("?")
        parameters = Parameters([*parse_qsl(query), ("entries", str(options.entries))])
        try:
            if kind == "series":
                pack = pack_series(source, desk, run_id, parameters)
            else:
                pack = pack_evidence(source, run_id, parameters)
        except QuarkError:
            continue
        yield f"{run_id}/{address}", pack


def _gather_curves(
    source: PageSource,
    desk: AnalysisDesk,
    data: dict[str, Any],
    packs: dict[str, bytes],
    lacks: list[str],
    options: ReportOptions,
) -> list[str]:
    """The curves of the metrics that matter most; `data` keeps the rows of these alone."""
    table = data["metrics"]
    rows = {row[0]: row for row in table["rows"]}
    chosen = _choose_metrics(data, rows, options.curves)
    table["rows"] = [row for key, row in rows.items() if key in chosen]
    data["metric_count"] = len(rows)
    if len(rows) > len(chosen):
        lacks.append(
            f"{len(rows) - len(chosen):,} of {len(rows):,} metrics; `quark export` exports all"
        )
    run_id = data["run"]["id"]
    names = []
    keys = [row[0] for row in table["rows"]]
    for start in range(0, len(keys), MAX_KEYS):
        asked = [("key", key) for key in keys[start : start + MAX_KEYS]]
        parameters = Parameters([*asked, ("entries", str(options.entries)), ("extremes", "1")])
        name = f"{run_id}/curves/{start}"
        packs[name] = pack_series(source, desk, run_id, parameters)
        names.append(name)
    return names


def _choose_metrics(
    data: Mapping[str, Any], rows: Mapping[str, Sequence[Any]], most: int
) -> set[str]:
    """What the run is judged by, what findings are about, then as the page has them."""
    main = data["run"].get("main") or {}
    seen = [
        piece["source"]
        for finding in data["analysis"]["findings"]
        for piece in finding["evidence"]
        if piece["kind"] == "metric"
    ]
    wanted = dict.fromkeys([main.get("key"), *seen, *rows])
    return set(islice((key for key in wanted if key in rows), most))


def _gather_maps(
    source: PageSource,
    desk: AnalysisDesk,
    data: Mapping[str, Any],
    packs: dict[str, bytes],
    options: ReportOptions,
) -> list[str]:
    """The maps that tell most: shares of nothing come last, parameters where layers say nothing."""
    run_id, grids = data["run"]["id"], GridDesk(source, desk)
    telling: list[str] = []
    dull: list[str] = []
    for kind, column, summary, is_share in _MAPS:
        if data["contents"].get(kind) == 0 or len(telling) >= options.maps:
            continue
        if column == "gradient_norm" and telling:
            continue
        asked = {"kind": kind, "field": column, "summary": summary}
        bounds = {"rows": _MAP_ROWS, "bins": _MAP_BINS}
        try:
            pack = grids.pack(run_id, Parameters(list({**asked, **bounds}.items())))
        except QuarkError:
            continue
        _, columns = decode_pack(pack)
        cells = columns["cells"]
        if not (np.isfinite(cells).any() or columns["bad"].any()):
            continue
        name = f"{run_id}/grid/{kind}.{column}.{summary}"
        packs[name] = pack
        says = not is_share or bool((cells >= _LEAST_SHARE).any())
        (telling if says else dull).append(name)
    shown = [*telling, *dull][: options.maps]
    for name in set(telling + dull) - set(shown):
        del packs[name]
    return shown


def _gather_events(
    source: PageSource, run_id: str, options: ReportOptions, lacks: list[str]
) -> list[dict[str, Any]]:
    if not options.logs:
        lacks.append("events, log lines and tracebacks, because of --no-logs")
        return []
    try:
        page = list_events(source, run_id, Parameters([("limit", str(options.events))]))
    except QuarkError:
        return []
    if page["next"] is not None:
        lacks.append(f"events and log lines before the newest {options.events}")
    return [
        {**event, "message": _cut(event["message"]), "traceback": _cut(event["traceback"])}
        for event in page["events"]
    ]


def _list_held(data: Mapping[str, Any], options: ReportOptions) -> list[str]:
    """What is in it, in words."""
    analysis, drawn = data["analysis"], len(data["metrics"]["rows"])
    held = [
        format_count(len(analysis["findings"]), "finding")
        + ", "
        + format_count(len(analysis["phases"]), "phase"),
        f"curves of {format_count(drawn, 'metric')} with at most {options.entries} entries "
        "each, with the minimum and maximum of every entry",
    ]
    if data["maps"]:
        held.append(f"{format_count(len(data['maps']), 'map')} of layers or parameters over steps")
    if data["config"] is not None:
        held.append("config and environment, with secrets redacted")
    if data["events"]:
        held.append(f"the newest {format_count(len(data['events']), 'event')} and log lines")
    return held


_FREE_TEXTS = {
    "run": ("name", "notes", "project", "path", "lost_reason", "traceback"),
    "finding": ("title", "summary", "fact", "inference", "advice"),
    "event": ("message", "traceback", "status"),
}
"""What people, or tools that quote them, have written; all else are names that say where."""


def _redact_origins(origins: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    return {
        key: [
            {
                "source": redact_text(each["source"]),
                "place": None if each["place"] is None else redact_text(each["place"]),
                "value": redact_values({"key": key, "value": each["value"]})["value"],
            }
            for each in chain
        ]
        for key, chain in origins.items()
    }


def _redact(data: dict[str, Any]) -> dict[str, Any]:
    """As the store is: of Quark's own runs nothing is left to do, of another tool's all."""
    for name in ("config", "fields", "environment"):
        if data[name] is not None:
            data[name] = redact_values(data[name])
    run = data["run"] = _redact_fields(data["run"], "run")
    if run["ending"] is not None:
        run["ending"] = {**run["ending"], "message": redact_text(run["ending"]["message"])}
    for name in ("tags", "groups"):
        run[name] = [redact_text(text) for text in run[name]]
    command = run["user_command"]
    if isinstance(command, list):
        run["user_command"] = redact_arguments([str(part) for part in command])
    data["config_notes"] = [redact_text(str(note)) for note in data["config_notes"]]
    data["config_origins"] = _redact_origins(data["config_origins"])
    findings = [_redact_fields(finding, "finding") for finding in data["analysis"]["findings"]]
    data["analysis"] = {**data["analysis"], "findings": findings}
    data["events"] = [
        {
            **_redact_fields(event, "event"),
            "payload": None if event["payload"] is None else redact_values(event["payload"]),
        }
        for event in data["events"]
    ]
    return data


def _redact_fields(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    texts = {
        name: redact_text(values[name])
        for name in _FREE_TEXTS[kind]
        if isinstance(values.get(name), str)
    }
    return {**values, **texts}
