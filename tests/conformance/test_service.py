"""The persistence service, reached by its client, passes the conformance kit."""

import contextlib
import sqlite3
import uuid

import pytest
from chaos_proxy import ChaosProxy
from service_fixtures import serving

from quark_backends.service.plugin import quark_register_backends
from quark_core.backends.contract import BackendConfig
from quark_core.records.codec import decode_body
from quark_core.testing.conformance import BackendConformance


class _ServiceConformance(BackendConformance):
    """What the service's tests have in common: a proxy before the server, which may refuse."""

    @pytest.fixture
    def proxy(self, port):
        with ChaosProxy(("127.0.0.1", port)) as running:
            yield running

    @pytest.fixture
    def outage(self, proxy):
        """Nobody listens."""

        @contextlib.contextmanager
        def refuse():
            proxy.set_mode("refuse")
            try:
                yield
            finally:
                proxy.set_mode("pass")

        return refuse


def _read_points(bodies):
    rows = []
    for (body,) in bodies:
        columns = decode_body(bytes(body))
        names = ("metric_key", "step", "value")
        rows += list(zip(*map(columns.to_list, names), strict=True))
    return rows


class TestService(_ServiceConformance):
    TITLE = "Service over SQLite"

    @pytest.fixture
    def server(self, tmp_path):
        with serving(tmp_path / "server") as running:
            yield running

    @pytest.fixture
    def port(self, server):
        return server.port

    @pytest.fixture
    def definition(self):
        return quark_register_backends()[0]

    @pytest.fixture
    def config(self, tmp_path, server, proxy, monkeypatch):
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key("default"))
        return BackendConfig(
            storage_dir=tmp_path / "client",
            run_id=self.RUN_ID,
            location=proxy.url,
            # The kit's runs belong to no project store.
            options={"store": "*"},
        )

    @pytest.fixture
    def observe(self, tmp_path, server):
        def read():
            (path,) = (tmp_path / "server").glob("workspaces/default/.quark/quark.db")
            database = sqlite3.connect(path)
            bodies = database.execute(
                "SELECT b.body FROM batch AS b JOIN writer AS w ON w.pk = b.writer_pk"
                " JOIN run AS r ON r.pk = w.run_pk"
                " WHERE r.id = ? AND b.kind = 'metric' ORDER BY b.pk",
                (self.RUN_ID,),
            )
            rows = _read_points(bodies)
            database.close()
            return rows

        return read


@pytest.fixture(scope="module")
def service_on_postgres(tmp_path_factory, postgres_url):
    with serving(tmp_path_factory.mktemp("server"), store_url=postgres_url) as running:
        yield running


@pytest.mark.long
class TestServiceOnPostgres(_ServiceConformance):
    """The same over PostgreSQL; each test has a workspace, which is a schema, of its own."""

    TITLE = "Service over PostgreSQL"

    @pytest.fixture
    def port(self, service_on_postgres):
        return service_on_postgres.port

    @pytest.fixture
    def workspace(self):
        return f"kit_{uuid.uuid4().hex[:12]}"

    @pytest.fixture
    def definition(self):
        return quark_register_backends()[0]

    @pytest.fixture
    def config(self, tmp_path, service_on_postgres, proxy, workspace, monkeypatch):
        monkeypatch.setenv("QUARK_USER_KEY", service_on_postgres.make_key(workspace))
        return BackendConfig(
            storage_dir=tmp_path / "client",
            run_id=self.RUN_ID,
            location=proxy.url,
            options={"store": "*"},
        )

    @pytest.fixture
    def observe(self, postgres_url, workspace):
        import psycopg

        def read():
            with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection:
                return _read_points(
                    connection.execute(
                        f"SELECT b.body FROM quark_ws_{workspace}.batch AS b"
                        f" JOIN quark_ws_{workspace}.writer AS w ON w.pk = b.writer_pk"
                        f" JOIN quark_ws_{workspace}.run AS r ON r.pk = w.run_pk"
                        " WHERE r.id = %s AND kind = 'metric'"
                        " ORDER BY w.started_us, w.id, b.number",
                        (self.RUN_ID,),
                    )
                )

        return read
