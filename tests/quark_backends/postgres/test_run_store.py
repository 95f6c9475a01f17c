"""What a `RunStore` promises is the same over SQLite and over PostgreSQL."""

import contextlib
import math
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from postgres_stores import empty_tables
from shared_runs import StoredRun, open_over_postgres, open_over_sqlite
from stores import START_US, Writer
from tiers import count_examples

from quark_core.backends.contract import Generation
from quark_core.errors import (
    BackendRejected,
    BackendUnavailable,
    RunNotFoundError,
    SchemaValidationError,
)
from quark_core.records import EventRecord, LifecycleRecord, parse_time
from quark_core.records.query import Query
from quark_core.runs.run_search import build_search

ALL = Query(all_attempts=True)


@pytest.fixture(params=["sqlite", "postgres"])
def run_store(request, tmp_path):
    if request.param == "sqlite":
        opened = open_over_sqlite(tmp_path)
    else:
        opened = open_over_postgres(request.getfixturevalue("postgres_database"))
    with opened as store:
        yield store


@pytest.fixture
def run(run_store):
    return StoredRun(run_store)


def read_values(run, key="loss", query=ALL):
    found = run.reader.read(run.run_id, "metric", query)
    return found.take(found["metric_key"] == key)["value"].tolist()


def test_batches_of_a_group_are_stored_once_however_often_they_come(run, run_store):
    writer = run.start()
    batches = [writer.batch([writer.metric("loss", float(n), n)]) for n in range(40)]
    run_store.write_group(batches[:10])
    run_store.write_group(batches[5:30])
    run_store.write_group(batches[:40])
    run_store.write_group([*batches, *batches])
    run_store.write_group([])
    assert read_values(run) == [float(n) for n in range(40)]
    (summary,) = run_store.search(build_search())
    assert (summary.metrics["loss"].count, summary.newest_step) == (40, 39)


def test_one_batch_twice_in_a_group_is_stored_once(run, run_store):
    writer = run.start()
    first = writer.batch([writer.metric("loss", 1.0, 1)])
    second = writer.batch([writer.metric("loss", 2.0, 2)])
    run_store.write_group([first, first, second, first, second])
    assert read_values(run) == [1.0, 2.0]


def test_other_content_under_a_number_is_refused_and_nothing_of_its_group_stored(run, run_store):
    writer = run.start()
    first = writer.batch([writer.metric("loss", 1.0, 1)])
    second = writer.batch([writer.metric("loss", 2.0, 2)])
    other = msgspec.structs.replace(second, number=first.number)
    run_store.write_group([first])
    with pytest.raises(BackendRejected, match="came again with other content"):
        run_store.write_group([second, other])
    with pytest.raises(BackendRejected, match="came again with other content"):
        run_store.write_group([second, msgspec.structs.replace(first, number=second.number)])
    assert read_values(run) == [1.0]
    run_store.write_group([second])
    assert read_values(run) == [1.0, 2.0]


def test_a_batch_of_a_run_that_never_started_is_refused(run, run_store):
    stray = StoredRun(run_store, "stray")
    writer = Writer(stray, 0)
    with pytest.raises(BackendRejected, match="never started"):
        writer.log(("loss", 1.0, 0))
    with pytest.raises(RunNotFoundError):
        run_store.load_run("stray")


def test_a_malformed_batch_is_named_and_its_group_not_stored(run, run_store):
    writer = run.start()
    good = writer.batch([writer.metric("loss", 1.0, 1)])
    torn = writer.batch([writer.metric("loss", 2.0, 2)])
    for bad in (
        msgspec.structs.replace(torn, body=torn.body[:-3]),
        msgspec.structs.replace(torn, kind="new\ud800", body=torn.body),
        msgspec.structs.replace(torn, count=2**70),
        msgspec.structs.replace(torn, number=2**70),
    ):
        with pytest.raises(BackendRejected):
            run_store.write_group([good, bad])
    assert read_values(run) == []
    run_store.write_group([good, torn])
    assert read_values(run) == [1.0, 2.0]


