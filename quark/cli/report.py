"""`quark report`: runs as one HTML file that works without a server."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.completion import complete_runs
from quark.cli.options import FILE, argument, option, takes_options
from quark.cli.store_access import (
    AS_JSON,
    SOURCE,
    RunSource,
    find_run,
    print_json,
    write_file,
)
from quark_core.formatting import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quark_core.backends.contract import SupportsRead
    from quark_core.backends.run_summary import StoredRun


def _print_short(reader: SupportsRead, found: Sequence[StoredRun], *, as_json: bool) -> None:
    from quark_core.runs.run_report import read_short_report

    reports = [read_short_report(reader, stored) for stored in found]
    if as_json:
        print_json(reports[0].to_dict() if len(reports) == 1 else [r.to_dict() for r in reports])
        return
    click.echo("\n\n".join(map(str, reports)))


@click.command()
@takes_options
def report(
    *,
    runs: tuple[str, ...] = argument(metavar="RUN...", shell_complete=complete_runs, required=True),
    source: RunSource = SOURCE,
    output: Path = option("File to write.", "-o", type=FILE, default=Path("report.html")),
    no_config: bool = option("Leave out config, environment, command line and paths."),
    no_logs: bool = option("Leave out events and log lines."),
    short: bool = option("Print config, metrics, timers and errors instead of writing a file."),
    as_json: bool = AS_JSON,
) -> None:
    """Write a standalone HTML report.

    RUN is a run ID, unique prefix or name. The report shows alerts with their
    curves, health, phases, up to 60 curves, layer maps, config and the newest log
    lines. With several runs, it also compares each run with the first.

    The file needs no server and no network. Its header lists what was left out.
    Nothing is stored: a run without an analysis is analyzed in memory.
    """
    from quark.cli.analyze import show_warnings
    from quark.page.report import compose_report
    from quark.page.report_contents import ReportOptions

    with closing(source.open_page_source()) as page:
        found = [find_run(page.reader, run, page.place) for run in runs]
        if short:
            _print_short(page.reader, found, as_json=as_json)
            return
        chosen = [(page, str(stored.run.id)) for stored in found]
        with show_warnings():
            made = compose_report(chosen, ReportOptions(config=not no_config, logs=not no_logs))
    path = write_file(output, "-o", made.save)
    if as_json:
        print_json({"path": str(path), "size_bytes": path.stat().st_size, **made.to_dict()})
        return
    click.echo(f"Wrote {path} ({format_bytes(path.stat().st_size)}).")
