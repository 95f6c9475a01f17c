"""Installed plugins that would end or hold up the process that they work in: training goes on.

Each is a distribution on the path of a training of its own. What it does, it
does in a helper process: training has everything in its own store, its loop is
not held up, its end is bounded, and its report tells.
"""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

import quark

HEAD = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from quark_core.backends.contract import BackendDefinition, Capability
from quark_core.errors import BackendUnavailable
from quark_core.hookspecs import hookimpl

HERE = Path(os.environ["HOSTILE_FOLDER"])

class Bad:
    def __init__(self, config):
        self.config = config
    def write(self, batch):
        with (HERE / "seen").open("a") as file:
            file.write(f"{os.getpid()} {os.getppid()} {batch.number} {batch.count}\\n")
        self.attack(batch)
    def close(self): pass

class Plugin:
    @hookimpl
    def quark_register_backends(self):
        return [BackendDefinition(name="bad", summary="s", open=lambda c: Bad(c), **FIELDS)]
plugin = Plugin()
FIELDS = dict(capabilities=frozenset({Capability.IDEMPOTENT}))
"""
ATTACKS = {
    "exit": "os._exit(3)",
    "abort": "os.abort()",
    "close descriptors": "os.closerange(0, 1024)",
    "segmentation fault": "ctypes.string_at(0)",
    "keep the interpreter": "ctypes.PyDLL(None).sleep(30)",
    "loop for ever": "all(True for _ in iter(int, 1))",  # in memory that does not grow
    "recursion": "self.attack(batch)",
    "overflow of the stack": """
        sys.setrecursionlimit(10**9)
        def recur(n): return [recur(n) for _ in range(1)]
        recur(0)""",
    "sys.exit": "sys.exit(3)",
    "kill itself": "os.kill(os.getpid(), signal.SIGKILL)",
    "stop itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "kill its group": "os.killpg(os.getpgid(0), signal.SIGKILL)",
    "change directory": "os.chdir('/'); os.umask(0o777); os.environ.clear()",
    "signal handlers": "[signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; os._exit(0)",
    "fork": "os.fork()",
    "fork that keeps the pipes": "os.fork() or time.sleep(60); os._exit(9)",
    "print": "print('x' * 100_000, flush=True); sys.stderr.write('y' * 100_000)",
    "write to every descriptor": """
        for descriptor in range(1, 64):
            try: os.set_blocking(descriptor, False); os.write(descriptor, b'junk' * 3)
            except OSError: pass""",
    "own errors": """
        class Own(BackendUnavailable): pass
        raise Own("of a class of its own")""",
}
TOLD = {
    "exit": "ended (exit status 3)",
    "abort": "ended (exit status -6)",
    "segmentation fault": "ended (exit status -11)",
    "recursion": "RecursionError",
    "sys.exit": "SystemExit: 3",
    "kill itself": "ended (exit status -9)",
    "own errors": "of a class of its own",
}
# These keep the helper busy, and the end waits for it longer than it is told to.
SLOW = ("keep the interpreter", "loop for ever", "overflow of the stack", "stop itself")
TRAINING = """
import json, logging, os, sys, threading, time
import quark

logging.basicConfig(format="%(levelname)s %(message)s")
before = os.getcwd(), dict(os.environ)
with quark.start_run(project="p", storage_dir=sys.argv[1], backends=sys.argv[2]) as session:
    metrics = quark.MetricsLogger(session)
    metrics.log("m", 0.0, step=0)
    # Training goes on while the plugin is at its worst, and for some time after that.
    seen = os.path.join(os.environ["HOSTILE_FOLDER"], "seen")
    step, until = 0, time.monotonic() + 60
    while not os.path.exists(seen):
        assert time.monotonic() < until
        step += 1
        metrics.log("m", float(step), step=step)
        time.sleep(0.001)
    for _ in range(300):
        step += 1
        metrics.log("m", float(step), step=step)
        time.sleep(0.001)
    metrics.flush()
    # The end waits no longer for the mirror than for the plugin.
    while any(l.backend == "csv" and not l.complete for l in session.report_delivery().lanes):
        assert time.monotonic() < until + 60
        time.sleep(0.02)
