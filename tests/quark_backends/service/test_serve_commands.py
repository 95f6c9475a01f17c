"""`quark serve`, `quark keys` and `quark db`."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys

import httpx
import pytest
from click.testing import CliRunner
from service_fixtures import ingest, make_databases, serving_process

from quark.cli.main import cli
from quark_backends.service.server.config import Limits, load_config
from quark_backends.service.server.deployment import CONTROL_VERSION
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.testing.fakes import BatchMaker


def run(*arguments, env=None):
    result = CliRunner().invoke(cli, [*arguments], env=env)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def store(tmp_path):
    return f"sqlite:///{tmp_path}/service.db"


def test_keys_from_first_to_last(store):
    make_databases(store)
    created = run("keys", "create", "--store", store, "--name", "ci", "--expires", "30d")
    assert created.exit_code == 0, created.output
    key = created.stdout.strip()
    assert re.fullmatch(r"qk_[0-9a-f]{16}_[\w-]{43}", key)
    assert "Created the workspace 'default'." in created.stderr
    listed = json.loads(run("keys", "list", "--store", store, "--json").stdout)
    assert [entry["scopes"] for entry in listed] == [["ingest", "read"]]
    assert listed[0]["state"] == "live"
    assert listed[0]["expires_at"] is not None
    rotated = run("keys", "rotate", "--store", store, listed[0]["id"], "--overlap", "0s")
    assert rotated.stdout.startswith("qk_")
    states = [
        entry["state"]
        for entry in json.loads(run("keys", "list", "--store", store, "--json").stdout)
    ]
    assert states == ["expired", "live"]
    revoked = run("keys", "revoke", "--store", store, rotated.stdout.strip())
    assert "Revoked key " in revoked.stdout
    table = run("keys", "list", "--store", store, env={"COLUMNS": "200"}).stdout
    assert "revoked" in table
    assert key.split("_", 2)[2] not in table


def test_a_look_makes_no_store(tmp_path, store, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in (
        *(["keys", "create"], ["keys", "list"], ["keys", "revoke", "abc"]),
        *(["db", "version"], ["db", "upgrade"], ["db", "backup", "copy"]),
    ):
        for option in (["--store", store], []):
            with pytest.raises(SessionStoreError, match=r"service\.db does not exist. --store"):
                run(*command, *option)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_was_told_nothing_keeps_all_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QUARK_SERVE_STORE", raising=False)
    config = load_config({}, {}, None)
    make_databases(config.store_url)
    assert run("keys", "create").exit_code == 0
    assert config.store_url == load_config({}, {"QUARK_SERVE_STORE": ""}, None).store_url
    assert [path.name for path in tmp_path.iterdir()] == ["quark-service"]
    assert len(json.loads(run("keys", "list", "--json").stdout)) == 1
    given = f"sqlite:///{tmp_path}/quark-service/service.db"
    assert len(json.loads(run("keys", "list", "--store", given, "--json").stdout)) == 1


def test_keys_that_cannot_be(store):
    make_databases(store)
    for given in ("abc", "", "…", "qk_", "qk_abc_secret"):
        with pytest.raises(SessionStoreError, match=r"no key matches '(abc)?'"):
            run("keys", "revoke", "--store", store, given)
    with pytest.raises(SchemaValidationError, match="--expires is not a duration"):
        run("keys", "create", "--store", store, "--expires", "soon")
    with pytest.raises(SchemaValidationError, match="workspace must start"):
        run("keys", "create", "--store", store, "--workspace", "../x")
    assert "No API keys" in run("keys", "list", "--store", store).stdout


def test_databases(store):
    make_databases(store)
    said = run("db", "upgrade", "--store", store).stdout
    assert f"control: version {CONTROL_VERSION}" in said
    run("keys", "create", "--store", store)
    told = run("db", "version", "--store", store).stdout
    assert re.search(r"workspace default: version (\d+), this Quark has \1", told)
    assert run("db", "upgrade", "--store", store).exit_code == 0


def list_keys(store):
    return json.loads(run("keys", "list", "--store", store, "--json").stdout)


def make_key_with_id(store, key_id):
    from quark_backends.service.server.deployment import ControlDatabase, StoredKey

    control = ControlDatabase(store)
    control.add_key(
        StoredKey(
            id=key_id,
            workspace="vision",
            name=f"of {key_id}",
            digest="",
            scopes=frozenset({"read"}),
            created_us=0,
        )
    )
    control.close()


def test_the_beginning_of_an_id_names_a_key(store):
    make_databases(store)
    first, second, other = "52a869224f0c1d2e", "52a869229d3b5a7f", "77a869224f0c1d2e"
    for key_id in (first, second, other):
        make_key_with_id(store, key_id)
    for given in ("5", "52a8", "52a86922", "52a86922…", "qk_52a86922"):
        with pytest.raises(SessionStoreError, match="is ambiguous") as refused:
            run("keys", "revoke", "--store", store, given)
        assert f"{first}  vision  of {first}" in str(refused.value)
        assert second in str(refused.value)
        assert other not in str(refused.value)
    with pytest.raises(SessionStoreError, match="at least 4 characters"):
        run("keys", "revoke", "--store", store, "77a")
    assert {key["state"] for key in list_keys(store)} == {"live"}
    run("keys", "revoke", "--store", store, "52a869224…")
    run("keys", "rotate", "--store", store, "77a8", "--overlap", "0s")
    states = {key["id"]: key["state"] for key in list_keys(store)}
    assert (states[first], states[second], states[other]) == ("revoked", "live", "expired")


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_ids_are_whole_in_a_terminal_of_any_width(store, columns):
    name = "The nightly job of the vision team on the large machine"
    make_databases(store)
    run("keys", "create", "--store", store, "--workspace", "w" * 48, "--name", name)
    run("keys", "create", "--store", store, "--expires", "30d", "--scope", "admin")
    table = run("keys", "list", "--store", store, env={"COLUMNS": columns}).stdout
    for key in list_keys(store):
        assert key["id"] in table
    assert "…" not in table
    assert "".join(name.split()) in "".join(table.split()) or columns != "200"


@pytest.mark.long
def test_the_first_start_makes_a_key_for_people_and_says_how_to_make_one_for_trainings(tmp_path):
    with serving_process(tmp_path, "--show-first-key") as server:
        key = re.search(r"qk_[0-9a-f]{16}_[\w-]{43}", server.output)[0]
        reply = httpx.get(
            f"{server.url}/v1/workspace", headers={"Authorization": f"Bearer {key}"}, timeout=60
        )
        assert (reply.json()["workspace"], reply.json()["scopes"]) == ("default", ["admin"])
        assert "Admin key, shown once" in server.output
        # The key that may do everything is in no line for the machines that train.
        assert f"QUARK_USER_KEY={key}" not in server.output
        assert f"export QUARK_PERSISTENCE_URL={server.url}" in server.output
        command = re.search(r"^  quark (keys create .*)$", server.output, re.MULTILINE)[1]
        made = run(*shlex.split(command)).stdout.strip()
        reply = httpx.get(
            f"{server.url}/v1/workspace", headers={"Authorization": f"Bearer {made}"}, timeout=60
        )
        assert reply.json()["scopes"] == ["ingest", "read"]
        listed = [(each["name"], each["scopes"]) for each in list_keys(server.store_url)]
        assert listed == [("operator", ["admin"]), ("training", ["ingest", "read"])]
        prose = [line for line in server.output.splitlines() if tmp_path.name not in line]
        assert max(len(line) for line in prose) <= 80
    with serving_process(tmp_path, "--show-first-key") as server:
        assert "qk_" not in server.output  # shown once
        assert "keys create" not in server.output
    assert key not in (tmp_path / "server.log").read_text()


@pytest.mark.long
def test_without_a_terminal_it_says_how_to_make_both_keys(tmp_path):
    with serving_process(tmp_path) as server:
        assert "qk_" not in server.output
        commands = re.findall(r"^  quark (keys create .*)$", server.output, re.MULTILINE)
        for command in commands:
            assert run(*shlex.split(command)).exit_code == 0
        scopes = [each["scopes"] for each in list_keys(server.store_url)]
        assert scopes == [["admin"], ["ingest", "read"]]


@pytest.fixture
def open_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def find_open(folder):
    """What other users of the machine may use, below a folder."""
    return [path for path in folder.rglob("*") if path.stat().st_mode & 0o077]


def send_payload(server, key):
    payload = b"weights"
    sha256 = hashlib.sha256(payload).hexdigest()
    with server.client(key=key) as client:
        maker = BatchMaker("run1")
        assert ingest(client, maker.start(), maker.metrics(("loss", 0, 1.0))).status_code == 200
        assert client.put(f"/v1/runs/run1/payloads/{sha256}", content=payload).status_code == 201


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_what_a_server_keeps_is_its_users_alone(tmp_path, open_umask):
    folder = tmp_path / "srv" / "quark"
    store = f"sqlite:///{folder}/service.db"
    (tmp_path / "logs").mkdir()
    with serving_process(tmp_path / "logs", store_url=store) as server:
        key = run("keys", "create", "--store", store).stdout.strip()
        send_payload(server, key)
        assert (folder / "service.db-wal").exists()
        assert len(list(folder.rglob("*"))) > 8
        assert find_open(tmp_path / "srv") == []
        payloads = tmp_path / "logs" / "payloads"
        assert payloads.stat().st_mode & 0o077 == 0
        assert find_open(payloads) == []
    into = tmp_path / "copies" / "one"
    run("db", "backup", "--store", store, "--into", str(into))
    assert find_open(tmp_path / "copies") == []
    assert os.umask(0o022) == 0o022, "a command changes nothing for whoever calls it"


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_a_store_that_was_open_to_others_is_so_no_more(tmp_path, open_umask):
    from quark_backends.service.server.config import ServiceConfig
    from quark_backends.service.server.deployment import Deployment

    folder = tmp_path / "shared"
    folder.mkdir()
    store = f"sqlite:///{folder}/service.db"
    deployment = Deployment(ServiceConfig(store_url=store))
    deployment.upgrade()
    deployment.add_workspace("default")
    (folder / "payloads").mkdir()
    deployment.close()
    own = [folder / name for name in ("service.db", "workspaces", "payloads")]
    assert all(path.stat().st_mode & 0o044 for path in own)
    elsewhere = tmp_path / "artifacts"
    elsewhere.mkdir(mode=0o755)
    with serving_process(tmp_path / "logs", "--artifacts", str(elsewhere), store_url=store) as one:
        log = one.log.read_text()
    assert [path.stat().st_mode & 0o077 for path in own[:2]] == [0, 0]
    # Chosen by people: they are told.
    assert elsewhere.stat().st_mode & 0o777 == folder.stat().st_mode & 0o777 == 0o755
    assert f"can read {elsewhere} (mode 755). To prevent this, run `chmod 700` on it" in log
    assert f"{own[0]} was open to other users (mode 644)" in log
    deployment = Deployment(ServiceConfig(store_url=store))
    assert [said.split()[0] for said in deployment.make_private()] == [str(own[2])]
    assert deployment.make_private() == []
    deployment.close()


@pytest.mark.long
def test_other_machines_are_warned_of(tmp_path):
    with serving_process(tmp_path, "--host", "0.0.0.0"):
        pass
    assert "Put a TLS proxy in front of this server." in (tmp_path / "server.log").read_text()


def serve(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "quark", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.long
def test_older_and_newer_databases_are_refused(tmp_path, store):
    import sqlite3

    make_databases(store)
    with sqlite3.connect(tmp_path / "service.db") as connection:
        connection.execute("UPDATE control_version SET version = 7")
    connection.close()
    done = serve("--store", store, "--port", "0")
    assert done.returncode == 1
    said = f"version 7, but this Quark supports up to {CONTROL_VERSION}. Upgrade quark-tracker"
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_mistakes_are_one_line(tmp_path, store):
    for arguments, message in (
        (["--store", "mysql://root:secret@x/y"], "store must start with"),
        (["--store", store, "--port", "99999"], "port must be from 0 to 65535"),
        (["--store", store, "--workers", "0"], "workers must be from 1"),
        (["--store", "postgresql://u:secret@127.0.0.1:1/x"], "artifacts is required"),
        (["--store", store, "--artifacts", "s3://bucket"], "must be a folder"),
        (["--store", store, "--host", "256.0.0.1"], "cannot listen on"),
    ):
        done = serve(*arguments)
        assert done.returncode == 1, arguments
        assert message in done.stderr, done.stderr
        assert "secret" not in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_taken_port_is_told(tmp_path):
    with serving_process(tmp_path) as server:
        (tmp_path / "other").mkdir()
        done = serve("--store", f"sqlite:///{tmp_path}/other/s.db", "--port", str(server.port))
        assert done.returncode == 1
        assert "--port selects another port" in done.stderr


def test_settings_by_option_environment_and_file(tmp_path):
    path = tmp_path / "quark.toml"
    path.write_text(
        'store = "sqlite:///a.db"\nport = 1\nworkers = 3\nallowed_hosts = ["a", "b"]\n'
        "[limits]\nbatch_rows = 5\nkeys_per_run = 6\n"
    )
    environ = {
        "QUARK_SERVE_PORT": "2",
        "QUARK_SERVE_HOST": "::1",
        "QUARK_SERVE_LIMITS_BATCH_ROWS": "7",
        "QUARK_SERVE_ACCESS_LOG": "true",
        "QUARK_SERVE_ALLOWED_HOSTS": "x, y",
    }
    config = load_config({"port": 3, "host": None}, environ, path)
    assert (config.port, config.host, config.workers) == (3, "::1", 3)
    assert config.allowed_hosts == ("x", "y")
    assert config.access_log is True
    assert config.limits == Limits(batch_rows=7, keys_per_run=6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "cannot be read"),
        ('store = "sqlite:///a"\ncolour = "red"', "unknown option 'colour'"),
        ('store = "sqlite:///a"\nport = "x"', "port: "),
        ('store = "sqlite:///a"\n[limits]\ncolour = 1', "unknown option 'limits.colour'"),
        ('store = "sqlite:///a"\n[limits]\nbatch_rows = 0', "limits.batch_rows must be above 0"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, text, message):
    path = tmp_path / "quark.toml"
    path.write_text(text)
    with pytest.raises(SchemaValidationError, match=message):
        load_config({}, {}, path)
