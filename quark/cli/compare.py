"""`quark compare`: what differs between two runs, or groups of runs, and what that means."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.analyze import FAILED_CHECK, show_warnings
from quark.cli.command_groups import LongInHelp
from quark.cli.completion import complete_runs
from quark.cli.run_source import RunSource, backend_option
from quark.cli.store_access import json_option, print_json, storage_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quark.analysis.comparison.results import MetricDiff
    from quark.analysis.config import ComparisonEngineConfig
    from quark_core.runs.run_reader import RunReader


@click.command()
@click.argument("primary", metavar="RUN", shell_complete=complete_runs)
@click.argument("reference", metavar="BASELINE", shell_complete=complete_runs)
@storage_option
@backend_option
@click.option(
    "--reference-backend",
    metavar="URI",
    default=None,
    help="Read only the reference from here, and the primary from the store or --backend.",
)
@click.option("--baseline", is_flag=True, help="The second side is the baseline.")
@click.option(
    "-t",
    "--target",
    "targets",
    cls=LongInHelp,
    type=(str, click.Choice(("at_least", "at_most")), float),
    metavar="KEY at_least|at_most VALUE",
    multiple=True,
    help="Say when each side's metric reached a value; repeat for several.",
)
@click.option(
    "--fail-on-worse",
    is_flag=True,
    help="Exit with status 3 where a metric is worse or may be, or a run did not complete.",
)
@json_option
def compare(
    primary: str,
    reference: str,
    storage_dir: Path | None,
    backend: str | None,
    reference_backend: str | None,
    baseline: bool,
    targets: tuple[tuple[str, str, float], ...],
    fail_on_worse: bool,
    as_json: bool,
) -> None:
    """Compare RUN, the primary, with BASELINE, the reference.

    The order is the new run first; `quark why OLD NEW` takes that of time.

    Each is a run ID, unique prefix or name; several by comma are a group,
    such as the seeds of one configuration: quark compare a1,a2,a3 b1,b2,b3.
    Each run counts with the last value of its own curve. Better and worse are
    said of the primary, and only where more than chance can be seen: with one
    run a side the answer is inconclusive. A run that broke off is worse or
    inconclusive; with --fail-on-worse it fails, and so does one that goes on.
    Nothing is stored; a run that was not analyzed is analyzed in memory. With
    --backend both sides are another tool's, with --reference-backend the second
    one is.

    \b
    Exit status:
      0    compared; nothing is worse and all runs completed, or --fail-on-worse
           was not given
      1    a run or the store cannot be read
      2    a mistake in the command line
      3    with --fail-on-worse: a metric of the primary is worse, the main one is
           inconclusive and ends worse by more than the tolerance, or a run did
           not complete
    """  # noqa: D301 - click wants the character
    from quark.analysis.comparison.engine import ComparisonEngine

    config = _configure(targets)
    source = other = RunSource(storage_dir, backend)
    if reference_backend is not None:
        other = RunSource(storage_dir, reference_backend)
    first, second = source.open_side(primary), other.open_side(reference)
    _check_targets(targets, [*first, *second])
    with show_warnings():
        result = ComparisonEngine.compare_runs(first, second, baseline=baseline, config=config)
    if as_json:
        print_json(result.to_dict())
    else:
        from quark.cli.comparison_view import print_comparison
        from quark_core.system.terminal_text import clean_line

        print_comparison(result, config.metric_targets)
        if source is other and backend is None:
            # Settings are compared here, not functions and data.
            said = f"Code, data, and what is to blame: quark why {reference} {primary}"
            click.echo(clean_line(said))
    if fail_on_worse:
        from quark.analysis.comparison.summary import tell_ends

        compared = ("the primary", result.primary), ("the reference", result.reference)
        fail_on_ends(tell_ends(*compared, running=True))
        _refuse_worse(result.metric_diffs)


def fail_on_ends(ends: Sequence[str]) -> None:
    """End with status 3 where a run of a comparison did not complete, and say which."""
    from quark_core.system.terminal_text import clean_line

    for end in ends:
        click.echo(clean_line(f"quark: --fail-on-worse: {end}"), err=True)
    if ends:
        sys.exit(FAILED_CHECK)


def _refuse_worse(diffs: Sequence[MetricDiff]) -> None:
    """Exit where a metric is worse, or where the main one may be and nobody can tell."""
    from quark.analysis.comparison.significance import may_be_worse

    if any(diff.verdict == "worse" for diff in diffs):
        sys.exit(FAILED_CHECK)
    for diff in diffs:
        if diff.headline and may_be_worse(diff):
            click.echo(tell_doubt(diff), err=True)
            sys.exit(FAILED_CHECK)


def tell_doubt(diff: MetricDiff) -> str:
    """Why a check fails although nobody can tell that the metric is worse."""
    from quark_core.records.names import decode_name
    from quark_core.system.terminal_text import clean_line

    ends = (
        "no number" if value is None else f"{value:.4g}"
        for value in (diff.last.primary, diff.last.reference)
    )
    return clean_line(
        f"{decode_name(diff.metric_key)} ends at {' against '.join(ends)}: nobody can tell that "
        f"it is not worse ({diff.reason})"
    )


def _check_targets(targets: Sequence[tuple[str, str, float]], runs: Sequence[RunReader]) -> None:
    """Refuse a target of a metric that none of the runs has."""
    from quark_core.errors import SchemaValidationError
    from quark_core.runs.reading import refuse_unknown_metric
    from quark_core.runs.run_search import summarize_run

    if not targets:
        return
    known: dict[str, None] = {}
    for run in runs:
        if run.reader is not None:
            known.update(dict.fromkeys(summarize_run(run.reader, str(run.run_id)).metrics))
    for key, _, _ in targets:
        try:
            refuse_unknown_metric(key, known, "--target", "none of the runs")
        except SchemaValidationError as error:
            raise click.UsageError(str(error).replace("has no", "has", 1)) from None


def _configure(targets: Sequence[tuple[str, str, float]]) -> ComparisonEngineConfig:
    from quark.analysis.config import ComparisonEngineConfig, MetricTargetSpec
    from quark_core.errors import SchemaValidationError

    try:
        return ComparisonEngineConfig(
            metric_targets=tuple(
                MetricTargetSpec(key, value, "at_least" if word == "at_least" else "at_most")
                for key, word, value in targets
            )
        )
    except SchemaValidationError as error:
        raise click.UsageError(f"--target: {error}") from None
