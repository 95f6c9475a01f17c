"""`quark rm`, `restore`, `gc` and `du` with a service set in the environment."""

import contextlib
import hashlib
import json
import logging
import os
import random
import signal
import threading

import pytest
from click.testing import CliRunner
from service_fixtures import ServerProcess, call, ingest

import quark
from quark.cli.main import cli
from quark_core.errors import (
    InvalidRunStateError,
    QuarkError,
    SessionStoreError,
    StoreUnauthorizedError,
)
from quark_core.testing.fakes import BatchMaker


@pytest.fixture
def invoke():
    """Runs a command; returns its output."""

    def run(*arguments, answer=None, status=0):
        given = [str(argument) for argument in arguments]
        runner = CliRunner(env={"COLUMNS": "200"})
        result = runner.invoke(cli, given, prog_name="quark", input=answer)
        if isinstance(result.exception, QuarkError):
            raise result.exception
        assert result.exit_code == status, result.output + repr(result.exception)
        return result.stdout

    return run


@pytest.fixture
def make_run(tmp_path, service):
    """One ended run of the project store `vision`, with a payload."""

    def make(name, *, store="vision", size_bytes=100_000):
        path = tmp_path / f"{name}.bin"
        path.write_bytes(os.urandom(size_bytes))
        with (
            quark.start_run(project="p", storage_dir=tmp_path / store, name=name) as session,
            quark.MetricsLogger(session) as metrics,
        ):
            for step in range(50):
                metrics.log("loss", 1.0 / (step + 1), step=step)
            quark.ArtifactStore(session).log_file(path)
        return session.run_id

    return make


@pytest.fixture
def here(tmp_path):
    return ("-d", tmp_path / "vision")


def list_ids(invoke, here):
    return {run["id"] for run in json.loads(invoke("runs", "--json", *here))}


def list_trash(invoke, here):
    return [run["run_id"] for run in json.loads(invoke("rm", "--list", "--json", *here))]


