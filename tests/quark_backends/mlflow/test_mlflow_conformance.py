"""The MLflow mirror passes the conformance kit, but for what MLflow cannot hold."""

import contextlib
import dataclasses
import math
import re

import pytest
from chaos_proxy import ChaosProxy

from quark_core.testing.conformance import BackendConformance


@pytest.mark.long
class TestMlflow(BackendConformance):
    TITLE = "MLflow mirror"
    # Its library alone takes seconds to load, and minutes on a busy machine.
    TIME_LIMIT_S, CLOSE_LIMIT_S = 240.0, 60.0
    EXPECTED_FAILURES = {
        "test_values_are_kept_exactly": (
            "MLflow's stores have no infinity; the mirror sends NaN and a tag"
        ),
        "test_steps_may_repeat_and_go_backwards": (
            "MLflow's points need a step; the epoch stands in for it"
        ),
        "test_odd_names_are_kept_apart": (
            "MLflow's stores may fold case, so a hash tells such names apart"
        ),
    }

    @pytest.fixture
    def proxy(self, server):
        with ChaosProxy(("127.0.0.1", server.port)) as running:
            yield running

    @pytest.fixture
    def config(self, config, empty_server, proxy, monkeypatch):
        # MLflow's own tries again would only take time.
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        # The ids of samples are hashed by default, so they would not come back as they were.
        options = {"sample_ids": "plain", "quark": "full"}
        return dataclasses.replace(config, location=proxy.url, options=options)

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
                "JOIN tags t ON t.run_uuid = m.run_uuid AND t.key = 'quark.run_id' "
                "WHERE e.name = ? AND t.value = ? ORDER BY m.rowid",
                project,
                self.RUN_ID,
            )
            return [
                (re.sub("^rank[0-9]+/", "", key), step, math.nan if nan else value)
                for key, step, value, nan in rows
            ]

        return read
