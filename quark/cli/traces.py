"""`quark traces`: which versions of the functions under `quark.trace` a project's runs had."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from quark.cli.completion import complete_metrics, complete_projects
from quark.cli.options import argument, option, takes_options
from quark.cli.sources import print_diff_lines
from quark.cli.store_access import (
    AS_JSON,
    STORAGE_DIR,
    RunSource,
    print_json,
)
from quark.cli.texts import FOLD, RIGHT, WHOLE, Console, Text, make_table
from quark_core.formatting import format_age, format_count, format_value
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark.analysis.trace_statistics import TraceStatistics, TraceVersion

_SHOWN_DIGITS = 8
_LEVELS = {
    "text": "source text not saved: comments count as changes",
    "bytecode": "no source text: each Python version counts as a change",
}


@click.command()
@takes_options
def traces(
    *,
    project: str = argument(shell_complete=complete_projects),
    name: str | None = argument(),
    storage_dir: Path | None = STORAGE_DIR,
    metric: str | None = option(
        "Show the mean and best last value of this metric per version.",
        "-m",
        metavar="KEY",
        shell_complete=complete_metrics,
    ),
    mode: Literal["min", "max"] | None = option(
        "Direction in which the metric improves.", show_default="by its name"
    ),
    diff: bool = option("Show the lines that changed between versions."),
    as_json: bool = AS_JSON,
) -> None:
    """List the versions of traced functions in a project.

    Lists the functions decorated with quark.trace in the runs of PROJECT. With
    NAME, list only this function. Changes of comments, layout and local variable
    names do not count as a new version.
    """
    from quark.analysis.trace_statistics import collect_statistics

    source = RunSource(storage_dir)
    found = collect_statistics(source.reader, project, name, metric=metric, mode=mode)
    if not found:
        source.check_project(project, "PROJECT")
    if as_json:
        print_json({"project": project, "traces": [each.to_dict() for each in found]})
        return
    if not found:
        click.echo(clean_line(f"No traced functions in project {project!r} of {source.store}."))
    for each in found:
        _print_trace(each, with_diff=diff)


def _print_trace(statistics: TraceStatistics, *, with_diff: bool) -> None:

    from quark.analysis.trace_statistics import diff_versions

    count = len(statistics.versions)
    measured = () if statistics.metric is None else (f"mean {statistics.metric}", "best")
    heads = {"version": RIGHT, "digest": WHOLE, "runs": RIGHT, ("first", "last"): WHOLE}
    table = make_table({**heads, measured: RIGHT, "changes": FOLD}, padding=(0, 1, 0, 0))
    for number, version in enumerate(statistics.versions, 1):
        figures = (
            []
            if statistics.metric is None
            else [format_value(version.mean), format_value(version.best)]
        )
        table.add_row(
            str(number),
            Text(version.trace.digest[:_SHOWN_DIGITS]),
            str(len(version.runs)),
            format_age(version.first_seen),
            format_age(version.last_seen),
            *figures,
            Text("; ".join(_describe(version, is_first=number == 1))),
        )
    console = Console()
    named = "version" if count == 1 else "versions"
    first = statistics.versions[0].trace
    console.print(
        Text.assemble(
            (f"{statistics.name}: {count} {named}", "bold"),
            f" of {first.module}.{first.qualname}",
        )
    )
    console.print(table)
    if with_diff:
        for before, after in pairwise(statistics.versions):
            print_diff_lines(diff_versions(before, after))


def _describe(version: TraceVersion, *, is_first: bool) -> list[str]:
    trace = version.trace
    said = ["first version"] if is_first else []
    if version.lines is not None:
        said.append(format_count(version.lines, "line"))
    elif not is_first:
        said.append("another version")
    said += [change.describe() for change in version.called or ()]
    if version.reach_versions is not None and version.reach_versions > 1:
        said.append(f"its callees had {version.reach_versions} versions")
    if trace.level in _LEVELS:
        said.append(_LEVELS[trace.level])
    return said
