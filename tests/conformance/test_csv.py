"""The CSV mirror passes the conformance kit."""

import contextlib
import csv

import pytest

from quark_backends.csv.plugin import quark_register_backends
from quark_core.backends.contract import BackendConfig
from quark_core.testing.conformance import BackendConformance


class TestCsv(BackendConformance):
    TITLE = "CSV mirror"

    @pytest.fixture
    def definition(self):
        return quark_register_backends()[0]

    @pytest.fixture
    def config(self, tmp_path):
        return BackendConfig(storage_dir=tmp_path, run_id=self.RUN_ID, location="out")

    @pytest.fixture
    def observe(self, config):
        def read():
            folder = config.storage_dir / "out" / self.RUN_ID
            found = []
            # A second process has files of its own while the first one lives.
            for path in sorted(folder.glob("metrics_long*.csv"), key=lambda path: len(path.name)):
                with path.open(newline="") as file:
                    found += [
                        (row["key"], int(row["step"]) if row["step"] else None, float(row["value"]))
                        for row in csv.DictReader(file)
                    ]
            return found

        return read

    @pytest.fixture
    def outage(self, config):
        """A file where the run's folder was."""
        folder = config.storage_dir / "out" / self.RUN_ID
        aside = folder.with_name("aside")

        @contextlib.contextmanager
        def take_away():
            folder.rename(aside)
            folder.write_text("in the way")
            try:
                yield
            finally:
                folder.unlink()
                aside.rename(folder)

        return take_away
