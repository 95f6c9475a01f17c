"""A run that goes to the service and to a mirror here: what analyzers find goes to both."""

import csv
import json

import pytest
from click.testing import CliRunner

import quark
from quark.analysis import outputs
from quark.cli.main import cli

pytestmark = pytest.mark.usefixtures("service")


def train(path):
    session = quark.start_run(project="p", storage_dir=path, backends="csv")
    metrics = quark.MetricsLogger(session)
    for step in range(200):
        metrics.log("train/loss", 1 / (step + 1) if step < 100 else float("nan"), step=step)
    return session


def call(*arguments):
    done = CliRunner().invoke(cli, list(map(str, arguments)))
    return done.exit_code, done.stdout


def list_writers(path, run_id):
    lines = (path / ".quark" / "runs" / run_id / "csv" / "health_scores.csv").read_text()
    return {row["writer"] for row in csv.DictReader(lines.splitlines())}


@pytest.mark.long
def test_the_mirror_has_what_was_found_during_the_run_and_after_it(tmp_path, monkeypatch):
    with train(tmp_path) as session:
        assert quark.AnalyzerEngine(session).analyze().generation == 1
    run_id, here = session.run_id, ("-d", tmp_path)
    assert call("analyze", run_id, *here)[0] == 0
    assert list_writers(tmp_path, run_id) == {"analyzer.1", "analyzer.2"}
    assert call("mirror", "verify", run_id, *here)[0] == 0
    status, told = call("mirror", "status", run_id, *here, "--json")
    (state,) = [state for state in json.loads(told) if not state["primary"]]
    assert (status, state["outputs"]["health_score"]) == (0, [5, 5])
    with monkeypatch.context() as patch:
        patch.setattr(outputs, "journal_outputs", lambda *_, **__: None)
        assert call("analyze", run_id, *here)[0] == 0
    assert call("mirror", "verify", run_id, *here)[0] == 3
    assert call("mirror", "replay", run_id, *here)[0] == 0
    assert list_writers(tmp_path, run_id) == {"analyzer.1", "analyzer.2", "analyzer.3"}
    assert call("mirror", "verify", run_id, *here)[0] == 0
