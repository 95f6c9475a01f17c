"""`quark gc`: gone for good, the space given back, beside trainings and through every kill."""

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import time
from pathlib import Path

import psutil
import pytest

import quark
from quark_backends.store.databases.layout import StoreLayout
from quark_backends.store.databases.sqlite import connect
from quark_backends.store.upkeep.garbage_collection import TrashCollector
from quark_backends.store.upkeep.trash import RunTrash
from quark_core.backends.contract import Batch
from quark_core.errors import RunNotFoundError, SessionStoreError
from quark_core.ranks.launches import RankInfo
from quark_core.runs.backend_choice import open_primary, plan_backends

TRAINING = """
import os, sys, quark
root, stop = sys.argv[1:]
session = quark.start_run(project="beside", storage_dir=root)
metrics = quark.MetricsLogger(session)
print(session.run_id, flush=True)
step = 0
while not os.path.exists(stop):
    metrics.log("full/speed", float(step), step=step)
    step += 1
report = session.end_run()
print(step, flush=True)
"""

COLLECTING = """
import sys
from contextlib import contextmanager
from pathlib import Path
from quark_backends.store.databases.layout import StoreLayout
from quark_backends.store.upkeep.trash import RunTrash
trash = RunTrash(StoreLayout(Path(sys.argv[1])))
print("begun", flush=True)
trash.collect_trash()
print("done", flush=True)
"""


def collect(invoke, root, *options):
    return json.loads(invoke("gc", "-y", "--json", "-d", root, *options).stdout)


def read_in_order(root, run_id, key="full/speed"):
    metrics = quark.MetricsLogger(quark.open_run(run_id, root))
    return metrics.columns(metric_key=key)["step"].tolist()


@pytest.mark.long
def test_the_file_shrinks_and_nothing_of_the_run_is_left(tmp_path, make_run, invoke, store):
    make_run(tmp_path, "keep", points=500, backends="csv")
    for index in range(3):
        make_run(tmp_path, f"go-{index}", points=20_000, backends="csv")
    make_run(tmp_path, "last", points=10)
    before = {run_id: store.read_everything(run_id) for run_id in ("keep", "last")}
    size_before = store.size_bytes()
    file_before = (store.folder / "quark.db").stat().st_size
    gone_bytes = json.loads(
        invoke("rm", "go-0", "go-1", "go-2", "-y", "--json", "-d", tmp_path).stdout
    )["total_bytes"]

    result = collect(invoke, tmp_path)
    assert {run["run_id"] for run in result["removed"]} == {"go-0", "go-1", "go-2"}
    assert result["before_bytes"] >= size_before
    # SQLite's own index of its log stands and goes with whoever has the store open.
    assert abs(result["after_bytes"] - store.size_bytes()) <= 64 * 1024
    assert result["freed_bytes"] == result["before_bytes"] - result["after_bytes"]
    # All that was said to go has gone, from the file system too.
    assert size_before - store.size_bytes() > 0.9 * gone_bytes
    assert (store.folder / "quark.db").stat().st_size < file_before / 4
    assert store.is_sound()
    assert store.count_orphans() == {}
    assert store.query("SELECT id FROM run ORDER BY pk") == [("keep",), ("last",)]
    assert {row[0] for row in store.query("SELECT run_id FROM removed")} == {
        "go-0",
        "go-1",
        "go-2",
    }
    assert {run_id: store.read_everything(run_id) for run_id in before} == before
    assert sorted(p.name for p in store.folder.glob("*/*")) == ["keep"]
    assert collect(invoke, tmp_path)["removed"] == []


@pytest.mark.long
def test_gc_beside_a_training_at_full_speed(tmp_path, make_run, invoke, spawn, store):
    for index in range(4):
        make_run(tmp_path, f"go-{index}", points=20_000)
    make_run(tmp_path, "keep")
    before = store.read_everything("keep")
    stop = tmp_path / "stop"
    child = spawn(TRAINING, tmp_path, stop)
    run_id = child.stdout.readline().strip()
    for index in range(4):
        invoke("rm", f"go-{index}", "-y", "-d", tmp_path)
        result = collect(invoke, tmp_path)
        assert [run["run_id"] for run in result["removed"]] == [f"go-{index}"]
        assert result["notes"] == []
    stop.touch()
    steps = int(child.stdout.readline())
    assert child.wait() == 0
    quark_store = quark.open_run(run_id, tmp_path).open_run.reader
    assert quark_store.load_run(run_id).state == "completed"
    invoke("sync", tmp_path)
    found = read_in_order(tmp_path, run_id)
    assert len(found) == steps > 0
    assert found == list(range(steps))
    assert store.read_everything("keep") == before
    assert store.is_sound()
    assert store.count_orphans() == {}


