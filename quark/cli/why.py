"""`quark why`: why the result of a run is not that of another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.analyze import FAILED_CHECK
from quark.cli.compare import split_side
from quark.cli.completion import complete_runs
from quark.cli.run_source import RunSource
from quark.cli.store_access import json_option, print_json, storage_option

if TYPE_CHECKING:
    from quark_core.sessions.session import TrainingSession

__all__ = ["why"]


@click.command()
@click.argument("before", metavar="RUN", shell_complete=complete_runs)
@click.argument("after", metavar="[RUN]", required=False, shell_complete=complete_runs)
@storage_option
@click.option("-m", "--metric", metavar="KEY", default=None, help="The metric that it is about.")
@click.option("--fail-on-worse", is_flag=True, help="Exit with status 3 where it is worse.")
@json_option
def why(
    before: str,
    after: str | None,
    storage_dir: Path | None,
    metric: str | None,
    fail_on_worse: bool,
    as_json: bool,
) -> None:
    """Say why the result of the second RUN is not that of the first.

    With one RUN it is held against the last good run of its configuration: the newest
    that completed with a result as good as that of half of them.
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
    first = _open_side(source, before)
    second = None if after is None else _open_side(source, after)
    result = explain_change(first, second, metric)
    if as_json:
        print_json(result.to_dict())
    else:
        from quark.cli.why_view import print_explanation

        print_explanation(result)
    if fail_on_worse and result.verdict == "worse":
        sys.exit(FAILED_CHECK)


def _open_side(source: RunSource, text: str) -> list[TrainingSession]:
    found = dict.fromkeys(str(source.find(part).run.id) for part in split_side(text))
    return [source.open(run_id) for run_id in found]
