"""`migrate_store`: what it returns, what it refuses, and that a refusal alters nothing."""

import json
import sqlite3

import pytest

import quark
from quark_backends.store.databases.sqlite import OLDEST_VERSION, ensure_marker, ensure_store
from quark_core.errors import SchemaMigrationError, SchemaValidationError, SessionStoreError


def read_marker(store):
    return json.loads((store.folder / "store.json").read_text())


def refuse(store, match):
    """Both ways of altering the store are refused, and neither alters it."""
    before = store.read_files()
    with pytest.raises(SchemaMigrationError, match=match) as caught:
        quark.migrate_store(store.root)
    assert type(caught.value) is SchemaMigrationError
    assert store.read_files() == before
    with pytest.raises(SessionStoreError, match=match):
        quark.start_run(project="p", storage_dir=store.root)
    assert store.read_files() == before


def test_it_returns_the_current_version_and_notes_the_moment(old_store):
    version = quark.migrate_store(old_store.root, generated_at="2026-05-07T00:00:00Z")
    assert version == quark.CURRENT_SCHEMA_VERSION == old_store.read_version()
    assert read_marker(old_store) == {
        "format": "quark-tracker embedded store",
        "schema_version": quark.CURRENT_SCHEMA_VERSION,
        "migrated_at": "2026-05-07T00:00:00Z",
    }
    assert old_store.describe() == old_store.expected


def test_a_current_store_is_left_as_it_is(old_store):
    quark.migrate_store(old_store.root, generated_at="2026-05-07T00:00:00Z")
    before = old_store.read_files()
    again = quark.migrate_store(old_store.root, generated_at="2026-06-01T00:00:00Z")
    assert again == quark.CURRENT_SCHEMA_VERSION
    assert old_store.read_files() == before


def test_a_new_store_is_left_as_it_is(tmp_path):
    layout = ensure_store(tmp_path)
    before = layout.db_path.read_bytes(), layout.marker.read_bytes()
    database = sqlite3.connect(layout.db_path)
    assert database.execute("PRAGMA auto_vacuum").fetchone() == (2,)  # INCREMENTAL
    database.close()
    assert quark.migrate_store(str(tmp_path)) == quark.CURRENT_SCHEMA_VERSION
    assert (layout.db_path.read_bytes(), layout.marker.read_bytes()) == before


def test_the_working_directory_is_the_default(old_store, monkeypatch):
    monkeypatch.chdir(old_store.root)
    assert quark.migrate_store() == quark.CURRENT_SCHEMA_VERSION
    assert read_marker(old_store)["migrated_at"].endswith("Z")


def test_a_marker_that_a_crash_left_behind_is_made_up_for(old_store):
    old_marker = (old_store.folder / "store.json").read_bytes()
    quark.migrate_store(old_store.root)
    (old_store.folder / "store.json").write_bytes(old_marker)
    quark.migrate_store(old_store.root, generated_at="2026-05-07T00:00:00+02:00")
    assert read_marker(old_store)["schema_version"] == quark.CURRENT_SCHEMA_VERSION
    assert read_marker(old_store)["migrated_at"] == "2026-05-07T00:00:00+02:00"


def test_a_store_without_a_database_has_only_a_marker_to_renew(tmp_path):
    layout = ensure_marker(tmp_path)
    marker = json.loads(layout.marker.read_text())
    layout.marker.write_text(json.dumps({**marker, "schema_version": 5}))
    assert quark.migrate_store(tmp_path) == quark.CURRENT_SCHEMA_VERSION
    assert json.loads(layout.marker.read_text())["schema_version"] == quark.CURRENT_SCHEMA_VERSION
    assert not layout.db_path.exists()


def test_a_migrated_store_can_give_space_back(old_store):
    quark.migrate_store(old_store.root)
    database = sqlite3.connect(old_store.db_path)
    assert database.execute("PRAGMA auto_vacuum").fetchone() == (2,)  # INCREMENTAL
    assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    database.close()