@pytest.mark.long
def test_a_gc_that_is_killed_at_any_moment_is_finished_by_the_next(
    tmp_path, make_run, spawn, look_into, record_property
):
    template = tmp_path / "template"
    for index in range(5):
        make_run(template, f"go-{index}", points=6_000, backends="csv")
        make_run(template, f"keep-{index}", points=100, backends="csv" if index % 2 else None)
    RunTrash(StoreLayout(template)).trash_runs([f"go-{index}" for index in range(5)])
    kept = [f"keep-{index}" for index in range(5)]
    before = {run_id: look_into(template).read_everything(run_id) for run_id in kept}
    moments, stages, duration_s = random.Random(20), set(), None
    for number in range(21):
        root = tmp_path / f"copy-{number}"
        # Nobody writes to the template; what it has in shared memory is its own.
        shutil.copytree(template, root, ignore=shutil.ignore_patterns("*-shm"))
        store = look_into(root)
        size_before = store.size_bytes()
        child = spawn(COLLECTING, root)
        assert child.stdout.readline() == "begun\n"
        begun_s = time.monotonic()
        if duration_s is None:  # the first one is let be, to know how long it takes
            assert child.stdout.readline() == "done\n"
            duration_s = time.monotonic() - begun_s
        else:
            time.sleep(moments.uniform(0, duration_s))
            child.send_signal(signal.SIGKILL)
        child.wait()
        assert store.is_sound()
        left = store.query("SELECT count(*) FROM run WHERE trashed_us NOTNULL")[0][0]
        free = store.query("PRAGMA freelist_count")[0][0]
        stages.add((left, free > 0))

        store.trash.collect_trash()
        assert store.is_sound()
        assert store.count_orphans() == {}
        assert store.trash.list_trash() == []
        assert store.query("PRAGMA freelist_count") == [(0,)]
        assert store.size_bytes() < size_before / 2
        assert {run_id: store.read_everything(run_id) for run_id in kept} == before
        assert not (store.folder / "trash").exists()
        shutil.rmtree(root)
    # How many different stages the kills hit is the clock's, so it is reported, not asserted.
    record_property("stages", sorted(stages))


@pytest.mark.long
def test_control_c_leaves_a_whole_store(tmp_path, make_run, spawn, store):
    for index in range(6):
        make_run(tmp_path, f"go-{index}", points=10_000)
    make_run(tmp_path, "keep")
    before = store.read_everything("keep")
    store.trash.trash_runs([f"go-{index}" for index in range(6)])
    program = "import sys; from quark.cli import main; main()"
    child = spawn(program, "gc", "-y", "-d", tmp_path)
    # Broken off at the first tombstone, or at the end where that is seen too late.
    while child.poll() is None and not store.query("SELECT count(*) FROM removed")[0][0]:
        time.sleep(0.005)
    child.send_signal(signal.SIGINT)
    child.communicate()
    assert child.returncode in (0, 130, 1)
    assert store.is_sound()
    assert store.read_everything("keep") == before
    store.trash.collect_trash()
    assert store.query("SELECT id FROM run") == [("keep",)]
    assert store.read_everything("keep") == before


@pytest.mark.long
def test_only_what_is_old_enough_goes(tmp_path, make_run, invoke, store):
    make_run(tmp_path, "old", points=1)
    make_run(tmp_path, "young", points=1)
    make_run(tmp_path, "keep", points=1)
    invoke("rm", "old", "young", "-y", "-d", tmp_path)
    two_days_ago = time.time_ns() // 1000 - 2 * 86_400_000_000
    store.query("UPDATE run SET trashed_us = ? WHERE id = 'old'", two_days_ago)
    assert collect(invoke, tmp_path, "--older-than", "2.5")["removed"] == []
    result = collect(invoke, tmp_path, "--older-than", "1.5")
    assert [run["run_id"] for run in result["removed"]] == ["old"]
    assert [usage.run_id for usage in store.trash.list_trash()] == ["young"]
    invoke("gc", "--older-than", "-1", "-d", tmp_path, code=2)


