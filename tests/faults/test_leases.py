"""A lane has one driver: whoever lives keeps it, whoever is gone loses it."""

import json
import os
import time

import msgspec
import pytest
from kit.programs import read_values, run_script

from quark_core.delivery.delivery_state import LEASE_STALE_S, Lease
from quark_core.runs import recovery
from quark_core.system.process import ProcessIdentity, current_process


def write_lease(path, process, age_s=0.0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"process": msgspec.to_builtins(process), "token": "t"}))
    moment = time.time() - age_s
    os.utime(path, (moment, moment))
    return Lease(path)


def test_a_lease_is_held_by_one_and_given_back(tmp_path):
    first, second = Lease(tmp_path / "x.lease"), Lease(tmp_path / "x.lease")
    assert first.take()
    assert first.take()
    assert not second.take()
    second.release()
    assert first.holder == current_process()
    first.release()
    assert second.take()
    second.release()


def test_a_lease_of_a_dead_process_whose_pid_was_reused_is_stale(tmp_path):
    this = current_process()
    other = ProcessIdentity(this.host, this.pid, str(int(this.started) - 1000))
    lease = write_lease(tmp_path / "x.lease", other)
    assert lease.is_stale()
    assert lease.take()
    assert lease.holder == this
    assert list(tmp_path.iterdir()) == [tmp_path / "x.lease"]


def test_a_lease_of_a_living_process_of_this_host_is_kept_however_old_its_beat(tmp_path):
    lease = write_lease(tmp_path / "x.lease", current_process(), age_s=10 * 86_400)
    assert not lease.is_stale()
    assert not lease.take()


@pytest.mark.parametrize(("age_s", "stale"), [(0, False), (30, False), (90, True)])
def test_a_lease_of_another_host_is_kept_while_it_beats(tmp_path, age_s, stale):
    assert LEASE_STALE_S == 60
    lease = write_lease(tmp_path / "x.lease", ProcessIdentity("elsewhere", 1, "1"), age_s)
    assert lease.is_stale() is stale
    assert lease.take() is stale


def test_a_beat_keeps_a_lease_alive_for_other_hosts(tmp_path):
    lease = Lease(tmp_path / "x.lease")
    assert lease.take()
    old = time.time() - 300
    os.utime(tmp_path / "x.lease", (old, old))
    lease.beat()
    assert time.time() - (tmp_path / "x.lease").stat().st_mtime < 30


def test_a_torn_lease_is_taken_after_a_moment(tmp_path):
    (tmp_path / "x.lease").write_text("")
    lease = Lease(tmp_path / "x.lease")
    assert not lease.take()
    old = time.time() - 5
    os.utime(tmp_path / "x.lease", (old, old))
    assert lease.take()


def test_of_two_that_find_a_lease_stale_one_gets_it(tmp_path, monkeypatch):
    """The slower one must not take away what the quicker one has just made."""
    this = current_process()
    slow = write_lease(tmp_path / "x.lease", ProcessIdentity(this.host, this.pid, "1"))
    quick = Lease(tmp_path / "x.lease")
    look = Lease.is_stale

    def look_and_be_overtaken(lease):
        stale = look(lease)
        if lease is slow:
            assert quick.take()
        return stale

    monkeypatch.setattr(Lease, "is_stale", look_and_be_overtaken)
    assert not slow.take()
    assert quick._read()[1] == quick._token


LEFT = """
session = quark.start_run(project="p", storage_dir=storage_dir, backends="csv")
metrics = quark.MetricsLogger(session)
session.flush()
log_steps(metrics, 500)
session.flush("durable")
print(session.run_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def left_behind(tmp_path):
    """The run and the journal folder of a killed process."""
    output, _ = run_script(tmp_path, LEFT, ends=-9)
    (manifest,) = tmp_path.glob(".quark/runs/*/journal/*/journal.json")
    return output.strip(), manifest.parent


def rewrite_process(folder, process):
    """Let a journal be another process's."""
    manifest = folder / "journal.json"
    content = json.loads(manifest.read_text())
    content["process"] = msgspec.to_builtins(process)
    manifest.write_text(json.dumps(content))
    for path in (folder / "lanes").glob("*.lease"):
        write_lease(path, process)


@pytest.mark.long
def test_a_journal_of_a_dead_process_whose_pid_was_reused_is_delivered(tmp_path, left_behind):
    run_id, folder = left_behind
    rewrite_process(folder, ProcessIdentity(current_process().host, os.getpid(), "1"))
    assert {result.state for result in recovery.sync(tmp_path)} == {"delivered"}
    assert read_values(tmp_path, run_id) == list(map(float, range(500)))
    assert not folder.exists()


@pytest.mark.long
def test_a_journal_of_another_host_waits_until_its_beats_have_stopped(tmp_path, left_behind):
    run_id, folder = left_behind
    rewrite_process(folder, ProcessIdentity("elsewhere", 1, "1"))
    assert {result.state for result in recovery.sync(tmp_path)} == {"held"}
    old = time.time() - 90
    for path in (folder / "lanes").glob("*.lease"):
        os.utime(path, (old, old))
    assert {result.state for result in recovery.sync(tmp_path)} == {"delivered"}
    assert read_values(tmp_path, run_id) == list(map(float, range(500)))


@pytest.mark.long
def test_a_journal_of_before_a_reboot_is_deleted_once_it_is_delivered(tmp_path, left_behind):
    """After a reboot this machine is another host: what it left must not stay for ever."""
    run_id, folder = left_behind
    rewrite_process(folder, ProcessIdentity("this host, an earlier boot", 1, "1"))
    old = time.time() - 7 * 86_400
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (old, old))
    recovery.sync(tmp_path)
    recovery.sync(tmp_path)
    assert read_values(tmp_path, run_id) == list(map(float, range(500)))
    assert recovery.survey(tmp_path) == []
    assert not folder.exists()
