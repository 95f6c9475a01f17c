"""SIGTERM and SIGHUP: a run is interrupted, whole in its store at the first look, and says why."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

import quark
from quark_core.runs import recovery
from quark_core.runs.backend_choice import open_reader

HEAD = """
import os, signal, sys, threading, time, quark
storage_dir = sys.argv[1]
def train(steps=40, **arguments):
    session = quark.start_run(project="p", storage_dir=storage_dir, **arguments)
    metrics = quark.MetricsLogger(session)
    for step in range(steps):
        metrics.log("m", float(step), step=step)
    return session
def sleep():
    # Python misses a signal that comes right before a call that blocks, until that returns.
    while True:
        time.sleep(0.05)
def wait():
    print("ready", flush=True)
    sleep()
"""


@pytest.fixture
def start(tmp_path):
    """Starts a program that says "ready"; gives the process."""
    processes = []

    def start_it(body, *, before=(), **environment):
        child = subprocess.Popen(
            [*before, sys.executable, "-c", HEAD + body, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        processes.append(child)
        assert child.stdout.readline() == "ready\n"
        return child

    yield start_it
    for child in processes:
        child.kill()
        child.communicate()


def end(child, number=signal.SIGTERM):
    child.send_signal(number)
    _, said = child.communicate(timeout=200)
    return said


def load(root):
    """The runs of a store, as whoever reads first finds them."""
    return open_reader(root).list_runs()


def load_as_it_is(root):
    """The state of the one run of a store, which comes there after all that it has logged."""
    (stored,) = open_reader(root, takes_over=False).list_runs()
    return stored.state


def load_one(root):
    (stored,) = load(root)
    return stored


def count(root, run_id, **options):
    session = quark.open_run(run_id, root, **options)
    return len(quark.MetricsLogger(session).read(metric_key="m"))


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGHUP", marks=pytest.mark.long)])
def test_a_signal_interrupts_a_run_which_is_whole_at_the_first_look(tmp_path, start, name):
    child = start("train(); wait()")
    end(child, getattr(signal, name))
    assert child.returncode == -getattr(signal, name)
    # The process itself has delivered all of it, and left nothing to take over.
    assert load_as_it_is(tmp_path) == "interrupted"
    stored = load_one(tmp_path)
    assert stored.state == "interrupted"
    assert stored.ending.to_dict() == {"cause": "signal", "message": name}
    assert count(tmp_path, stored.run.id) == 40
    session = quark.open_run(stored.run.id, tmp_path)
    (event,) = quark.EventLogger(session).read(event_type="runtime_interruption")
    assert event.payload["signal"] == name


HANDLERS = {
    "exits": ("signal.signal(15, lambda *_: sys.exit(0)); train(); wait()", 0, "exit status 0"),
    "exits, installed later": (
        "train()\nsignal.signal(15, lambda number, frame: sys.exit(4))\nwait()",
        4,
        "exit status 4",
    ),
    "raises": (
        """
def stop(number, frame):
    raise RuntimeError("told to stop")
signal.signal(15, stop); train(); wait()
""",
        1,
        "RuntimeError: told to stop",
    ),
    "raises out of a session": (
        """
class Stop:
    def __call__(self, number, frame):
        sys.exit(0)
with train():
    signal.signal(15, Stop())
    wait()
""",
        0,
        "exit status 0",
    ),
    "notes it, and the loop exits": (
        """
stop = []
signal.signal(15, lambda *_: stop.append(True))
train()
print("ready", flush=True)
while not stop:
    time.sleep(0.01)
sys.exit(143)
""",
        143,
        "exit status 143",
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("how", HANDLERS)
def test_a_handler_that_ends_the_program_leaves_an_interrupted_run(tmp_path, start, how):
    body, status, then = HANDLERS[how]
    child = start(body)
    end(child)
    assert child.returncode == status
    stored = load_one(tmp_path)
    assert stored.state == "interrupted"
    assert stored.ending.to_dict() == {"cause": "signal", "message": f"SIGTERM, then {then}"}
    assert stored.exit_code == status or how == "raises out of a session"
    assert count(tmp_path, stored.run.id) == 40


@pytest.mark.long
def test_an_alarm_of_the_program_s_own_is_an_error_of_its_own(tmp_path, start):
    child = start(
        """
