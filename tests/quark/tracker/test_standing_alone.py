"""A mirror that is given to no tracker, in a process that has imported nothing else of Quark."""

import subprocess
import sys

import pytest

import quark

LOG = "mirror.log({'loss': 0.5}, step=0); mirror.finish()"


def run(program, *arguments):
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True
    )


@pytest.mark.long
def test_taken_from_quark_it_begins_a_run(tmp_path):
    program = "import sys; from quark import CSVBackend; mirror = CSVBackend(outdir=sys.argv[1]); "
    done = run(program + LOG, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "loss" in (tmp_path / "metrics.csv").read_text()
    (found,) = quark.search_runs(storage_dir=tmp_path)
    assert found.state == "completed"


@pytest.mark.parametrize("made", ["CSVBackend('.')", "MLflowBackend()", "WandbBackend()"])
def test_taken_from_elsewhere_it_says_from_where_to_take_it(made):
    name = made.partition("(")[0]
    backend = name.removesuffix("Backend").lower()
    program = f"from quark_backends.{backend}.tracker_backend import {name}; mirror = {made}; {LOG}"
    done = run(program)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("quark_core.errors.InvalidRunStateError: ")
    assert f"{name} needs the tracker to start runs" in line
    assert f"from quark import {name}" in line
