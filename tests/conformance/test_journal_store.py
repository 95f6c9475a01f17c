"""The embedded store where the journal is the store passes the conformance kit."""

import pytest
from journaled_store import define

from quark_core.backend import BackendConfig
from quark_core.delivery.journal import JournalReader
from quark_core.delivery.journal_folder import find_folders
from quark_core.delivery.journal_order import order_journals
from quark_core.testing.conformance import BackendConformance


class TestJournalStore(BackendConformance):
    TITLE = "Embedded store (journal only)"

    @pytest.fixture
    def definition(self):
        return define()

    @pytest.fixture
    def config(self, tmp_path, monkeypatch):
        monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
        return BackendConfig(storage_dir=tmp_path, run_id=self.RUN_ID)

    @pytest.fixture
    def observe(self, config):
        def read():
            rows = []
            for folder, manifest in order_journals(find_folders(config.storage_dir)):
                if manifest.run_id != self.RUN_ID:
                    continue
                for batch in JournalReader(folder.path).read():
                    if batch.kind == "metric":
                        columns = map(batch.decoded.to_list, ("metric_key", "step", "value"))
                        rows += list(zip(*columns, strict=True))
            return rows

        return read
