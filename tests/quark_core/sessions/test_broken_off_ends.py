"""An end that is broken off while it waits for what a run still works out."""

import os
import signal
import subprocess

import pytest
from kit.programs import start_code

import quark
from quark_core.runs import recovery
from quark_core.runs.open_run import open_runs


class Late:
    """A writer that is interrupted as a run's end waits for it."""

    def __init__(self, session):
        self.session = session
        self.calls = 0
        session.open_run.writers.add(self)

    def settle(self):
        self.calls += 1
        assert self.session not in open_runs.sessions
        assert self.session in open_runs.peek_unended()
        raise KeyboardInterrupt

    def bind(self):
        pass


def find_state(root, run_id):
    return quark.open_run(run_id, storage_dir=root).status


def test_a_block_that_is_interrupted_at_its_end_is_an_interrupted_run(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        quark.start_run(project="p", storage_dir=tmp_path) as session,
    ):
        late = Late(session)
    assert late.calls == 1
    assert not open_runs.peek_unended()
    assert find_state(tmp_path, session.run_id) == "interrupted"


def test_an_end_that_was_broken_off_may_be_said_again_and_waits_no_more(tmp_path):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    late = Late(session)
    with pytest.raises(KeyboardInterrupt):
        session.end_run()
    assert open_runs.sessions == (session,)
    quark.MetricsLogger(session).log("loss", 1.0, step=0)
    session.end_run()
    assert late.calls == 1
    opened = quark.open_run(session.run_id, storage_dir=tmp_path)
    assert opened.status == "completed"
    assert [row.value for row in quark.MetricsLogger(opened).read()] == [1.0]
    with pytest.raises(quark.InvalidRunStateError):
        session.end_run()


TRAIN = """
import sys, time, quark

class Late:
    def settle(self):
        print("settles", flush=True)
        time.sleep(300)
    def bind(self):
        pass

session = quark.start_run(project="p", storage_dir=sys.argv[1])
late = Late()
session.open_run.writers.add(late)
print(session.run_id, flush=True)
session.end_run()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_program_that_is_ended_while_its_run_ends_leaves_an_interrupted_run(tmp_path, number):
    child = start_code(TRAIN, tmp_path, stderr=subprocess.DEVNULL, env=dict(os.environ))
    run_id = child.stdout.readline().strip()
    assert child.stdout.readline() == "settles\n"
    child.send_signal(number)
    child.communicate(timeout=120)
    assert child.returncode == -number
    recovery.sync(tmp_path)
    assert find_state(tmp_path, run_id) == "interrupted"


def fail(session, status):
    try:
        raise ValueError("(3, 4) does not fit (4, 3)")
    except ValueError:
        session.end_run(status)


@pytest.mark.parametrize("status", ["failed", "interrupted", "completed"])
def test_who_ends_a_run_as_an_exception_is_handled_ends_it_because_of_that(tmp_path, status):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    fail(session, status)
    with quark.EventLogger(quark.open_run(session.run_id, storage_dir=tmp_path)) as logged:
        events = logged.read()
    traces = [
        event.payload["traceback"] for event in events if "traceback" in (event.payload or {})
    ]
    (found,) = quark.search_runs(storage_dir=tmp_path)
    if status == "completed":
        assert (found.stored.ending, traces) == (None, [])
        return
    assert found.stored.ending.describe() == "ValueError: (3, 4) does not fit (4, 3)"
    assert len(traces) == 1
    assert "in fail" in traces[0]
