"""Backup and restore of a service on SQLite, tried with a training beside."""

import shutil

import pytest
from click.testing import CliRunner
from service_fixtures import serving_process

import quark
from quark.cli.main import cli
from quark_core.errors import SessionStoreError


def back_up(store, into):
    result = CliRunner().invoke(cli, ["db", "backup", "--store", store, "--into", str(into)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def use(monkeypatch, server, key):
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
    monkeypatch.setenv("QUARK_USER_KEY", key)


def test_a_copy_made_beside_a_training_is_served_from_elsewhere(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    with serving_process(first) as server:
        key = server.make_key("vision")
        use(monkeypatch, server, key)
        session = quark.start_run(project="p", storage_dir=tmp_path / "train", config={"lr": 0.1})
        with session, quark.MetricsLogger(session) as metrics:
            artifact = quark.ArtifactStore(session).store(
                "bytes", "weights", b"payload" * 100, step=1
            )
            for step in range(100):
                metrics.log("loss", float(step), step=step)
            session.flush("stored")
            output = back_up(server.store_url, second)
            shutil.copytree(first / "payloads", second / "payloads")
            metrics.log("loss", 100.0, step=100)
        assert "service.db" in output
        assert "vision" in output
    with serving_process(second) as server:
        # Its keys are the same, and so is all that was acknowledged when the copy was made.
        use(monkeypatch, server, key)
        opened = quark.open_run(session.run_id, tmp_path / "elsewhere")
        assert [record.step for record in quark.MetricsLogger(opened).read()] == list(range(100))
        assert opened.context.run.status == "running"
        assert quark.ArtifactStore(opened).load(artifact.id) == b"payload" * 100


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    with serving_process(tmp_path / "first") as server:
        (tmp_path / "there").mkdir()
        with pytest.raises(SessionStoreError, match="there already"):
            back_up(server.store_url, tmp_path / "there")
    assert not list((tmp_path / "there").iterdir())


def test_postgresql_is_left_to_its_own_tools(tmp_path):
    with pytest.raises(SessionStoreError, match="pg_dump"):
        back_up("postgresql+psycopg://nobody@127.0.0.1:1/none", tmp_path / "copy")