def expire(number, frame):
    raise TimeoutError("a step takes too long")
train()
signal.signal(signal.SIGALRM, expire)
wait()
"""
    )
    end(child, signal.SIGALRM)
    stored = load_one(tmp_path)
    assert (stored.state, stored.ending.cause) == ("failed", "exception")


def test_the_time_limit_of_a_slurm_job_is_told(tmp_path, start):
    child = start("train(); wait()", SLURM_JOB_END_TIME="1000", SLURM_JOB_ID="77")
    end(child)
    message = load_one(tmp_path).ending.message
    assert message == "SIGTERM at the time limit of Slurm job 77"


@pytest.mark.long
def test_all_runs_of_a_process_are_interrupted(tmp_path, start):
    child = start("train(); train(); train(); wait()")
    end(child)
    stored = load(tmp_path)
    assert [each.state for each in stored] == ["interrupted"] * 3
    assert [count(tmp_path, each.run.id) for each in stored] == [40] * 3


@pytest.mark.long
def test_a_second_signal_does_not_shorten_the_wait(tmp_path, start):
    child = start("train(); wait()")
    child.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGHUP)
    end(child)
    stored = load_one(tmp_path)
    assert stored.state == "interrupted"
    assert count(tmp_path, stored.run.id) == 40


MIRROR = """
from quark_core.backends.registry import default_registry
from quark_core.testing.fakes import ScriptedBackend, define_scripted
stuck = define_scripted("stuck", ScriptedBackend(always="hang"))
default_registry()._definitions["stuck"] = stuck
"""


@pytest.mark.long
def test_a_mirror_that_hangs_delays_nothing_and_is_told(tmp_path, start):
    child = start(MIRROR + 'train(backends="stuck"); wait()')
    said = end(child)
    assert child.returncode == -signal.SIGTERM
    (line,) = [line for line in said.splitlines() if "quark sync" in line]
    assert "stuck: 0 delivered" in line
    stored = load_one(tmp_path)
    assert stored.state == "interrupted"
    assert count(tmp_path, stored.run.id) == 40
    lanes = {lane.backend: lane.waiting for lane in recovery.survey(tmp_path)}
    assert lanes["embedded"] == 0
    assert lanes["stuck"] >= 40


@pytest.mark.long
def test_a_local_mirror_has_all_of_it_too(tmp_path, start):
    child = start('train(backends="csv"); wait()')
    end(child)
    stored = load_one(tmp_path)
    assert count(tmp_path, stored.run.id, backend="csv") == 40
    mirrored = quark.open_run(stored.run.id, tmp_path, backend="csv").open_run.reader
    assert mirrored.load_run(stored.run.id).describe_end() == "interrupted: SIGTERM"


@pytest.mark.long
def test_a_store_that_is_locked_is_waited_for(tmp_path, start):
    child = start("train(); wait()")
    database = sqlite3.connect(tmp_path / ".quark" / "quark.db", isolation_level=None)
    database.execute("BEGIN IMMEDIATE")
    child.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(1.0)
    database.execute("ROLLBACK")
    child.communicate(timeout=200)
    assert child.returncode == -signal.SIGTERM
    assert load_as_it_is(tmp_path) == "interrupted"
    assert load_one(tmp_path).state == "interrupted"


@pytest.mark.long
def test_a_store_that_stays_locked_is_given_up_and_the_next_reader_brings_it(tmp_path, start):
    child = start("train(); wait()")
    database = sqlite3.connect(tmp_path / ".quark" / "quark.db", isolation_level=None)
    database.execute("BEGIN IMMEDIATE")
    said = end(child)
    assert child.returncode == -signal.SIGTERM
    assert "quark sync" in said
    assert recovery.has_journals(tmp_path)
    database.execute("ROLLBACK")
    stored = load_one(tmp_path)
    assert stored.state == "interrupted"
    assert count(tmp_path, stored.run.id) == 40


@pytest.mark.long
def test_a_signal_while_the_end_is_delivered_changes_no_end(tmp_path, start):
    child = start(
        MIRROR
        + """
