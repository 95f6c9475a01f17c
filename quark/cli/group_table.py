"""The table of `quark runs --group-by`: what runs have in common, and how far they spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from quark.analysis.metric_roles import find_main_metric
from quark.cli.texts import Text, describe_age, describe_number
from quark_core.records.names import decode_name

if TYPE_CHECKING:
    from quark.analysis.run_groups import GroupedRuns
    from quark_core.backends.run_summary import RunSummary
    from quark_core.records.query import Field

_SHOWN_RUNS = 3
_RUN_CHARACTERS = 8
_MOST_METRICS = 2


def make_measure(
    field: Field | None, runs: Sequence[RunSummary] = ()
) -> tuple[str, Callable[[RunSummary], float | None]]:
    """What the figure of a run is called, and how it is found.

    Args:
        field: A metric, or any field that is a number; None for what a run is judged by.
        runs: The runs, which say what they are judged by.
    """
    if field is None:
        mains = (find_main_metric(run) for run in runs)
        keys = sorted({decode_name(main.key) for main in mains if main is not None})

        def find(run: RunSummary) -> float | None:
            loss = find_main_metric(run)
            return None if loss is None else loss.last

        few = 0 < len(keys) <= _MOST_METRICS
        return f"last {' or '.join(keys) if few else 'loss or objective'}", find
    from quark_core.search.evaluation import find_value
    from quark_core.search.resolution import spell_name

    def look_up(run: RunSummary) -> float | None:
        from dataclasses import replace

        for name in spell_name(field):
            value = find_value(replace(field, name=name), run)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return None

    name = decode_name(field.name) if field.scope == "metric" else field.name
    if field.scope in ("config", "field"):
        name = f"{field.scope}.{name}"
    if field.statistic == "last":
        return (f"last {name}" if field.scope == "metric" else name), look_up
    return f"{field.statistic}({name})", look_up


def make_group_table(groups: Sequence[GroupedRuns], by: str, measured: str) -> Table:
    """A table of groups, at least one.

    Args:
        groups: The groups.
        by: What they have in common.
        measured: What the figures are of: each group shows their mean and deviation.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(Text(by), style="bold", overflow="fold", min_width=len(by))
    table.add_column(Text("runs"), justify="right", no_wrap=True)
    table.add_column(Text(measured), justify="right", no_wrap=True)
    table.add_column(Text("from … to"), no_wrap=True)
    table.add_column(Text("newest"), no_wrap=True)
    table.add_column(Text("which"), overflow="fold")
    for group in groups:
        table.add_row(
            Text(group.label),
            Text(str(len(group.runs))),
            Text(_describe_mean(group)),
            Text(_describe_spread(group)),
            Text(describe_age(group.newest_at)),
            Text(_list_runs(group)),
        )
    return table


def _describe_mean(group: GroupedRuns) -> str:
    if group.mean is None:
        return "-"
    mean = describe_number(group.mean)
    few = "" if len(group.values) == len(group.runs) else f" of {len(group.values)}"
    if group.deviation is None:
        return f"{mean}{few}"
    return f"{mean} ± {describe_number(group.deviation)}{few}"


def _describe_spread(group: GroupedRuns) -> str:
    if group.low is None or group.high is None or len(group.values) < 2:
        return "-"
    return f"{describe_number(group.low)} … {describe_number(group.high)}"


def _list_runs(group: GroupedRuns) -> str:
    ids = [run.run_id[:_RUN_CHARACTERS] for run in group.runs[:_SHOWN_RUNS]]
    more = len(group.runs) - len(ids)
    return ", ".join(ids) + (f" and {more} more" if more else "")
