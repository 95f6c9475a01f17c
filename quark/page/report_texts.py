"""A report in words: text for a terminal, Markdown for a CI job's page, HTML without scripts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quark.analysis.observations import format_number
from quark.page.markup import escape
from quark.page.pack import decode_pack
from quark.page.report_contents import RunContents
from quark_core.records.names import decode_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark.analysis.comparison.results import MetricDiff, RunComparisonResult, RunReference

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
        facts.append(_tell_duration(run["duration_s"]))
    if run["git_commit"]:
        facts.append(f"commit {run['git_commit'][:7]}{'+changes' if run['dirty'] else ''}")
    return facts


def _tell_duration(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"


def _tell_scores(data: Mapping[str, Any]) -> list[str]:
    said = []
    for score in data["analysis"]["scores"]:
        known = f"{score['score']:.0f} {score['word']}" if score["known"] else score["word"]
        said.append(f"{score['key']} {known}")
    return said


def _list_grave(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
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
        return "Not known: no rule had the data that it needs."
    return f"No problem found; {rules['with_data']} of {rules['count']} checks ran."


# --- text


def tell_run_in_words(data: Mapping[str, Any]) -> str:
    """A run as lines of plain text."""
    lines = [f"{_name_run(data)} ({data['run']['id']}): {', '.join(_list_facts(data))}"]
    if scores := _tell_scores(data):
        lines.append(f"health: {'; '.join(scores)}")
    grave = _list_grave(data)
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
    for diff in _list_diffs(result):
        ends = f"{_figure(diff.last.primary)} against {_figure(diff.last.reference)}"
        lines.append(
            f"  {decode_name(diff.metric_key)}: {diff.verdict or 'no verdict'}, {ends} "
            f"({diff.reason})"
        )
    return "\n".join([*lines, *(f"  {note}" for note in result.notes)])


def _name_side(side: RunReference) -> str:
    name = side.name or side.run_id
    return f"{name} and {side.run_count - 1} more" if side.run_count > 1 else name


def _list_diffs(result: RunComparisonResult) -> list[MetricDiff]:
    """What tells most: the headline, then what is better or worse, then the others."""
    order = {"worse": 0, "better": 0, "equivalent": 1, "inconclusive": 2}
    diffs = sorted(
        result.metric_diffs,
        key=lambda diff: (not diff.headline, order.get(diff.verdict or "", 3)),
    )
    return diffs[:_MOST_METRICS]


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
    grave = _list_grave(data)
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
    for diff in _list_diffs(result):
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
    lacks = "".join(f"<li><b>left out:</b> {escape(text)}</li>" for text in data["lacks"])
    parts.append(f"<ul>{held}{lacks}</ul>")
    if scores := _tell_scores(data):
        parts.append(f"<p>health: {escape('; '.join(scores))}</p>")
    grave = _list_grave(data)
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
    import numpy as np

    known = values[np.isfinite(values)]
    return bool(known.size and known.min() > 0 and known.max() > 1000 * known.min())


def draw_line(
    steps: NDArray[Any],
    values: NDArray[Any],
    *,
    since: float | None = None,
    label: str = "the curve that it was seen in",
) -> str:
    """A curve as a small SVG; "" where there is nothing to draw."""
    import numpy as np

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
    rows = "".join(map(_show_diff, _list_diffs(result)))
    left = len(result.metric_diffs) - _MOST_METRICS
    more = f"<p>and {left:,} more metrics; `quark compare` has them</p>" if left > 0 else ""
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
    from quark.analysis.comparison.summary import tell_common_step

    return "; ".join(filter(None, (diff.reason, tell_common_step(diff))))


def _show_diff(diff: MetricDiff) -> str:
    verdict = diff.verdict or "none"
    ends = diff.last
    return (
        f'<tr><th scope="row">{escape(decode_name(diff.metric_key))}</th>'
        f'<td class="verdict-{escape(verdict)}">{escape(diff.verdict or "no verdict")}</td>'
        f'<td class="number">{_figure(ends.primary)}</td>'
        f'<td class="number">{_figure(ends.reference)}</td>'
        f'<td class="number">{_tell_difference(diff)}</td>'
        f"<td>{escape(_tell_reason(diff))}</td></tr>"
    )