def test_odd_texts_are_kept_as_they_are(run_store):
    odd = "a\x00b\x01c\x01\x01\x02 größe 😀 \x7f%s %% ? ' \" \\"
    run = StoredRun(run_store, f"run {odd}")
    writer = run.start(name=odd, notes=odd, tags=[odd, "\x00", "\x01"])
    writer.lifecycle("config", {"values": {odd: odd, "n": {"\x00": "\x01\x02"}}, "notes": []})
    writer.lifecycle("tag", {"tag": "?"})
    writer.log((f"m/{odd}", 1.0, 0), ("m/\x00", 2.0, 0), ("m/\x01\x01", 3.0, 0))
    stored = run_store.load_run(run.run_id)
    assert (stored.run.name, stored.run.notes) == (odd, odd)
    assert set(stored.run.tags) == {odd, "\x00", "\x01", "?"}
    assert stored.config.values[odd] == odd
    summary = run_store.summarize(run.run_id)
    assert {key: found.last for key, found in summary.metrics.items()} == {
        f"m/{odd}": 1.0,
        "m/\x00": 2.0,
        "m/\x01\x01": 3.0,
    }
    assert run_store.read_series(run.run_id, f"m/{odd}", max_points=None).last.tolist() == [1.0]
    assert run_store.read_series(run.run_id, "m/\x01\x01", max_points=5).last.tolist() == [3.0]
    assert [found.run_id for found in run_store.search(build_search(where="'?' in tags"))] == [
        run.run_id
    ]


def test_numbers_of_names_that_are_no_longer_right_are_found_again(postgres_database):
    """As after a backup was put back under a server that runs."""
    postgres_database.known_names["loss"] = 12_345
    with open_over_postgres(postgres_database) as store:
        run = StoredRun(store)
        run.start().log(("loss", 1.0, 0))
        assert read_values(run) == [1.0]
        assert store.summarize(run.run_id).metrics["loss"].count == 1
    assert postgres_database.known_names["loss"] != 12_345


def test_lone_surrogates_are_replaced(run, run_store):
    writer = run.start()
    writer.log(("loss\ud800", 1.0, 0))
    assert run_store.read(run.run_id, "metric", ALL)["metric_key"].tolist() == ["loss?"]


def test_values_that_are_not_finite_are_found_by_no_comparison(run, run_store):
    writer = run.start()
    values = {"a": math.nan, "d": 2**62, "e": True, "f": None}
    with pytest.raises(BackendRejected, match="beyond 64 bits"):
        writer.lifecycle("config", {"values": {**values, "d": 10**400}, "notes": []})
    writer = run.start()
    writer.lifecycle("config", {"values": values, "notes": []})
    writer.log(("a", math.nan, 0), ("b", math.inf, 1), ("c", 5e-324, 2), ("d", 1.7e308, 2**62))

    def find(where):
        return bool(run_store.search(build_search(where=where)))

    assert not find("config.a > 0 or config.a <= 0 or config.a == 0")
    assert find("config.e == true and config.f == null")
    assert not find("a > 0 or a <= 0")
    assert not find("b > 0")
    assert find("c > 0 and d > 1e308")


def test_runs_are_listed_by_the_store_that_they_were_started_for(run_store):
    for number, name in enumerate(["lab", "lab", "office", None]):
        run = StoredRun(run_store, f"run{number}")
        writer = Writer(run, 0)
        data = start_data(run)
        if name is not None:
            data["store"] = {"name": name, "path": f"/shared/{name}"}
        writer.lifecycle("start", data)
        writer.log((f"loss{number}", 1.0, 0))

    def find(runs):
        return sorted(run.run.id if hasattr(run, "run") else run.run_id for run in runs)

    assert find(run_store.list_runs()) == ["run0", "run1", "run2", "run3"]
    assert find(run_store.list_runs(store_name="lab")) == ["run0", "run1"]
    assert find(run_store.list_runs(store_name="lab", project="project", limit=1)) != []
    assert run_store.list_runs(store_name="nowhere") == []
    assert run_store.list_runs(limit=0) == []
    whole, walked, after = run_store.list_runs(), [], None
    while page := run_store.list_runs(limit=1, after=after):
        walked += page
        after = (parse_time(page[-1].run.created_at), page[-1].run.id)
    assert [stored.run.id for stored in walked] == [stored.run.id for stored in whole]
    # The last run of a page may be gone when the next one is asked for.
    moment = parse_time(whole[0].run.created_at)
    assert whole[0].run.id not in {r.run.id for r in run_store.list_runs(after=(moment, "gone"))}
    assert find(run_store.search(build_search(), "office")) == ["run2"]
    assert find(run_store.search(build_search(where="loss0 > 0"), "lab")) == ["run0"]
    # A name that only runs of another store have is a mistake here.
    with pytest.raises(SchemaValidationError, match="loss2"):
        run_store.search(build_search(where="loss2 > 0"), "lab")


