"""Indexes of journal segments: as quick as a store to read, and never a wrong answer."""

import math
import os
import shutil

import pytest
from kit.programs import wait_until

import quark
from quark_backends.embedded import journal_player, segment_index, segment_index_builder
from quark_backends.embedded.journal_player import IndexedSegments
from quark_backends.embedded.segment_index import find_index, load_index, name_index
from quark_core.delivery.journal import Journal, JournalReader
from quark_core.delivery.segments import encode_frame
from quark_core.records import RECORD_TYPES
from quark_core.records.query import Query
from quark_core.runs.backend_choice import open_reader

KEYS = ("train/loss", "train/acc", "odd")
STEPS = 400


@pytest.fixture(autouse=True)
def network(monkeypatch):
    """On a network file system, with short segments, each of which is worth an index."""
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    monkeypatch.setenv("QUARK_HELPER_PROCESSES", "0")
    monkeypatch.setattr(segment_index, "LEAST_BYTES", 1)
    monkeypatch.setattr(segment_index_builder, "_FEW_BATCHES", 2)
    monkeypatch.setattr(segment_index_builder, "_FEW_BYTES", 500)
    monkeypatch.setitem(Journal.__init__.__kwdefaults__, "segment_bytes", 5_000)


def log(session, first, end):
    metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)
    for step in range(first, end):
        metrics.log("train/loss", 1.0 / (step + 1), step=step)
        metrics.log("train/acc", step / end, step=step, epoch=step // 100)
        metrics.log("odd", math.nan if step % 50 == 0 else math.sin(step), step=step)
        if step % 20 == 0:
            events.log("seen", payload={"step": step, "text": "x" * 200}, step=step)
            session.flush("journaled")


@pytest.fixture
def run_id(tmp_path):
    """A run of two attempts, the later one from a step of the earlier."""
    with quark.start_run(
        project="p", storage_dir=tmp_path, tags=["t"], config={"lr": 0.1}
    ) as session:
        log(session, 0, STEPS)
        session.add_tag("late")
        session.end_run("interrupted")
    with quark.resume_run(
        run_id=session.run_id, storage_dir=tmp_path, from_step=STEPS // 2
    ) as session:
        log(session, STEPS // 2, STEPS)
    for path in tmp_path.rglob("*.qx"):
        path.unlink()  # made by whoever resumed it
    return session.run_id


def find_segments(storage_dir):
    found = sorted(storage_dir.glob(".quark/runs/*/journal/*/*.qj"))
    assert len(found) > 4
    return found


def describe(storage_dir, run_id):
    """Everything that can be asked of a run."""
    reader = open_reader(storage_dir)
    try:
        stored = reader.load_run(run_id)
        answers = {
            "run": (stored.run, stored.project, stored.state, stored.config),
            "runs": [run.run.id for run in reader.list_runs()],
            "summary": reader.summarize(run_id).to_dict()["metrics"],
        }
        writers = set()
        for kind in sorted(RECORD_TYPES):
            for hides in (False, True):
                found = reader.read(run_id, kind, Query(all_attempts=hides))
                answers[kind, hides] = repr(found.to_records())
                writers |= set(found["writer_id"].tolist())
        for key in KEYS:
            for bound in (None, 7):
                curve = reader.read_series(run_id, key, max_points=bound)
                answers[key, bound] = repr([curve.step, curve.low, curve.high, curve.last])
        window = Query(equals={"metric_key": "odd"}, step_min=30, step_max=60, limit=20)
        answers["window"] = repr(reader.read(run_id, "metric", window).to_records())
        for writer_id in sorted(writers):
            batches = reader.read_batches(run_id, writer_id, 0, 10_000)
            answers[writer_id] = repr([(b.number, b.kind, b.to_records()) for b in batches])
        return answers
    finally:
        reader.close()


def describe_without(storage_dir, run_id, monkeypatch):
    """The same out of the batches themselves."""
    with monkeypatch.context() as patched:
        patched.setattr(segment_index, "LEAST_BYTES", 1 << 60)
        return describe(storage_dir, run_id)


def make_indexes(storage_dir):
    segment_index_builder.index_root(storage_dir, lambda: None)
    return [name_index(segment) for segment in find_segments(storage_dir)]


@pytest.mark.long
def test_with_indexes_the_answers_are_the_same_and_no_segment_is_read(
    tmp_path, run_id, monkeypatch
):
    expected = describe_without(tmp_path, run_id, monkeypatch)
    assert all(path.exists() for path in make_indexes(tmp_path))

    def refuse(self, name):
        raise AssertionError(f"{name} is read")

    monkeypatch.setattr(JournalReader, "_parse", refuse)
    monkeypatch.setattr(journal_player, "parse_segment", refuse)
    # What a later attempt hides is found in the chunks, in the order of the attempts.
    assert describe(tmp_path, run_id) == expected


@pytest.mark.long
def test_the_first_reader_makes_the_indexes_that_are_lacking(tmp_path, run_id, monkeypatch):
    expected = describe_without(tmp_path, run_id, monkeypatch)
    assert not list(tmp_path.rglob("*.qx"))
    assert describe(tmp_path, run_id) == expected
    assert all(find_index(segment) is not None for segment in find_segments(tmp_path))


@pytest.mark.long
def test_where_no_index_can_be_kept_the_answers_are_the_same(tmp_path, run_id, monkeypatch):
    expected = describe_without(tmp_path, run_id, monkeypatch)
    monkeypatch.setattr(segment_index_builder, "write_index", lambda *_: False)
    assert describe(tmp_path, run_id) == expected
    assert not list(tmp_path.rglob("*.qx"))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["flipped", "cut", "zeros", "of another segment", "newer"])
def test_a_damaged_index_makes_no_wrong_answer(tmp_path, run_id, monkeypatch, kind):
    expected = describe_without(tmp_path, run_id, monkeypatch)
    path, other, *_ = make_indexes(tmp_path)
    whole = path.read_bytes()
    assert load_index(path).parts_start < len(whole)
    places = range(3, len(whole), len(whole) // 8)
    for place in places if kind in ("flipped", "cut") else [0]:
        data = bytearray(whole)
        if kind == "flipped":
            data[place] ^= 4
        elif kind == "cut":
            del data[place:]
        elif kind == "zeros":
            data = bytes(len(whole))
        elif kind == "of another segment":
            data = other.read_bytes()
        else:
            data[4] = 200
        path.write_bytes(data)
        assert describe(tmp_path, run_id) == expected, place


@pytest.mark.long
def test_an_index_that_goes_while_it_is_read_costs_nothing(tmp_path, run_id, monkeypatch):
    expected = describe_without(tmp_path, run_id, monkeypatch)
    paths = make_indexes(tmp_path)
    reader = open_reader(tmp_path)
    reader.summarize(run_id)
    for path in paths:
        path.unlink()
    found = reader.read(run_id, "metric", Query())
    reader.close()
    assert repr(found.to_records()) == expected["metric", False]


@pytest.mark.long
def test_damage_to_a_segment_that_has_an_index_is_told(tmp_path, run_id):
    make_indexes(tmp_path)
    segment = find_segments(tmp_path)[1]
    before = describe(tmp_path, run_id)
    batches = [b for b in JournalReader(segment.parent).read() if b.kind == "metric"]
    data = bytearray(segment.read_bytes())
    hit = next(batch for batch in batches if encode_frame(batch) in data)
    data[data.index(encode_frame(hit)) + 40] ^= 1
    segment.write_bytes(data)
    after = describe(tmp_path, run_id)
    assert after["metric", True] != before["metric", True]
    assert after["event", True].count("records_dropped") == 1
    assert f"'batches': [{hit.number}, {hit.number}]" in after["event", True]


@pytest.mark.long
def test_an_index_is_believed_after_its_folder_was_copied(tmp_path, run_id, monkeypatch):
    make_indexes(tmp_path)
    expected = describe(tmp_path, run_id)
    there = tmp_path / "copy"
    shutil.copytree(tmp_path / ".quark", there / ".quark", copy_function=shutil.copyfile)
    for segment in find_segments(there):
        os.utime(segment, ns=(1, 1))

    def refuse(*_, **__):
        raise AssertionError("an index is made")

    monkeypatch.setattr(segment_index_builder, "build_index", refuse)
    found = describe(there, run_id)
    assert found["metric", True] == expected["metric", True]
    assert found["summary"] == expected["summary"]


@pytest.mark.long
def test_a_live_run_is_read_as_it_grows(tmp_path, monkeypatch):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        reader = open_reader(tmp_path)
        for end in range(50, 301, 50):
            log(session, end - 50, end)
            session.flush()
            steps = reader.read(session.run_id, "metric", Query(equals={"metric_key": "odd"}))
            assert steps["step"].tolist() == list(range(end))
            fresh = open_reader(tmp_path)
            assert fresh.summarize(session.run_id).metrics["odd"].count == end
            assert fresh.read(session.run_id, "metric", Query()).count == 3 * end
            fresh.close()
        reader.close()
    expected = describe_without(tmp_path, session.run_id, monkeypatch)
    assert describe(tmp_path, session.run_id) == expected


@pytest.mark.long
def test_what_was_read_is_not_read_again(tmp_path, run_id, monkeypatch):
    reader = open_reader(tmp_path)
    monkeypatch.setattr(segment_index, "LEAST_BYTES", 1 << 60)
    count = reader.read(run_id, "metric", Query()).count

    def refuse(self, name):
        raise AssertionError(f"{name} is read")

    monkeypatch.setattr(JournalReader, "_parse", refuse)
    assert reader.read(run_id, "metric", Query()).count == count
    assert reader.summarize(run_id).metrics["odd"].count == STEPS
    reader.close()


@pytest.mark.long
def test_figures_of_what_a_later_attempt_hides_are_not_taken_from_an_index(tmp_path, run_id):
    make_indexes(tmp_path)
    found = [find_index(segment) for segment in find_segments(tmp_path)]
    first, *late = [index for index in found if index.head.attempt == 0]
    tables = IndexedSegments()
    assert tables.play(first)
    assert all(tables.play(index) for index in found if index.head.attempt == 1)
    assert not any(map(tables.play, late))


@pytest.mark.long
def test_metrics_of_few_points_have_no_index_and_are_read(tmp_path, monkeypatch):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for number in range(2000):
            metrics.log(f"name{number}", float(number), step=0)
    assert len(describe(tmp_path, session.run_id)["summary"]) == 2000
    found = [load_index(path).head for path in tmp_path.rglob("*.qx")]
    assert not any(head.figures for head in found)


@pytest.mark.long
def test_a_process_of_its_own_makes_them_at_the_end_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_HELPER_PROCESSES", "1")
    least_bytes = 256 * 1024  # as in the other process
    monkeypatch.setattr(segment_index, "LEAST_BYTES", least_bytes)
    monkeypatch.setitem(Journal.__init__.__kwdefaults__, "segment_bytes", 300_000)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(100_000):
            metrics.log("m", math.sin(step), step=step)
    segments = list(session.run_path.glob("journal/*/*.qj"))
    # How much one tick brings, and so how large a segment is, depends on the machine.
    large = [segment for segment in segments if segment.stat().st_size >= least_bytes]
    assert large
    assert wait_until(lambda: all(map(find_index, large)), 90)
