"""What a tracker's calls come to in MLflow, by MLflow's own client."""

import json
import logging
import urllib.request
from pathlib import Path

import pytest

import quark
from quark_backends.mlflow.client import _find_pages
from quark_core.backends.registry import default_registry


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch, server):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "60")
    for name in ("MLFLOW_EXPERIMENT_NAME", "RANK", "SLURM_PROCID", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert "mlflow" in default_registry().names


@pytest.mark.long
def test_config_table_image_and_files_are_in_mlflow(
    tmp_path, project, client, find_runs, list_paths, fetch, history
):
    pil = pytest.importorskip("PIL.Image")
    pil.new("RGB", (3, 2), (255, 0, 0)).save(tmp_path / "i.png")
    (tmp_path / "report.md").write_text("# done")
    (tmp_path / "logs" / "deep").mkdir(parents=True)
    (tmp_path / "logs" / "deep" / "a.txt").write_text("a")
    with quark.setup_tracker(
        project, "mlflow", config={"lr": 0.1, "model": {"depth": 2}}, outdir="out", name="n"
    ) as tracker:
        for step in range(3):
            tracker.log({"loss": 1.0 / (step + 1)}, step=step)
        tracker.log_config({"seed": 3})
        tracker.log_table("eval/preds", ["id", "text"], [[1, "a,b"], [2, None]])
        tracker.log_image("samples", "i.png", caption="first")
        tracker.log_artifacts({"Report": "report.md", "logs": "logs"})
    (run,) = find_runs()
    assert run.data.params == {"lr": "0.1", "model.depth": "2", "seed": "3"}
    assert [step for step, *_ in history(run.info.run_id, "loss")] == [0, 1, 2]
    assert (run.info.run_name, run.info.status) == ("n", "FINISHED")
    paths = list_paths()

    def find(start, ending):
        (path,) = [p for p in paths if p.startswith(start) and p.endswith(ending)]
        return fetch(path)

    assert json.loads(find("eval/preds", ".json")) == {
        "columns": ["id", "text"],
        "data": [[1, "a,b"], [2, None]],
    }
    assert find("images/samples", ".png") == (tmp_path / "i.png").read_bytes()
    assert find("Report", ".md") == b"# done"
    assert find("logs", ".txt") == b"a"


@pytest.mark.long
def test_an_experiment_is_named_as_the_project_is(project, find_runs):
    with quark.setup_tracker(f"{project}.examples.vit", "mlflow", outdir="out") as tracker:
        tracker.log({"loss": 0.5})
    assert len(find_runs(f"{project}.examples.vit")) == 1


@pytest.mark.long
def test_the_page_of_the_run_is_known_and_told_once(server, project, find_runs, caplog):
    with caplog.at_level(logging.INFO, logger="quark"):
        tracker = quark.setup_tracker(project, "mlflow", outdir="out")
        assert tracker.mlflow_run.experiment == project
        tracker.log({"loss": 0.5})
        tracker.finish()
    (run,) = find_runs()
    seen = tracker.mlflow_run
    page = f"{server.uri}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    assert (seen.id, seen.url, seen.tracking_uri) == (run.info.run_id, page, server.uri)
    assert tracker.get_backend("mlflow").run_url == page
    told = [text for text in caplog.messages if page in text]
    assert told == [f"backend mlflow: run {tracker.run_id} is at {page}"]
    with urllib.request.urlopen(page, timeout=30) as reply:
        assert reply.status == 200
    # As it stands in a session of another kind of URI.
    again = quark.resume_run(
        run_id=tracker.run_id,
        storage_dir="out",
        backends=f"mlflow:{server.uri}?layers=3",
        reopen=True,
    )
    again.end_run()
    assert len(find_runs()) == 1


@pytest.mark.long
def test_the_environment_sends_the_run_to_another_experiment(project, find_runs, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", f"{project} & elsewhere")
    with quark.setup_tracker(project, "mlflow", outdir="out", description="About.") as tracker:
        tracker.log({"loss": 0.5})
    assert find_runs() == []
    (run,) = find_runs(f"{project} & elsewhere")
    assert run.data.tags["quark.project"] == tracker.session.project_name == project
    assert run.data.tags["mlflow.note.content"] == "About."
    opened = quark.open_run("mlflow", tracker.run_id)
    assert (opened.run_id, opened.project_name) == (tracker.run_id, project)
    reader = opened.open_run.reader
    found = reader.list_runs(project=f"{project} & elsewhere")
    assert [stored.run.id for stored in found] == [tracker.run_id]


@pytest.mark.long
def test_a_run_of_a_thousand_points_of_which_mlflow_refuses_one(
    server, project, find_runs, history
):
    session = quark.start_run(project=project, storage_dir="out", backends="mlflow:?quark=full")
    metrics = quark.MetricsLogger(session)
    for step in range(1000):
        # MLflow takes no time before 1970.
        when = {"timestamp": "1969-12-31T23:59:55Z"} if step == 613 else {}
        metrics.log("m", float(step), step=step, **when)
    assert len(metrics.read(metric_key="m")) == 1000
    session.end_run()
    (run,) = find_runs()
    there = [step for step, *_ in history(run.info.run_id, "m")]
    assert there == [step for step in range(1000) if step != 613]
    assert run.info.status == "FINISHED"
    (lane,) = [one for one in session.report_delivery().lanes if not one.primary]
    assert lane.waiting == 0
    path = session.run_path / "quarantine" / "mlflow" / "refused-records.jsonl"
    (line,) = path.read_text().splitlines()
    assert "613" in line
    assert "timestamp" in line
    # Among the artifacts it is all the same, and so is read back.
    opened = quark.MetricsLogger(quark.open_run(f"mlflow:{server.uri}?quark=full", session.run_id))
    assert len(opened.read(metric_key="m")) == 1000


@pytest.mark.parametrize(
    ("uri", "pages"),
    [
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("https://me:secret@mlflow.example.org/base/?x=1", "https://mlflow.example.org/base"),
        ("HTTPS://[::1]:5000/", "https://[::1]:5000"),
        ("sqlite:////data/runs.db", None),
        ("file:///data/mlruns", None),
        ("./mlruns", None),
        ("databricks", None),
        ("http://[broken", None),
    ],
)
def test_only_a_server_has_pages(uri, pages):
    assert _find_pages(uri) == pages


@pytest.mark.long
def test_a_model_is_watched_and_reaches_mlflow(project, find_runs):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with quark.setup_tracker(project, "mlflow", outdir="out") as tracker:
        tracker.watch(model, optimizer=optimizer, log_freq=1, telemetry=False)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).pow(2).mean()
            loss.backward()
            optimizer.step()
            tracker.log({"loss": loss.detach()}, step=step)
    (run,) = find_runs()
    names = set(run.data.metrics)
    assert any(name.startswith("params_stats/weight/") for name in names), names
    assert not [path for path in Path.cwd().iterdir() if path.name not in ("out", "server")]
