"""`quark sweep`: opens a sweep, runs a command for each of its trials, shows and steers it."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from quark.cli.command_groups import SuggestingGroup
from quark.cli.completion import complete_metrics, complete_projects, complete_sweeps
from quark.cli.options import Combined, argument, option, takes_options
from quark.cli.store_access import (
    AS_JSON,
    STORAGE_DIR,
    print_json,
    usage_mistakes,
)
from quark.cli.texts import Console
from quark_core.config.arguments import resolve_storage_dir
from quark_core.errors import SchemaValidationError
from quark_core.runs.run_ids import name_store
from quark_core.system.terminal_text import clean_line

if TYPE_CHECKING:
    from quark.sweeps.sweep import Sweep
    from quark_core.backends.coordination import SupportsCoordination
    from quark_core.records.sweeps import StoredSweep, StoredTrial, SweepState

F = TypeVar("F", bound=Callable[..., Any])

_SHOWN_TRIALS = 20
_MOST_WORKERS = 256
_MOST_NAMED = 10
_NEAR = 3


class _Sweeps(SuggestingGroup):
    """`quark sweep` alone shows the sweeps there are."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["show"])


@click.group(cls=_Sweeps)
def sweep() -> None:
    """Search hyperparameters with any number of workers.

    \b
    quark sweep new lr-search -p digits --set lr=log:1e-5:1e-1 --metric val/acc --mode max
    quark sweep run lr-search -- python train.py
    quark sweep show lr-search
    """  # noqa: D301 - click wants the character


_PROJECT = option(
    "Project of the sweep, if several projects have one of this name.",
    "-p",
    shell_complete=complete_projects,
)
_NAME = argument(shell_complete=complete_sweeps)


_GIVEN: Any = Combined(
    dict,
    {
        "search": (
            str,
            option(
                "Algorithm: random, grid, halving, asha; with Optuna also tpe, hyperband, cmaes.",
                metavar="SEARCH",
                default="random",
            ),
        ),
        "trials": (int | None, option("Maximum number of trials.", least=1)),
        "budget": (
            int | None,
            option("Number of steps of a full trial; for halving and asha.", least=1),
        ),
        "constraints": (
            tuple[str, ...],
            option(
                'Condition on another metric, such as "latency_ms <= 20". Repeatable.',
                "--constraint",
                metavar="TEXT",
            ),
        ),
        "max_failures": (
            int | None,
            option("Maximum number of attempts of a failing trial.", least=1, show_default="3"),
        ),
        "stop": (bool, option("End a trial that is stopped early at its next metrics.log call.")),
        "stop_broken": (bool, option("Stop trials that diverge or do not learn.")),
        "seed": (int, option("Seed of the search.", least=0, default=0)),
        "lease_s": (
            float | None,
            option(
                "Seconds without a heartbeat before a trial is reassigned.",
                "--lease",
                show_default="60",
                metavar="SECONDS",
            ),
        ),
    },
)
"""Options that `quark.sweep` takes as they are given."""


@sweep.command()
@takes_options
def new(
    *,
    name: str = argument(),
    project: str = option(
        "Project of the sweep.", "-p", required=True, shell_complete=complete_projects
    ),
    settings: tuple[str, ...] = option(
        "Parameter: lr=log:1e-5:1e-1, width=int:16:128, dropout=uniform:0:0.5 or "
        "optimizer=adam,sgd. Repeatable.",
        "--set",
        metavar="NAME=VALUES",
    ),
    space_file: Path | None = option(
        "JSON, TOML or YAML file with parameters, also in the format of Ato or W&B.",
        "--space",
        metavar="FILE",
    ),
    metrics: tuple[str, ...] = option(
        "Logged metric to optimize, such as val/acc. Repeatable.",
        "--metric",
        required=True,
        shell_complete=complete_metrics,
    ),
    modes: tuple[Literal["min", "max"], ...] = option(
        "Direction in which the metric improves. Repeatable.", "--mode", show_default="by its name"
    ),
    given: dict[str, Any] = _GIVEN,
    storage_dir: Path | None = STORAGE_DIR,
    as_json: bool = AS_JSON,
) -> None:
    """Create a sweep, or find the existing one.

    Creating a sweep starts no trial. `quark sweep run NAME -- COMMAND` runs trials,
    on each machine that can reach the store. If a sweep of this name has the same
    definition, the command succeeds.
    """
    from quark.sweeps.sweep import sweep as open_sweep

    with usage_mistakes():
        space = _read_space(settings, space_file)
        chosen = {key: value for key, value in given.items() if value not in (None, ())}
        opened = open_sweep(
            name,
            project=project,
            space=space,
            metric=list(metrics) if len(metrics) > 1 else metrics[0],
            mode=_find_modes(metrics, modes),
            storage_dir=storage_dir,
            **chosen,
        )
        stored = opened.load()
        opened.close()
    if as_json:
        print_json(stored.to_dict())
        return
    _say(f"Sweep {stored.name!r} of project {stored.project!r} is ready.")
    where = _repeat(stored, storage_dir)
    _say(f"To start a worker: quark sweep run {where} -- python train.py")


