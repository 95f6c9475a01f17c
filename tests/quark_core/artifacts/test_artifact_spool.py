"""A primary elsewhere: payloads wait in the journal and go when everybody has them."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from directory_backends import DirectoryMirror, define_mirror, define_remote
from kit.programs import start_code, wait_until
from payload_tools import list_events, run_script, sha256

import quark
from quark_core.backends.registry import default_registry
from quark_core.runs import recovery

HERE = Path(__file__).parent


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """Runs go to a primary elsewhere; the list of its backends that were opened."""
    opened = []
    definition = define_remote(opened, tmp_path / "remote")
    monkeypatch.setitem(default_registry()._definitions, "remote", definition)
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", "remote")
    return opened


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    mirror = DirectoryMirror(tmp_path / "mirror")
    monkeypatch.setitem(default_registry()._definitions, "mirror", define_mirror(mirror))
    return mirror


def start(tmp_path, **arguments):
    return quark.start_run(project="p", storage_dir=tmp_path / "runs", **arguments)


def list_spooled(session):
    """Hashes that wait in the run's journals."""
    found = session.run_path.glob("journal/*/artifacts/.objects/*/*")
    return sorted(path.name for path in found)


def test_a_payload_waits_in_the_journal_and_is_loaded_from_there(tmp_path, remote):
    with start(tmp_path) as session:
        (primary,) = remote
        primary.fault = "unavailable"
        artifacts = quark.ArtifactStore(session)
        (tmp_path / "file").write_bytes(b"of a file")
        records = [
            artifacts.store("t", "a/b", {"waits": True}, step=1),
            artifacts.store_file("t", "file", tmp_path / "file"),
        ]
        assert list_spooled(session) == sorted(record.sha256 for record in records)
        for record in records:
            assert record.payload_relative_path == f"artifacts/.objects/{record.sha256[:2]}/" + (
                record.sha256
            )
            assert record.metadata_relative_path is None
        assert artifacts.load(records[0]) == {"waits": True}
        with artifacts.open(records[1]) as file:
            assert file.read() == b"of a file"
        assert primary.asked.wait(30)
        assert primary.payloads == {}
        primary.fault = None
        assert artifacts.read() == tuple(records)
        assert wait_until(lambda: list_spooled(session) == [])
        primary.assert_payloads_came_first()
        assert primary.records == records
        # Now it comes from where it was sent to.
        assert artifacts.load(records[0].id) == {"waits": True}
        assert artifacts.load_file(records[1], tmp_path / "copy").read_bytes() == b"of a file"
    assert session.report_delivery().complete
    assert not (session.run_path / "artifacts").exists()
    assert not (session.run_path / "journal").exists()
    assert artifacts.load(records[0]) == {"waits": True}
    opened = quark.ArtifactStore(quark.open_run(session.run_id, tmp_path / "runs"))
    assert [opened.load(record) for record in opened.read()] == [{"waits": True}, b"of a file"]


def test_a_payload_goes_when_all_lanes_have_it(tmp_path, remote, mirror):
    mirror.fault = "unavailable"
    with start(tmp_path, backends="mirror") as session:
        artifacts = quark.ArtifactStore(session)
        record = artifacts.store("t", "n", b"for both")
        session.flush()
        assert mirror.asked.wait(30)
        assert remote[0].records == [record]
        assert list_spooled(session) == [record.sha256]
        mirror.fault = None
        assert wait_until(lambda: list_spooled(session) == [])
    for backend in (remote[0], mirror):
        assert backend.records == [record]
        assert backend.payloads == {record.sha256: b"for both"}


@pytest.mark.long
def test_the_same_payload_stored_again_still_arrives(tmp_path, remote, mirror):
    with start(tmp_path, backends="mirror") as session:
        artifacts = quark.ArtifactStore(session)
        records = []
        for step in range(3):
            records.append(artifacts.store("t", "n", b"again", step=step))
            session.flush()
            assert wait_until(lambda: list_spooled(session) == [])
        # Several of them at once wait as one, and the first that goes does not take it away.
        mirror.fault = "unavailable"
        records += [artifacts.store("t", "n", b"again", step=step) for step in range(3, 20)]
        session.flush()
        assert list_spooled(session) == [records[0].sha256]
        assert [artifacts.load(record) for record in records] == [b"again"] * 20
        mirror.fault = None
        assert wait_until(lambda: list_spooled(session) == [])
        records.append(artifacts.store("t", "n", b"again", step=20))
    assert session.report_delivery().complete
    for backend in (remote[0], mirror):
        backend.assert_payloads_came_first()
        assert backend.records == records
        assert backend.payloads == {records[0].sha256: b"again"}
    assert not (session.run_path / "journal").exists()


@pytest.mark.parametrize("where", ["remote", "mirror"])
def test_a_refused_payload_is_set_aside(tmp_path, remote, mirror, where):
    with start(tmp_path, backends="mirror") as session:
        backend = {"remote": remote[0], "mirror": mirror}[where]
        backend.refused = {sha256(b"refused")}
        artifacts = quark.ArtifactStore(session)
        artifacts.store("t", "good", b"good")
        session.flush()
        bad = artifacts.store("t", "bad", b"refused", step=1)

        def quarantined():
            lanes = session.report_delivery().lanes
            return {lane.backend: lane.quarantined for lane in lanes}[where]

        assert wait_until(quarantined)
        last = artifacts.store("t", "good", b"last")
    assert quarantined() == {"planted refusal": 1}
    assert session.report_delivery().lanes[0].waiting == 0
    assert backend.records[-1] == last
    assert bad not in backend.records
    assert not (session.run_path / "journal").exists()
    aside = session.run_path / "quarantine" / where
    assert (aside / bad.payload_relative_path).read_bytes() == b"refused"
    assert len(list(aside.glob("*.batch"))) == 1
    other = mirror if where == "remote" else remote[0]
    assert other.payloads[bad.sha256] == b"refused"


