"""The examples run as they are, in a process and a folder of their own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quark

EXAMPLES = Path(__file__).parents[2] / "examples"
# Registers one more check with the example, as a broken installation would have it fail.
PLANTED = """
import runpy, sys
path = sys.argv.pop(1)
example = runpy.run_path(path)

@example["check"]("events")
def planted_check(folder):
    example["expect"](False, "planted failure")

sys.exit(example["main"]())
"""


@pytest.fixture
def run_python(tmp_path):
    """Runs Python with arguments in an empty folder."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("QUARK_")}
    # A busy machine may take longer than the default, which is then said on stderr.
    environment["QUARK_EXIT_TIMEOUT_SECONDS"] = "90"
    environment["QUARK_QUIET"] = "1"
    folder = tmp_path / "work"
    folder.mkdir()

    def run(*arguments, **variables):
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            cwd=folder,
            env={**environment, "PYTHONIOENCODING": "utf-8", "COLUMNS": "200", **variables},
            encoding="utf-8",
            timeout=200,
        )

    run.folder = folder
    return run


@pytest.mark.long
def test_the_lifecycle_example_interrupts_and_resumes_a_run(run_python):
    # What has ended must not be waited for, however long a wait would be allowed.
    done = run_python(EXAMPLES / "session_lifecycle.py", QUARK_EXIT_TIMEOUT_SECONDS="3600")
    assert (done.returncode, done.stderr) == (0, "")
    run_id = re.search(r"^started and interrupted: (\w+) \(interrupted\)$", done.stdout, re.M)[1]
    assert "values over both attempts: 11" in done.stdout
    assert "tags: baseline, example, recovered" in done.stdout
    events = re.search(r"^events: (.*)$", done.stdout, re.M)[1].split(", ")
    assert events == "run_started user_log run_ended run_resumed user_log run_ended".split()
    session = quark.open_run(run_id, run_python.folder / "quark-runs")
    assert (session.status, session.context.run.resume_count) == ("completed", 1)
    assert [r.attempt for r in quark.MetricsLogger(session).read()] == [0] * 10 + [1]
    assert f"the run lies in {session.run_path}" in done.stdout


@pytest.mark.long
def test_the_lifecycle_example_takes_a_folder(run_python, tmp_path):
    done = run_python(EXAMPLES / "session_lifecycle.py", tmp_path / "own")
    assert done.returncode == 0
    assert (tmp_path / "own" / ".quark" / "quark.db").is_file()
    assert list(run_python.folder.iterdir()) == []


@pytest.mark.long
def test_the_tracker_example_logs_to_everything(run_python):
    done = run_python(EXAMPLES / "tracker_multiplexer.py")
    assert (done.returncode, done.stderr) == (0, "")
    folder = run_python.folder / "tracked"
    assert (folder / "metrics.csv").read_text().splitlines()[:2] == [
        "step,lr,loss,ok",
        "0,0.0003,1.0,1.0",
    ]
    assert (folder / "confusion.csv").read_text() == "class,hits\ncat,41\ndog,9\n"
    assert json.loads((folder / "config.json").read_text()) == {
        "lr": 3e-4,
        "steps": 50,
        "model": "resnet18",
    }
    run_id = re.search(r"^quark: 50 losses of run (\w+)$", done.stdout, re.M)[1]
    session = quark.open_run(run_id, folder)
    (code,) = quark.ArtifactStore(session).read(artifact_type="file")
    assert code.artifact_key == "code/tracker_multiplexer.py"
    assert "jsonl: 101 lines" in done.stdout


@pytest.mark.long
def test_the_tracker_example_does_nothing_where_it_is_told_to(run_python):
    done = run_python(EXAMPLES / "tracker_multiplexer.py", QUARK_TRACKER_BACKENDS="none")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list((run_python.folder / "tracked").iterdir()) == []


@pytest.mark.long
def test_the_smoke_tests_pass_and_leave_nothing_behind(run_python):
    done = run_python(EXAMPLES / "smoke_tests.py")
    assert (done.returncode, done.stderr) == (0, "")
    *checks, last = done.stdout.splitlines()
    assert last == "Quark works here."
    assert {line.split()[0] for line in checks} == {
        *("imports", "session", "metrics", "events", "backends", "faults")
    }
    assert all(line.endswith(" ok") for line in checks)
    assert list(run_python.folder.iterdir()) == []


@pytest.mark.long
def test_a_group_of_smoke_tests_can_be_chosen(run_python):
    done = run_python(EXAMPLES / "smoke_tests.py", "imports", "events")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["imports", "events", "Quark"]


