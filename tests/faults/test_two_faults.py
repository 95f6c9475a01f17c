"""Two faults at once: what each of them may cost alone is all that both may cost together."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import pytest
from kit.programs import HEAD, kill, lock, read_values, sync, wait_for_adoption, wait_until

import quark
from quark_core.records.query import Query
from quark_core.runs.console_lines import fold_lines

ENVIRONMENT = {"QUARK_CAPTURE": "none", "QUARK_SYSTEM_METRICS": "0"}


def launch(storage_dir, body, *arguments, stdout=subprocess.PIPE):
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + body, str(storage_dir), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )


def fill(disk, leave_bytes=0):
    """Take all that is left of a disk but so much."""
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, measure_free(disk) - leave_bytes)


def measure_free(disk):
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def list_events(run, event_type):
    return quark.EventLogger(run).read(event_type=event_type)


FILE_BYTES = 100_000
TAKE_A_DIRECTORY = """
session = quark.start_run(project="p", storage_dir=storage_dir)
metrics, artifacts = quark.MetricsLogger(session), quark.ArtifactStore(session)
metrics.log("m", 0.0, step=0)
session.flush("durable")
print(session.run_id, flush=True)
sys.stdin.readline()
pending = artifacts.log_directory(sys.argv[2], name="data")
for step in range(1, 2000):
    metrics.log("m", float(step), step=step)
print("logged", flush=True)
pending.wait(120)
print("kept", flush=True)
time.sleep(600)
"""


@pytest.mark.sampled
@pytest.mark.parametrize("moment", ["midway", "after"])
@pytest.mark.parametrize("left_bytes", [FILE_BYTES, 30 * FILE_BYTES])
def test_a_directory_on_a_full_disk_of_a_killed_process_is_whole_or_says_what_is_missing(
    tmp_path, mount, moment, left_bytes
):
    disk = mount("-t", "tmpfs", "-o", "size=16m", "tmpfs")
    tree = tmp_path / "data"
    tree.mkdir()
    for number in range(40):
        (tree / str(number)).write_bytes(os.urandom(FILE_BYTES))
    job = launch(disk, TAKE_A_DIRECTORY, tree, moment)
    run_id = job.stdout.readline().strip()
    fill(disk, left_bytes)
    job.stdin.write("go\n")
    job.stdin.flush()
    awaited = {"midway": "logged\n", "after": "kept\n"}[moment]
    assert any(line == awaited for line in iter(job.stdout.readline, ""))
    if moment == "midway":
        assert wait_until(lambda: measure_free(disk) < 2 * FILE_BYTES)
    _, errors = kill(job)
    assert "Traceback" not in errors
    (disk / "filler").unlink()
    sync(disk)
    assert read_values(disk, run_id) == list(map(float, range(2_000)))
    run = quark.open_run(run_id, disk)
    found = quark.ArtifactStore(run).read(artifact_type="directory")
    told = [event.payload["reason"] for event in list_events(run, "artifact_not_kept")]
    assert len(found) == 1 or (moment == "midway" and not found)
    for record in found:
        lost = record.metadata["files_not_kept"]
        assert 0 < lost <= 40
        assert any(f"{lost} files of the directory could not be stored" in each for each in told)
    # What is not whole is given to nobody, and now that there is room it comes.
    with quark.resume_run(run_id=run_id, storage_dir=disk) as again:
        with pytest.raises(quark.ArtifactNotFoundError):
            again.use_artifact("data").copy_to(tmp_path / "half")
        record = quark.ArtifactStore(again).log_directory(tree, name="data").wait(120)
        assert "files_not_kept" not in record.metadata
        copied = again.use_artifact("data").copy_to(tmp_path / "whole")
        for path in tree.iterdir():
            assert (copied / path.name).read_bytes() == path.read_bytes()


PRINT_WITHOUT_A_JOURNAL = """
import errno, logging
from quark_core.delivery.delivery_state import Files
logging.raiseExceptions = False
session = quark.start_run(project="p", storage_dir=storage_dir, capture=sys.argv[2])
metrics = quark.MetricsLogger(session)
metrics.log("m", 0.0, step=0)
session.flush("durable")
open(sys.argv[3], "w").write(session.run_id)
sys.stdin.readline()
def break_call(call):
    def fail(self, where, *rest):
        path = where if not isinstance(where, int) else os.readlink(f"/proc/self/fd/{where}")
        if str(path).startswith("/dev/shm/"):
            return call(self, where, *rest)
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return fail
for name in ("create", "write", "sync", "truncate"):
    setattr(Files, name, break_call(getattr(Files, name)))