@pytest.mark.long
def test_a_dry_run_says_it_all_and_does_nothing(tmp_path, make_run, invoke, store):
    make_run(tmp_path, "go", backends="csv")
    make_run(tmp_path, "keep", points=1)
    invoke("rm", "go", "-y", "-d", tmp_path)

    def look():
        # Reading makes and unmakes SQLite's own files beside the database.
        files = [p for p in store.folder.rglob("*") if p.is_file() and "quark.db-" not in p.name]
        return {path: path.stat().st_mtime_ns for path in files}

    before = look()
    plan = json.loads(invoke("gc", "--dry-run", "--json", "-d", tmp_path).stdout)
    assert [run["run_id"] for run in plan["removed"]] == ["go"]
    assert plan["before_bytes"] == plan["after_bytes"] > 0
    assert "go" in invoke("gc", "--dry-run", "-d", tmp_path).stdout
    assert look() == before
    assert [usage.run_id for usage in store.trash.list_trash()] == ["go"]


def test_what_comes_into_the_trash_while_the_question_stands_stays_there(
    tmp_path, make_run, invoke, store, monkeypatch
):
    for name in ("old", "precious"):
        make_run(tmp_path, name, points=1)
    store.trash.trash_runs(["old"])

    def answer(question, **_):
        assert question.startswith("Permanently delete 1 run (")
        store.trash.trash_runs(["precious"])
        return True

    monkeypatch.setattr("click.confirm", answer)
    assert "Deleted 1 run." in invoke("gc", "-d", tmp_path).stdout
    assert [usage.run_id for usage in store.trash.list_trash()] == ["precious"]
    store.trash.restore_runs(["precious"])


@pytest.mark.long
def test_gc_asks_first(tmp_path, make_run, invoke, store):
    make_run(tmp_path, "go")
    invoke("rm", "go", "-y", "-d", tmp_path)
    result = invoke("gc", "-d", tmp_path, answer="n\n", code=1)
    assert "Permanently delete 1 run (" in result.stdout
    assert [usage.run_id for usage in store.trash.list_trash()] == ["go"]
    result = invoke("gc", "-d", tmp_path, answer="y\n")
    assert "Deleted 1 run. Store size: " in result.stdout
    assert " freed)." in result.stdout
    assert "Deleted 0 runs." in invoke("gc", "-d", tmp_path).stdout  # nothing to ask about


def test_a_removal_that_has_begun_cannot_be_taken_back(tmp_path, make_run, invoke, refuse, store):
    make_run(tmp_path, "go")
    invoke("rm", "go", "-y", "-d", tmp_path)
    store.query("INSERT INTO removed VALUES ('go', 1)")
    assert "`quark gc` has started to delete it" in refuse("restore", "go", "-d", tmp_path)
    # However young it is, what has begun is finished.
    result = collect(invoke, tmp_path, "--older-than", "100")
    assert [run["run_id"] for run in result["removed"]] == ["go"]


@pytest.mark.long
def test_a_run_that_came_back_to_life_stays(tmp_path, make_run, start, invoke, store):
    make_run(tmp_path, "keep", points=1)
    session = start(tmp_path, "alive")
    session.flush("stored")
    metrics = quark.MetricsLogger(session)
    # As if it had counted as lost, with its host asleep, when it was removed.
    store.query("UPDATE run SET trashed_us = 1 WHERE id = 'alive'")
    result = collect(invoke, tmp_path)
    assert result["removed"] == []
    assert result["skipped"] == {"alive": "it is running again"}
    # It writes on, and nothing that it writes is lost.
    metrics.log("loss", 1.0, step=0)
    session.flush("stored")
    store.trash.restore_runs(["alive"])
    assert read_in_order(tmp_path, "alive", "loss") == [0]
    session.end_run()
    store.trash.trash_runs(["alive"])
    result = collect(invoke, tmp_path)
    assert [run["run_id"] for run in result["removed"]] == ["alive"], result


FORKING = """
import os, signal, sys, quark
session = quark.start_run(project="p", storage_dir=sys.argv[1])
metrics = quark.MetricsLogger(session)
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    metrics.log("child", 1.0, step=0)
    os.write(writing, b"x")
    signal.pause()
os.read(reading, 1)
session.end_run()
print(session.run_id, child, flush=True)
sys.stdin.readline()
os._exit(0)
"""


