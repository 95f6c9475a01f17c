"""`quark import`: take in the runs of other tools."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.options import Combined, argument, option, takes_options
from quark.cli.store_access import AS_JSON, STORAGE_DIR, print_json
from quark.cli.texts import FOLD, PLAIN, Console, Text, make_table
from quark_core.config.arguments import check_label, check_tags, resolve_storage_dir
from quark_core.formatting import format_count
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark.importing.importer import RunImport
    from quark.importing.neutral_run import ForeignRun

_LEAST_INTERVAL_S = 0.1
# As of other mistakes in the command line.
_NOTHING_READ = 2


# By the name: what the command takes, and what it says of itself.
_PLACES = {
    "tensorboard": (
        "directory",
        """Import runs from TensorBoard event files.

        Reads the event files under DIRECTORY. Each folder is a run. Folders named train,
        validation, test and similar are one run, and the folder is part of the metric's name.
        """,
    ),
    "aim": (
        "directory",
        """Import runs from an Aim repository.

        DIRECTORY is the folder that contains .aim.
        """,
    ),
    "ato": (
        "path",
        """Import experiments from Ato's SQLite databases.

        PATH is a database, or a folder with databases.
        """,
    ),
    "clearml": (
        "path",
        """Import runs from ClearML's offline archives.

        PATH is an archive or a folder with archives, such as ~/.clearml/cache/offline.
        """,
    ),
    "comet": (
        "path",
        """Import runs from Comet's offline archives.

        PATH is an archive of OfflineExperiment, or a folder with archives.
        """,
    ),
    "track": (
        "path",
        """Import trials from Track's files.

        PATH is a file that Track wrote (file:FILE.json), or a folder with such files.
        """,
    ),
    "trackio": (
        "directory",
        """Import runs from Trackio's databases.

        DIRECTORY is the folder of the databases, such as ~/.cache/huggingface/trackio.
        """,
    ),
    "wandb": (
        "directory",
        """Import runs from W&B's local files.

        Reads the online and offline runs under DIRECTORY, such as ./wandb, and the tables (.csv)
        that W&B exports.
        """,
    ),
}


@click.group("import")
def import_runs() -> None:
    """Import runs from TensorBoard, W&B, MLflow and others.

    Imports metrics, config, tags, notes, times, states and files. If a run was
    imported before, only new records are added. Data that cannot be imported is
    listed.
    """


_CHOSEN: Any = Combined(
    dict,
    {
        "storage_dir": (Path | None, STORAGE_DIR),
        "project": (
            str | None,
            option("Project of all runs.", "-p", show_default="the project in the tool"),
        ),
        "tags": (tuple[str, ...], option("Tag to add to each run. Repeatable.", "-t", "--tag")),
        "watch": (bool, option("Continue to import new records until Ctrl-C.")),
        "interval_s": (
            float,
            option(
                "With --watch: seconds between two checks.",
                "--interval",
                least=_LEAST_INTERVAL_S,
                default=5.0,
            ),
        ),
        "as_json": (bool, AS_JSON),
    },
)
"""Options of every tool's command."""


def _add_command(tool: str, kind: str, told: str) -> None:
    declared = argument(metavar=kind.upper())

    @import_runs.command(tool, help=told)
    @takes_options
    def take(*, place: Path = declared, chosen: dict[str, Any] = _CHOSEN) -> None:
        source = import_module(f"quark.importing.sources.{tool}")
        find = partial(source.find_runs, place, project=chosen["project"])
        run_import(tool, find, **chosen)


for _tool, (_kind, _told) in _PLACES.items():
    _add_command(_tool, _kind, _told)


@import_runs.command("csv")
@takes_options
def csv_files(
    *,
    path: Path = argument(),
    step: str | None = option("Column with the step.", show_default="found by its name"),
    moment: str | None = option(
        "Column with the time.", "--time", show_default="found by its name"
    ),
    run_column: str | None = option(
        "Column that distinguishes runs.", show_default="found by its name"
    ),
    chosen: dict[str, Any] = _CHOSEN,
) -> None:
    """Import metrics from CSV files.

    PATH is a CSV file, or a folder with CSV files. A row is one point, or a column
    is one metric. Exports of W&B, TensorBoard and MLflow, logs of Lightning and
    Keras, and Quark's CSV mirror are recognized.
    """
    from quark.importing.sources.csv import ColumnChoice, find_runs

    choice, project = ColumnChoice(step, moment, run_column), chosen["project"]
    run_import("csv", lambda: find_runs(path, choice, project=project), **chosen)


@import_runs.command()
@takes_options
def mlflow(
    *,
    uri: str = argument(),
    experiments: tuple[str, ...] = option(
        "Only this experiment. Repeatable.", "-e", "--experiment"
    ),
    limit: int | None = option("Import only the newest N runs.", "-n", least=1),
    chosen: dict[str, Any] = _CHOSEN,
) -> None:
    """Import runs from MLflow.

    URI is http://…, sqlite:///… or a folder with MLflow's files.
    """
    from quark.importing.sources.mlflow import find_runs

    run_import("mlflow", lambda: find_runs(uri, experiments=experiments, limit=limit), **chosen)


