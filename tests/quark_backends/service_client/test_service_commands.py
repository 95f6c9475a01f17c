"""The commands of the terminal, with a service set in the environment."""

import json
import os

import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli
from quark_core.runs import recovery


@pytest.fixture
def invoke(tmp_path):
    def run(*arguments, status=0):
        given = [str(argument) for argument in arguments]
        result = CliRunner(env={"COLUMNS": "300"}).invoke(cli, given, prog_name="quark")
        assert result.exit_code == status, result.output + repr(result.exception)
        # The command prints such an error in one line.
        error = f"{result.exception}" if isinstance(result.exception, quark.QuarkError) else ""
        return result.output + error

    return run


@pytest.fixture
def run_id(service, tmp_path):
    """A run with a bit of everything, of the store `vision`."""
    (tmp_path / "weights").write_bytes(os.urandom(1000))
    with (
        quark.start_run(
            project="p", storage_dir=tmp_path / "vision", tags=["o'clock"], name="first"
        ) as session,
        quark.MetricsLogger(session) as metrics,
    ):
        for step in range(50):
            metrics.log("train/loss", 1.0 / (step + 1), step=step)
        session.add_log("it goes on")
        quark.ArtifactStore(session).log_file(tmp_path / "weights")
    return session.run_id


@pytest.mark.long
def test_commands_read_what_the_service_has(invoke, run_id, tmp_path, service):
    here = ("-d", tmp_path / "vision")
    assert run_id[:8] in invoke("runs", *here)
    assert run_id[:8] in invoke("runs", *here, "--where", "train/loss < 1", "--sort", "train/loss")
    assert run_id[:8] in invoke("runs", *here, "--tag", "o'clock", "--status", "completed")
    assert run_id[:8] not in invoke("runs", *here, "--tag", "x")
    assert run_id[:8] not in invoke(
        "runs", *here, "--status", "failed", "--where", "train/loss < 1 or train/loss > 0"
    )
    assert "train/loss" in invoke("show", run_id[:6], *here)
    assert json.loads(invoke("show", "first", *here, "--json"))
    invoke("export", run_id, *here, "--format", "csv", "--output", tmp_path / "out")
    assert (tmp_path / "out").exists()
    assert "1 artifact" in invoke("artifacts", run_id, *here)
    assert f"/v1/runs/{run_id}" in invoke("artifacts", run_id, *here)
    invoke("artifacts", run_id, *here, "--output", tmp_path / "copies")
    (copy,) = [path for path in (tmp_path / "copies").rglob("*") if path.is_file()]
    assert copy.read_bytes() == (tmp_path / "weights").read_bytes()
    invoke("analyze", run_id, *here)
    invoke("compare", run_id, run_id, *here)
    assert "service" in invoke("backends")
    assert list(tmp_path.glob("*/.quark/*.db")) == []


@pytest.mark.long
def test_another_store_lists_other_runs_and_finds_this_one_by_its_id(
    invoke, run_id, tmp_path, monkeypatch
):
    there = ("-d", tmp_path)
    assert run_id[:8] in invoke("runs", *there)
    assert "train/loss" in invoke("show", run_id[:8], *there)
    monkeypatch.setenv("QUARK_STORE_NAME", "another")
    assert run_id[:8] not in invoke("runs", *there)
    assert "no run begins with" in invoke("show", run_id[:8], *there, status=1)
    assert "train/loss" in invoke("show", run_id, *there)


@pytest.mark.long
def test_sync_and_doctor(invoke, proxied, tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.3")
    session = quark.start_run(project="p", storage_dir=tmp_path / "vision")
    with quark.MetricsLogger(session) as metrics:
        metrics.log("m", 1.0, step=0)
        metrics.flush()
        proxied.set_mode("refuse")
        metrics.log("m", 2.0, step=1)
        session.end_run()
    said = invoke("doctor", "-d", tmp_path / "vision")
    assert f"Store {proxied.url}?store=*: cannot be read" in said
    assert "quark sync" in said
    invoke("sync", tmp_path / "vision", status=1)
    proxied.set_mode("pass")
    # Whoever reads first delivers what waits.
    shown = invoke("show", session.run_id, "-d", tmp_path / "vision")
    assert "not everything of this run" not in shown
    invoke("sync", tmp_path / "vision")
    assert recovery.survey(tmp_path / "vision") == []
    assert "Nothing waits" in invoke("sync", tmp_path / "vision")
    said = invoke("doctor", "-d", tmp_path / "vision")
    assert f"Store {proxied.url}?store=*: readable." in said


def test_an_outage_is_said_in_one_line(invoke, proxied, tmp_path):
    proxied.set_mode("refuse")
    said = invoke("runs", "-d", tmp_path, status=1)
    assert "cannot be reached" in said
    assert "Traceback" not in said