@pytest.mark.long
def test_a_process_that_still_writes_into_an_ended_run_keeps_it(
    tmp_path, monkeypatch, spawn, invoke, refuse
):
    monkeypatch.setenv("QUARK_WRITERS_TIMEOUT_SECONDS", "0.1")
    parent = spawn(FORKING, tmp_path)
    run_id, child = parent.stdout.readline().split()
    try:
        assert f"process {child} still has it open" in refuse("rm", run_id, "-y", "-d", tmp_path)
        invoke("rm", run_id, "-y", "--force", "-d", tmp_path)
        result = collect(invoke, tmp_path)
        assert result["removed"] == []
        assert result["skipped"] == {run_id: "a process is still writing its journal"}
        parent.stdin.write("end\n")
        parent.stdin.close()
        parent.wait()
    finally:
        os.kill(int(child), signal.SIGKILL)
    # The child belongs to nobody now, and nobody may be there to take its exit status.
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(int(child)).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    assert [run["run_id"] for run in collect(invoke, tmp_path)["removed"]] == [run_id]


@pytest.mark.long
def test_numbers_of_removed_runs_are_not_given_out_again(tmp_path, make_run, invoke, store):
    make_run(tmp_path, "keep", points=1)
    make_run(tmp_path, "go", points=1)
    ((run_pk, writer_pk),) = store.query(
        "SELECT run.pk, writer.pk FROM run JOIN writer ON run_pk = run.pk WHERE run.id = 'go'"
    )
    invoke("rm", "go", "-y", "-d", tmp_path)
    collect(invoke, tmp_path)
    # Nobody sees what is kept of it, and there is nothing in it.
    assert [usage.run_id for usage in store.trash.measure_store().runs] == ["keep"]
    assert store.trash.list_trash() == []
    with pytest.raises(RunNotFoundError):
        quark.open_run("go", tmp_path)
    ((config, name),) = store.query("SELECT config, name FROM run WHERE pk = ?", run_pk)
    assert (config, name) == (None, None)

    make_run(tmp_path, "new", points=1)
    ((new_run_pk, new_writer_pk),) = store.query(
        "SELECT run.pk, writer.pk FROM run JOIN writer ON run_pk = run.pk WHERE run.id = 'new'"
    )
    assert new_run_pk > run_pk
    assert new_writer_pk > writer_pk
    collect(invoke, tmp_path)
    assert store.query("SELECT id FROM run ORDER BY pk") == [("keep",), ("new",)]
    assert store.count_orphans() == {}


@pytest.mark.long
def test_what_arrives_for_a_removed_run_is_let_go(tmp_path, make_run, invoke, store):
    make_run(tmp_path, "keep", points=1)
    make_run(tmp_path, "go", points=50)
    reader = quark.open_run("go", tmp_path).open_run.reader
    (writer_id,) = store.query(
        "SELECT writer.id FROM writer JOIN run ON run.pk = run_pk WHERE run.id = 'go'"
    )[0]
    batches = reader.read_batches("go", writer_id, 0, 100)
    assert batches
    before = store.read_everything("keep")
    invoke("rm", "go", "-y", "-d", tmp_path)
    collect(invoke, tmp_path)
    choice = plan_backends((), RankInfo()).primary
    backend = open_primary(choice, choice.configure(tmp_path))
    late = Batch("go", writer_id, 0, 0, 10_000, "metric", batches[0].count, batches[0].body)
    for batch in (*batches, late):
        backend.write(batch)  # acknowledged, so that no lane tries for ever
    backend.close()
    for table in ("batch", "chunk", "writer"):
        assert store.query(
            f"SELECT count(*) FROM {table} WHERE"
            f" {'run_pk' if table == 'writer' else 'writer_pk'} >"
            " (SELECT max(pk) FROM run WHERE id = 'keep')"
        )[0][0] <= (table == "writer")
    assert store.read_everything("keep") == before
    collect(invoke, tmp_path)
    assert store.count_orphans() == {}


