"""`quark why`: why the result of a run is not that of another."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.analyze import FAILED_CHECK
from quark.cli.compare import fail_on_ends
from quark.cli.completion import complete_runs
from quark.cli.run_source import RunSource
from quark.cli.store_access import json_option, print_json, storage_option
from quark_core.runs.run_ids import shorten_run_id

if TYPE_CHECKING:
    from quark.analysis.explanation.results import ChangeExplanation

_ALGEBRA = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@click.command()
@click.argument("before", metavar="[OLD]", shell_complete=complete_runs)
@click.argument("after", metavar="NEW", required=False, shell_complete=complete_runs)
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
@click.option(
    "--fail-on-worse",
    is_flag=True,
    help="Exit with status 3 where it is worse or may be, or a run did not complete.",
)
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
    """Explain why the result of NEW differs from that of OLD.

    The order is that of time; `quark compare NEW OLD` takes the new run first.
    Without OLD, NEW is compared with the last good run of its configuration: the newest
    that began before it and completed, with a result no worse than its own and than that
    of half of them, and with no critical finding. Where all ended worse, nothing got worse.
    Each is a run ID, unique prefix or name; several by comma are a group,
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
      3    with --fail-on-worse: the second is worse, that is inconclusive and it
           ends worse by more than the tolerance, or a run did not complete
    """  # noqa: D301 - click wants the character
    _load_numpy()
    from quark.analysis.comparison.summary import tell_ends
    from quark.analysis.explanation.engine import explain_change
    from quark.analysis.explanation.history import NothingGotWorseError
    from quark_core.errors import SchemaValidationError
    from quark_core.system.terminal_text import clean_line

    source = RunSource(storage_dir)
    first = source.open_side(before)
    second = None if after is None else source.open_side(after)
    try:
        result = explain_change(first, second, metric)
    except SchemaValidationError as error:
        raise click.UsageError(str(error)) from None
    except NothingGotWorseError as error:
        if as_json:
            raise
        click.echo(clean_line(f"{str(error)[:1].upper()}{str(error)[1:]}"))
        return
    if second is None and not as_json:
        good = shorten_run_id(result.before.run_id)
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
    if fail_on_worse:
        ends = ("the first", result.before), ("the second", result.after)
        fail_on_ends(tell_ends(*ends, running=True))
        _refuse_worse(result)


def _refuse_worse(result: ChangeExplanation) -> None:
    from quark.analysis.comparison.significance import may_be_worse
    from quark.cli.compare import tell_doubt

    if result.verdict == "worse":
        sys.exit(FAILED_CHECK)
    if result.verdict == "cannot_tell" and result.metric and may_be_worse(result.metric):
        click.echo(tell_doubt(result.metric), err=True)
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
