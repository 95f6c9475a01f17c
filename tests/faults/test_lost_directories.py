"""A journal folder that is taken away, or descriptors that are closed, cost no record."""

import os
import shutil
import signal
import subprocess

import pytest
from journaled import is_journaled_or_delivered, open_stream, put_metric, stored_values
from kit.programs import log_steps, run_script, values

import quark
from quark_core.delivery.delivery_state import LaneMark
from quark_core.runs import recovery
from quark_core.testing.fakes import ScriptedBackend


def delete_tree(path):
    """Delete a folder in which lanes make files meanwhile."""
    for _ in range(100):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
    pytest.fail(f"{path} cannot be deleted")


@pytest.mark.long
def test_a_journal_that_is_deleted_under_a_run_loses_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("QUARK_JOURNAL_DIR", str(tmp_path / "j"))
    with quark.start_run(project="p", storage_dir=tmp_path / "s", backends="csv") as session:
        metrics = quark.MetricsLogger(session)
        log_steps(metrics, 0, 500)
        session.flush("durable")
        delete_tree(tmp_path / "j")
        log_steps(metrics, 500, 3_000)
        metrics.flush()
        session.add_log("still here")
        log_steps(metrics, 3_000, 3_100)
    assert session.report_delivery().complete
    assert values(session) == list(map(float, range(3_100)))
    assert not [record for record in caplog.records if record.exc_info]


def test_a_stream_whose_folder_is_deleted_goes_on(tmp_path):
    backend = ScriptedBackend()
    stream = open_stream(tmp_path / "j", backend, segment_bytes=500)
    for value in range(1_000):
        put_metric(stream, value)
        if value in (300, 600):
            stream.flush(60)
            shutil.rmtree(tmp_path / "j", ignore_errors=True)
    stream.flush(60, "durable")
    stream.flush(60)
    assert stream.close(60).complete
    assert stored_values(backend) == list(map(float, range(1_000)))


KILLED = """
import shutil
os.environ["QUARK_JOURNAL_DIR"] = storage_dir + "/j"
session = quark.start_run(project="p", storage_dir=storage_dir)
metrics = quark.MetricsLogger(session)
metrics.log("m", 0.0, step=0)
metrics.flush()
while os.path.exists(storage_dir + "/j"):  # lanes make files meanwhile
    shutil.rmtree(storage_dir + "/j", ignore_errors=True)
lane = session.open_run.stream._lanes[0]
def write(*_):
    raise quark.SessionStoreError("planted outage")
lane._backend.write = lane._backend.write_group = write
log_steps(metrics, 1, 200)
session.flush("durable")
print(session.run_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_what_is_called_durable_after_the_folder_was_deleted_survives_the_process(
    tmp_path, monkeypatch
):
    output, _ = run_script(tmp_path, KILLED, ends=-signal.SIGKILL)
    monkeypatch.setenv("QUARK_JOURNAL_DIR", str(tmp_path / "j"))
    recovery.sync(tmp_path)
    found = values(quark.open_run(output.strip(), tmp_path))
    assert found == list(map(float, range(200)))


@pytest.mark.long
def test_a_journal_disk_that_becomes_read_only_loses_nothing(tmp_path, mount, monkeypatch, caplog):
    disk = mount("-t", "tmpfs", "-o", "size=4m", "tmpfs")
    monkeypatch.setenv("QUARK_JOURNAL_DIR", str(disk))

    def remount(mode):
        command = ["mount", "-o", f"remount,{mode}", str(disk)]
        return subprocess.run(command, capture_output=True).returncode == 0

    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv") as session:
        metrics = quark.MetricsLogger(session)
        log_steps(metrics, 0, 500)
        session.flush()
        # Files that are open for writing keep a disk writable, so they go first.
        session.open_run.background.join()
        session.flush()
        stream = session.open_run.stream
        for lane in stream._lanes:
            assert lane.wait_passed(stream._log.end, 10)
            lane._mark.close()
        stream._log._journal._abandon_segment()
        if not remount("ro"):
            pytest.skip("the disk cannot be made read-only while it is used")
        log_steps(metrics, 500, 2_000)
        metrics.flush()
        assert is_journaled_or_delivered(session)
        assert "Read-only" in caplog.text
        assert remount("rw")
        log_steps(metrics, 2_000, 2_100)
        session.flush("durable")
    assert session.report_delivery().complete
    assert values(session) == list(map(float, range(2_100)))


def test_a_read_only_journal_disk_at_the_start_costs_the_journal_only(tmp_path, mount, monkeypatch):
    disk = mount("-t", "tmpfs", "-o", "size=1m,ro", "tmpfs")
    monkeypatch.setenv("QUARK_JOURNAL_DIR", str(disk))
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        log_steps(quark.MetricsLogger(session), 0, 500)
    assert session.report_delivery().complete
    assert values(session) == list(map(float, range(500)))


CLOSED = """
from quark_core.runs import recovery
def close_journal():
    closed = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").endswith(".qj"):
                os.close(int(name))
                closed += 1
        except OSError:
            continue
    return closed
with quark.start_run(project="p", storage_dir=storage_dir) as session:
    metrics, closed = quark.MetricsLogger(session), 0
    for part in range(4):
        log_steps(metrics, part * 300, part * 300 + 300)
        session.flush("durable")
        closed += close_journal()
        metrics.flush()
assert closed >= 2
print(session.run_id, session.report_delivery().complete)
"""


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_a_journal_whose_descriptor_user_code_closes_costs_no_record(tmp_path):
    output, errors = run_script(tmp_path, CLOSED)
    assert "Traceback" not in errors
    run_id, complete = output.split()
    assert complete == "True"
    assert recovery.survey(tmp_path) == []
    assert values(quark.open_run(run_id, tmp_path)) == list(map(float, range(1_200)))


def test_a_mark_whose_descriptor_was_closed_goes_on(tmp_path):
    mark = LaneMark(tmp_path / "lanes" / "x.mark")
    mark.finish(1)
    os.close(mark._descriptor)
    mark.finish(2)
    mark.finish(3)
    mark.close()
    assert LaneMark(tmp_path / "lanes" / "x.mark").done == 3


def test_a_mark_is_never_written_into_a_file_that_took_its_number(tmp_path):
    mark = LaneMark(tmp_path / "lanes" / "x.mark")
    mark.finish(1)
    os.close(mark._descriptor)
    with (tmp_path / "other").open("wb") as other:
        assert other.fileno() == mark._descriptor
        mark.finish(2)
        mark.finish(3)
        mark.close()
        other.write(b"other")
    assert (tmp_path / "other").read_bytes() == b"other"
    assert LaneMark(tmp_path / "lanes" / "x.mark").done == 3
