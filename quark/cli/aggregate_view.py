"""Where a run's time goes, and what it has aggregated, as `quark show` says it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from quark.cli.texts import Text
from quark_core.runs.run_report import describe_amount, read_summaries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quark.cli.texts import Console
    from quark_core.backends.contract import SupportsRead
    from quark_core.runs.run_report import AggregateSummary

_MOST_ROWS = 40
_NAME_WIDTH = 12


def print_aggregates(console: Console, reader: SupportsRead, run_id: str) -> None:
    """Print the timers, those that took the most first, and the aggregates; nothing of none."""
    table = read_summaries(reader, run_id)
    timers = table.timers
    others = [each for each in table if each.keep != "timer"]
    if timers:
        console.print(_make_timers(timers[:_MOST_ROWS]))
    if others:
        console.print(_make_others(others[:_MOST_ROWS]))
    left = max(0, len(timers) - _MOST_ROWS) + max(0, len(others) - _MOST_ROWS)
    if left:
        console.print(f"{left} more; --json has them all.", style="dim")


def _make_timers(timers: Sequence[AggregateSummary]) -> Table:
    has_failed = any(each.failed for each in timers)
    columns = ("share", "count", "mean", "p50", "p99", "first", *(("failed",) * has_failed))
    table = _begin("timer", columns)
    for each in timers:
        share = "-" if each.share is None else f"{100 * each.share:.1f} %"
        figures = (each.mean, each.quantile(0.5), each.quantile(0.99), each.first)
        name = Text(each.key)
        if each.clock == "cuda_events":
            name.append(" (GPU)", style="dim")
        table.add_row(
            name,
            share,
            f"{each.count:,}",
            *(describe_amount(figure, "s") for figure in figures),
            *((f"{each.failed:,}",) * has_failed),
        )
    return table


def _make_others(others: Sequence[AggregateSummary]) -> Table:
    table = _begin("aggregate", ("kept", "count", "mean", "deviation", "low", "high", "last"))
    for each in others:
        figures = (each.mean, each.deviation, each.low, each.high, each.last)
        name = Text(each.key)
        if each.non_finite:
            name.append(f"  {each.non_finite} not finite", style="red")
        told = (describe_amount(figure, each.unit) for figure in figures)
        table.add_row(name, each.keep, f"{each.count:,}", *told)
    return table


def _begin(head: str, columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(head, overflow="fold", min_width=_NAME_WIDTH)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
