"""A PgBouncer of the tests' own in transaction mode, before the PostgreSQL of the session."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from held_ports import hold_port

CONNECTIONS = 4
_START_S = 60
_SETTINGS = """
[databases]
* = host=127.0.0.1 port={server} user=quark
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {connections}
max_db_connections = {connections}
max_client_conn = 200
logfile = {folder}/log
pidfile =
"""


class PgBouncer:
    """Lends four connections of a server to its clients, for one transaction at a time.

    Like PostgreSQL it refuses to run as root, so that the tests of root start it as nobody.
    """

    def __init__(self, server):
        self.folder = Path(tempfile.mkdtemp(prefix="quark-pgbouncer-"))
        self._place, self.port = hold_port()
        self._process = None
        self._account = []
        settings = self.folder / "pgbouncer.ini"
        settings.write_text(
            _SETTINGS.format(
                server=server.port, port=self.port, folder=self.folder, connections=CONNECTIONS
            )
        )
        if os.geteuid() == 0:
            self._account = ["-u", "nobody"]
            shutil.chown(self.folder, "nobody")
            shutil.chown(settings, "nobody")
        self.start()

    @property
    def url(self):
        return f"postgresql+psycopg://quark@127.0.0.1:{self.port}/postgres"

    def find_url(self, database):
        """Where a database of the server is found, given by its own URL."""
        return self.url.replace("/postgres", "/" + database.rpartition("/")[2])

    def start(self):
        """Start, and wait until it answers."""
        self._process = subprocess.Popen(
            ["pgbouncer", "-q", *self._account, self.folder / "pgbouncer.ini"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 5).close()
            except OSError:
                time.sleep(0.02)
            else:
                return
        raise RuntimeError(f"PgBouncer did not start:\n{(self.folder / 'log').read_text()}")

    def stop(self):
        """End it, with whatever its clients are at."""
        self._process.terminate()
        self._process.wait(60)

    def remove(self):
        """End it and remove what it left."""
        self.stop()
        self._place.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def pgbouncer(request):
    """A pooler before the server of this session."""
    if shutil.which("pgbouncer") is None:
        pytest.skip("needs pgbouncer (package pgbouncer)")
    started = PgBouncer(request.getfixturevalue("postgres_server"))
    yield started
    started.remove()
