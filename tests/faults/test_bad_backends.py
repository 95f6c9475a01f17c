"""A backend that raises, hangs or exits touches neither the run nor the backend beside it."""

import logging
import time

import pytest
from kit.programs import log_steps, wait_until

import quark
from quark_core.backends.registry import default_registry
from quark_core.errors import BackendUnavailable
from quark_core.testing.fakes import ScriptedBackend, define_scripted


@pytest.fixture
def add_backend(monkeypatch):
    """Make a backend known under a name, for this test."""
    registry = default_registry()

    def add(name, backend, **arguments):
        definition = define_scripted(name, backend, **arguments)
        monkeypatch.setitem(registry._definitions, name, definition)
        return backend

    return add


def train(session, steps=200):
    metrics = quark.MetricsLogger(session)
    log_steps(metrics, steps)
    return metrics


@pytest.mark.parametrize("fault", ["bug", "exit", "unavailable"])
def test_a_failing_mirror_costs_only_itself(tmp_path, add_backend, fault, monkeypatch, caplog):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "10")
    bad = add_backend("bad", ScriptedBackend(always=fault))
    good = add_backend("good", ScriptedBackend())
    with quark.start_run(project="p", storage_dir=tmp_path, backends="bad,good") as session:
        metrics = train(session)
        assert len(metrics.read()) == 200
    lanes = {lane.backend: lane for lane in session.report_delivery().lanes}
    assert lanes["embedded"].complete
    assert lanes["good"].complete
    assert good.count_records == lanes["good"].submitted
    assert lanes["bad"].delivered == 0
    assert lanes["bad"].waiting == lanes["bad"].submitted > 200
    assert lanes["bad"].errors
    assert bad.stored == []
    assert quark.open_run(session.run_id, tmp_path).status == "completed"
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("bad" in line and "waiting" in line for line in said)


def test_a_hanging_mirror_does_not_hang_the_end(tmp_path, add_backend, monkeypatch):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "10")
    stuck = add_backend("stuck", ScriptedBackend(always="hang"), idempotent=False)
    with quark.start_run(project="p", storage_dir=tmp_path, backends=["stuck"]) as session:
        train(session)
        session.flush()
        assert wait_until(lambda: stuck.calls)
    assert not stuck.release.is_set()
    lanes = {lane.backend: lane for lane in session.report_delivery().lanes}
    assert lanes["embedded"].complete
    stuck_lane = lanes["stuck"]
    assert stuck_lane.unknown > 0
    assert stuck_lane.unknown + stuck_lane.waiting == stuck_lane.submitted
    stuck.release.set()


def test_a_refusing_mirror_is_quarantined_with_its_reason(tmp_path, add_backend):
    add_backend("picky", ScriptedBackend(always="rejected"))
    with quark.start_run(project="p", storage_dir=tmp_path, backends="picky") as session:
        train(session)
    (lane,) = [one for one in session.report_delivery().lanes if one.backend == "picky"]
    assert lane.quarantined == {"planted refusal": lane.submitted}
    files = list((session.run_path / "quarantine" / "picky").glob("*.batch"))
    assert len(files) >= 3
    assert "planted refusal" in lane.describe()


def test_a_mirror_that_cannot_be_opened_does_not_stop_the_start(tmp_path, add_backend, monkeypatch):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "10")
    (tmp_path / "out").write_text("a file where the mirror wants a folder")
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv:out") as session:
        train(session)
        session.flush()
    lanes = {lane.backend: lane for lane in session.report_delivery().lanes}
    assert lanes["embedded"].complete
    assert lanes["csv"].delivered == 0


@pytest.mark.long
def test_the_same_backend_twice_is_told_apart(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv:a,csv:b") as session:
        train(session)
    names = [lane.backend for lane in session.report_delivery().lanes]
    assert names == ["embedded", "csv:a", "csv:b"]
    for folder in ("a", "b"):
        assert (tmp_path / folder / session.run_id / "metrics_long.csv").is_file()


def fail_primary(session, error):
    """Make the open primary raise at every write from now on."""
    lane = session.open_run.stream._lanes[0]

    def write(*_):
        raise error

    lane._backend.write = lane._backend.write_group = write
    return lane


def test_an_outage_of_the_primary_is_raised_by_flush_only(tmp_path, monkeypatch):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        lane = fail_primary(session, BackendUnavailable("planted outage"))
        metrics = train(session, 50)
        monkeypatch.setenv("QUARK_PERSISTENCE_TIMEOUT_SECONDS", "0.2")
        with pytest.raises(quark.SessionStoreError, match="planted outage"):
            metrics.flush()
        with pytest.raises(quark.SessionStoreError, match="Nothing is lost"):
            metrics.read()
        metrics.log("m", 50.0, step=50)
        monkeypatch.delenv("QUARK_PERSISTENCE_TIMEOUT_SECONDS")
        del lane._backend.write, lane._backend.write_group
        lane.nudge()
        assert len(metrics.read()) == 51
    assert session.report_delivery().complete


def test_a_strict_run_raises_the_primarys_first_error_at_the_next_call(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.3")
    session = quark.start_run(project="p", storage_dir=tmp_path, strict_mode=True)
    metrics = quark.MetricsLogger(session)
    fail_primary(session, BackendUnavailable("planted outage"))
    metrics.log("m", 0.0, step=0)
    deadline = time.monotonic() + 60
    with pytest.raises(quark.SessionStoreError, match="planted outage"):
        while time.monotonic() < deadline:
            metrics.log("m", 1.0, step=1)
            time.sleep(0.005)
    with pytest.raises(quark.SessionStoreError, match="planted outage"):
        metrics.close()
    session.end_run("failed")
