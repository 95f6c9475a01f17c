"""Services to measure: `quark serve` in processes of its own, on SQLite and on PostgreSQL."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from serving.ports import hold_port

_ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 60.0


class Service:
    """One server with a workspace and a key; a context manager.

    Args:
        name: What tables call it.
        workers: Processes.
    """

    def __init__(self, name: str, *, workers: int = 1) -> None:
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix="quark-bench-service-"))
        self.store_url = f"sqlite:///{self.folder / 'service.db'}"
        self.workers = workers
        self.key = ""
        self._place, self.port = hold_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Its first process."""
        assert self._process is not None
        return self._process.pid

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to know."""
        return {"QUARK_PERSISTENCE_URL": self.url, "QUARK_USER_KEY": self.key}

    def __enter__(self) -> Service:
        # A key is made of a service that is there; the first start makes it.
        self.start()
        self.key = self.make_key()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._place.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def make_key(self, workspace: str = "bench") -> str:
        """A new key of a workspace, which is made where there is none."""
        made = self._run(
            *("keys", "create", "--store", self.store_url, "--workspace", workspace),
            *("--name", "benchmark", "--scope", "admin"),
        )
        found = re.search(r"qk_\w+_[\w-]+", made)
        if found is None:
            raise RuntimeError(f"quark keys create gave no key:\n{made}")
        return found[0]

    def list_keys(self) -> Any:
        """The keys of the store, as the command lists them."""
        return json.loads(self._run("keys", "list", "--store", self.store_url, "--json"))

    def revoke_key(self, key: str) -> None:
        """Take a key back."""
        self._run("keys", "revoke", key.split("_")[1], "--store", self.store_url)

    def start(self) -> None:
        """Start, and wait until it is ready."""
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "quark", "serve", "--store", self.store_url),
                    *("--artifacts", str(self.folder / "artifacts")),
                    *("--host", "127.0.0.1", "--port", str(self.port)),
                    *("--workers", str(self.workers)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                cwd=self.folder,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/readyz", timeout=2):
                    return
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    text = (self.folder / "server.log").read_text("utf-8", "replace")
                    raise RuntimeError(f"{self.name} does not come up:\n{text}") from None
                time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def stop(self) -> None:
        """Ask it to end."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "quark", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=_environment(),
            cwd=self.folder,
            check=False,
            timeout=120,
        )
        if done.returncode:
            raise RuntimeError(f"quark {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout


class PostgresService(Service):
    """As `Service`, over a PostgreSQL server of its own."""

    def __init__(self, name: str, *, workers: int = 1) -> None:
        super().__init__(name, workers=workers)
        # What starts a PostgreSQL for the tests does so here too.
        tests = _ROOT / "tests"
        sys.path += [str(tests / "quark_backends" / "postgres"), str(tests / "quark_core")]
        from postgres_server import PostgresServer

        self.database: Any = PostgresServer()
        self.store_url = self.database.url

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.database.remove()


def open_services(*, workers: int = 1) -> list[Service]:
    """The services to compare; none of them is started yet."""
    services = [Service("SQLite", workers=workers)]
    try:
        services.append(PostgresService("PostgreSQL", workers=workers))
    except (ImportError, RuntimeError) as error:
        print(f"(no PostgreSQL to measure: {error})")
    return services


def _environment() -> dict[str, str]:
    unset = ("QUARK_PERSISTENCE_URL", "QUARK_USER_KEY")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(_ROOT), kept.get("PYTHONPATH", "")])}
