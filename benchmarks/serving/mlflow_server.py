"""`mlflow server` with a SQLite store, as the rival in the same run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from serving.ports import hold_port

_START_TIMEOUT_S = 200.0


class MlflowServer:
    """A server on a free port of this machine; a context manager."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._place, self._port = hold_port()
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start_if_there(cls, stack: ExitStack) -> MlflowServer | None:
        """A running server, or None, with a word, where MLflow is not installed."""
        if importlib.util.find_spec("mlflow") is None:
            print("(mlflow is not installed: there is nothing to compare with)")
            return None
        return stack.enter_context(cls())

    def __enter__(self) -> MlflowServer:
        folder = Path(self._folder.name)
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        with (folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
                    *("--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"),
                    *("--default-artifact-root", str(folder / "artifacts")),
                    *("--host", "127.0.0.1", "--port", str(self._port)),
                ],
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                    return self
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError("mlflow server does not come up") from None
                time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, 15)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait(10)
        self._place.close()
        self._folder.cleanup()

    def measure_log_batch(self, *, batches: int) -> float:
        """Rows per second that one client gets in by `log_batch` of 1,000 metrics."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        client: Any = MlflowClient(tracking_uri=self.uri)
        run_id = client.create_run("0").info.run_id
        rows = [
            [
                Metric(f"metric{i % 20}", 0.5 + i, 1_700_000_000_000 + i, 1_000 * b + i)
                for i in range(1000)
            ]
            for b in range(batches)
        ]
        client.log_batch(run_id, metrics=rows[0])
        begin = time.perf_counter()
        for part in rows[1:]:
            client.log_batch(run_id, metrics=part)
        return 1000 * (batches - 1) / (time.perf_counter() - begin)