assert before == (os.getcwd(), dict(os.environ))
lanes = {lane.backend: lane for lane in session.report_delivery().lanes}
print(json.dumps({
    "run_id": session.run_id, "steps": step + 1, "pid": os.getpid(),
    "lanes": {name: [l.submitted, l.delivered, l.waiting, l.unknown, dict(l.errors)]
              for name, l in lanes.items()},
}))
sys.stdout.flush()
"""


def write_plugin(attack, fields=""):
    lines = "\n        ".join(attack.strip().splitlines()) if "\n" not in attack else attack
    body = f"class Bad(Bad):\n    def attack(self, batch):\n        {lines.strip()}\n"
    return HEAD + fields + "\n" + body


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "hostile"
    folder.mkdir()
    return folder


@pytest.fixture
def train(tmp_path, run_python, folder):
    """Trains with a CSV mirror and the plugin; checks that the run and the mirror are whole."""

    def run(**variables):
        # Most never take what there is for them, and the end waits for that.
        variables = {"QUARK_EXIT_TIMEOUT_SECONDS": "10", **variables}
        done = run_python(TRAINING, tmp_path, "csv,bad", HOSTILE_FOLDER=str(folder), **variables)
        assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
        told = json.loads(done.stdout)
        opened = quark.open_run(told["run_id"], tmp_path)
        assert opened.status == "completed"
        found = quark.MetricsLogger(opened).read(metric_key="m")
        assert [record.step for record in found] == list(range(told["steps"]))
        for name in ("embedded", "csv"):
            submitted, delivered, *_ = told["lanes"][name]
            assert submitted == delivered
        submitted, delivered, waiting, unknown, _ = told["lanes"]["bad"]
        assert submitted == delivered + waiting + unknown
        return told, done.stderr

    return run


def list_helpers(folder, of=None):
    """The process of each call, or only those that one process has started."""
    seen = [list(map(int, line.split())) for line in (folder / "seen").read_text().splitlines()]
    return [pid for pid, parent, *_ in seen if of in (None, parent)]


def wait_until_gone(pids):
    """Processes of the plugin's own may live on; those that Quark has started do not."""
    left = [psutil.Process(pid) for pid in set(pids) if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, timeout=200)
    assert not alive


@pytest.mark.long
@pytest.mark.parametrize("attack", ATTACKS)
def test_training_goes_on_and_has_everything(install, train, folder, attack):
    install("quark-bad", "bad", write_plugin(ATTACKS[attack]))
    told, errors = train(QUARK_EXIT_TIMEOUT_SECONDS="5" if attack in SLOW else "10")
    assert told["pid"] not in list_helpers(folder)
    wait_until_gone(list_helpers(folder))
    reasons = told["lanes"]["bad"][-1]
    if attack in TOLD:
        assert any(TOLD[attack] in reason for reason in reasons), reasons
        assert sum("accepts no records now" in line for line in errors.splitlines()) >= 1
    assert "Traceback" not in errors
    assert "junk" not in errors


@pytest.mark.long
@pytest.mark.parametrize("attack", ["keep the interpreter", "loop for ever"])
def test_steps_are_made_while_the_plugin_keeps_its_interpreter(install, train, folder, attack):
    """More than a process that the plugin was in could make: there the first call holds it."""
    install("quark-bad", "bad", write_plugin(ATTACKS[attack]))
    told, _ = train()
    assert told["steps"] > 300
    # One call, which has not come back. Another process may deliver the rest by now.
    assert len(list_helpers(folder, of=told["pid"])) == 1
    submitted, delivered, waiting, unknown, _ = told["lanes"]["bad"]
    assert (delivered, waiting, unknown) == (0, submitted, 0)


@pytest.mark.long
def test_the_same_plugin_in_the_training_process_ends_it(install, run_python, tmp_path, folder):
    """What `own_process=False` means, and what the tests above are worth."""
    source = write_plugin(ATTACKS["exit"], "FIELDS['own_process'] = False")
    install("quark-bad", "bad", source)
    done = run_python(TRAINING, tmp_path, "csv,bad", HOSTILE_FOLDER=str(folder))
    assert done.returncode == 3


