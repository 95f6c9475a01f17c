"""The stores whose trials are claimed: embedded, a service on SQLite, a service on PostgreSQL."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from serving.servers import PostgresService, Service
from serving.training import open_proxy

from quark_core.backends.contract import BackendConfig, BackendDefinition
from quark_core.backends.registry import default_registry

STORES = {
    "embedded": "embedded store",
    "service": "service on SQLite",
    "postgres": "service on PostgreSQL",
}


class ClaimedStore:
    """A store, as workers open it.

    Attributes:
        title: What tables call it.
        definition, config: What opens it.
        proxy: What stands before the service and may lose replies, or None.
    """

    def __init__(
        self,
        title: str,
        definition: BackendDefinition,
        config: BackendConfig,
        service: Service | None = None,
        proxy: Any = None,
    ) -> None:
        self.title = title
        self.definition = definition
        self.config = config
        self.proxy = proxy
        self._service = service
        self._deaths = 0

    @property
    def has_server(self) -> bool:
        """Whether there is a server that may die."""
        return self._service is not None

    def open(self) -> Any:
        """The backend, for this process."""
        return self.definition.open(self.config)

    def measure_processor_s(self) -> dict[str, float]:
        """How long the processor has worked for the server, and for its PostgreSQL."""
        if self._service is None:
            return {}
        database = getattr(self._service, "database", None)
        pids = {"server": self._service.pid}
        if database is not None:
            pids["database"] = database.pid
        return {name: _measure_tree_s(psutil.Process(pid)) for name, pid in pids.items()}

    def kill_server(self, away_s: float) -> None:
        """SIGKILL to the server and, where it has one, every second time to its PostgreSQL."""
        assert self._service is not None
        self._deaths += 1
        database = getattr(self._service, "database", None)
        if database is not None and self._deaths % 2 == 0:
            database.kill()
            time.sleep(away_s)
            database.start()
            return
        self._service.kill()
        time.sleep(away_s)
        self._service.start()


def _measure_tree_s(process: psutil.Process) -> float:
    """Of a process and those that it has started."""
    used_s = 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            used_s += times.user + times.system
    return used_s


@contextlib.contextmanager
def open_store(name: str, *, proxied: bool = False) -> Iterator[ClaimedStore]:
    """One of `STORES`, empty.

    Args:
        name: Which one.
        proxied: Whether a service is reached by way of a proxy that may lose replies.
    """
    folder = Path(tempfile.mkdtemp(prefix="quark-bench-claims-"))
    registry = default_registry()
    try:
        if name == "embedded":
            config = BackendConfig(storage_dir=folder, run_id="bench")
            yield ClaimedStore(STORES[name], registry.find("embedded"), config)
            return
        with contextlib.ExitStack() as stack:
            kind = PostgresService if name == "postgres" else Service
            service = stack.enter_context(kind(STORES[name]))
            proxy = stack.enter_context(open_proxy(service)) if proxied else None
            os.environ["QUARK_USER_KEY"] = service.key
            config = BackendConfig(
                storage_dir=folder,
                run_id="bench",
                location=service.url if proxy is None else proxy.url,
                options={"store": "*"},
            )
            yield ClaimedStore(STORES[name], registry.find("service"), config, service, proxy)
    finally:
        os.environ.pop("QUARK_USER_KEY", None)
        shutil.rmtree(folder, ignore_errors=True)
