"""A store that is deleted while a run has it open is made anew, with all there is of the run."""

import os
import shutil
import signal
import sqlite3

import pytest
from kit.programs import is_sound, log_steps, run_script, wait_for_adoption, wait_until

import quark
from quark.analysis.outputs import open_analysis
from quark_backends.embedded import store_rebuild
from quark_core.delivery.delivery_state import LaneMark, Lease
from quark_core.delivery.journal_folder import find_folders
from quark_core.records import PhaseRecord
from quark_core.runs import recovery

POINTS = 2_000


def delete_store(storage_dir):
    """Delete `.quark`, in which lanes may make files meanwhile."""
    root = storage_dir / ".quark"
    assert wait_until(lambda: shutil.rmtree(root, ignore_errors=True) or not root.exists())


def delete_database(storage_dir):
    for path in (storage_dir / ".quark").glob("quark.db*"):
        path.unlink()


def delete_only(name):
    def delete(storage_dir):
        (storage_dir / ".quark" / name).unlink()

    return delete


def replace_database(storage_dir):
    """Another store takes the place of this one, as when a backup is put back."""
    other = storage_dir / "other"
    with quark.start_run(project="other", storage_dir=other) as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
    delete_database(storage_dir)
    for path in (other / ".quark").glob("quark.db*"):
        shutil.move(path, storage_dir / ".quark" / path.name)


DELETIONS = {
    ".quark": delete_store,
    "database": delete_database,
    "database, its log stays": delete_only("quark.db"),
    "log": delete_only("quark.db-wal"),
    "index of the log": delete_only("quark.db-shm"),
    "replaced": replace_database,
}


@pytest.fixture
def unreadable(monkeypatch):
    """A deleted store of which nothing can be read any more."""

    def fail(*_):
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(store_rebuild, "copy_run", fail)


def read(run_id, storage_dir):
    session = quark.open_run(run_id, storage_dir)
    steps = [r.step for r in quark.MetricsLogger(session).read(metric_key="m")]
    return session, steps


@pytest.mark.sampled
@pytest.mark.parametrize("deletion", DELETIONS)
def test_a_store_that_is_deleted_under_a_run_is_made_anew(tmp_path, caplog, deletion):
    with quark.start_run(
        project="p", storage_dir=tmp_path, name="kept", tags=["a"], config={"lr": 0.1}
    ) as session:
        metrics = quark.MetricsLogger(session)
        log_steps(metrics, POINTS)
        session.add_tag("late")
        session.flush()
        DELETIONS[deletion](tmp_path)
        log_steps(metrics, POINTS, 2 * POINTS)
        session.flush()
        # What is called stored is there for anybody who looks.
        assert read(session.run_id, tmp_path)[1] == list(range(2 * POINTS))
        assert len(metrics.read()) == 2 * POINTS
    assert session.report_delivery().complete
    found, steps = read(session.run_id, tmp_path)
    assert steps == list(range(2 * POINTS))
    assert (found.status, found.context.run.name) == ("completed", "kept")
    assert found.context.run.tags == ("a", "late")
    assert found.open_run.reader.load_run(session.run_id).config.values == {"lr": 0.1}
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [str(tmp_path / ".quark") in record.getMessage() for record in errors] == [True]
    assert is_sound(tmp_path)
    with quark.start_run(project="p", storage_dir=tmp_path) as again:
        quark.MetricsLogger(again).log("m", 1.0, step=0)
    assert read(again.run_id, tmp_path)[1] == [0]


@pytest.mark.long
def test_each_deletion_is_told(tmp_path, caplog):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(30):
            metrics.log("m", float(step), step=step)
            if step % 10 == 9:
                session.flush()
                delete_store(tmp_path)
    assert read(session.run_id, tmp_path)[1] == list(range(30))
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 3


