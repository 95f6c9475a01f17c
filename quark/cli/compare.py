"""`quark compare`: what differs between two runs, or groups of runs, and what that means."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.analyze import FAILED_CHECK, show_warnings
from quark.cli.completion import complete_runs
from quark.cli.run_source import RunSource, backend_option
from quark.cli.store_access import json_option, print_json, storage_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quark_core.analysis.comparison.config import ComparisonEngineConfig
    from quark_core.sessions.session import TrainingSession

__all__ = ["compare", "split_side"]


@click.command()
@click.argument("primary", metavar="RUN", shell_complete=complete_runs)
@click.argument("reference", metavar="RUN", shell_complete=complete_runs)
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
    type=(str, click.Choice(("at_least", "at_most")), float),
    metavar="KEY at_least|at_most VALUE",
    multiple=True,
    help="Say when each side's metric reached a value; repeat for several.",
)
@click.option("--fail-on-worse", is_flag=True, help="Exit with status 3 where a metric is worse.")
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
    """Compare a RUN, the primary, with another one, the reference.

    Each is an id, the beginning of one, or a name; several by comma are a group,
    such as the seeds of one configuration: quark compare a1,a2,a3 b1,b2,b3.
    Better and worse are said of the primary, and only where more than chance
    can be seen. Nothing is stored; a run that was not analyzed is analyzed in
    memory. With --backend both sides are another tool's, with
    --reference-backend the second one is.

    \b
    Exit status:
      0    compared; nothing is worse, or --fail-on-worse was not given
      1    a run or the store cannot be read
      2    a mistake in the command line
      3    a metric of the primary is worse
    """  # noqa: D301 - click wants the character
    from quark_core.analysis.comparison.engine import ComparisonEngine

    config = _configure(targets)
    sides = split_side(primary), split_side(reference)
    source = other = RunSource(storage_dir, backend)
    if reference_backend is not None:
        other = RunSource(storage_dir, reference_backend)
    first, second = _open_runs(source, sides[0]), _open_runs(other, sides[1])
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
    if fail_on_worse and any(diff.verdict == "worse" for diff in result.metric_diffs):
        sys.exit(FAILED_CHECK)


def _check_targets(
    targets: Sequence[tuple[str, str, float]], runs: Sequence[TrainingSession]
) -> None:
    """Refuse a target of a metric that none of the runs has, where a name is near it."""
    from quark_core.runs.near_names import describe_unknown_metric
    from quark_core.runs.reading import encode_key
    from quark_core.runs.searching import summarize_run

    if not targets:
        return
    known: dict[str, None] = {}
    for run in runs:
        reader = run.open_run.reader
        if reader is not None:
            known.update(dict.fromkeys(summarize_run(reader, str(run.run_id)).metrics))
    for key, _, _ in targets:
        said = describe_unknown_metric(key, known)
        if said is not None and encode_key(key, "--target") not in known:
            raise click.UsageError(f"--target: none of the runs {said}".replace("has no", "has", 1))


def _configure(targets: Sequence[tuple[str, str, float]]) -> ComparisonEngineConfig:
    from quark_core.analysis.comparison.config import ComparisonEngineConfig, MetricTargetSpec
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


def split_side(text: str) -> list[str]:
    """The runs of one side, given by comma."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise click.UsageError(f"RUN {text!r}: between two commas there must be a run")
    return parts


def _open_runs(source: RunSource, side: Sequence[str]) -> list[TrainingSession]:
    found = dict.fromkeys(str(source.find(part).run.id) for part in side)
    return [source.open(run_id) for run_id in found]
