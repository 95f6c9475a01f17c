"""The MLflow mirror passes the conformance kit, but for what MLflow cannot hold."""

import dataclasses
import math

import pytest

from quark_core.testing.conformance import BackendConformance


class TestMlflow(BackendConformance):
    @pytest.fixture
    def config(self, request, config):
        if request.node.name != "test_lifecycle_is_applied":
            return config
        # That one lists every run there is, so it needs a server that no other test has used.
        server = request.getfixturevalue("own_server")
        return dataclasses.replace(config, location=server.uri)

    @pytest.fixture
    def definition(self, definition):
        return definition

    @pytest.fixture
    def observe(self, server, project):
        def read():
            rows = server.query(
                "SELECT m.key, m.step, m.value, m.is_nan FROM metrics m "
                "JOIN runs r ON r.run_uuid = m.run_uuid "
                "JOIN experiments e ON e.experiment_id = r.experiment_id "
                "WHERE e.name = ? ORDER BY m.rowid",
                project,
            )
            return [(key, step, math.nan if nan else value) for key, step, value, nan in rows]

        return read

    @pytest.mark.xfail(reason="MLflow's stores have no infinity; the mirror sends NaN and a tag")
    def test_values_are_kept_exactly(self, open_backend, maker, observe):
        super().test_values_are_kept_exactly(open_backend, maker, observe)

    @pytest.mark.xfail(reason="MLflow's points need a step; the epoch stands in for it")
    def test_steps_may_repeat_and_go_backwards(self, open_backend, maker, observe):
        super().test_steps_may_repeat_and_go_backwards(open_backend, maker, observe)