@pytest.mark.parametrize("moment", ["", "yesterday", "07.05.2026", 20260507, 1.5, b"2026-05-07"])
def test_a_moment_that_is_none_is_refused(old_store, moment):
    before = old_store.read_files()
    with pytest.raises(SchemaValidationError, match=r"^generated_at must be"):
        quark.migrate_store(old_store.root, generated_at=moment)
    assert old_store.read_files() == before


def test_a_storage_dir_without_a_store_is_refused_and_stays_empty(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(SchemaMigrationError, match="no Quark store in"):
            quark.migrate_store(folder)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(SchemaMigrationError, match="is a file"):
        quark.migrate_store(tmp_path / "file")
    with pytest.raises(SchemaValidationError, match="storage_dir must be a path"):
        quark.migrate_store(7)


@pytest.mark.parametrize("name", ["quark.db", "store.json", "runs.csv"])
def test_a_folder_that_is_not_ours_is_refused(tmp_path, name):
    (tmp_path / ".quark").mkdir()
    (tmp_path / ".quark" / name).write_text('{"format": "something else"}')
    with pytest.raises(SchemaMigrationError, match="not created by this Quark"):
        quark.migrate_store(tmp_path)
    assert [path.name for path in (tmp_path / ".quark").iterdir()] == [name]


def test_a_database_that_is_not_ours_is_refused(old_store):
    old_store.edit(("PRAGMA application_id=7",))
    refuse(old_store, "not created by this Quark")


@pytest.mark.parametrize("version", [0, OLDEST_VERSION - 1])
def test_a_store_of_no_known_version_is_refused(old_store, version):
    old_store.edit((f"PRAGMA user_version={version}",))
    refuse(old_store, "not created by this Quark")


def test_a_newer_store_is_refused_with_both_versions(old_store):
    old_store.edit(("PRAGMA user_version=41",))
    refuse(old_store, rf"version 41.*supports up to {quark.CURRENT_SCHEMA_VERSION}. Upgrade")


def test_a_newer_store_without_a_database_is_refused_with_both_versions(tmp_path):
    layout = ensure_marker(tmp_path)
    marker = json.loads(layout.marker.read_text())
    layout.marker.write_text(json.dumps({**marker, "schema_version": 41}))
    with pytest.raises(
        SchemaMigrationError,
        match=rf"version 41.*supports up to {quark.CURRENT_SCHEMA_VERSION}. Upgrade",
    ):
        quark.migrate_store(tmp_path)
    with pytest.raises(SessionStoreError, match="version 41"):
        quark.start_run(project="p", storage_dir=tmp_path)
    assert sorted(path.name for path in layout.root.iterdir()) == [".gitignore", "store.json"]


@pytest.mark.parametrize("damage", ["zeroed", "cut", "torn page", "text"])
def test_a_damaged_store_is_refused(old_store, damage):
    data = bytearray(old_store.db_path.read_bytes())
    if damage == "zeroed":
        data[:] = bytes(len(data))
    elif damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "torn page":
        for page in range(4, len(data) // 4096, 2):
            data[page * 4096 : page * 4096 + 512] = b"\xff" * 512
    else:
        data[:] = b"no database at all " * 400
    old_store.db_path.write_bytes(data)
    refuse(old_store, "damaged|malformed|not a database|not created by")
    with pytest.raises(SessionStoreError):
        quark.open_run("baseline", old_store.root)


def test_one_unreadable_batch_costs_no_other_run(old_store):
    old_store.edit(
        (
            "UPDATE batch SET body = x'00ff' WHERE kind = 'metric' AND writer_pk IN"
            " (SELECT writer.pk FROM writer JOIN run ON run.pk = run_pk WHERE run.id = 'tuned')",
        )
    )
    assert quark.migrate_store(old_store.root) == quark.CURRENT_SCHEMA_VERSION
    resumed = quark.MetricsLogger(quark.open_run("resumed", old_store.root))
    assert len(resumed.read(metric_key="train/loss", all_attempts=True)) == 60


def test_a_network_file_system_is_no_place_to_migrate(old_store, monkeypatch):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    before = old_store.read_files()
    with pytest.raises(SchemaMigrationError, match="network file system"):
        quark.migrate_store(old_store.root)
    assert old_store.read_files() == before
