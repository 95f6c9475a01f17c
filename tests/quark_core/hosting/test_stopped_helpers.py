"""A helper that is stopped cannot see its training's end: the next start or sync ends it."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kit.programs import wait_until

import quark
from quark_core.hosting.child_process import ChildProcess, end_stopped_helpers
from quark_core.runs import recovery
from quark_core.system import process

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists() or not hasattr(os, "pidfd_open"), reason="needs Linux"
)

TRAINING = """
import os, signal, sys
from pathlib import Path
from quark_core.hosting.child_process import ChildProcess
from quark_core.system import process
process._host = lambda: sys.argv[2]
helper = ChildProcess("quark_core.hosting.worker", "h", Path(sys.argv[1], "log"), os.environ)
os.kill(helper.pid, signal.SIGSTOP)
print(helper.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def read_state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or read
        return None


def is_gone(pid):
    # Nobody may be there to take the exit status of an orphan.
    return read_state(pid) in (None, "Z")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of this test's own: starts of other tests would end its helpers too."""
    name = f"machine|boot|{tmp_path}"
    monkeypatch.setattr(process, "_host", lambda: name)
    return name


@pytest.fixture
def left_helper(machine, tmp_path):
    """The pid of a stopped helper whose training was killed."""
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(tmp_path), machine], stdout=subprocess.PIPE, text=True
    )
    pid = int(done.stdout)
    assert wait_until(lambda: read_state(pid) == "T")
    yield pid
    if not is_gone(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_the_next_start_ends_it(left_helper, tmp_path, monkeypatch):
    # As in a process that has started no run a moment ago.
    monkeypatch.setattr(recovery, "_clear_again_at_s", 0.0)
    with quark.start_run(project="p", storage_dir=tmp_path):
        assert wait_until(lambda: is_gone(left_helper))


def test_a_sync_ends_it(left_helper, tmp_path):
    recovery.sync(tmp_path)
    assert wait_until(lambda: is_gone(left_helper))


def test_what_is_no_such_helper_stays_as_it_is(tmp_path):
    log = tmp_path / "log"
    helper = ChildProcess("quark_core.hosting.worker", "h", log, os.environ)
    environment = Path(f"/proc/{helper.pid}/environ").read_bytes()
    inherited = dict(e.split(b"=", 1) for e in environment.split(b"\0") if e)
    plain = subprocess.Popen(["sleep", "100"])
    # As what a helper starts, which has its environment.
    child = subprocess.Popen(["sleep", "100"], env=inherited)
    try:
        for pid in (helper.pid, plain.pid, child.pid):
            os.kill(pid, signal.SIGSTOP)
            assert wait_until(lambda pid=pid: read_state(pid) == "T")
        assert not {helper.pid, plain.pid, child.pid} & set(end_stopped_helpers())
        assert [read_state(pid) for pid in (helper.pid, plain.pid, child.pid)] == ["T"] * 3
    finally:
        for started in (plain, child):
            started.kill()
            started.wait()
        helper.end(wait_s=0.0)


def test_a_helper_of_another_machine_s_process_is_not_judged(monkeypatch, left_helper):
    monkeypatch.setattr(process, "_host", lambda: "another|boot|namespace")
    assert process.is_alive(process.current_process())
    assert left_helper not in end_stopped_helpers()
    assert read_state(left_helper) == "T"
