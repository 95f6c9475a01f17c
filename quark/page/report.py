"""Reports of runs: what is wrong and what shows it, as text, dict, Markdown and one HTML file."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quark.analysis.comparison.summary import order_metrics, tell_common_step
from quark.analysis.observations import format_number
from quark.page.pack import decode_pack, encode_pack, make_plain
from quark.page.report_contents import MOST_RUNS, ReportOptions, RunContents, gather_run
from quark.page.routes.page_source import PageSource, open_source
from quark.page.static_files import STATIC_DIRECTORY, link_modules
from quark_core.errors import (
    InvalidRunStateError,
    QuarkError,
    SchemaValidationError,
    SessionStoreError,
)
from quark_core.formatting import format_span, join_first
from quark_core.presentation import bundle
from quark_core.records import format_time
from quark_core.records.base import now_us
from quark_core.records.names import decode_name
from quark_core.runs.run_ids import find_run_id
from quark_core.runs.run_reader import RunReader
from quark_core.system.terminal_text import clean_text
from quark_core.version import __version__

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark.analysis.comparison.results import MetricDiff, RunComparisonResult, RunReference
    from quark.page.routes.run_analysis import Analysis
    from quark_core.sessions.session import TrainingSession


def escape(text: str) -> str:
    """A text for HTML, whoever wrote it; see `clean_text` for what is spelled out."""
    return html.escape(clean_text(text))


GLYPHS = {
    "critical": "■",
    "error": "◆",
    "warning": "▲",
    "info": "i",
    "healthy": "●",
    "watch": "▲",
    "degraded": "◆",
    "unknown": "○",
}
_FRAME = "width:100%;height:720px;border:0;background:transparent"
_MOST_FINDINGS = 12
_MOST_METRICS = 25
_WIDTH, _HEIGHT, _MARGIN = 480, 90, 4
# What begins markup, mathematics or a link that nobody has written as one.
_MARKDOWN = re.compile(r"([\\`*_\[\]<>#|~$]|:(?=//)|(?<=www)\.)")


def _name_run(data: Mapping[str, Any]) -> str:
    return str(data["run"]["name"] or data["run"]["id"])


def _list_facts(data: Mapping[str, Any]) -> list[str]:
    run = data["run"]
    facts = [run["state"], run["project"]]
    if run["ending"] is not None:
        facts[0] += f": {run['ending']['message']}"
    if run["newest_step"] is not None:
        facts.append(f"step {run['newest_step']:,}")
    if run["duration_s"] is not None:
        facts.append(format_span(run["duration_s"]))
    if run["git_commit"]:
        facts.append(f"commit {run['git_commit'][:7]}{'+changes' if run['dirty'] else ''}")
    return facts


def _tell_scores(data: Mapping[str, Any]) -> list[str]:
    said = []
    for score in data["analysis"]["scores"]:
        known = f"{score['score']:.0f} {score['word']}" if score["known"] else score["word"]
        said.append(f"{score['key']} {known}")
    return said


def list_grave(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The findings of a run that are more than notes."""
    findings = data["analysis"]["findings"]
    return [each for each in findings if each["severity"] != "info" and not each["is_note"]]


def _tell_place(finding: Mapping[str, Any]) -> str:
    step, end = finding["step"], finding["step_end"]
    if step is None:
        return "the whole run" if finding["epoch"] is None else f"since epoch {finding['epoch']}"
    return (
        f"steps {step:,} to {end:,}" if end is not None and end > step else f"since step {step:,}"
    )


def _tell_nothing(data: Mapping[str, Any]) -> str:
    analysis = data["analysis"]
    rules = analysis["rules"]
    if analysis["state"] == "failed":
        return f"The run could not be analyzed: {analysis['note']}"
    if not rules["with_data"]:
        return "Not known: no rule had the data that it requires."
    return f"No problem found; {rules['with_data']} of {rules['count']} checks ran."


