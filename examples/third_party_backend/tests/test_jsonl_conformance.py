"""The backend passes the conformance kit, on a local disk."""

import contextlib
import json

import pytest
from quark_jsonl.plugin import quark_register_backends

from quark_core.api import BackendConfig
from quark_core.testing.conformance import BackendConformance


class TestJsonLines(BackendConformance):
    TITLE = "JSON lines, the example of a third party"

    @pytest.fixture
    def definition(self):
        return quark_register_backends()[0]

    @pytest.fixture
    def config(self, tmp_path):
        return BackendConfig(storage_dir=tmp_path, run_id=self.RUN_ID, location="out")

    @pytest.fixture
    def observe(self, config):
        """The files, read with nothing of the backend, in the order in which they came."""
        folder = config.storage_dir / "out" / self.RUN_ID

        def read():
            found = []
            paths = folder.rglob("*-metric.jsonl")
            for path in sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name)):
                _, *records = map(json.loads, path.read_text().splitlines())
                found += [(one["metric_key"], one["step"], one["value"]) for one in records]
            return found

        return read

    @pytest.fixture
    def outage(self, config):
        """A file where the folder was."""
        folder = config.storage_dir / "out"
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
