"""Commands on runs that MLflow has: those that never saw Quark, and ours beside them."""

import json

import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli
from quark_core.errors import RunNotFoundError

pytestmark = pytest.mark.filterwarnings(
    "ignore:metric .* breaks Quark's naming rule:RuntimeWarning"
)


@pytest.fixture
def uri(server):
    return f"mlflow:{server.uri}?quark=full"


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Runs a command where there is no store of Quark's, and nothing may be made."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    monkeypatch.chdir(place)

    def run(*arguments, code=0):
        result = CliRunner().invoke(cli, list(map(str, arguments)), env={"COLUMNS": "200"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        assert list(place.iterdir()) == []
        return result.stdout

    return run


@pytest.fixture
def count_changes(server, foreign):
    """Everything that MLflow's store has of the foreign run."""
    run_id = foreign[0].info.run_id

    def read():
        tables = ("metrics", "latest_metrics", "params", "tags", "runs")
        return {
            table: server.query(f"SELECT * FROM {table} WHERE run_uuid = ?", run_id)
            for table in tables
        }

    return read


@pytest.mark.long
def test_runs_are_listed_and_searched(call, uri, project, foreign):
    ids = [run.info.run_id for run in foreign]
    found = json.loads(call("runs", "--backend", uri, "-p", project, "--json"))
    assert [run["id"] for run in found] == ids
    assert found[0]["config"]["lr"] == 0.1
    assert "trial" in call("runs", "-b", uri, "-p", project)
    wanted = ["-w", "config.lr == 0.1 and 'team=vision' in tags", "--sort", "-`train loss`"]
    (one,) = json.loads(call("runs", "-b", uri, "-p", project, "--json", *wanted))
    assert (one["id"], one["name"]) == (ids[0], "trial")


@pytest.mark.long
def test_a_run_is_shown(call, uri, foreign, count_changes):
    run_id = foreign[0].info.run_id
    before = count_changes()
    shown = json.loads(call("show", run_id, "--backend", uri, "--json"))
    assert (shown["run"]["id"], shown["state"]) == (run_id, "interrupted")
    counts = {metric["key"]: metric["count"] for metric in shown["metrics"]}
    assert sorted(counts.values()) == [1, 200]
    text = call("show", run_id, "-b", uri)
    for word in ("trial", "Notes.", "model.depth", "resnet"):
        assert word in text
    # By the beginning of its id, too.
    assert run_id in call("show", run_id[:12], "-b", uri, "--json")
    assert count_changes() == before


@pytest.mark.long
def test_a_run_is_analyzed(call, uri, foreign, count_changes):
    run_id = foreign[0].info.run_id
    before = count_changes()
    result = json.loads(call("analyze", run_id, "--backend", uri, "--json"))
    assert {score["score_key"] for score in result["health_scores"]} >= {"overall"}
    assert result["run_id"] == run_id
    assert run_id in call("analyze", run_id, "-b", uri)
    call("analyze", run_id, "-b", uri, "--explain", "all")
    assert count_changes() == before


@pytest.mark.long
def test_a_run_of_ours_is_compared_with_one_of_mlflow_s(call, uri, project, foreign, tmp_path):
    with quark.start_run(project=project, storage_dir=tmp_path, backends=uri) as ours:
        metrics = quark.MetricsLogger(ours)
        for step in range(200):
            metrics.log("train loss", 5.0 / (step + 1) + 2.0, step=step)
    run_id = foreign[0].info.run_id
    sides = (run_id, ours.run_id)
    for options in (
        # Both out of MLflow, or ours out of the store.
        ("--backend", uri),
        ("-d", tmp_path, "--reference-backend", uri),
    ):
        result = json.loads(call("compare", *sides, *options, "--json"))
        (diff,) = [each for each in result["metric_diffs"] if "loss" in each["metric_key"]]
        # One run a side: it ends worse, and nobody knows how far seeds lie apart.
        assert diff["verdict"] == "inconclusive"
        assert diff["last"]["difference"] > 0
        assert "loss" in call("compare", *sides, *options)
    call("compare", *sides, "-b", uri, "--fail-on-worse", code=3)


@pytest.mark.long
def test_a_run_is_exported_by_its_name(call, uri, foreign, tmp_path, count_changes):
    before = count_changes()
    target = tmp_path / "out"
    call("export", foreign[0].info.run_id, "--format", "jsonl", "-o", target, "--backend", uri)
    assert len((target / "metric.jsonl").read_text().splitlines()) == 201
    call("artifacts", foreign[0].info.run_id, "--backend", uri)
    assert count_changes() == before


@pytest.mark.long
def test_what_mlflow_does_not_have_is_said(call, uri, foreign):
    for command in ("show", "analyze", "artifacts"):
        with pytest.raises(RunNotFoundError, match="absent"):
            call(command, "absent", "--backend", uri)
