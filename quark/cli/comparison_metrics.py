"""The metrics of a comparison for the terminal: figures of both sides, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from quark.cli.texts import describe_number
from quark_core.analysis.observations import format_number

if TYPE_CHECKING:
    from quark_core.analysis.comparison.config import MetricTargetSpec
    from quark_core.analysis.comparison.results import FigureDiff, MetricDiff

__all__ = ["metric_parts", "target_parts"]

_STYLES = {"better": "bold green", "worse": "bold red", "equivalent": "cyan"}
_PRESENCES = {
    "primary_only": "only the primary has it",
    "reference_only": "only the reference has it",
}
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
    order = {"worse": 0, "better": 1, "equivalent": 2, "inconclusive": 3}
    told = [
        diff
        for diff in diffs
        if diff.headline or not diff.metric_key.startswith(_MACHINE) or _differs(diff)
    ]
    told.sort(key=lambda diff: (not diff.headline, order.get(diff.verdict or "", 4)))
    head = Text.assemble((f"{'Metrics':<{_LABEL}}", "bold"))
    for name in ("last", "best", "tail median", "AUC"):
        head.append(f"{name:>{_CELL}}", style="dim")
    yield head
    for diff in told[:_SHOWN]:
        yield from _block(diff, width, ascii_only=ascii_only)
    hidden = len(diffs) - len(told[:_SHOWN])
    if hidden:
        more = f"{hidden} more metrics, of the machine or without a difference; --json has all."
        yield Text(f"  {more}", style="dim")
    yield Text()


def target_parts(
    diffs: Sequence[MetricDiff], targets: Sequence[MetricTargetSpec]
) -> Iterator[RenderableType]:
    """When each side reached what it was to reach."""
    if not targets:
        return
    yield Text("Time to target", style="bold")
    for target in targets:
        words = target.direction.replace("_", " ")
        head = f"{target.metric_key} {words} {describe_number(float(target.target_value))}"
        found = next((diff for diff in diffs if _has_target(diff, target)), None)
        yield Text(f"  {head}")
        if found is None or found.time_to_target is None:
            yield Padding(Text("neither side has this metric", style="yellow"), (0, 0, 0, 4))
            continue
        reached = found.time_to_target
        for label, outcome in (("primary", reached.primary), ("reference", reached.reference)):
            style = "green" if reached.earlier == label else ""
            yield Padding(
                Text.assemble((f"{label:<11}", "dim"), (outcome.summary, style)), (0, 0, 0, 4)
            )
        if reached.p_value is not None:
            said = "" if reached.earlier else ": neither side is certainly earlier"
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
    head = Text.assemble((diff.metric_key, "bold" if diff.headline else ""), "  ")
    head.append(verdict or _PRESENCES.get(diff.presence, "no verdict"), style=style or "dim")
    if detail := _describe_effect(diff):
        head.append(f"  {detail}", style="dim" if is_grey else "")
    yield Padding(head, (0, 0, 0, 2))
    for side in ("primary", "reference"):
        if diff.presence not in ("both", f"{side}_only"):
            continue
        line = Text(f"    {side:<{_LABEL - 4}}", style="dim")
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
        yield Padding(Text(diff.reason, style="dim"), (0, 0, 0, 4))


def _describe_figure(figure: FigureDiff | None, side: str) -> str:
    return "-" if figure is None else describe_number(getattr(figure, side))


def _describe_effect(diff: MetricDiff) -> str:
    """Difference of the ends with its interval, and the effect size."""
    ends, parts = diff.tail_median, []
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
