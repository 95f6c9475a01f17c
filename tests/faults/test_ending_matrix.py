"""Each way in which a training really ends, against each place that tells how it ended.

Whoever looks is the first to do so: nobody has run `quark sync`.
"""

import contextlib
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from notebook_kernel import Kernel
from page_client import PageClient

import quark
from quark.cli.main import cli
from quark.page.routes.page_source import open_source
from quark_core.delivery.crash_buffer import SHARED_MEMORY
from quark_core.runs import recovery

STEPS = 60
HEAD = """
import os, signal, sys, threading, time, quark
root = sys.argv[1]
def begin(name):
    return quark.start_run(
        project="p", name=name, storage_dir=root, config={"lr": 1}, backends="csv",
        system_metrics=False, capture=None,
    )
def log(session, steps=range(60)):
    metrics = quark.MetricsLogger(session)
    for step in steps:
        metrics.log("val/loss", 1 / (step + 1), step=step)
    return session
def train(name):
    return log(begin(name))
def tell(word="ready"):
    print(word, flush=True)
def wait():
    # Python misses a signal that comes right before a call that blocks, until that returns.
    while True:
        time.sleep(0.05)
"""
REFERENCE = "train('reference').end_run()\n"
WAITS = "session = train('run'); tell(); wait()\n"
DEADLINE_S = 250


def start(root, body, *, head=HEAD + REFERENCE, **options):
    return subprocess.Popen(
        [sys.executable, "-c", head + body, str(root)],
        stdout=subprocess.PIPE,
        stderr=options.pop("stderr", subprocess.PIPE),
        text=True,
        env={**os.environ, "QUARK_QUIET": "1", **options.pop("environment", {})},
        **options,
    )


def run(root, body, **options):
    child = start(root, body, **options)
    _, said = child.communicate(timeout=DEADLINE_S)
    return child.returncode, said


def end_by_itself(body):
    def produce(root):
        run(root, body)

    return produce


def end_by_signal(root):
    child = start(root, WAITS)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=DEADLINE_S)
    assert child.returncode == -signal.SIGTERM


def end_by_signal_without_grace(root):
    """The store takes nothing, and SIGKILL comes as soon as the handler has said a word."""
    child = start(
        root,
        """
session = train('run')
session.flush()
stream = session.open_run.stream
def watch():
    while not stream._signal_answered:
        time.sleep(0.005)
    tell("told")
threading.Thread(target=watch, daemon=True).start()
tell(); wait()
""",
    )
    assert child.stdout.readline() == "ready\n"
    with contextlib.closing(
        sqlite3.connect(root / ".quark" / "quark.db", isolation_level=None)
    ) as database:
        database.execute("BEGIN IMMEDIATE")
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "told\n"
        child.kill()
        child.communicate(timeout=DEADLINE_S)
        database.execute("ROLLBACK")


def end_by_memory(root):
    """A memory cgroup of its own, which the training fills."""
    version_1 = Path("/sys/fs/cgroup/memory").is_dir()
    group = Path("/sys/fs/cgroup", *["memory"] * version_1, f"quark-test-{time.monotonic_ns()}")
    limit = "memory.limit_in_bytes" if version_1 else "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(400 * 2**20))
    except OSError as error:
        pytest.skip(f"needs the right to make a memory cgroup: {error}")
    with contextlib.suppress(OSError):
        name = "memory.memsw.limit_in_bytes" if version_1 else "memory.swap.max"
        (group / name).write_text(str(400 * 2**20) if version_1 else "0")
    body = f"""
open({str(group / "cgroup.procs")!r}, "w").write(str(os.getpid()))
{REFERENCE}
session = train('run'); session.flush()
kept = []
while True:
    kept.append(b"x" * 2**20)
"""
    status, said = run(root, body, head=HEAD)
    assert status == -signal.SIGKILL, said
    return group.rmdir


def end_on_a_full_disk(root):
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(root)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.decode().strip()}")
    # Begun while there is room; all that it logs comes when there is none.
    body = """
session = begin("run")
session.flush()
filler = open(root + "/filler", "wb", buffering=0)
try:
    while True:
        filler.write(b"x" * 4096)
except OSError:
    log(session)
"""
    status, said = run(root, body, environment={"QUARK_EXIT_TIMEOUT_SECONDS": "1"})
    assert status == 0, said
    (root / "filler").unlink()
    return partial(subprocess.run, ["umount", "-l", str(root)], capture_output=True)


