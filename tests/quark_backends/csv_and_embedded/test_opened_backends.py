"""`quark.open_run` with a backend in first place, and commands that read from one."""

import json

import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli
from quark_core.backends.registry import default_registry
from quark_core.errors import (
    QuarkError,
    RunNotFoundError,
    SchemaValidationError,
    UnknownBackendError,
)
from quark_core.testing.fakes import ScriptedBackend, define_scripted


@pytest.fixture
def mirrored(tmp_path, monkeypatch):
    """Two ended runs in a CSV folder, of which the store itself is gone from sight."""
    monkeypatch.chdir(tmp_path)
    place = f"csv:{tmp_path / 'mirror'}"
    for run_id, scale in (("run-a", 1.0), ("run-b", 4.0)):
        monkeypatch.setenv("QUARK_RUN_ID", run_id)
        with quark.start_run(
            project="vision",
            storage_dir=tmp_path / "store",
            backends=place,
            name=f"name of {run_id}",
            config={"lr": scale},
        ) as session:
            metrics = quark.MetricsLogger(session)
            for step in range(60):
                metrics.log("train/loss", scale / (step + 1), step=step)
            quark.ArtifactStore(session).log_table("note", {"a": [1]})
    monkeypatch.delenv("QUARK_RUN_ID")
    return place


def read_values(session):
    return [record.value for record in quark.MetricsLogger(session).read(metric_key="train/loss")]


def call(*arguments, code=0):
    result = CliRunner().invoke(cli, list(map(str, arguments)), env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.mark.long
def test_a_backend_may_come_first(mirrored, tmp_path, monkeypatch):
    expected = [1.0 / (step + 1) for step in range(60)]
    for session in (
        quark.open_run(mirrored, "run-a"),
        quark.open_run(f" {mirrored} ", "run-a"),
        quark.open_run("run-a", backend=mirrored),
        quark.open_run("run-a", tmp_path, backend=mirrored),
        quark.open_run(run_id="run-a", storage_dir=None, backend=mirrored),
    ):
        assert read_values(session) == expected
        assert session.run_id == "run-a"
    # By its name alone, the mirror in the run's own folder.
    monkeypatch.chdir(tmp_path / "store")
    with quark.start_run(project="p", backends="csv") as session:
        quark.MetricsLogger(session).log("train/loss", 2.0, step=0)
    opened = quark.open_run("csv", session.run_id)
    assert opened.context.backends == ("csv",)
    assert read_values(opened) == [2.0]


def test_a_run_that_is_named_like_a_backend_is_opened_from_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_RUN_ID", "csv")
    monkeypatch.chdir(tmp_path)
    with quark.start_run(project="p", storage_dir="store") as session:
        quark.MetricsLogger(session).log("train/loss", 2.0, step=0)
    for place in ("store", tmp_path / "store"):
        opened = quark.open_run("csv", place)
        assert (opened.run_id, read_values(opened)) == ("csv", [2.0])


@pytest.mark.parametrize(
    ("arguments", "keywords", "reason"),
    [
        (("csv:out",), {}, "run_id must follow the backend: open_run"),
        (("mlflow+http://127.0.0.1:9",), {}, "run_id must follow"),
        (("csv:out", None), {"backend": "csv:out"}, "backend is given twice"),
        (("csv:out", "run-a"), {"backend": "mlflow"}, "'csv:out' comes first"),
        (("csv:out", "a/b"), {}, "run_id may contain letters"),
        (("csv:out", ""), {}, "run_id must be a str of 1 to 128"),
        (("run-a", "mlflow+http://127.0.0.1:9"), {}, "storage_dir must be a folder"),
        ((7,), {"backend": "csv:out"}, "run_id must be a str"),
        (("run-a",), {"backend": " "}, "backend must be a backend name or URI"),
        (("deaf", "run-a"), {}, "deaf can be written to but not read"),
    ],
)
def test_contradictions_are_refused(tmp_path, monkeypatch, arguments, keywords, reason):
    deaf = define_scripted("deaf", ScriptedBackend())
    monkeypatch.setitem(default_registry()._definitions, "deaf", deaf)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SchemaValidationError, match=reason):
        quark.open_run(*arguments, **keywords)
    assert list(tmp_path.iterdir()) == []


