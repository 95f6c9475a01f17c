"""With sources, fingerprints, timers, groups and fields on, two faults at once cost no step."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from all_on import (
    count_warnings,
    launch,
    list_done,
    list_to_last,
    read_run_id,
    read_to_step,
    write_project,
)
from kit.programs import kill, lock, read_values, sync

import quark

TRAIN = """
session, config = begin(storage_dir)
train(session, config, int(sys.argv[2]), sleep_s=float(sys.argv[3]))
session.end_run()
print("ended", flush=True)
"""


def assert_calm(errors):
    """Nothing but warnings, each of them once."""
    assert "Traceback" not in errors, errors
    assert max(count_warnings(errors).values(), default=1) == 1, errors


def assert_readable(run_id, storage_dir):
    """Whoever asks what the run was made of gets an answer, or the reason why there is none."""
    for command in (["show", run_id], ["sources", run_id], ["why", run_id, run_id]):
        done = subprocess.run(
            [sys.executable, "-m", "quark", *command, "-d", str(storage_dir)],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        assert done.returncode in (0, 2), done.stderr
        assert done.stdout + done.stderr


def fill(disk, leave_bytes):
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        found = os.statvfs(disk)
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - leave_bytes)


RESUME = """
session, config = resume(storage_dir, sys.argv[2], from_step=int(sys.argv[3]))
train(session, config, int(sys.argv[3]) + 20, first=int(sys.argv[3]))
session.end_run()
print("ended", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("after_s", [0.05, pytest.param(0.7, marks=pytest.mark.long)])
def test_a_killed_run_that_goes_on_with_other_code_has_each_step_once_and_both_codes(
    tmp_path, after_s
):
    script, runs = write_project(tmp_path / "project", TRAIN), tmp_path / "runs"
    job = launch(script, runs, 1_000_000, 0.001)
    run_id = read_run_id(job)
    begun = read_to_step(job, 3)
    time.sleep(random.uniform(0, 2 * after_s))
    told, errors = kill(job)
    told = begun + told
    assert_calm(errors)
    done = list_to_last(told)
    again = write_project(tmp_path / "project", RESUME)
    (tmp_path / "project" / "parts.py").write_text("def scale(batch, rate):\n    return batch\n")
    job = launch(again, runs, run_id, len(done))
    told, errors = job.communicate(timeout=100)
    assert told.endswith("ended\n"), errors
    assert_calm(errors)
    expected = [*done, *list_done(told)]
    assert expected == list(map(float, range(len(done) + 20)))
    # A call that had not returned may be there as well; the next attempt has made it again.
    assert read_values(runs, run_id) == expected
    assert quark.read_sources(run_id, runs)["parts.py"].text.endswith("return batch\n")
    assert quark.open_run(run_id, runs).groups == ("idea", "paper/fig3")


@pytest.mark.long
@pytest.mark.parametrize("when", [3, pytest.param(700, marks=pytest.mark.long)])
def test_a_full_disk_and_then_a_kill_cost_no_step(tmp_path, mount, when):
    disk = mount("-t", "tmpfs", "-o", "size=16m", "tmpfs")
    script = write_project(tmp_path / "project", TRAIN)
    job = launch(script, disk, 1_000_000, 0.001)
    run_id = read_run_id(job)
    begun = read_to_step(job, when)
    fill(disk, 4096)
    begun += read_to_step(job, when + 70)
    told, errors = kill(job)
    assert_calm(errors)
    (disk / "filler").unlink()
    sync(disk)
    done = list_to_last(begun + told)
    assert read_values(disk, run_id)[: len(done)] == done
    assert_readable(run_id, disk)


BREAK_THE_JOURNAL = """
import errno
from quark_core.delivery.delivery_state import Files
def break_call(call):
    def fail(self, where, *rest):
        path = where if not isinstance(where, int) else os.readlink(f"/proc/self/fd/{where}")
        if not broken or str(path).startswith("/dev/shm/"):
            return call(self, where, *rest)
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return fail
broken = []
for name in ("create", "write", "sync", "truncate"):
    setattr(Files, name, break_call(getattr(Files, name)))
session, config = begin(storage_dir)
session.flush("durable")
broken.append(True)
train(session, config, 500, sleep_s=0.001)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_a_failing_journal_a_locked_store_and_a_kill_cost_no_step(tmp_path):
    script, runs = write_project(tmp_path / "project", BREAK_THE_JOURNAL), tmp_path / "runs"
    job = launch(script, runs)
    run_id = read_run_id(job)
    with lock(runs):
        told, errors = job.communicate(timeout=100)
    assert job.returncode == -signal.SIGKILL, errors
    assert_calm(errors)
    sync(runs)
    assert list_done(told)[-1] == 499.0
    assert read_values(runs, run_id) == list(map(float, range(500)))
    assert quark.open_run(run_id, runs).fields["gpu"] == "V100"


HANG_IN_THE_BACKGROUND = """
class Hanging:
    def __array__(self, *_, **__):
        print("hangs", flush=True)
        time.sleep(600)
session, config = begin(storage_dir)
session.fingerprint_data("hanging", Hanging())
if sys.argv[2] == "exit":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
train(session, config, 1_000_000, sleep_s=0.001)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "number", "status"),
    [
        ("signal", signal.SIGTERM, -signal.SIGTERM),
        pytest.param("exit", signal.SIGTERM, 143, marks=pytest.mark.long),
        pytest.param("signal", signal.SIGINT, -signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_the_end_is_bounded_while_a_fingerprint_hangs_and_the_store_is_locked(
    tmp_path, how, number, status
):
    script = write_project(tmp_path / "project", HANG_IN_THE_BACKGROUND)
    runs = tmp_path / "runs"
    job = launch(script, runs, how, QUARK_EXIT_TIMEOUT_SECONDS="1")
    first = read_to_step(job, 300)
    run_id = next(line.split()[1] for line in first.splitlines() if line.startswith("run "))
    with lock(runs):
        job.send_signal(number)
        told, errors = job.communicate(timeout=60)
    assert job.returncode == status, errors
    sync(runs)
    done = list_to_last(first + told)
    assert read_values(runs, run_id)[: len(done)] == done
    assert quark.open_run(run_id, runs).context.run.status == "interrupted"


FORK_UNDER_THREADS = """
session, config = begin(storage_dir)
os.write(1, b"run %s\\n" % session.run_id.encode())
metrics = quark.MetricsLogger(session)
is_over = threading.Event()
def work():
    number = 0
    while not is_over.is_set():
        number += 1
        train_step(np.full(4, number), 0.1)
        session.fingerprint("thread", number)
        metrics.aggregate("threads", float(number))
        if number % 5 == 0:
            session.fingerprint_data("hosts", "/etc/hosts")
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for step in range(int(sys.argv[2])):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        train_step(np.full(4, step), 0.1)
        session.fingerprint("child", step)
        session.fingerprint_data("hosts", "/etc/hosts").wait(20)
        with metrics.timer(f"child{step}"):
            metrics.aggregate("children", float(step))
        for _ in metrics.progress(quark.watch_data([1, 2], session=session)):
            pass
        metrics.log("m", float(step), step=step)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    os.write(1, b"step %d\\n" % step if status == 0 else b"hung %d\\n" % status)
is_over.set()
for thread in threads:
    thread.join()
session.end_run()
"""


@pytest.mark.parametrize("forks", [8, pytest.param(60, marks=pytest.mark.long)])
def test_children_that_are_forked_while_threads_fingerprint_and_leave_at_once_log_all(
    tmp_path, forks
):
    script = write_project(tmp_path / "project", FORK_UNDER_THREADS)
    job = launch(script, tmp_path / "runs", forks)
    told, errors = job.communicate(timeout=200)
    assert job.returncode == 0, errors
    assert "Traceback" not in errors, errors
    assert list_done(told) == list(map(float, range(forks))), told
    run_id = told.split()[1]
    sync(tmp_path / "runs")
    assert sorted(read_values(tmp_path / "runs", run_id)) == list(map(float, range(forks)))


INTERRUPT = """
session, config = begin(storage_dir)
os.write(1, b"run %s\\n" % session.run_id.encode())
metrics = quark.MetricsLogger(session)
calls = {"handled": 0, "done": 0}
def handle(*_):
    number = calls["handled"] = calls["handled"] + 1
    train_step(np.full(4, number), 0.1)
    session.fingerprint("handler", number)
    session.fingerprint_data("hosts", "/etc/hosts")
    metrics.aggregate("handled", 1.0)
    with metrics.timer("handler"):
        metrics.log("m", float(number), step=number)
    if number < 150:
        signal.setitimer(signal.ITIMER_REAL, 0.002)
def start_no_thread(self):
    raise RuntimeError("can't start new thread")
if sys.argv[2] == "no threads":
    threading.Thread.start = start_no_thread
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.002)
while calls["handled"] < 150:
    calls["done"] += 1
    train_step(np.full(4, calls["done"]), 0.1)
    session.fingerprint("loop", calls["done"])
    session.fingerprint_data("hosts", "/etc/hosts")
    metrics.aggregate("looped", 1.0)
    with metrics.timer("loop"):
        pass
session.end_run()
print("ended", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("which", ["no threads", pytest.param("", marks=pytest.mark.long)])
def test_a_handler_that_does_all_that_the_loop_does_waits_for_nobody_without_threads_too(
    tmp_path, which
):
    script = write_project(tmp_path / "project", INTERRUPT)
    job = launch(script, tmp_path / "runs", which, QUARK_SOURCES="off")
    told, errors = job.communicate(timeout=100)
    assert told.endswith("ended\n"), errors
    assert_calm(errors)
    steps = read_values(tmp_path / "runs", told.split()[1])
    assert steps == list(map(float, range(1, 151)))


LEAVE = """
import shutil
session, config = begin(storage_dir)
train(session, config, 100)
shutil.rmtree(os.path.dirname(os.path.abspath(__file__)))
os._exit(3)
"""


def test_a_program_that_leaves_at_once_and_takes_its_sources_along_has_each_step(tmp_path):
    script, runs = write_project(tmp_path / "project", LEAVE), tmp_path / "runs"
    job = launch(script, runs)
    told, errors = job.communicate(timeout=100)
    assert job.returncode == 3, errors
    assert_calm(errors)
    sync(runs)
    run_id = told.split()[1]
    assert list_done(told) == read_values(runs, run_id) == list(map(float, range(100)))
    assert_readable(run_id, runs)


TRAIN_A_RANK = """
rank = int(os.environ["RANK"])
if rank % 2:
    real_ns = time.time_ns
    time.time_ns = lambda: real_ns() - 3 * 86_400 * 10**9
session, config = begin(storage_dir, ranks="all")
train(session, config, 60, sleep_s=0.01)
if rank == 5:
    os.kill(os.getpid(), signal.SIGKILL)
session.end_run()
"""


@pytest.mark.long
def test_eight_ranks_of_which_one_is_killed_and_half_have_a_clock_of_last_week(tmp_path):
    script, runs = write_project(tmp_path / "project", TRAIN_A_RANK), tmp_path / "runs"
    ranks = {
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
    }
    jobs = [
        launch(script, runs, **ranks, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(8)
    ]
    for rank, job in enumerate(jobs):
        told, errors = job.communicate(timeout=200)
        assert job.returncode == (-signal.SIGKILL if rank == 5 else 0), errors
        assert "Traceback" not in errors, errors
        assert list_done(told) == list(map(float, range(60)))
    sync(runs)
    run_id = told.split()[1]
    metrics = quark.MetricsLogger(quark.open_run(run_id, runs))
    for rank in range(8):
        found = metrics.read(metric_key="m", rank=rank)
        assert [record.value for record in found] == list(map(float, range(60)))
    assert_readable(run_id, runs)
