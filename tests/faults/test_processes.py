"""Several processes at one store, and at one run."""

import multiprocessing
import subprocess
import sys

import pytest

import quark

WRITER = """
import sys, quark
with quark.start_run(project=sys.argv[2], storage_dir=sys.argv[1]) as session:
    metrics = quark.MetricsLogger(session)
    for step in range(3000):
        metrics.log("m", float(step), step=step)
        if step % 100 == 0:
            metrics.flush()
print(session.run_id, session.report_delivery().complete)
"""


def test_two_processes_in_one_storage_dir_lose_nothing(tmp_path):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), f"project{index}"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(3)
    ]
    ended = [child.communicate()[0].split() for child in children]
    assert [complete for _, complete in ended] == ["True"] * 3
    for index, (run_id, _) in enumerate(ended):
        session = quark.open_run(run_id, tmp_path)
        assert (session.status, session.project_name) == ("completed", f"project{index}")
        values = [record.value for record in quark.MetricsLogger(session).read()]
        assert values == list(map(float, range(3000)))


def log_from_context(context, name):
    with quark.MetricsLogger(context) as metrics, quark.EventLogger(context) as events:
        for step in range(50):
            metrics.log(name, float(step), step=step)
        events.log("worker_done", payload={"worker": name})


def test_spawned_processes_log_through_the_context(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv") as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("parent", 1.0, step=0)
        workers = [
            spawn.Process(target=log_from_context, args=(session.context, f"worker{index}"))
            for index in range(2)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
        for index in range(2):
            found = metrics.read(metric_key=f"worker{index}")
            assert [record.step for record in found] == list(range(50))
        assert len({record.writer_id for record in metrics.read()}) == 3
    assert session.reload().status == "completed"
    done = quark.EventLogger(session).read(event_type="worker_done")
    assert sorted(event.payload["worker"] for event in done) == ["worker0", "worker1"]
    mirrored = sorted((session.run_path / "csv").glob("metrics_long*.csv"))
    lines = [line for path in mirrored for line in path.read_text().splitlines()[1:]]
    assert len(lines) == 101


def test_a_context_of_an_ended_run_only_reads(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
    metrics = quark.MetricsLogger(session.context)
    assert [record.value for record in metrics.read()] == [1.0]
    with pytest.raises(quark.InvalidRunStateError, match="ended"):
        metrics.log("m", 2.0, step=1)


def test_a_context_joins_the_session_of_its_own_process(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        record = quark.MetricsLogger(session.context).log("m", 1.0, step=0)
        assert record.writer_id == session.open_run.origin.writer_id
