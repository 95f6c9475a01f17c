"""Runs of a workspace go into a trash, come back, or are removed for good with their payloads."""

import hashlib
import os
import threading
from contextlib import closing

import pytest
from service_fixtures import ask, call, error_of, ingest, serving
from stores import list_tables

from quark_backends.service.server.config import ServiceConfig
from quark_backends.service.server.deployment import Deployment
from quark_core.testing.fakes import BatchMaker

PAYLOAD = b"weights" * 100_000
SHA256 = hashlib.sha256(PAYLOAD).hexdigest()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.long)])
def store_url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/server/service.db"
    return request.getfixturevalue("postgres_url")


@pytest.fixture
def workspace(request):
    # One database keeps the workspaces of all tests.
    return f"removal_{os.urandom(6).hex()}"


@pytest.fixture
def server(tmp_path, store_url):
    with serving(tmp_path / "server", store_url=store_url) as running:
        yield running


@pytest.fixture
def client(server, workspace):
    with server.client(workspace) as client:
        yield client


@pytest.fixture
def payloads(tmp_path, workspace):
    """The payload files of the workspace's runs, as the disk has them."""

    def find():
        folder = tmp_path / "server" / "payloads" / workspace
        return sorted(path.parent.parent.name for path in folder.rglob("*") if path.is_file())

    return find