@import_runs.command()
@takes_options
def neptune(
    *,
    directory: Path = argument(),
    files: Path | None = option("Folder with the exported files."),
    step_multiplier: int = option("Factor for steps, if they have fractions.", least=1, default=1),
    chosen: dict[str, Any] = _CHOSEN,
) -> None:
    """Import runs from Neptune's exported Parquet files."""
    from quark.importing.sources.neptune import find_runs

    project = chosen["project"]
    run_import(
        "neptune",
        lambda: find_runs(directory, files=files, step_multiplier=step_multiplier, project=project),
        **chosen,
    )


def run_import(
    tool: str,
    find: Callable[[], Iterable[ForeignRun]],
    *,
    storage_dir: Path | None,
    project: str | None,
    tags: tuple[str, ...],
    watch: bool,
    interval_s: float,
    as_json: bool,
) -> None:
    """Import what is found, and say what has come; exit status 1 where a run failed.

    Where nothing can be read the status is 2, and nothing is made.

    Args:
        tool: The tool.
        find: Finds its runs; with `watch` again and again.
        storage_dir, project, tags, watch, interval_s, as_json: As the options.
    """
    from quark.importing.importer import ImportOptions, import_all, open_intake, watch_all

    root = resolve_storage_dir(storage_dir)
    asked = ImportOptions(
        project=None if project is None else check_label(project, "project"),
        tags=check_tags(tags),
    )
    began_s = time.monotonic()
    found, broken = _find_first(tool, find, is_awaited=watch)
    if not found and not watch:
        results = broken
    else:
        with open_intake(root, tool, asked) as intake:
            if watch:
                results = watch_all(intake, find, interval_s, None if as_json else _say_progress)
            else:
                results = broken + import_all(intake, lambda: found)
    if as_json:
        print_json({"tool": tool, "runs": [result.to_dict() for result in results]})
    else:
        _print_results(results, time.monotonic() - began_s, root)
    if any(result.failure for result in results):
        sys.exit(1 if any(result.run_id for result in results) else _NOTHING_READ)


def _find_first(
    tool: str, find: Callable[[], Iterable[ForeignRun]], *, is_awaited: bool
) -> tuple[Iterable[ForeignRun], list[RunImport]]:
    """The runs from the first one on that can be read, and those before it.

    Args:
        tool: The tool.
        find: Finds its runs.
        is_awaited: Runs may come later.

    Raises:
        ImportFailure: There is no such place, or no run there.
    """
    from quark.importing.importer import RunImport
    from quark.importing.neutral_run import ImportFailure

    broken: list[RunImport] = []
    runs = iter(find())
    for run in runs:
        try:
            run.describe()
        except ImportFailure as error:
            broken.append(RunImport(identity=run.key, failure=str(error)))
        except Exception:  # noqa: BLE001 - what is read is anybody's: it is told as it is taken
            return chain([run], runs), broken
        else:
            return chain([run], runs), broken
    if not broken and not is_awaited:
        raise ImportFailure(f"no runs of {tool} found at this place")
    return (), broken


def _say_progress(result: RunImport) -> None:
    told = (
        result.failure
        or f"{format_count(result.points, 'point')}, {format_count(result.files, 'file')}"
    )
    click.echo(clean_line(f"{result.name or result.identity}: {told}"), err=True)


def _print_results(results: list[RunImport], took_s: float, root: Path) -> None:

    console = Console()
    if not results:
        console.print("No runs imported.")
        return
    table = make_table(
        {("run", "name", "project"): PLAIN, _COUNTS: {"justify": "right"}, "": PLAIN}
    )
    for one in results:
        state = one.failure or ("new" if one.is_new else "" if one.is_changed else "nothing new")
        table.add_row(
            Text((one.run_id or "")[:12]),
            Text(one.name or one.identity),
            Text(one.project or ""),
            *(f"{count:,}" for count in (one.points, one.records, one.files)),
            Text(state),
        )
    console.print(table)
    points = sum(one.points for one in results)
    console.print(f"{format_count(points, 'point')} in {took_s:.1f} s, under {root}", markup=False)
    _print_losses(results, console)


def _print_losses(results: list[RunImport], console: Any) -> None:

    if not any(one.losses for one in results):
        return
    table = make_table({("run", "what", "name", "count", "why"): FOLD}, title="Not imported")
    for one in results:
        for loss in one.losses:
            texts = (one.name or one.identity, loss.kind, loss.name, str(loss.count), loss.reason)
            table.add_row(*map(Text, texts))
    console.print(table)


_COUNTS = ("points", "records", "files")