@pytest.mark.long
def test_helpers_off_is_the_training_process(install, run_python, tmp_path, folder):
    install("quark-bad", "bad", write_plugin(ATTACKS["exit"]))
    done = run_python(
        TRAINING, tmp_path, "csv,bad", HOSTILE_FOLDER=str(folder), QUARK_HELPER_PROCESSES="0"
    )
    assert done.returncode == 3


@pytest.mark.long
def test_a_process_that_ended_is_started_again_later_and_later(install, train, folder):
    """Each try is a process; within the run's second or so there are only a few."""
    install("quark-bad", "bad", write_plugin(ATTACKS["exit"]))
    # While a run ends, a lane tries again every 0.2 s at most; most of the tries are of that time.
    told, _ = train(QUARK_EXIT_TIMEOUT_SECONDS="3")
    tries = list_helpers(folder)
    assert 1 <= len(tries) <= 12
    assert len(set(tries)) == len(tries)
    submitted, delivered, waiting, _, reasons = told["lanes"]["bad"]
    assert (delivered, waiting) == (0, submitted)
    assert sum(reasons.values()) >= len(tries) - 1


@pytest.mark.long
def test_what_was_in_flight_to_one_that_is_not_idempotent_is_unknown(install, train, folder):
    """And never sent again, since it may be there: by number, each batch was seen once."""
    attack = "os._exit(3) if batch.kind == 'metric' else None"
    install("quark-bad", "bad", write_plugin(attack, "FIELDS = {}"))
    told, _ = train()
    seen = [line.split() for line in (folder / "seen").read_text().splitlines()]
    numbers = [int(number) for _, _, number, _ in seen]
    assert numbers == sorted(set(numbers))
    assert told["lanes"]["bad"][3] > 0


@pytest.mark.long
def test_one_that_is_idempotent_has_everything_once_it_recovers(install, train, folder):
    attack = "(HERE / 'once').exists() or ((HERE / 'once').touch(), os._exit(3))"
    install("quark-bad", "bad", write_plugin(attack))
    told, _ = train(QUARK_EXIT_TIMEOUT_SECONDS="30")
    submitted, delivered, *_ = told["lanes"]["bad"]
    assert submitted == delivered


@pytest.mark.long
def test_memory_that_it_takes_is_not_the_trainings(install, train, folder):
    attack = "self.__dict__.setdefault('kept', []).append(bytearray(2_000_000))"
    install("quark-bad", "bad", write_plugin(attack))
    told, _ = train(QUARK_EXIT_TIMEOUT_SECONDS="30")
    assert told["pid"] not in list_helpers(folder)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")
def test_memory_that_runs_out_ends_the_helper_first(install, train, folder):
    attack = "(HERE / 'score').write_text(Path('/proc/self/oom_score_adj').read_text())"
    install("quark-bad", "bad", write_plugin(attack))
    train(QUARK_EXIT_TIMEOUT_SECONDS="30")
    assert int((folder / "score").read_text()) == 500


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="there are no process groups here")
def test_one_that_never_comes_back_is_gone_when_the_next_training_opens_the_run(
    install, run_python, tmp_path, folder
):
    """Its native call keeps it from seeing that training has ended."""
    attack = "ctypes.PyDLL(None).sleep(100) if not (HERE / 'again').exists() else None"
    install("quark-bad", "bad", write_plugin(attack))
    code = TRAINING.replace("    metrics.flush()\n", "    os.kill(os.getpid(), 9)\n")
    done = run_python(code, tmp_path, "csv,bad", HOSTILE_FOLDER=str(folder))
    assert done.returncode == -signal.SIGKILL, done.stderr
    (helper,) = list_helpers(folder)
    assert psutil.pid_exists(helper)
    (folder / "again").touch()
    code = "import sys; from quark.__main__ import main; sys.exit(main())"
    synced = run_python(code, "sync", tmp_path, HOSTILE_FOLDER=str(folder))
    assert synced.returncode == 0, synced.stdout + synced.stderr
    wait_until_gone([helper])


