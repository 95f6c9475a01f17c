"""A disk that fills while training goes on costs no training and no record."""

import logging
import os
import subprocess
import sys

import pytest
from journaled import is_journaled_or_delivered, open_stream, put_metric, stored_values
from kit.programs import log_steps, run_script, values, wait_until

import quark
from quark_core.runs import recovery
from quark_core.testing.fakes import ScriptedBackend


def fill(disk, kind):
    """Take all that is left of a disk."""
    if kind == "inodes":
        for number in range(10_000):
            try:
                (disk / f"filler{number}").touch()
            except OSError:
                return
    for size in (65_536, 4_096, 256, 1):
        with (disk / f"filler{size}").open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def free(disk):
    for path in disk.glob("filler*"):
        path.unlink()


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "inodes"])
def test_a_full_journal_disk_stops_nothing_and_everything_is_delivered(
    tmp_path, make_disk, kind, monkeypatch, caplog
):
    disk = make_disk(kind)
    monkeypatch.setenv("QUARK_JOURNAL_DIR", str(disk))
    with quark.start_run(project="p", storage_dir=tmp_path / "s", backends="csv") as session:
        metrics = quark.MetricsLogger(session)
        log_steps(metrics, 0, 500)
        session.flush("journaled")
        fill(disk, kind)
        # Every batch is larger than what the filler may have left in a block.
        log_steps(metrics, 500, 20_000)
        metrics.flush()
        if kind != "inodes":  # there the segment that is open goes on
            assert is_journaled_or_delivered(session)
            assert "No space left" in caplog.text
        free(disk)
        log_steps(metrics, 20_000, 20_100)
        session.flush("durable")
    assert session.report_delivery().complete
    assert values(session) == list(map(float, range(20_100)))
    warned = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len([r for r in warned if "cannot be written" in r.getMessage()]) <= 2
    assert list(disk.glob("*/*/journal.json")) == []


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk_under_store_and_journal_is_waited_out(make_disk, kind, monkeypatch):
    disk = make_disk(kind)
    with quark.start_run(project="p", storage_dir=disk) as session:
        metrics = quark.MetricsLogger(session)
        log_steps(metrics, 0, 200)
        metrics.flush()
        monkeypatch.setenv("QUARK_PERSISTENCE_TIMEOUT_SECONDS", "1")
        fill(disk, kind)
        log_steps(metrics, 200, 5_000)
        with pytest.raises(quark.SessionStoreError, match="Nothing is lost"):
            metrics.flush()
        free(disk)
        log_steps(metrics, 5_000, 5_100)
        assert wait_until(lambda: flushes(metrics))
    assert session.report_delivery().complete
    assert values(session) == list(map(float, range(5_100)))


def flushes(metrics):
    try:
        metrics.flush()
    except quark.SessionStoreError:
        return False
    return True


def test_a_run_that_ends_on_a_full_disk_ends_in_time_and_tells_what_is_left(
    tmp_path, make_disk, monkeypatch, caplog
):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "1")
    disk = make_disk("tmpfs")
    session = quark.start_run(project="p", storage_dir=disk)
    metrics = quark.MetricsLogger(session)
    log_steps(metrics, 0, 200)
    session.flush()
    fill(disk, "tmpfs")
    log_steps(metrics, 200, 3_000)
    session.end_run()
    (lane,) = session.report_delivery().lanes
    assert lane.waiting >= 2_800
    assert lane.submitted == lane.delivered + lane.waiting
    assert "waiting" in caplog.text
    free(disk)
    recovery.sync(disk)
    found = values(quark.open_run(session.run_id, disk))
    assert found == list(map(float, range(len(found))))
    assert len(found) >= 200


def test_a_full_disk_at_the_start_is_one_clear_error(make_disk):
    disk = make_disk("tmpfs")
    fill(disk, "tmpfs")
    with pytest.raises(quark.SessionStoreError, match="store"):
        quark.start_run(project="p", storage_dir=disk)
    free(disk)
    with quark.start_run(project="p", storage_dir=disk) as session:
        log_steps(quark.MetricsLogger(session), 0, 10)
    assert values(session) == list(map(float, range(10)))


