"""`quark samples`: the text samples of a run, searched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from quark.cli.options import argument, option, takes_options
from quark.cli.store_access import (
    AS_JSON,
    SOURCE,
    RunSource,
    print_json,
    usage_mistakes,
)
from quark.cli.texts import Console, Text
from quark_core.formatting import format_count
from quark_core.runs.run_ids import shorten_run_id

if TYPE_CHECKING:
    from quark_core.records.columns import Columns

_ROWS = 10
_TEXT_CHARACTERS = 1_000


@click.command()
@takes_options
def samples(
    *,
    run: str = argument(),
    search: str | None = option("Only samples whose texts contain this.", metavar="TEXT"),
    where: tuple[str, ...] = option(
        "Filter: 'reward > 0.5', 'task == math' or 'answer ~ forty' (contains). Repeatable.",
        "-w",
        metavar="CONDITION",
    ),
    name: str | None = option("Only samples of this set.", metavar="SET"),
    step: int | None = option("Only samples of this step.", least=0),
    near: int | None = option("Samples nearest to this step.", least=0),
    sort: str | None = option("Sort by a column; -COLUMN is descending.", metavar="COLUMN"),
    limit: int = option("Number of samples to show.", "-n", least=1, default=_ROWS),
    full: bool = option("Print texts in full."),
    source: RunSource = SOURCE,
    as_json: bool = AS_JSON,
) -> None:
    """List and search a run's text samples, newest first.

    RUN is a run ID, unique prefix or name.
    """
    from quark_core.runs.sample_search import find_samples, order_samples

    reader = source.open(run)
    with usage_mistakes():
        found = find_samples(reader, search=search, where=where, name=name, step=step)
    is_descending = sort is not None and sort.startswith("-")
    column = sort[1:] if sort is not None and is_descending else sort
    shown = found.take(order_samples(found, column, descending=is_descending, near=near)[:limit])
    if as_json:
        print_json([record.to_dict() for record in shown.to_records()])
        return
    is_asked = search or where or name or step is not None
    if not found.count:
        what = "no matching text samples" if is_asked else "no text samples"
        click.echo(f"Run {shorten_run_id(str(reader.run_id))} of {source.store} has {what}.")
        return

    console = Console()
    _print_rows(console, shown, characters=None if full else _TEXT_CHARACTERS)
    rest = "" if shown.count == found.count else f" of {found.count}; --limit shows more"
    click.echo(f"{format_count(shown.count, 'sample')}{rest}.")


def _print_rows(console: Console, rows: Columns, *, characters: int | None) -> None:

    for record in rows.to_records():
        sample: Any = record
        head = Text.assemble((f"{sample.set_name}", "bold"))
        for label, value in (
            ("step", sample.step),
            ("epoch", sample.epoch),
            ("reward", None if sample.reward is None else f"{sample.reward:.6g}"),
        ):
            if value is not None:
                head.append(f"  {label} ", "dim").append(str(value))
        console.print(head)
        texts = {"prompt": sample.prompt, "completion": sample.completion, **(sample.columns or {})}
        for column, value in texts.items():
            if value is None:
                continue
            text = value if isinstance(value, str) else str(value)
            left = 0 if characters is None else max(0, len(text) - characters)
            line = Text("  ").append(f"{column}: ", "cyan")
            line.append(text if not left else text[:characters], lines=True)
            if left:
                line.append(f" … {left} more characters; --full prints them", "dim")
            lost = (sample.cut or {}).get(column)
            if lost is not None:
                line.append(f" (truncated when logged, from {lost} characters)", "dim")
            console.print(line)
        console.print()
