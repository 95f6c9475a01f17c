"""`quark why`: why the result of a run is not that of another."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from quark.cli.analyze import FAILED_CHECK
from quark.cli.compare import split_side
from quark.cli.completion import complete_runs
from quark.cli.run_source import RunSource
from quark.cli.store_access import json_option, print_json, storage_option

__all__ = ["why"]


@click.command()
@click.argument("before", metavar="RUN", shell_complete=complete_runs)
@click.argument("after", metavar="RUN", shell_complete=complete_runs)
@storage_option
@click.option("-m", "--metric", metavar="KEY", default=None, help="The metric that it is about.")
@click.option("--fail-on-worse", is_flag=True, help="Exit with status 3 where it is worse.")
@json_option
def why(
    before: str,
    after: str,
    storage_dir: Path | None,
    metric: str | None,
    fail_on_worse: bool,
    as_json: bool,
) -> None:
    """Say why the result of the second RUN is not that of the first.

    Each is an id, the beginning of one, or a name; several by comma are a group,
    such as the seeds of one configuration: quark why a1,a2,a3 b1,b2,b3.
    Nothing is stored.

    \b
    Exit status:
      0    explained
      1    a run or the store cannot be read
      2    a mistake in the command line
      3    with --fail-on-worse: the second is worse
    """  # noqa: D301 - click wants the character
    from quark_core.analysis.explanation.engine import explain_change

    source = RunSource(storage_dir)
    sides = [
        [source.open(run_id) for run_id in dict.fromkeys(str(source.find(p).run.id) for p in side)]
        for side in (split_side(before), split_side(after))
    ]
    result = explain_change(sides[0], sides[1], metric)
    if as_json:
        print_json(result.to_dict())
    else:
        from quark.cli.why_view import print_explanation

        print_explanation(result)
    if fail_on_worse and result.verdict == "worse":
        sys.exit(FAILED_CHECK)