for number in range(1, 1000):
    print("line", number, flush=True)
    metrics.log("m", float(number), step=number)
    if number == 500:
        try:
            session.flush("journaled", timeout_s=0.5)
        except quark.SessionStoreError as error:
            assert "Input/output error" in str(error), error
            print("told", flush=True)
if sys.argv[2] == "fd":
    # Its lines come through a process of its own: the run has all but the last milliseconds.
    console, deadline = session.open_run.stream.channel("console"), time.monotonic() + 60
    while console.count_drawn() < 1_000 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # what is numbered is put in by another thread
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.sampled
@pytest.mark.parametrize("capture", ["sys", "fd"])
def test_what_was_printed_while_the_journal_failed_and_the_store_was_locked_survives_a_kill(
    tmp_path, capture
):
    job = launch(tmp_path, PRINT_WITHOUT_A_JOURNAL, capture, tmp_path / "id")
    assert wait_until(lambda: (tmp_path / "id").exists() and (tmp_path / "id").read_text())
    run_id = (tmp_path / "id").read_text()
    with lock(tmp_path):
        printed, errors = job.communicate("go\n", timeout=120)
    assert job.returncode == -signal.SIGKILL, errors
    assert "Traceback" not in errors
    lines = printed.splitlines()
    assert lines.count("told") == 1
    lines.remove("told")
    assert lines == [f"line {number}" for number in range(1, 1000)]
    with quark.start_run(project="p", storage_dir=tmp_path):
        wait_for_adoption()
    assert read_values(tmp_path, run_id) == list(map(float, range(1_000)))
    found = quark.open_run(run_id, tmp_path).open_run.read("console", Query())
    kept = [line.text for line in fold_lines(found.to_records()) if line.text.startswith("line")]
    assert kept == lines


MOST_GROWTH_BYTES = 200_000_000
LINES_PER_MB = 10_000
PRINT_100_MB_A_SECOND = """
session = quark.start_run(project="p", storage_dir=storage_dir, capture=sys.argv[2])
metrics = quark.MetricsLogger(session)
metrics.log("m", -1.0, step=0)
session.flush("durable")
print(session.run_id, file=sys.stderr, flush=True)
sys.stdin.readline()
def rss_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
before = most = rss_bytes()
text = ("x" * 99 + "\\n") * 10_000
begun = time.monotonic()
for megabyte in range(int(sys.argv[3])):
    sys.stdout.write(text)
    metrics.log("m", float(megabyte), step=megabyte)
    most = max(most, rss_bytes())
    time.sleep(max(0.0, begun + megabyte / 100 - time.monotonic()))
print("grown by", most - before, file=sys.stderr, flush=True)
sys.stdin.readline()
session.end_run()
"""


@pytest.mark.long
@pytest.mark.parametrize("capture", ["sys", "fd"])
def test_a_flood_of_lines_while_the_store_is_locked_costs_bounded_memory_and_no_metric(
    tmp_path, capture
):
    megabytes = 1_000
    job = launch(tmp_path, PRINT_100_MB_A_SECOND, capture, megabytes, stdout=subprocess.DEVNULL)
    run_id = job.stderr.readline().strip()
    with lock(tmp_path):
        job.stdin.write("go\n")
        job.stdin.flush()
        grown = next(line for line in job.stderr if line.startswith("grown by"))
    _, errors = job.communicate("go\n", timeout=200)
    assert job.returncode == 0, errors
    assert int(grown.split()[2]) < MOST_GROWTH_BYTES
    assert read_values(tmp_path, run_id) == list(map(float, range(-1, megabytes)))
    run = quark.open_run(run_id, tmp_path)
    kept = run.open_run.read("console", Query(equals={"stream": "stdout"}))
    left_out = int(kept["left_out"].sum())
    assert kept.count > 0
    assert left_out > 0
    # What was shown before its end came is there twice.
    twice = kept.count + left_out - megabytes * LINES_PER_MB
    assert 0 <= twice <= kept.count - int(kept["is_whole"].sum())
    assert not list_events(run, "records_dropped")


