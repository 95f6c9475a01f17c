"""On a network file system the journal is the store, and every reader works on it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kit.programs import log_steps

import quark
from quark_backends.store.databases.layout import find_network_filesystem
from quark_core.runs import recovery

MOUNTS = r"""
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/vdb /home/local ext4 rw 0 0
mds:/scratch /scratch\040space lustre rw 0 0
tmpfs /stacked tmpfs rw 0 0
server:/x /stacked nfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data", None),
        ("/home", "nfs4"),
        ("/home/ada/runs", "nfs4"),
        ("/home/local/runs", None),
        ("/homely", None),
        ("/scratch space/run", "lustre"),
        ("/stacked/x", "nfs"),
    ],
)
def test_file_systems_are_told_by_their_type(path, kind):
    assert find_network_filesystem(Path(path), MOUNTS) == kind


@pytest.fixture
def network(monkeypatch):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")


def quark_command(*arguments):
    command = Path(sys.executable).with_name("quark")
    return subprocess.run([command, *arguments], capture_output=True, text=True)


@pytest.mark.long
def test_a_run_lives_in_its_journal(tmp_path, network):
    with quark.start_run(
        project="p", storage_dir=tmp_path, tags=["t"], config={"lr": 0.1}, backends="csv"
    ) as session:
        metrics = quark.MetricsLogger(session)
        log_steps(metrics, 300)
        assert len(metrics.read()) == 300
        session.add_tag("late")
        assert session.reload().run.tags == ("late", "t")
    assert not list(tmp_path.rglob("*.db"))
    assert session.context.db_path is None
    again = quark.open_run(session.run_id, tmp_path)
    assert (again.status, again.context.run.tags) == ("completed", ("late", "t"))
    assert [r.value for r in quark.MetricsLogger(again).read()] == list(map(float, range(300)))
    assert "completed" in quark_command("runs", "-d", str(tmp_path)).stdout
    shown = json.loads(quark_command("show", session.run_id, "-d", str(tmp_path), "--json").stdout)
    assert shown["metrics"][0]["count"] == 300
    lines = (session.run_path / "csv" / "metrics_long.csv").read_text().splitlines()
    assert len(lines) == 301


@pytest.mark.long
def test_syncing_there_changes_nothing(tmp_path, network):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
    for _ in range(2):
        (lane,) = recovery.sync(tmp_path)
        assert lane.state == "kept"
    assert len(quark.MetricsLogger(quark.open_run(session.run_id, tmp_path)).read()) == 1


@pytest.mark.long
def test_runs_are_resumed_killed_and_told_apart(tmp_path, network):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    quark.MetricsLogger(session).log("m", 1.0, step=0)
    session.end_run("interrupted")
    with quark.resume_run(run_id=session.run_id, storage_dir=tmp_path) as resumed:
        quark.MetricsLogger(resumed).log("m", 2.0, step=1)
        with pytest.raises(quark.InvalidRunStateError, match="is running in this process"):
            quark.resume_run(run_id=session.run_id, storage_dir=tmp_path)
    records = quark.MetricsLogger(resumed).read()
    assert [(r.attempt, r.value) for r in records] == [(0, 1.0), (1, 2.0)]
    program = (
        "import os, signal, sys, quark\n"
        "s = quark.start_run(project='p', storage_dir=sys.argv[1])\n"
        "m = quark.MetricsLogger(s); m.log('m', 3.0, step=0); m.flush()\n"
        "print(s.run_id, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True
    )
    killed = quark.open_run(done.stdout.strip(), tmp_path)
    assert killed.open_run.reader.load_run(killed.run_id).state == "lost"
    assert [r.value for r in quark.MetricsLogger(killed).read()] == [3.0]


@pytest.mark.long
def test_moved_to_a_local_disk_it_becomes_an_ordinary_store(tmp_path, network, monkeypatch):
    network_dir, local = tmp_path / "network", tmp_path / "local"
    ids = []
    for number in range(2):
        with quark.start_run(project="p", storage_dir=network_dir) as session:
            quark.MetricsLogger(session).log("m", float(number), step=0)
        ids.append(session.run_id)
    shutil.copytree(network_dir, local)
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "0")
    done = quark_command("sync", str(local))
    assert done.returncode == 0, done.stderr
    assert (local / ".quark" / "quark.db").is_file()
    assert not list(local.glob(".quark/runs/*/journal/*"))
    for number, run_id in enumerate(ids):
        moved = quark.open_run(run_id, local)
        assert moved.status == "completed"
        assert [r.value for r in quark.MetricsLogger(moved).read()] == [float(number)]
