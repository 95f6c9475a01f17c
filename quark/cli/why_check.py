"""Runs that settle why a result changed: the first side with one difference of the second."""

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

from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark_core.analysis.explanation.checks import Exchange
    from quark_core.analysis.explanation.results import ChangeExplanation
    from quark_core.sessions.session import TrainingSession

__all__ = ["check_causes"]

_RUN_ID_BYTES = 8
_NAME_CHARACTERS = 100


def check_causes(
    result: ChangeExplanation,
    before: TrainingSession,
    after: TrainingSession,
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
    from quark_core.analysis.explanation.checks import describe_check, plan_exchange

    stored = before.open_run.reader.load_run(str(before.run_id))  # type: ignore[union-attr]
    by_place = {cause.place: cause for cause in result.causes}
    did_run = False
    for check in result.checks:
        parts = [by_place[place] for place in check.place.split(", ") if place in by_place]
        exchange = plan_exchange(stored, parts)
        click.echo(clean_line(describe_check(parts, runs)))
        if exchange.refusal is not None:
            click.echo(clean_line(f"  cannot be run: {exchange.refusal}"))
            continue
        if not confirmed:
            continue
        did_run = _run(exchange, before, after, runs) or did_run
    if not confirmed:
        click.echo("Nothing was run; --yes runs them, here, one after the other.")
    return did_run


def _run(
    exchange: Exchange,
    before: TrainingSession,
    after: TrainingSession,
    runs: int,
) -> bool:
    from quark_core.errors import ArtifactDamagedError, ArtifactNotFoundError
    from quark_core.provenance.kept_sources import read_sources

    reader, other = before.open_run.reader, after.open_run.reader
    assert reader is not None
    assert other is not None
    try:
        kept = read_sources(reader, str(before.run_id))
        taken = read_sources(other, str(after.run_id)) if exchange.files else None
    except (ArtifactNotFoundError, ArtifactDamagedError) as error:
        raise click.ClickException(f"{error}") from None
    if kept.main is None or kept.entry != "script":
        raise click.ClickException(
            f"run {before.run_id} was begun as {kept.entry or 'something unknown'}, and only "
            "scripts can be started again"
        )
    altered = [file.path for file in kept.files if not file.is_exact]
    if altered:
        raise click.ClickException(
            f"not all sources of run {before.run_id} are as they ran: {', '.join(altered[:5])}"
        )
    with tempfile.TemporaryDirectory(prefix="quark-why-") as name:
        folder = Path(name)
        for file in kept.files:
            _write(folder, file.path, file.data)
        for path in exchange.files:
            source = None if taken is None else taken.find(path)
            _write(folder, path, None if source is None else source.data)
        return _start_all(exchange, folder, kept.main, before, after, runs)


def _write(folder: Path, path: str, data: bytes | None) -> None:
    """Write a file of the sources, or take it away; never beyond the folder."""
    from quark_core.artifacts.output_folder import OutputFolder, make_file_name
    from quark_core.records.artifact_layout import split_path

    parts = split_path(path)
    if parts is None or any(make_file_name(part) != part for part in parts):
        raise click.ClickException(f"{path!r} is no path that is written")
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
    before: TrainingSession,
    after: TrainingSession,
    runs: int,
) -> bool:
    from quark_core.analysis.explanation.attribution import name_check_group
    from quark_core.config.belonging import EXCHANGED_FIELD
    from quark_core.errors import RunNotFoundError
    from quark_core.runs.run_editing import edit_run

    reader = before.open_run.reader
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
            click.echo(f"  it ended with status {status}")
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
            click.echo("  it is not in the store of the first run, so it is no evidence")
            return done
        done = True
    return done


def _seed(exchange: Exchange, number: int) -> Sequence[str]:
    arguments = list(exchange.arguments)
    if exchange.seed is not None:
        place, first = exchange.seed
        head, equals, _ = arguments[place].partition("=")
        text = str(first + number)
        arguments[place] = f"{head}={text}" if equals else text
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
