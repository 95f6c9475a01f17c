"""Mirrors that take artifacts get each payload before its record, through outages and refusals."""

import os

import pytest
from directory_backends import DirectoryMirror, define_mirror
from kit.programs import wait_until
from payload_tools import list_objects, sha256

import quark
from quark_core.backends.registry import default_registry
from quark_core.runs import recovery
from quark_core.testing.fakes import ScriptedBackend, define_scripted


@pytest.fixture
def add(monkeypatch):
    """Make a backend known under its name, for this test."""

    def add_one(definition):
        monkeypatch.setitem(default_registry()._definitions, definition.name, definition)

    return add_one


@pytest.fixture
def mirror(tmp_path, add):
    mirror = DirectoryMirror(tmp_path / "mirror")
    add(define_mirror(mirror))
    return mirror


def start(tmp_path, backends="mirror", **arguments):
    return quark.start_run(
        project="p", storage_dir=tmp_path / "runs", backends=backends, **arguments
    )


def find_lane(session, name="mirror"):
    (lane,) = [lane for lane in session.report_delivery().lanes if lane.backend == name]
    return lane


def store_some(session, path):
    artifacts = quark.ArtifactStore(session)
    path.write_bytes(os.urandom(50_000))
    return [
        *(artifacts.store("t", f"n{index}", os.urandom(10**index)) for index in range(6)),
        artifacts.store("t", "empty", b""),
        artifacts.store_file("t", "file", path),
        *(artifacts.store("t", "equal", "the same", step=step) for step in range(3)),
    ]


def test_a_mirror_gets_each_payload_before_its_record(tmp_path, mirror):
    with start(tmp_path) as session:
        records = store_some(session, tmp_path / "file.bin")
        quark.MetricsLogger(session).log("m", 1.0, step=0)
    assert session.report_delivery().complete
    mirror.assert_payloads_came_first()
    assert mirror.records == records
    assert mirror.payloads.keys() == {record.sha256 for record in records}
    for name, data in mirror.payloads.items():
        assert sha256(data) == name
    # What the primary has stays where it is.
    assert list_objects(session).keys() == mirror.payloads.keys()


@pytest.mark.parametrize("fault", ["unavailable", "bug"])
def test_an_outage_delays_and_then_all_of_it_comes(tmp_path, mirror, fault):
    mirror.fault = fault
    with start(tmp_path) as session:
        artifacts = quark.ArtifactStore(session)
        metrics = quark.MetricsLogger(session)
        records = [artifacts.store("t", "n", os.urandom(100), step=step) for step in range(5)]
        metrics.log("m", 1.0, step=0)
        assert mirror.asked.wait(30)
        # The primary, and whoever reads, notices nothing.
        assert artifacts.read() == tuple(records)
        assert len(artifacts.load(records[0])) == 100
        assert mirror.records == []
        assert wait_until(lambda: "planted" in str(find_lane(session).errors))
        mirror.fault = None
    assert session.report_delivery().complete
    mirror.assert_payloads_came_first()
    assert mirror.records == records
    assert len(mirror.payloads) == 5


@pytest.mark.sampled
@pytest.mark.parametrize("idempotent", [True, False])
def test_an_outage_over_the_end_of_the_run_is_made_up_for_by_sync(
    tmp_path, mirror, add, monkeypatch, idempotent
):
    # A payload may come twice; that it did not come must not make its batch count as begun.
    add(define_mirror(mirror, idempotent=idempotent))
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.3")
    mirror.fault = "unavailable"
    with start(tmp_path) as session:
        records = store_some(session, tmp_path / "file.bin")
    assert find_lane(session).waiting >= len(records)
    mirror.fault = None
    recovery.sync(tmp_path / "runs")
    assert recovery.survey(tmp_path / "runs") == []
    mirror.assert_payloads_came_first()
    assert mirror.records == records
    assert mirror.payloads.keys() == {record.sha256 for record in records}


def test_a_payload_that_is_refused_costs_its_batch_only(tmp_path, mirror):
    refused = os.urandom(100)
    mirror.refused = {sha256(refused)}
    with start(tmp_path) as session:
        artifacts = quark.ArtifactStore(session)
        first = artifacts.store("t", "good", b"first")
        session.flush()
        assert wait_until(lambda: mirror.records == [first])
        bad = artifacts.store("t", "bad", refused)
        session.flush()
        assert wait_until(lambda: find_lane(session).quarantined)
        last = artifacts.store("t", "good", b"last")
    assert find_lane(session).quarantined == {"planted refusal": 1}
    assert find_lane(session).waiting == 0
    assert mirror.records == [first, last]
    assert len(list((session.run_path / "quarantine" / "mirror").glob("*.batch"))) == 1
    # The primary has it, in its own place, which is not copied.
    assert artifacts.load(bad) == refused
    assert list((session.run_path / "quarantine").rglob(bad.sha256)) == []


def test_a_payload_that_somebody_has_deleted_is_left_out(tmp_path, mirror, caplog):
    mirror.fault = "unavailable"
    with start(tmp_path) as session:
        artifacts = quark.ArtifactStore(session)
        gone = artifacts.store("t", "gone", b"gone")
        kept = artifacts.store("t", "kept", b"kept")
        session.flush()
        list_objects(session)[gone.sha256].unlink()
        mirror.fault = None
    assert session.report_delivery().complete
    assert mirror.payloads == {kept.sha256: b"kept"}
    assert mirror.records == [gone, kept]
    assert "payload of artifact gone is missing" in caplog.text


def test_what_was_not_kept_is_told_to_mirrors_and_not_sent(tmp_path, mirror, monkeypatch):
    with start(tmp_path) as session:
        artifacts = quark.ArtifactStore(session)
        with monkeypatch.context() as broken:

            def refuse(*_):
                raise OSError(28, "No space left on device")

            broken.setattr("quark_core.artifacts.payload_folder._Partial.write", refuse)
            lost = artifacts.store("t", "n", b"lost")
    assert session.report_delivery().complete
    assert lost.payload_relative_path is None
    assert mirror.records == [lost]
    assert mirror.payloads == {}


def test_a_lane_that_takes_no_artifacts_gets_their_records(tmp_path, mirror, add):
    plain = ScriptedBackend()
    add(define_scripted("plain", plain))
    with start(tmp_path, "plain,csv,mirror") as session:
        records = store_some(session, tmp_path / "file.bin")
    assert session.report_delivery().complete
    stored = [r for b in plain.stored if b.kind == "artifact" for r in b.to_records()]
    assert stored == records
    assert mirror.records == records


def test_two_mirrors_each_get_all_of_it(tmp_path, mirror, add):
    other = DirectoryMirror(tmp_path / "other")
    other.fault = "unavailable"
    add(define_mirror(other, "other"))
    with start(tmp_path, "mirror,other") as session:
        records = store_some(session, tmp_path / "file.bin")
        session.flush()
        assert wait_until(lambda: mirror.records == records)
        other.fault = None
    assert session.report_delivery().complete
    assert other.records == records
    assert other.payloads == mirror.payloads


@pytest.mark.long
def test_an_artifact_of_a_resumed_run_is_sent_too(tmp_path, mirror):
    with start(tmp_path) as session:
        first = quark.ArtifactStore(session).store("t", "n", b"equal", step=0)
        session.end_run("failed")
    with quark.resume_run(
        run_id=session.run_id, storage_dir=tmp_path / "runs", backends="mirror"
    ) as resumed:
        second = quark.ArtifactStore(resumed).store("t", "n", b"equal", step=1)
    assert mirror.records == [first, second]
    mirror.assert_payloads_came_first()
