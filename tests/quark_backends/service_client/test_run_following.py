"""Curves and changes of a run on a service."""

import numpy as np
import pytest
from service_fixtures import serving

from quark_backends.service.plugin import quark_register_backends
from quark_core.backends.contract import BackendConfig
from quark_core.backends.curves import CurveQuery
from quark_core.runs.following import read_changes, read_series_many
from quark_core.testing.fakes import BatchMaker


@pytest.fixture
def open_backend(tmp_path, monkeypatch):
    opened = []

    def open_one(server):
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key("default"))
        (definition,) = quark_register_backends()
        config = BackendConfig(
            storage_dir=tmp_path / "client",
            run_id="run0",
            location=server.url,
            options={"store": "*"},
        )
        opened.append(definition.open(config))
        return opened[-1]

    yield open_one
    for backend in opened:
        backend.close()


def test_a_reply_has_bounds(tmp_path, monkeypatch, open_backend):
    from quark_backends.service.server import read_routes

    monkeypatch.setattr(read_routes, "MOST_ENTRIES", 50)
    with serving(tmp_path / "server") as server:
        backend = open_backend(server)
        maker = BatchMaker("run0")
        backend.write(maker.start())
        backend.write(maker.metrics(*[("m", step, float(step)) for step in range(60)]))
        # More points than one reply has are read as rows.
        (curve,) = read_series_many(backend, "run0", CurveQuery.build(["m"], entries=None)).curves
        assert (len(curve), curve.points, curve.exact) == (60, 60, True)
        (curve,) = read_series_many(backend, "run0", CurveQuery.build(["m"], entries=50)).curves
        assert (len(curve), curve.points) == (50, 60)
        np.testing.assert_array_equal(curve.count.sum(), 60)
        nothing = read_series_many(backend, "run0", CurveQuery.build([], entries=5))
        assert nothing.curves == ()
        assert not read_changes(backend, "run0", nothing.cursor)
