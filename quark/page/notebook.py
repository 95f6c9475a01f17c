"""Display in notebooks: a small card, and a run's report in a sandboxed frame.

Where scripts do not run (a notebook on a code host, a mail), text and SVG stand there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.analysis.metric_roles import find_main_metric
from quark.page.cards import (
    draw_lines,
    list_findings,
    show_card,
    show_metrics,
    write_figure,
)
from quark.page.report import (
    GLYPHS,
    compose_report,
    escape,
    list_grave,
    open_reader_source,
    open_session_source,
    show_comparison,
    show_report,
)
from quark.page.report_contents import ReportOptions
from quark.page.routes.page_source import open_source
from quark_core.errors import QuarkError
from quark_core.presentation import find_runs
from quark_core.records.names import decode_name
from quark_core.runs.open_run import open_runs
from quark_core.runs.run_reader import RunReader, read_run

if TYPE_CHECKING:
    from quark.analysis.comparison.results import RunComparisonResult
    from quark.analysis.engine import AnalyzerResult
    from quark.analysis.explanation.results import ChangeExplanation
    from quark.page.report import RunReport
    from quark.page.routes.page_source import PageSource
    from quark_core.backends.run_summary import RunSummary
    from quark_core.records import RunRecord
    from quark_core.records.runs import RunContext
    from quark_core.sessions.session import TrainingSession

_MOST_ROWS = 50
# Of more runs than these a card has no report; `quark.report` makes one.
_MOST_REPORTED = 3
# A cell is no place to wait in: beyond these many points the report is made when it is asked for.
_MOST_POINTS = 1_000_000
_MOST_BYTES = 1_000_000
_OPTIONS = ReportOptions(curves=16, entries=400, maps=1, events=30)
_LESS = ReportOptions(curves=4, entries=150, maps=0, events=5)
# Where each run lies, and its id.
_Chosen = Sequence[tuple["PageSource", str]]


def show_live(value: object) -> bool:
    """Show an object in the cell that runs now, live; False where it is shown as it is now.

    A session is live while its run goes on, where anywidget is installed and the kernel's
    connection to the browser works.
    """
    from quark_core.sessions.session import TrainingSession

    if not isinstance(value, TrainingSession) or find_spec("anywidget") is None:
        return False
    run = value.open_run
    if run.reader is None or run.context.run_id is None or run.forked:
        return False
    if run.is_over and run.reader.load_run(run.context.run_id).state != "running":
        return False
    from quark.page import live_view  # needs the extra `notebook`

    live_view.show_live(value)
    return True


# --- a session


def _show_session(session: TrainingSession) -> str:
    run = session.context.run
    title = f"{run.name or session.run_id}"
    facts = [session.status, session.project_name, *run.tags]
    hint = f"<code>{escape(str(session.run_id))}</code>"
    try:
        source = open_session_source(session)
        made = _make_report([(source, str(session.run_id))])
    except QuarkError as error:
        return f"{show_card(title, facts, hint)}<p>{escape(str(error))}</p>"
    return show_card(title, facts, hint + _show_state(made)) + _fold(made, [str(session.run_id)])


def _show_state(report: RunReport | None) -> str:
    """Findings and curves of the first run of a report, as text and SVG."""
    if report is None:
        return ""
    contents = report.contents[0]
    return list_findings(list_grave(contents.data)) + draw_lines(contents.list_lines())


# --- reports in frames


def _make_report(chosen: _Chosen) -> RunReport | None:
    """A bounded report; None where it would take long or be large."""
    points = sum(
        metric.count
        for source, run_id in chosen
        for metric in source.summarize(run_id).metrics.values()
    )
    if points > _MOST_POINTS:
        return None
    made = compose_report(chosen, _OPTIONS)
    if len(made.to_html()) > _MOST_BYTES:
        made = compose_report(chosen, _LESS)
    return made


def _fold(report: RunReport | None, run_ids: Sequence[str]) -> str:
    """A report under a line that opens it, or how to have it."""
    asked = repr(run_ids[0]) if len(run_ids) == 1 else repr(list(run_ids))
    text = "" if report is None else report.to_html()
    if report is None or len(text) > _MOST_BYTES:
        said = escape(f'quark.report({asked}).save("report.html")')
        return f"<p>The report is too large for a cell: <code>{said}</code></p>"
    title = "Report" if len(run_ids) == 1 else f"Report of these {len(run_ids)} runs"
    return f"<details><summary>{title}</summary>{show_report(report, text)}</details>"


def _frame(runs: Sequence[tuple[RunRecord, RunContext | str]]) -> str:
    """The folded report of runs, or nothing where they cannot be read any more.

    Args:
        runs: Each, and its context or the path that it was kept under.
    """
    if not 1 <= len(runs) <= _MOST_REPORTED:
        return ""
    try:
        with contextlib.ExitStack() as opened:
            sources: dict[Path | None, PageSource] = {}
            chosen = [
                (_open(place, str(run.id), sources, opened), str(run.id)) for run, place in runs
            ]
            for (source, run_id), (run, _) in zip(chosen, runs, strict=True):
                # A store that was made anew may have another run of that id.
                if source.load_run(run_id).run.created_at != run.created_at:
                    return ""
            return _fold(_make_report(chosen), [run_id for _, run_id in chosen])
    except (QuarkError, OSError):
        return ""


def _open(
    place: RunContext | str,
    run_id: str,
    sources: dict[Path | None, PageSource],
    opened: contextlib.ExitStack,
) -> PageSource:
    """Where a run lies: as it is open here, else in the store of its storage root."""
    known = open_runs.find(run_id)
    if known is not None:
        return open_reader_source(RunReader.of(known))
    if not isinstance(place, str) and place.backends and place.read_only:
        return open_reader_source(read_run(place))
    root = _find_root(place)
    if root not in sources:
        sources[root] = opened.enter_context(_closing(open_source(root)))
    return sources[root]


def _find_root(place: RunContext | str) -> Path | None:
    """The storage root of a run; None is the working directory, or the service that is set."""
    if isinstance(place, str):
        # As embedded stores have it: ROOT/.quark/runs/ID. A service says an address.
        path = Path(place)
        return path.parents[2] if path.is_absolute() and len(path.parents) > 2 else None
    return Path(place.storage_dir)


@contextlib.contextmanager
def _closing(source: PageSource) -> Iterator[PageSource]:
    try:
        yield source
    finally:
        source.close()


# --- what was found


def _show_summary(summary: RunSummary) -> str:
    run = summary.stored.run
    step = None if summary.newest_step is None else f"step {summary.newest_step:,}"
    facts = [summary.stored.describe_end(), summary.stored.project.name, step, *run.tags]
    hint = f"<code>quark.report({escape(repr(summary.run_id))})</code> has its findings and curves"
    body = f"{show_metrics(summary)}<div>{hint}</div>"
    frame = _frame([(run, str(run.run_path))])
    return show_card(run.name or summary.run_id, facts, body) + frame


def _show_found(found: Sequence[RunSummary]) -> str:
    rows = []
    for summary in found[:_MOST_ROWS]:
        run, main = summary.stored.run, find_main_metric(summary)
        cells = [
            summary.run_id[:8],
            run.name or "",
            summary.stored.project.name,
            summary.stored.describe_end(),
            run.created_at[:16].replace("T", " "),
            "" if summary.newest_step is None else f"{summary.newest_step:,}",
            "" if main is None else f"{decode_name(main.key)} {write_figure(main.last)}",
            ", ".join(run.tags),
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    if not rows:
        return "<p>No run matches.</p>"
    names = ("run", "name", "project", "state", "started", "step", "judged by", "tags")
    heads = "".join(f"<th>{name}</th>" for name in names)
    more = f"<p>and {len(found) - _MOST_ROWS:,} more</p>" if len(found) > _MOST_ROWS else ""
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>{more}"
    return table + _frame([(each.stored.run, str(each.stored.run.run_path)) for each in found])


def _show_analysis(result: AnalyzerResult) -> str:
    scores = [
        f"{GLYPHS.get(score.status, '')} {score.score_key} {score.score:.0f} {score.word}"
        if score.is_known
        else f"{GLYPHS['unknown']} {score.score_key} {score.word}"
        for score in result.health_scores
    ]
    findings = [
        {
            "severity": alert.severity,
            "title": alert.title,
            "culprit": alert.culprit,
            "step": alert.step,
            "fact": alert.fact or alert.summary,
        }
        for alert in result.alerts
    ]
    hint = f"<code>quark.report({escape(repr(result.run_id))})</code> shows their charts"
    body = f"{list_findings(findings)}<div>{hint}</div>" if findings else "No problem found."
    frame = _frame([(context.run, context) for context in find_runs(result)])
    return show_card(result.run_id, scores, body) + frame


def _show_comparison(result: RunComparisonResult) -> str:
    contexts = find_runs(result)
    return show_comparison(result) + _frame([(context.run, context) for context in contexts])


def _show_explanation(result: ChangeExplanation) -> str:
    from quark.analysis.explanation.results import describe_change, list_rows, tell_ends

    said = [result.reason, result.first_difference.summary]
    lines = "".join(f"<div>{escape(text)}</div>" for text in tell_ends(result))
    lines += "".join(f"<div>{escape(text[:1].upper() + text[1:])}.</div>" for text in said)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in astuple(row)) + "</tr>"
        for row in list_rows(result)
    )
    notes = "".join(f"<div>{escape(note)}</div>" for note in result.notes)
    body = f"{lines}<table><tbody>{rows}</tbody></table>{notes}"
    return show_card(describe_change(result), (), body)


PAINTERS: Mapping[str, Callable[[Any], str]] = {
    "TrainingSession": _show_session,
    "RunSummary": _show_summary,
    "RunsFound": _show_found,
    "AnalyzerResult": _show_analysis,
    "RunComparisonResult": _show_comparison,
    "ChangeExplanation": _show_explanation,
    "RunReport": show_report,
}
"""Name of a class of the core -> what shows one of it, as HTML."""