def test_a_path_is_no_run_id(tmp_path):
    with pytest.raises(SchemaValidationError, match="run_id must follow the backend"):
        quark.open_run("csv:out", tmp_path)


def test_no_message_shows_a_password(tmp_path):
    uri = "mlflow+http://me:hidden@127.0.0.1:9"
    for arguments, keywords in (
        ((uri,), {}),
        ((uri, "run-a"), {"backend": uri}),
        (("run-a", uri), {}),
    ):
        with pytest.raises(QuarkError) as caught:
            quark.open_run(*arguments, **keywords)
        assert "hidden" not in str(caught.value)


@pytest.mark.long
def test_an_unknown_backend_and_an_unknown_run(mirrored):
    with pytest.raises(UnknownBackendError, match="nowhere"):
        quark.open_run("nowhere:out", "run-a")
    with pytest.raises(RunNotFoundError, match="run-z"):
        quark.open_run(mirrored, "run-z")


@pytest.mark.long
def test_runs_of_a_backend_are_listed_and_searched(mirrored):
    runs = json.loads(call("runs", "--backend", mirrored, "--json").stdout)
    assert [run["id"] for run in runs] == ["run-b", "run-a"]
    assert [run["last_loss"] for run in runs] == [4.0 / 60, 1.0 / 60]
    assert "name of run-a" in call("runs", "-b", mirrored).stdout
    wanted = ["--where", "config.lr > 2 and last(train/loss) < 1", "--sort", "train/loss"]
    (run,) = json.loads(call("runs", "-b", mirrored, "--json", *wanted).stdout)
    assert run["id"] == "run-b"


@pytest.mark.sampled
@pytest.mark.parametrize("run", ["run-a", "name of run-a"])
def test_a_run_of_a_backend_is_shown_and_analyzed(mirrored, tmp_path, run):
    shown = json.loads(call("show", run, "-b", mirrored, "--json").stdout)
    assert (shown["run"]["id"], shown["state"]) == ("run-a", "completed")
    assert [metric["count"] for metric in shown["metrics"]] == [60]
    text = call("show", run, "-b", mirrored).stdout
    assert "train/loss" in text
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    result = json.loads(call("analyze", run, "-b", mirrored, "--json").stdout)
    assert {score["score_key"] for score in result["health_scores"]} >= {"overall"}
    assert "no problem found" in call("analyze", run, "-b", mirrored).stdout.lower()
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before


@pytest.mark.long
def test_sides_of_a_comparison_come_from_anywhere(mirrored, tmp_path):
    both = json.loads(call("compare", "run-b", "run-a", "-b", mirrored, "--json").stdout)
    store = ["-d", tmp_path / "store"]
    one = json.loads(
        call(
            *("compare", "run-b", "run-a", *store, "--reference-backend", mirrored, "--json")
        ).stdout
    )
    for result in (both, one):
        (diff,) = [each for each in result["metric_diffs"] if each["metric_key"] == "train/loss"]
        # One run a side: the end is lower, and nobody knows how far seeds lie apart.
        assert diff["verdict"] == "inconclusive"
        assert diff["last"]["difference"] < 0
    assert "train/loss" in call("compare", "run-b", "run-a", "-b", mirrored).stdout


@pytest.mark.long
def test_artifacts_of_a_backend_are_listed_and_exported(mirrored, tmp_path):
    (record,) = json.loads(call("artifacts", "run-a", "-b", mirrored, "--json").stdout)
    assert record["artifact_key"] == "note"
    call("artifacts", "run-a", "-b", mirrored, "--output", tmp_path / "copied")
    (copied,) = [path for path in (tmp_path / "copied").rglob("*") if path.is_file()]
    assert json.loads(copied.read_text()) == {"columns": ["a"], "rows": [[1]]}
    said = call("export", "run-a", "--format", "csv", "-o", tmp_path / "out", "-b", mirrored).stdout
    assert f"--backend {mirrored}" in said
    assert len((tmp_path / "out" / "metric.csv").read_text().splitlines()) == 61


@pytest.mark.long
def test_a_run_that_a_backend_lacks_is_named(mirrored):
    for command in ("show", "analyze", "artifacts"):
        with pytest.raises(RunNotFoundError, match="run-z"):
            call(command, "run-z", "-b", mirrored)
