"""The embedded store passes the conformance kit."""

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from quark_backends.embedded.plugin import quark_register_backends
from quark_core.backends.contract import BackendConfig
from quark_core.records.codec import decode_body
from quark_core.testing.conformance import BackendConformance
from quark_core.testing.kit import OldStore

QUERY = """
    SELECT batch.body FROM batch
    JOIN writer ON writer.pk = batch.writer_pk JOIN run ON run.pk = writer.run_pk
    WHERE run.id = ? AND batch.kind = 'metric' ORDER BY batch.pk
"""
STORES = Path(__file__).parent.parent / "assets" / "stores"


class TestEmbedded(BackendConformance):
    TITLE = "Embedded store (SQLite)"

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
            bodies = database.execute(QUERY, (self.RUN_ID,))
            rows = []
            for (body,) in bodies:
                columns = decode_body(body)
                names = ("metric_key", "step", "value")
                rows += list(zip(*map(columns.to_list, names), strict=True))
            database.close()
            return rows

        return read

    @pytest.fixture
    def old_stores(self, tmp_path):
        stores = []
        for path in sorted(STORES.iterdir()):
            root = tmp_path / path.name
            shutil.copytree(path / "store", root / ".quark")
            metrics = json.loads((path / "expected.json").read_text())["resumed"]["metrics"]
            stores.append(
                OldStore(
                    version=path.name,
                    config=BackendConfig(storage_dir=root, run_id="resumed"),
                    run_id="resumed",
                    metrics=[
                        (key, row[1], float(row[0]))
                        for key, rows in metrics.items()
                        for row in rows
                    ],
                )
            )
        return stores