@pytest.mark.long
def test_an_outage_over_the_end_of_the_run(tmp_path, remote, monkeypatch):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.3")
    with start(tmp_path) as session:
        remote[0].fault = "unavailable"
        records = [
            quark.ArtifactStore(session).store("t", "n", b"equal", step=step) for step in range(3)
        ]
    assert list_spooled(session) == [records[0].sha256]
    recovery.sync(tmp_path / "runs")
    assert recovery.survey(tmp_path / "runs") == []
    assert not (session.run_path / "journal").exists()
    found = quark.ArtifactStore(quark.open_run(session.run_id, tmp_path / "runs"))
    assert found.read() == tuple(records)
    assert [found.load(record) for record in records] == [b"equal"] * 3
    remote[-1].assert_payloads_came_first()


KILLED = """
import os, sys, quark
sys.path.insert(0, sys.argv[2])
from directory_backends import define_remote, register
opened = []
register(define_remote(opened, sys.argv[3]))
session = quark.start_run(project="p", storage_dir=sys.argv[1])
opened[0].fault = "unavailable"
artifacts = quark.ArtifactStore(session)
print(session.run_id, flush=True)
for step in range(40):
    record = artifacts.store("t", "n", os.urandom(1 + step * 997), step=step)
    print(record.sha256, flush=True)
print("done", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_after_a_kill_sync_sends_payloads_and_then_records(tmp_path, remote):
    child = start_code(
        KILLED,
        tmp_path / "runs",
        HERE,
        tmp_path / "remote",
        stdin=subprocess.PIPE,
        env={**os.environ, "QUARK_PERSISTENCE_URL": "remote"},
    )
    lines = []
    while not lines or lines[-1] != "done":
        line = child.stdout.readline()
        assert line
        lines.append(line.strip())
    child.send_signal(signal.SIGKILL)
    child.communicate()
    run_id, *hashes, _ = lines
    assert list((tmp_path / "remote").iterdir()) == []
    recovery.sync(tmp_path / "runs")
    assert recovery.survey(tmp_path / "runs") == []
    assert {path.name for path in (tmp_path / "remote").iterdir()} == set(hashes)
    session = quark.open_run(run_id, tmp_path / "runs")
    artifacts = quark.ArtifactStore(session)
    records = artifacts.read()
    assert [record.sha256 for record in records] == hashes
    for record in records:
        assert sha256(artifacts.load(record)) == record.sha256
    remote[-1].assert_payloads_came_first()
    assert not (session.run_path / "journal").exists()


FORKED = """
sys.path.insert(0, sys.argv[2])
from directory_backends import define_remote, register
register(define_remote([], sys.argv[3]))
with quark.start_run(project="p", storage_dir=storage_dir) as session:
    artifacts = quark.ArtifactStore(session)
    artifacts.store("t", "parent", b"equal")
    pid = os.fork()
    if pid == 0:
        records = [artifacts.store("t", "child", b"equal" if n else b"other") for n in range(2)]
        assert [artifacts.load(record) for record in records] == [b"other", b"equal"]
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print(session.run_id)
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_childs_payloads_are_sent_by_its_parent(tmp_path, remote):
    environment = {
        "PYTHONWARNINGS": "ignore::DeprecationWarning",
        "QUARK_PERSISTENCE_URL": "remote",
    }
    output = run_script(tmp_path, FORKED, HERE, tmp_path / "remote", **environment)
    artifacts = quark.ArtifactStore(quark.open_run(output.split()[0], tmp_path / "runs"))
    found = {
        name: [artifacts.load(record) for record in artifacts.read(artifact_key=name)]
        for name in ("parent", "child")
    }
    assert found == {"parent": [b"equal"], "child": [b"other", b"equal"]}
    assert recovery.survey(tmp_path / "runs") == []


@pytest.fixture
def no_takers(tmp_path, monkeypatch):
    definition = define_remote([], tmp_path / "remote", takes_artifacts=False)
    monkeypatch.setitem(default_registry()._definitions, "remote", definition)
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", "remote")


@pytest.mark.long
def test_where_nobody_takes_artifacts_a_record_says_so(tmp_path, no_takers):
    with start(tmp_path) as session:
        artifacts = quark.ArtifactStore(session)
        record = artifacts.store("t", "n", b"nowhere to go")
        assert (record.sha256, record.size_bytes) == (sha256(b"nowhere to go"), 13)
        assert record.payload_relative_path is None
        assert artifacts.read() == (record,)
        with pytest.raises(quark.ArtifactNotFoundError, match="no backend of this run accepts"):
            artifacts.load(record)
        (event,) = list_events(session, "artifact_not_kept")
        assert "no backend of this run accepts artifacts" in event.payload["reason"]
    with start(tmp_path, strict_mode=True) as session:
        artifacts = quark.ArtifactStore(session)
        with pytest.raises(quark.SessionStoreError, match="no backend of this run accepts"):
            artifacts.store("t", "n", b"x")
        assert artifacts.read() == ()


def test_a_mirror_takes_what_the_primary_does_not(tmp_path, no_takers, mirror):
    with start(tmp_path, backends="mirror") as session:
        artifacts = quark.ArtifactStore(session)
        record = artifacts.store("t", "n", b"for the mirror")
        assert record.payload_relative_path is not None
    assert mirror.payloads == {record.sha256: b"for the mirror"}
    assert mirror.records == [record]
    with pytest.raises(quark.ArtifactNotFoundError, match="primary store stores no payloads"):
        artifacts.load(record)
