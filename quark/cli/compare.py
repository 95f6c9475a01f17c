"""`quark compare`: what differs between two runs, or groups of runs, and what that means."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group, RenderableType
from rich.table import Table

from quark.analysis.comparison.summary import (
    describe_agreement,
    order_metrics,
    tell_common_step,
    tell_ends,
)
from quark.analysis.config import ComparisonEngineConfig, MetricTargetSpec
from quark.analysis.observations import format_number
from quark.cli.analysis_view import (
    MARKS,
    PHASE_STYLES,
    SEVERITY_STYLES,
    draw_phases,
    print_trimmed,
)
from quark.cli.analyze import FAILED_CHECK, show_warnings
from quark.cli.completion import complete_runs
from quark.cli.options import argument, option, takes_options
from quark.cli.store_access import (
    AS_JSON,
    SOURCE,
    RunSource,
    print_json,
)
from quark.cli.texts import DIM, FOLD, WHOLE, Console, Text, describe_state, indent, make_grid
from quark_core.errors import SchemaValidationError
from quark_core.formatting import format_value, join_first
from quark_core.records.names import decode_name
from quark_core.runs.reading import refuse_unknown_metric
from quark_core.runs.run_ids import shorten_run_id
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark.analysis.comparison.results import (
        AlertSighting,
        ChangeDiff,
        FigureDiff,
        LayerFigureDiff,
        LayerSummaryDiff,
        MetricDiff,
        ParameterDiff,
        PhaseDiff,
        RunComparisonResult,
        RunReference,
    )
    from quark.analysis.config import ComparisonEngineConfig, MetricTargetSpec
    from quark_core.runs.run_reader import RunReader


@click.command()
@takes_options
def compare(
    *,
    old: str = argument(shell_complete=complete_runs),
    new: str = argument(shell_complete=complete_runs),
    source: RunSource = SOURCE,
    reference_backend: str | None = option(
        "Read only OLD from this backend.",
        metavar="URI",
    ),
    baseline: bool = option("Label OLD as the baseline in the output."),
    targets: tuple[tuple[str, str, float], ...] = option(
        "Show when each side reached a target value of a metric. Repeatable.",
        "--target",
        type=(str, click.Choice(("at_least", "at_most")), float),
        metavar="KEY at_least|at_most VALUE",
    ),
    fail_on_worse: bool = option("Exit with code 3 if NEW is worse or may be worse."),
    as_json: bool = AS_JSON,
) -> None:
    """Compare NEW with OLD, the baseline.

    NEW is judged: "better" means that NEW is better than OLD. `quark why OLD NEW`
    takes its runs in the same order.

    OLD and NEW are each a run ID, unique prefix or name. To compare groups of seeds,
    separate runs with commas: quark compare a1,a2,a3 b1,b2,b3. The last value of each
    run counts. With one run on each side, seed noise is unknown,
    and most verdicts are "inconclusive".

    Nothing is stored: a run without an analysis is analyzed in memory. With --backend,
    both sides are read from this backend. With --reference-backend, only OLD is.

    \b
    Exit codes:
      0    compared
      1    a run or the store cannot be read
      2    usage error
      3    with --fail-on-worse: NEW is worse or may be worse in a metric, a run did not
           complete, or OLD is less than half as long as NEW
    """  # noqa: D301 - click wants the character
    from quark.analysis.comparison.engine import ComparisonEngine

    config = _configure(targets)
    other = source
    if reference_backend is not None:
        other = RunSource(source.storage_dir, reference_backend)
    reference, primary = other.open_side(old), source.open_side(new)
    _check_targets(targets, [*reference, *primary])
    with show_warnings():
        result = ComparisonEngine.compare_runs(primary, reference, baseline=baseline, config=config)
    if as_json:
        print_json(result.to_dict())
    else:
        print_comparison(result, config.metric_targets)
        if source is other and source.backend is None:
            # Settings are compared here, not functions and data.
            click.echo(clean_line(f"To find the cause of a difference: quark why {old} {new}"))
    if fail_on_worse:
        compared = ("NEW", result.primary), ("OLD", result.reference)
        diffs = result.metric_diffs
        fail_where_worse(
            [*tell_ends(*compared, running=True), *_tell_short_baseline(result)],
            is_worse=any(diff.verdict == "worse" for diff in diffs),
            doubtful=next((diff for diff in diffs if diff.headline), None),
        )


def fail_where_worse(ends: Sequence[str], *, is_worse: bool, doubtful: MetricDiff | None) -> None:
    """End with status 3 where runs are worse or did not complete, and say what nobody can tell.

    Args:
        ends: What is said of runs that did not complete.
        is_worse: Whether a metric is worse.
        doubtful: What may be worse without being called so, or None.
    """
    from quark.analysis.comparison.significance import may_be_worse

    for end in ends:
        click.echo(clean_line(f"quark: --fail-on-worse: {end}"), err=True)
    if ends or is_worse:
        sys.exit(FAILED_CHECK)
    if doubtful is not None and may_be_worse(doubtful):
        click.echo(_tell_doubt(doubtful), err=True)
        sys.exit(FAILED_CHECK)


def _tell_short_baseline(result: RunComparisonResult) -> list[str]:
    """Why a check fails if the baseline ended before half of NEW: it shows nothing of NEW's end."""
    old, new = (
        max(run.last_step or 0 for run in side.members or (side,))
        for side in (result.reference, result.primary)
    )
    if 2 * (old + 1) >= new + 1:
        return []
    return [
        f"OLD ends at step {old:,}, before half of the {new:,} steps of NEW. "
        "Use a baseline of similar length."
    ]


