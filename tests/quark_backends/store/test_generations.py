"""Outputs of analyzers are kept as generations."""

import sqlite3

import pytest
from stores import START_US

import quark
from quark_backends.store.reading.reader import write_generation
from quark_core.backends.contract import Generation
from quark_core.errors import BackendUnavailable, SchemaValidationError
from quark_core.ranks.launches import detect_rank
from quark_core.records import EventRecord, MetricRecord
from quark_core.runs.backend_choice import plan_backends


def event(name, run_id="run0"):
    return EventRecord(run_id, "rules", 0, 0, 0, START_US, name, "info")


def names(found):
    return found["event_type"].tolist()


def generation(analyzer, *found, replaces=True, run_id="run0"):
    return Generation(
        run_id=run_id, analyzer=analyzer, replaces=replaces, outputs={"event": list(found)}
    )


def test_readers_take_everything_from_the_newest_replacing_one_on(store):
    def write(*arguments, **options):
        return write_generation(store.connection, generation(*arguments, **options))

    def read(analyzer=None):
        return names(store.reader.read_outputs("run0", "event", analyzer))

    assert read() == []
    assert write("rules", event("a"), event("b"), replaces=False) == 1
    assert write("rules", event("c"), replaces=False) == 2
    assert write("phases", event("p")) == 1
    assert read("rules") == ["a", "b", "c"]
    assert read() == ["p", "a", "b", "c"]
    assert write("rules", event("d")) == 3
    assert write("rules", event("e"), replaces=False) == 4
    assert read("rules") == ["d", "e"]
    found = store.reader.read_outputs("run0", "event", "rules")
    assert found["writer_id"].tolist() == ["rules.3", "rules.4"]
    # One that found nothing replaces what was there as well.
    assert write("rules") == 5
    assert read() == ["p"]
    # Nothing is deleted on the way.
    assert store.count("output") == 5


def test_outputs_of_another_run_or_kind_are_refused(store):
    with pytest.raises(SchemaValidationError, match="run run1"):
        write_generation(store.connection, generation("rules", event("a", "run1")))
    metric = MetricRecord("run0", "w", 0, 0, 0, START_US, "m", None, "m", 1.0, 0)
    with pytest.raises(SchemaValidationError, match="not metric records of run run0"):
        write_generation(store.connection, generation("rules", metric))
    with pytest.raises(quark.RunNotFoundError):
        write_generation(store.connection, generation("rules", run_id="run1"))
    assert store.count("generation") == 0


def test_a_generation_is_there_whole_or_not_at_all(store, monkeypatch):
    store.connection.execute(
        "CREATE TRIGGER full BEFORE INSERT ON output WHEN (SELECT count(*) FROM output) >= 1"
        " BEGIN SELECT RAISE(ABORT, 'disk full'); END"
    )
    both = Generation(
        run_id="run0",
        analyzer="rules",
        replaces=True,
        outputs={
            "event": [event("a")],
            "metric": [MetricRecord("run0", "w", 0, 0, 0, START_US, "m", None, "m", 1.0, 0)],
        },
    )
    with pytest.raises(BackendUnavailable, match="disk full"):
        write_generation(store.connection, both)
    assert names(store.reader.read_outputs("run0", "event")) == []
    assert store.connection.execute("SELECT count(*) FROM generation").fetchone() == (0,)
    with pytest.raises(sqlite3.Error):
        store.connection.execute("INSERT INTO output VALUES (1, 1, 'event', 1, x'00', 1)")


@pytest.mark.parametrize("journal_only", ["0", "1"])
def test_ended_runs_take_generations_on_every_kind_of_disk(tmp_path, monkeypatch, journal_only):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", journal_only)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        run_id = session.run_id
    choice = plan_backends(None, detect_rank()).primary
    backend = choice.definition.open(choice.configure(tmp_path))
    written = [
        backend.write_generation(generation("rules", event(name, run_id), run_id=run_id))
        for name in ("a", "b")
    ]
    assert written == [1, 2]
    assert names(backend.read_outputs(run_id, "event")) == ["b"]
    backend.close()
    again = choice.definition.open(choice.configure(tmp_path))
    assert names(again.read_outputs(run_id, "event")) == ["b"]
    assert again.write_generation(generation("rules", run_id=run_id)) == 3
    assert names(again.read_outputs(run_id, "event")) == []
    again.close()
