"""A real server on a free port of this machine, with workspaces and keys.

with serving(tmp_path) as server:
    key = server.make_key("default", "admin")
    httpx.get(f"{server.url}/v1/workspace", headers={"Authorization": f"Bearer {key}"})
"""

import threading
import time
from contextlib import contextmanager

import httpx
import msgspec
import uvicorn

from quark_backends.service.application import assemble
from quark_backends.service.config import Limits, Principal, ServiceConfig
from quark_backends.service.failure import ServiceFailure
from quark_backends.service.figures import Figures
from quark_backends.service.payload_vault import FolderVault
from quark_backends.service.protocol import MSGPACK, ErrorCode, IngestRequest, WireBatch
from quark_backends.service.routes import ROUTES
from quark_backends.service.service import Service
from quark_backends.service.sqlite_store import open_sqlite
from quark_backends.service.work import WorkThreads


class _Guard:
    def __init__(self):
        self.keys = {}

    async def admit(self, authorization, scope):
        found = self.keys.get((authorization or "").removeprefix("Bearer "))
        if found is None:
            raise ServiceFailure(ErrorCode.UNAUTHORIZED, "the key is not valid")
        return found

    def spend_rows(self, principal, rows):
        pass


class RunningServer:
    def __init__(self, guard, service, port):
        self.guard = guard
        self.service = service
        self.url = f"http://127.0.0.1:{port}"

    def make_key(self, workspace="default", *scopes):
        key = f"qk_{len(self.guard.keys)}_secret"
        self.guard.keys[key] = Principal(workspace, key, frozenset(scopes or {"admin"}))
        return key

    def client(self, workspace="default", *scopes, key=None):
        key = key or self.make_key(workspace, *scopes)
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=30
        )


@contextmanager
def serving(folder, **config):
    threads = WorkThreads()
    guard = _Guard()
    limits = config.pop("limits", Limits())
    service = Service(
        ServiceConfig(store_url=f"sqlite:///{folder}/service.db", limits=limits, **config),
        guard=guard,
        vault=FolderVault(folder / "payloads", threads),
        open_store=open_sqlite(folder / "workspaces"),
        groups=True,
        figures=Figures([*(f"{route.method} {route.path}" for route in ROUTES), "none"]),
        threads=threads,
        probe=lambda: None,
    )
    server = uvicorn.Server(
        uvicorn.Config(assemble(service), port=0, log_level="warning", lifespan="on")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield RunningServer(guard, service, port)
    finally:
        server.should_exit = True
        thread.join(30)


def encode_ingest(*batches):
    """The body of a request that takes these batches in."""
    return msgspec.msgpack.encode(
        IngestRequest(
            [
                WireBatch(b.writer_id, b.attempt, b.rank, b.number, b.kind, b.count, b.body)
                for b in batches
            ]
        )
    )


def ingest(client, *batches, **headers):
    return client.post(
        f"/v1/runs/{batches[0].run_id}/batches",
        content=encode_ingest(*batches),
        headers={"Content-Type": MSGPACK, **headers},
    )
