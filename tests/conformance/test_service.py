"""The persistence service, reached by its client, passes the conformance kit."""

import sqlite3

import pytest
from service_fixtures import serving

from quark_backends.service.plugin import quark_register_backends
from quark_core.backend import BackendConfig
from quark_core.codec import decode_body
from quark_core.testing.conformance import BackendConformance


class TestService(BackendConformance):
    @pytest.fixture
    def server(self, tmp_path):
        with serving(tmp_path / "server") as running:
            yield running

    @pytest.fixture
    def definition(self):
        return quark_register_backends()[0]

    @pytest.fixture
    def config(self, tmp_path, server, monkeypatch):
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key("default"))
        return BackendConfig(
            storage_dir=tmp_path / "client",
            run_id=self.RUN_ID,
            location=server.url,
            # The kit's runs belong to no project store.
            options={"store": "*"},
        )

    @pytest.fixture
    def observe(self, tmp_path, server):
        def read():
            (path,) = (tmp_path / "server").glob("workspaces/default/.quark/quark.db")
            database = sqlite3.connect(path)
            bodies = database.execute("SELECT body FROM batch WHERE kind = 'metric' ORDER BY pk")
            rows = []
            for (body,) in bodies:
                columns = decode_body(body)
                names = ("metric_key", "step", "value")
                rows += list(zip(*map(columns.to_list, names), strict=True))
            database.close()
            return rows

        return read
