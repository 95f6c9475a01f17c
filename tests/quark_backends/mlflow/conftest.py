"""A real MLflow server for the tests, and the mirror as a known backend."""

import contextlib
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
import weakref
from pathlib import Path

import pytest
from held_ports import hold_port

from quark_backends.mlflow.plugin import quark_register_backends
from quark_core.backends.contract import BackendConfig

# Before MLflow is imported: it would send usage statistics from its tests' users.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

START_TIMEOUT_S = 200  # on a busy machine it imports for a minute
# A client of another version may be tested against this Python's MLflow.
SERVER_PYTHON = os.environ.get("QUARK_TEST_MLFLOW_SERVER_PYTHON", sys.executable)
LIFETIME_S = 3 * 3600


class MlflowServer:
    """`mlflow server` with a SQLite store, in a process group of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.database = folder / "mlflow.db"
        # It may be killed and started again, and nobody else gets its port meanwhile.
        place, self.port = hold_port()
        weakref.finalize(self, place.close)
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        command = [SERVER_PYTHON, "-m", "mlflow", "server", "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.database}"]
        command += ["--default-artifact-root", str(self.folder / "artifacts")]
        # For experiments whose artifacts go through the server.
        command += ["--artifacts-destination", str(self.folder / "proxied")]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        if shutil.which("timeout"):
            # Ends by itself, also where the tests were killed.
            command = ["timeout", "-k", "5", str(LIFETIME_S), *command]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        environment |= {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.is_healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                pytest.fail(f"no MLflow server: {(self.folder / 'server.log').read_text()}")
            time.sleep(0.1)

    def is_healthy(self):
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def kill(self):
        """End the server and its workers at once, by their group."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def query(self, sql, *values):
        """Rows from the store itself, past MLflow."""
        connection = sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=10)
        try:
            return connection.execute(sql, values).fetchall()
        finally:
            connection.close()

    def forget_runs(self):
        """Remove every run and experiment, past MLflow, as if the server were new."""
        connection = sqlite3.connect(self.database, timeout=30)
        tables = ("metrics", "latest_metrics", "params", "tags", "runs")
        try:
            with connection:
                for table in tables:
                    connection.execute(f"DELETE FROM {table}")
                connection.execute("DELETE FROM experiment_tags WHERE experiment_id != 0")
                connection.execute("DELETE FROM experiments WHERE experiment_id != 0")
        finally:
            connection.close()


@pytest.fixture(scope="session")
def mlflow():
    found = pytest.importorskip("mlflow")
    if sys.executable == SERVER_PYTHON:
        pytest.importorskip("flask", reason="only the full MLflow has a server")
    return found


@pytest.fixture(scope="session")
def server(mlflow, tmp_path_factory):
    one = MlflowServer(tmp_path_factory.mktemp("mlflow"))
    try:
        one.start()
        yield one
    finally:
        one.kill()


@pytest.fixture
def mortal_server(server):
    """The server, which the test may kill and start again."""
    yield server
    if server.process is None:
        server.start()


@pytest.fixture
def empty_server(server):
    """The server without the runs of other tests."""
    server.forget_runs()
    return server


@pytest.fixture
def client(mlflow, server):
    return mlflow.MlflowClient(tracking_uri=server.uri)


@pytest.fixture
def definition():
    return quark_register_backends()[0]


@pytest.fixture(autouse=True)
def registered(monkeypatch, known):
    # MLflow is imported once for all of these; test_mlflow_helper.py has the other process.
    monkeypatch.setenv("QUARK_HELPER_PROCESSES", "0")
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "60")


@pytest.fixture
def project(request, tmp_path):
    """A project of the test's own: tests share the server."""
    return f"{request.node.name} {tmp_path.parent.name}"[:200]


@pytest.fixture
def config(server, tmp_path, project):
    return BackendConfig(
        storage_dir=tmp_path,
        run_path=tmp_path / "run",
        run_id="run0",
        project=project,
        location=server.uri,
        # What Quark alone knows is most of what these tests are about.
        options={"quark": "full"},
    )


@pytest.fixture
def find_runs(client, project):
    """The MLflow runs of the test's project, or of another one, the oldest first."""

    def find(name=None):
        experiment = client.get_experiment_by_name(name or project)
        if experiment is None:
            return []
        order = ["attributes.start_time ASC"]
        return client.search_runs([experiment.experiment_id], run_view_type=3, order_by=order)

    return find


@pytest.fixture
def history(client):
    """(step, value, timestamp in ms) of every point of a metric, sorted."""

    def read(run_id, key):
        points = client.get_metric_history(run_id, key)
        return sorted((p.step, repr(p.value), p.timestamp) for p in points)

    return read


@pytest.fixture
def fetch(client, find_runs, tmp_path):
    """Content of one artifact of the test's only run."""

    def read(path):
        (run,) = find_runs()
        folder = tmp_path / "fetched"
        folder.mkdir(exist_ok=True)
        return Path(client.download_artifacts(run.info.run_id, path, str(folder))).read_bytes()

    return read


@pytest.fixture
def list_paths(client, find_runs):
    """Paths of every artifact of the test's only run."""

    def walk(folder=None):
        (run,) = find_runs()
        found = []
        for file in client.list_artifacts(run.info.run_id, folder):
            found += walk(file.path) if file.is_dir else [file.path]
        return found

    return walk


@pytest.fixture
def foreign(client, project):
    """A run that no Quark has seen, with a parent: its MLflow run and its parent's."""
    from mlflow.entities import Metric, Param

    experiment = client.create_experiment(project)
    parent = client.create_run(experiment, run_name="sweep", start_time=1_700_000_000_000)
    run = client.create_run(
        experiment,
        run_name="trial",
        start_time=1_700_000_001_000,
        tags={"mlflow.parentRunId": parent.info.run_id, "team": "vision", "best": ""},
    )
    run_id = run.info.run_id
    params = {
        "lr": 0.1,
        "model.depth": 18,
        "name": "resnet",
        "flag": True,
        "none": None,
        "layers": "[1, 2]",
        "version": "007",
    }
    losses = [2 * math.exp(-step / 30) + 0.1 for step in range(200)]
    client.log_batch(
        run_id,
        metrics=[Metric("train loss", v, 10**12 + step, step) for step, v in enumerate(losses)],
        params=[Param(key, str(value)) for key, value in params.items()],
    )
    client.log_metric(run_id, "val/acc", float("nan"), timestamp=10**12 + 500, step=-3)
    client.set_tag(run_id, "mlflow.note.content", "Notes.")
    client.set_terminated(run_id, status="KILLED", end_time=1_700_000_100_000)
    return client.get_run(run_id), parent
