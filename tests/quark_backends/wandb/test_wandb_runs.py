"""Whole runs through real W&B, offline."""

import json
import math
import os
import subprocess
import sys
import textwrap
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import msgspec
import psutil
import pytest

import quark
from quark_core.records.names import encode_name
from quark_core.system.process import ProcessIdentity, is_alive

if find_spec("wandb") is None:
    pytest.skip("needs wandb", allow_module_level=True)


def as_text(points):
    return Counter((step, repr(float(value))) for step, value in points)


def expect(records, key):
    return Counter((r.step, repr(r.value)) for r in records if r.metric_key == encode_name(key))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:metric .* breaks Quark's naming rule:RuntimeWarning")
def test_every_point_is_there_once(start, read_mirror):
    names = ["train/loss", "val/AR@100", "top 5 %", "Verlust/größe", "损失", "a.b", "a:b", "_step"]
    with start() as session:
        metrics = quark.MetricsLogger(session)
        for index in range(300):
            for position, name in enumerate(names):
                value = (math.nan, math.inf, -math.inf, 0.1, -0.0, 1e300, 3)[(index + position) % 7]
                metrics.log(name, value, step=(index * 7) % 100)
        metrics.log("by_epoch", 1.0, epoch=3)
        records = metrics.read(include_non_finite=True)
    mirrored = read_mirror(session.run_path)
    assert len(records) == 300 * len(names) + 1
    for name in names:
        theirs = "key_step" if name == "_step" else name
        assert as_text(mirrored.points(theirs)) == expect(records, name), name
    assert [row["quark/epoch"] for row in mirrored.rows if "by_epoch" in row] == [3]
    assert session.report_delivery().complete


@pytest.mark.long
def test_metrics_of_a_step_are_one_row(start, read_mirror):
    with start() as session:
        metrics = quark.MetricsLogger(session)
        for step in range(20):
            metrics.log_many({"loss": 1.0 / (step + 1), "lr": 0.1}, step=step)
    rows = [row for row in read_mirror(session.run_path).rows if "loss" in row]
    assert [(row["quark/step"], row["lr"]) for row in rows] == [(step, 0.1) for step in range(20)]
    assert [row["quark/attempt"] for row in rows] == [0] * 20


@pytest.mark.long
def test_steps_are_an_axis_and_never_filled_in(start, read_mirror):
    with start() as session:
        metrics = quark.MetricsLogger(session)
        for step in (10, 5, 6, 7):
            metrics.log("m", float(step), step=step)
        metrics.log("e", 1.0, epoch=2)
    mirrored = read_mirror(session.run_path)
    assert sorted(mirrored.points("m")) == [(5, 5), (6, 6), (7, 7), (10, 10)]
    assert [row["quark/epoch"] for row in mirrored.rows if "e" in row] == [2]
    metrics = {each.name or each.glob_name: each for each in mirrored.of("metric")}
    assert not metrics["e"].options.step_sync
    assert metrics["quark/step"].options.hidden
    assert metrics["e"].step_metric == "quark/epoch"


@pytest.mark.long
@pytest.mark.parametrize(
    ("status", "code"), [("completed", 0), ("failed", 1), ("interrupted", 130)]
)
def test_exit_codes(start, read_mirror, status, code):
    session = start()
    session.end_run(status)
    mirrored = read_mirror(session.run_path)
    assert mirrored.exit_codes == [code]
    assert not mirrored.of("preempting")


@pytest.mark.long
@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_of_the_process_is_told(start, read_mirror, code):
    with pytest.raises(SystemExit), start() as session:
        raise SystemExit(code)
    # An exit out of a session is an interruption, whatever its code says.
    assert read_mirror(session.run_path).exit_codes == [code or 130]


@pytest.mark.long
def test_sigterm_is_told_apart_and_marks_the_run_as_preempted(tmp_path, read_mirror):
    script = """
        import os, signal, sys, time
        import quark
        from quark_core.backends.registry import default_registry
        from quark_backends.wandb.plugin import quark_register_backends
        default_registry()._definitions.setdefault("wandb", quark_register_backends()[0])
        session = quark.start_run(project="vision", backends="wandb")
        quark.MetricsLogger(session).log("m", 1.0, step=1)
        print(session.run_path, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
    """
    (tmp_path / "job.py").write_text(textwrap.dedent(script))
    first = subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    assert first.returncode == -15, first.stderr
    run_path = tmp_path / ".quark" / "runs" / os.path.basename(first.stdout.strip())
    again = _sync(tmp_path)
    mirrored = read_mirror(run_path)
    assert mirrored.points("m") == [(1, 1)], again
    assert mirrored.exit_codes[-1] == 143
    assert len(mirrored.of("preempting")) == 1