# --- text


def tell_run_in_words(data: Mapping[str, Any]) -> str:
    """A run as lines of plain text."""
    lines = [f"{_name_run(data)} ({data['run']['id']}): {', '.join(_list_facts(data))}"]
    if scores := _tell_scores(data):
        lines.append(f"health: {'; '.join(scores)}")
    grave = list_grave(data)
    if not grave:
        lines.append(_tell_nothing(data))
    for finding in grave[:_MOST_FINDINGS]:
        at = f" in {decode_name(finding['culprit'])}" if finding["culprit"] else ""
        margin = "  " * (1 + min(3, finding["depth"]))
        glyph = GLYPHS.get(finding["severity"], " ")
        lines += [
            f"{margin}{glyph} {finding['severity']}  {finding['title']}{at}, "
            f"{_tell_place(finding)}",
            f"{margin}    {finding['fact']}",
        ]
        if finding["advice"]:
            lines.append(f"{margin}    -> {finding['advice']}")
    if len(grave) > _MOST_FINDINGS:
        lines.append(f"  and {len(grave) - _MOST_FINDINGS} more findings")
    return "\n".join(lines)


def tell_comparison(result: RunComparisonResult) -> str:
    """A comparison as lines of plain text."""
    lines = [f"{_name_side(result.primary)} against {_name_side(result.reference)}"]
    lines += [f"  {line}" for line in result.summary.splitlines()]
    for diff in order_metrics(result.metric_diffs)[:_MOST_METRICS]:
        ends = f"{_figure(diff.last.primary)} against {_figure(diff.last.reference)}"
        lines.append(
            f"  {decode_name(diff.metric_key)}: {diff.verdict or 'no verdict'}, {ends} "
            f"({diff.reason})"
        )
    return "\n".join([*lines, *(f"  {note}" for note in result.notes)])


def _name_side(side: RunReference) -> str:
    name = side.name or side.run_id
    return f"{name} and {side.run_count - 1} more" if side.run_count > 1 else name


def _figure(value: float | None) -> str:
    return "-" if value is None else format_number(value)


# --- Markdown


def write_run(data: Mapping[str, Any]) -> str:
    """A run as Markdown, for a CI job's page."""
    facts = ", ".join(map(_mark, _list_facts(data)))
    lines = [f"### {_mark(_name_run(data))}", "", f"`{data['run']['id']}` · {facts}", ""]
    scores = data["analysis"]["scores"]
    if scores:
        cells = [_tell_score(score) for score in scores]
        lines += [
            "| " + " | ".join(_mark(score["key"]) for score in scores) + " |",
            "|" + "---|" * len(scores),
            "| " + " | ".join(cells) + " |",
            "",
        ]
    grave = list_grave(data)
    if not grave:
        return "\n".join([*lines, _mark(_tell_nothing(data)), ""])
    lines += ["| finding | where | since | what to do |", "|---|---|---|---|"]
    for finding in grave[:_MOST_FINDINGS]:
        glyph = GLYPHS.get(finding["severity"], "")
        follows = "↳ " if finding["depth"] else ""
        lines.append(
            f"| {follows}{glyph} **{_mark(finding['severity'])}** {_mark(finding['title'])}: "
            f"{_mark(finding['fact'])} | {_mark(decode_name(finding['culprit'] or ''))} | "
            f"{_tell_place(finding)} | {_mark(finding['advice'] or '')} |"
        )
    if len(grave) > _MOST_FINDINGS:
        lines += ["", f"and {len(grave) - _MOST_FINDINGS} more"]
    return "\n".join([*lines, ""])


def _tell_score(score: Mapping[str, Any]) -> str:
    if not score["known"]:
        return f"{GLYPHS['unknown']} not known"
    return f"{GLYPHS.get(score['status'], '')} {score['score']:.0f} {_mark(score['status'])}"


