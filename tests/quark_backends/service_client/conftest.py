"""A service on this machine, and runs that go to it."""

import sqlite3
from contextlib import closing

import pytest
from chaos_proxy import ChaosProxy
from service_fixtures import serving


@pytest.fixture
def server(tmp_path):
    """A server of its own, in this process."""
    with serving(tmp_path / "server") as running:
        yield running


@pytest.fixture
def service(server, monkeypatch):
    """The server, and the environment says so."""
    server.key = server.make_key("default")
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
    monkeypatch.setenv("QUARK_USER_KEY", server.key)
    # A restart waits less than a first start, and goes on without it.
    monkeypatch.setattr("quark_core.runs.primary_store._RESTART_S", 15.0)
    return server


@pytest.fixture
def proxied(service, monkeypatch):
    """A proxy before the service, which misbehaves when it is told to."""
    host, _, port = service.url.removeprefix("http://").partition(":")
    with ChaosProxy((host, int(port))) as proxy:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", proxy.url)
        yield proxy


@pytest.fixture
def count_rows(tmp_path):
    """Batches and metric rows of a run as the server's own database has them."""

    def count(run_id):
        path = tmp_path / "server" / "workspaces" / "default" / ".quark" / "quark.db"
        with closing(sqlite3.connect(path)) as database:
            return database.execute(
                "SELECT count(*), coalesce(sum(b.count), 0) FROM batch AS b"
                " JOIN writer AS w ON w.pk = b.writer_pk JOIN run AS r ON r.pk = w.run_pk"
                " WHERE b.kind = 'metric' AND r.id = ?",
                (run_id,),
            ).fetchone()

    return count