def start_data(run):
    """What the first record of a run says."""
    said = []
    probe = StoredRun(run.run_store, run.run_id, write=said.extend)
    probe.start()
    (record,) = said[0].to_records()
    return msgspec.to_builtins(record.data)


def test_generations_are_numbered_and_read_back(run, run_store):
    writer = run.start()
    writer.log(("loss", 1.0, 0))

    def event(analyzer, number, sequence):
        origin = (run.run_id, f"{analyzer}.{number}", 0, 0, sequence, START_US)
        return EventRecord(*origin, "found", "info")

    def write(analyzer, *records, replaces=True):
        return run_store.write_generation(
            Generation(
                run_id=run.run_id,
                analyzer=analyzer,
                outputs={"event": list(records)},
                replaces=replaces,
            )
        )

    assert write("rules", event("rules", 1, 0)) == 1
    assert write("rules", event("rules", 2, 0), event("rules", 2, 1)) == 2
    assert write("monitor", event("monitor", 1, 0), replaces=False) == 1
    assert write("monitor", event("monitor", 2, 1), replaces=False) == 2
    assert run_store.read_outputs(run.run_id, "event").count == 4
    found = run_store.read_outputs(run.run_id, "event", "rules")
    assert found["writer_id"].tolist() == ["rules.2", "rules.2"]
    with pytest.raises(RunNotFoundError):
        run_store.write_generation(
            Generation(run_id="none", analyzer="rules", outputs={}, replaces=True)
        )


def test_generations_made_at_once_get_numbers_of_their_own(run, run_store):
    run.start()

    def write(_):
        return run_store.write_generation(
            Generation(run_id=run.run_id, analyzer="rules", outputs={}, replaces=True)
        )

    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(write, range(24))) == list(range(1, 25))


@pytest.mark.long
def test_many_read_while_others_write(run, run_store):
    writers = [Writer(run, 0, rank=rank) for rank in range(3)]
    batches = {
        writer.id: [
            [writer.batch([writer.metric("loss", float(n), n)]) for n in range(start, start + 5)]
            for start in range(0, 200, 5)
        ]
        for writer in writers
    }
    run.start()

    def write(writer):
        for group in batches[writer.id]:
            run_store.write_group(group)

    def read(_):
        found = run_store.read(run.run_id, "metric", ALL)
        parts = list(run_store.iterate(run.run_id, "metric", ALL, rows=50))
        for rows in (found, *parts):
            for writer in writers:
                steps = rows.take(rows["writer_id"] == writer.id)["step"].tolist()
                # Without a gap: what is there is all that was there at one moment.
                assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True
        return found.count

    with ThreadPoolExecutor(7) as threads:
        writing = [threads.submit(write, writer) for writer in writers]
        counts = list(threads.map(read, range(30)))
        for done in writing:
            done.result()
    assert max(counts) <= 600
    assert read(None) == 600
    (summary,) = run_store.search(build_search())
    assert summary.metrics["loss"].count == 600


@pytest.mark.long
def test_compaction_in_the_background_loses_and_doubles_nothing(run, run_store):
    writer = run.start()
    for start in range(0, 600, 20):
        run_store.write_group(
            [
                writer.batch([writer.metric("loss", float(n), n), writer.metric("b", 0.5, n)])
                for n in range(start, start + 20)
            ]
        )
    run_store._compaction.close(20)
    assert read_values(run) == [float(n) for n in range(600)]
    found = run_store.read_batches(run.run_id, writer.id, 0, 1_000)
    assert [batch.number for batch in found] == list(range(601))
    assert run_store.summarize(run.run_id).metrics["b"].count == 600
    with run_store._readers.take() as reader, contextlib.closing(reader._connect()) as connection:
        assert connection.execute("SELECT count(*) FROM chunk").fetchone()[0] > 0


