"""Servers that are away, processes that die, forks: every point ends up there once."""

import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

import quark
from quark_backends.mlflow import client as mlflow_server
from quark_core.errors import BackendRejected, BackendUnavailable
from quark_core.runs import recovery
from quark_core.testing.fakes import BatchMaker

TRAIN = """
import os, signal, sys, time
import quark

root, uri, project, first, last, run_id = sys.argv[1:]
backends = f"mlflow:{uri}?quark=full"
if run_id:
    session = quark.resume_run(run_id=run_id, storage_dir=root, backends=backends)
else:
    session = quark.start_run(project=project, storage_dir=root, backends=backends)
    print(session.run_id, flush=True)
metrics = quark.MetricsLogger(session)
for step in range(int(first), int(last)):
    metrics.log("m", float(step), step=step)
    metrics.log("same", 1.0, step=0)
    session.add_log("line", step=step) if step % 100 == 0 else None
    time.sleep(0.002)
if run_id:
    session.end_run()
else:
    print("logged", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def wait_until_delivered(session, timeout_s=200):
    lanes = [lane for lane in session.open_run.stream._lanes if not lane.primary]
    session.open_run.flush()
    deadline = time.monotonic() + timeout_s
    while any(lane.report().waiting for lane in lanes):
        assert time.monotonic() < deadline, lanes[0].report()
        for lane in lanes:
            lane.nudge()
        time.sleep(0.05)


@pytest.fixture
def read_steps(mlflow, project):
    def read(server, key):
        client = mlflow.MlflowClient(tracking_uri=server.uri)
        experiment = client.get_experiment_by_name(project)
        (run,) = client.search_runs([experiment.experiment_id], run_view_type=3)
        return sorted(point.step for point in client.get_metric_history(run.info.run_id, key))

    return read


def run_script(tmp_path, server, project, first, last, run_id=""):
    command = [sys.executable, "-c", TRAIN, tmp_path, server.uri, project, first, last, run_id]
    environment = {**os.environ, "QUARK_EXIT_TIMEOUT_SECONDS": "60"}
    return subprocess.run(
        list(map(str, command)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.long
def test_a_process_that_is_killed_and_resumed_has_every_point_once(
    tmp_path, server, project, read_steps
):
    killed = run_script(tmp_path, server, project, 0, 700)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run_id = killed.stdout.split()[0]
    resumed = run_script(tmp_path, server, project, 700, 1000, run_id)
    assert resumed.returncode == 0, resumed.stderr
    # What the killed process left may be delivered by anyone, here by `quark sync`.
    assert {lane.state for lane in recovery.sync(tmp_path)} <= {"delivered"}
    assert read_steps(server, "m") == list(range(1000))
    assert len(read_steps(server, "same")) == 1000
    opened = quark.open_run(run_id, tmp_path, backend=f"mlflow:{server.uri}?quark=full")
    metrics = quark.MetricsLogger(opened)
    stored = quark.MetricsLogger(quark.open_run(run_id, tmp_path))
    assert metrics.read(metric_key="m") == stored.read(metric_key="m")
    assert len(quark.EventLogger(opened).read(event_type="user_log")) == 10


@pytest.mark.long
def test_a_server_that_is_down_at_the_start(
    tmp_path, mortal_server, project, read_steps, monkeypatch
):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "60")
    mortal_server.kill()
    began = time.monotonic()
    session = quark.start_run(
        project=project, storage_dir=tmp_path, backends=f"mlflow:{mortal_server.uri}?quark=full"
    )
    metrics = quark.MetricsLogger(session)
    for step in range(300):
        metrics.log("m", float(step), step=step)
    assert time.monotonic() - began < 60
    mortal_server.start()
    wait_until_delivered(session)
    session.end_run()
    assert read_steps(mortal_server, "m") == list(range(300))


def test_a_server_that_never_comes_back_is_left_behind(tmp_path, project, monkeypatch, caplog):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "2")
    session = quark.start_run(
        project=project, storage_dir=tmp_path, backends="mlflow+http://127.0.0.1:9"
    )
    metrics = quark.MetricsLogger(session)
    for step in range(100):
        metrics.log("m", float(step), step=step)
    began = time.monotonic()
    session.end_run()
    assert time.monotonic() - began < 60
    (lane,) = [one for one in session.report_delivery().lanes if one.backend == "mlflow"]
    assert lane.waiting > 0
    assert len(quark.MetricsLogger(quark.open_run(session.run_id, tmp_path)).read()) == 100
    told = [r.getMessage() for r in caplog.records if "cannot be reached" in r.getMessage()]
    assert len(told) <= 2


def _log_in_child(session, first):
    metrics = quark.MetricsLogger(session)
    for step in range(first, first + 20):
        metrics.log("child", float(step), step=step)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_children_are_mirrored_too(tmp_path, server, project, read_steps, monkeypatch):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "60")
    session = quark.start_run(
        project=project, storage_dir=tmp_path, backends=f"mlflow:{server.uri}?quark=full"
    )
    metrics = quark.MetricsLogger(session)
    metrics.log("m", 0.0, step=0)
    wait_until_delivered(session)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_log_in_child, args=(session, first)) for first in (0, 100)]
    for child in children:
        child.start()
    for step in range(1, 50):
        metrics.log("m", float(step), step=step)
    for child in children:
        child.join(250)
        assert child.exitcode == 0
    session.end_run()
    assert read_steps(server, "m") == list(range(50))
    assert read_steps(server, "child") == [*range(20), *range(100, 120)]


class _Dataset:
    def __init__(self, session):
        self.session = session

    def __len__(self):
        return 12

    def __getitem__(self, index):
        quark.MetricsLogger(self.session).log("worker", float(index), step=index)
        return index


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_workers_of_a_data_loader(tmp_path, server, project, read_steps, monkeypatch):
    data = pytest.importorskip("torch.utils.data")
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "60")
    session = quark.start_run(
        project=project, storage_dir=tmp_path, backends=f"mlflow:{server.uri}?quark=full"
    )
    loader = data.DataLoader(
        _Dataset(session), num_workers=2, batch_size=2, multiprocessing_context="fork"
    )
    metrics = quark.MetricsLogger(session)
    for step, batch in enumerate(loader):
        metrics.log("m", float(batch[0]), step=step)
    session.end_run()
    assert read_steps(server, "m") == list(range(6))
    assert read_steps(server, "worker") == list(range(12))


def read_environment():
    """The environment while nobody calls: a lane of a test before may, and sets bounds for that."""
    deadline = time.monotonic() + 300
    while True:
        with mlflow_server._lock:
            if not mlflow_server._callers:
                return dict(os.environ)
        assert time.monotonic() < deadline
        time.sleep(0.02)


BOUNDED = """
import os
from quark_backends.mlflow.client import bounded

name = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
os.environ.pop(name, None)
os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "77"
with bounded():
    with bounded():
        assert os.environ[name] == "2"
    assert os.environ[name] == "2"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
assert name not in os.environ
assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
"""


def test_the_bounds_of_requests_are_set_only_while_the_mirror_calls():
    # In a process of its own: here a lane of a test before may still be in a call.
    subprocess.run([sys.executable, "-c", BOUNDED], check=True)


def test_a_missing_package_is_said_by_name_also_where_no_server_is(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "mlflow" else real(name)
    )
    with quark.start_run(project="p", storage_dir=tmp_path, backends="mlflow") as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
    (lane,) = [one for one in session.report_delivery().lanes if not one.primary]
    assert list(lane.errors) == ['mlflow is not installed: pip install "quark-tracker[mlflow]"']


def test_a_server_that_nobody_has_named_is_asked_for_once(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with quark.start_run(project="p", storage_dir=tmp_path, backends="mlflow") as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
    (lane,) = [one for one in session.report_delivery().lanes if not one.primary]
    ((reason, count),) = lane.errors.items()
    assert reason.startswith("no MLflow server URL is set")
    assert count == 1


def test_the_environment_is_as_it_was_after_a_run(backend):
    before = read_environment()
    maker = BatchMaker("run0")
    backend.write(maker.start())
    backend.write(maker.metrics(("m", 0, 0.0)))
    assert read_environment() == before


@pytest.mark.long
def test_one_bad_record_in_a_thousand_is_alone_in_quarantine(
    backend, config, find_runs, history, client
):
    import msgspec

    maker = BatchMaker("run0")
    backend.write(maker.start())
    records = maker.metrics(*[("m", step, float(step)) for step in range(1000)]).to_records()
    records[613] = msgspec.structs.replace(records[613], step=2**63 - 1, time_us=-5_000_000)
    backend.write(maker.batch(records))
    (run,) = find_runs()
    steps = [step for step, *_ in history(run.info.run_id, "m")]
    assert steps == [step for step in range(1000) if step != 613]
    path = config.run_path / "quarantine" / "mlflow" / "refused-records.jsonl"
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.long
def test_a_proxy_that_takes_small_requests_only(backend, config, find_runs, history):
    """A 413 for a batch is answered by smaller ones."""
    from mlflow.exceptions import MlflowException

    client = backend._server._client
    log_batch = client.log_batch

    def refuse_large(run_id, metrics=(), **arguments):
        if len(metrics) > 40:
            raise MlflowException("API request to endpoint failed with error code 413 != 200")
        return log_batch(run_id, metrics=metrics, **arguments)

    client.log_batch = refuse_large
    maker = BatchMaker("run0")
    backend.write(maker.start())
    backend.write(maker.metrics(*[("m", step, float(step)) for step in range(300)]))
    (run,) = find_runs()
    assert len(history(run.info.run_id, "m")) == 300
    assert not (config.run_path / "quarantine").exists()


@pytest.mark.long
def test_odd_and_long_names(backend, find_runs, history):
    from quark_core.records.names import encode_name

    maker = BatchMaker("run0")
    names = [
        "x" * 250,
        "x" * 249 + "y",
        "Loss",
        "loss",
        "é",
        "e",
        "a/../b",
        "損失/測試 🙂",
        "a\\b",
        "%",
    ]
    backend.write(maker.start())
    backend.write(
        maker.metrics(*[(encode_name(name), 0, float(i)) for i, name in enumerate(names)])
    )
    (run,) = find_runs()
    assert len(run.data.metrics) == len(names)
    assert sorted(run.data.metrics.values()) == [float(i) for i in range(len(names))]
    from quark_core.records.query import Query

    columns = backend.read("run0", "metric", Query())
    assert columns["metric_key"].tolist() == list(map(encode_name, names))


def test_a_read_only_mirror_writes_nothing(definition, config):
    import dataclasses

    reader = definition.open(dataclasses.replace(config, read_only=True))
    with pytest.raises((BackendUnavailable, BackendRejected), match="read"):
        reader.write(BatchMaker("run0").start())
    assert not config.run_path.exists()
