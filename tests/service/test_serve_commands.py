"""`quark serve`, `quark keys` and `quark db`."""

import json
import re
import subprocess
import sys

import httpx
import pytest
from click.testing import CliRunner
from service_fixtures import serving_process

from quark.cli.main import cli
from quark_backends.service.server.config import Limits
from quark_backends.service.server.settings import load_config
from quark_core.errors import SchemaValidationError, SessionStoreError


def run(*arguments, env=None):
    result = CliRunner().invoke(cli, [*arguments], env=env)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def store(tmp_path):
    return f"sqlite:///{tmp_path}/service.db"


def test_keys_from_first_to_last(store):
    created = run("keys", "create", "--store", store, "--name", "ci", "--expires", "30d")
    assert created.exit_code == 0, created.output
    key = created.stdout.strip()
    assert re.fullmatch(r"qk_[0-9a-f]{16}_[\w-]{43}", key)
    assert "workspace default is new" in created.stderr
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
    assert "is revoked" in revoked.stdout
    table = run("keys", "list", "--store", store, env={"COLUMNS": "200"}).stdout
    assert "revoked" in table
    assert key.split("_", 2)[2] not in table


def test_a_look_makes_no_store(tmp_path, store, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in (["keys", "list"], ["keys", "revoke", "abc"], ["db", "version"]):
        for option in (["--store", store], []):
            with pytest.raises(SessionStoreError, match=r"service\.db does not exist: --store"):
                run(*command, *option)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_was_told_nothing_keeps_all_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QUARK_SERVE_STORE", raising=False)
    assert run("keys", "create").exit_code == 0
    config = load_config({}, {}, None)
    assert config.store_url == load_config({}, {"QUARK_SERVE_STORE": ""}, None).store_url
    assert [path.name for path in tmp_path.iterdir()] == ["quark-service"]
    assert len(json.loads(run("keys", "list", "--json").stdout)) == 1
    given = f"sqlite:///{tmp_path}/quark-service/service.db"
    assert len(json.loads(run("keys", "list", "--store", given, "--json").stdout)) == 1


def test_keys_that_cannot_be(store):
    assert run("db", "upgrade", "--store", store).exit_code == 0
    with pytest.raises(SessionStoreError, match="no key abc"):
        run("keys", "revoke", "--store", store, "abc")
    with pytest.raises(SchemaValidationError, match="--expires must be"):
        run("keys", "create", "--store", store, "--expires", "soon")
    with pytest.raises(SchemaValidationError, match="workspace must begin"):
        run("keys", "create", "--store", store, "--workspace", "../x")
    assert "There are no keys" in run("keys", "list", "--store", store).stdout


def test_databases(store):
    assert "control: version 1" in run("db", "upgrade", "--store", store).stdout
    run("keys", "create", "--store", store)
    told = run("db", "version", "--store", store).stdout
    assert re.search(r"workspace default: version (\d+), this Quark has \1", told)
    assert run("db", "upgrade", "--store", store).exit_code == 0


def test_the_first_start_tells_how_to_go_on(tmp_path):
    with serving_process(tmp_path, "--show-first-key") as server:
        assert f"export QUARK_PERSISTENCE_URL={server.url}" in server.output
        key = re.search(r"export QUARK_USER_KEY=(\S+)", server.output)[1]
        reply = httpx.get(f"{server.url}/v1/workspace", headers={"Authorization": f"Bearer {key}"})
        assert (reply.json()["workspace"], reply.json()["scopes"]) == ("default", ["admin"])
    with serving_process(tmp_path, "--show-first-key") as server:
        assert "QUARK_USER_KEY" not in server.output  # shown once
    assert key not in (tmp_path / "server.log").read_text()


def test_without_a_terminal_it_says_how_to_make_a_key(tmp_path):
    with serving_process(tmp_path) as server:
        assert "quark keys create --store sqlite:///" in server.output
        assert "qk_" not in server.output


def test_other_machines_are_warned_of(tmp_path):
    with serving_process(tmp_path, "--host", "0.0.0.0"):
        pass
    assert "put a proxy that speaks TLS before this server" in (tmp_path / "server.log").read_text()


def serve(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "quark", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_older_and_newer_databases_are_refused(tmp_path, store):
    import sqlite3

    run("db", "upgrade", "--store", store)
    with sqlite3.connect(tmp_path / "service.db") as connection:
        connection.execute("UPDATE control_version SET version = 7")
    connection.close()
    done = serve("--store", store, "--port", "0")
    assert done.returncode == 1
    assert "version 7, this Quark knows 1: upgrade quark-tracker" in done.stderr
    assert "Traceback" not in done.stderr


def test_mistakes_are_one_line(tmp_path, store):
    for arguments, message in (
        (["--store", "mysql://root:secret@x/y"], "store must begin with"),
        (["--store", store, "--port", "99999"], "port must be from 0 to 65535"),
        (["--store", store, "--workers", "0"], "workers must be from 1"),
        (["--store", "postgresql://u:secret@127.0.0.1:1/x"], "artifacts must be given"),
        (["--store", store, "--artifacts", "s3://bucket"], "must be a folder"),
        (["--store", store, "--host", "256.0.0.1"], "cannot be listened on"),
    ):
        done = serve(*arguments)
        assert done.returncode == 1, arguments
        assert message in done.stderr, done.stderr
        assert "secret" not in done.stderr
        assert "Traceback" not in done.stderr


def test_a_taken_port_is_told(tmp_path):
    with serving_process(tmp_path) as server:
        (tmp_path / "other").mkdir()
        done = serve("--store", f"sqlite:///{tmp_path}/other/s.db", "--port", str(server.port))
        assert done.returncode == 1
        assert "--port chooses another port" in done.stderr


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
        ('store = "sqlite:///a"\ncolour = "red"', "no setting 'colour'"),
        ('store = "sqlite:///a"\nport = "x"', "port: "),
        ('store = "sqlite:///a"\n[limits]\ncolour = 1', "no setting 'limits.colour'"),
        ('store = "sqlite:///a"\n[limits]\nbatch_rows = 0', "limits.batch_rows must be above 0"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, text, message):
    path = tmp_path / "quark.toml"
    path.write_text(text)
    with pytest.raises(SchemaValidationError, match=message):
        load_config({}, {}, path)
