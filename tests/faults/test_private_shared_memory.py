"""Containers: each has shared memory of its own, unless a folder that outlives them is mounted."""

import os
import shutil
import subprocess
import sys
import tempfile

import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli

# The delivery thread journals no more; then the container is killed with all that is in it.
TRAINING = """
import os, signal, sys, quark
session = quark.start_run(project="p", storage_dir=sys.argv[1], system_metrics=False)
metrics = quark.MetricsLogger(session)
session.open_run.background.join()
metrics.log("m", 0.0, step=0)
session.flush()
session.open_run.stream._tick = lambda *, sync: True
for step in range(1, 500):
    metrics.log("m", float(step), step=step)
print(session.id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
SYNCING = """
import sys
from pathlib import Path
from quark_core.runs import recovery
print(sorted({lane.state for lane in recovery.sync(Path(sys.argv[1]))}))
"""
STEPS = 500
OWN = "mount -t tmpfs tmpfs /dev/shm"
MOUNTED = 'mount --bind "$SHARED" /dev/shm'


@pytest.fixture
def shared():
    """A folder of the host's memory."""
    command = ["unshare", "--mount", "sh", "-c", OWN]
    if shutil.which("unshare") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount (unshare --mount)")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="quark-test-") as folder:
        yield folder


def run_in_container(mount, shared, script, storage_dir):
    container = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$0" "$@"']
    return subprocess.run(
        [*container, sys.executable, "-c", script, str(storage_dir)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "SHARED": shared},
    )


def ask_doctor(storage_dir):
    words = ["doctor", "-d", str(storage_dir), "--json"]
    return CliRunner().invoke(cli, words).output


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mount", "kept"), [(MOUNTED, STEPS), (OWN, 1)], ids=["mounted", "its own"]
)
def test_what_a_killed_container_has_not_journaled_is_in_the_memory_that_it_shares(
    tmp_path, shared, mount, kept
):
    trained = run_in_container(mount, shared, TRAINING, tmp_path)
    assert trained.returncode == -9, trained.stderr
    # Asked out here, where the memory of neither is.
    assert "is not accessible" in ask_doctor(tmp_path)
    synced = run_in_container(mount, shared, SYNCING, tmp_path)
    # That is told once, by whoever delivers it.
    assert synced.stderr.count("is not accessible from here") == (mount == OWN)
    assert "is not accessible" not in ask_doctor(tmp_path)
    assert synced.stdout.strip() == "['delivered']", synced.stderr
    assert os.listdir(shared) == []
    run = quark.open_run(trained.stdout.strip(), tmp_path)
    steps = [record.step for record in quark.MetricsLogger(run).read(metric_key="m")]
    # The documented limit: with memory of its own only what was journaled is left.
    assert steps == list(range(kept))