def end_with_its_terminal(root):
    """The terminal that the training was started in is closed."""
    import fcntl
    import termios

    master, slave = pty.openpty()

    def lead():
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    child = start(root, WAITS, stdin=slave, stderr=subprocess.DEVNULL, preexec_fn=lead)
    os.close(slave)
    assert child.stdout.readline() == "ready\n"
    os.close(master)
    child.communicate(timeout=DEADLINE_S)
    assert child.returncode == -signal.SIGHUP


def end_after_a_restart(root):
    script = root / "train.py"
    script.write_text(
        HEAD
        + """
# The second attempt goes on where the first one was.
first = 30 * int(os.environ["TORCHELASTIC_RESTART_COUNT"])
session = log(begin("run"), range(first, first + 30))
session.flush()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    # One rank fails; the agent ends the other one, which leads the run, by SIGTERM.
    leader_logged = root + "/leader_logged"
    if os.environ["RANK"] == "1":
        while not os.path.exists(leader_logged):
            time.sleep(0.02)
        sys.exit(7)
    open(leader_logged, "w").close()
    wait()
session.end_run()
"""
    )
    status, said = run(root, "", head=HEAD + REFERENCE)
    assert status == 0, said
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "--max-restarts", "1", "--monitor-interval", "0.2", str(script), str(root)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "QUARK_QUIET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def end_with_the_kernel(root):
    kernel = Kernel(root)
    try:
        kernel.run(f"import sys; sys.argv = ['', {str(root)!r}]")
        kernel.run(HEAD.replace('tell(word="ready")', "tell(word='ready')"))
        kernel.run(REFERENCE)
        kernel.run("session = train('run')", cell="a")
        kernel.run("raise ValueError('bad batch')", cell="b")
        kernel.restart()
    finally:
        kernel.close()


@dataclass(frozen=True)
class Ending:
    """A way to end.

    Attributes:
        produce: Trains a reference and a run in a folder, and ends the run so; may return what
            clears away what it has made besides.
        state: State of the run.
        message: What every answer says of why; None of a run that has completed.
        mirror: State that the mirror (CSV) tells before `quark sync`; None where that is chance.
    """

    produce: object
    state: str
    message: str | None = None
    mirror: str | None = None


ENDINGS = {
    "return": Ending(end_by_itself("train('run')"), "completed", None, "completed"),
    "exception": Ending(
        end_by_itself("train('run'); raise ValueError('bad batch')"),
        "failed",
        "ValueError: bad batch",
        "failed",
    ),
    "sys.exit": Ending(
        end_by_itself("train('run'); sys.exit(3)"), "interrupted", "exit status 3", "interrupted"
    ),
    "ctrl-c": Ending(
        end_by_itself("train('run'); os.kill(os.getpid(), signal.SIGINT); wait()"),
        "interrupted",
        "SIGINT",
        "interrupted",
    ),
    "sigterm": Ending(end_by_signal, "interrupted", "SIGTERM", "interrupted"),
    "sigterm without grace": Ending(end_by_signal_without_grace, "interrupted", "SIGTERM"),
    "sigkill": Ending(
        end_by_itself("train('run'); os.kill(os.getpid(), signal.SIGKILL)"), "lost", "has ended"
    ),
    "out of memory": Ending(end_by_memory, "lost", "memory ran out"),
    "full disk": Ending(end_on_a_full_disk, "completed"),
    "parent gone": Ending(end_with_its_terminal, "interrupted", "SIGHUP", "interrupted"),
    "torchrun restart": Ending(end_after_a_restart, "completed", None, "completed"),
    "kernel restart": Ending(end_with_the_kernel, "failed", "ValueError: bad batch", "failed"),
    "os._exit": Ending(end_by_itself("train('run'); os._exit(0)"), "lost", "has ended"),
}
# One of each kind is seen by `make test`: what the process tells, and what it has no time for.
QUICK = ("exception", "sigterm", "os._exit")


