"""A real MLflow server for the tests, and the mirror as a known backend."""

import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from quark_backends.mlflow.plugin import quark_register_backends
from quark_core.backend import BackendConfig
from quark_core.registry import default_registry

# Before MLflow is imported: it would send usage statistics from its tests' users.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

START_TIMEOUT_S = 90
# A client of another version may be tested against this Python's MLflow.
SERVER_PYTHON = os.environ.get("QUARK_TEST_MLFLOW_SERVER_PYTHON", sys.executable)
LIFETIME_S = 900


class MlflowServer:
    """`mlflow server` with a SQLite store, in a process group of its own."""

    def __init__(self, folder, *, proxied=False):
        self.folder = folder
        self.proxied = proxied
        self.database = folder / "mlflow.db"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        command = [SERVER_PYTHON, "-m", "mlflow", "server", "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.database}"]
        place = "--artifacts-destination" if self.proxied else "--default-artifact-root"
        command += [place, str(self.folder / "artifacts")]
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
def own_server(mlflow, tmp_path):
    """A server that the test may kill and start again."""
    folder = tmp_path / "server"
    folder.mkdir()
    one = MlflowServer(folder)
    try:
        one.start()
        yield one
    finally:
        one.kill()


@pytest.fixture
def proxied_server(mlflow, tmp_path):
    """A server that takes the artifacts itself, over HTTP."""
    folder = tmp_path / "server"
    folder.mkdir()
    one = MlflowServer(folder, proxied=True)
    try:
        one.start()
        yield one
    finally:
        one.kill()


@pytest.fixture
def client(mlflow, server):
    return mlflow.MlflowClient(tracking_uri=server.uri)


@pytest.fixture
def definition():
    return quark_register_backends()[0]


@pytest.fixture(autouse=True)
def registered(monkeypatch, definition):
    """Make the mirror known by its name, whether its entry point is installed or not."""
    # MLflow is imported once for all of these; test_mlflow_helper.py has the other process.
    monkeypatch.setenv("QUARK_HELPER_PROCESSES", "0")
    registry = default_registry()
    if "mlflow" not in registry.names:
        monkeypatch.setitem(registry._definitions, "mlflow", definition)


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
    )


@pytest.fixture
def backend(definition, config):
    opened = definition.open(config)
    yield opened
    opened.close()


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