def _read_space(settings: tuple[str, ...], space_file: Path | None) -> dict[str, object]:
    from quark.sweeps.space import FORMS, read_setting, read_space_file

    space = {} if space_file is None else read_space_file(space_file)
    for text in settings:
        name, values = read_setting(text)
        space[name] = values
    if not space:
        raise SchemaValidationError(
            f"Pass the parameters with --set NAME=VALUES or --space FILE. VALUES is {FORMS}."
        )
    return space


def _find_modes(metrics: tuple[str, ...], modes: tuple[str, ...]) -> str | list[str]:
    from quark.analysis.run_search import choose_mode

    if len(modes) not in (0, 1, len(metrics)):
        raise SchemaValidationError(
            f"Pass --mode once, or once for each of the {len(metrics)} metrics."
        )
    chosen = list(modes) * len(metrics) if len(modes) == 1 else list(modes)
    try:
        found = [
            str(choose_mode(metric, chosen[place] if chosen else None))  # type: ignore[arg-type]
            for place, metric in enumerate(metrics)
        ]
    except SchemaValidationError as error:
        raise SchemaValidationError(f"--{error}") from None
    return found if len(found) > 1 else found[0]


@sweep.command(context_settings={"ignore_unknown_options": False})
@takes_options
def run(
    *,
    name: str = _NAME,
    command: tuple[str, ...] = argument(type=click.UNPROCESSED),
    project: str | None = _PROJECT,
    workers: int = option(
        "Number of trials to run at the same time.", least=1, most=_MOST_WORKERS, default=1
    ),
    limit: int | None = option("Maximum number of trials to run.", "-n", least=1),
    form: Literal["flags", "assignments", "none"] = option(
        "Form of the appended parameters: --lr 0.01, or lr=0.01 (Hydra, quark.Layers).",
        "--arguments",
        default="flags",
    ),
    no_wait: bool = option("Exit if all remaining trials belong to other workers."),
    storage_dir: Path | None = STORAGE_DIR,
) -> None:
    """Run COMMAND for each trial of a sweep.

    Start this command as often as you like, on each machine that can reach the
    store. Each call runs trials until none is left.

    The trial's parameters are appended as --lr 0.01 --layers 2. If COMMAND contains
    {lr} or {parameters} (all as JSON), these are replaced instead. The environment
    variable QUARK_PARAMETERS contains all parameters as JSON. QUARK_TRIAL identifies
    the trial, and quark.start_run uses it automatically.

    Ctrl-C is passed to the running trials and releases them, so that another worker
    can resume them. A second Ctrl-C kills them.

    \b
    Exit codes:
      0    no trial is left
      1    the store cannot be read or written
      2    usage error, or COMMAND started no run
      3    all trials that ran here failed
      130  Ctrl-C (143: SIGTERM); the running trials are released
    """  # noqa: D301 - click wants the character
    from quark.cli.sweep_agent import AgentChoices, SweepAgent, check_command, check_placeholders

    with usage_mistakes():
        check_command(command)
        joined = _join(name, project, storage_dir)
        check_placeholders(command, joined.definition.space.ranges)
        choices = AgentChoices(
            command=command,
            storage_dir=resolve_storage_dir(storage_dir),
            form=form,
            workers=workers,
            limit=limit,
            waits=not no_wait,
        )
        status = SweepAgent(joined, choices, _tell).run()
        _say_standing(joined, storage_dir)
    sys.exit(status)


