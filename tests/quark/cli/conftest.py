"""What the tests of the command line share: small runs, and the command in and out of process."""

import os
import subprocess
import sys
from pathlib import Path

import calls
import pytest
from set_for_tests import SET_FOR_TESTS

import quark
from quark.provenance import environment

_SCRIPT = str(Path(sys.executable).with_name("quark"))


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in [*os.environ]:
        if name in SET_FOR_TESTS:
            continue
        if name.startswith("QUARK_") or name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
            monkeypatch.delenv(name)


@pytest.fixture
def start(monkeypatch):
    """Starts a run under an id of one's choice."""

    def start_it(storage_dir, run_id, project="vision", **arguments):
        monkeypatch.setenv("QUARK_RUN_ID", run_id)
        return quark.start_run(project=project, storage_dir=storage_dir, **arguments)

    return start_it


@pytest.fixture
def log_run(start, monkeypatch):
    """Makes one ended run, of a program without PyTorch: its values by metric key, from step 0."""
    # Other tests may have imported PyTorch into this process, and health asks for `watch` then.
    listed = environment._list_imported

    def list_without_torch():
        of_torch = ("torch", "functorch")
        return {name: place for name, place in listed().items() if not name.startswith(of_torch)}

    monkeypatch.setattr(environment, "_list_imported", list_without_torch)

    def log(storage_dir, run_id, project="vision", *, status="completed", values=(), **arguments):
        session = start(storage_dir, run_id, project, **arguments)
        metrics = quark.MetricsLogger(session)
        for key, points in dict(values).items():
            for step, value in enumerate(points):
                metrics.log(key, value, step=step)
        session.end_run(status)

    return log


@pytest.fixture
def invoke():
    """Runs a command in this process; an error that it raises comes through."""
    return calls.invoke


@pytest.fixture
def quark_command(tmp_path):
    """Runs the installed `quark` in a process of its own, in an empty folder."""

    def call(*arguments, **environment):
        folder = tmp_path / "elsewhere"
        folder.mkdir(exist_ok=True)
        return subprocess.run(
            [_SCRIPT, *map(str, arguments)],
            capture_output=True,
            cwd=folder,
            env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
            encoding="utf-8",
        )

    return call
