"""Backup and restore of a service, tried by losing everything."""

import hashlib
import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from backups import TRAINING, call, wait_until
from held_ports import hold_port
from service_fixtures import make_databases, serving_process
from sqlalchemy import create_engine

import quark
from quark_backends.service.server import service_backup
from quark_backends.service.server.deployment import ControlDatabase
from quark_backends.store.databases.postgres import set_version
from quark_backends.store.databases.sqlite import OLDEST_VERSION
from quark_backends.store.databases.tables import POSTGRESQL, list_statements
from quark_backends.store.upkeep import backup
from quark_core.errors import SchemaValidationError, SessionStoreError


def use(monkeypatch, server, key):
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
    monkeypatch.setenv("QUARK_USER_KEY", key)


def find_runs(storage_dir):
    found = {}
    for summary in quark.search_runs(storage_dir=storage_dir):
        opened = quark.open_run(summary.run_id, storage_dir)
        artifacts = quark.ArtifactStore(opened)
        found[summary.run_id] = (
            [record.step for record in quark.MetricsLogger(opened).read()],
            {
                record.id: hashlib.sha256(artifacts.load(record.id)).hexdigest()
                for record in artifacts.read()
            },
        )
    return found


@pytest.fixture(params=["sqlite", "postgresql"])
def make_store(request):
    """The URL and the payloads of a service in a folder, and how to lose all that it keeps."""
    if request.param == "sqlite":

        def lose(folder):
            shutil.rmtree(folder)

        yield lambda folder: f"sqlite:///{folder}/service.db", lose
        return
    url = request.getfixturevalue("postgres_service_url")

    def drop(_folder=None):
        control = ControlDatabase(url)
        engine = create_engine(control.url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            schemas = connection.exec_driver_sql(
                "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'quark\\_%%'"
                " AND nspname NOT LIKE 'quark\\_test\\_%%'"
            ).scalars()
            for schema in list(schemas):
                connection.exec_driver_sql(f'DROP SCHEMA "{schema}" CASCADE')
        engine.dispose()
        control.close()

    def lose_all(folder):
        drop()
        shutil.rmtree(folder)

    yield lambda _folder: url, lose_all


@pytest.mark.long
def test_all_that_was_acknowledged_comes_back_after_everything_was_lost(
    tmp_path, monkeypatch, make_store
):
    make_url, lose = make_store
    first, told = tmp_path / "first", tmp_path / "told"
    store, payloads = make_url(first), first / "payloads"
    with serving_process(first, store_url=store) as server:
        key = server.make_key("vision")
        server.make_key("other")
        use(monkeypatch, server, key)
        training = subprocess.Popen(
            [sys.executable, "-c", TRAINING, str(tmp_path / "train"), str(told)]
        )
        try:
            wait_until(told.exists, "nothing was stored")
            before = json.loads(told.read_text())
            output = call(
                "db", "backup", tmp_path / "copy", "--store", store, "--artifacts", payloads
            )
            assert "3 workspaces, 1 run" in output
            wait_until(
                lambda: json.loads(told.read_text())["steps"] > before["steps"],
                "the training does not go on",
            )
            assert training.poll() is None
        finally:
            training.kill()
            training.wait()
    lose(first)
    assert "is complete and undamaged" in call("backup", "--verify", tmp_path / "copy")
    first.mkdir()
    output = call("db", "restore", tmp_path / "copy", "--store", store, "--artifacts", payloads)
    assert "3 workspaces, 1 run" in output
    assert "verified" in output
    # A second one would take something away.
    with pytest.raises(SessionStoreError, match="already exists and would be replaced"):
        call("db", "restore", tmp_path / "copy", "--store", store, "--artifacts", payloads)
    with serving_process(first, store_url=store) as server:
        use(monkeypatch, server, key)  # keys are the same
        again = tmp_path / "another machine" / "train"
        ((steps, hashes),) = find_runs(again).values()
        assert steps == list(range(len(steps)))
        assert len(steps) >= before["steps"]
        assert before["hashes"].items() <= hashes.items()
        with quark.resume_run(run_id=before["run_id"], storage_dir=again) as run:
            quark.MetricsLogger(run).log("loss", 0.0, step=len(steps))
        ((more, _),) = find_runs(again).values()
        assert more == list(range(len(steps) + 1))


def make_service(folder, store, tmp_path, monkeypatch):
    """A service with a run that has an artifact, which does not run any more."""
    with serving_process(folder, store_url=store) as server:
        use(monkeypatch, server, server.make_key("vision"))
        with quark.start_run(project="p", storage_dir=tmp_path / "train") as session:
            quark.MetricsLogger(session).log("loss", 1.0, step=0)
            quark.ArtifactStore(session).store("bytes", "weights", b"payload", step=0)
        assert session.report_delivery().complete
    return session.run_id


@pytest.mark.long
def test_what_is_there_makes_way_only_when_asked_and_is_kept(tmp_path, monkeypatch, make_store):
    make_url, _ = make_store
    folder = tmp_path / "service"
    store = make_url(folder)
    place = ("--store", store, "--artifacts", folder / "payloads")
    first = make_service(folder, store, tmp_path, monkeypatch)
    call("db", "backup", tmp_path / "copy", *place)
    second = make_service(folder, store, tmp_path, monkeypatch)
    with pytest.raises(SessionStoreError, match="would be replaced"):
        call("db", "restore", tmp_path / "copy", *place)
    output = call("db", "restore", tmp_path / "copy", *place, "--replace")
    assert "Renamed " in output
    with serving_process(folder, store_url=store) as server:
        use(monkeypatch, server, server.make_key("vision"))
        assert list(find_runs(tmp_path / "train")) == [first]
    aside = [line.split(" to ")[1].split(". ")[0] for line in output.splitlines()[:-1]]
    if store.startswith("sqlite"):
        (found,) = [path for path in aside if path.endswith("-vision") and "workspaces" in path]
        shutil.copytree(Path(found) / ".quark", tmp_path / "kept" / ".quark")
        monkeypatch.delenv("QUARK_PERSISTENCE_URL")
        assert second in {run.run_id for run in quark.search_runs(storage_dir=tmp_path / "kept")}
    else:
        engine = create_engine(ControlDatabase(store).url)
        schemas = [name for name in aside if name.startswith("quark_replaced_")]
        with engine.connect() as connection:
            held = set()
            for schema in schemas:
                table = f"{schema}.run"
                if connection.exec_driver_sql(f"SELECT to_regclass('{table}')").scalar():
                    held |= set(connection.exec_driver_sql(f"SELECT id FROM {table}").scalars())
        engine.dispose()
        assert {first, second} <= held


@pytest.mark.long
def test_a_run_that_is_removed_while_it_is_copied_spoils_no_backup(
    tmp_path, monkeypatch, make_store
):
    """Its rows were copied, and its payloads have gone meanwhile."""
    make_url, _ = make_store
    folder = tmp_path / "service"
    store = make_url(folder)
    gone = make_service(folder, store, tmp_path, monkeypatch)
    copy_payloads = service_backup._copy_payloads
    with serving_process(folder, store_url=store) as server, server.client("vision") as client:

        def remove_first(*arguments):
            assert client.post("/v1/call/trash_runs", json={"run_ids": [gone]}).is_success
            assert client.post("/v1/trash/collect", json={}).json()["done"]
            copy_payloads(*arguments)

        monkeypatch.setattr(service_backup, "_copy_payloads", remove_first)
        place = ("--store", store, "--artifacts", folder / "payloads")
        call("db", "backup", tmp_path / "copy", *place)
    assert not list((tmp_path / "copy" / "payloads").rglob(f"{gone}/*"))


@pytest.mark.long
def test_a_backup_that_was_altered_is_not_restored(tmp_path, monkeypatch):
    folder = tmp_path / "service"
    store = f"sqlite:///{folder}/service.db"
    make_service(folder, store, tmp_path, monkeypatch)
    call("db", "backup", tmp_path / "copy", "--store", store)
    (payload,) = (tmp_path / "copy" / "payloads").rglob("?" * 64)
    payload.chmod(0o600)
    payload.write_bytes(b"another")
    target = f"sqlite:///{tmp_path}/target/service.db"
    with pytest.raises(SessionStoreError, match="has different content"):
        call("db", "restore", tmp_path / "copy", "--store", target)
    assert not (tmp_path / "target").exists()


@pytest.mark.long
def test_payloads_that_lie_elsewhere_are_not_lost_for_a_forgotten_option(tmp_path, monkeypatch):
    folder = tmp_path / "service"
    store = f"sqlite:///{folder}/s.db"
    make_service(folder, store, tmp_path, monkeypatch)
    (folder / "payloads").rename(tmp_path / "elsewhere")
    with pytest.raises(SessionStoreError, match=r"not in the store; .*--artifacts selects another"):
        call("db", "backup", tmp_path / "copy", "--store", store)
    assert not (tmp_path / "copy").exists()
    # The server's own variable counts as well.
    monkeypatch.setenv("QUARK_SERVE_ARTIFACTS", str(tmp_path / "elsewhere"))
    call("db", "backup", tmp_path / "copy", "--store", store)
    assert len(list((tmp_path / "copy" / "payloads").rglob("?" * 64))) == 1
    monkeypatch.setenv("QUARK_SERVE_ARTIFACTS", str(tmp_path / "gone"))
    told = call("db", "backup", tmp_path / "second", "--store", store, "--keep-going")
    assert "missing in the store and the backup: payload" in told


@pytest.mark.long
def test_a_folder_that_is_there_is_left_alone(tmp_path, monkeypatch):
    folder = tmp_path / "service"
    store = f"sqlite:///{folder}/service.db"
    make_service(folder, store, tmp_path, monkeypatch)
    (tmp_path / "there").mkdir()
    with pytest.raises(SessionStoreError, match="already exists"):
        call("db", "backup", "--store", store, "--into", tmp_path / "there")
    assert not list((tmp_path / "there").iterdir())
    with pytest.raises(SessionStoreError, match="is in the store itself"):
        call("db", "backup", "--store", store, folder / "payloads" / "copy")


@pytest.mark.long
def test_a_restore_that_finds_no_room_leaves_nothing_and_takes_nothing_away(tmp_path, monkeypatch):
    folder = tmp_path / "service"
    store = f"sqlite:///{folder}/service.db"
    make_service(folder, store, tmp_path, monkeypatch)
    call("db", "backup", tmp_path / "copy", "--store", store)
    before = {path for path in folder.rglob("*") if path.is_file()}

    def fail(_self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(service_backup.BackupFolder, "check", fail)
    with pytest.raises(OSError, match="No space left"):
        call("db", "restore", tmp_path / "copy", "--store", store, "--replace")
    assert {path for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.long
@pytest.mark.parametrize("make_store", ["postgresql"], indirect=True)
def test_a_postgresql_restore_that_fails_leaves_what_was_there(tmp_path, monkeypatch, make_store):
    make_url, _ = make_store
    folder = tmp_path / "service"
    store = make_url(folder)
    place = ("--store", store, "--artifacts", folder / "payloads")
    run_id = make_service(folder, store, tmp_path, monkeypatch)
    call("db", "backup", tmp_path / "copy", *place)
    index = tmp_path / "copy" / "postgresql" / "tables.json"
    schemas = json.loads(index.read_text())
    schemas[-1]["tables"][-1]["rows"] += 1
    index.write_text(json.dumps(schemas))
    monkeypatch.setattr(service_backup, "verify_backup", backup._read_manifest)
    with pytest.raises(SessionStoreError, match="copied rows were restored"):
        call("db", "restore", tmp_path / "copy", *place, "--replace")
    engine = create_engine(ControlDatabase(store).url)
    with engine.connect() as connection:
        left = set(
            connection.exec_driver_sql(
                "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'quark\\_%%'"
                " AND nspname NOT LIKE 'quark\\_test\\_%%'"
            ).scalars()
        )
    engine.dispose()
    assert left == {"quark_control", "quark_ws_default", "quark_ws_vision"}
    with serving_process(folder, store_url=store) as server:
        use(monkeypatch, server, server.make_key("vision"))
        assert list(find_runs(tmp_path / "train")) == [run_id]


@pytest.mark.long
@pytest.mark.parametrize("make_store", ["postgresql"], indirect=True)
def test_a_service_of_an_older_version_is_backed_up_before_it_is_upgraded(tmp_path, make_store):
    make_url, lose = make_store
    folder = tmp_path / "service"
    store = make_url(folder)
    place = ("--store", store, "--artifacts", folder / "payloads")
    control = ControlDatabase(store)
    control.upgrade()
    control.add_workspace("old")
    engine = create_engine(control.url)
    with engine.begin() as core:
        core.exec_driver_sql("CREATE SCHEMA quark_ws_old")
        core.exec_driver_sql("SET LOCAL search_path TO quark_ws_old")
        for statement in list_statements(POSTGRESQL, OLDEST_VERSION):
            core.exec_driver_sql(statement)
        for statement in set_version(OLDEST_VERSION):
            core.exec_driver_sql(statement)
        core.exec_driver_sql("INSERT INTO name (pk, text) VALUES (7, 'loss')")
    engine.dispose()
    control.close()
    folder.mkdir()
    call("db", "backup", tmp_path / "copy", *place)
    lose(folder)
    call("db", "restore", tmp_path / "copy", *place)
    assert f"workspace old: version {OLDEST_VERSION}," in call("db", "version", "--store", store)
    call("db", "upgrade", "--store", store)
    engine = create_engine(ControlDatabase(store).url)
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT pk, text FROM quark_ws_old.name").all()
    engine.dispose()
    assert rows == [(7, "loss")]


@pytest.mark.long
def test_a_backup_of_one_kind_is_none_of_another(tmp_path, monkeypatch):
    folder = tmp_path / "service"
    store = f"sqlite:///{folder}/service.db"
    make_service(folder, store, tmp_path, monkeypatch)
    monkeypatch.delenv("QUARK_PERSISTENCE_URL")
    root = folder / "workspaces" / "vision"
    with pytest.raises(SessionStoreError, match="not in the store"):
        call("backup", "-d", root, tmp_path / "store")  # payloads lie elsewhere
    call("backup", "-d", root, tmp_path / "store", "--keep-going")
    with pytest.raises(
        SessionStoreError, match="is a backup of a store, which a service on SQLite"
    ):
        call("db", "restore", tmp_path / "store", "--store", f"sqlite:///{tmp_path}/x/s.db")


@pytest.mark.long
def test_what_waits_for_a_service_is_backed_up_where_it_waits(request, tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.5")
    folder, train = tmp_path / "service", tmp_path / "train"
    place, port = hold_port()
    request.addfinalizer(place.close)
    with serving_process(folder, port=port) as server:
        use(monkeypatch, server, server.make_key("vision"))
        session = quark.start_run(project="p", storage_dir=train)
        session.flush("stored")
    metrics = quark.MetricsLogger(session)
    for step in range(100):
        metrics.log("loss", float(step), step=step)
    payload = quark.ArtifactStore(session).store("bytes", "weights", b"payload", step=0)
    session.end_run()
    assert "1 journal" in call("backup", "-d", train, tmp_path / "copy")
    shutil.rmtree(train)
    train.mkdir()
    shutil.copytree(tmp_path / "copy" / ".quark", train / ".quark", symlinks=True)
    with serving_process(folder, port=port):
        call("sync", train)
        ((steps, hashes),) = find_runs(train).values()
    assert steps == list(range(100))
    assert hashes == {payload.id: hashlib.sha256(b"payload").hexdigest()}


def test_keys_and_versions_of_postgresql_need_no_folder_of_payloads(make_store, tmp_path):
    make_url, _ = make_store
    store = make_url(tmp_path)
    make_databases(store)
    call("keys", "create", "--store", store)
    assert "control: version" in call("db", "version", "--store", store)
    if store.startswith("postgresql"):
        with pytest.raises(SchemaValidationError, match="artifacts is required"):
            call("db", "backup", tmp_path / "copy", "--store", store)


@pytest.mark.long
def test_a_server_that_was_stopped_leaves_whole_files(tmp_path, monkeypatch):
    folder = tmp_path / "service"
    with serving_process(folder, "--workers", "2") as server:
        use(monkeypatch, server, server.make_key("vision"))
        with quark.start_run(project="p", storage_dir=tmp_path / "train") as session:
            metrics = quark.MetricsLogger(session)
            metrics.log("loss", 1.0, step=0)
            assert len(metrics.read()) == 1
            assert quark.search_runs(storage_dir=tmp_path / "train")
        # Somebody who looks at the files keeps nobody from it.
        database = folder / "workspaces" / "vision" / ".quark" / "quark.db"
        looker = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
        assert looker.execute("SELECT count(*) FROM run").fetchone() == (1,)
    for path in folder.rglob("*-wal"):
        assert path.stat().st_size == 0, path
    looker.close()
    for path in (database, folder / "service.db"):
        shutil.copy(path, tmp_path / path.name)
    for name, table in (("quark.db", "run"), ("service.db", "api_key")):
        with sqlite3.connect(tmp_path / name) as connection:
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (1,)
        connection.close()


@pytest.mark.long
def test_who_may_read_what_stays_as_it_was(tmp_path, monkeypatch):
    folder = tmp_path / "service"
    store = f"sqlite:///{folder}/service.db"
    make_service(folder, store, tmp_path, monkeypatch)
    paths = {"service.db": 0o600, "workspaces/vision/.quark/quark.db": 0o640}
    paths |= {"workspaces/vision": 0o750, "payloads/vision": 0o700}
    for path, mode in paths.items():
        (folder / path).chmod(mode)
    call("db", "backup", tmp_path / "copy", "--store", store)
    assert (tmp_path / "copy").stat().st_mode & 0o077 == 0
    call("db", "restore", tmp_path / "copy", "--store", f"sqlite:///{tmp_path}/new/service.db")
    found = {path: (tmp_path / "new" / path).stat().st_mode & 0o777 for path in paths}
    assert found == paths