@pytest.mark.long
def test_rows_that_came_in_too_late_are_swept_up(tmp_path, make_run, invoke, store):
    make_run(tmp_path, "keep", points=1)
    make_run(tmp_path, "go", points=1)
    make_run(tmp_path, "last", points=1)
    before = {run_id: store.read_everything(run_id) for run_id in ("keep", "last")}
    ((writer_pk,),) = store.query(
        "SELECT writer.pk FROM run JOIN writer ON run_pk = run.pk WHERE run.id = 'go'"
    )
    invoke("rm", "go", "-y", "-d", tmp_path)
    collect(invoke, tmp_path)
    store.query(
        "INSERT INTO frame (writer_pk, first_number, last_number, body) VALUES (?, 0, 9, x'00')",
        writer_pk,
    )
    store.query(
        "INSERT INTO writer (pk, run_pk, id, attempt, rank, started_us, head)"
        " VALUES (70, 69, 'stray', 0, 0, 0, 0)"
    )
    store.query(
        "INSERT INTO batch (writer_pk, kind, number, count, digest, body)"
        " VALUES (70, 'metric', 0, 1, x'00', x'00')"
    )
    store.query("INSERT INTO run_tag VALUES (69, 'stray')")
    assert store.count_orphans() != {}
    collect(invoke, tmp_path)
    assert store.count_orphans() == {}
    assert store.query("SELECT count(*) FROM batch WHERE writer_pk = 70") == [(0,)]
    assert {run_id: store.read_everything(run_id) for run_id in before} == before


def test_scratch_that_a_crash_left_goes_and_what_is_in_the_making_stays(
    tmp_path, make_run, invoke, store
):
    make_run(tmp_path, "keep", points=1)
    long_ago = time.time() - 7200
    for age in ("old", "new"):
        scratch = tmp_path / f".quark-new-{age}"
        scratch.mkdir()
        (scratch / "quark.db").write_bytes(b"half")
        (store.folder / f"quark.db.new{age}").write_bytes(b"half")
        if age == "old":
            paths = [scratch / "quark.db", scratch, store.folder / "quark.db.newold"]
            for path in paths:
                os.utime(path, (long_ago, long_ago))
    (tmp_path / ".quarkish").mkdir()
    os.utime(tmp_path / ".quarkish", (long_ago, long_ago))
    leftovers = collect(invoke, tmp_path)["leftovers"]
    assert {Path(path).name for path in leftovers} == {".quark-new-old", "quark.db.newold"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".quark",
        ".quark-new-new",
        ".quarkish",
    ]
    assert (store.folder / "quark.db.newnew").exists()


@pytest.mark.long
def test_files_of_a_removed_run_that_come_late_go_with_the_next(tmp_path, make_run, invoke, store):
    make_run(tmp_path, "keep", points=1, backends="csv")
    make_run(tmp_path, "go", points=1)
    invoke("rm", "go", "-y", "-d", tmp_path)
    collect(invoke, tmp_path)
    late = store.folder / "runs" / "go" / "quarantine" / "csv"
    late.mkdir(parents=True)
    (late / "x.batch").write_bytes(b"x")
    assert [Path(path).name for path in collect(invoke, tmp_path)["leftovers"]] == ["go"]
    assert sorted(path.name for path in (store.folder / "runs").iterdir()) == ["keep"]


def test_a_link_in_the_trash_is_not_followed(tmp_path, make_run, invoke, store):
    make_run(tmp_path, "go", points=1)
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "model.pt").write_bytes(b"weights")
    folder = store.folder / "runs" / "go"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "artifacts").symlink_to(treasure)
    invoke("rm", "go", "-y", "-d", tmp_path)
    collect(invoke, tmp_path)
    assert (treasure / "model.pt").read_bytes() == b"weights"
    assert not (store.folder / "trash").exists()


@pytest.mark.long
def test_readers_that_stay_do_not_stop_it(tmp_path, make_run, invoke, store):
    make_run(tmp_path, "go", points=5_000)
    make_run(tmp_path, "keep", points=10)
    invoke("rm", "go", "-y", "-d", tmp_path)
    reader = connect(StoreLayout(tmp_path), read_only=True)
    reader.execute("BEGIN")
    count = reader.execute("SELECT count(*) FROM run").fetchone()
    result = collect(invoke, tmp_path)
    assert [run["run_id"] for run in result["removed"]] == ["go"]
    assert reader.execute("SELECT count(*) FROM run").fetchone() == count  # its moment stays
    reader.close()
    assert store.is_sound()