def find_payloads(tmp_path):
    folder = tmp_path / "server" / "payloads" / "default"
    return {path.parent.parent.name for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
def test_a_run_goes_comes_back_and_is_removed_for_good(invoke, make_run, here, tmp_path):
    go, keep = make_run("go"), make_run("keep")
    said = invoke("rm", "go", *here, answer="n\n", status=1)
    assert "Move 1 run to the trash (" in said
    assert list_ids(invoke, here) == {go, keep}
    said = invoke("rm", "go", "-y", *here)
    assert "To restore: quark restore" in said
    assert (list_ids(invoke, here), list_trash(invoke, here)) == ({keep}, [go])
    assert "already in the trash" in str(refused(invoke, "rm", go[:8], "-y", *here))
    assert f"`quark restore {go}`" in str(refused(invoke, "show", go, *here))
    assert invoke("restore", go[:8], *here) == f"Restored {go[:8]}.\n"
    assert list_ids(invoke, here) == {go, keep}
    with quark.open_run(go, tmp_path / "vision") as session:
        assert quark.MetricsLogger(session).columns().count == 50

    (usage,) = json.loads(invoke("rm", go, "-y", "--json", *here))["trashed"]
    assert usage["points"] == 50
    assert usage["files"]["artifacts"] >= 100_000
    plan = json.loads(invoke("gc", "--dry-run", "--json", *here))
    assert [run["run_id"] for run in plan["removed"]] == [go]
    assert find_payloads(tmp_path) == {go, keep}
    said = invoke("gc", *here, answer="y\n")
    assert "Permanently delete 1 run (" in said
    assert "Deleted 1 run. Store size: " in said
    assert (list_trash(invoke, here), find_payloads(tmp_path)) == ([], {keep})
    assert "no run in the trash" in str(refused(invoke, "restore", go, *here))
    # No store is made where a command was called.
    assert list(tmp_path.glob("*/.quark/*.db")) == []


def refused(invoke, *arguments, kind=QuarkError):
    with pytest.raises(kind) as caught:
        invoke(*arguments)
    return caught.value


@pytest.mark.long
def test_a_command_leaves_nothing_where_it_is_called(invoke, make_run, tmp_path, monkeypatch):
    run_id = make_run("go", store="elsewhere")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    # A run of another project store is found by its whole id, as `quark show` finds it.
    monkeypatch.setenv("QUARK_STORE_NAME", "another")
    assert "no run matches" in str(refused(invoke, "rm", run_id[:8], "-y"))
    invoke("rm", run_id, "-y")
    invoke("gc", "-y")
    assert list((tmp_path / "empty").iterdir()) == []


def test_du_says_what_the_workspace_takes_up(invoke, make_run, here, service):
    run_id = make_run("one")
    found = json.loads(invoke("du", "--json", *here))
    assert found["store_root"].startswith(service.url)
    (run,) = found["runs"]
    assert (run["run_id"], run["points"]) == (run_id, 50)
    assert run["files"]["artifacts"] >= 100_000
    assert "total" in invoke("du", *here)


@pytest.mark.long
def test_the_scope_decides(invoke, make_run, here, service, tmp_path, monkeypatch):
    run_id = make_run("go")
    scopes = {
        "training": ("ingest", "read"),
        "owner": ("read", "write"),
        "admin": ("admin",),
    }
    keys = {name: service.make_key("default", *given) for name, given in scopes.items()}
    monkeypatch.setenv("QUARK_USER_KEY", keys["training"])
    for command in (("rm", run_id, "-y"), ("gc", "-y")):
        said = refused(invoke, *command, *here, kind=StoreUnauthorizedError)
        assert "does not have the scope" in str(said)
        assert "QUARK_USER_KEY" in str(said)
    monkeypatch.setenv("QUARK_USER_KEY", keys["owner"])
    invoke("rm", run_id, "-y", *here)
    invoke("restore", run_id, *here)
    invoke("rm", run_id, "-y", *here)
    said = refused(invoke, "gc", "-y", *here, kind=StoreUnauthorizedError)
    assert "does not have the scope 'admin'" in str(said)
    # Such a key trains nothing, and is told so at once.
    with pytest.raises(StoreUnauthorizedError, match="scope 'ingest'"):
        quark.start_run(project="p", storage_dir=tmp_path / "vision")
    assert list_trash(invoke, here) == [run_id]
    monkeypatch.setenv("QUARK_USER_KEY", keys["admin"])
    invoke("gc", "-y", *here)
    assert list_trash(invoke, here) == []


@pytest.mark.long
def test_a_living_run_stays(invoke, service, here, tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path / "vision") as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
        session.flush("stored")
        said = refused(invoke, "rm", session.run_id, "-y", *here, kind=InvalidRunStateError)
        assert "still running" in str(said)
        backend = session.open_run.reader
        with pytest.raises(SessionStoreError, match="for reading only"):
            quark.open_run(session.run_id, tmp_path / "vision").open_run.reader.trash_runs(["x"])
        with pytest.raises(InvalidRunStateError, match="is running"):
            backend.trash_runs([session.run_id])


@pytest.mark.long
def test_who_logs_to_a_removed_run_is_told(service, tmp_path, invoke, here, caplog):
    session = quark.start_run(project="p", storage_dir=tmp_path / "vision")
    metrics = quark.MetricsLogger(session)
    metrics.log("loss", 1.0, step=0)
    session.flush("stored")
    trash = session.open_run.reader
    with service.client(key=service.key) as client:
        # As if it had been lost for a while: its host slept, and somebody cleared up.
        assert client.post(
            f"/v1/runs/{session.run_id}/status", json={"status": "failed"}
        ).is_success
        assert call(client, "trash_runs", run_ids=[session.run_id]).is_success
        assert client.post("/v1/trash/collect", json={}).json()["done"]
    assert trash.list_trash() == []
    with caplog.at_level(logging.WARNING, "quark"):
        for step in range(1, 4):
            metrics.log("loss", 1.0, step=step)
            session.flush("stored")
    told = [r.message for r in caplog.records if "permanently deleted from the server" in r.message]
    assert told == [
        f"run {session.run_id} was permanently deleted from the server, so its further records "
        "are dropped"
    ]
    session.end_run()


@pytest.mark.long
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_server_that_is_killed_at_any_moment_leaves_all_or_nothing(
    request, tmp_path, monkeypatch, invoke, database
):
    """In the middle of rm, restore and gc; the next command goes on, and what stays is whole."""
    moments = random.Random(31)
    folder = tmp_path / "server"
    here = ("-d", tmp_path)
    url = None if database == "sqlite" else request.getfixturevalue("postgres_url")
    server = ServerProcess(folder, "--migrate", store_url=url)
    # One PostgreSQL serves all tests.
    workspace = f"killed_{os.urandom(6).hex()}"
    key = server.make_key(workspace)
    ids = [f"go-{index}" for index in range(4)]
    payload_path = "/v1/runs/{}/payloads/{}"
    try:
        with server.client(key=key) as client:
            for run_id in [*ids, "keep"]:
                maker = BatchMaker(run_id, writer_id=f"w-{run_id}")
                start = maker.start()
                batches = [maker.metrics(*[("m", s, 1.0) for s in range(500)]) for _ in range(100)]
                ended = maker.lifecycle(("status", {"status": "completed"}))
                assert ingest(client, start, *batches, ended).is_success
                payload = run_id.encode() * 1000
                sha256 = sha(payload)
                assert client.put(payload_path.format(run_id, sha256), content=payload).is_success
        monkeypatch.setenv("QUARK_USER_KEY", key)
        monkeypatch.setenv("QUARK_PERSISTENCE_TIMEOUT_SECONDS", "60")
        for command in ("rm", "restore", "gc", "gc"):
            named = ids if command != "gc" else []
            timer = threading.Timer(moments.uniform(0.0, 0.6), kill, (server.pid,))
            monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
            arguments = (command, *named, *(["-y"] if command != "restore" else []))
            timer.start()
            with contextlib.suppress(SessionStoreError):
                invoke(*arguments, *here)
            timer.join()
            server.process.wait()
            server.stop()
            server = ServerProcess(folder, store_url=url)
            monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
            with server.client(key=key) as client:
                trash = {run["run_id"] for run in call(client, "list_trash").json()}
                shown = {run["run"]["id"] for run in call(client, "list_runs").json()}
            assert "keep" in shown
            if command == "gc":
                assert shown == {"keep"}
            else:
                # All of them or none: it was one transaction.
                assert trash in (set(), set(ids))
                assert shown == {"keep", *ids} - trash
                if trash != (set(ids) if command == "rm" else set()):
                    invoke(*arguments, *here)
            if command == "restore":
                invoke("rm", *ids, "-y", *here)
        invoke("gc", "-y", *here)
        assert list_trash(invoke, here) == []
        with server.client(key=key) as client:
            read = call(client, "summarize", run_id="keep").json()
            assert read["metrics"]["m"]["count"] == 50_000
            kept = b"keep" * 1000
            assert client.get(payload_path.format("keep", sha(kept))).content == kept
        folders = {path.name for path in (folder / "payloads" / workspace).iterdir()}
        assert folders == {"keep"}
    finally:
        server.stop()


def sha(payload):
    return hashlib.sha256(payload).hexdigest()


def kill(pid):
    os.kill(pid, signal.SIGKILL)