@pytest.fixture
def count_rows(tmp_path, store_url, workspace):
    """Rows of each table that hold something of a run, as the database has them."""

    def count():
        config = ServiceConfig(store_url=store_url, artifact_url=str(tmp_path))
        deployment = Deployment(config)
        try:
            if deployment.control.is_sqlite:
                from quark_backends.store.databases.sqlite import connect, find_store

                connection = connect(find_store(deployment.find_root(workspace)), read_only=True)
            else:
                connection = deployment.find_database(workspace).connect()
            with closing(connection):
                found = {}
                for table in list_tables():
                    (rows,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
                    # SQLite keeps the highest numbers, in rows without content.
                    if table in ("run", "writer") and not connection.is_shared:
                        (rows,) = connection.execute(
                            f"SELECT count(*) FROM {table} WHERE"
                            + (
                                " run_path != ''"
                                if table == "run"
                                else " run_pk IN (SELECT pk FROM run WHERE run_path != '')"
                            )
                        ).fetchone()
                    if rows and table not in ("project", "name", "removed"):
                        found[table] = rows
                return found
        finally:
            deployment.close()

    return count


def make_run(client, run_id, *, payload=PAYLOAD, points=50):
    """One ended run with a bit of everything."""
    maker = BatchMaker(run_id, writer_id=f"writer-{run_id}")
    sent = ingest(
        client,
        maker.start(tags=["a", "b"]),
        maker.lifecycle(("config", {"values": {"lr": 0.1}, "notes": []})),
        *(maker.metrics(("loss", step, float(step))) for step in range(points)),
        maker.events("checkpoint_saved"),
        maker.lifecycle(("status", {"status": "completed"})),
    )
    assert sent.status_code == 200, sent.text
    written = client.post(
        f"/v1/runs/{run_id}/generations",
        json={"analyzer": "rules", "replaces": True, "outputs": []},
    )
    assert written.status_code == 200, written.text
    if payload:
        sha256 = hashlib.sha256(payload).hexdigest()
        assert client.put(f"/v1/runs/{run_id}/payloads/{sha256}", content=payload).is_success
    return maker


def list_ids(client):
    return {run["run"]["id"] for run in ask(client, "list_runs")}


def list_trash(client):
    return [run["run_id"] for run in ask(client, "list_trash")]


def trash(client, *run_ids):
    return call(client, "trash_runs", run_ids=run_ids)


def collect(client, **arguments):
    """Ask until all is done; the last reply, with what all of them removed."""
    removed = []
    while True:
        reply = client.post("/v1/trash/collect", json=arguments)
        assert reply.status_code == 200, reply.text
        found = reply.json()
        removed += found["removed"]
        if found["done"]:
            return {**found, "removed": removed}


def test_a_run_goes_comes_back_and_is_removed_with_its_payloads(client, payloads, count_rows):
    make_run(client, "go")
    make_run(client, "keep")
    before = ask(client, "summarize", run_id="go")
    assert trash(client, "go").is_success
    assert list_ids(client) == {"keep"}
    assert list_trash(client) == ["go"]
    hidden = call(client, "load_run", run_id="go")
    assert (hidden.status_code, "`quark restore go`" in hidden.text) == (404, True)
    assert client.get(f"/v1/runs/go/payloads/{SHA256}").status_code == 404
    assert call(client, "restore_runs", run_ids=["go"]).status_code == 200
    assert ask(client, "summarize", run_id="go") == before
    assert client.get(f"/v1/runs/go/payloads/{SHA256}").content == PAYLOAD

    assert trash(client, "go").is_success
    assert payloads() == ["go", "keep"]
    plan = client.post("/v1/trash/collect", json={"dry_run": True}).json()
    assert [run["run_id"] for run in plan["removed"]] == ["go"]
    assert plan["removed"][0]["files"]["artifacts"] >= len(PAYLOAD)
    assert list_trash(client) == ["go"]
    rows = count_rows()
    done = collect(client)
    assert [run["run_id"] for run in done["removed"]] == ["go"]
    # PostgreSQL gives the space of rows to other rows, and not to the disk.
    assert done["before_bytes"] - done["after_bytes"] >= 0.8 * len(PAYLOAD)
    assert list_trash(client) == []
    assert payloads() == ["keep"]
    left = count_rows()
    for table in ("run", "attempt", "writer", "run_metric", "run_tag", "run_config", "generation"):
        assert (table, left[table]) == (table, rows[table] // 2)
    # The same content in another run was never in question.
    assert client.get(f"/v1/runs/keep/payloads/{SHA256}").content == PAYLOAD
    assert ask(client, "summarize", run_id="keep")["metrics"]["loss"]["count"] == 50
    gone = call(client, "restore_runs", run_ids=["go"])
    assert (gone.status_code, error_of(gone)["code"]) == (404, "run_not_found")
    trash(client, "keep")
    collect(client)
    assert (count_rows(), payloads()) == ({}, [])


def test_all_or_none_go_and_the_living_stay(client):
    make_run(client, "ended", payload=b"")
    assert client.post("/v1/runs", json={"project": "p", "run_id": "alive"}).is_success
    refused = trash(client, "ended", "alive")
    assert (refused.status_code, error_of(refused)["code"]) == (409, "invalid_state")
    assert "run_id alive is running" in error_of(refused)["message"]
    assert error_of(trash(client, "ended", "absent"))["code"] == "run_not_found"
    assert error_of(trash(client, "../up"))["code"] == "invalid_argument"
    assert trash(client).status_code == 400
    assert list_trash(client) == []
    assert list_ids(client) == {"ended", "alive"}


@pytest.mark.long
def test_who_may_remove(server, workspace, client):
    make_run(client, "run1")
    with (
        server.client(workspace, "ingest", "read") as training,
        server.client(workspace, "write") as owner,
    ):
        for refused in (
            trash(training, "run1"),
            call(training, "restore_runs", run_ids=["run1"]),
            training.post("/v1/trash/collect", json={}),
            # For good goes what an admin says.
            owner.post("/v1/trash/collect", json={}),
            ingest(owner, BatchMaker("run2").start()),
            call(owner, "load_run", run_id="run1"),
        ):
            assert (refused.status_code, error_of(refused)["code"]) == (403, "forbidden")
        assert owner.get("/v1/workspace").json()["scopes"] == ["write"]
        assert trash(owner, "run1").status_code == 200
        assert list_trash(training) == ["run1"]
        assert call(owner, "restore_runs", run_ids=["run1"]).status_code == 200
    assert list_ids(client) == {"run1"}


@pytest.mark.long
def test_what_comes_late_is_kept_in_the_trash_and_let_go_after_it(client, payloads, count_rows):
    maker = make_run(client, "go")
    trash(client, "go")
    # Nothing is lost of a run that may come back.
    late = ingest(client, maker.metrics(("late", 0, 1.0)))
    assert (late.status_code, late.json()) == (200, {"batches": 1})
    other = b"came late"
    sha256 = hashlib.sha256(other).hexdigest()
    assert client.put(f"/v1/runs/go/payloads/{sha256}", content=other).status_code == 201
    call(client, "restore_runs", run_ids=["go"])
    assert ask(client, "summarize", run_id="go")["metrics"]["late"]["count"] == 1
    assert client.get(f"/v1/runs/go/payloads/{sha256}").content == other
    again = BatchMaker("go", attempt=1, writer_id="resumed")
    trash(client, "go")
    assert "`quark restore go`" in error_of(ingest(client, again.start()))["message"]

    collect(client)
    # Acknowledged, so that nobody sends it for ever, and told that it is let go.
    for batch in (maker.metrics(("late", 1, 1.0)), BatchMaker("go", writer_id="new").events("x")):
        late = ingest(client, batch)
        assert (late.status_code, late.json()) == (200, {"batches": 1, "removed": True})
    refused = client.put(f"/v1/runs/go/payloads/{sha256}", content=other)
    assert (refused.status_code, error_of(refused)["code"]) == (404, "run_not_found")
    assert "was permanently deleted from this store" in error_of(refused)["message"]
    # Nor does it rise again under its old id.
    reborn = BatchMaker("go", writer_id="reborn", started_us=4_000_000_000_000_000)
    assert error_of(ingest(client, reborn.start()))["code"] == "rejected"
    assert (payloads(), count_rows(), list_ids(client)) == ([], {}, set())


def test_only_what_is_old_enough_goes(client):
    make_run(client, "young", payload=b"")
    trash(client, "young")
    assert collect(client, older_than_s=3600)["removed"] == []
    assert list_trash(client) == ["young"]
    assert client.post("/v1/trash/collect", json={"older_than_s": -1}).status_code == 400


def test_a_payload_that_comes_while_its_run_is_removed_does_not_stay(client, payloads):
    make_run(client, "go", payload=b"")
    sent, may_go_on = threading.Event(), threading.Event()

    def send():
        yield PAYLOAD[:1000]
        sent.set()
        assert may_go_on.wait(30)
        yield PAYLOAD[1000:]

    replies = []
    path = f"/v1/runs/go/payloads/{SHA256}"
    thread = threading.Thread(target=lambda: replies.append(client.put(path, content=send())))
    thread.start()
    assert sent.wait(30)
    trash(client, "go")
    collect(client)
    may_go_on.set()
    thread.join(30)
    assert [(reply.status_code, error_of(reply)["code"]) for reply in replies] == [
        (404, "run_not_found")
    ]
    assert payloads() == []


def test_payloads_that_a_killed_collection_left_are_found(client, tmp_path, workspace, payloads):
    make_run(client, "go", payload=b"")
    make_run(client, "keep")
    trash(client, "go")
    collect(client)
    # As a server leaves it that is killed between the rows and the files.
    folder = tmp_path / "server" / "payloads" / workspace / "go" / "ab"
    folder.mkdir(parents=True)
    (folder / "abcd").write_bytes(b"x" * 5000)
    assert payloads() == ["go", "keep"]
    plan = client.post("/v1/trash/collect", json={"dry_run": True}).json()
    assert plan["leftovers"].keys() == {"go"}
    done = collect(client)
    assert (done["removed"], done["leftovers"].keys()) == ([], {"go"})
    assert payloads() == ["keep"]


def test_what_a_killed_server_was_taking_in_goes(client, tmp_path, workspace):
    make_run(client, "keep")
    partial = tmp_path / "server" / "payloads" / ".partial"
    for name in ("old", "new"):
        (partial / name).write_bytes(b"half")
    os.utime(partial / "old", (1, 1))
    collect(client)
    assert [path.name for path in partial.iterdir()] == ["new"]


def test_a_link_in_the_payloads_is_not_followed(client, tmp_path, workspace, payloads):
    make_run(client, "go", payload=b"")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    folder = tmp_path / "server" / "payloads" / workspace
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "go").mkdir()
    (folder / "go" / "ab").symlink_to(outside)
    trash(client, "go")
    collect(client)
    assert (outside / "precious").read_text() == "mine"
    assert not (folder / "go").exists()


def test_usage_counts_rows_and_payloads_by_run(client):
    make_run(client, "large", payload=os.urandom(300_000))
    make_run(client, "small", payload=b"")
    trash(client, "small")
    usage = ask(client, "measure_store")
    assert [run["run_id"] for run in usage["runs"]] == ["large", "small"]
    large, small = usage["runs"]
    assert large["points"] == small["points"] == 50
    assert large["files"]["artifacts"] >= 300_000
    assert small["trashed_at"] is not None
    assert usage["total_bytes"] >= usage["database_file_bytes"] + 300_000
    asked = ask(client, "measure_runs", run_ids=["small", "large"])
    # The server may have compacted one of them meanwhile.
    for run in (small, large, *asked):
        assert run.pop("database_bytes") > 0
    assert asked == [small, large]
    assert ask(client, "list_damaged") == []
    absent = call(client, "measure_runs", run_ids=["absent"])
    assert error_of(absent)["code"] == "run_not_found"


@pytest.mark.long
def test_trainings_write_beside_a_collection(server, workspace, client, count_rows):
    """What is acknowledged of the runs that stay is there, whatever is removed beside them."""
    for index in range(6):
        make_run(client, f"go-{index}", points=200)
    trash(client, *(f"go-{index}" for index in range(6)))
    stop, refused, sent = threading.Event(), [], {}
    begun = threading.Barrier(4, timeout=60)

    def write(name):
        maker = BatchMaker(name, writer_id=f"w-{name}")
        late = BatchMaker("go-3", writer_id=f"late-{name}")
        with server.client(workspace) as own:
            assert ingest(own, maker.start()).is_success
            step = 0
            while not stop.is_set():
                for batch in (maker.metrics(("loss", step, 1.0)), late.metrics(("x", step, 1.0))):
                    reply = ingest(own, batch)
                    if reply.status_code != 200:
                        refused.append(reply.text)
                step += 1
                if step == 1:
                    begun.wait()
            sent[name] = step

    threads = [threading.Thread(target=write, args=(f"stays-{index}",)) for index in range(3)]
    for thread in threads:
        thread.start()
    begun.wait()
    done = collect(client)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert refused == []
    assert {run["run_id"] for run in done["removed"]} == {f"go-{index}" for index in range(6)}
    for name, steps in sent.items():
        summary = ask(client, "summarize", run_id=name)
        assert summary["metrics"]["loss"]["count"] == steps
    collect(client)
    assert count_rows()["run"] == 3
    assert count_rows()["writer"] == 3


@pytest.mark.long
def test_a_collection_goes_on_where_the_last_request_ended(client, monkeypatch, count_rows):
    """However little one request gets done, and whatever is asked in between."""
    from quark_backends.service.server import removal_routes

    for index in range(3):
        make_run(client, f"go-{index}", points=120)
    make_run(client, "keep", payload=b"")
    trash(client, "go-0", "go-1", "go-2")
    monkeypatch.setattr(removal_routes, "_COLLECT_S", 0.0)
    turns = 1
    while not client.post("/v1/trash/collect", json={}).json()["done"]:
        turns += 1
        assert list_ids(client) == {"keep"}
        assert trash(client, "keep").status_code == 200
        assert call(client, "restore_runs", run_ids=["keep"]).status_code == 200
        for run_id in list_trash(client):
            # What has begun to go does not come back in part.
            back = call(client, "restore_runs", run_ids=[run_id])
            if back.status_code == 200:
                assert ask(client, "summarize", run_id=run_id)["metrics"]["loss"]["count"] == 120
                assert trash(client, run_id).is_success
            else:
                assert "has started to delete it" in error_of(back)["message"]
    assert turns > 3
    assert list_trash(client) == []
    assert ask(client, "summarize", run_id="keep")["metrics"]["loss"]["count"] == 50
    assert count_rows()["run"] == 1