def write_comparison(result: RunComparisonResult) -> str:
    """A comparison as Markdown."""
    first, second = _mark(_name_side(result.primary)), _mark(_name_side(result.reference))
    lines = [
        f"### {first} against {second}",
        "",
        _mark(result.summary),
        "",
        f"| metric | verdict | {first} | {second} | difference |",
        "|---|---|---|---|---|",
    ]
    for diff in order_metrics(result.metric_diffs)[:_MOST_METRICS]:
        ends = diff.last
        lines.append(
            f"| {_mark(decode_name(diff.metric_key))} | {diff.verdict or 'no verdict'} | "
            f"{_figure(ends.primary)} | {_figure(ends.reference)} | {_tell_difference(diff)} |"
        )
    if result.notes:
        lines += ["", *(f"- {_mark(note)}" for note in result.notes)]
    return "\n".join([*lines, ""])


def _tell_difference(diff: MetricDiff) -> str:
    said = _figure(diff.last.difference)
    if diff.interval_low is not None and diff.interval_high is not None:
        said += f" [{_figure(diff.interval_low)}, {_figure(diff.interval_high)}]"
    return said


def _mark(text: object) -> str:
    """A text that Markdown shows as it is, on one line."""
    return _MARKDOWN.sub(r"\\\1", " ".join(str(text).split())).replace("\\<", "&lt;")


# --- HTML without scripts


def show_run(contents: RunContents) -> str:
    """A run as HTML that needs no script and no style: its findings, with small drawings."""
    data = contents.data
    parts = [
        f"<h2>{escape(_name_run(data))}</h2>",
        f"<p>{escape(' · '.join(_list_facts(data)))}</p>",
    ]
    held = "".join(f"<li>{escape(text)}</li>" for text in data["holds"])
    lacks = "".join(f"<li><b>omitted:</b> {escape(text)}</li>" for text in data["lacks"])
    parts.append(f"<ul>{held}{lacks}</ul>")
    if scores := _tell_scores(data):
        parts.append(f"<p>health: {escape('; '.join(scores))}</p>")
    grave = list_grave(data)
    if not grave:
        parts.append(f"<p>{escape(_tell_nothing(data))}</p>")
    parts += [_show_finding(finding, contents) for finding in grave[:_MOST_FINDINGS]]
    if len(grave) > _MOST_FINDINGS:
        parts.append(f"<p>and {len(grave) - _MOST_FINDINGS} more findings</p>")
    return f'<section class="static">{"".join(parts)}</section>'


def _show_finding(finding: Mapping[str, Any], contents: RunContents) -> str:
    at = f" in {decode_name(finding['culprit'])}" if finding["culprit"] else ""
    glyph = GLYPHS.get(finding["severity"], "")
    title = f"{glyph} {finding['severity']}: {finding['title']}{at}, {_tell_place(finding)}"
    advice = f"<p>→ {escape(finding['advice'])}</p>" if finding["advice"] else ""
    return (
        f"<article><h3>{escape(title)}</h3><p>{escape(finding['fact'])}</p>{advice}"
        f"{_draw_evidence(finding, contents)}</article>"
    )


def _draw_evidence(finding: Mapping[str, Any], contents: RunContents) -> str:
    run_id = contents.data["run"]["id"]
    for piece in finding["evidence"]:
        pack = contents.packs.get(f"{run_id}/{piece['read']}")
        if pack is None:
            continue
        head, columns = decode_pack(pack)
        for place, _ in enumerate(head["curves"]):
            drawn = draw_line(
                columns[f"{place}.step"], columns[f"{place}.mean"], since=finding["step"]
            )
            if drawn:
                return drawn
    return ""


def is_steep(values: NDArray[Any]) -> bool:
    """Whether the scale of a small drawing of these is logarithmic."""
    known = values[np.isfinite(values)]
    return bool(known.size and known.min() > 0 and known.max() > 1000 * known.min())


