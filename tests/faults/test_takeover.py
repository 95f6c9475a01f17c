"""What processes left that had no time is in the store for whoever reads first, by any way in."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading

import msgspec
import pytest
from click.testing import CliRunner
from kit.programs import read_values, run_script, start_code
from page_client import PageClient

import quark
from quark.cli.main import cli
from quark.page.routes.page_source import open_source
from quark_core.delivery.crash_buffer import find_box_path
from quark_core.delivery.journal_folder import find_folders
from quark_core.delivery.sync import sync_folder
from quark_core.runs import recovery
from quark_core.runs.backend_choice import open_reader
from quark_core.system.process import current_process

KILLED = """
import os, signal, sys, time, quark
session = quark.start_run(project="p", storage_dir=sys.argv[1], backends=sys.argv[2])
metrics = quark.MetricsLogger(session)
metrics.log("loss", 1.0, step=0)
session.flush("stored")
# The primary takes nothing any more, and the journal not all of it.
session.open_run.stream._tick = lambda *, sync: True
for step in range(1, 50):
    metrics.log("loss", 1.0 / step, step=step)
print(session.run_id, flush=True)
if sys.argv[3] == "signal":
    signal.raise_signal(signal.SIGTERM)
    time.sleep(200)
os.kill(os.getpid(), signal.SIGKILL)
"""


def kill(root, *, backends="embedded", after=""):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(root), backends, after],
        capture_output=True,
        text=True,
        env={**os.environ, "QUARK_QUIET": "1"},
    )
    assert done.returncode < 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def store(tmp_path):
    """A store with what a killed process has stored, half of which nobody has taken over yet."""
    return tmp_path, kill(tmp_path)


def read_by_opening(root, run_id):
    session = quark.open_run(run_id, root)
    return len(quark.MetricsLogger(session).read(metric_key="loss"))


def ask_command(root, *arguments):
    done = CliRunner().invoke(cli, [*arguments, "-d", str(root)])
    return done.output


def read_by_runs(root, run_id):
    (row,) = json.loads(ask_command(root, "runs", "--json"))
    return row["newest_step"] + 1


def read_by_show(root, run_id):
    shown = json.loads(ask_command(root, "show", run_id, "--json"))
    (metric,) = [each for each in shown["metrics"] if each["key"] == "loss"]
    return metric["count"]


def read_by_export(root, run_id):
    ask_command(
        root, "export", run_id, "--format", "csv", "-k", "metric", "-o", str(root / "metric.csv")
    )
    return len((root / "metric.csv").read_text().splitlines()) - 1


def read_by_page(root, run_id):
    source = open_source(root)
    client = PageClient(source)
    try:
        return client.json("/api/runs")["rows"][0]["newest_step"] + 1
    finally:
        client.app.state.page.desk.close(60)
        source.close()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "read",
    [read_by_opening, read_by_runs, read_by_show, read_by_export, read_by_page],
    ids=["open_run", "runs", "show", "export", "page"],
)
def test_the_first_reader_has_everything(store, read):
    root, run_id = store
    assert open_reader(root, takes_over=False).load_run(run_id).state == "lost"
    assert read(root, run_id) == 50
    assert recovery.count_unstored(root, run_id) == 0


def test_what_is_left_of_an_interrupted_run_says_that_it_was_interrupted(tmp_path, monkeypatch):
    # As where SIGKILL follows at once: nobody has the time to deliver anything.
    monkeypatch.setenv("QUARK_JOURNAL_TIMEOUT_SECONDS", "1")
    run_id = kill(tmp_path, after="signal")
    assert open_reader(tmp_path, takes_over=False).load_run(run_id).state == "lost"
    assert open_reader(tmp_path).load_run(run_id).describe_end() == "interrupted: SIGTERM"


def test_a_session_and_a_page_that_are_open_already_see_it(tmp_path, request):
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED.replace("os.kill(", "time.sleep(200)\nos.kill("),
         str(tmp_path), "embedded", ""],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    run_id = child.stdout.readline().strip()
    session, source = quark.open_run(run_id, tmp_path), open_source(tmp_path)
    metrics, client = quark.MetricsLogger(session), PageClient(source)
    request.addfinalizer(child.kill)
    assert len(metrics.read(metric_key="loss")) == 1
    assert client.json("/api/runs")["rows"][0]["state"] == "running"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    for _ in range(1000):  # whoever stays open rests between two looks
        if len(metrics.read(metric_key="loss")) == 50:
            break
        threading.Event().wait(0.02)
    assert len(metrics.read(metric_key="loss")) == 50
    row = client.json("/api/runs")["rows"][0]
    assert (row["state"], row["newest_step"]) == ("lost", 49)
    client.app.state.page.desk.close(60)
    source.close()


READ = """
import sys, quark
session = quark.open_run(sys.argv[2], sys.argv[1])
print(len(quark.MetricsLogger(session).read(metric_key="loss")))
"""


@pytest.mark.long
def test_readers_at_once_have_everything_each(store):
    root, run_id = store
    readers = [start_code(READ, root, run_id) for _ in range(6)]
    assert [reader.communicate()[0].strip() for reader in readers] == ["50"] * 6
    assert not recovery.has_journals(root)


def test_mirrors_wait_for_sync_and_the_journal_is_not_looked_into_again(tmp_path, monkeypatch):
    run_id = kill(tmp_path, backends="csv")
    assert read_by_opening(tmp_path, run_id) == 50
    (folder,) = find_folders(tmp_path)
    assert folder.is_stored
    assert "csv lacks" in ask_command(tmp_path, "show", run_id)
    monkeypatch.setattr("quark_core.delivery.takeover.sync_folder", None)
    assert read_by_opening(tmp_path, run_id) == 50
    recovery.sync(tmp_path)
    mirrored = quark.open_run(run_id, tmp_path, backend="csv")
    assert len(quark.MetricsLogger(mirrored).read(metric_key="loss")) == 50
    assert "csv lacks" not in ask_command(tmp_path, "show", run_id)


def test_a_folder_that_cannot_be_written_is_left_and_told(store, monkeypatch, caplog):
    root, run_id = store
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    assert read_by_opening(root, run_id) == 1
    assert "this process cannot write to its folder" in caplog.text
    assert f"quark sync {root}" in caplog.text
    assert "Some records of this run are not in the store yet" in ask_command(root, "show", run_id)
    assert os.path.lexists(find_box_path(run_id, next(find_folders(root)).path.name))
    monkeypatch.undo()
    assert read_by_opening(root, run_id) == 50


def test_a_store_that_takes_nothing_costs_a_bounded_time_and_is_told(store, monkeypatch, caplog):
    root, run_id = store
    hangs = threading.Event()
    monkeypatch.setattr("quark_core.delivery.takeover._TIMEOUT_S", 0.1)
    monkeypatch.setattr(
        "quark_core.delivery.takeover.sync_folder", lambda *_, **__: hangs.wait(60) and []
    )
    assert open_reader(root).load_run(run_id).state == "lost"
    assert "it is being delivered" in caplog.text
    hangs.set()


@pytest.mark.parametrize("arguments", [["doctor", "-d"], ["sync", "--dry-run"]])
def test_who_asks_what_waits_takes_over_nothing(store, arguments):
    root, run_id = store
    done = CliRunner().invoke(cli, [*arguments, str(root)])
    assert "embedded" in done.output
    assert recovery.count_unstored(root, run_id) > 0


# Syncing twice, at once, and beside the living process delivers every point once.

LEFT = """
def stop(lane):
    def write(*_):
        raise OSError("planted outage")
    lane._backend.write = lane._backend.write_group = write
