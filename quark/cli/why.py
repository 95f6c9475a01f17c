"""`quark why`: why the result of a run is not that of another."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.analysis.explanation.results import describe_change, list_rows, tell_ends
from quark.cli.analysis_view import print_trimmed
from quark.cli.compare import fail_where_worse
from quark.cli.completion import complete_runs
from quark.cli.options import argument, option, takes_options
from quark.cli.store_access import (
    AS_JSON,
    STORAGE_DIR,
    RunSource,
    print_json,
    usage_mistakes,
)
from quark.cli.texts import FOLD, WHOLE, Console, Text, make_grid
from quark.provenance.code_changes import exchange_units
from quark.provenance.code_fingerprints import fingerprint_module
from quark.provenance.normal_form import LEVEL_SYNTAX
from quark.provenance.sources import read_sources
from quark_core.artifacts.payload_folder import OutputFolder, make_file_name
from quark_core.config.arguments import EXCHANGED_FIELD
from quark_core.errors import (
    ArtifactDamagedError,
    ArtifactNotFoundError,
    RunNotFoundError,
)
from quark_core.records.names import split_path
from quark_core.runs.run_ids import shorten_run_id
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark.analysis.explanation.history import PastRun
    from quark.analysis.explanation.results import Cause, ChangeExplanation
    from quark.analysis.explanation.swap_experiments import Exchange
    from quark.provenance.sources import SourceFile
    from quark_core.runs.run_reader import RunReader

_ALGEBRA = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@click.command()
@takes_options
def why(
    *,
    before: str = argument(metavar="[OLD]", shell_complete=complete_runs),
    after: str | None = argument(metavar="NEW", shell_complete=complete_runs),
    storage_dir: Path | None = STORAGE_DIR,
    metric: str | None = option(
        "Metric to explain.",
        "-m",
        metavar="KEY",
        show_default="the objective, else a validation metric, else a training metric",
    ),
    check_runs: int | None = option(
        "Print the runs that would confirm the cause, N for each difference.",
        "--check",
        least=1,
        most=100,
        metavar="N",
    ),
    confirmed: bool = option(
        "With --check: start these runs now, one after another.", "-y", "--yes"
    ),
    fail_on_worse: bool = option("Exit with code 3 if NEW is worse or may be worse."),
    as_json: bool = AS_JSON,
) -> None:
    """Explain why the result of NEW differs from that of OLD.

    Reports if the difference is larger than seed noise, and the first step at which
    the runs diverge. Lists what differs (config, code, data, packages, hardware), what
    is ruled out, what was not recorded, and the likely cause.

    OLD and NEW are each a run ID, unique prefix or name. To compare groups of seeds,
    separate runs with commas: quark why a1,a2,a3 b1,b2,b3. Without OLD, NEW is
    compared with the last good run of its configuration. This is the newest earlier
    run that completed without a critical alert. Its result is at least as good as
    that of NEW, and as that of half of the runs of this configuration.

    Nothing is stored, except the new runs of --check N --yes. They repeat OLD, each
    with one difference of NEW, from the source code that OLD has saved.

    \b
    Exit codes:
      0    explained
      1    a run or the store cannot be read
      2    usage error
      3    with --fail-on-worse: NEW is worse, may be worse, or did not complete
    """  # noqa: D301 - click wants the character
    _load_numpy()
    from quark.analysis.comparison.summary import tell_ends
    from quark.analysis.explanation.engine import explain_change
    from quark.analysis.explanation.history import NothingGotWorseError

    source = RunSource(storage_dir)
    first = source.open_side(before)
    second = None if after is None else source.open_side(after)
    if check_runs is not None and (as_json or (len(first), len(second or ())) != (1, 1)):
        raise click.UsageError("--check needs one run on each side, and does not support --json.")
    try:
        with usage_mistakes():
            result = explain_change(first, second, metric)
    except NothingGotWorseError as error:
        if as_json:
            raise
        click.echo(clean_line(f"{str(error)[:1].upper()}{str(error)[1:]}"))
        return
    if second is None and not as_json:
        good = shorten_run_id(result.before.run_id)
        if result.before.name:
            good += f' "{result.before.name}"'
        click.echo(clean_line(f"Compared with {good}, the last good run of its configuration."))
    if as_json:
        print_json(result.to_dict())
    else:
        print_explanation(result)
    if (
        check_runs is not None
        and second is not None
        and check_causes(result, first[0], second[0], check_runs, confirmed=confirmed)
    ):
        click.echo()
        result = explain_change(first, second, metric)
        print_explanation(result)
    if fail_on_worse:
        ends = ("OLD", result.before), ("NEW", result.after)
        fail_where_worse(
            tell_ends(*ends, running=True),
            is_worse=result.verdict == "worse",
            doubtful=result.metric if result.verdict == "cannot_tell" else None,
        )


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


_MOST_GROUPS = 16
"""Causes, or halves of them, of which runs are made in one go."""

_RUN_ID_BYTES = 8
_NAME_CHARACTERS = 100


def check_causes(
    result: ChangeExplanation,
    before: RunReader,
    after: RunReader,
    runs: int,
    *,
    confirmed: bool,
) -> bool:
    """Print what would be run, and run it where that is confirmed.

    Returns:
        Whether anything was run, so that the answer may be another one now.

    Raises:
        click.ClickException: The sources of a run are not there.
    """
    from quark.analysis.explanation.swap_experiments import list_checkable, split_causes

    checker = _Checker(result, before, after, runs)
    causes = list_checkable(result.causes)
    if not confirmed:
        for parts in split_causes(causes):
            checker.plan(parts)
        click.echo("No runs were started. --yes starts them now, one after another.")
        return False
    checker.isolate(causes)
    return checker.did_run


class _Checker:
    """Makes runs that differ in one thing each, until the guilty one is found or they are many.

    Args:
        result: What is checked.
        before, after: A run of each side.
        runs: How many of each.
    """

    def __init__(
        self,
        result: ChangeExplanation,
        before: RunReader,
        after: RunReader,
        runs: int,
    ) -> None:
        from quark.analysis.explanation.history import find_seed_argument

        self._result, self._before, self._after, self._runs = result, before, after, runs
        assert before.reader is not None
        self._reader = before.reader
        self._stored = self._reader.load_run(str(before.run_id))
        own = next((run for run in self._load_history() if run.run_id == before.run_id), None)
        self._seed = None if own is None else find_seed_argument(own.traits)
        self.did_run = False

    def plan(self, causes: Sequence[Cause]) -> Exchange | None:
        """Print what is run, and return how; None where it cannot be."""
        from quark.analysis.explanation.swap_experiments import describe_check, plan_exchange

        exchange = plan_exchange(self._stored, causes, self._seed)
        click.echo(clean_line(describe_check(causes, self._runs)))
        if exchange.refusal is None:
            return exchange
        click.echo(clean_line(f"  cannot be run: {exchange.refusal}"))
        return None

    def isolate(self, causes: Sequence[Cause]) -> None:
        """Run each alone, of many halves first; then all together where none explains it alone."""
        from quark.analysis.explanation.swap_experiments import split_causes

        waiting = split_causes(causes)
        is_found, groups = False, 0
        while waiting and groups < _MOST_GROUPS:
            parts, *waiting = waiting
            groups += 1
            explains = self._check(parts)
            if len(parts) == 1:
                is_found = is_found or explains is True
            elif explains is not False:
                waiting += split_causes(parts)
        if waiting:
            names = ", ".join(cause.place for parts in waiting for cause in parts)
            click.echo(clean_line(f"Too many differences. Not run: {names}"))
        if not is_found and len(causes) > 1:
            self._check(causes)

    def _check(self, causes: Sequence[Cause]) -> bool | None:
        """Run the first side with these; whether they explain the change, or None."""
        from quark.analysis.explanation.attribution import judge_effect, measure_checks
        from quark.analysis.explanation.swap_experiments import join_places

        exchange = self.plan(causes)
        metric = self._result.metric
        if exchange is None or not _run(exchange, self._before, self._after, self._runs):
            return None
        self.did_run = True
        history = self._load_history()
        own = next((run for run in history if run.run_id == self._before.run_id), None)
        change = None if metric is None else metric.last.difference
        if own is None or not change:
            return None
        found = measure_checks(history, own, str(self._after.run_id), self._result.noise_floor).get(
            join_places(causes)
        )
        standing = "possible" if found is None else judge_effect(found, change)
        return {"probable": True, "unlikely": False}.get(standing)

    def _load_history(self) -> list[PastRun]:
        from quark.analysis.explanation.history import load_history

        return load_history(self._reader, self._stored.run.project_name, self._result.metric_key)


def _run(
    exchange: Exchange,
    before: RunReader,
    after: RunReader,
    runs: int,
) -> bool:
    from quark.analysis.explanation.swap_experiments import refuse_sources

    reader, other = before.reader, after.reader
    assert reader is not None
    assert other is not None
    try:
        kept = read_sources(reader, str(before.run_id))
        taken = read_sources(other, str(after.run_id)) if exchange.code else None
    except (ArtifactNotFoundError, ArtifactDamagedError) as error:
        raise click.ClickException(f"{error}") from None
    if (refusal := refuse_sources(kept)) is not None or kept.main is None:
        raise click.ClickException(f"run {shorten_run_id(str(before.run_id))}: {refusal}")
    with tempfile.TemporaryDirectory(prefix="quark-why-") as name:
        folder = Path(name)
        for file in kept.files:
            _write(folder, file.path, file.data)
        for path, names in exchange.code.items():
            one, two = kept.find(path), None if taken is None else taken.find(path)
            data = _exchange_file(one, two, names)
            if data is None:
                click.echo(
                    clean_line(
                        f"  cannot be run: {path} cannot be merged so that only "
                        f"{', '.join(filter(None, names)) or 'this'} differs"
                    )
                )
                return False
            _write(folder, path, data or None)
        return _start_all(exchange, folder, kept.main, before, after, runs)


def _exchange_file(
    one: SourceFile | None, two: SourceFile | None, names: Sequence[str]
) -> bytes | None:
    """A file of the first side with these functions of the second; b"" where it is taken away."""
    if two is None:
        return b""
    is_whole = one is None or not two.path.endswith(".py")
    if is_whole or one is None or one.text is None or two.text is None:
        return two.data
    text = exchange_units(one.text, two.text, names)
    if text is not None:
        return text.encode()
    # A module that cannot be taken apart is exchanged as a whole, where it is meant so.
    return two.data if tuple(names) == ("",) and not _can_be_read(one.text, two.text) else None


def _can_be_read(*texts: str) -> bool:
    return all(fingerprint_module(text).level == LEVEL_SYNTAX for text in texts)


def _write(folder: Path, path: str, data: bytes | None) -> None:
    """Write a file of the sources, or take it away; never beyond the folder."""
    parts = split_path(path)
    if parts is None or any(make_file_name(part) != part for part in parts):
        raise click.ClickException(f"{path!r} is not a safe path to write.")
    if data is None:
        folder.joinpath(*parts).unlink(missing_ok=True)
        return
    folder.joinpath(*parts).unlink(missing_ok=True)
    with OutputFolder(folder).write(parts) as target:
        target.write(data)


def _start_all(
    exchange: Exchange,
    folder: Path,
    main: str,
    before: RunReader,
    after: RunReader,
    runs: int,
) -> bool:
    from quark.analysis.explanation.attribution import name_check_group
    from quark_core.runs.run_editing import edit_run

    reader = before.reader
    assert reader is not None
    stored = reader.load_run(str(before.run_id))
    process = {} if stored.environment is None else stored.environment.values.get("process") or {}
    where = Path(str(process.get("cwd") or "."))
    group = name_check_group(str(before.run_id), str(after.run_id))
    places = ", ".join(exchange.places)
    done = False
    for number in range(runs):
        run_id = secrets.token_hex(_RUN_ID_BYTES)
        arguments = _seed(exchange, number)
        click.echo(clean_line(f"  {run_id}: {main} {' '.join(arguments)}"))
        status = subprocess.run(
            [sys.executable, str(folder / main), *arguments],
            cwd=where if where.is_dir() else folder,
            env=_make_environment(exchange, folder, run_id),
            stdout=subprocess.DEVNULL,
            check=False,
        ).returncode
        if status:
            click.echo(clean_line(f"  exited with code {status}: no evidence for {places}"))
            return done
        try:
            edit_run(
                run_id,
                # The script gives it the name of the first side, which is to name one run.
                name=f"check: {places}"[:_NAME_CHARACTERS],
                add_groups=group,
                # Nor is it one of the runs whose group the script names.
                remove_groups=reader.load_run(run_id).run.groups,
                fields={EXCHANGED_FIELD: places},
                storage_dir=before.context.storage_dir,
            )
        except RunNotFoundError:
            click.echo("  not in the store of OLD: no evidence")
            return done
        done = True
    return done


def _seed(exchange: Exchange, number: int) -> Sequence[str]:
    arguments = list(exchange.arguments)
    if exchange.seed is not None:
        place, prefix, first = exchange.seed
        arguments[place] = f"{prefix}{first + number}"
    return arguments


def _make_environment(exchange: Exchange, folder: Path, run_id: str) -> dict[str, str]:
    environment = {**os.environ, "QUARK_RUN_ID": run_id, "QUARK_QUIET": "1"}
    known = [str(folder), str(folder / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(part for part in known if part)
    for name, value in exchange.variables.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


_WIDEST = 140  # longer lines are hard to read
_STYLES = {"Probably": "bold red", "Possibly": "yellow", "Unlikely": "dim", "Ruled out": "green"}


def print_explanation(result: ChangeExplanation, *, console: Console | None = None) -> None:
    """Print an explanation.

    Args:
        result: The explanation.
        console: Where to; stdout by default.
    """
    console = console or Console(highlight=False)
    width = min(console.width, _WIDEST) if console.is_terminal else console.width
    for end in tell_ends(result):
        print_trimmed(console, Text(end, "red"), width)
    print_trimmed(console, Text(describe_change(result), "bold"), width)
    said = result.first_difference.summary
    print_trimmed(console, Text(f"{result.reason[:1].upper()}{result.reason[1:]}."), width)
    print_trimmed(console, Text(f"{said[:1].upper()}{said[1:]}."), width)
    rows = list(list_rows(result))
    causes = make_grid(WHOLE, WHOLE, FOLD, FOLD | {"style": "dim"})
    others = make_grid(WHOLE | {"width": 10}, FOLD)
    for row in rows:
        label = Text(row.label, style=_STYLES.get(row.label, ""))
        if row.kind:
            causes.add_row(label, Text(row.kind), Text(row.place), Text(row.words))
        else:
            words = f"  # {row.words}" if row.words else ""
            others.add_row(label, Text(f"{row.place}{words}"))
    for part in (causes, others):
        if part.row_count:
            print_trimmed(console, part, width)
    for note in result.notes:
        print_trimmed(console, Text(note, style="dim"), width)