@dataclass(frozen=True)
class Produced:
    """An ending that has come about.

    Attributes:
        root: The store.
        ending: What is to be said of it.
    """

    root: Path
    ending: Ending

    def ask(self, *arguments):
        return CliRunner().invoke(cli, [*arguments, "-d", str(self.root)])

    @property
    def run_id(self):
        (run_id,) = [row["id"] for row in self.list_runs() if row["name"] == "run"]
        return run_id

    def list_runs(self):
        return json.loads(self.ask("runs", "--json").stdout)

    def tells(self, text):
        """Whether a text says how the run ended, and why."""
        words = " ".join(str(text).replace("│", " ").split())
        return self.ending.state in words and (self.ending.message or "") in words


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in ENDINGS],
)
def made(request, tmp_path_factory):
    """Each ending, produced once."""
    root, ending = tmp_path_factory.mktemp("ending"), ENDINGS[request.param]
    clear = ending.produce(root)
    yield Produced(root, ending)
    if callable(clear):
        clear()


@pytest.mark.sampled
def test_runs(made):
    (row,) = [row for row in made.list_runs() if row["name"] == "run"]
    assert (row["state"], row["newest_step"]) == (made.ending.state, STEPS - 1)
    assert row["metrics"]["val/loss"]["count"] == STEPS
    assert made.tells(f"{row['state']} {row['ending']}")


def test_show(made):
    shown = made.ask("show", made.run_id)
    assert shown.exit_code == 0
    assert made.tells(shown.stdout)
    assert "Some records of this run are not in the store" not in shown.output


def test_analyze_gates(made):
    done = made.ask("analyze", made.run_id, "--fail-on", "critical", "--no-store")
    assert done.exit_code == (0 if made.ending.state == "completed" else 3)
    assert made.ending.state == "completed" or made.tells(done.stdout)


def test_compare_gates(made):
    done = made.ask("compare", "reference", made.run_id, "--fail-on-worse")
    assert done.exit_code == (0 if made.ending.state == "completed" else 3)
    assert made.ending.state == "completed" or made.tells(done.output)


def test_page(made):
    source = open_source(made.root)
    client = PageClient(source)
    try:
        (row,) = [row for row in client.json("/api/runs")["rows"] if row["name"] == "run"]
        told = client.json(f"/api/runs/{made.run_id}")["run"]
    finally:
        client.app.state.page.desk.close(60)
        client.app.state.page.tables.close()
        source.close()
    assert (row["state"], row["newest_step"]) == (made.ending.state, STEPS - 1)
    assert made.tells(f"{told['state']} {told['ending']}")


def test_mirror(made):
    def look():
        session = quark.open_run(made.run_id, made.root, backend="csv")
        stored = session.open_run.reader.load_run(made.run_id)
        return stored, len(quark.MetricsLogger(session).read(metric_key="val/loss"))

    if made.ending.mirror is not None:
        assert look()[0].state == made.ending.mirror
    recovery.sync(made.root)
    stored, count = look()
    assert count == STEPS
    assert made.tells(stored.describe_end())
    left = list(SHARED_MEMORY.glob(f"quark-{made.run_id}-*"))
    assert left == []


LOOK = """
import sys, quark
run_id, root, place = sys.argv[1:]
session = quark.open_run(run_id, root, backend=place)
count = len(quark.MetricsLogger(session).read(metric_key="val/loss"))
print(count, session.open_run.reader.load_run(run_id).describe_end())
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("leave", "told"),
    [
        (signal.SIGTERM, "interrupted: SIGTERM"),
        (signal.SIGKILL, "lost: process"),
    ],
    ids=["sigterm", "sigkill"],
)
def test_mlflow_tells_it_too(tmp_path, leave, told):
    place = f"mlflow:sqlite:///{tmp_path}/mlflow.db?quark=full"
    head = HEAD.replace('backends="csv"', f"backends={place!r}")
    child = start(tmp_path, "log(begin('run')); tell(); wait()", head=head)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(leave)
    child.communicate(timeout=DEADLINE_S)
    (row,) = Produced(tmp_path, ENDINGS["sigterm"]).list_runs()
    assert row["metrics"]["val/loss"]["count"] == STEPS
    recovery.sync(tmp_path)
    # By a process of its own: MLflow warns of what it does itself.
    command = [sys.executable, "-c", LOOK, row["id"], str(tmp_path), place]
    seen = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert seen.startswith(f"{STEPS} {told}")