def _tell_doubt(diff: MetricDiff) -> str:
    """Why a check fails although nobody can tell that the metric is worse."""
    ends = (
        "no number" if value is None else f"{value:.4g}"
        for value in (diff.last.reference, diff.last.primary)
    )
    return clean_line(
        f"quark: --fail-on-worse: {decode_name(diff.metric_key)} {' -> '.join(ends)} may be worse "
        f"({name_sides(diff.reason)})"
    )


def _check_targets(targets: Sequence[tuple[str, str, float]], runs: Sequence[RunReader]) -> None:
    """Refuse a target of a metric that none of the runs has."""
    from quark_core.runs.run_search import summarize_run

    if not targets:
        return
    known: dict[str, None] = {}
    for run in runs:
        if run.reader is not None:
            known.update(dict.fromkeys(summarize_run(run.reader, str(run.run_id)).metrics))
    for key, _, _ in targets:
        try:
            refuse_unknown_metric(key, known, "--target", "none of the runs")
        except SchemaValidationError as error:
            raise click.UsageError(str(error).replace("has no", "has", 1)) from None


def _configure(targets: Sequence[tuple[str, str, float]]) -> ComparisonEngineConfig:
    try:
        return ComparisonEngineConfig(
            metric_targets=tuple(
                MetricTargetSpec(key, value, "at_least" if word == "at_least" else "at_most")
                for key, word, value in targets
            )
        )
    except SchemaValidationError as error:
        raise click.UsageError(f"--target: {error}") from None


_WIDEST = 100  # longer lines are hard to read
_CHANGES = 12
_LAYERS = 8
_FIGURES = 2
_ALIKE = 0.1  # of natural logarithms
_VALUE_CHARACTERS = 120
_SECTIONS = {"config": "configuration", "code": "code", "environment": "environment"}
_SIDES = {"reference": "old", "primary": "new"}
"""Side of a result -> its name in the terminal, in the order of the arguments."""


def name_sides(text: str) -> str:
    """A sentence of a comparison in which the sides are OLD and NEW, as on the command line."""
    for side, label in _SIDES.items():
        text = re.sub(rf"\b[Tt]he {side}\b", label.upper(), text)
    return text