def test_a_journal_disk_that_is_full_at_the_start_costs_the_journal_only(
    tmp_path, make_disk, monkeypatch, caplog
):
    disk = make_disk("inodes")
    fill(disk, "inodes")
    monkeypatch.setenv("QUARK_JOURNAL_DIR", str(disk))
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        log_steps(quark.MetricsLogger(session), 0, 1_000)
    assert values(session) == list(map(float, range(1_000)))
    assert caplog.text.count("cannot be created") == 1


LIMITED = """
import resource
with quark.start_run(project="p", storage_dir=storage_dir) as session:
    metrics = quark.MetricsLogger(session)
    log_steps(metrics, 200)
    metrics.flush()
    print(session.run_id)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    log_steps(metrics, 200, 4000)
    told, until = "", time.monotonic() + 50
    while "File too large" not in told and time.monotonic() < until:
        try:
            session.flush("journaled", timeout_s=0.5)
        except quark.SessionStoreError as error:
            told = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    session.flush("durable")
print(session.report_delivery().complete)
"""


@pytest.mark.long
def test_a_limit_on_the_size_of_files_is_waited_out(tmp_path):
    output, errors = run_script(tmp_path, LIMITED)
    run_id, complete = output.split()
    assert complete == "True"
    assert "File too large" in errors  # the limit did bite
    assert "Traceback" not in errors
    assert values(quark.open_run(run_id, tmp_path)) == list(map(float, range(4_000)))


@pytest.mark.long
def test_a_journal_disk_that_stays_full_does_not_hold_up_a_backend_that_works(tmp_path, mount):
    disk = mount("-t", "tmpfs", "-o", "size=1m", "tmpfs")
    backend = ScriptedBackend()
    stream = open_stream(disk / "j", backend, log_bytes=100_000, window_bytes=20_000, tick_s=0.001)
    fill(disk, "tmpfs")
    count = 60_000
    for start in range(0, count, 2_000):
        for value in range(start, start + 2_000):
            put_metric(stream, value)
        if start < count // 2:
            stream.flush(60)
    stream.flush(60)
    free(disk)
    (lane,) = stream.close(60).lanes
    assert (lane.delivered, lane.dropped) == (count, 0)
    assert stored_values(backend) == list(map(float, range(count)))


def test_the_last_line_the_list_and_doctor_say_the_same_of_a_full_disk(make_disk):
    disk = make_disk("tmpfs")
    code = """
import os, random, sys, quark
session = quark.start_run(project="p", storage_dir=sys.argv[1])
metrics = quark.MetricsLogger(session)
with open(sys.argv[1] + "/filler", "wb", 0) as file:
    try:
        while True:
            file.write(b"x" * 4096)
    except OSError:
        pass
for step in range(2000):
    metrics.log("m", random.random(), step=step)
session.end_run()
"""
    environment = {**os.environ, "QUARK_EXIT_TIMEOUT_SECONDS": "1", "COLUMNS": "200"}
    environment.pop("QUARK_QUIET", None)

    def run(*command):
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    done = run(sys.executable, "-c", code, str(disk))
    assert done.returncode == 0, done.stderr
    last_line = done.stderr.strip().splitlines()[-1]
    assert "completed" in last_line
    assert "records are not in its store yet" in last_line
    quark_command = (sys.executable, "-m", "quark")
    listed = run(*quark_command, "runs", "-d", str(disk)).stdout
    told = run(*quark_command, "doctor", "-d", str(disk)).stdout
    command = f"quark sync {disk}"
    assert all(command in said for said in (last_line, listed, told))
    assert "are not in the store yet, maybe including the final status" in listed
    assert "killed:" not in told
    (disk / "filler").unlink()
    assert run(*quark_command, "sync", str(disk)).returncode == 0
    listed = run(*quark_command, "runs", "-d", str(disk)).stdout
    assert "completed" in listed
    assert command not in listed