TELL_A_TARGET_THAT_HANGS = """
import math
from quark.notifications.notifier import Pacing
Pacing.__init__.__kwdefaults__["timeout_s"] = 2.0
if sys.argv[2] == "exit":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
session = quark.start_run(project="p", storage_dir=storage_dir)
hung = threading.Event()
def hang(_):
    hung.set()
    time.sleep(600)
quark.monitor(
    session, notify=[sys.argv[3], hang], every_n_steps=20, min_interval_s=0.02
)
metrics = quark.MetricsLogger(session)
print(session.run_id, flush=True)
for step in range(20_000):
    loss = math.exp(-step / 60) + 0.01 * (step % 3) if step < 200 else math.nan
    metrics.log("train/loss", loss, step=step)
    metrics.log("m", 1.0, step=step)
    if hung.wait(0.001):
        break
print("hangs" if hung.is_set() else "silent", step + 1, flush=True)
time.sleep(600)
"""


@pytest.mark.sampled
@pytest.mark.parametrize(("end", "status"), [("signal", -signal.SIGTERM), ("exit", 143)])
def test_a_training_that_is_ended_while_its_targets_hang_ends_and_leaves_nobody_behind(
    tmp_path, end, status, monkeypatch
):
    monkeypatch.setenv("QUARK_NOTIFY_SECRET", "s" * 32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        url = f"webhook+http://127.0.0.1:{listener.getsockname()[1]}/"
        job = launch(tmp_path, TELL_A_TARGET_THAT_HANGS, end, url)
        run_id = job.stdout.readline().strip()
        said, logged = job.stdout.readline().split()
        assert said == "hangs"
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Drops: ")
            job.send_signal(signal.SIGTERM)
            _, errors = job.communicate(timeout=60)
            assert job.returncode == status, errors
            # Each drop is in time for a reader; all together never come to an end.
            assert wait_until(lambda: is_cut_off(connection), 60)
    sync(tmp_path)
    assert len(read_values(tmp_path, run_id)) == int(logged)
    assert quark.open_run(run_id, tmp_path).context.run.status == "interrupted"


def is_cut_off(connection):
    time.sleep(0.1)
    try:
        connection.sendall(b".")
    except OSError:
        return True
    return False


def launch_import(folder, storage_dir, *options):
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "quark", "import", "csv"),
            *(str(folder), "-d", str(storage_dir), *options),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.long
def test_an_import_that_is_killed_beside_one_whose_disk_is_full_is_made_whole_by_the_next(
    tmp_path, mount
):
    rows = 150_000  # so many random numbers have no room in 3 MB
    values = {}
    for name in ("a", "b", "c"):
        values[name] = [random.Random(f"{name}{step}").random() for step in range(rows)]
        table = "".join(f"{step},{value!r}\n" for step, value in enumerate(values[name]))
        (tmp_path / "tables" / name).mkdir(parents=True)
        (tmp_path / "tables" / name / "metrics.csv").write_text("step,m\n" + table)
    disk = mount("-t", "tmpfs", "-o", "size=3m", "tmpfs")
    killed, full = (launch_import(tmp_path / "tables", disk) for _ in range(2))
    assert wait_until(lambda: measure_free(disk) < 1_000_000)
    kill(killed)
    told, _ = full.communicate(timeout=150)
    assert full.returncode == 1, told
    assert "Traceback" not in told
    assert "full" in told or "No space left" in told
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    again = launch_import(tmp_path / "tables", disk, "--json")
    told, _ = again.communicate(timeout=150)
    assert again.returncode == 0, told
    found = {run["name"]: run["run_id"] for run in json.loads(told)["runs"]}
    assert set(found) == set(values)
    for name, run_id in found.items():
        assert quark.open_run(run_id, disk).context.run.status == "completed"
        assert read_values(disk, run_id) == values[name]