def print_comparison(
    result: RunComparisonResult,
    targets: Sequence[MetricTargetSpec] = (),
    *,
    console: Console | None = None,
) -> None:
    """Print a comparison.

    Args:
        result: The comparison.
        targets: What was to be reached; one that no metric has is told.
        console: Where to; stdout by default.
    """
    console = console or Console(highlight=False)
    width = min(console.width, _WIDEST)
    ascii_only = console.options.ascii_only
    parts: list[RenderableType] = [
        _sides(result),
        Text(),
        *_change_parts(result.changes, result.agreeing),
        *metric_parts(result.metric_diffs, width, ascii_only=ascii_only),
        *target_parts(result.metric_diffs, targets),
        *_alert_parts(result),
        *_phase_parts(result.phase_diffs, width, ascii_only=ascii_only),
        *_layer_parts(result),
        *_note_parts(result.notes),
    ]
    while parts and isinstance(parts[-1], Text) and not parts[-1].plain:
        parts.pop()
    for part in parts:
        print_trimmed(console, part, width)


def _sides(result: RunComparisonResult) -> Table:
    grid = make_grid(DIM, FOLD)
    first = "baseline" if result.mode == "baseline" else _SIDES["reference"]
    for label, side in ((first, result.reference), (_SIDES["primary"], result.primary)):
        members = side.members or (side,)
        grid.add_row(label, Group(*(_describe_run(run) for run in members)))
    return grid


def _describe_run(run: RunReference) -> Text:
    run_id = shorten_run_id(run.run_id)
    text = Text.assemble((f"{run.project_name} ", "bold"), (run_id, "bold cyan"), "  ")
    if run.name:
        text.append(f"{run.name}  ")
    text.append_text(describe_state(run.state))
    if run.ending is not None:
        text.append(f": {run.ending.describe()}")
    if run.last_step is not None:
        text.append(f"  to step {run.last_step}", style="dim")
    if run.seed is not None:
        text.append(f"  seed {run.seed}", style="dim")
    return text


def _change_parts(
    changes: Sequence[ChangeDiff], agreeing: Sequence[str]
) -> Iterator[RenderableType]:
    if not changes:
        yield Text(describe_agreement(agreeing))
        yield Text()
        return
    yield Text("Changes", style="bold")
    grid = make_grid(FOLD | {"max_width": 34}, FOLD | {"ratio": 1}, FOLD | {"ratio": 1})
    grid.add_row("", *(Text(side, style="dim") for side in _SIDES.values()))
    for section, name in _SECTIONS.items():
        found = [change for change in changes if change.section == section]
        if not found:
            continue
        grid.add_row(Text(name, style="dim"), "", "")
        for change in found[:_CHANGES]:
            absent = {"added": "reference", "removed": "primary"}.get(change.kind)
            grid.add_row(
                Text(f"  {change.path}"),
                _show_value(change.reference, is_absent=absent == "reference"),
                _show_value(change.primary, is_absent=absent == "primary"),
            )
        if len(found) > _CHANGES:
            more = f"  {len(found) - _CHANGES} more; --json prints all"
            grid.add_row(Text(more, style="dim"), "", "")
    yield indent(grid, 2)
    yield Text()


def _show_value(value: Any, *, is_absent: bool) -> Text:
    if is_absent:
        return Text("-", style="dim")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > _VALUE_CHARACTERS:
        text = text[: _VALUE_CHARACTERS - 3] + "..."
    return Text(text)


def _alert_parts(result: RunComparisonResult) -> Iterator[RenderableType]:
    yield from _health_parts(result)
    diff = result.alert_diff
    if not (diff.primary_only or diff.reference_only or diff.shared):
        known = "none" not in (result.primary.analysis, result.reference.analysis)
        yield Text("No alerts on either side." if known else "Alerts are not known.")
        yield Text()
        return
    yield Text("Alerts", style="bold")
    grid = make_grid(WHOLE, WHOLE, FOLD)
    runs = result.primary.run_count, result.reference.run_count
    for label, style, sightings, count in (
        ("only new", "red", diff.primary_only, runs[0]),
        ("only old", "green", diff.reference_only, runs[1]),
    ):
        for sighting in _worst_first(sightings):
            grid.add_row(
                Text(label, style=style),
                Text(sighting.severity.upper(), style=SEVERITY_STYLES.get(sighting.severity, "")),
                _describe_sighting(sighting, count),
            )
    for match in diff.shared:
        text = _describe_sighting(match.primary, runs[0])
        if match.step_difference:
            word = "later" if match.step_difference > 0 else "earlier"
            text.append(f", {abs(match.step_difference):g} steps {word}", style="dim")
        if match.severity_change != "same":
            text.append(f", {match.severity_change} than {match.reference.severity}", style="dim")
        style = SEVERITY_STYLES.get(match.primary.severity, "")
        grid.add_row(
            Text("both", style="dim"), Text(match.primary.severity.upper(), style=style), text
        )
    yield indent(grid, 2)
    yield Text()