session = train(backends="stuck")
wait_for_lanes = session.open_run.stream._wait_for_lanes
def tell(*arguments):
    print("ready", flush=True)
    wait_for_lanes(*arguments)
session.open_run.stream._wait_for_lanes = tell
session.end_run()
"""
    )
    end(child)
    stored = load_one(tmp_path)
    assert (stored.state, stored.ending) == ("completed", None)
    assert count(tmp_path, stored.run.id) == 40


@pytest.mark.long
def test_a_worker_that_is_ended_by_its_parent_ends_no_run(tmp_path, start):
    child = start(
        """
import multiprocessing
session = train()
metrics = quark.MetricsLogger(session)
def work():
    for step in range(40, 60):
        metrics.log("m", float(step), step=step)
    logged.set()
    sleep()
context = multiprocessing.get_context("fork")
logged = context.Event()
worker = context.Process(target=work)
worker.start()
logged.wait()
worker.terminate()
worker.join()
print("ready", flush=True)
metrics.log("m", 60.0, step=60)
"""
    )
    child.communicate(timeout=200)
    stored = load_one(tmp_path)
    assert (child.returncode, stored.state) == (0, "completed")
    assert count(tmp_path, stored.run.id) == 61


@pytest.mark.long
def test_a_run_of_another_thread_has_no_handler_and_is_whole_all_the_same(tmp_path, start):
    child = start("thread = threading.Thread(target=train); thread.start(); thread.join(); wait()")
    end(child)
    assert child.returncode == -signal.SIGTERM
    stored = load_one(tmp_path)
    assert (stored.state, stored.ending.cause) == ("lost", "vanished")
    assert count(tmp_path, stored.run.id) == 40


@pytest.fixture
def own_pids():
    """What makes a program the first process of a container, which signals do not end."""
    command = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"]).returncode:
        pytest.skip("needs the right to make a pid namespace (unshare --pid)")
    return command


FIRST = """
assert os.getpid() == 1
train()
os.kill(1, signal.SIGTERM)  # as the container's host sends it
print("ready", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("goes_on", "state"),
    [("", "completed"), ("sleep()", "interrupted")],
    ids=["and ends by itself", "and is killed"],
)
def test_the_first_process_of_a_container_outlives_the_signal(
    tmp_path, start, own_pids, goes_on, state
):
    child = start(FIRST + goes_on, before=own_pids)
    if goes_on:
        # The namespace's first process is the child of `unshare`, and ends with nothing else.
        inner = subprocess.run(["pgrep", "-P", str(child.pid)], capture_output=True, text=True)
        os.kill(int(inner.stdout), signal.SIGKILL)
    child.communicate(timeout=200)
    stored = load_one(tmp_path)
    assert stored.state == state
    assert count(tmp_path, stored.run.id) == 40
    if goes_on:
        assert stored.ending.message == "SIGTERM"


RANKS = (
    HEAD
    + """
import pathlib
session = train(ranks=sys.argv[2])
pathlib.Path(storage_dir, os.environ["RANK"]).touch()
sleep()
"""
)


@pytest.mark.long
@pytest.mark.parametrize("ranks", ["zero", "all"])
def test_torchrun_that_is_ended_leaves_a_whole_run(tmp_path, ranks):
    script = tmp_path / "train.py"
    script.write_text(RANKS)
    agent = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "--monitor-interval", "0.2", str(script), str(tmp_path), ranks],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        while not all((tmp_path / rank).exists() for rank in "01"):
            assert agent.poll() is None, agent.stderr.read()
            time.sleep(0.05)
        agent.send_signal(signal.SIGTERM)
        agent.communicate(timeout=200)
    finally:
        agent.kill()
        agent.communicate()
    assert load_as_it_is(tmp_path) == "interrupted"
    stored = load_one(tmp_path)
    assert stored.ending.message == "SIGTERM"
    session = quark.open_run(stored.run.id, tmp_path)
    points = quark.MetricsLogger(session).read(metric_key="m")
    count_of = {rank: sum(point.rank == rank for point in points) for rank in (0, 1)}
    assert count_of == {0: 40, 1: 40 if ranks == "all" else 0}