def _say_standing(joined: Sweep, storage_dir: Path | None) -> None:
    """The last words of an agent: how the sweep stands, and its best."""
    from quark.cli.sweep_view import describe_best, describe_counts

    stored, best = joined.load(), joined.best
    said = f"{stored.name}: {describe_counts(stored.counts).plain}"
    if best is not None:
        metrics = [goal.metric for goal in joined.definition.goals]
        said += f"; best: {describe_best(best, metrics)}"
    _tell(said)
    _tell(f"to see the sweep: quark sweep show {_repeat(stored, storage_dir)}")


@sweep.command()
@takes_options
def show(
    *,
    name: str | None = argument(shell_complete=complete_sweeps),
    project: str | None = _PROJECT,
    limit: int = option(
        "Number of trials to show, best first; 0 shows all.", "-n", least=0, default=_SHOWN_TRIALS
    ),
    storage_dir: Path | None = STORAGE_DIR,
    as_json: bool = AS_JSON,
) -> None:
    """Show a sweep and its trials, or list all sweeps."""
    with usage_mistakes(), _open(storage_dir) as store:
        if name is None:
            found = store.list_sweeps(project)
            if as_json:
                print_json([each.to_dict() for each in found])
            else:
                _print_sweeps(found, _name_place(store, project))
            return
        stored = _find(store, name, project)
        trials = _list_trials(store, stored)
        if as_json:
            print_json({**stored.to_dict(), "trials": [trial.to_dict() for trial in trials]})
        else:
            _print_sweep(store, stored, trials, limit or len(trials))


def _name_place(store: SupportsCoordination, project: str | None) -> str:
    """Where sweeps are looked for, in words."""
    of = "" if project is None else f"project {project!r} of "
    return f"{of}{name_store(store)}"


def _print_sweeps(found: list[StoredSweep], where: str) -> None:
    from quark.cli.sweep_view import make_sweeps_table

    if found:
        console = Console()
        console.print(make_sweeps_table(found, console.width))
    else:
        click.echo(f"No sweeps in {where}. `quark sweep new` or quark.sweep(…) creates one.")


def _print_sweep(
    store: SupportsCoordination, stored: StoredSweep, trials: list[StoredTrial], most: int
) -> None:
    from quark.cli.sweep_view import print_sweep

    print_sweep(Console(), store, stored, trials, most)


@sweep.command()
@takes_options
def pause(
    *, name: str = _NAME, project: str | None = _PROJECT, storage_dir: Path | None = STORAGE_DIR
) -> None:
    """Pause a sweep: start no new trials."""
    _change(name, project, storage_dir, "paused", "is paused. `quark sweep resume` resumes it")


@sweep.command()
@takes_options
def resume(
    *, name: str = _NAME, project: str | None = _PROJECT, storage_dir: Path | None = STORAGE_DIR
) -> None:
    """Resume a paused sweep."""
    _change(name, project, storage_dir, "running", "is running again")


@sweep.command()
@takes_options
def retry(
    *,
    name: str = _NAME,
    project: str | None = _PROJECT,
    numbers: tuple[int, ...] = option(
        "Only this trial, which may also have failed. Repeatable.", "--trial", least=0
    ),
    storage_dir: Path | None = STORAGE_DIR,
) -> None:
    """Retry the broken trials of a sweep.

    A trial is broken if it failed as often as the sweep allows. Fix the training
    script first. Each retry is a new trial with the same parameters.
    """
    with usage_mistakes():
        joined = _join(name, project, storage_dir)
        try:
            added = joined.retry(*numbers)
        finally:
            joined.close()
    if not added:
        _say(f"Sweep {joined.name!r} has no broken trials to retry.")
        return
    pairs = ", ".join(
        f"{each.origin.get('retry_of')} as {each.number}" for each in added[:_MOST_NAMED]
    )
    more = len(added) - _MOST_NAMED
    _say(f"Retrying trials: {pairs}{f' and {more} more' if more > 0 else ''}.")


