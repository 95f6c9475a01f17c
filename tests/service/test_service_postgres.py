"""The service over PostgreSQL: several servers on one database."""

import hashlib
import threading

import pytest
from service_fixtures import error_of, ingest, serving

from quark_backends.service.server.config import ServiceConfig
from quark_backends.service.server.control import ControlDatabase
from quark_backends.service.server.deployment import Deployment
from quark_core.errors import SessionStoreError
from quark_core.testing.batches import BatchMaker
from quark_core.times import now_us


@pytest.fixture
def store_url(postgres_url):
    yield postgres_url
    control = ControlDatabase(postgres_url)
    with control._begin(write=True) as connection:
        found = connection.exec_driver_sql(
            "SELECT nspname FROM pg_namespace"
            " WHERE nspname LIKE 'quark\\_ws\\_%%' OR nspname = 'quark_control'"
        )
        schemas = list(found.scalars())
    for schema in schemas:
        # One at a time: a transaction that drops many needs more locks than there are.
        with control._begin(write=True) as connection:
            connection.exec_driver_sql(f'DROP SCHEMA "{schema}" CASCADE')
    control.close()


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
            read = second.post("/v1/runs/run1/records/metric/read", json={}).json()
            assert read["count"] == 1
            assert second.get("/v1/runs/run1/summary").json()["metrics"]["loss"]["last"] == 1.0
            found = second.post("/v1/runs/search", json={"where": "'a' in tags"}).json()["runs"]
            assert [run["run"]["id"] for run in found] == ["run1"]
            assert first.put(f"/v1/runs/run1/payloads/{sha256}", content=payload).status_code == 201
            assert second.get(f"/v1/runs/run1/payloads/{sha256}").content == payload
            taken = ingest(second, BatchMaker("run1", writer_id="x").start())
            assert (taken.status_code, error_of(taken)["code"]) == (409, "conflict")
            assert first.get("/readyz").status_code == 200
        with two.client(key=other) as stranger:
            assert stranger.get("/v1/runs").json()["runs"] == []
            assert stranger.get("/v1/runs/run1").status_code == 404
            assert stranger.get(f"/v1/runs/run1/payloads/{sha256}").status_code == 404
        control = ControlDatabase(store_url)
        control.end_key(key.split("_")[1], revoked_us=now_us())
        control.close()
        for server in (one, two):
            with server.client(key=key) as client:
                assert client.get("/v1/runs").status_code == 401


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
                read = client.post(f"/v1/runs/run{index}/records/metric/read", json={})
                assert read.json()["count"] == 60


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