session = quark.start_run(project="p", storage_dir=storage_dir, backends="csv")
metrics = quark.MetricsLogger(session)
while any(lane._backend is None for lane in session.open_run.stream._lanes):
    time.sleep(0.01)
session.flush()
for lane in session.open_run.stream._lanes:
    stop(lane)
for step in range(3000):
    metrics.log("m", float(step), step=step)
    if step % 200 == 0:
        session.flush("journaled")
session.flush("durable")
print(session.run_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

SYNC = """
import sys, pathlib
from quark_core.runs import recovery
sys.stdin.readline()
for result in recovery.sync(pathlib.Path(sys.argv[1])):
    print(result.backend, result.state, result.delivered)
"""


def mirrored(tmp_path, run_id):
    found = []
    for path in sorted((tmp_path / ".quark" / "runs" / run_id).rglob("metrics_long*.csv")):
        with path.open(newline="") as file:
            found += [float(row["value"]) for row in csv.DictReader(file)]
    return sorted(found)


def assert_all_once(tmp_path, run_id, count):
    assert read_values(tmp_path, run_id) == list(map(float, range(count)))
    assert mirrored(tmp_path, run_id) == list(map(float, range(count)))
    assert recovery.survey(tmp_path) == []


@pytest.fixture
def left_behind(tmp_path):
    output, _ = run_script(tmp_path, LEFT, ends=-9)
    return output.strip()


@pytest.mark.long
def test_sync_twice_delivers_once(tmp_path, left_behind):
    first = recovery.sync(tmp_path)
    assert {result.backend: result.state for result in first} == {
        "embedded": "delivered",
        "csv": "delivered",
    }
    assert sum(result.delivered for result in first) >= 6_000
    assert recovery.sync(tmp_path) == []
    assert_all_once(tmp_path, left_behind, 3_000)


@pytest.mark.long
def test_what_somebody_else_has_delivered_meanwhile_leaves_no_folder(tmp_path, left_behind):
    (folder,) = recovery.find_folders(tmp_path)
    # As rank 0 reads it of a rank that is about to end.
    manifest = msgspec.structs.replace(folder.read_manifest(), process=current_process())
    recovery.sync(tmp_path)
    assert not folder.path.exists()
    sync_folder(folder, manifest, recovery.open_lane)
    assert not folder.path.exists()
    assert_all_once(tmp_path, left_behind, 3_000)


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_syncs_at_once_deliver_once(tmp_path, left_behind, count):
    children = [
        start_code(SYNC, tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(count)
    ]
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    ended = [child.communicate(timeout=200) for child in children]
    assert [child.returncode for child in children] == [0] * count, ended
    recovery.sync(tmp_path)
    assert_all_once(tmp_path, left_behind, 3_000)


KILLED_SYNC = """
import pathlib
from quark_core.runs import recovery
from quark_core.delivery import delivery_state, sync
sync.GROUP_BATCHES = 3
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
{plant}
recovery.sync(pathlib.Path(storage_dir), on_progress={progress})
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "progress"),
    [("", "die"), ("delivery_state.LaneMark.finish = die", "None")],
    ids=["after the mark", "before the mark"],
)
def test_a_sync_that_is_killed_is_finished_by_the_next(tmp_path, left_behind, plant, progress):
    for _ in range(4):
        run_script(tmp_path, KILLED_SYNC.format(plant=plant, progress=progress), ends=-9)
    recovery.sync(tmp_path)
    assert_all_once(tmp_path, left_behind, 3_000)


@pytest.mark.long
def test_sync_beside_the_living_process_leaves_it_alone(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv") as session:
        metrics = quark.MetricsLogger(session)
        for step in range(3_000):
            metrics.log("m", float(step), step=step)
            if step % 300 == 0:
                assert {r.state for r in recovery.sync(tmp_path)} == {"held"}
        for _ in range(2):
            child = subprocess.run(
                [sys.executable, "-c", SYNC, str(tmp_path)],
                input="go\n",
                capture_output=True,
                text=True,
                timeout=200,
            )
            states = {line.split()[1] for line in child.stdout.splitlines()}
            assert (child.returncode, states) == (0, {"held"}), child.stderr
        metrics.flush()
    assert session.report_delivery().complete
    assert_all_once(tmp_path, session.run_id, 3_000)