@sweep.command()
@takes_options
def cancel(
    *,
    name: str = _NAME,
    project: str | None = _PROJECT,
    yes: bool = option("Do not ask for confirmation.", "-y"),
    storage_dir: Path | None = STORAGE_DIR,
) -> None:
    """Cancel a sweep permanently.

    Trials that are running continue until they end.
    """
    if not yes:
        click.confirm(f"Cancel the sweep {name!r} permanently?", abort=True)
    _change(
        name,
        project,
        storage_dir,
        "cancelled",
        "is canceled. Running trials continue until they end",
    )


def _change(
    name: str, project: str | None, storage_dir: Path | None, state: SweepState, said: str
) -> None:
    from quark.cli.sweep_view import describe_counts
    from quark.sweeps.sweep_store import StoreLink
    from quark_core.runs.run_editing import find_user

    with usage_mistakes():
        # Found before anything is opened for writing: a wrong root must leave no store.
        with _open(storage_dir) as store:
            found = _find(store, name, project)
        link = StoreLink(resolve_storage_dir(storage_dir))
        try:
            changed = link.store.update_sweep(found.id, state, by=find_user())
        finally:
            link.close()
    _say(f"Sweep {changed.name!r} {said} ({describe_counts(changed.counts).plain}).")


def _join(name: str, project: str | None, storage_dir: Path | None) -> Sweep:
    from quark.sweeps.sweep import join_sweep

    with _open(storage_dir) as store:
        found = _find(store, name, project)
    return join_sweep(found.name, found.project, resolve_storage_dir(storage_dir))


def _find(store: SupportsCoordination, name: str, project: str | None) -> StoredSweep:
    """The sweep of a name, or of an id.

    Raises:
        SchemaValidationError: There is none, or several projects have one.
    """
    known = store.list_sweeps(project)
    found = [each for each in known if name in (each.name, each.id)]
    if len(found) == 1:
        return found[0]
    if found:
        projects = ", ".join(sorted(repr(each.project) for each in found)[:_NEAR])
        raise SchemaValidationError(
            f"{len(found)} projects have a sweep {name!r}. Choose one with --project: {projects}."
        )
    near = get_close_matches(name, [each.name for each in known], n=_NEAR)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise SchemaValidationError(
        f"no sweep {name!r} in {_name_place(store, project)}. `quark sweep show` lists the "
        f"sweeps.{hint}"
    )


def _list_trials(store: SupportsCoordination, stored: StoredSweep) -> list[StoredTrial]:
    from quark.sweeps.definition import SweepDefinition, fill_values

    trials = store.list_trials(stored.id)
    try:
        definition = SweepDefinition.build(stored.definition)
    except SchemaValidationError:
        return trials  # of a newer Quark: what it says is shown all the same
    reader: Any = store
    return fill_values(reader, trials, definition)


@contextlib.contextmanager
def _open(storage_dir: Path | None) -> Iterator[SupportsCoordination]:
    """The store of a storage root for reading, as one that workers share.

    Raises:
        SessionStoreError: There is none, or it cannot give trials to workers.
    """
    from quark.sweeps.sweep_store import StoreLink

    link = StoreLink(resolve_storage_dir(storage_dir), read_only=True)
    try:
        yield link.store
    finally:
        link.close()


def _repeat(stored: StoredSweep, storage_dir: Path | None) -> str:
    """A sweep's name and the storage root, as a shell has to be given them."""
    from quark.cli.sweep_agent import repeat_name

    said = repeat_name(stored.name, stored.id)
    return said if storage_dir is None else f"{said} -d {shlex.quote(str(storage_dir))}"


def _say(text: str) -> None:
    click.echo(clean_line(text))


def _tell(text: str) -> None:
    """To who looks on; what the command prints has standard output."""
    click.echo(clean_line(f"quark: {text}"), err=True)