def draw_line(
    steps: NDArray[Any],
    values: NDArray[Any],
    *,
    since: float | None = None,
    label: str = "the curve of the finding",
) -> str:
    """A curve as a small SVG; "" where there is nothing to draw."""
    known = np.isfinite(steps) & np.isfinite(values)
    x, y = steps[known].astype(float), values[known].astype(float)
    if len(x) < 2 or x.max() <= x.min():
        return ""
    if is_steep(y):
        y = np.log10(y)
    low, high = float(y.min()), float(y.max())
    scale_x = (_WIDTH - 2 * _MARGIN) / (x.max() - x.min())
    scale_y = (_HEIGHT - 2 * _MARGIN) / ((high - low) or 1.0)
    points = " ".join(
        f"{_MARGIN + (a - x.min()) * scale_x:.1f},{_HEIGHT - _MARGIN - (b - low) * scale_y:.1f}"
        for a, b in zip(x, y, strict=True)
    )
    mark = ""
    if since is not None and x.min() <= since <= x.max():
        at = f"{_MARGIN + (since - x.min()) * scale_x:.1f}"
        mark = (
            f'<line x1="{at}" x2="{at}" y1="0" y2="{_HEIGHT}" stroke="#b5300b" '
            'stroke-dasharray="4 3"/>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f'<path d="M{points}" fill="none" stroke="#2a7fc2" stroke-width="1.5"/>{mark}</svg>'
    )


def show_comparison(result: RunComparisonResult) -> str:
    """A comparison as HTML that needs no script."""
    first, second = _name_side(result.primary), _name_side(result.reference)
    rows = "".join(map(_show_diff, order_metrics(result.metric_diffs)[:_MOST_METRICS]))
    left = len(result.metric_diffs) - _MOST_METRICS
    more = f"<p>and {left:,} more metrics; `quark compare` lists them</p>" if left > 0 else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in result.notes)
    return (
        f'<section class="comparison"><h2>{escape(first)} against {escape(second)}</h2>'
        + "".join(f"<p>{escape(line)}</p>" for line in result.summary.splitlines())
        + '<div class="scrolls" tabindex="0" role="region" '
        f'aria-label="Verdicts on {escape(first)} against {escape(second)}">'
        '<table class="plain-table"><thead><tr>'
        '<th scope="col">metric</th><th scope="col">verdict</th>'
        f'<th scope="col" class="number">{escape(first)}</th>'
        f'<th scope="col" class="number">{escape(second)}</th>'
        '<th scope="col" class="number">difference</th><th scope="col">why</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div>{more}<ul>{notes}</ul></section>"
    )


def _tell_reason(diff: MetricDiff) -> str:
    return "; ".join(filter(None, (diff.reason, tell_common_step(diff))))


def _show_diff(diff: MetricDiff) -> str:
    verdict = diff.verdict or "none"
    ends = diff.last
    return (
        f'<tr><th scope="row">{escape(decode_name(diff.metric_key))}</th><td '
        f'class="verdict-{escape(verdict)}">{escape(diff.verdict or "no verdict")}</td><td '
        f'class="number">{_figure(ends.primary)}</td><td '
        f'class="number">{_figure(ends.reference)}</td><td '
        f'class="number">{_tell_difference(diff)}</td><td>{escape(_tell_reason(diff))}</td></tr>'
    )