def _sync(storage_dir):
    """What `quark sync` does, again until nothing waits."""
    import time

    from quark_core.runs import recovery

    deadline = time.monotonic() + 200
    while True:
        found = recovery.sync(storage_dir)
        if all(lane.state == "delivered" for lane in found) or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


@pytest.mark.long
def test_config_tags_and_names(start, read_mirror):
    config = {"lr": 0.1, "model": {"depth": 2}, "_hidden": 1}
    session = start(
        "wandb:team/other?job_type=train&tags=x;y",
        config=config,
        tags=["a", "b" * 100],
        name="first",
        notes="Notes.",
    )
    session.add_tag("late")
    session.end_run()
    mirrored = read_mirror(session.run_path)
    assert mirrored.config["lr"] == 0.1
    assert mirrored.config["model"] == {"depth": 2}
    assert mirrored.config["key_hidden"] == 1
    assert mirrored.config["quark_run"]["run_id"] == session.run_id
    run = mirrored.of("run")[-1]
    assert (run.run_id, run.project, run.entity) == (session.run_id, "other", "team")
    assert run.job_type == "train"
    assert (run.display_name, run.notes) == ("first", "Notes.")
    assert set(run.tags) == {"a", "b" * 64, "x", "y", "late"}


@pytest.mark.long
def test_tags_name_the_group_and_the_job_type(start, read_mirror):
    start(tags=["group:baselines", "job_type=eval", "plain"]).end_run()
    chosen = start("wandb:?group=mine", tags=["group:baselines"])
    chosen.end_run()
    runs = [read_mirror(path).of("run")[-1] for path in sorted(chosen.run_path.parent.iterdir())]
    found = {(run.run_group, run.job_type) for run in runs}
    assert found == {("baselines", "eval"), ("mine", "")}
    assert {tag for run in runs for tag in run.tags} == {
        "group:baselines",
        "job_type=eval",
        "plain",
    }


@pytest.mark.long
def test_a_child_run_is_in_the_group_of_its_lineage(start, read_mirror):
    parent = start()
    parent.end_run()
    child = start(parent_run_id=parent.run_id)
    child.end_run()
    assert {run.run_group for run in read_mirror(child.run_path).of("run")} == {parent.run_id}
    assert {run.run_group for run in read_mirror(parent.run_path).of("run")} == {""}


@pytest.mark.long
def test_a_resumed_run_goes_on_under_its_id(start, read_mirror, tmp_path):
    session = start(config={"lr": 0.1})
    quark.MetricsLogger(session).log("m", 1.0, step=1)
    session.end_run("failed")
    again = quark.resume_run(run_id=session.run_id, storage_dir=tmp_path, backends="wandb")
    quark.MetricsLogger(again).log("m", 2.0, step=2)
    again.end_run()
    mirrored = read_mirror(session.run_path)
    assert mirrored.points("m") == [(1, 1), (2, 2)]
    assert [row["quark/attempt"] for row in mirrored.rows if "m" in row] == [0, 1]
    # One folder has all of it, whatever number of processes there was.
    assert len(mirrored.paths) == 1
    (folder,) = mirrored.paths[0].parent.parent.glob("offline-run-*")
    assert (folder.parent / "latest-run").resolve() == folder
    assert mirrored.exit_codes == [0]
    assert {run.run_id for run in mirrored.of("run")} == {session.run_id}
    assert mirrored.config["quark_run"]["attempt"] == 1


@pytest.mark.long
def test_the_summary_has_what_was_annotated_and_the_best_of_the_objective(
    start, read_mirror, tmp_path
):
    session = start(objective="val/acc", mode="max")
    metrics = quark.MetricsLogger(session)
    for step, value in enumerate((0.5, 0.9, math.nan, 0.7)):
        metrics.log("val/acc", value, step=step)
    session.annotate({"gpu": "V100", "val/acc": 1, "final": {"f1": 0.8}})
    session.end_run("failed")
    summary = read_mirror(session.run_path).summary
    assert summary["gpu"] == "V100"
    assert summary["final"] == {"f1": 0.8}
    assert (summary["val/acc"], summary["field/val/acc"]) == (0.7, 1)
    assert (summary["quark/best/val/acc"], summary["quark/best_step/val/acc"]) == (0.9, 1)
    # What the run goes back behind no longer counts.
    again = quark.resume_run(
        run_id=session.run_id, storage_dir=tmp_path, backends="wandb", from_step=1
    )
    quark.MetricsLogger(again).log("val/acc", 0.6, step=1)
    again.end_run()
    summary = read_mirror(session.run_path).summary
    assert (summary["quark/best/val/acc"], summary["quark/best_step/val/acc"]) == (0.6, 1)


