"""What `quark analyze` prints: scores, alerts with what shows them, phases, what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.segment import Segment, Segments
from rich.table import Table

from quark.analysis.curves import Curve
from quark.analysis.fixes import read_fixes
from quark.analysis.health import is_note, order_alerts
from quark.analysis.observations import format_number, say_steps
from quark.cli.plots import draw_curve
from quark.cli.texts import DIM, FOLD, Console, Text, describe_run_state, indent, make_grid
from quark_core.formatting import format_count, join_first
from quark_core.records.kinds.findings import LITTLE_SEEN
from quark_core.records.names import decode_name
from quark_core.runs.run_ids import shorten_run_id

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark.analysis.analysis_context import Case
    from quark.analysis.curves import History, ParameterHistory
    from quark.analysis.engine import AnalyzerResult
    from quark.analysis.phases import PhaseAnalysisResult
    from quark_core.backends.run_summary import StoredRun
    from quark_core.records.kinds.findings import (
        AlertRecord,
        EvidenceRecord,
        HealthScoreRecord,
        PhaseRecord,
    )

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
_STATE_WORDS = {"fired": "fired", "quiet": "quiet", "no_data": "lacks data"}
_BAR = 20
_EVIDENCE = 4
_NAMES = 5
_WIDEST = 100  # longer lines are hard to read
_Stretch = tuple[Any, Any, "PhaseRecord"]
MARKS = "123456789abcdefghijklmnopqrstuvwxyz"


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
    print_trimmed(console, Text(_describe_judgement(result)), width)
    print_trimmed(console, Text(_count_alerts(result), style="bold"), width)
    alerts = list(order_alerts(result.alerts))
    numbers = {alert.id: number for number, (alert, _) in enumerate(alerts, start=1)}
    for alert, depth in alerts:
        print_trimmed(console, Text(), width)
        block = _alert_block(
            alert, alerts, numbers, case, width - 2 * depth, ascii_only=console.options.ascii_only
        )
        print_trimmed(console, indent(block, 2 * depth), width)
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
        reasons = [finding.fact for finding in verdict.findings]
        if verdict.state != "fired":
            reasons = [verdict.reason, *(f"note: {fact}" for fact in reasons)]
        if verdict.missing:
            reasons.append(f"missing: {', '.join(verdict.missing)}")
        if verdict.observed is not None and verdict.threshold is not None:
            reasons.append(
                f"observed {format_number(verdict.observed)}, "
                f"threshold {format_number(verdict.threshold)}"
            )
        for reason in reasons:
            if reason:
                print_trimmed(console, indent(Text(reason), 2), width)
    if fix := read_fixes().get(rule_id or ""):
        print_trimmed(console, Text("How to fix it", style="bold"), width)
        for line in fix.replace("\n\n", "\n").splitlines():
            print_trimmed(console, indent(Text(line), 2), width)


def _headline(stored: StoredRun, result: AnalyzerResult) -> Text:
    run_id = shorten_run_id(result.run_id)
    text = Text.assemble((f"{stored.project.name} ", "bold"), (run_id, "bold cyan"), "  ")
    if stored.run.name:
        text.append(f"{stored.run.name}  ")
    text.append_text(describe_run_state(stored))
    if stored.state == "running":
        text.append(" (so far)", style="dim")
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
        row: tuple[str, Text, Text]
        if not score.is_known:
            row = ("-", Text(empty * _BAR, style="dim"), Text(score.word, style="dim"))
        else:
            style = _STATUS_STYLES.get(score.status, "")
            filled = round(score.score / 100 * _BAR)
            bar = Text.assemble((full * filled, style), (empty * (_BAR - filled), "dim"))
            row = (f"{score.score:.0f}", bar, Text(score.word, style=style))
        coverage = "" if looked == rules else f"{looked} of {rules} checks ran"
        name = Text(score.score_key, style="bold" if is_whole else "")
        table.add_row(name, *row, Text(coverage, style="dim"))
    return table


def _describe_judgement(result: AnalyzerResult) -> str:
    """By which metric the run was judged, and what came out; or why nothing did."""
    overall = result.health_scores[0]
    metadata: dict[str, Any] = dict(overall.metadata or {})
    learning = metadata.get("learning") or {}
    if not overall.is_known:
        return f"Health is not known: {overall.unknown_reason}."
    if learning.get("metric") is None:
        return f"Judged by alerts alone: {learning.get('reason')}."
    way = "lower" if learning["mode"] == "min" else "higher"
    named = "the objective" if learning["named"] else "recognized by its name"
    metric = decode_name(str(learning["metric"]))
    said = f"Judged by {metric} ({way} is better; {named}): {learning['reason']}."
    if (call := metadata.get(LITTLE_SEEN)) is None:
        return said
    ran = f"{metadata.get('rules_with_data')} of {metadata.get('rules')} checks ran"
    found = "" if any(not is_note(alert) for alert in result.alerts) else "No problem found; "
    return f"{said} {found}{ran}. To run more: {call}."


def _count_alerts(result: AnalyzerResult) -> str:
    # As the scores count them: of a few points that nothing is wrong with no rule says anything.
    counted = [dict(score.metadata or {}) for score in result.health_scores]
    rules, looked = (counted[0].get(key, 0) for key in ("rules", "rules_with_data"))
    notes = sum(is_note(alert) for alert in result.alerts)
    said = f", and {format_count(notes, 'note')}" if notes else ""
    if count := len(result.alerts) - notes:
        return f"{format_count(count, 'alert')}{said}"
    if not looked:
        return f"No alerts{said}, but no rule had the data that it needs."
    return f"No alerts{said}: {looked} of {rules} checks ran and found no problem."


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
    grid = make_grid(DIM, FOLD)
    grid.add_row("where", _describe_place(alert, metadata))
    titles = {item.id: item.title for item, _ in alerts}
    cause = metadata.get("caused_by")
    if cause in numbers:
        grid.add_row("cause", Text(f"alert {numbers[cause]}, {titles[cause]}"))
    effects = [numbers[item] for item in metadata.get("consequences") or () if item in numbers]
    if effects:
        grid.add_row("effect", Text(f"alert {', '.join(map(str, sorted(effects)))}"))
    if not ascii_only:
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
    if alert.rule_id in read_fixes():
        run_id = shorten_run_id(str(alert.run_id))
        grid.add_row("fix", Text(f"quark analyze {run_id} --explain {alert.rule_id}"))
    return Group(head, indent(grid, 4))


def _describe_place(alert: AlertRecord, metadata: dict[str, Any]) -> Text:
    text = Text(decode_name(alert.culprit or "the whole run"), style="bold")
    if alert.step is not None:
        end = metadata.get("step_end")
        text.append(f", from step {alert.step} on", style="not bold")
        if end is not None and end > alert.step:
            text.append(f", last seen at {end}", style="not bold")
    elif alert.epoch is not None:
        text.append(f", from epoch {alert.epoch} on", style="not bold")
    affected = metadata.get("affected") or ()
    if affected:
        text.append(f"; also {join_first(affected, _NAMES)}", style="not bold")
    if metadata.get("hard_limit"):
        text.append("; a configured limit", style="not bold")
    confidence = metadata.get("confidence", 1.0)
    if confidence < 1.0:
        text.append(f"  ({100 * confidence:.0f} % sure)", style="not bold dim")
    return text


def _evidence_lines(alert: AlertRecord) -> Iterator[Text]:
    for piece in alert.evidence[:_EVIDENCE]:
        yield _describe_evidence(piece, alert.fact)
    if len(alert.evidence) > _EVIDENCE:
        yield Text(f"{len(alert.evidence) - _EVIDENCE} more; --json prints all", style="dim")


def _describe_evidence(piece: EvidenceRecord, fact: str) -> Text:
    text = Text(f"{piece.kind} {decode_name(piece.source)}")
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
        yield Text("No phases: " + ("; ".join(notes) or "no data to detect them") + ".")
        yield Text()
        return
    unit = "step" if phases[0][2].step_start is not None else "epoch"
    low, high = phases[0][0], max(end for _, end, _ in phases)
    yield Text.assemble(("Phases", "bold"), (f"  {say_steps(low, high, unit)}", "dim"))
    spans = [(start, end, phase.phase_name) for start, end, phase in phases]
    yield indent(draw_phases(spans, low, high, max(10, width - 4), ascii_only=ascii_only), 2)
    yield indent(_phase_legend(phases, unit, is_wide=width >= _WIDEST), 2)
    for note in notes:
        yield indent(Text(note, style="dim"), 2)
    yield Text()


def draw_phases(
    spans: Sequence[tuple[float | None, float | None, str]],
    low: float,
    high: float,
    room: int,
    *,
    ascii_only: bool,
) -> Text:
    """Phases as one bar, each with its mark where it begins.

    Args:
        spans: First and last step of each, and its name; those without steps are not drawn.
        low, high: The steps of the whole bar.
        room: Its columns.
        ascii_only: Whether it is drawn in ASCII.
    """
    cells: list[tuple[str, str]] = [(" ", "")] * room
    share = room / max(1.0, high - low + 1)
    for index, (start, end, name) in enumerate(spans):
        if start is None or end is None:
            continue
        first = min(room - 1, int((start - low) * share))
        last = min(room, max(first + 1, int((end + 1 - low) * share)))
        style = PHASE_STYLES.get(name, "")
        # A mark that would fall on another one moves on by a column.
        while first + 1 < room and cells[first][0] in MARKS:
            first += 1
        for cell in range(first, last):
            if cells[cell][0] not in MARKS:
                cells[cell] = ("-" if ascii_only else "━", style)
        cells[first] = (MARKS[index % len(MARKS)], f"{style} reverse".strip())
    return Text.assemble(*cells, no_wrap=True)


def _phase_legend(phases: Sequence[_Stretch], unit: str, *, is_wide: bool) -> RenderableType:
    """A line a phase, what it rests on beside it, or below it where there is little room."""
    grid = Table.grid(padding=(0, 2))
    for index in range(3):
        grid.add_column(no_wrap=True, justify="right" if index == 2 else "left")
    grid.add_column(overflow="fold")
    lines: list[RenderableType] = []
    for index, (start, end, phase) in enumerate(phases):
        style = PHASE_STYLES.get(phase.phase_name, "")
        mark = Text(MARKS[index % len(MARKS)], style=style)
        name = Text(phase.display_name, style=style)
        span = say_steps(start, end, unit)
        # Where it is stands beside it.
        said = Text(phase.summary.removesuffix(f" ({span})."), style="dim")
        if is_wide:
            grid.add_row(mark, name, Text(span, style="dim"), said)
        else:
            lines += [Text.assemble(mark, "  ", name, f"  {span}"), indent(said, 3)]
    return grid if is_wide else Group(*lines)


def _bounds(phase: Any) -> tuple[Any, Any]:
    """First and last step, or epoch where there is no step."""
    if phase.step_start is not None:
        return phase.step_start, phase.step_end if phase.step_end is not None else phase.step_start
    return phase.epoch_start, phase.epoch_end if phase.epoch_end is not None else phase.epoch_start


def _missing_parts(result: AnalyzerResult) -> Iterator[RenderableType]:
    """Which rules could not look, those with the same reason on one line.

    The reason says how much a rule needs: what it names in `missing` may be there, but too little.
    """
    groups: dict[str, list[str]] = {}
    missing: set[str] = set()
    for rule_id, verdict in result.verdicts.items():
        if verdict.state == "no_data":
            reason = verdict.reason or f"lacks {', '.join(verdict.missing)}"
            groups.setdefault(reason, []).append(rule_id)
            missing.update(verdict.missing)
    if not groups:
        return
    count = sum(map(len, groups.values()))
    yield Text(f"{count} of {len(result.verdicts)} rules lack data", style="bold")
    grid = make_grid(FOLD | {"ratio": 1}, FOLD | {"style": "dim", "ratio": 1})
    for reason, names in groups.items():
        grid.add_row(Text(", ".join(names)), Text(reason))
    yield indent(grid, 2)
    if _WATCHED in missing:
        yield Text("  To record layers, parameters and gradients, add to the training script:")
        yield Text("  quark.watch(session, model, optimizer)", style="bold")
    yield Text()


def _describe_storing(result: AnalyzerResult) -> str:
    if result.stored:
        return f"Stored with the run as analysis {result.generation}."
    return f"Not stored: {result.refusal.rstrip('.')}." if result.refusal else "Not stored."


# What `quark.watch` brings first, and nothing else does.
_WATCHED = "parameter summaries"
_LOG_RATIO = 100.0
_HEIGHT = 2
_NOT_FINITE = "\u00d7"
# Rule -> where its figure is looked for first.
_PLACES: dict[str, tuple[str, ...]] = {
    "exploding_gradients": ("gradient", "parameter_gradient"),
    "vanishing_gradients": ("parameter_gradient", "gradient"),
    "stagnant_layers": ("update", "parameter_gradient"),
    "update_ratio": ("update",),
    "activation_collapse": ("activation",),
}
_KINDS: dict[str, tuple[str, ...]] = {
    "gradient": ("gradient", "parameter_gradient"),
    "parameter": ("value", "update"),
}
_ANY = ("activation", "gradient", "update", "parameter_gradient", "value")
_FIGURES = {
    "update": ("update_to_parameter_ratio", "update"),
    "parameter_gradient": ("gradient_norm", "gradient norm"),
    "value": ("value_norm", "norm"),
}


@dataclass(frozen=True)
class CulpritCurve:
    """A curve to draw.

    Attributes:
        label: What it is, such as `train/loss` or `gradient of layers.2`.
        curve: Its points, those that are not finite included.
    """

    label: str
    curve: Curve


def find_culprit_curve(case: Case, alert: AlertRecord) -> CulpritCurve | None:
    """The curve that shows best what an alert says of its culprit; None where the run has none."""
    culprit = alert.culprit
    if culprit is None:
        return None
    found = _find_metric(case, culprit)
    if found is not None:
        return CulpritCurve(decode_name(culprit), found) if len(found) > 1 else None
    kind = alert.evidence[0].kind if alert.evidence else ""
    places = _PLACES.get(alert.rule_id) or _KINDS.get(kind) or ()
    for place in dict.fromkeys((*places, *_ANY)):
        made = _find_figure(case, culprit, place, alert)
        if made is not None and len(made.curve) > 1:
            return made
    return None


def draw_culprit(item: CulpritCurve, first: int | None, width: int, style: str) -> Text:
    """Three lines: the curve in two, and a mark under a step.

    What is before the step is cyan, the rest in the style. Points that are not
    finite, where no others follow, are crosses.

    Args:
        item: The curve.
        first: The step to mark, or the epoch of a curve over epochs; None marks nothing.
        width: Columns of the terminal that it may take.
        style: Of what comes from the step on.
    """
    curve = item.curve
    x, y = curve.step.astype(float), curve.value
    finite = np.isfinite(y)
    low, high = float(x[0]), float(x[-1])
    text = Text(no_wrap=True, overflow="crop")
    mark = None if first is None else _place(first, low, high, width)
    if finite.any():
        known = y[finite]
        begin, end = _place(x[finite][0], low, high, width), _place(x[finite][-1], low, high, width)
        drawn = draw_curve(
            x[finite],
            np.log10(known) if _is_wide(known) else known,
            width=end - begin + 1,
            height=_HEIGHT,
        )
        rows = [
            " " * begin + row.ljust(end - begin + 1) + _NOT_FINITE * (width - 1 - end)
            for row in drawn.splitlines()
        ]
    else:
        rows = [_NOT_FINITE * width] * _HEIGHT
    for row in rows:
        cut = len(row) if mark is None else mark
        text.append(row[:cut], style="cyan")
        text.append(row[cut:].rstrip() + "\n", style=style, lines=True)
    if mark is not None:
        label = f"{curve.unit} {first}"
        right = mark + 2 + len(label) <= width
        line = f"{' ' * mark}▲ {label}" if right else f"{label} ▲".rjust(mark + 1)
        text.append(line, style=style)
    text.rstrip()
    return text


def describe_curve(item: CulpritCurve) -> str:
    """What a curve is of and what it spans, such as `train/loss, 0.1 to 2.3, steps 0 to 99`."""
    curve, parts = item.curve, [item.label]
    finite = np.isfinite(curve.value)
    if finite.any():
        known = curve.value[finite]
        scale = " on a log scale" if _is_wide(known) else ""
        low, high = float(known.min()), float(known.max())
        parts.append(f"{format_number(low)} to {format_number(high)}{scale}")
    if lost := int((~finite).sum()):
        parts.append(f"{lost} not finite")
    parts.append(say_steps(int(curve.step[0]), int(curve.step[-1]), curve.unit))
    return ", ".join(parts)


def _is_wide(known: NDArray[np.float64]) -> bool:
    """Whether finite values span so much that only a log scale shows them."""
    return bool(known.min() > 0 and known.max() > _LOG_RATIO * known.min())


def _place(step: float, low: float, high: float, width: int) -> int:
    """Column of a step, from 0."""
    if not high > low:
        return 0
    return int(min(max((step - low) / (high - low), 0.0), 1.0) * (width - 1))


def _find_metric(case: Case, name: str) -> Curve | None:
    found = case.run.metrics.get(name)
    if found is not None:
        return case.run.place_on_steps(found)
    if case.train_loss is not None and case.train_loss.key == name:
        return case.train_loss
    rows = case.run.telemetry
    if not rows.count or name not in ("step_time_ms", "data_time_ms", "compute_time_ms"):
        return None
    steps, values = rows["step"], rows[name]
    kept = np.flatnonzero((steps >= 0) & np.isfinite(values))
    kept = kept[np.argsort(steps[kept], kind="stable")]
    return Curve(name, steps[kept], values[kept], np.full(len(kept), -1))


def _find_figure(case: Case, name: str, place: str, alert: AlertRecord) -> CulpritCurve | None:
    if place in _FIGURES:
        parameter = _find_parameter(case, name)
        figure, words = _FIGURES[place]
        return None if parameter is None else _take(parameter, figure, words)
    table = case.run.activations if place == "activation" else case.run.gradients
    layer = table.get(name)
    if layer is None:
        return None
    if place == "gradient":
        return _take(layer, "norm", "gradient norm")
    said = " ".join((alert.title, *(piece.summary for piece in alert.evidence[:1]))).lower()
    if "dead" in said:
        return _take(layer, "dead_unit_ratio", "fraction of dead units")
    if "saturat" in said:
        return _take(layer, "saturation_ratio", "fraction of saturated outputs")
    return _take(layer, "std", "standard deviation of the outputs")


def _take(history: History, figure: str, words: str) -> CulpritCurve | None:
    curve = history.curve(figure)
    is_counted = "nan_count" in history.figures
    if is_counted:
        # NaN stands for "no figure"; where elements are NaN, it is one.
        broken = np.nan_to_num(history["nan_count"]) + np.nan_to_num(history["inf_count"]) > 0
        kept = np.isfinite(curve.value) | broken
        values = np.where(broken, np.nan, curve.value)
        curve = Curve(curve.key, curve.step, values, curve.epoch).take(kept)
    else:
        curve = curve.finite
    return CulpritCurve(f"{words} of {history.name}", curve) if len(curve) else None


def _find_parameter(case: Case, name: str) -> ParameterHistory | None:
    table = case.run.parameters
    for key in (name, f"{name}.weight"):
        if key in table:
            return table[key]
    return next((item for item in table.values() if item.module_name == name), None)
