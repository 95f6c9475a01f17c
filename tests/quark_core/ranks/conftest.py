"""Launches: real processes under torchrun, and under the variables of other launchers."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from held_ports import hold_port
from launching import FOREIGN, PROGRAM, clean_environment, read_lines
from set_for_tests import SET_FOR_TESTS

import quark
from quark_core.runs import backend_choice


@pytest.fixture(autouse=True)
def no_launch_around(monkeypatch):
    for name in [*os.environ]:
        if name.startswith(FOREIGN) and name not in SET_FOR_TESTS:
            monkeypatch.delenv(name)


@pytest.fixture
def port():
    """A port that nobody else is given."""
    place, number = hold_port()
    with place:
        yield number


@pytest.fixture
def torchrun(port):
    """Runs the program under torchrun; returns what its ranks said, and the exit status."""

    def launch(storage_dir, *arguments, processes=4, max_restarts=0, options=(), **variables):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
        command += [str(processes), "--max-restarts", str(max_restarts), "--monitor-interval"]
        command += ["0.2", *(options or ("--master-port", str(port))), str(PROGRAM)]
        done = subprocess.run(
            [*command, str(storage_dir), *arguments],
            capture_output=True,
            text=True,
            timeout=280,
            env=clean_environment(**variables),
        )
        print(done.stderr[-3000:])
        return read_lines(done.stdout), done.returncode

    return launch


@pytest.fixture
def start_ranks():
    """Runs the program once for each dict of variables, at the same time."""

    def launch(storage_dir, variables, *arguments):
        processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), str(storage_dir), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=clean_environment(**one),
            )
            for one in variables
        ]
        ended = [process.communicate(timeout=280) for process in processes]
        errors = "".join(error for _, error in ended)
        assert all(process.returncode in (0, -9) for process in processes), errors
        return read_lines("".join(output for output, _ in ended)), errors

    return launch


@pytest.fixture
def runs_of():
    """The runs of a storage root: id -> state, newest attempt, points by (attempt, rank)."""

    def read(storage_dir):
        found = {}
        for stored in backend_choice.open_reader(Path(storage_dir)).list_runs():
            session = quark.open_run(stored.run.id, storage_dir)
            records = quark.MetricsLogger(session).read(metric_key="loss", all_attempts=True)
            points = Counter((record.attempt, record.rank) for record in records)
            found[stored.run.id] = (stored.state, stored.run.attempt, dict(points))
        return found

    return read
