"""What `quark analyze` prints: scores, alerts with what shows them, phases, what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from quark.cli.texts import describe_state
from quark_core.analysis.observations import format_number, say_steps

if TYPE_CHECKING:
    from quark_core.analysis.case import Case
    from quark_core.analysis.diagnosis import AnalyzerResult
    from quark_core.analysis.phases import PhaseAnalysisResult
    from quark_core.analysis_records import (
        AlertRecord,
        EvidenceRecord,
        HealthScoreRecord,
        PhaseRecord,
    )
    from quark_core.backend import StoredRun

__all__ = [
    "PHASE_STYLES",
    "SEVERITY_STYLES",
    "print_analysis",
    "print_explanations",
    "print_trimmed",
]

SEVERITY_STYLES = {"info": "blue", "warning": "yellow", "error": "red", "critical": "bold red"}
PHASE_STYLES = {
    "initialization_adaptation": "blue",
    "rapid_learning": "green",
    "stabilization": "cyan",
    "stagnation": "magenta",
    "overfitting_onset": "yellow",
    "divergence": "red",
}
_STATUS_STYLES = {"healthy": "green", "watch": "yellow", "degraded": "red", "critical": "bold red"}
_STATE_STYLES = {"fired": "red", "quiet": "green", "no_data": "dim"}
_STATE_WORDS = {"fired": "fired", "quiet": "quiet", "no_data": "could not look"}
_BAR = 20
_EVIDENCE = 4
_NAMES = 5
_WIDEST = 100  # longer lines are hard to read
_Stretch = tuple[Any, Any, "PhaseRecord"]
_MARKS = "123456789abcdefghijklmnopqrstuvwxyz"


def print_analysis(
    stored: StoredRun,
    result: AnalyzerResult,
    phases: PhaseAnalysisResult,
    case: Case,
    *,
    console: Console | None = None,
) -> None:
    """Print an analysis of a run.

    Args:
        stored: The run.
        result: Its alerts and scores.
        phases: Its phases.
        case: Where the curves of culprits come from; read only where one is drawn.
        console: Where to; stdout by default.
    """
    console = console or Console(highlight=False)
    width = min(console.width, _WIDEST)
    print_trimmed(console, _headline(stored, result), width)
    print_trimmed(console, Text(), width)
    table = _health_table(result.health_scores, ascii_only=console.options.ascii_only)
    print_trimmed(console, table, width)
    print_trimmed(console, Text(), width)
    print_trimmed(console, Text(_count_alerts(result), style="bold"), width)
    alerts = list(_in_order(result.alerts))
    numbers = {alert.id: number for number, (alert, _) in enumerate(alerts, start=1)}
    for alert, depth in alerts:
        print_trimmed(console, Text(), width)
        block = _alert_block(
            alert, alerts, numbers, case, width - 2 * depth, ascii_only=console.options.ascii_only
        )
        print_trimmed(console, _indent(block, 2 * depth), width)
    print_trimmed(console, Text(), width)
    for part in _phase_parts(phases, width, ascii_only=console.options.ascii_only):
        print_trimmed(console, part, width)
    for part in _missing_parts(result):
        print_trimmed(console, part, width)
    print_trimmed(console, Text(_describe_storing(result), style="dim"), width)


def print_trimmed(console: Console, part: RenderableType, width: int) -> None:
    """Print something in so many columns, without blanks at the ends of lines."""
    for line in console.render_lines(part, console.options.update(width=width), pad=False):
        while line and not line[-1].text.strip():
            line.pop()
        if line:
            line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
        console.print(Segments([*line, Segment.line()]), end="")


def print_explanations(result: AnalyzerResult, rule_id: str | None) -> None:
    """Print why one rule, or each, fired or did not."""
    console = Console(highlight=False)
    width = min(console.width, _WIDEST)
    for name, verdict in result.verdicts.items():
        if rule_id not in (None, name):
            continue
        head = Text.assemble(
            (f"{name}  ", "bold"), (_STATE_WORDS[verdict.state], _STATE_STYLES[verdict.state])
        )
        print_trimmed(console, head, width)
        reasons = [finding.fact for finding in verdict.findings] or [verdict.reason]
        if verdict.missing:
            reasons.append(f"missing: {', '.join(verdict.missing)}")
        if verdict.observed is not None and verdict.threshold is not None:
            reasons.append(
                f"observed {format_number(verdict.observed)}, "
                f"threshold {format_number(verdict.threshold)}"
            )
        for reason in reasons:
            if reason:
                print_trimmed(console, _indent(Text(reason), 2), width)


def _headline(stored: StoredRun, result: AnalyzerResult) -> Text:
    text = Text.assemble((f"{stored.project.name} ", "bold"), (result.run_id, "bold cyan"), "  ")
    if stored.run.name:
        text.append(f"{stored.run.name}  ")
    text.append_text(describe_state(stored.state))
    if stored.state == "running":
        text.append(" (what it has up to now)", style="dim")
    return text


def _health_table(scores: Sequence[HealthScoreRecord], *, ascii_only: bool) -> Table:
    table = Table.grid(padding=(0, 2))
    for index in range(5):
        table.add_column(justify="right" if index == 1 else "left", no_wrap=True)
    full, empty = ("#", ".") if ascii_only else ("━", "─")
    for score in scores:
        metadata: dict[str, Any] = dict(score.metadata or {})
        is_whole = score.score_key == "overall"
        looked, rules = metadata.get("rules_with_data"), metadata.get("rules")
        known = bool(metadata.get("known_categories")) if is_whole else looked != 0
        row: tuple[str, Text, Text]
        if not known and not score.contributing_alert_ids:
            row = ("-", Text(empty * _BAR, style="dim"), Text("not known", style="dim"))
        else:
            style = _STATUS_STYLES.get(score.status, "")
            filled = round(score.score / 100 * _BAR)
            bar = Text.assemble((full * filled, style), (empty * (_BAR - filled), "dim"))
            row = (f"{score.score:.0f}", bar, Text(score.status, style=style))
        coverage = "" if looked == rules else f"{looked} of {rules} rules could look"
        name = Text(score.score_key, style="bold" if is_whole else "")
        table.add_row(name, *row, Text(coverage, style="dim"))
    return table


def _count_alerts(result: AnalyzerResult) -> str:
    states = [verdict.state for verdict in result.verdicts.values()]
    looked = sum(state != "no_data" for state in states)
    if result.alerts:
        return f"{len(result.alerts)} alert{'s' if len(result.alerts) > 1 else ''}"
    if not looked:
        return "No alerts, but no rule had the data it needs."
    return f"No alerts: {looked} of {len(states)} rules looked and found nothing."


def _in_order(alerts: Sequence[AlertRecord]) -> Iterator[tuple[AlertRecord, int]]:
    """The worst first, but each consequence after its cause, with its depth below it."""
    by_id = {alert.id: alert for alert in alerts}
    below: dict[str | None, list[AlertRecord]] = {}
    for alert in alerts:
        metadata: dict[str, Any] = dict(alert.metadata or {})
        cause = metadata.get("caused_by")
        below.setdefault(cause if cause in by_id else None, []).append(alert)
    place = {alert.id: index for index, alert in enumerate(alerts)}

    def rank(alert: AlertRecord, seen: frozenset[str] = frozenset()) -> int:
        """Place of the worst of an alert and what follows from it."""
        seen |= {alert.id}
        below_it = (item for item in below.get(alert.id, ()) if item.id not in seen)
        return min([place[alert.id], *(rank(item, seen) for item in below_it)])

    done: set[str] = set()

    def walk(items: Sequence[AlertRecord], depth: int) -> Iterator[tuple[AlertRecord, int]]:
        for alert in sorted(items, key=rank):
            if alert.id not in done:
                done.add(alert.id)
                yield alert, depth
                yield from walk(below.get(alert.id, ()), depth + 1)

    yield from walk(below.get(None, ()), 0)
    # Causes that lead back to each other have no beginning; a third-party rule may make such.
    yield from walk(alerts, 0)


def _alert_block(
    alert: AlertRecord,
    alerts: Sequence[tuple[AlertRecord, int]],
    numbers: dict[str, int],
    case: Case,
    width: int,
    *,
    ascii_only: bool,
) -> RenderableType:
    style = SEVERITY_STYLES.get(alert.severity, "")
    metadata: dict[str, Any] = dict(alert.metadata or {})
    head = Text.assemble(
        f"{numbers[alert.id]:>2}  ", (alert.severity.upper(), style), "  ", (alert.title, "bold")
    )
    head.append(f"  {alert.rule_id}", style="dim")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("where", _describe_place(alert, metadata))
    titles = {item.id: item.title for item, _ in alerts}
    cause = metadata.get("caused_by")
    if cause in numbers:
        grid.add_row("cause", Text(f"follows from {numbers[cause]}, {titles[cause]}"))
    effects = [numbers[item] for item in metadata.get("consequences") or () if item in numbers]
    if effects:
        grid.add_row("effect", Text(f"leads to {', '.join(map(str, sorted(effects)))}"))
    if not ascii_only:
        from quark.cli.culprit_plots import describe_curve, draw_culprit, find_culprit_curve

        found = find_culprit_curve(case, alert)
        if found is not None:
            first = alert.step if found.curve.unit == "step" else alert.epoch
            room = max(16, min(60, width - 18))
            grid.add_row("curve", draw_culprit(found, first, room, style))
            grid.add_row("", Text(describe_curve(found), style="dim"))
    grid.add_row("fact", Text(alert.fact))
    grid.add_row("inference", Text(alert.inference))
    for index, line in enumerate(_evidence_lines(alert)):
        grid.add_row("evidence" if index == 0 else "", line)
    if alert.suggested_check:
        grid.add_row("check", Text(alert.suggested_check))
    return Group(head, _indent(grid, 4))


def _describe_place(alert: AlertRecord, metadata: dict[str, Any]) -> Text:
    text = Text(alert.culprit or "the whole run", style="bold")
    if alert.step is not None:
        end = metadata.get("step_end")
        text.append(f", from step {alert.step} on", style="not bold")
        if end is not None and end > alert.step:
            text.append(f", last seen at {end}", style="not bold")
    elif alert.epoch is not None:
        text.append(f", from epoch {alert.epoch} on", style="not bold")
    affected = metadata.get("affected") or ()
    if affected:
        text.append(f"; also {_list_names(affected)}", style="not bold")
    if metadata.get("hard_limit"):
        text.append("; a limit that was set", style="not bold")
    confidence = metadata.get("confidence", 1.0)
    if confidence < 1.0:
        text.append(f"  ({100 * confidence:.0f} % sure)", style="not bold dim")
    return text


def _evidence_lines(alert: AlertRecord) -> Iterator[Text]:
    for piece in alert.evidence[:_EVIDENCE]:
        yield _describe_evidence(piece, alert.fact)
    if len(alert.evidence) > _EVIDENCE:
        yield Text(f"{len(alert.evidence) - _EVIDENCE} more; --json has them all", style="dim")


def _describe_evidence(piece: EvidenceRecord, fact: str) -> Text:
    text = Text(f"{piece.kind} {piece.source}")
    figures = []
    if piece.observed_value is not None:
        figures.append(f"observed {format_number(piece.observed_value)}")
    if piece.threshold_value is not None:
        figures.append(f"threshold {format_number(piece.threshold_value)}")
    # What the fact says already is not said again, unless nothing else is left to say.
    if piece.summary and not (figures and piece.summary in fact):
        text.append(f": {piece.summary}")
    if piece.step_start is not None:
        figures.append(say_steps(piece.step_start, piece.step_end))
    if figures:
        text.append(f"  ({', '.join(figures)})", style="dim")
    return text


def _phase_parts(
    result: PhaseAnalysisResult, width: int, *, ascii_only: bool
) -> Iterator[RenderableType]:
    phases = [(*_bounds(phase), phase) for phase in result.phases if _bounds(phase)[0] is not None]
    notes = [note for note in result.notes if not note.startswith("not stored")]
    if not phases:
        yield Text("No phases: " + ("; ".join(notes) or "nothing to tell them by") + ".")
        yield Text()
        return
    unit = "step" if phases[0][2].step_start is not None else "epoch"
    low, high = phases[0][0], max(end for _, end, _ in phases)
    yield Text.assemble(("Phases", "bold"), (f"  {say_steps(low, high, unit)}", "dim"))
    room = max(10, width - 4)
    bar = Text("  ", no_wrap=True)
    edges = [round((start - low) / max(1, high - low) * room) for start, _, _ in phases] + [room]
    for index, (_, _, phase) in enumerate(phases):
        span = max(1, edges[index + 1] - edges[index])
        mark = _MARKS[index % len(_MARKS)]
        style = PHASE_STYLES.get(phase.phase_name, "")
        bar.append(mark, style=f"{style} reverse" if style else "reverse")
        bar.append(("-" if ascii_only else "━") * (span - 1), style=style)
    bar.truncate(width)
    yield bar
    yield _indent(_phase_legend(phases, unit, is_wide=width >= _WIDEST), 2)
    for note in notes:
        yield _indent(Text(note, style="dim"), 2)
    yield Text()


def _phase_legend(phases: Sequence[_Stretch], unit: str, *, is_wide: bool) -> RenderableType:
    """A line a phase, what it rests on beside it, or below it where there is little room."""
    grid = Table.grid(padding=(0, 2))
    for index in range(3):
        grid.add_column(no_wrap=True, justify="right" if index == 2 else "left")
    grid.add_column(overflow="fold")
    lines: list[RenderableType] = []
    for index, (start, end, phase) in enumerate(phases):
        style = PHASE_STYLES.get(phase.phase_name, "")
        mark = Text(_MARKS[index % len(_MARKS)], style=style)
        name = Text(phase.display_name, style=style)
        span = say_steps(start, end, unit)
        # Where it is stands beside it.
        said = Text(phase.summary.removesuffix(f" ({span})."), style="dim")
        if is_wide:
            grid.add_row(mark, name, Text(span, style="dim"), said)
        else:
            lines += [Text.assemble(mark, "  ", name, f"  {span}"), _indent(said, 3)]
    return grid if is_wide else Group(*lines)


def _bounds(phase: Any) -> tuple[Any, Any]:
    """First and last step, or epoch where there is no step."""
    if phase.step_start is not None:
        return phase.step_start, phase.step_end if phase.step_end is not None else phase.step_start
    return phase.epoch_start, phase.epoch_end if phase.epoch_end is not None else phase.epoch_start


def _missing_parts(result: AnalyzerResult) -> Iterator[RenderableType]:
    """Which rules could not look, those that lack the same on one line."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for rule_id, verdict in result.verdicts.items():
        if verdict.state == "no_data":
            reason = verdict.reason if verdict.reason.startswith("the rule failed") else ""
            groups.setdefault((reason, verdict.missing), []).append(rule_id)
    if not groups:
        return
    count = sum(map(len, groups.values()))
    yield Text(f"{count} of {len(result.verdicts)} rules could not look", style="bold")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(overflow="fold", ratio=1)
    grid.add_column(overflow="fold", style="dim", ratio=1)
    for (reason, missing), names in groups.items():
        grid.add_row(Text(", ".join(names)), Text(reason or f"lacked {', '.join(missing)}"))
    yield _indent(grid, 2)
    yield Text()


def _describe_storing(result: AnalyzerResult) -> str:
    if result.stored:
        return f"Stored with the run as generation {result.generation}."
    return f"Not stored: {result.refusal.rstrip('.')}." if result.refusal else "Not stored."


def _indent(part: RenderableType, columns: int) -> Padding:
    return Padding(part, (0, 0, 0, columns), expand=False)


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more
