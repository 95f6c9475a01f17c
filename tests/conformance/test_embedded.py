"""The embedded store passes the conformance kit."""

import sqlite3

import pytest

from quark_backends.embedded.plugin import quark_register_backends
from quark_core.backend import BackendConfig
from quark_core.codec import decode_body
from quark_core.testing.conformance import BackendConformance


class TestEmbedded(BackendConformance):
    @pytest.fixture
    def definition(self):
        return quark_register_backends()[0]

    @pytest.fixture
    def config(self, tmp_path):
        return BackendConfig(storage_dir=tmp_path, run_id=self.RUN_ID)

    @pytest.fixture
    def observe(self, config):
        def read():
            database = sqlite3.connect(config.storage_dir / ".quark" / "quark.db")
            bodies = database.execute("SELECT body FROM batch WHERE kind = 'metric' ORDER BY pk")
            rows = []
            for (body,) in bodies:
                columns = decode_body(body)
                names = ("metric_key", "step", "value")
                rows += list(zip(*map(columns.to_list, names), strict=True))
            database.close()
            return rows

        return read