@pytest.mark.long
@pytest.mark.skipif(
    not os.path.exists("/proc/self/autogroup"), reason="cores are not shared by session here"
)
def test_w_and_bs_own_process_lets_training_go_first(start, deliver):
    session = start()
    quark.MetricsLogger(session).log("loss", 1.0, step=0)
    deliver(session)
    (own,) = session.run_path.rglob("worker.json")
    worker = psutil.Process(json.loads(own.read_bytes())["pid"])
    for process in (worker, *worker.children()):
        assert process.nice() == min(19, psutil.Process().nice() + 10)
        said = Path(f"/proc/{process.pid}/autogroup").read_text()
        assert said.split()[-2:] == ["nice", "10"], process.cmdline()
    assert worker.children()
    session.end_run()


@pytest.mark.long
def test_no_temporary_folder_is_left(start, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with start() as session:
        metrics = quark.MetricsLogger(session)
        for step in range(10):
            metrics.log("loss", 1.0, step=step)
    (own,) = session.run_path.rglob("worker.json")
    worker = msgspec.json.decode(own.read_bytes(), type=ProcessIdentity)
    deadline = time.monotonic() + 60
    # W&B's own process removes its folder a moment after ours has ended.
    while is_alive(worker) or list(temporary.iterdir()):
        assert time.monotonic() < deadline, list(temporary.iterdir())
        time.sleep(0.02)
    assert not list(session.run_path.rglob("scratch"))


@pytest.mark.long
def test_names_of_w_and_b_only(start, read_mirror):
    with start("wandb:?names=strict") as session:
        metrics = quark.MetricsLogger(session)
        for name in ("train/loss", "train_loss", "1st", "plain"):
            metrics.log(name, 1.0, step=1)
    keys = {key for key in read_mirror(session.run_path).keys if not key.startswith("quark")}
    assert {"train_loss", "key_1st", "plain"} < keys
    (other,) = [key for key in keys if key.startswith("train_loss_")]
    assert len(other) == len("train_loss_") + 8


@pytest.mark.long
def test_the_users_own_run_is_left_alone(start, read_mirror, tmp_path, deliver):
    script = """
        import sys
        import wandb
        import quark
        from quark_core.backends.registry import default_registry
        from quark_backends.wandb.plugin import quark_register_backends
        default_registry()._definitions.setdefault("wandb", quark_register_backends()[0])
        own = wandb.init(project="mine", id="own0", settings=wandb.Settings(silent=True))
        wandb.log({"mine": 1.0})
        with quark.start_run(project="vision", backends="wandb") as session:
            metrics = quark.MetricsLogger(session)
            for step in range(50):
                metrics.log("m", float(step), step=step)
                wandb.log({"mine": float(step)})
            assert wandb.run is own
        assert wandb.run is own
        wandb.log({"mine": 2.0})
        own.finish()
        print(session.run_path)
    """
    (tmp_path / "job.py").write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    (own,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    mirrored = read_mirror(tmp_path / ".quark" / "runs" / os.path.basename(done.stdout.strip()))
    assert mirrored.points("m") == [(step, step) for step in range(50)]
    assert "mine" not in mirrored.keys
    mine = read_mirror(tmp_path, [own])
    assert len([row for row in mine.rows if "mine" in row]) == 52
    assert mine.keys == {"mine"}


@pytest.mark.long
def test_training_never_imports_wandb(tmp_path):
    script = """
        import sys
        import quark
        from quark_core.backends.registry import default_registry
        from quark_backends.wandb.plugin import quark_register_backends
        default_registry()._definitions.setdefault("wandb", quark_register_backends()[0])
        with quark.start_run(project="vision", backends="wandb") as session:
            quark.MetricsLogger(session).log("m", 1.0, step=0)
        assert session.report_delivery().complete
        print([name for name in sys.modules if name.partition(".")[0] == "wandb"])
    """
    (tmp_path / "job.py").write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.replace("'", '"')) == []
    # Whatever W&B keeps lies below the run's own folder.
    assert sorted(path.name for path in tmp_path.iterdir()) == [".quark", "job.py"]


@pytest.mark.long
def test_the_first_group_is_the_group_and_all_of_them_are_tags(start, read_mirror):
    with start(config={"lr": 0.1}, group=["paper/fig3", "b"]) as session:
        session.annotate(gpu="V100", accuracy=0.98)
        session.add_to_group("late")
    mirrored = read_mirror(session.run_path)
    run = mirrored.of("run")[-1]
    assert run.run_group == "b"
    assert set(run.tags) == {"group:b", "group:late", "group:paper/fig3"}
    said = mirrored.config["quark_run"]
    assert said["groups"] == ["b", "late", "paper/fig3"]
    assert (said["fields"]["gpu"], said["fields"]["accuracy"]) == ("V100", 0.98)
    assert set(mirrored.config["quark_digests"]) == {"config_digest", "structure_digest"}
