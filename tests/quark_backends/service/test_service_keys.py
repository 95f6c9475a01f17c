"""Keys: who is let in, for how long, how often."""

import time

import httpx
import pytest
from service_fixtures import call, error_of, ingest, serving
from sqlalchemy import insert

from quark_backends.service.server.config import ServiceConfig
from quark_backends.service.server.deployment import (
    CONTROL_VERSION,
    STEPS,
    ControlDatabase,
    Deployment,
    StoredKey,
    control_version,
)
from quark_backends.service.server.keys import RateLimit, make_key, rotate_key
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records.base import now_us
from quark_core.testing.fakes import BatchMaker


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("keys")) as running:
        yield running


@pytest.mark.long
def test_all_refusals_look_the_same(server):
    good = server.make_key()
    prefix, key_id, secret = good.split("_", 2)
    expired = server.make_key(expires_us=now_us() - 1)
    refused = [
        None,
        "",
        "Bearer",
        "Basic dXNlcjpwYXNz",
        "Bearer nonsense",
        f"Bearer {prefix}_{key_id}_{secret[:-1]}",
        f"Bearer {prefix}_{key_id}_",
        f"Bearer {prefix}_0000000000000000_{secret}",
        f"Bearer {prefix}_{key_id[:-1]}é_{secret}",
        f"Bearer {prefix}_{'a' * 1000}_{secret}",
        f"Bearer xx_{key_id}_{secret}",
        f"Bearer {expired}",
        good,
    ]
    bodies = set()
    for authorization in refused:
        headers = {} if authorization is None else {"Authorization": authorization.encode()}
        reply = httpx.get(f"{server.url}/v1/workspace", headers=headers, timeout=60)
        assert reply.status_code == 401, authorization
        assert reply.headers["www-authenticate"] == "Bearer"
        error = error_of(reply)
        error.pop("request_id")
        bodies.add(str(error))
    assert len(bodies) == 1
    allowed = httpx.get(
        f"{server.url}/v1/workspace", headers={"Authorization": f"bearer {good}"}, timeout=60
    )
    assert allowed.status_code == 200


def test_scopes(server):
    with server.client("scoped", "read") as reader, server.client("scoped", "ingest") as writer:
        assert ingest(writer, BatchMaker("run1").start()).status_code == 200
        assert call(reader, "load_run", run_id="run1").status_code == 200
        refused = ingest(reader, BatchMaker("run2").start())
        assert (refused.status_code, error_of(refused)["code"]) == (403, "forbidden")
        assert call(writer, "load_run", run_id="run1").status_code == 403
        assert reader.get("/v1/keys").status_code == 403
        assert reader.get("/v1/workspace").json()["scopes"] == ["read"]


def test_a_revoked_key_stops_and_a_rotated_one_lives_on_for_a_time(server):
    with server.client("turning") as admin:
        made = admin.post("/v1/keys", json={"name": "ci", "scopes": ["read"]})
        assert made.status_code == 201
        first = made.json()
        with server.client(key=first["key"]) as client:
            assert call(client, "list_runs").status_code == 200
            rotated = admin.post(
                f"/v1/keys/{first['info']['id']}/rotate", json={"overlap_s": 3600}
            ).json()
            assert rotated["info"]["scopes"] == ["read"]
            assert rotated["info"]["name"] == "ci"
            with server.client(key=rotated["key"]) as second:
                assert call(client, "list_runs").status_code == 200
                assert call(second, "list_runs").status_code == 200
                admin.delete(f"/v1/keys/{first['info']['id']}")
                assert call(client, "list_runs").status_code == 401
                assert call(second, "list_runs").status_code == 200
        listed = {key["id"]: key for key in admin.get("/v1/keys").json()["keys"]}
        assert listed[first["info"]["id"]]["revoked_at"] is not None
        assert listed[rotated["info"]["id"]]["revoked_at"] is None
        again = admin.post(f"/v1/keys/{first['info']['id']}/rotate", json={})
        assert error_of(again)["code"] == "invalid_argument"
        text = admin.get("/v1/keys").text
        assert first["key"].split("_", 2)[2] not in text
        missing = admin.delete("/v1/keys/0123456789abcdef")
        assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    "body",
    [
        {"name": "x", "scopes": ["root"]},
        {"name": "x", "scopes": []},
        {"name": "", "scopes": ["read"]},
        {"name": "a\nb", "scopes": ["read"]},
        {"name": "x", "scopes": ["read"], "expires_in_s": -1},
    ],
)
def test_a_key_that_makes_no_sense_is_refused(server, body):
    with server.client("senseless") as admin:
        reply = admin.post("/v1/keys", json=body)
        assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_argument")


def test_a_key_expires_while_it_is_used(server):
    with server.client("brief") as admin:
        made = admin.post("/v1/keys", json={"name": "x", "scopes": ["read"], "expires_in_s": 0.5})
        with server.client(key=made.json()["key"]) as client:
            deadline = time.monotonic() + 20
            while call(client, "list_runs").status_code == 200:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert call(client, "list_runs").status_code == 401


