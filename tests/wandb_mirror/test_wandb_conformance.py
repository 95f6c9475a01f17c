"""The W&B mirror passes the conformance kit."""

import pytest

from quark_core.testing.conformance import BackendConformance

pytest.importorskip("wandb")


class TestWandb(BackendConformance):
    TITLE = "W&B mirror, offline"

    @pytest.fixture
    def definition(self, definition):
        return definition

    @pytest.fixture
    def config(self, config):
        return config

    @pytest.fixture
    def observe(self, config, read_mirror):
        def read():
            mirrored = read_mirror(config.run_path)
            return [
                (key, row.get("quark/step"), row[key])
                for row in mirrored.rows
                for key in row
                if key in mirrored.keys
            ]

        return read
