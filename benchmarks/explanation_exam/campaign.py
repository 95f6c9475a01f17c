"""Makes the runs of the exam, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.explanation_exam.changes import Change, Setup
from benchmarks.explanation_exam.paper import Paper

__all__ = ["Question", "World", "make_world"]

_RUN_TIMEOUT_S = 120
_BASE_SEEDS = 6


@dataclass(frozen=True)
class World:
    """A project with the runs that somebody has made of it.

    Attributes:
        paper: What is asked about it.
        folder: Its code and its runs are in `work`, its libraries in `env`.
        script: The script that trains.
        base: Ids of the runs of the base configuration, by seed.
    """

    paper: Paper
    folder: Path
    script: str
    base: dict[int, str]


@dataclass(frozen=True)
class Question:
    """Two runs, and what was done between them.

    Attributes:
        name: What was done, and with which seed.
        changes: What was done.
        before, after: Ids of the runs.
        store: Their store.
        before_result, after_result: What came out.
    """

    name: str
    changes: tuple[Change, ...]
    before: str
    after: str
    store: Path
    before_result: float
    after_result: float


def make_world(paper: Paper, folder: Path, *, script: str, short: bool) -> World:
    """A project, runs of it with several seeds, and those that somebody has made besides.

    Args:
        paper: What is asked about it.
        folder: Where; made here, and used again where it is there already.
        script: What trains.
        short: Few runs are enough.
    """
    note = folder / "base.txt"
    if not note.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        setup = replace(paper.make_project(folder), script=script)
        base = [run_once(setup, seed) for seed in range(_BASE_SEEDS)]
        for tried, seed in paper.list_history(setup, short):
            run_once(tried, seed)
        note.write_text("\n".join(base))
    return World(paper, folder, script, dict(enumerate(note.read_text().split())))


def ask(
    world: World, folder: Path, changes: Sequence[Change], *, seed: int, other: int
) -> Question:
    """Make the second run of a question, in a copy of the world.

    Args:
        world: The project.
        folder: Where the copy is made.
        changes: What is done between the two runs.
        seed: Seed of the first run, which the world has.
        other: Seed of the second one.
    """
    name = "+".join(change.name for change in changes) or "nothing"
    note = folder / "after.txt"
    if not note.exists():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(world.folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
        setup = replace(world.paper.setup(folder), script=world.script)
        for change in changes:
            change.make(setup)
        note.write_text(run_once(setup, other))
    before, after, store = world.base[seed], note.read_text(), folder / "work"
    return Question(
        f"{name}, seed {seed} to {other}",
        tuple(changes),
        before,
        after,
        store,
        _read_result(world.paper, store, before),
        _read_result(world.paper, store, after),
    )


def run_once(setup: Setup, seed: int) -> str:
    """Train once; returns the run's id."""
    root = Path(__file__).parents[2]
    arguments = setup.make_command(seed)
    environment = {name: text for name, text in os.environ.items() if not name.startswith("QUARK_")}
    environment |= {
        "PYTHONPATH": f"{setup.site}{os.pathsep}{root}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "QUARK_QUIET": "1",
        "OMP_NUM_THREADS": "1",
        **setup.variables,
    }
    known = set(_list_runs(setup.project))
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=setup.project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_RUN_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{arguments} failed:\n{done.stderr[-3000:]}")
    (made,) = set(_list_runs(setup.project)) - known
    return made


def _read_result(paper: Paper, store: Path, run_id: str) -> float:
    """What a run ended with."""
    import quark

    (found,) = [run for run in quark.search_runs(storage_dir=store) if run.run_id == run_id]
    last = found.metrics[paper.metric].last
    return paper.worst if last is None else last


def _list_runs(store: Path) -> list[str]:
    if not (store / ".quark").exists():
        return []
    import quark

    return [run.run_id for run in quark.search_runs(storage_dir=store)]
