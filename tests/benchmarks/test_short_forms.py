"""The long campaigns in short: they run, and what must be zero is zero."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

# What measures a busy machine takes as long as that lets it.
pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_hot_path(measure):
    figures = measure("benchmarks/hot_path.py")
    assert figures["one scalar, tight, p50 us"] > 0
    assert figures["one scalar, tight, without the black box, p50 us"] > 0


@pytest.mark.long
def test_call_counts(tmp_path):
    target = tmp_path / "figures.json"
    script = ROOT / "benchmarks/call_counts.py"
    done = subprocess.run(
        [sys.executable, script, "read", "runs", "log", "--list", "--json", target],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(target.read_text())
    assert all(functions > files > 10 for functions, files in figures.values())
    # The call, the tick of the delivery thread, the row of the lane; no bodies of modules.
    for name in ("MetricsLogger.log", "RunStream._tick", "BatchIngest.write"):
        assert re.search(rf"^ +\d+ {name}$", done.stdout, re.MULTILINE)
    assert "<module>" not in done.stdout
    assert not re.search(r" MetricsLogger$", done.stdout, re.MULTILINE)


@pytest.mark.long
def test_store(measure):
    figures = measure("benchmarks/store.py")
    assert figures["series"]["spike missed"] == 0
    assert figures["series"]["curves"] > 0
    kills = figures["kills"]
    assert kills["kills"] == 10
    assert kills["points in the end"] > 0
    assert kills["reads by another process meanwhile"] > 0
    wrong = (
        "points lost",
        "points duplicated",
        "points with another value",
        "integrity_check or foreign_key_check failed",
        "reads with another total",
    )
    assert {name: kills[name] for name in wrong} == dict.fromkeys(wrong, 0)
    backlog = figures["backlog"]
    assert backlog["points not in the curve"] == 0
    assert backlog["memory of the reader then, MB"] <= 300
    for row in figures["growth"]:
        assert row["points"] == row["points read"] == row["points of the curve"]


@pytest.mark.long
def test_kill(measure):
    figures = measure("benchmarks/durability.py", "kill")
    (whole,) = [row for row in figures["kill"] if row["loop"] == "all"]
    assert (whole["kills"], whole["logged"] > 0) == (12, True)
    wrong = ("lost", "twice", "told as lost", "told too little", "CSV differs", "left waiting")
    assert {name: whole[name] for name in wrong} == dict.fromkeys(wrong, 0)


@pytest.mark.long
def test_outage(measure):
    figures = measure("benchmarks/durability.py", "outage")["outage"]
    assert [row["phase"] for row in figures["phases"]][:2] == ["before", "outage"]
    assert len(figures["deliveries"]) == 3
    for backend in figures["deliveries"]:
        assert backend["logged"] == backend["stored"] > 0
        assert (backend["missing"], backend["duplicated"]) == (0, 0)


@pytest.mark.long
def test_full_disk(measure):
    cases = measure("benchmarks/durability.py", "disk-full")["disk-full"]
    if not cases:
        pytest.skip("no small file system can be mounted here")
    for case in cases:
        assert case["full for s"] > 0
        assert case["logged"] > 0
        assert case["missing"] == case["told as gaps"] == case["dropped in report"]
        rest = ("exceptions", "waiting", "duplicated", "CSV differs")
        assert [case[name] for name in rest] == [0, 0, 0, 0]
    assert cases[0]["missing"] == 0


@pytest.mark.long
def test_writers(measure):
    figures = measure("benchmarks/writers.py")
    assert {row["what"] for row in figures["steps"]} == {
        "telemetry, cadence 1",
        "telemetry, cadence 10",
        "telemetry with rates, cadence 1",
        "log_batch",
    }
    assert all(row["step ms"] > 0 for row in figures["steps"])
    (large,) = figures["large"]
    assert large["equal"]
    assert large["peak MB"] < 200
    (many,) = figures["many"]
    assert many["listed"] == many["loaded right"] == 2 * many["artifacts"] > 0
    (kills,) = figures["kills"]
    assert (kills["kills"], kills["lost"], kills["wrong hash"]) == (5, 0, 0)
    assert kills["listed"] == kills["loaded"] > 0


@pytest.mark.long
def test_instrumentation(measure):
    figures = measure("benchmarks/instrumentation.py")
    models = {row["model"] for row in figures["steps"]}
    assert models == {"mlp", "conv", "transformer", "mlp, compiled"}
    assert all(row["step ms"] > 0 for row in figures["steps"])
    assert figures["statistics"]
    assert [row["size"] for row in figures["reductions"]["tensors"]] == ["16 KB", "256 KB"]
    assert all(row["ms"] > 0 for row in figures["reductions"]["parameters"])


@pytest.mark.long
@pytest.mark.parametrize("benchmark", ["instrumentation.py", "writers.py"])
def test_without_a_device_its_figures_are_left_out_and_that_is_said(benchmark, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = subprocess.run(
        [sys.executable, f"benchmarks/{benchmark}", "--device", "cuda"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "skipped on cuda: PyTorch" in done.stdout
    assert "finds no CUDA device here" in done.stdout


@pytest.mark.long
def test_service(measure):
    figures = measure("benchmarks/service.py", "reading", "idle")
    for store in ("SQLite", "PostgreSQL"):
        assert figures["reading"][f"{store}, a curve of 2,000, ms"] > 0
        assert figures["idle"][f"{store}, the server alone, MB"] > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("parts", "rows"),
    [
        ("bytes key", {12, 13}),
        pytest.param("kill postgres replies runs journals", {2, 11, 20}, marks=pytest.mark.long),
    ],
)
def test_faults_of_the_service(measure, parts, rows):
    tallies = measure("benchmarks/service_faults.py", *parts.split())
    assert {tally["row"] for tally in tallies} == rows
    for tally in tallies:
        assert tally["times"] > 0, tally
        assert tally["batches"] == tally["acknowledged"] > 0, tally
        assert (tally["lost"], tally["doubled"]) == (0, 0), tally


@pytest.mark.long
def test_five_backends(measure):
    pytest.importorskip("mlflow")
    pytest.importorskip("flask", reason="only the full MLflow has a server")
    figures = measure("benchmarks/mirrors.py")
    backends = {"embedded", "mlflow", "wandb", "csv", "tensorboard"}
    for part in ("points", "kills"):
        assert {tally["backend"] for tally in figures[part]} == backends
        for tally in figures[part]:
            assert tally["points"] > 0, tally
            wrong = ("lost", "unknown", "doubled", "other", "differs")
            assert {name: tally[name] for name in wrong} == dict.fromkeys(wrong, 0), tally
    ways = {row["logging by"] for row in figures["cost"]}
    assert {"embedded", "five backends", "mlflow.log_metrics", "wandb.log, offline"} <= ways
    assert all(row["step ms p50"] > 0 for row in figures["cost"])


@pytest.mark.long
def test_analysis_cost(measure):
    figures = measure("benchmarks/analysis_cost.py")
    assert figures["analyze 100,000 points, s"] > 0
    assert figures["a look after 100,000 points, s"] > 0


@pytest.mark.long
def test_page(measure):
    figures = measure("benchmarks/page.py", "size", "live", "compare", "report")
    assert figures["5 runs of 100,000 points: their curves again, ms"] > 0
    assert 0 < figures["its size without data, kB"] <= 350
    assert 0 < figures["the page's files, as in a wheel, MB"] < 3
    # Without a browser nobody watches.
    for rate in ("100", "2,000"):
        assert figures.get(f"{rate} points/s: lag to the drawn chart, p50, s", 1) > 0


@pytest.mark.long
def test_importing(measure):
    figures = measure("benchmarks/importing.py")
    assert figures["points taken"] == figures["points"] > 0
    assert figures["points that differ from TensorBoard's"] == 0
    assert figures["points taken again"] == 0


@pytest.mark.long
def test_comparison_cost(measure):
    (size,) = measure("benchmarks/comparison_cost.py")["size"]
    assert size["stored s"] > 0