class RunReport:
    """Report on one or more runs, returned by `quark.report` and `session.report()`.

    A snapshot: it does not change after its creation. `str()` is text for a terminal, and a
    notebook displays it as HTML.
    """

    def __init__(
        self,
        runs: Sequence[RunContents],
        comparisons: Sequence[RunComparisonResult] = (),
        notes: Sequence[str] = (),
    ) -> None:
        self._runs = tuple(runs)
        self._comparisons = tuple(comparisons)
        self._notes = tuple(notes)
        self._made_at = format_time(now_us())

    @property
    def contents(self) -> tuple[RunContents, ...]:
        """Content of the report, per run."""
        return self._runs

    @property
    def run_ids(self) -> tuple[str, ...]:
        """IDs of the runs, in the given order."""
        return tuple(str(run.data["run"]["id"]) for run in self._runs)

    @property
    def title(self) -> str:
        """Title: the names of the runs."""
        names = [str(run.data["run"]["name"] or run.data["run"]["id"]) for run in self._runs]
        return f"{join_first(names, 3)} · Quark report"

    def __repr__(self) -> str:
        return f"RunReport({', '.join(self.run_ids)})"

    def __str__(self) -> str:
        parts = [tell_run_in_words(run.data) for run in self._runs]
        parts += [tell_comparison(result) for result in self._comparisons]
        return clean_text("\n\n".join([*parts, *self._notes]))

    def to_dict(self) -> dict[str, Any]:
        """Return findings, scores, phases and metric summaries as a dict."""
        inner = ("curves", "maps")
        runs = [{k: v for k, v in run.data.items() if k not in inner} for run in self._runs]
        found: dict[str, Any] = make_plain(
            {
                "made_at": self._made_at,
                "version": __version__,
                "runs": runs,
                "comparisons": [result.to_dict() for result in self._comparisons],
                "notes": self._notes,
            }
        )
        return found

    def to_markdown(self) -> str:
        """Return a short version as Markdown; markup in texts of a run is escaped."""
        parts = [write_run(run.data) for run in self._runs]
        parts += [write_comparison(result) for result in self._comparisons]
        return "\n".join(parts)

    def to_html(self) -> str:
        """Return the report as one HTML file that needs no server and no network.

        No script except Quark's own can run in it.
        """
        packs = {name: pack for run in self._runs for name, pack in run.packs.items()}
        contents = {"runs": [run.data for run in self._runs], "packs": list(packs)}
        return write_report(
            self.title,
            self._show_head(),
            "".join(map(show_run, self._runs)),
            contents,
            list(packs.values()),
        )

    def save(self, path: str | Path) -> Path:
        """Write `to_html()` to a file, and create missing parent folders.

        Args:
            path: Path of the file.

        Returns:
            The path.

        Raises:
            OSError: The file cannot be written.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.to_html(), "utf-8")
        return target

    def _repr_html_(self) -> str:
        return show_report(self)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str] | None:
        return bundle(self)

    def show_static(self) -> str:
        """Return the content without curves, as HTML without scripts and styles."""
        runs = "".join(map(show_run, self._runs))
        return runs + "".join(map(show_comparison, self._comparisons))

    def _show_head(self) -> str:
        count, moment = len(self._runs), self._made_at[:19].replace("T", " ")
        said = f"{count} run{'' if count == 1 else 's'}, made {moment} UTC by Quark {__version__}"
        notes = "".join(f"<p>{escape(note)}</p>" for note in self._notes)
        return (
            f'<header class="report-head"><h1>Quark report</h1><p class="quiet">{said}; one '
            f"file that loads nothing from the network</p></header>{notes}"
            + "".join(map(show_comparison, self._comparisons))
        )


def show_report(report: RunReport, source: str | None = None) -> str:
    """A report in a frame that may run its script and nothing else, and in words below it.

    The words are for readers without scripts: who sees the frame finds them folded.

    Args:
        report: The report.
        source: What `report.to_html()` has given, where that is known already.
    """
    text = html.escape(source or report.to_html())
    return (
        f'<iframe sandbox="allow-scripts" srcdoc="{text}" style="{_FRAME}" title="Quark '
        'report"></iframe><details><summary>The report as '
        f"text</summary>{report.show_static()}</details>"
    )


def report(
    run: TrainingSession | str | Sequence[TrainingSession | str],
    *,
    storage_dir: str | Path | None = None,
    backend: str | None = None,
    config: bool = True,
    logs: bool = True,
) -> RunReport:
    """Create a report on a run, or on several runs and their differences.

    Reads only: a run without a stored analysis is analyzed in memory. A run that is open in this
    process is flushed first.

    Args:
        run: A session, a run ID, or up to 20 of them. Each is compared with the first.
        storage_dir: Folder of the store in which IDs are looked up. Defaults to the working
            directory, or the nearest parent that has a store.
        backend: Name or URI of a backend to read from instead of the store.
        config: Whether to include config, environment, command line and paths. Defaults to True.
        logs: Whether to include the newest events and log lines. Defaults to True.

    Raises:
        SchemaValidationError: No run, too many runs, or a run of the wrong type.
        RunNotFoundError: The run does not exist.
        SessionStoreError: A store cannot be read.

    Example:
        quark.report(session).save("report.html")
    """
    from quark_core.sessions.session import TrainingSession

    asked = [run] if isinstance(run, (str, TrainingSession)) else list(run)
    for each in asked:
        if not isinstance(each, (str, TrainingSession)):
            raise SchemaValidationError(
                f"run must be a session, a run ID, or a list of them, got {each!r:.60}"
            )
    root = None if storage_dir is None else Path(storage_dir)
    shared: PageSource | None = None
    chosen: list[tuple[PageSource, str]] = []
    try:
        for each in asked:
            if isinstance(each, TrainingSession):
                chosen.append((open_session_source(each), str(each.run_id)))
                continue
            shared = shared or open_source(root, backend)
            chosen.append((shared, find_run_id(shared.reader, each)))
        return compose_report(chosen, ReportOptions(config=config, logs=logs))
    finally:
        if shared is not None:
            shared.close()


def compose_report(
    runs: Sequence[tuple[PageSource, str]],
    options: ReportOptions,
    analyses: Sequence[Analysis | None] = (),
) -> RunReport:
    """A report of runs that lie in opened stores.

    Args:
        runs: Where each lies, and its id.
        options: What goes in.
        analyses: What is known of each already; None and what is missing is looked up.

    Raises:
        SchemaValidationError: No run, or too many.
        RunNotFoundError: There is no such run.
        SessionStoreError: A store cannot be read.
    """
    chosen = list(dict.fromkeys(runs))
    if not 1 <= len(chosen) <= MOST_RUNS:
        raise SchemaValidationError(
            f"a report contains 1 to {MOST_RUNS} runs, got {len(chosen)}. `quark ui` shows more"
        )
    known = [*analyses, *[None] * len(chosen)]
    contents = [
        gather_run(source, run_id, options, analysis)
        for (source, run_id), analysis in zip(chosen, known, strict=False)
    ]
    comparisons: list[RunComparisonResult] = []
    notes: list[str] = []
    for source, run_id in chosen[1:]:
        try:
            comparisons.append(_compare((source, run_id), chosen[0]))
        except QuarkError as error:
            notes.append(f"{run_id} cannot be compared with {chosen[0][1]}: {error}")
    return RunReport(contents, comparisons, notes)


def _compare(primary: tuple[PageSource, str], reference: tuple[PageSource, str]) -> Any:
    from quark.analysis.comparison.engine import ComparisonEngine

    sides = [source.open_run(run_id) for source, run_id in (primary, reference)]
    return ComparisonEngine.compare_runs(*sides)


def open_session_source(session: TrainingSession, *, flushes: bool = True) -> PageSource:
    """The backend that a session reads from; see `open_reader_source`."""
    return open_reader_source(RunReader.of(session.open_run), flushes=flushes)


def open_reader_source(run: RunReader, *, flushes: bool = True) -> PageSource:
    """The backend that a run is read from.

    Args:
        run: The run.
        flushes: Whether what a session of this process has logged so far is waited for.

    Raises:
        InvalidRunStateError: It keeps nothing that could be read back.
        SessionStoreError: What was logged cannot be flushed in time.
    """
    if run.reader is None or run.run_id is None:
        raise InvalidRunStateError(
            'this run is not stored (backends="none", or a rank that records nothing), so there '
            "is nothing to report"
        )
    if flushes and run.held is not None and run.held.refusal is None:
        run.held.flush()
    context = run.context
    return PageSource(
        run.reader,
        place=str(context.store_root),
        backend=str(getattr(run.reader, "backend_name", "embedded")),
        storage_dir=Path(context.storage_dir),
        open_run=lambda _: run,
    )


# A report as one file: the page's own modules, its styles and the data, under a policy of hashes.
#
# The file asks nobody for anything. What names and texts a run has travels deflated and in base 64
# in a block of data, so that no name can end it, and becomes text where it is shown.

_ENTRY, _WIDGET = "report.js", "widget.js"
# What stands in the place of what asks the server, and of what waits until it is in sight.
_REPLACED = {
    "pages/connection.js": "report/connection.js",
    "pages/sight.js": "report/sight.js",
}
_REPLACED_IN_WIDGET = {"charts/theme.js": "widget/theme.js"}
_WIDGET_STYLES = ("vendor/uplot.css", "charts/charts.css", "widget/widget.css")
_STYLES = ("vendor/uplot.css", "charts/charts.css", "style.css", "report/report.css")
# What could end the element that it stands in, or begin another one.
_UNSAFE = ("</script", "<!--", "</style")


def write_report(
    title: str, head: str, runs: str, contents: Mapping[str, Any], packs: Sequence[bytes]
) -> str:
    """The file.

    Args:
        title: Of the window.
        head: What stands above the runs, as HTML.
        runs: The runs for readers without scripts, as HTML.
        contents: The head of the data; `packs` names the packs.
        packs: In the order of their names.
    """
    script, style = _link()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    columns = {str(place): np.frombuffer(pack, np.uint8) for place, pack in enumerate(packs)}
    data = base64.b64encode(zlib.compress(encode_pack(contents, columns), 4)).decode()
    return (
        "<!doctype html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<main class="report-page">{head}<div id="runs">{runs}</div></main>\n'
        f'<script type="application/json" id="contents">{{"deflated":"{data}"}}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


@functools.cache
def link_widget() -> str:
    """The module that shows a run in a notebook's cell: one text, which imports and asks nothing.

    Raises:
        SessionStoreError: The page's files are not whole.
    """
    modules = _read_modules(_REPLACED_IN_WIDGET)
    # Its styles lie in a tree of their own, whose root is not that of the page.
    styles = _read_styles(_WIDGET_STYLES).replace(":root", ".live")
    modules["widget/styles.js"] = f"export const STYLES = {json.dumps(styles)};\n"
    linked = link_modules(modules, _WIDGET)
    return f"{linked}export default takeLinked({json.dumps(_WIDGET)}).widget;\n"


def _read_modules(replaced: Mapping[str, str]) -> dict[str, str]:
    """The page's modules by their paths, some of them in the place of others."""
    modules = {
        path.relative_to(STATIC_DIRECTORY).as_posix(): path.read_text("utf-8")
        for path in sorted(STATIC_DIRECTORY.rglob("*.js"))
    }
    return modules | {old: modules[new] for old, new in replaced.items()}


def _read_styles(names: Sequence[str]) -> str:
    return "".join((STATIC_DIRECTORY / name).read_text("utf-8") for name in names)


@functools.cache
def _link() -> tuple[str, str]:
    """The script and the style of every report."""
    modules = _read_modules(_REPLACED)
    linked = link_modules(modules, _ENTRY)
    script = f"(() => {{\n{linked}}})();\n"
    style = _read_styles(_STYLES)
    for word in _UNSAFE:
        if word in script.lower() or word in style.lower():
            raise SessionStoreError(f"the page's files have {word!r}, which would end the report")
    return script, style


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
