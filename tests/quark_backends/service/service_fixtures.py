"""Real servers on free ports of this machine, with workspaces and keys.

In this process, which is quick:

    with serving(tmp_path) as server:
        with server.client("default", "admin") as client:
            client.get("/v1/workspace")

As `quark serve` in a process of its own, which can be killed:

    with serving_process(tmp_path, "--workers", "2") as server:
        ...

Both answer, but on a busy machine not always within the seconds that a start may wait: runs that
begin while they are there wait longer, in this process and in its children.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import msgspec
import psutil
from wide_bounds import STARTS, widened

from quark_backends.service.protocol import MSGPACK, IngestRequest, WireBatch
from quark_backends.service.server.config import Limits, ServiceConfig
from quark_backends.service.server.deployment import Deployment
from quark_backends.service.server.keys import make_key
from quark_backends.service.server.process import bind_socket, make_server
from quark_core.records.base import now_us

START_S = 60.0


class Keys:
    """Makes workspaces and keys in a server's databases."""

    def __init__(self, store_url):
        self.store_url = store_url

    def make_key(self, workspace="default", *scopes, expires_us=None, name="test"):
        deployment = Deployment(ServiceConfig(store_url=self.store_url, artifact_url="."))
        try:
            deployment.add_workspace(workspace)
            key, _ = make_key(
                deployment.control,
                workspace=workspace,
                name=name,
                scopes=scopes or ("admin",),
                expires_us=expires_us,
            )
        finally:
            deployment.close()
        return key

    def revoke(self, key):
        """What `quark keys revoke` does: in the database, past the server."""
        deployment = Deployment(ServiceConfig(store_url=self.store_url, artifact_url="."))
        try:
            deployment.control.end_key(key.split("_")[1], revoked_us=now_us())
        finally:
            deployment.close()

    def client(self, workspace="default", *scopes, key=None, **arguments):
        """An httpx client with a key of a workspace, a new one by default."""
        key = key or self.make_key(workspace, *scopes)
        arguments.setdefault("timeout", 60)
        headers = {"Authorization": f"Bearer {key}", **arguments.pop("headers", {})}
        # The system's certificates take longer to read than a test's requests.
        arguments.setdefault("verify", self.url.startswith("https"))
        return httpx.Client(base_url=self.url, headers=headers, **arguments)


class ThreadServer(Keys):
    """A server in a thread; `server.service` is what its routes share."""

    def __init__(self, config, make_page=None):
        super().__init__(config.store_url)
        self.bound = bind_socket("127.0.0.1", 0)
        self.port = self.bound.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = make_server(config, make_page=make_page)
        self.service = self.server.service
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self.bound]}, daemon=True
        )
        self.thread.start()
        deadline = time.monotonic() + START_S
        while not self.server.started:
            assert self.thread.is_alive(), "the server did not start"
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def stop(self):
        self.server.should_exit = True
        self.thread.join(START_S)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def serving(folder, *, store_url=None, limits=None, make_page=None, **settings):
    """A server in a thread of this process; keys that it looked up are not kept."""
    settings.setdefault("key_cache_s", 0.0)
    settings.setdefault("shutdown_s", 5.0)
    config = ServiceConfig(
        store_url=store_url or f"sqlite:///{folder}/service.db",
        artifact_url=str(folder / "payloads"),
        limits=Limits(**(limits or {})),
        **settings,
    )
    deployment = Deployment(config)
    deployment.upgrade()
    deployment.add_workspace("default")
    deployment.close()
    server = ThreadServer(config, make_page)
    try:
        with widened(STARTS):
            yield server
    finally:
        server.stop()


class ServerProcess(Keys):
    """`quark serve` in a process of its own."""

    def __init__(self, folder, *arguments, store_url=None, environ=None, port=0):
        super().__init__(store_url or f"sqlite:///{folder}/service.db")
        self.log = folder / "server.log"
        folder.mkdir(parents=True, exist_ok=True)
        self.log_file = self.log.open("ab")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "quark", "serve"),
                *("--store", self.store_url, "--artifacts", str(folder / "payloads")),
                *("--port", str(port), *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=self.log_file,
            text=True,
            env={**os.environ, **(environ or {})},
            start_new_session=True,
        )
        self.output = ""
        self.url = self._read_url()
        self.port = int(self.url.rpartition(":")[2])
        self._wait()

    @property
    def pid(self):
        return self.process.pid

    def find_pids(self):
        """The server's processes: the parent and its workers."""
        found = [self.pid]
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat") as file:
                        parent = int(file.read().rpartition(")")[2].split()[1])
                    if parent == self.pid:
                        found.append(int(name))
                except OSError:
                    continue
        return found

    def kill(self):
        """Kill all of its processes at once, as a power cut would, until none has the port."""
        workers = self.find_pids()[1:]
        with contextlib.suppress(ProcessLookupError):
            # They are a group: so is a worker that it starts at this moment.
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(START_S)
        deadline = time.monotonic() + START_S
        while any(map(_is_running, workers)):
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(START_S)
        finally:
            if self.process.poll() is None:
                self.kill()
            self.process.stdout.close()
            self.log_file.close()

    def _read_url(self):
        while line := self.process.stdout.readline():
            self.output += line
            if found := re.search(r"serves on (http\S+)", line):
                return found[1]
        raise AssertionError(f"the server did not start: {self.output}\n{self.log.read_text()}")

    def _wait(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/healthz", verify=False).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.02)
        raise AssertionError(f"the server does not answer: {self.log.read_text()}")


def _is_running(pid):
    try:
        # Nobody may be there to take the exit status of an orphan.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def serving_process(folder, *arguments, **settings):
    """`quark serve` in a process of its own."""
    server = ServerProcess(folder, *arguments, **settings)
    try:
        with widened(STARTS):
            yield server
    finally:
        server.stop()


def encode_ingest(*batches):
    """The body of a request that takes these batches in."""
    return msgspec.msgpack.encode(IngestRequest([WireBatch.of(batch) for batch in batches]))


def ingest(client, *batches, run_id=None, **headers):
    """Send batches of one run; returns the response."""
    return client.post(
        f"/v1/runs/{run_id or batches[0].run_id}/batches",
        content=encode_ingest(*batches),
        headers={"Content-Type": MSGPACK, **headers},
    )


def call(client, method, /, *, accept="application/json", after=None, store=None, **arguments):
    """Call a method of the contract; returns the response."""
    asked = {"after": after, "store": store}
    return client.post(
        f"/v1/call/{method}",
        json=arguments,
        params={name: value for name, value in asked.items() if value is not None},
        headers={"Accept": accept},
    )


def ask(client, method, /, **arguments):
    """What a method of the contract returns."""
    reply = call(client, method, **arguments)
    assert reply.status_code == 200, reply.text
    return reply.json()


def error_of(response):
    """The error that a response is."""
    return response.json()["error"]


def make_databases(store_url):
    """The databases of a service, as its first start makes them."""
    deployment = Deployment(ServiceConfig(store_url=store_url))
    deployment.upgrade()
    deployment.close()
