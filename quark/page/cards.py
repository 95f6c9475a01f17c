"""Small cards of runs for notebooks: text, tables and curves as SVG, which need no scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from quark.analysis.metric_roles import find_main_metric
from quark.analysis.observations import format_number
from quark.page.report import GLYPHS, draw_line, escape, is_steep
from quark_core.records.names import decode_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark_core.backends.run_summary import RunSummary

    Line = Sequence[NDArray[Any]]

MOST_METRICS = 8
"""So many rows has the table of a card."""

_MOST_ALERTS = 8
_MOST_LINES = 4
_MOST_TEXT = 400
# Of each of them the lowest and the highest are drawn: an outlier stays to be seen.
_BUCKETS = 60
_CARD = "border:1px solid #8888;border-radius:6px;padding:8px 12px;margin:4px 0;max-width:72rem"
_FIGURE = "display:inline-block;margin:4px 8px 4px 0"


def show_card(title: str, facts: Sequence[object], body: str) -> str:
    """A box with a title, facts behind it, and HTML below."""
    said = " · ".join(escape(str(fact)) for fact in facts if fact not in (None, ""))
    return f'<div style="{_CARD}"><b>{escape(title)}</b> {said}<br>{body}</div>'


def show_metrics(summary: RunSummary) -> str:
    """The metrics of a run as a table, the one that it is judged by first."""
    main = find_main_metric(summary)
    keys = list(dict.fromkeys([*([main.key] if main else []), *summary.metrics]))
    rows = "".join(
        f"<tr><td>{escape(decode_name(key))}</td><td>{write_figure(summary.metrics[key].last)}</td>"
        f"<td>{write_figure(summary.metrics[key].low)}</td>"
        f"<td>{write_figure(summary.metrics[key].high)}</td>"
        f"<td>{summary.metrics[key].count:,}</td></tr>"
        for key in keys[:MOST_METRICS]
    )
    more = f"and {len(keys) - MOST_METRICS:,} more" if len(keys) > MOST_METRICS else ""
    return (
        "<table><thead><tr><th>metric</th><th>last</th><th>lowest</th><th>highest</th>"
        f"<th>points</th></tr></thead><tbody>{rows}</tbody></table>{more}"
    )


def list_findings(findings: Sequence[Mapping[str, Any]], count: int | None = None) -> str:
    """What was found, in words.

    Args:
        findings: `severity`, `title`, `culprit`, `step`, `fact` of each, the worst first.
        count: How many there are, where these are not all.
    """
    items = "".join(map(_show_finding, findings[:_MOST_ALERTS]))
    left = (len(findings) if count is None else count) - min(len(findings), _MOST_ALERTS)
    more = f"<p>and {left} more</p>" if left > 0 else ""
    return f"<ul>{items}</ul>{more}" if items else ""


def _show_finding(finding: Mapping[str, Any]) -> str:
    at = f" in {decode_name(finding['culprit'])}" if finding["culprit"] else ""
    since = "" if finding["step"] is None else f", since step {finding['step']:,}"
    glyph = GLYPHS.get(finding["severity"], "")
    title = f"{glyph} {finding['severity']}: {finding['title']}{at}{since}"
    return f"<li><b>{escape(title)}</b><br>{escape(str(finding['fact'])[:_MOST_TEXT])}</li>"


def draw_lines(lines: Mapping[str, Line]) -> str:
    """The first curves as small drawings, each under its name, with its last value."""
    drawn = []
    for name, (steps, values) in list(lines.items())[:_MOST_LINES]:
        drawing = draw_line(*_thin(steps, values), label=f"{name} over steps")
        if drawing:
            scale = " (log scale)" if is_steep(values) else ""
            last = f"{write_figure(float(values[-1]))}{scale}"
            drawn.append(
                f'<figure style="{_FIGURE}"><figcaption>{escape(name)} {last}</figcaption>'
                f"{drawing}</figure>"
            )
    return f"<div>{''.join(drawn)}</div>" if drawn else ""


def _thin(steps: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """At most 120 points: the lowest and the highest of each of 60 parts."""
    known = np.flatnonzero(np.isfinite(steps) & np.isfinite(values))
    if len(known) > 2 * _BUCKETS:
        parts = np.array_split(known, _BUCKETS)
        ends = [(part[values[part].argmin()], part[values[part].argmax()]) for part in parts]
        known = np.unique(np.array(ends))
    return steps[known], values[known]


def show_still(said: Mapping[str, Any], lines: Mapping[str, Line]) -> str:
    """The last state of a run that is shown live, folded: what is left where nothing runs.

    Args:
        said: What `LiveFeed.said` has.
        lines: Name of each metric -> steps and values.
    """
    run = said.get("run") or {}
    health = said.get("health") or {}
    step = run.get("newest_step")
    at = datetime.fromtimestamp(said.get("at", 0.0), UTC).strftime("%H:%M:%S")
    status = health.get("status") if health.get("known") else "unknown"
    figure = f" {health['score']:.0f}" if health.get("known") else ""
    main = next(iter(lines.items()), None)
    facts = [
        f"{run.get('state')}{_say_ending(run)}",
        None if step is None else f"step {step:,}",
        None if main is None else f"{main[0]} {write_figure(float(main[1][1][-1]))}",
        f"health{figure} {GLYPHS.get(str(status), '')} {health.get('word') or status}",
        f"as of {at} UTC",
    ]
    name = escape(str(run.get("name") or run.get("id") or ""))
    head = " · ".join(escape(str(fact)) for fact in facts if fact)
    findings = list_findings(said.get("findings") or (), said.get("finding_count"))
    return (
        f"<details><summary>In words: <b>{name}</b> {head}</summary>"
        f"{findings}{draw_lines(lines)}</details>"
    )


def _say_ending(run: Mapping[str, Any]) -> str:
    ending = run.get("ending")
    return "" if ending is None else f": {ending['message']}"


def write_figure(value: float | None) -> str:
    """A figure in a few digits; "" where there is none."""
    return "" if value is None else format_number(value)