@pytest.mark.long
def test_what_was_compacted_and_found_out_comes_along(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(POINTS):
            metrics.log("m", float(step), step=step)
            if step % 10 == 9:
                session.flush("journaled")
        session.flush()
        for name in ("first", "second"):
            outputs = {"phase": [PhaseRecord(None, "", 0, 0, 0, 0, name, name, "", 0, 9)]}
            open_analysis(session).write("phases", False, outputs)
        delete_store(tmp_path)
        session.add_log("go on")
        session.flush()
    found, steps = read(session.run_id, tmp_path)
    assert steps == list(range(POINTS))
    outputs = open_analysis(found).read_outputs("phase", "phases")
    assert list(outputs["phase_name"]) == ["first", "second"]
    assert list(outputs["writer_id"]) == ["phases.1", "phases.2"]


@pytest.mark.long
def test_where_the_deleted_store_cannot_be_read_the_journal_fills_the_new_one(
    tmp_path, unreadable, monkeypatch, caplog
):
    monkeypatch.setenv("QUARK_JOURNAL_DIR", str(tmp_path / "journals"))
    with quark.start_run(project="p", storage_dir=tmp_path, name="kept") as session:
        metrics = quark.MetricsLogger(session)
        log_steps(metrics, POINTS)
        session.flush()
        delete_store(tmp_path)
        metrics.log("m", float(POINTS), step=POINTS)
        session.flush()
    found, steps = read(session.run_id, tmp_path)
    assert steps == list(range(POINTS + 1))
    assert found.context.run.name == "kept"
    assert "disk I/O error" in caplog.text


@pytest.mark.long
def test_what_is_in_no_place_any_more_is_told_by_numbers(tmp_path, unreadable, caplog):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        log_steps(metrics, POINTS)
        session.flush("durable")
        session.flush()
        delete_store(tmp_path)
        log_steps(metrics, POINTS, POINTS + 100)
        session.flush("durable")
        session.flush()
    found, steps = read(session.run_id, tmp_path)
    assert found.status == "completed"
    assert steps == list(range(steps[0], POINTS + 100))
    (gap,) = quark.EventLogger(found).read(event_type="records_dropped")
    first, last = gap.payload["batches"]
    assert first == 0
    assert f"no copy exists any more: batches 0 to {last} of writer" in caplog.text


def test_a_journal_that_is_only_just_made_anew_is_waited_for(
    tmp_path, unreadable, monkeypatch, caplog
):
    looks = []

    def find_late(*arguments):
        looks.append(arguments)
        return iter(()) if len(looks) == 1 else find_folders(*arguments)

    monkeypatch.setattr(store_rebuild, "find_folders", find_late)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        log_steps(metrics, POINTS)
        session.flush()
        delete_store(tmp_path)
        metrics.log("m", float(POINTS), step=POINTS)
        session.flush()
    assert len(looks) > 1
    found, steps = read(session.run_id, tmp_path)
    assert found.status == "completed"
    assert steps[-1] == POINTS
    assert "refused" not in caplog.text


KILLED = """
import shutil
session = quark.start_run(project="p", storage_dir=storage_dir)
metrics = quark.MetricsLogger(session)
metrics.log("m", 0.0, step=0)
session.flush()
lane = session.open_run.stream._lanes[0]
def write(*_):
    raise quark.SessionStoreError("planted outage")
lane._write_one = lane._write_group = write
while os.path.exists(storage_dir + "/.quark"):
    shutil.rmtree(storage_dir + "/.quark", ignore_errors=True)
log_steps(metrics, 1, 100)
session.flush("durable")
print(session.run_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_a_start_where_a_killed_process_went_on_in_a_deleted_store(tmp_path):
    output, _ = run_script(tmp_path, KILLED, ends=-signal.SIGKILL)
    assert os.listdir(tmp_path / ".quark") == ["runs"]
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
    assert read(session.run_id, tmp_path)[1] == [0]
    wait_for_adoption()
    recovery.sync(tmp_path)
    found, steps = read(output.strip(), tmp_path)
    assert steps == list(range(1, 100))
    assert found.project_name == "p"


def test_a_folder_of_somebody_else_is_still_left_alone(tmp_path):
    for name in ("runs/notes.txt", "other/notes.txt"):
        path = tmp_path / name.partition("/")[0] / ".quark" / name
        path.parent.mkdir(parents=True)
        path.write_text("mine")
        with pytest.raises(quark.SessionStoreError, match="not created by this Quark"):
            quark.start_run(project="p", storage_dir=path.parents[2])
        assert path.read_text() == "mine"


@pytest.mark.long
def test_the_log_of_a_deleted_database_is_not_played_into_a_new_one(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
        session.flush()
        log = (tmp_path / ".quark" / "quark.db-wal").read_bytes()
    delete_database(tmp_path)
    (tmp_path / ".quark" / "quark.db-wal").write_bytes(log)
    with quark.start_run(project="p", storage_dir=tmp_path) as again:
        quark.MetricsLogger(again).log("m", 2.0, step=0)
    assert is_sound(tmp_path)
    with pytest.raises(quark.RunNotFoundError):
        quark.open_run(session.run_id, tmp_path)
    assert read(again.run_id, tmp_path)[1] == [0]


@pytest.mark.long
def test_a_journal_only_run_whose_store_is_deleted_says_what_is_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("m", 0.0, step=0)
        session.flush("durable")
        delete_store(tmp_path)
        log_steps(metrics, 1, 100)
        session.flush("durable")
    found, steps = read(session.run_id, tmp_path)
    assert (found.status, steps[-1]) == ("completed", 99)
    (gap,) = quark.EventLogger(found).read(event_type="records_dropped")
    assert gap.payload["batches"][0] == 0
    quark.start_run(project="p", storage_dir=tmp_path).end_run()


def test_a_lane_keeps_its_lease_and_its_mark_when_their_folder_is_deleted(tmp_path):
    lease, mark = Lease(tmp_path / "lanes" / "x.lease"), LaneMark(tmp_path / "lanes" / "x.mark")
    assert lease.take()
    mark.finish(1)
    shutil.rmtree(tmp_path / "lanes")
    lease.beat()
    mark.finish(2)
    assert not Lease(tmp_path / "lanes" / "x.lease").take()
    assert LaneMark(tmp_path / "lanes" / "x.mark").done == 2
    lease.release()
    mark.close()
    assert os.listdir(tmp_path / "lanes") == ["x.mark"]
