"""The service over PostgreSQL: several servers on one database."""

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from postgres_server import new_database
from service_fixtures import ask, call, error_of, ingest, serving

from quark_backends.service.server.config import ServiceConfig
from quark_backends.service.server.deployment import ControlDatabase, Deployment
from quark_backends.service.server.keys import make_key
from quark_core.errors import SessionStoreError
from quark_core.records.base import now_us
from quark_core.testing.fakes import BatchMaker


@pytest.fixture
def store_url(postgres_service_url):
    return postgres_service_url


@pytest.mark.long
def test_two_servers_serve_the_same_runs_of_several_workspaces(tmp_path, store_url):
    payload = b"kept once"
    sha256 = hashlib.sha256(payload).hexdigest()
    with (
        serving(tmp_path, store_url=store_url) as one,
        serving(tmp_path, store_url=store_url) as two,
    ):
        key, other = one.make_key("team"), one.make_key("other_team")
        with one.client(key=key) as first, two.client(key=key) as second:
            maker = BatchMaker("run1")
            start, metrics = maker.start(tags=["a"]), maker.metrics(("loss", 0, 1.0))
            assert ingest(first, start).status_code == 200
            assert ingest(second, metrics).status_code == 200
            assert ingest(first, metrics).status_code == 200  # the same, elsewhere
            read = call(second, "read", run_id="run1", kind="metric", query={}).json()
            assert len(read) == 1
            assert call(second, "summarize", run_id="run1").json()["metrics"]["loss"]["last"] == 1.0
            found = call(second, "search", search={"where": "'a' in tags"}).json()
            assert [run["stored"]["run"]["id"] for run in found] == ["run1"]
            assert first.put(f"/v1/runs/run1/payloads/{sha256}", content=payload).status_code == 201
            assert second.get(f"/v1/runs/run1/payloads/{sha256}").content == payload
            taken = ingest(second, BatchMaker("run1", writer_id="x").start())
            assert (taken.status_code, error_of(taken)["code"]) == (409, "conflict")
            assert first.get("/readyz").status_code == 200
        with two.client(key=other) as stranger:
            assert call(stranger, "list_runs").json() == []
            assert call(stranger, "load_run", run_id="run1").status_code == 404
            assert stranger.get(f"/v1/runs/run1/payloads/{sha256}").status_code == 404
        control = ControlDatabase(store_url)
        control.end_key(key.split("_")[1], revoked_us=now_us())
        control.close()
        for server in (one, two):
            with server.client(key=key) as client:
                assert call(client, "list_runs").status_code == 401


@pytest.mark.long
def test_many_writers_at_once(tmp_path, store_url):
    with serving(tmp_path, store_url=store_url) as server:
        key = server.make_key("team")
        refused = []

        def write(index):
            maker = BatchMaker(f"run{index % 3}", writer_id=f"w{index}")
            with server.client(key=key) as client:
                for step in range(20):
                    reply = ingest(client, maker.metrics(("loss", step, 1.0)))
                    if reply.status_code != 200:
                        refused.append(reply.text)

        with server.client(key=key) as client:
            for index in range(3):
                assert ingest(client, BatchMaker(f"run{index}", writer_id="s").start()).is_success
            threads = [threading.Thread(target=write, args=(index,)) for index in range(9)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert refused == []
            for index in range(3):
                read = call(client, "read", run_id=f"run{index}", kind="metric", query={})
                assert len(read.json()) == 60


@pytest.mark.long
def test_databases_are_made_by_several_at_once_and_checked(tmp_path, store_url):
    config = ServiceConfig(store_url=store_url, artifact_url=str(tmp_path))
    deployments = [Deployment(config) for _ in range(4)]
    with pytest.raises(SessionStoreError, match="is empty"):
        deployments[0].check()
    failures = []

    def upgrade(deployment):
        try:
            deployment.upgrade()
            deployment.add_workspace("team")
            deployment.check()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=upgrade, args=(each,)) for each in deployments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert deployments[0].control.list_workspaces() == ["team"]
    assert set(deployments[0].upgrade()) == {"", "team"}
    for deployment in deployments:
        deployment.close()