def test_a_cached_key_is_believed_in_no_longer_than_it_says(tmp_path):
    with serving(tmp_path, key_cache_s=0.5) as server:
        key = server.make_key("default", "read")
        with server.client(key=key) as client:
            assert call(client, "list_runs").status_code == 200
            server.revoke(key)
            deadline = time.monotonic() + 20
            while call(client, "list_runs").status_code == 200:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_too_many_requests_wait(tmp_path):
    with serving(tmp_path, limits={"requests_per_s": 1.0}) as server, server.client() as client:
        codes = [client.get("/v1/workspace").status_code for _ in range(20)]
        assert codes[:10] == [200] * 10
        assert 429 in codes
        reply = client.get("/v1/workspace")
        while reply.status_code == 200:
            reply = client.get("/v1/workspace")
        error = error_of(reply)
        assert error["code"] == "rate_limited"
        assert 0 < error["retry_after_s"] <= 1.0
        assert int(reply.headers["retry-after"]) >= error["retry_after_s"]
        # The other key of the workspace has a limit of its own.
        with server.client() as other:
            assert other.get("/v1/workspace").status_code == 200


def test_too_many_rows_wait(tmp_path):
    with serving(tmp_path, limits={"rows_per_s": 10.0}) as server, server.client() as client:
        maker = BatchMaker("run1")
        assert ingest(client, maker.start()).status_code == 200
        many = maker.metrics(*(("loss", step, 0.0) for step in range(2_000)))
        assert ingest(client, many).status_code == 200  # more than the bucket, once it is full
        refused = ingest(client, maker.metrics(("loss", 1, 0.0)))
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limited")
        assert error_of(refused)["retry_after_s"] > 5


def test_a_bucket_fills_again():
    bucket = RateLimit(100_000.0)
    assert bucket.take(1_000_000.0) == 0.0
    wait_s = bucket.take(50_000.0)
    assert 0 < wait_s <= 1.0
    deadline = time.monotonic() + 10
    while bucket.take(10.0):
        assert time.monotonic() < deadline


def test_the_database_keeps_no_secret_and_tells_when_a_key_was_used(tmp_path):
    with serving(tmp_path) as server:
        key = server.make_key()
        with server.client(key=key) as client:
            client.get("/v1/workspace")
    key_id, secret = key.split("_", 2)[1:]
    control = ControlDatabase(f"sqlite:///{tmp_path}/service.db")
    stored = control.find_key(key_id)
    assert stored.last_used_us is not None
    control.close()
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes()


def test_a_rotated_key_that_expires_is_followed_by_one_that_lives_as_long(tmp_path):
    control = ControlDatabase(f"sqlite:///{tmp_path}/service.db")
    control.upgrade()
    moment = now_us()
    _, old = make_key(
        control, workspace="w", name="n", scopes=["read"], expires_us=moment + 10_000_000
    )
    _, new = rotate_key(control, old, overlap_s=1)
    assert new.expires_us - new.created_us <= 11_000_000
    assert control.find_key(old.id).expires_us <= new.created_us + 1_500_000
    with pytest.raises(SchemaValidationError, match="revoked or expired"):
        rotate_key(control, StoredKey(**{**_fields(old), "revoked_us": moment}), overlap_s=1)
    control.close()


def _fields(key):
    return {name: getattr(key, name) for name in key.__struct_fields__}


def test_control_databases_of_other_versions_are_refused(tmp_path):
    url = f"sqlite:///{tmp_path}/service.db"
    config = ServiceConfig(store_url=url)
    deployment = Deployment(config)
    with pytest.raises(SessionStoreError, match="is empty"):
        deployment.check()
    assert deployment.upgrade() == {"": CONTROL_VERSION}
    deployment.add_workspace("w")
    deployment.check()
    with deployment.control._begin(write=True) as connection:
        connection.exec_driver_sql("UPDATE control_version SET version = 99")
    with pytest.raises(
        SessionStoreError, match=rf"version 99, .* supports up to {CONTROL_VERSION}\."
    ):
        deployment.check()
    deployment.close()


def test_a_control_database_of_the_first_version_gets_logins_and_keeps_its_keys(tmp_path):
    url = f"sqlite:///{tmp_path}/service.db"
    old = ControlDatabase(url)
    with old._begin(write=True) as connection:
        STEPS[0](connection)
        connection.execute(insert(control_version).values(version=1))
    _, stored = make_key(old, workspace="default", name="kept", scopes=["read"])
    with pytest.raises(SessionStoreError, match="has version 1"):
        old.check_version()
    assert old.upgrade() == CONTROL_VERSION
    assert old.find_key(stored.id) == stored
    assert old.add_session("d" * 64, stored.id, lasts_us=10**6).key == stored
    assert old.find_session("d" * 64).key == stored
    old.close()


@pytest.mark.parametrize(
    "url",
    ["", "nonsense", "sqlite://", "sqlite:///:memory:", "mysql://x/y", "postgresql+asyncpg://x/y"],
)
def test_a_store_that_no_server_can_have_is_refused(url):
    with pytest.raises(SchemaValidationError, match="store"):
        ControlDatabase(url)


@pytest.mark.parametrize("name", ["", "Upper", "a-b", "../x", "a" * 49, "1a", "a.b", "ä"])
def test_a_workspace_that_could_be_no_folder_is_refused(tmp_path, name):
    control = ControlDatabase(f"sqlite:///{tmp_path}/service.db")
    control.upgrade()
    with pytest.raises(SchemaValidationError, match="workspace"):
        control.add_workspace(name)
    control.close()