@pytest.mark.long
def test_a_database_that_another_process_holds_gives_an_error_not_a_half_removal(
    tmp_path, make_run, store, monkeypatch
):
    make_run(tmp_path, "go")
    monkeypatch.setattr("quark_backends.store.databases.write_ahead_log._BUSY_TIMEOUT_S", 0.05)
    holder = sqlite3.connect(store.folder / "quark.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(SessionStoreError, match="cannot be changed: database is locked"):
        store.trash.trash_runs(["go"])
    holder.execute("ROLLBACK")
    store.trash.trash_runs(["go"])
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(SessionStoreError, match="database is locked"):
        store.trash.collect_trash()
    holder.close()
    assert [usage.run_id for usage in store.trash.list_trash()] == ["go"]
    store.trash.restore_runs(["go"])


@pytest.mark.long
def test_a_compaction_that_is_overtaken_takes_nothing_from_another_run(tmp_path, start, store):
    from quark_backends.store.upkeep.compaction import Compactor, Work

    def make_batches(run_id, count):
        session = start(tmp_path, run_id)
        metrics = quark.MetricsLogger(session)
        for step in range(count):
            metrics.log("loss", 1.0, step=step)
            metrics.flush()
        session.end_run()

    make_batches("go", 20)
    ((writer_pk,),) = store.query("SELECT pk FROM writer")
    before = []

    @contextlib.contextmanager
    def overtake():
        """Between what compaction reads and what it changes, the run is removed."""
        if not before:
            store.trash.trash_runs(["go"])
            store.trash.collect_trash()
            make_batches("other", 40)
            before.append(store.read_everything("other"))
        yield

    connection = connect(StoreLayout(tmp_path))
    Compactor(connection, overtake).compact(Work(writer_pk, "metric", 20))
    connection.close()
    assert store.read_everything("other") == before[0]


def test_a_new_run_cannot_take_the_id_of_one_that_was_removed(tmp_path, start, make_run, store):
    make_run(tmp_path, "go", points=1)
    store.trash.trash_runs(["go"])
    with pytest.raises(quark.InvalidRunStateError, match="quark restore go"):
        start(tmp_path, "go")
    store.trash.collect_trash()
    with pytest.raises(quark.InvalidRunStateError, match="was removed from this store"):
        start(tmp_path, "go")


@pytest.mark.long
def test_what_ended_runs_left_as_batches_is_compacted(tmp_path, start, store):
    session = start(tmp_path, "run")
    metrics = quark.MetricsLogger(session)
    for step in range(40):
        metrics.log("loss", float(step), step=step)
        metrics.flush()
    session.end_run()
    assert store.query("SELECT count(*) FROM batch WHERE kind = 'metric'") == [(40,)]
    before = store.read_everything("run")
    store.trash.collect_trash()
    assert store.query("SELECT count(*) FROM batch WHERE kind = 'metric'") == [(0,)]
    assert store.query("SELECT count FROM chunk WHERE kind = 'metric'") == [(40,)]
    assert [r.step for r in metrics.read()] == list(range(40))
    assert len(before) > 0


@pytest.mark.long
def test_many_small_runs_go_with_few_pauses(tmp_path, start, store, monkeypatch):
    ids = [f"run-{index}" for index in range(30)]
    for run_id in ids:
        start(tmp_path, run_id).end_run()
    store.trash.trash_runs(ids)
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        real_sleep(seconds)

    real_sleep = time.sleep
    monkeypatch.setattr("quark_backends.store.upkeep.garbage_collection.time.sleep", pause)
    removed = store.trash.collect_trash().runs
    monkeypatch.undo()
    assert {usage.run_id for usage in removed} == set(ids)
    assert len(pauses) < len(ids)
    assert store.count_orphans() == {}


@pytest.mark.long
def test_tombstones_are_up_before_the_first_row_goes(tmp_path, make_run, store, monkeypatch):
    ids = [f"run-{index}" for index in range(3)]
    for run_id in ids:
        make_run(tmp_path, run_id, points=5)
    store.trash.trash_runs(ids)
    seen = []

    def look(self, run_pk):
        seen.append({run_id for (run_id,) in store.query("SELECT run_id FROM removed")})
        return delete(self, run_pk)

    delete = TrashCollector._delete_run
    monkeypatch.setattr(TrashCollector, "_delete_run", look)
    store.trash.collect_trash()
    assert seen == [set(ids)] * 3