@pytest.mark.long
def test_what_is_on_one_machine_only_is_not_acknowledged(postgres_server, tmp_path):
    with (
        new_database(postgres_server.url) as url,
        serving(tmp_path, store_url=url) as server,
        server.client() as client,
        ThreadPoolExecutor(1) as thread,
    ):
        maker = BatchMaker("run1")
        assert ingest(client, maker.start()).status_code == 200
        batch = maker.metrics(("loss", 0, 1.0))
        with postgres_server.missing_standby():
            for _ in range(2):
                sending = thread.submit(ingest, client, batch)
                postgres_server.cancel(postgres_server.find_waiting())
                reply = sending.result(30)
                assert (reply.status_code, error_of(reply)["code"]) == (503, "unavailable")
            assert call(client, "load_run", run_id="run1").status_code == 200
        assert ingest(client, batch).status_code == 200
        read = call(client, "read", run_id="run1", kind="metric", query={}).json()
        assert len(read) == 1


def test_a_key_that_may_not_be_revoked_everywhere_is_not_told_as_revoked(postgres_server, tmp_path):
    with new_database(postgres_server.url) as url, ThreadPoolExecutor(1) as thread:
        deployment = Deployment(ServiceConfig(store_url=url, artifact_url=str(tmp_path)))
        deployment.upgrade()
        control = deployment.control
        _, stored = make_key(control, workspace="w", name="k", scopes=["read"])

        def revoke():
            control.end_key(stored.id, revoked_us=now_us())

        with postgres_server.missing_standby():
            for _ in range(3):
                revoking = thread.submit(revoke)
                postgres_server.cancel(postgres_server.find_waiting())
                with pytest.raises(SessionStoreError, match="it is unknown"):
                    revoking.result(30)
        revoke()
        assert control.find_key(stored.id).revoked_us is not None
        deployment.close()


@pytest.mark.long
def test_workers_of_two_servers_share_trials_logs_and_fields(tmp_path, store_url):
    """Each trial is given once, entries have no gaps, and no comparison succeeds twice."""
    with (
        serving(tmp_path, store_url=store_url) as one,
        serving(tmp_path, store_url=store_url) as two,
    ):
        key = one.make_key("team", "ingest", "read")
        given, appended, raised, errors = [], [], [], []

        with one.client(key=key) as client:
            sweep = {
                "sweep_id": ask(client, "open_sweep", project="p", name="s", definition={})["id"]
            }
            trials = [{"parameters": {"n": n}} for n in range(60)]
            ask(client, "add_trials", **sweep, trials=trials, key="all")
            assert ingest(client, BatchMaker("run1").start()).status_code == 200

        def work(index):
            with (one if index % 2 else two).client(key=key) as client:
                turn = 0
                while True:
                    turn += 1
                    name = f"{index}-{turn}"
                    trial = ask(client, "claim_trial", **sweep, request_id=name)
                    if trial is None:
                        return
                    given.append((trial["number"], trial["token"]))
                    entries = {"log": "l", "entries": [name, name], "request_id": name}
                    first = ask(client, "append_entries", **entries)["first"]
                    appended.append(first)
                    read = ask(client, "read_entries", log="l", start=0)
                    assert read[first : first + 2] == [name, name]
                    assert read[::2] == read[1::2]
                    count = call(client, "load_run", run_id="run1").json()["fields"].get("count")
                    body = {"field": "count", "expect": count, "value": (count or 0) + 1}
                    asked = {"run_id": "run1", **body, "by": "ann@lab"}
                    raised.append(ask(client, "compare_and_set", **asked))
                    body = {"number": trial["number"], "token": trial["token"]}
                    result = {"state": "completed", "values": [1.0]}
                    settled = ask(client, "settle_trial", **sweep, **body, result=result)
                    assert settled["state"] == "completed"

        def guard(index):
            try:
                work(index)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guard, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert errors == []
        assert sorted(given) == [(number, 1) for number in range(60)]
        assert sorted(appended) == list(range(0, 120, 2))
        with two.client(key=key) as client:
            assert ask(client, "load_sweep", **sweep)["counts"] == {"completed": 60}
            assert call(client, "load_run", run_id="run1").json()["fields"] == {
                "count": sum(raised)
            }
