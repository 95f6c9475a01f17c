"""A run with the installed plugin: written, read in another process, exported."""

import json
import os
import subprocess
import sys

import pytest
from quark_energy import record_energy

import quark
from quark_core.api import SchemaValidationError


@pytest.fixture
def quark_command(tmp_path):
    """Runs `quark`, in a process that has not imported the plugin itself."""

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "quark", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_energy_is_recorded_summed_up_and_exported(tmp_path, quark_command):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv") as session:
        for step in range(10):
            record_energy(session, f"gpu{step % 2}", 0.5 * step, step)
    assert session.report_delivery().complete
    assert quark_command("energy", session.run_id) == "gpu0  10.0 J\ngpu1  12.5 J\n"
    quark_command("export", session.run_id, "--format", "jsonl", "--output", "out")
    lines = (tmp_path / "out" / "energy.jsonl").read_text().splitlines()
    assert [json.loads(line)["joules"] for line in lines] == [0.5 * step for step in range(10)]
    (table,) = session.run_path.rglob("energy_use.csv")
    assert len(table.read_text().splitlines()) == 11


def test_the_command_is_in_the_help(quark_command):
    assert "From the plugin 'energy'." in quark_command("--help")
    assert "each device of RUN" in quark_command("energy", "--help")


@pytest.mark.parametrize(("device", "joules"), [("gpu0", -1.0), ("", 1.0), ("gpu0", float("inf"))])
def test_bad_records_are_refused(tmp_path, device, joules):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    with session, pytest.raises(SchemaValidationError):
        record_energy(session, device, joules)
