"""`quark rm` and `quark restore`: into the trash and back, and nothing else is touched."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

import quark
from quark_core.errors import InvalidRunStateError, RunNotFoundError, SessionStoreError

TRAINING = """
import sys, quark
session = quark.start_run(project="vision", storage_dir=sys.argv[1])
quark.MetricsLogger(session).log("loss", 1.0, step=0)
session.flush("stored")
print(session.run_id, flush=True)
sys.stdin.readline()
session.end_run()
"""

KILLED = """
import os, sys, quark
session = quark.start_run(project="vision", storage_dir=sys.argv[1])
print(session.run_id, flush=True)
metrics = quark.MetricsLogger(session)
metrics.log("loss", 1.0, step=0)
session.flush("stored")
for step in range(1, 100):
    metrics.log("loss", 1.0, step=step)
os.kill(os.getpid(), 9)
"""


def list_ids(invoke, root):
    return {run["id"] for run in json.loads(invoke("runs", "-d", root, "--json").stdout)}


def list_trash(invoke, root):
    return {
        run["run_id"] for run in json.loads(invoke("rm", "--list", "-d", root, "--json").stdout)
    }


@pytest.fixture
def filled(tmp_path, make_run, store):
    """Four runs of two projects; two of them with files of their own."""
    make_run(tmp_path, "alpha-1", name="first", backends="csv")
    make_run(tmp_path, "alpha-2", name="same")
    make_run(tmp_path, "beta-1", "text", name="same", backends="csv")
    make_run(tmp_path, "beta-2", "text")
    return store


@pytest.mark.long
def test_removing_one_leaves_every_byte_of_the_others(filled, invoke):
    others = ("alpha-1", "alpha-2", "beta-2")
    before = {run_id: filled.read_everything(run_id) for run_id in others}
    invoke("rm", "beta-1", "-y", "-d", filled.root)
    assert {run_id: filled.read_everything(run_id) for run_id in others} == before
    invoke("gc", "-y", "-d", filled.root)
    assert {run_id: filled.read_everything(run_id) for run_id in others} == before
    assert list_ids(invoke, filled.root) == set(others)
    assert filled.is_sound()


@pytest.mark.long
def test_what_is_in_the_trash_is_hidden_and_says_how_to_get_it_back(filled, invoke):
    result = invoke("rm", "alpha-1", "-y", "-d", filled.root)
    assert "To restore: quark restore" in result.stdout
    assert "To free the space: quark gc" in result.stdout
    assert list_ids(invoke, filled.root) == {"alpha-2", "beta-1", "beta-2"}
    with pytest.raises(RunNotFoundError, match=r"trash.*quark restore"):
        quark.open_run("alpha-1", filled.root)
    with pytest.raises(RunNotFoundError, match="trash"):
        quark.resume_run(run_id="alpha-1", storage_dir=filled.root)
    assert not (filled.folder / "runs" / "alpha-1").exists()
    assert (filled.folder / "trash" / "alpha-1" / "csv" / "metrics_long.csv").exists()
    assert "alpha-1" in invoke("rm", "--list", "-d", filled.root).stdout


@pytest.mark.long
def test_restoring_brings_everything_back(filled, invoke):
    before = {run_id: filled.read_everything(run_id) for run_id in ("alpha-1", "beta-1")}
    invoke("rm", "alpha-1", "beta-1", "-y", "-d", filled.root)
    result = invoke("restore", "first", "beta", "-d", filled.root)
    assert result.stdout.splitlines() == ["Restored alpha-1.", "Restored beta-1."]
    assert {run_id: filled.read_everything(run_id) for run_id in before} == before
    assert list_ids(invoke, filled.root) == {"alpha-1", "alpha-2", "beta-1", "beta-2"}
    assert invoke("rm", "--list", "-d", filled.root).stdout == (
        f"The trash of the store {filled.root} is empty.\n"
    )


@pytest.mark.long
def test_the_table_says_what_goes_before_it_goes(filled, invoke):
    result = invoke("rm", "alpha-1", "beta-2", "-d", filled.root, answer="n\n", code=1)
    header = next(line for line in result.stdout.splitlines() if "points" in line)
    order = ["run", "name", "project", "state", "points", "database", "files", "total"]
    assert header.split() == order
    (row,) = [line for line in result.stdout.splitlines() if line.strip().startswith("alpha-1")]
    assert row.split()[:5] == ["alpha-1", "first", "vision", "completed", "600"]
    assert "Move 2 runs to the trash (" in result.stdout
    assert list_trash(invoke, filled.root) == set()
    # Nobody there to answer is no answer.
    invoke("rm", "alpha-1", "-d", filled.root, answer="", code=1)
    assert list_trash(invoke, filled.root) == set()
    invoke("rm", "alpha-1", "-d", filled.root, answer="y\n")
    assert list_trash(invoke, filled.root) == {"alpha-1"}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["alpha"], '\'alpha\' matches 2 runs: alpha-2 "same", alpha-1 "first". Pass a longer '),
        (["same"], "'same' matches 2 runs: beta-1, alpha-2. Pass the run ID."),
        (["gamma"], "no run matches 'gamma' (ID, unique prefix or name) in the store "),
        ([""], "no run matches ''"),
        (["alpha-1", "gamma"], "no run matches 'gamma'"),
        (["beta-1", "beta"], "'beta' matches 2 runs"),
    ],
)
def test_what_fits_no_run_or_several_is_refused_and_nothing_goes(
    filled, invoke, refuse, texts, reason
):
    assert reason in refuse("rm", *texts, "-y", "-d", filled.root)
    assert list_trash(invoke, filled.root) == set()


@pytest.mark.long
def test_ids_names_and_beginnings_may_be_mixed_and_repeated(filled, invoke):
    result = invoke("rm", "first", "alpha-1", "beta-2", "-y", "--json", "-d", filled.root)
    data = json.loads(result.stdout)
    assert [run["run_id"] for run in data["trashed"]] == ["alpha-1", "beta-2"]
    assert data["total_bytes"] == sum(run["total_bytes"] for run in data["trashed"])
    assert list_trash(invoke, filled.root) == {"alpha-1", "beta-2"}


@pytest.mark.long
def test_an_exact_id_wins_over_longer_ones(tmp_path, make_run, invoke):
    make_run(tmp_path, "run", points=1)
    make_run(tmp_path, "run-2", points=1)
    invoke("rm", "run", "-y", "-d", tmp_path)
    assert list_trash(invoke, tmp_path) == {"run"}


@pytest.mark.long
def test_what_is_in_the_trash_already_is_said_to_be(filled, invoke, refuse):
    invoke("rm", "alpha-1", "-y", "-d", filled.root)
    assert "is already in the trash (alpha-1)" in refuse("rm", "first", "-y", "-d", filled.root)
    assert "matches 'beta-1'. `quark rm --list` lists the runs in the trash." in refuse(
        "restore", "beta-1", "-d", filled.root
    )
    with pytest.raises(RunNotFoundError, match="beta-1 is not in the trash"):
        filled.trash.restore_runs(["alpha-1", "beta-1"])
    assert list_trash(invoke, filled.root) == {"alpha-1"}


@pytest.mark.long
def test_without_a_run_it_is_a_usage_error(filled, invoke):
    assert "Missing argument 'RUN...'" in invoke("rm", "-d", filled.root, code=2).output
    invoke("restore", "-d", filled.root, code=2)


@pytest.mark.long
def test_a_living_run_is_refused_and_with_it_the_others(filled, invoke, refuse, spawn):
    child = spawn(TRAINING, filled.root)
    run_id = child.stdout.readline().strip()
    reason = refuse("rm", run_id, "alpha-1", "-y", "--force", "-d", filled.root)
    assert f"{run_id[:8]} is still running; nothing was removed. Stop the training" in reason
    with pytest.raises(InvalidRunStateError, match=rf"{run_id} is running \(process {child.pid}\)"):
        filled.trash.trash_runs(["alpha-1", run_id])
    assert list_trash(invoke, filled.root) == set()
    child.communicate("end\n")
    invoke("rm", run_id, "alpha-1", "-y", "-d", filled.root)
    assert list_trash(invoke, filled.root) == {run_id, "alpha-1"}


@pytest.mark.long
def test_a_killed_run_is_delivered_before_it_goes(tmp_path, invoke, spawn):
    child = spawn(KILLED, tmp_path)
    run_id = child.stdout.readline().strip()
    child.wait()
    # Who looks at the store first delivers what the journal holds; `restore` brings back all of it.
    invoke("rm", run_id, "-y", "-d", tmp_path)
    assert list_trash(invoke, tmp_path) == {run_id}
    invoke("restore", run_id, "-d", tmp_path)
    metrics = quark.MetricsLogger(quark.open_run(run_id, tmp_path))
    assert [record.step for record in metrics.read(metric_key="loss")] == [*range(100)]


@pytest.mark.sampled
@pytest.mark.parametrize("elsewhere", [False, True])
def test_undelivered_records_are_not_removed_unawares(
    tmp_path, monkeypatch, start, invoke, refuse, store, elsewhere
):
    if elsewhere:
        monkeypatch.setenv("QUARK_JOURNAL_DIR", str(tmp_path / "journals"))
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.3")
    # A mirror that cannot be written, by anyone.
    (tmp_path / "blocked").write_text("a file, not a folder")
    session = start(tmp_path, "waits", backends="csv:blocked")
    quark.MetricsLogger(session).log("loss", 1.0, step=0)
    session.flush("stored")
    session.end_run()
    journal = tmp_path / "journals" / "waits" if elsewhere else store.folder / "runs/waits/journal"
    assert [*journal.iterdir()]

    reason = refuse("rm", "waits", "-y", "-d", tmp_path)
    assert "records waiting for csv" in reason
    assert list_trash(invoke, tmp_path) == set()
    (usage,) = json.loads(invoke("rm", "waits", "-y", "--force", "--json", "-d", tmp_path).stdout)[
        "trashed"
    ]
    assert usage["files"]["journal"] > 0
    # Nothing is lost: with the run, its journal comes back, and can be delivered.
    invoke("restore", "waits", "-d", tmp_path)
    (tmp_path / "blocked").unlink()
    invoke("sync", tmp_path)
    assert "loss" in (tmp_path / "blocked" / "waits" / "metrics_long.csv").read_text()
    invoke("rm", "waits", "-y", "-d", tmp_path)


@pytest.mark.long
def test_a_forced_one_goes_with_its_journal(tmp_path, monkeypatch, invoke, spawn, store):
    monkeypatch.setenv("QUARK_JOURNAL_DIR", str(tmp_path / "journals"))
    child = spawn(TRAINING, tmp_path)
    run_id = child.stdout.readline().strip()
    child.send_signal(signal.SIGKILL)
    child.wait()
    (manifest,) = (tmp_path / "journals" / run_id).glob("*/journal.json")
    box = json.loads(manifest.read_text())["black_box"]
    invoke("rm", run_id, "-y", "--force", "-d", tmp_path)
    invoke("gc", "-y", "-d", tmp_path)
    assert not manifest.parent.exists()
    assert box is None or not Path(box).exists()
    assert json.loads(invoke("sync", "--dry-run", "--json", tmp_path).stdout) == []


@pytest.mark.long
def test_a_crash_between_the_mark_and_the_move_is_healed(filled, invoke):
    before = filled.read_everything("alpha-1")
    # As a process leaves it that is killed right after it has marked the run.
    filled.query("UPDATE run SET trashed_us = 1 WHERE id = 'alpha-1'")
    invoke("rm", "alpha-2", "-y", "-d", filled.root)
    assert (filled.folder / "trash" / "alpha-1").exists()
    assert not (filled.folder / "runs" / "alpha-1").exists()
    # And while it restores.
    filled.query("UPDATE run SET trashed_us = NULL WHERE id = 'alpha-1'")
    invoke("gc", "-y", "-d", filled.root)
    assert filled.read_everything("alpha-1") == before
    assert not (filled.folder / "trash").exists()


@pytest.mark.long
def test_files_that_come_while_it_is_in_the_trash_are_kept_beside_the_others(filled, invoke):
    invoke("rm", "alpha-1", "-y", "-d", filled.root)
    before = {
        path.name: path.read_bytes() for path in (filled.folder / "trash/alpha-1/csv").iterdir()
    }
    late = filled.folder / "runs" / "alpha-1" / "csv"
    late.mkdir(parents=True)
    (late / "events.csv").write_text("late")
    (late / "more.csv").write_text("more")
    invoke("restore", "alpha-1", "-d", filled.root)
    after = {path.name: path.read_bytes() for path in late.iterdir()}
    assert after["events.csv"] == b"late"
    assert after["more.csv"] == b"more"
    assert after["events.csv.1"] == before["events.csv"]
    assert {after[name] for name in before} | {after["events.csv.1"]} >= set(before.values())


@pytest.mark.long
def test_a_store_for_reading_only_is_left_alone(filled):
    from quark_core.runs.backend_choice import open_reader

    reader = open_reader(filled.root)
    for change in (
        lambda: reader.trash_runs(["alpha-1"]),
        lambda: reader.restore_runs(["alpha-1"]),
        reader.collect_trash,
    ):
        with pytest.raises(SessionStoreError, match="opened for reading only"):
            change()
    assert len(reader.measure_store().runs) == 4


@pytest.fixture
def lock_folder():
    """Makes a folder one that nobody may write, root included."""
    locked = []

    def lock(folder):
        if os.geteuid():
            for path in (folder, *folder.rglob("*")):
                path.chmod(0o555 if path.is_dir() else 0o444)
        else:
            for options in (["--bind"], ["-o", "remount,bind,ro"]):
                done = subprocess.run(["mount", *options, folder, folder], capture_output=True)
                if done.returncode:
                    pytest.skip("needs the right to mount")
        locked.append(folder)

    yield lock
    for folder in locked:
        if os.geteuid():
            for path in (folder, *folder.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
        else:
            subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.sampled
@pytest.mark.parametrize("command", [["rm", "alpha-1"], ["restore", "alpha-2"], ["gc"]])
def test_a_store_that_may_not_be_written_gives_a_clear_error(
    filled, invoke, refuse, lock_folder, command
):
    invoke("rm", "alpha-2", "-y", "-d", filled.root)
    lock_folder(filled.folder)
    yes = [] if command[0] == "restore" else ["-y"]
    reason = refuse(*command, *yes, "-d", filled.root)
    assert str(filled.folder) in reason
    assert any(word in reason for word in ("readonly", "read-only", "unable to open"))
    # Looking is still possible.
    assert list_trash(invoke, filled.root) == {"alpha-2"}
    assert len(json.loads(invoke("du", "--json", "-d", filled.root).stdout)["runs"]) == 4
    dry = json.loads(invoke("gc", "--dry-run", "--json", "-d", filled.root).stdout)
    assert [run["run_id"] for run in dry["removed"]] == ["alpha-2"]


def test_where_there_is_no_store_nothing_is_made(tmp_path, refuse):
    for command in (["rm", "x", "-y"], ["restore", "x"], ["gc", "-y"], ["du"]):
        assert "no Quark store" in refuse(*command, "-d", tmp_path)
    assert not (tmp_path / ".quark").exists()


def test_runs_kept_as_journals_only_are_not_removed(tmp_path, monkeypatch, make_run, refuse):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    make_run(tmp_path, "remote", points=1)
    for command in (["rm", "remote", "-y"], ["restore", "remote"], ["gc", "-y"], ["du"]):
        reason = refuse(*command, "-d", tmp_path)
        assert "network file system" in reason
        assert "quark sync" in reason
    assert len([*tmp_path.glob(".quark/runs/remote/journal/*/journal.json")]) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("columns", [80, 200])
def test_eighty_columns_are_enough(tmp_path, make_run, invoke, columns):
    make_run(tmp_path, "0123456789-a", "p" * 60, name="a name " * 9, points=3)
    make_run(tmp_path, "0123456789-b", "q" * 60, name="[bold]b[/]", points=3)
    result = invoke("rm", "a name " * 9, "[bold]b[/]", "-d", tmp_path, columns=columns, answer="y")
    table = [line for line in result.stdout.splitlines() if line.startswith(" ")]
    assert max(map(len, table)) <= columns
    assert any("0123456789-a" in line for line in table)
    assert any("0123456789-b" in line for line in table)


@pytest.mark.long
def test_many_are_not_all_named(tmp_path, make_run, invoke, store):
    for index in range(22):
        make_run(tmp_path, f"run-{index:02}", points=1)
    result = invoke("rm", *[f"run-{index:02}" for index in range(22)], "-y", "-d", tmp_path)
    assert "20 of 22 runs, the largest." in result.stdout
    assert "Moved 22 runs to the trash" in result.stdout
    assert "quark restore" in result.stdout
    assert "run-21 " not in result.stdout.splitlines()[-2]
    assert len(invoke("rm", "--list", "-d", tmp_path).stdout.splitlines()) > 22


@pytest.mark.long
def test_a_copied_store_is_removed_from_where_it_lies(filled, invoke, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copytree(filled.folder, copy / ".quark")
    before = filled.read_everything("alpha-1")
    invoke("rm", "alpha-1", "-y", "-d", copy)
    invoke("gc", "-y", "-d", copy)
    assert filled.read_everything("alpha-1") == before
    assert not (copy / ".quark" / "runs" / "alpha-1").exists()
