"""How Quark's objects look in a notebook: a small card, and a run's report in a sandboxed frame.

Where scripts do not run (a notebook on a code host, a mail), text and SVG stand there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from quark.page.report_texts import GLYPHS, show_comparison
from quark_core.errors import QuarkError

if TYPE_CHECKING:
    from quark.page.report import RunReport
    from quark_core.analysis.diagnosis import AnalyzerResult
    from quark_core.backends.run_summary import RunSummary
    from quark_core.sessions.session import TrainingSession

__all__ = ["PAINTERS", "show_report"]

_MOST_ROWS = 50
_MOST_ALERTS = 8
_MOST_METRICS = 8
_FRAME_PX = 720
_CARD = "border:1px solid #8888;border-radius:6px;padding:8px 12px;margin:4px 0;max-width:72rem"
_FRAME = f"width:100%;height:{_FRAME_PX}px;border:0;background:transparent"


def show_report(report: RunReport) -> str:
    """A report in a frame that may run its script and nothing else, and in words below it.

    The words are for readers without scripts: who sees the frame finds them folded.
    """
    source = escape(report.to_html(), quote=True)
    return (
        f'<iframe sandbox="allow-scripts" srcdoc="{source}" style="{_FRAME}" '
        f'title="Quark report"></iframe><details><summary>The report in words</summary>'
        f"{report.show_static()}</details>"
    )


def _show_session(session: TrainingSession) -> str:
    from quark.page.report import report

    run = session.context.run
    title = f"{run.name or session.run_id}"
    facts = [session.status, session.project_name, *run.tags]
    card = _show_card(title, facts, f"<code>{escape(str(session.run_id))}</code>")
    try:
        made = report(session)
    except QuarkError as error:
        return f"{card}<p>{escape(str(error))}</p>"
    return f"{card}<details><summary>Report</summary>{show_report(made)}</details>"


def _show_card(title: str, facts: Sequence[object], body: str) -> str:
    said = " · ".join(escape(str(fact)) for fact in facts if fact is not None)
    return f'<div style="{_CARD}"><b>{escape(title)}</b> {said}<br>{body}</div>'


def _show_summary(summary: RunSummary) -> str:
    from quark.page.api.rows import find_main
    from quark_core.records.names import decode_name

    run = summary.stored.run
    main = find_main(summary)
    keys = list(dict.fromkeys([*([main.key] if main else []), *summary.metrics]))
    rows = "".join(
        f"<tr><td>{escape(decode_name(key))}</td><td>{_write(summary.metrics[key].last)}</td>"
        f"<td>{_write(summary.metrics[key].low)}</td><td>{_write(summary.metrics[key].high)}</td>"
        f"<td>{summary.metrics[key].count:,}</td></tr>"
        for key in keys[:_MOST_METRICS]
    )
    more = f"and {len(keys) - _MOST_METRICS:,} more" if len(keys) > _MOST_METRICS else ""
    table = (
        "<table><thead><tr><th>metric</th><th>last</th><th>lowest</th><th>highest</th>"
        f"<th>points</th></tr></thead><tbody>{rows}</tbody></table>{more}"
    )
    step = None if summary.newest_step is None else f"step {summary.newest_step:,}"
    facts = [summary.state, summary.stored.project.name, step, *run.tags]
    hint = f"<code>quark.report({escape(repr(summary.run_id))})</code> has its findings and curves"
    return _show_card(run.name or summary.run_id, facts, table + f"<div>{hint}</div>")


def _show_found(found: Sequence[RunSummary]) -> str:
    from quark.page.api.rows import find_main
    from quark_core.records.names import decode_name

    rows = []
    for summary in found[:_MOST_ROWS]:
        run, main = summary.stored.run, find_main(summary)
        cells = [
            summary.run_id[:8],
            run.name or "",
            summary.stored.project.name,
            summary.state,
            run.created_at[:16].replace("T", " "),
            "" if summary.newest_step is None else f"{summary.newest_step:,}",
            "" if main is None else f"{decode_name(main.key)} {_write(main.last)}",
            ", ".join(run.tags),
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    names = ("run", "name", "project", "state", "started", "step", "judged by", "tags")
    heads = "".join(f"<th>{name}</th>" for name in names)
    more = f"<p>and {len(found) - _MOST_ROWS:,} more</p>" if len(found) > _MOST_ROWS else ""
    return (
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>{more}"
        if rows
        else "<p>No run fits.</p>"
    )


def _show_analysis(result: AnalyzerResult) -> str:
    scores = [
        f"{GLYPHS.get(score.status, '')} {score.score_key} {score.score:.0f} {score.status}"
        if score.is_known
        else f"{GLYPHS['unknown']} {score.score_key} not known"
        for score in result.health_scores
    ]
    items = "".join(_show_alert(alert) for alert in result.alerts[:_MOST_ALERTS])
    left = len(result.alerts) - _MOST_ALERTS
    more = f"<p>and {left} more</p>" if left > 0 else ""
    hint = f"<code>quark.report({escape(repr(result.run_id))})</code> draws what shows them"
    body = f"<ul>{items}</ul>{more}<div>{hint}</div>" if items else "Nothing found."
    return _show_card(result.run_id, scores, body)


def _show_alert(alert: Any) -> str:
    at = f" in {alert.culprit}" if alert.culprit else ""
    since = "" if alert.step is None else f", since step {alert.step:,}"
    title = f"{GLYPHS.get(alert.severity, '')} {alert.severity}: {alert.title}{at}{since}"
    return f"<li><b>{escape(title)}</b><br>{escape(alert.fact or alert.summary)}</li>"


def _write(value: float | None) -> str:
    from quark_core.analysis.observations import format_number

    return "" if value is None else format_number(value)


PAINTERS: Mapping[str, Callable[[Any], str]] = {
    "TrainingSession": _show_session,
    "RunSummary": _show_summary,
    "RunsFound": _show_found,
    "AnalyzerResult": _show_analysis,
    "RunComparisonResult": show_comparison,
}
"""Name of a class of the core -> what shows one of it, as HTML."""
