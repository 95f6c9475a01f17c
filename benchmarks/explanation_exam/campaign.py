"""Makes the runs of the exam, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.explanation_exam.changes import Change, Setup, make_project

__all__ = ["Question", "World", "make_world"]

_RUN_TIMEOUT_S = 120
_SPREAD = {
    "--lr": ("0.003", "0.05", "0.1", "0.2"),
    "--hidden": ("1", "12", "24", "48"),
    "--noise": ("0.2", "0.5", "6.0"),
    "--weight-decay": ("0.0", "0.01", "2.0"),
    "--batch-size": ("32", "64", "400"),
    "--log-every": ("5", "7"),
    "--title": ("plain", "fancy"),
}
"""What a person has tried before, one or two at a time."""


@dataclass(frozen=True)
class World:
    """A project with the runs that somebody has made of it.

    Attributes:
        folder: Its code and its runs are in `work`, its libraries in `env`.
        script: The script that trains.
        base: Ids of the runs of the base configuration, by seed.
    """

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
        before_loss, after_loss: What came out.
    """

    name: str
    changes: tuple[Change, ...]
    before: str
    after: str
    store: Path
    before_loss: float
    after_loss: float


def make_world(folder: Path, *, script: str, seeds: int, tried: int) -> World:
    """A project, runs of it with several seeds, and others with one or two options changed.

    Args:
        folder: Where; made here, and used again where it is there already.
        script: What trains.
        seeds: Runs of the base configuration.
        tried: Runs with something else.
    """
    note = folder / "base.txt"
    if not note.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        setup = replace(make_project(folder), script=script)
        base = [run_once(setup, seed) for seed in range(seeds)]
        rng = np.random.default_rng(7)
        options = [name for name in _SPREAD if script == "train.py" or name in ("--lr", "--hidden")]
        for number in range(tried):
            chosen = rng.choice(options, size=int(rng.integers(1, 3)), replace=False)
            given = {name: str(rng.choice(_SPREAD[name])) for name in chosen}
            run_once(replace(setup, options=given), 100 + number)
        note.write_text("\n".join(base))
    return World(folder, script, dict(enumerate(note.read_text().split())))


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
        setup = Setup(folder / "work", world.script)
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
        read_loss(store, before),
        read_loss(store, after),
    )


def run_once(setup: Setup, seed: int) -> str:
    """Train once; returns the run's id."""
    root = Path(__file__).parents[2]
    arguments = [f"{name}={value}" for name, value in setup.options.items()]
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
        [sys.executable, setup.script, *arguments, f"--seed={seed}"],
        cwd=setup.project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_RUN_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{setup.script} {arguments} failed:\n{done.stderr[-3000:]}")
    (made,) = set(_list_runs(setup.project)) - known
    return made


def read_loss(store: Path, run_id: str) -> float:
    """The validation loss with which a run ended."""
    import quark

    (found,) = [run for run in quark.search_runs(storage_dir=store) if run.run_id == run_id]
    last = found.metrics["val/loss"].last
    # What is no number any more is worse than all that is one.
    return 1e9 if last is None else last


def _list_runs(store: Path) -> list[str]:
    if not (store / ".quark").exists():
        return []
    import quark

    return [run.run_id for run in quark.search_runs(storage_dir=store)]