def _worst_first(sightings: Sequence[AlertSighting]) -> list[AlertSighting]:
    order = list(SEVERITY_STYLES)
    return sorted(
        sightings,
        key=lambda item: -order.index(item.severity) if item.severity in order else 0,
    )


def _describe_sighting(sighting: AlertSighting, run_count: int) -> Text:
    text = Text(sighting.title)
    if sighting.culprit:
        text.append(f" at {decode_name(sighting.culprit)}")
    if sighting.step is not None:
        text.append(f", step {sighting.step:g}")
    if run_count > 1:
        text.append(f", in {sighting.run_count} of {run_count} runs")
    text.append(f"  {sighting.rule_id}", style="dim")
    return text


def _health_parts(result: RunComparisonResult) -> Iterator[RenderableType]:
    known = [
        diff
        for diff in result.health_score_diffs
        if diff.primary is not None or diff.reference is not None
    ]
    if not known:
        return
    line = Text.assemble(("Health ", "bold"))
    for diff in known:
        if diff.primary is None or diff.reference is None:
            sides = (
                "not known" if score is None else f"{score:.0f}"
                for score in (diff.reference, diff.primary)
            )
            line.append(f" {diff.score_key} {' -> '.join(sides)},")
            continue
        gap = diff.difference or 0.0
        if diff.score_key != "overall" and abs(gap) < 1.0:
            continue
        style = "" if abs(gap) < 1.0 else ("green" if gap > 0 else "red")
        line.append(f" {diff.score_key} ")
        line.append(f"{diff.reference:.0f} -> {diff.primary:.0f}", style=style)
        line.append(",")
    line.right_crop(1)
    yield line
    yield Text()


def _phase_parts(
    diffs: Sequence[PhaseDiff], width: int, *, ascii_only: bool
) -> Iterator[RenderableType]:
    bounds = [
        bound
        for diff in diffs
        for bound in (
            diff.primary_start,
            diff.primary_end,
            diff.reference_start,
            diff.reference_end,
        )
        if bound is not None
    ]
    if not bounds:
        return
    unit, low, high = diffs[0].unit, min(bounds), max(bounds)
    yield Text.assemble(("Phases", "bold"), (f"  {unit}s {low:g} to {high:g}", "dim"))
    room = max(10, width - 15)
    for label, ends in (
        ("old", [(diff.reference_start, diff.reference_end) for diff in diffs]),
        ("new", [(diff.primary_start, diff.primary_end) for diff in diffs]),
    ):
        # Of groups the medians, which may overlap.
        spans = [(*span, diff.phase_name) for span, diff in zip(ends, diffs, strict=True)]
        bar = draw_phases(spans, low, high, room, ascii_only=ascii_only)
        yield Text.assemble((f"  {label:<11}", "dim"), bar, no_wrap=True)
    grid = make_grid(WHOLE, FOLD)
    for _ in range(3):
        grid.add_column(no_wrap=True, style="dim")
    grid.add_row("", "", *_SIDES.values(), "")
    for index, diff in enumerate(diffs):
        style = PHASE_STYLES.get(diff.phase_name, "")
        overlap = "" if diff.overlap is None else f"{100 * diff.overlap:.0f} % the same"
        grid.add_row(
            Text(MARKS[index % len(MARKS)], style=style),
            Text(diff.display_name, style=style),
            _describe_span(diff.reference_start, diff.reference_end),
            _describe_span(diff.primary_start, diff.primary_end),
            overlap,
        )
    yield indent(grid, 2)
    yield Text()


def _describe_span(start: float | None, end: float | None) -> str:
    return "-" if start is None or end is None else f"{start:g} to {end:g}"


