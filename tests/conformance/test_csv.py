"""The CSV mirror passes the conformance kit."""

import csv

import pytest

from quark_backends.csv.plugin import quark_register_backends
from quark_core.backend import BackendConfig
from quark_core.testing.conformance import BackendConformance


class TestCsv(BackendConformance):
    @pytest.fixture
    def definition(self):
        return quark_register_backends()[0]

    @pytest.fixture
    def config(self, tmp_path):
        return BackendConfig(storage_dir=tmp_path, run_id=self.RUN_ID, location="out")

    @pytest.fixture
    def observe(self, config):
        def read():
            path = config.storage_dir / "out" / self.RUN_ID / "metrics_long.csv"
            with path.open(newline="") as file:
                return [
                    (row["key"], int(row["step"]) if row["step"] else None, float(row["value"]))
                    for row in csv.DictReader(file)
                ]

        return read
