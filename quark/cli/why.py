"""`quark why`: why the result of a run is not that of another."""

from __future__ import annotations

import os
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
    from quark_core.analysis.explanation.results import ChangeExplanation
    from quark_core.sessions.session import TrainingSession

__all__ = ["why"]

_ALGEBRA = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@click.command()
@click.argument("before", metavar="RUN", shell_complete=complete_runs)
@click.argument("after", metavar="[RUN]", required=False, shell_complete=complete_runs)
@storage_option
@click.option("-m", "--metric", metavar="KEY", default=None, help="The metric that it is about.")
@click.option(
    "--check",
    "check_runs",
    type=click.IntRange(1, 100),
    metavar="N",
    default=None,
    help="Say which runs would settle it, N of each; with --yes run them.",
)
@click.option("-y", "--yes", "confirmed", is_flag=True, help="With --check: run them, here.")
@click.option("--fail-on-worse", is_flag=True, help="Exit with status 3 where it is worse.")
@json_option
def why(
    before: str,
    after: str | None,
    storage_dir: Path | None,
    metric: str | None,
    check_runs: int | None,
    confirmed: bool,
    fail_on_worse: bool,
    as_json: bool,
) -> None:
    """Say why the result of the second RUN is not that of the first.

    With one RUN it is held against the last good run of its configuration: the newest
    that completed with a result as good as that of half of them.
    Each is an id, the beginning of one, or a name; several by comma are a group,
    such as the seeds of one configuration: quark why a1,a2,a3 b1,b2,b3.
    Nothing is stored. --check N says which runs would settle it: the first side
    again, with one difference of the second. With --yes they are run one after the
    other, out of the sources that the first run has kept, and the answer is given
    anew with them as evidence.

    \b
    Exit status:
      0    explained
      1    a run or the store cannot be read
      2    a mistake in the command line
      3    with --fail-on-worse: the second is worse
    """  # noqa: D301 - click wants the character
    _load_numpy()
    from quark_core.analysis.explanation.engine import explain_change
    from quark_core.system.terminal_text import clean_line

    source = RunSource(storage_dir)
    first = _open_side(source, before)
    second = None if after is None else _open_side(source, after)
    result = explain_change(first, second, metric)
    if second is None and not as_json:
        good = result.before.run_id
        if result.before.name:
            good += f' "{result.before.name}"'
        click.echo(clean_line(f"Held against {good}, the last good run of its configuration."))
    _print(result, as_json=as_json)
    if check_runs is not None:
        if as_json or len(first) > 1 or second is None or len(second) > 1:
            raise click.UsageError("--check takes one run on each side, and no --json")
        from quark.cli.why_check import check_causes

        if check_causes(result, first[0], second[0], check_runs, confirmed=confirmed):
            click.echo()
            result = explain_change(first, second, metric)
            _print(result, as_json=False)
    if fail_on_worse and result.verdict == "worse":
        sys.exit(FAILED_CHECK)


def _load_numpy() -> None:
    """Load numpy with one thread for its algebra, which is of small matrices.

    Several would wait for each other on a machine that trains on all cores. What this process
    starts later has the variables as they were.
    """
    added = [name for name in _ALGEBRA if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        import numpy as np  # noqa: F401 - its library looks at the variables when it is loaded
    finally:
        for name in added:
            del os.environ[name]


def _print(result: ChangeExplanation, *, as_json: bool) -> None:
    if as_json:
        print_json(result.to_dict())
        return
    from quark.cli.why_view import print_explanation

    print_explanation(result)


def _open_side(source: RunSource, text: str) -> list[TrainingSession]:
    found = dict.fromkeys(str(source.find(part).run.id) for part in split_side(text))
    return [source.open(run_id) for run_id in found]
