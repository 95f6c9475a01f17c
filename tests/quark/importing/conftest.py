"""What the tests of importers share: the command, and how to look at what it has brought."""

import json
import os

import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in [*os.environ]:
        if name.startswith(("QUARK_", "WANDB_", "MLFLOW_")):
            monkeypatch.delenv(name)


@pytest.fixture
def store(tmp_path):
    """Where runs are imported to."""
    return tmp_path / "store"


@pytest.fixture
def take(store):
    """Imports by the command; returns what it says of each run."""

    def call(tool, place, *arguments, status=0):
        done = CliRunner().invoke(
            cli,
            ["import", tool, str(place), "-d", str(store), "--json", *map(str, arguments)],
            catch_exceptions=False,
        )
        assert done.exit_code == status, done.output
        return json.loads(done.stdout)["runs"]

    return call


@pytest.fixture
def read_points(store):
    """The points of a metric: step, value and moment in microseconds, in their order."""

    def read(run_id, key, **bounds):
        columns = quark.MetricsLogger(quark.open_run(run_id, storage_dir=store)).columns(
            metric_key=key, **bounds
        )
        return list(
            zip(
                columns["step"].tolist(),
                columns["value"].tolist(),
                columns["time_us"].tolist(),
                strict=True,
            )
        )

    return read