@pytest.mark.long
def test_a_failing_check_is_shown_and_makes_the_smoke_tests_fail(run_python):
    done = run_python("-c", PLANTED, EXAMPLES / "smoke_tests.py", "events", "imports")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert re.search(r"^events +planted check +FAILED$", done.stdout, re.M)
    assert "AssertionError: planted failure" in lines
    assert lines[-1] == "1 failed"
    assert lines[-2].startswith("imports")
    assert lines[-2].endswith(" ok")


def test_an_unknown_group_of_smoke_tests_is_refused(run_python):
    done = run_python(EXAMPLES / "smoke_tests.py", "imports", "absent")
    assert done.returncode == 2
    assert done.stdout.startswith("unknown group absent; there are imports, session")


@pytest.mark.long
def test_the_demo_trains_and_leaves_a_run_that_can_be_read(run_python):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    done = run_python(EXAMPLES / "train_digits.py", "--epochs", "2", "--backends", "csv")
    assert (done.returncode, done.stderr) == (0, "")
    folder = run_python.folder
    (run_path,) = (folder / ".quark" / "runs").iterdir()
    session = quark.open_run(run_path.name, folder)
    assert f"See it again with: quark runs, quark show {session.run_id[:6]}" in done.stdout
    assert "Best validation accuracy 0." in done.stdout

    assert (session.status, session.project_name) == ("completed", "digits")
    assert session.context.run.tags == ("demo", "mlp")
    config = session.open_run.reader.load_run(session.run_id).config.values
    assert (config["epochs"], config["batch_size"], config["backends"]) == (2, 64, "csv")

    metrics = quark.MetricsLogger(session)
    steps = 2 * 22
    for key in ("train/loss", "train/accuracy", "optimizer/lr"):
        records = metrics.read(metric_key=key)
        assert [record.step for record in records] == list(range(steps))
        assert [record.epoch for record in records] == [0] * 22 + [1] * 22
        assert f" {key} " in done.stdout
    losses = [record.value for record in metrics.read(metric_key="train/loss")]
    assert sum(losses[-5:]) < sum(losses[:5])
    rates = [record.value for record in metrics.read(metric_key="optimizer/lr")]
    assert rates[0] == 3e-3
    assert rates == sorted(rates, reverse=True)
    for key in ("val/loss", "val/accuracy"):
        assert [record.step for record in metrics.read(metric_key=key)] == [21, 43]
    assert metrics.read(metric_key="val/accuracy")[-1].value > 0.5

    events = quark.EventLogger(session).read()
    types = [event.event_type for event in events]
    assert (types[0], types[-1], types.count("user_log")) == ("run_started", "run_ended", 2)
    best = [event for event in events if event.event_type == "best_accuracy"]
    assert best[0].step == 21
    assert set(best[0].payload) == {"val/loss", "val/accuracy"}
    assert len((run_path / "csv" / "metrics.csv").read_text().splitlines()) == steps + 1


@pytest.mark.long
def test_the_telemetry_example_says_where_the_time_went(run_python):
    done = run_python(EXAMPLES / "runtime_telemetry.py", "--steps", "12")
    assert done.returncode == 0, done.stderr
    share = re.search(r"^12 steps, (\d+) % of the time in data$", done.stdout, re.MULTILINE)
    assert share is not None
    (run,) = quark.search_runs(storage_dir=run_python.folder)
    session = quark.open_run(run.run_id, storage_dir=run_python.folder)
    records = quark.SystemTelemetry(session).read(boundary="step")
    assert [record.step for record in records] == list(range(12))
    # The first step takes as long as the machine is busy, beside which the data may be nothing.
    assert all(0 < record.data_time_ms <= record.step_time_ms for record in records)
    data_ms, step_ms = (
        sum(getattr(record, field) for record in records)
        for field in ("data_time_ms", "step_time_ms")
    )
    assert int(share[1]) == pytest.approx(100 * data_ms / step_ms, abs=0.51)


@pytest.mark.long
def test_the_artifact_example_stores_and_loads(run_python):
    done = run_python(EXAMPLES / "store_artifacts.py")
    assert done.returncode == 0, done.stderr
    assert "checkpoint: (10000,)" in done.stdout
    (place,) = re.findall(r"^the file lies in (.+)$", done.stdout, re.MULTILINE)
    assert Path(place).is_file()


