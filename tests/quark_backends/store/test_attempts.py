"""A resumed run hides what it does again, and only that."""

import pytest
from stores import Writer

import quark
from quark_backends.csv.files import CsvReader
from quark_core.records import EventRecord
from quark_core.records.query import Query

EVERY = Query(all_attempts=True)


def steps(store, query=None, kind="metric"):
    rows = store.reader.read(store.run_id, kind, query or Query()).to_records()
    return [(record.attempt, record.step) for record in rows]


def figures(store, key="loss"):
    return store.connection.execute(
        "SELECT count, first, last, low, high, last_step FROM run_metric JOIN name"
        " ON name.pk = name_pk WHERE text = ?",
        (key,),
    ).fetchone()


@pytest.mark.parametrize("compacted", [False, True])
def test_points_from_the_step_on_are_hidden_and_can_be_asked_for(store, compacted):
    first = store.start()
    first.log(*[("loss", 10.0 - step, step) for step in range(10)])
    first.write([first.layer("head", step) for step in range(10)])
    first.write([EventRecord(*first.head("event"), "saved", "info", 8)])
    if compacted:
        store.compact()
    second = store.start(from_step=6)
    second.log(*[("loss", 100.0 + step, step) for step in range(6, 9)])
    if compacted:
        store.compact()
    visible = [(1, s) for s in range(6)] + [(2, s) for s in range(6, 9)]
    assert steps(store) == visible
    assert steps(store, EVERY) == [(1, s) for s in range(10)] + [(2, s) for s in range(6, 9)]
    assert steps(store, Query(step_min=5)) == visible[5:]
    assert steps(store, Query(limit=2)) == visible[-2:]
    assert steps(store, kind="layer") == [(1, s) for s in range(6)]
    assert len(steps(store, kind="event")) == 1
    parts = store.reader.iterate(store.run_id, "metric", Query(), rows=4)
    assert [(r.attempt, r.step) for part in parts for r in part.to_records()] == visible
    series = store.reader.read_series(store.run_id, "loss", max_points=2)
    assert (series.points, series.low.min(), series.high.max()) == (9, 5.0, 108.0)
    every = store.reader.read_series(store.run_id, "loss", max_points=2, all_attempts=True)
    assert every.points == 13
    assert figures(store) == (9, 10.0, 108.0, 5.0, 108.0, 8)
    (newest,) = store.connection.execute("SELECT newest_step FROM run").fetchone()
    assert newest == 8


def test_points_without_a_step_are_hidden_where_they_came_after_it(store):
    first = store.start()
    first.write([first.metric("val", 1.0, None, 0)])
    first.log(("loss", 1.0, 4), ("loss", 1.0, 5))
    first.write([first.metric("val", 2.0, None, 1)])
    store.start(from_step=5)
    found = store.reader.read(store.run_id, "metric", Query(equals={"metric_key": "val"}))
    assert found["value"].tolist() == [1.0]
    assert figures(store, "val")[:3] == (1, 1.0, 1.0)


def test_a_later_attempt_may_go_further_back_and_an_earlier_one_stays_hidden(store):
    for from_step, count in ((None, 10), (7, 4), (3, 2)):
        writer = store.start(from_step=from_step)
        begin = from_step or 0
        writer.log(*[("loss", float(step), step) for step in range(begin, begin + count)])
    assert steps(store) == [(1, 0), (1, 1), (1, 2), (3, 3), (3, 4)]
    writer = store.start(from_step=4)
    writer.log(("loss", 4.0, 4))
    assert steps(store) == [(1, 0), (1, 1), (1, 2), (3, 3), (4, 4)]
    assert figures(store)[0] == 5


@pytest.mark.parametrize("compacted", [False, True])
def test_what_an_earlier_attempt_delivers_late_is_hidden_too(store, compacted):
    first = store.start()
    first.log(("loss", 1.0, 0))
    other = Writer(store, first.attempt, rank=1)
    store.start(from_step=2)
    first.log(("loss", 2.0, 1), ("loss", 3.0, 2))
    first.write([first.metric("loss", 5.0, None, 9)])
    other.log(("loss", 6.0, 1), ("loss", 7.0, 3))
    if compacted:
        store.compact()
    assert steps(store) == [(1, 0), (1, 1), (1, 1)]
    assert figures(store)[:3] == (3, 1.0, 6.0)


def test_without_a_step_what_is_repeated_is_replaced(store):
    first = store.start()
    first.log(("loss", 1.0, 4), ("loss", 1.0, 5), ("loss", 1.0, 6))
    store.start().log(("loss", 2.0, 5))
    assert steps(store) == [(1, 4), (1, 6), (2, 5)]
    assert steps(store, EVERY) == [(1, 4), (1, 5), (1, 6), (2, 5)]
    assert figures(store) == (3, 1.0, 2.0, 1.0, 2.0, 5)


@pytest.mark.sampled
@pytest.mark.parametrize("backends", [None, "csv"])
def test_resume_from_a_step_through_sessions(tmp_path, backends):
    with quark.start_run(project="p", storage_dir=tmp_path, backends=backends) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(10):
            metrics.log("loss", float(step), step=step)
        session.end_run("interrupted")
    with quark.resume_run(
        run_id=session.run_id, storage_dir=tmp_path, backends=backends, from_step=4
    ) as resumed:
        metrics = quark.MetricsLogger(resumed)
        metrics.log("loss", 40.0, step=4)
        assert [r.value for r in metrics.read()] == [0.0, 1.0, 2.0, 3.0, 40.0]
        assert metrics.columns(all_attempts=True).count == 11
    (event,) = quark.EventLogger(resumed).read(event_type="run_resumed")
    assert event.payload == {"from_step": 4}
    if backends:
        mirror = CsvReader(tmp_path / ".quark" / "runs")
        found = mirror.read(session.run_id, "metric", Query())
        assert found["value"].tolist() == [0.0, 1.0, 2.0, 3.0, 40.0]
        assert mirror.read(session.run_id, "metric", EVERY).count == 11


@pytest.mark.parametrize("bad", [-1, True, "3", 2.5])
def test_a_bad_step_is_refused_by_name(tmp_path, bad):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        pass
    with pytest.raises(quark.SchemaValidationError, match="from_step"):
        quark.resume_run(run_id=session.run_id, storage_dir=tmp_path, reopen=True, from_step=bad)
