"""A store of an older version is opened, by a reader and by a writer, and read in full."""

import logging
import sqlite3

import pytest

import quark
from quark_core.runs.backend_choice import open_reader


def test_reading_finds_all_that_was_stored(old_store):
    store = old_store
    assert store.describe() == store.expected
    # And again, now that it is migrated.
    assert store.describe() == store.expected
    assert len(open_reader(store.root).list_runs()) == len(store.expected)
    resumed = quark.MetricsLogger(quark.open_run("resumed", store.root))
    losses = resumed.columns(metric_key="train/loss")
    assert losses["step"].tolist() == list(range(50))
    assert losses["attempt"].tolist() == [0] * 20 + [1] * 20 + [2] * 10
    # A metric without steps is held against its epochs.
    assert resumed.columns(namespace="val")["epoch"].tolist() == list(range(5))


def test_starting_a_run_migrates(old_store):
    store = old_store
    with quark.start_run(project="vision", storage_dir=store.root, tags=["new"]) as session:
        quark.MetricsLogger(session).log("train/loss", 0.25, step=1)
    database = sqlite3.connect(store.db_path)
    assert database.execute("PRAGMA user_version").fetchone() == (quark.CURRENT_SCHEMA_VERSION,)
    assert database.execute("PRAGMA quick_check").fetchone() == ("ok",)
    database.close()
    assert store.describe() == store.expected
    again = quark.open_run(session.run_id, store.root)
    assert [record.value for record in quark.MetricsLogger(again).read()] == [0.25]


def test_what_was_killed_under_an_older_version_is_resumed(old_store):
    store = old_store
    before = [float(row[0]) for row in store.expected["killed"]["metrics"]["train/loss"]]
    with quark.resume_run(run_id="killed", storage_dir=store.root) as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("train/loss", 7.0, step=15)
        assert [r.value for r in metrics.read(metric_key="train/loss")] == [*before, 7.0]
    assert session.context.run.attempt == 1
    with quark.start_run(project="vision", storage_dir=store.root, parent_run_id="tuned") as child:
        pass
    assert child.context.run.lineage_root_run_id == "baseline"


@pytest.mark.long
def test_one_line_says_that_a_store_is_migrated(old_store, caplog):
    caplog.set_level(logging.INFO)
    with quark.start_run(project="p", storage_dir=old_store.root):
        pass
    with quark.start_run(project="p", storage_dir=old_store.root):
        pass
    said = [r.getMessage() for r in caplog.records if "migrat" in r.getMessage()]
    assert len(said) == 1
    assert f"{old_store.folder} from schema version 5 to " in said[0]