def _layer_parts(result: RunComparisonResult) -> Iterator[RenderableType]:
    items: list[tuple[str, LayerSummaryDiff | ParameterDiff]] = [
        (f"{diff.module_name} ({diff.summary_type})", diff) for diff in result.layer_summary_diffs
    ]
    items += [(f"{diff.parameter_name} (parameter)", diff) for diff in result.parameter_diffs]
    if not items:
        return
    both = [item for item in items if item[1].presence == "both"]
    notable = sorted((item for item in both if item[1].notable), key=lambda i: -_rank_layer(i[1]))
    yield Text.assemble(
        ("Layers that differ most", "bold"),
        (f"  {len(notable)} of {len(both)} layers and parameters differ notably", "dim"),
    )
    grid = make_grid(FOLD | {"max_width": 36}, FOLD)
    for name, diff in notable[:_LAYERS]:
        grid.add_row(Text(name), Text(_describe_layer(diff)))
    for presence, words in (
        ("primary_only", "only new"),
        ("reference_only", "only old"),
    ):
        names = [name for name, diff in items if diff.presence == presence]
        if names:
            grid.add_row(Text(words, style="yellow"), Text(join_first(names, _LAYERS)))
    if grid.row_count:
        yield indent(grid, 2)
    yield Text()


def _describe_layer(diff: LayerSummaryDiff | ParameterDiff) -> str:
    """Its notable figures, the largest factor first; one of several that say the same."""
    told: list[str] = []
    factors: list[float] = []
    for figure in _sort_figures(diff):
        name, factor = figure.name.replace("_", " "), figure.log_ratio
        if factor is None:
            if figure.primary is not None and figure.reference is not None:
                told.append(f"{name} {figure.reference:.3g} -> {figure.primary:.3g}")
        elif all(abs(factor - other) > _ALIKE for other in factors):
            factors.append(factor)
            word = "larger" if factor > 0 else "smaller"
            told.append(f"{name} {math.exp(min(abs(factor), 700.0)):.3g} times {word}")
    return ", ".join(told[:_FIGURES]) or diff.summary


def _sort_figures(diff: LayerSummaryDiff | ParameterDiff) -> list[LayerFigureDiff]:
    """The notable ones; of those with about the same factor the first as they are listed."""
    found = [figure for figure in diff.figures if figure.notable]
    return sorted(found, key=lambda figure: -round(abs(figure.log_ratio or 0.0), 1))


def _rank_layer(diff: LayerSummaryDiff | ParameterDiff) -> float:
    """The factor that is told first, on a log scale."""
    figures = _sort_figures(diff)
    return abs(figures[0].log_ratio or 0.0) if figures else 0.0


def _note_parts(notes: Sequence[str]) -> Iterator[RenderableType]:
    if not notes:
        return
    yield Text("Notes", style="bold")
    for note in notes:
        grid = Table.grid(padding=(0, 1))
        grid.add_row("-", Text(name_sides(note)))
        yield indent(grid, 2)


_STYLES = {"better": "bold green", "worse": "bold red", "equivalent": "cyan"}
_PRESENCES = {"primary_only": "only new", "reference_only": "only old"}
_ARROWS = {"higher": "\u2191 ", "lower": "\u2193 "}
_SHOWN = 24
_LABEL = 13
_CELL = 12
_MACHINE = "system/"


def metric_parts(
    diffs: Sequence[MetricDiff], width: int, *, ascii_only: bool
) -> Iterator[RenderableType]:
    """A block a metric: those that differ first, those of the machine only where they do.

    Args:
        diffs: The metrics, the headline first.
        width: Columns of the terminal.
        ascii_only: Whether it shows no arrows.
    """
    if not diffs:
        yield Text("Neither side has metrics.")
        yield Text()
        return
    told = [
        diff
        for diff in order_metrics(diffs)
        if diff.headline or not diff.metric_key.startswith(_MACHINE) or _differs(diff)
    ]
    head = Text.assemble((f"{'Metrics':<{_LABEL}}", "bold"))
    for name in ("last", "best", "tail median", "AUC"):
        head.append(f"{name:>{_CELL}}", style="dim")
    yield head
    for diff in told[:_SHOWN]:
        yield from _block(diff, width, ascii_only=ascii_only)
    hidden = len(diffs) - len(told[:_SHOWN])
    if hidden:
        more = f"{hidden} more metrics (system metrics, or no difference); --json prints all."
        yield Text(f"  {more}", style="dim")
    yield Text()