def test_a_store_that_is_closed_takes_nothing(tmp_path):
    with open_over_sqlite(tmp_path) as store:
        run = StoredRun(store)
        writer = run.start()
    with pytest.raises(BackendUnavailable, match="closed"):
        writer.log(("loss", 1.0, 0))


VALUES = st.floats(-5, 5) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0])
POINTS = st.tuples(st.sampled_from(["a", "b/c", "d\x00"]), VALUES, st.none() | st.integers(0, 9))
GROUPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "write", "resume", "tag", "again"]),
        st.integers(0, 2),
        st.lists(st.lists(POINTS, min_size=1, max_size=80), min_size=1, max_size=3),
        st.none() | st.integers(0, 9),
    ),
    max_size=6,
)
TABLES = {
    "metric": "SELECT text, count, non_finite, first, last, low, high, last_step, last_us,"
    " first_place, first_started_us, first_sequence, last_place, last_started_us, last_sequence"
    " FROM run_metric JOIN name ON name.pk = name_pk ORDER BY text",
    "batch": "SELECT id, kind, number, count, digest, body FROM batch"
    " JOIN writer ON writer.pk = writer_pk ORDER BY id, number",
    "writer": "SELECT id, attempt, rank, started_us, head, hidden_step FROM writer ORDER BY id",
    "hidden": "SELECT id, kind, sequence FROM hidden JOIN writer ON pk = writer_pk"
    " ORDER BY id, kind",
    "attempt": "SELECT number, from_step, started_us FROM attempt ORDER BY number",
    "run": "SELECT id, status, attempt, tags, config, newest_step FROM run",
    "tag": "SELECT tag FROM run_tag ORDER BY tag",
    "config": "SELECT key, type, number, text FROM run_config ORDER BY key",
}


@pytest.mark.long
@pytest.mark.hypothesis  # drawn inside
def test_the_tables_of_both_hold_the_same(tmp_path_factory, postgres_database):
    @settings(
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        max_examples=count_examples(60),
        deadline=None,
    )
    @given(GROUPS)
    def check(groups):
        with (
            open_over_sqlite(tmp_path_factory.mktemp("store")) as first,
            open_over_postgres(postgres_database) as second,
        ):
            with contextlib.closing(postgres_database.connect()) as connection:
                empty_tables(connection)
            postgres_database.known_names.clear()
            sent = []

            def write(batches):
                sent.append(batches)
                for store in (first, second):
                    store.write_group(batches)

            run = StoredRun(first, write=write)
            writers = [run.start()]
            for action, number, parts, step in groups:
                if action == "resume":
                    writers.append(run.start(from_step=step))
                elif action == "tag":
                    writers[-1].lifecycle("tag", {"tag": f"t{number}\x00"})
                    writers[-1].lifecycle("config", {"values": {"n": number}, "notes": []})
                elif action == "again":
                    write(sent[number % len(sent)])
                else:
                    writers.append(Writer(run, writers[number % len(writers)].attempt, number))
                    writer = writers[number % len(writers)]
                    write(
                        [
                            writer.batch(
                                [
                                    writer.metric(key, value, at, 3 if at is None else None)
                                    for key, value, at in points
                                ]
                            )
                            for points in parts
                        ]
                    )
            for name, query in TABLES.items():
                found = []
                for store in (first, second):
                    with store._readers.take() as reader:
                        connection = reader._connect()
                        with contextlib.closing(connection):
                            found.append(connection.execute(query).fetchall())
                assert found[0] == found[1], name
            assert found[0] is not None
            for query in (ALL, Query()):
                records = [
                    list(map(repr, store.read("run0", "metric", query).to_records()))
                    for store in (first, second)
                ]
                assert records[0] == records[1]

    check()


def test_a_lifecycle_of_wrong_types_is_refused(run, run_store):
    bad = start_data(run)
    for change in ({"run": {**bad["run"], "name": {"a": 1}}}, {"process": None, "run": None}):
        writer = Writer(StoredRun(run_store, "bad"), 0)
        with pytest.raises(BackendRejected):
            writer.write([LifecycleRecord(*writer.head("lifecycle"), "start", {**bad, **change})])
    with pytest.raises(RunNotFoundError):
        run_store.load_run("bad")