@pytest.mark.long
def test_the_batch_example_finds_the_wrong_labels(run_python):
    done = run_python(EXAMPLES / "batch_diagnostics.py")
    assert done.returncode == 0, done.stderr
    found = set(re.findall(r"^hard: batch (\d+),", done.stdout, re.MULTILINE))
    assert found == {"5", "17"}


@pytest.mark.long
def test_the_instrumented_network_shows_its_layers_and_updates(run_python):
    done = run_python(EXAMPLES / "instrument_digits.py", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^ +(\d) (\w+) +std", done.stdout, re.MULTILINE)
    ratios = re.findall(r"update over parameter (\S+)$", done.stdout, re.MULTILINE)
    assert len(ratios) == 6
    assert all(0 < float(ratio) < 1 for ratio in ratios)


@pytest.mark.long
def test_the_transformer_example_watches_ten_million_parameters(run_python):
    done = run_python(
        EXAMPLES / "train_transformer.py", "--steps", "3", "--every", "2", "--batch-size", "1"
    )
    assert done.returncode == 0, done.stderr
    assert "10.9 million parameters" in done.stdout
    (run,) = quark.search_runs(storage_dir=run_python.folder)
    session = quark.open_run(run.run_id, storage_dir=run_python.folder)
    # The first is measured while the model is made.
    assert quark.SystemTelemetry(session).read()[0].step in (None, 0)


@pytest.mark.long
def test_the_ddp_example_writes_one_run_from_rank_zero(run_python):
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    done = run_python(*launch, EXAMPLES / "train_ddp.py", "--steps", "12", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout
    assert "layers: 0, 1, 2" in done.stdout
    (run,) = quark.search_runs(storage_dir=run_python.folder)
    assert run.metrics["train/loss"].count == 12


@pytest.mark.long
def test_the_analyzer_example_tells_the_broken_run_from_the_steady_one(run_python):
    done = run_python(EXAMPLES / "analyzer_diagnostics.py")
    assert done.returncode == 0, done.stderr
    steady, fast = re.split(r"^too-fast \(\w+\)$", done.stdout, flags=re.M)
    assert re.search(r"^  overall +100\.0 healthy", steady, re.M)
    assert "exploding_gradients at" in fast
    assert "phases: initialization_adaptation" in fast
    assert "config highest_rate: 0.05 -> 20.0" in fast
    # One run a side: it ends worse, and nobody knows how far seeds lie apart.
    ends = re.search(r"val/loss: (\S+) -> (\S+), inconclusive with 1 run", fast)
    assert float(ends[2]) > 2 * float(ends[1])


@pytest.mark.long
def test_the_example_of_why_names_each_change_and_accuses_nobody_of_a_seed(run_python):
    done = run_python(EXAMPLES / "why_it_changed.py")
    assert done.returncode == 0, done.stderr
    seed, rate, targets = done.stdout.split("--- ")[1:]
    assert seed.startswith("another seed: no_difference")
    assert "Probably" not in seed
    assert re.search(r"^Probably +config +rate  0\.05 -> 0\.001", rate, re.M)
    assert re.search(r"^Probably +data +points", targets, re.M)


@pytest.mark.long
def test_the_example_of_a_sweep_stops_some_trials_and_goes_on_where_it_was(run_python):
    done = run_python(EXAMPLES / "sweep_digits.py", "--trials", 6)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^best: StoredTrial\(\d, completed, 0\.\d+, lr=\S+ width=", done.stdout, re.M)
    with quark.sweep("digits", project="digits", storage_dir=run_python.folder) as sweep:
        before = sweep.trials()
        assert {each.state for each in before} <= {"completed", "pruned"}
        assert len(before) == 6
        assert sweep.best.values[0] > 0.5
    more = run_python(EXAMPLES / "sweep_digits.py", "--trials", 7)
    assert more.returncode == 0, more.stderr
    with quark.sweep("digits", project="digits", storage_dir=run_python.folder) as sweep:
        assert sweep.trials()[:6] == before
        assert len(sweep.trials()) == 7


@pytest.mark.long
def test_the_gallery_finds_each_mistake_by_its_alert(run_python):
    # Without the one whose alert is of times, which a busy machine has by itself.
    names = (
        "exploding_gradients vanishing_gradients stagnant_layers activation_collapse"
        " overfitting_onset non_finite_values plateau"
    ).split()
    done = run_python(EXAMPLES / "broken_trainings.py", *names)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^ > \w+ +(\w+)", done.stdout, re.M)
    assert found == names
    wrong = run_python(EXAMPLES / "broken_trainings.py", "nonsense")
    assert wrong.returncode == 2
    assert "there is no nonsense" in wrong.stderr