def target_parts(
    diffs: Sequence[MetricDiff], targets: Sequence[MetricTargetSpec]
) -> Iterator[RenderableType]:
    """When each side reached what it was to reach."""
    if not targets:
        return
    yield Text("Steps to a target", style="bold")
    for target in targets:
        words = target.direction.replace("_", " ")
        name = decode_name(target.metric_key)
        head = f"{name} {words} {format_value(float(target.target_value))}"
        found = next((diff for diff in diffs if _has_target(diff, target)), None)
        yield Text(f"  {head}")
        if found is None or found.time_to_target is None:
            yield indent(Text("neither side has this metric", style="yellow"), 4)
            continue
        reached = found.time_to_target
        for side, label in _SIDES.items():
            style = "green" if reached.earlier == side else ""
            summary = getattr(reached, side).summary
            yield indent(Text.assemble((f"{label:<11}", "dim"), (summary, style)), 4)
        if reached.p_value is not None:
            said = "" if reached.earlier else ": no significant difference"
            yield Text(f"    p = {reached.p_value:.2g}{said}", style="dim")
    yield Text()


def _has_target(diff: MetricDiff, target: MetricTargetSpec) -> bool:
    reached = diff.time_to_target
    if reached is None or reached.direction != target.direction:
        return False
    # A bare name is stored under a namespace.
    is_named = diff.metric_key == target.metric_key or diff.metric_key.endswith(
        f"/{target.metric_key}"
    )
    return is_named and reached.target_value == target.target_value


def _differs(diff: MetricDiff) -> bool:
    return diff.verdict in ("better", "worse")


def _block(diff: MetricDiff, width: int, *, ascii_only: bool) -> Iterator[RenderableType]:
    style = _STYLES.get(diff.verdict or "", "")
    is_grey = not style
    verdict = diff.verdict.upper() if _differs(diff) and diff.verdict else diff.verdict
    name = decode_name(diff.metric_key)
    head = Text.assemble((name, "bold" if diff.headline else ""), "  ")
    head.append(verdict or _PRESENCES.get(diff.presence, "no verdict"), style=style or "dim")
    if detail := _describe_effect(diff):
        head.append(f"  {detail}", style="dim" if is_grey else "")
    yield indent(head, 2)
    for side, label in _SIDES.items():
        if diff.presence not in ("both", f"{side}_only"):
            continue
        line = Text(f"    {label:<{_LABEL - 4}}", style="dim")
        for figure in (diff.last, diff.best, diff.tail_median, diff.area):
            text = _describe_figure(figure, side)
            if figure is not None and figure is diff.best and not ascii_only:
                text = _ARROWS.get(diff.direction, "") + text
            line.append(f"{text:>{_CELL}}", style="dim" if is_grey else "not dim")
        bad = getattr(diff, f"{side}_non_finite_count")
        if bad:
            line.append(f"  {bad} not finite", style="red")
        line.no_wrap = width >= _LABEL + 4 * _CELL + 16
        yield line
    if diff.reason and diff.presence == "both":
        yield indent(Text(name_sides(diff.reason), style="dim"), 4)
    if early := tell_common_step(diff):
        yield indent(Text(early, style="dim"), 4)


def _describe_figure(figure: FigureDiff | None, side: str) -> str:
    return "-" if figure is None else format_value(getattr(figure, side))


def _describe_effect(diff: MetricDiff) -> str:
    """Difference of the ends with its interval, and the effect size."""
    ends, parts = diff.last, []
    if ends.difference is not None and diff.verdict != "equivalent":
        sign = "+" if ends.difference >= 0 else ""
        part = f"{sign}{format_number(ends.difference)}"
        if diff.interval_low is not None and diff.interval_high is not None:
            level = 100 * (diff.interval_level or 0.95)
            part += (
                f" ({level:.3g} % interval {format_number(diff.interval_low)} to "
                f"{format_number(diff.interval_high)})"
            )
        parts.append(part)
    if diff.effect_size is not None:
        parts.append(f"effect {format_number(diff.effect_size)}")
    return ", ".join(parts)
