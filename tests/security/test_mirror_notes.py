"""What a mirror's notes in a run's folder say of hosts and runs elsewhere is not believed."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from hostile_folders import EMBEDDED, make_journal

from quark.cli.main import cli
from quark_backends.wandb.backend import OpenRun, WandbOptions, _make_environment
from quark_backends.wandb.local_files import WandbState
from quark_backends.wandb.run import init_run
from quark_core.delivery.journal_folder import LaneEntry


@pytest.fixture
def hostile_directory(tmp_path, monkeypatch):
    """A working directory that names a host of its own to W&B."""
    (tmp_path / "here" / "wandb").mkdir(parents=True)
    text = "[default]\nbase_url = http://127.0.0.1:9\n"
    (tmp_path / "here" / "wandb" / "settings").write_text(text)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_BASE_URL", "WANDB_CONFIG_DIR", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def find_host(folder):
    """The host that W&B takes in an environment of the mirror's."""
    done = subprocess.run(
        [sys.executable, "-c", "import wandb; print(wandb.setup().settings.base_url)"],
        env=_make_environment(folder),
        capture_output=True,
        text=True,
    )
    return done.stdout.strip().splitlines()[-1:]


@pytest.mark.long
def test_the_host_of_wandb_is_the_users_own(hostile_directory, monkeypatch):
    assert find_host(hostile_directory) == ["https://api.wandb.ai"]
    own = hostile_directory / "home" / ".config" / "wandb"
    own.mkdir(parents=True)
    (own / "settings").write_text("[default]\nbase_url = http://127.0.0.1:7\n")
    assert find_host(hostile_directory) == ["http://127.0.0.1:7"]
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:8")
    assert find_host(hostile_directory) == ["http://127.0.0.1:8"]


class Settings:
    model_fields = ()


class Asked(Exception):
    """Which run W&B was asked for."""


class Library:
    """As much of wandb as is asked before a run is open."""

    Settings = Settings
    errors = None

    @staticmethod
    def init(**arguments):
        raise Asked(arguments["id"])


@pytest.mark.parametrize(
    ("noted", "asked"),
    [
        ("", "theirs"),
        ("theirs", "theirs"),
        ("theirs-r3", "theirs-r3"),
        ("production", "theirs"),
        ("theirs-r3/../production", "theirs"),
    ],
)
def test_the_run_of_wandb_is_this_one(tmp_path, noted, asked):
    opening = OpenRun(
        run_id="theirs",
        project="p",
        folder=str(tmp_path),
        options=WandbOptions(),
        import_path=(),
        finish_timeout_s=1.0,
    )
    with pytest.raises(Exception) as told:  # noqa: PT011 - W&B's own error is asked for its cause
        init_run(Library, opening, WandbState(wandb_id=noted))
    assert isinstance(told.value.__cause__, Asked)
    assert str(told.value.__cause__) == asked


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # MLflow's own, of its libraries
@pytest.mark.timeout(600)
def test_the_run_of_mlflow_is_this_one(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_HELPER_PROCESSES", "0")  # one import of MLflow is enough
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("production", artifact_location=str(tmp_path / "files"))
    theirs = client.create_run(experiment, run_name="the best model").info.run_id
    root = tmp_path / "root"
    make_journal(root, run_id="theirs", lanes=(EMBEDDED, LaneEntry("mlflow", f"mlflow+{uri}")))
    name = hashlib.sha256(uri.encode()).hexdigest()[:12]
    folder = root / ".quark" / "runs" / "theirs" / "mirrors" / "mlflow" / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"mlflow_run_id": theirs, "attempt": 0}))
    result = CliRunner().invoke(cli, ["sync", str(root), "--allow-backend", f"mlflow+{uri}"])
    assert result.exit_code == 0, result.output
    run = client.get_run(theirs)
    assert (run.info.status, run.data.metrics, run.data.params) == ("RUNNING", {}, {})
    (made,) = client.search_runs([client.get_experiment_by_name("shared").experiment_id])
    assert made.data.tags["quark.run_id"] == "theirs"
    assert made.data.metrics == {"loss": 0.5}
    assert os.listdir(folder)