@pytest.mark.long
def test_no_helper_is_left_when_training_is_killed(install, run_python, tmp_path, folder):
    install("quark-bad", "bad", write_plugin("pass"))
    code = TRAINING.replace("    metrics.flush()\n", "    os.kill(os.getpid(), 9)\n")
    done = run_python(code, tmp_path, "csv,bad", HOSTILE_FOLDER=str(folder))
    assert done.returncode == -signal.SIGKILL
    wait_until_gone(list_helpers(folder))


PRIMARY = """
import os
from pathlib import Path
from quark_backends.embedded.backend import EmbeddedBackend
from quark_backends.embedded.plugin import quark_register_backends as built_in
from dataclasses import replace
from quark_core.hookspecs import hookimpl

HERE = Path(os.environ["HOSTILE_FOLDER"])

class Bad(EmbeddedBackend):
    def write_group(self, batches):
        self.note("wrote")
        super().write_group(batches)
    def write(self, batch):
        self.note("wrote")
        super().write(batch)
    def read(self, *arguments):
        self.note("read")
        return super().read(*arguments)
    def note(self, what):
        with (HERE / what).open("a") as file:
            file.write(f"{os.getpid()} 0 0\\n")
        if (HERE / f"exit when {what}").exists():
            (HERE / f"exit when {what}").unlink()
            os._exit(3)

class Plugin:
    @hookimpl
    def quark_register_backends(self):
        return [replace(built_in()[0], name="bad", own_process=True, open=lambda c: Bad(c))]
plugin = Plugin()
"""
WITH_PRIMARY = """
import json, os, pathlib, sys
import quark

here = pathlib.Path(os.environ["HOSTILE_FOLDER"])
with quark.start_run(project="p", storage_dir=sys.argv[1], backends="bad,csv") as session:
    metrics = quark.MetricsLogger(session)
    for step in range(100):
        if step == 50:
            (here / "exit when wrote").touch()
        metrics.log("m", float(step), step=step)
    before = len(metrics.read())
    (here / "exit when read").touch()
    try:
        metrics.read()
    except quark.SessionStoreError as error:
        refusal = str(error)
    after = len(metrics.read())
    if os.fork() == 0:
        child = quark.MetricsLogger(session)
        child.log("of/child", 1.0, step=0)
        child.close()
        os._exit(0)
    os.wait()
lanes = {lane.backend: lane.complete for lane in session.report_delivery().lanes}
print(json.dumps([session.run_id, os.getpid(), before, refusal, after, lanes]))
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_store_of_a_third_party_is_written_and_read_from_helpers(
    install, run_python, tmp_path, folder
):
    """Its end in the middle of a write or a read costs a retry, or that one read."""
    install("quark-bad", "bad", PRIMARY)
    # A start waits 15 s for its store by default, in which a busy machine starts no process.
    waits = dict.fromkeys(("QUARK_EXIT_TIMEOUT_SECONDS", "QUARK_PERSISTENCE_TIMEOUT_SECONDS"), "60")
    done = run_python(WITH_PRIMARY, tmp_path, HOSTILE_FOLDER=str(folder), **waits)
    assert done.returncode == 0, done.stderr
    run_id, pid, before, refusal, after, lanes = json.loads(done.stdout)
    assert (before, after) == (100, 100)
    assert "ended (exit status 3)" in refusal
    assert lanes == {"bad": True, "csv": True}
    for what in ("wrote", "read"):
        pids = {int(line.split()[0]) for line in (folder / what).read_text().splitlines()}
        assert pid not in pids
        wait_until_gone(pids)
    opened = quark.open_run(run_id, tmp_path)
    found = quark.MetricsLogger(opened).read(metric_key="m")
    assert [record.step for record in found] == list(range(100))
    assert len(quark.MetricsLogger(opened).read(metric_key="of/child")) == 1


@pytest.mark.long
def test_one_that_no_other_process_finds_is_refused_with_what_to_do(tmp_path):
    code = """
import sys, quark
from quark_core.backends.contract import BackendDefinition
from quark_core.backends.registry import default_registry
closed = BackendDefinition(name="closed", summary="s", open=lambda config: None)
default_registry()._definitions["closed"] = closed
quark.start_run(project="p", storage_dir=sys.argv[1], backends="closed")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "backend 'closed': its `open` is not a function that another process can import" in last
    assert "own_process=False" in last
    assert not (tmp_path / ".quark").exists()
