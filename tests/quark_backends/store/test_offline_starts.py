"""Attempts that were begun while the store was out of reach: none is lost, none is taken twice."""

import pytest
from stores import Writer
from test_attempts import figures, steps

from quark_core.errors import BackendRejected
from quark_core.records import EventRecord
from quark_core.records.query import Query

EVERY = Query(all_attempts=True)


def begin(store, attempt, *, offline=True, replaces=None, from_step=None):
    """Begin an attempt; returns its writer."""
    outage = {"reason": "nobody answers", "replaces": replaces} if offline else None
    return store.begin(attempt, offline=outage, from_step=from_step)


def run_of(store):
    return store.connection.execute("SELECT attempt, status FROM run").fetchone()


def settled(store):
    query = Query(equals={"event_type": "attempt_settled"})
    return store.reader.read(store.run_id, EventRecord.KIND, query).to_records()


def log(writer, *steps):
    writer.log(*[("loss", float(step), step) for step in steps])


def test_an_attempt_that_is_free_is_begun_like_any(store):
    log(begin(store, 1), 1, 2)
    assert steps(store) == [(1, 1), (1, 2)]
    assert run_of(store) == (1, "running")
    assert settled(store) == ()


def test_of_two_that_began_one_attempt_the_second_gets_the_next(store):
    log(begin(store, 1), 1, 2)
    second = begin(store, 1)
    log(second, 1, 2)
    second.lifecycle("config", {"values": {"lr": 2}, "notes": []})
    # Attempt 2 repeats the steps of attempt 1, which are kept.
    assert steps(store) == [(2, 1), (2, 2)]
    assert steps(store, EVERY) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    second.lifecycle("status", {"status": "failed"})
    assert run_of(store) == (2, "failed")
    (event,) = settled(store)
    assert (event.attempt, event.severity) == (2, "warning")
    assert event.payload["writer_id"] == second.id
    assert (event.payload["asked_attempt"], event.payload["attempt"]) == (1, 2)
    assert figures(store)[0] == 2


def test_what_the_first_says_of_itself_changes_the_run_no_more(store):
    first = begin(store, 1)
    second = begin(store, 1)
    first.lifecycle("status", {"status": "completed"})
    assert run_of(store) == (2, "running")
    second.lifecycle("status", {"status": "interrupted"})
    assert run_of(store) == (2, "interrupted")


def test_a_start_that_comes_again_is_one_attempt(store):
    begin(store, 1)
    second = begin(store, 1)
    for batch in (second.batches[0], second.batches[0]):
        store.ingest.write([batch])
    assert run_of(store) == (2, "running")
    assert len(settled(store)) == 1


def test_both_are_shown_where_they_did_the_same_steps_again(store):
    log(store.writer, *range(10))
    log(begin(store, 1, from_step=6), 6, 7)
    log(begin(store, 1, from_step=4), 4, 5)
    late = Writer(store, 0)
    log(late, 3, 4, 5)
    again = [(0, step) for step in (0, 1, 2, 3, 3)]
    assert sorted(steps(store)) == [*again, (1, 6), (1, 7), (2, 4), (2, 5)]
    assert len(steps(store, EVERY)) == 17
    assert figures(store)[0] == 9
    log(begin(store, 3, from_step=5), 5)
    assert sorted(steps(store)) == [*again, (2, 4), (3, 5)]


def test_a_start_may_come_after_those_that_followed_it(store):
    second = begin(store, 2, from_step=5)
    log(second, 5, 6)
    second.lifecycle("status", {"status": "completed"})
    first = begin(store, 1, from_step=3)
    log(first, 3, 4, 5)
    first.lifecycle("status", {"status": "failed"})
    assert steps(store) == [(1, 3), (1, 4), (2, 5), (2, 6)]
    assert run_of(store) == (2, "completed")
    assert settled(store) == ()


def test_the_beginning_of_a_run_may_come_last(tmp_path):
    from stores import Store

    store = Store(tmp_path, begins=False)
    log(begin(store, 1), 5)
    log(begin(store, 0), 1, 2)
    assert steps(store) == [(0, 1), (0, 2), (1, 5)]
    assert run_of(store) == (1, "running")
    assert settled(store) == ()
    store.close()


def test_a_process_does_not_take_its_own_start_for_another_ones(store):
    unheard = begin(store, 1, offline=False)
    again = begin(store, 1, replaces=unheard.id)
    log(again, 1)
    again.lifecycle("status", {"status": "completed"})
    assert steps(store) == [(1, 1)]
    assert run_of(store) == (1, "completed")
    assert settled(store) == ()


def test_a_start_that_the_store_was_there_for_is_refused_as_ever(store):
    begin(store, 1)
    with pytest.raises(BackendRejected, match="started by another process"):
        begin(store, 1, offline=False)


def test_points_that_came_before_the_start_move_with_it(store):
    log(begin(store, 1), 1)
    early = Writer(store, 1)
    log(early, 7)
    store.begin(1, offline={"reason": "", "replaces": None}, writer=early)
    log(early, 8)
    assert steps(store) == [(1, 1), (2, 7), (2, 8)]
