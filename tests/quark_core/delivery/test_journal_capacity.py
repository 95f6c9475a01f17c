"""A journal that grows too large lets go what the primary has, and mirrors lose nothing by it."""

import pytest

import quark
from quark_core.backends.contract import BackendConfig
from quark_core.delivery.batch_log import BatchLog
from quark_core.delivery.journal import Journal, JournalReader
from quark_core.delivery.segments import Origin
from quark_core.runs import recovery
from quark_core.testing.fakes import BatchMaker


def fill(tmp_path, replay, count=60, **arguments):
    journal = Journal(tmp_path, Origin("run0", "writer0"), segment_bytes=600)
    log = BatchLog(
        journal=journal,
        window_bytes=500,
        journal_capacity_bytes=2000,
        replay=replay,
        **arguments,
    )
    primary, mirror = log.open_cursor(primary=True), log.open_cursor()
    maker = BatchMaker("run0")
    batches = [maker.metrics(("m", step, 0.0)) for step in range(count)]
    for batch in batches:
        log.append(batch)
        primary.advance([batch])
        log.release_journal()
    return log, mirror, batches, journal


def read_all(cursor):
    found = []
    while batches := cursor.peek(7):
        found += batches
        cursor.advance(batches)
    return found


def test_a_mirror_that_is_behind_is_served_from_the_primary(tmp_path):
    asked = []

    def replay(start, limit):
        asked.append(start)
        return batches[start : start + limit]

    _, mirror, batches, journal = fill(tmp_path, replay)
    assert journal.size_bytes < 4000
    assert next(JournalReader(tmp_path).read()).number > 0
    assert read_all(mirror) == batches
    assert asked[0] == 0
    assert mirror.count_records() == (60, 0, 0)


def test_what_nobody_has_is_counted_as_dropped(tmp_path, caplog):
    _, mirror, batches, _ = fill(tmp_path, lambda start, limit: [])
    found = read_all(mirror)
    assert found == batches[-len(found) :]
    assert 0 < len(found) < 60
    assert mirror.count_records() == (60, 0, 60 - len(found))
    assert "are gone" in caplog.text


def test_without_pressure_nothing_is_let_go(tmp_path):
    journal = Journal(tmp_path, Origin("run0", "writer0"), segment_bytes=600)
    log = BatchLog(journal=journal, journal_capacity_bytes=10**6)
    primary, mirror = log.open_cursor(primary=True), log.open_cursor()
    maker = BatchMaker("run0")
    for step in range(60):
        batch = maker.metrics(("m", step, 0.0))
        log.append(batch)
        primary.advance([batch])
        log.release_journal()
    assert [b.number for b in JournalReader(tmp_path).read()] == list(range(60))
    assert len(read_all(mirror)) == 60


@pytest.mark.long
def test_sync_takes_from_the_primary_what_the_journal_let_go(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_JOURNAL_MAX_BYTES", "0")
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.3")
    monkeypatch.setattr(Journal.__init__, "__kwdefaults__", {"files": None, "segment_bytes": 400})
    (tmp_path / "out").write_text("in the way of the mirror")
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv:out") as session:
        metrics = quark.MetricsLogger(session)
        for step in range(50):
            metrics.log("m", float(step), step=step)
            metrics.flush()
    (tmp_path / "out").unlink()
    (folder,) = session.run_path.glob("journal/*")
    assert next(JournalReader(folder).read()).number > 0
    results = {result.backend: result for result in recovery.sync(tmp_path)}
    assert results["csv"].state == "delivered", results["csv"].reason
    from quark_backends.csv.backend import CsvBackend
    from quark_core.records.query import Query

    mirror = CsvBackend(BackendConfig(storage_dir=tmp_path, location="out", read_only=True))
    found = mirror.read(session.run_id, "metric", Query())
    assert found["step"].tolist() == list(range(50))
    assert not folder.exists()
