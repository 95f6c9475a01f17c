"""Origins of settings pass through the real service, and a stranger's are checked."""

import pytest
from service_fixtures import call, ingest, serving

from quark_backends.service.calls import decode_value
from quark_backends.service.protocol import JSON
from quark_core.backends.run_summary import StoredRun
from quark_core.records.runs import SettingOrigin
from quark_core.testing.fakes import BatchMaker

ORIGIN = {"key": "lr", "source": "high_lr", "place": "train.py:7", "value": 0.1}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("origins")) as server, server.client() as client:
        yield client


def send(client, run_id, origins):
    maker = BatchMaker(run_id)
    data = {"values": {"lr": 0.1}, "notes": [], "origins": origins}
    assert ingest(client, maker.start()).status_code == 200
    return ingest(client, maker.lifecycle(("config", data)))


def load(client, run_id):
    return decode_value(call(client, "load_run", run_id=run_id).content, JSON, StoredRun)


def test_they_come_back_as_they_were(client):
    other = {"key": "db.host", "source": "x", "place": None, "value": {"a": [1]}}
    assert send(client, "run1", [ORIGIN, other]).status_code == 200
    stored = load(client, "run1")
    assert stored.config.origins == (
        SettingOrigin("lr", "high_lr", "train.py:7", 0.1),
        SettingOrigin("db.host", "x", None, {"a": [1]}),
    )


@pytest.mark.parametrize(
    ("number", "origins"),
    list(
        enumerate(
            [
                "x",
                [3],
                [{"key": "lr"}],
                [{**ORIGIN, "source": "x" * 5000}],
                [{**ORIGIN, "place": 7}],
                [ORIGIN] * 20_001,
            ]
        )
    ),
)
def test_what_is_none_is_refused(client, number, origins):
    assert send(client, f"bad{number}", origins).status_code in (400, 422)


def test_a_run_without_is_as_before(client):
    assert send(client, "bare", None).status_code == 200
    assert load(client, "bare").config.origins == ()
