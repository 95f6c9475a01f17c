"""What is killed, dead or missing costs the mirror time, and no row."""

import contextlib
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec

import msgspec
import psutil
import pytest

import quark
from quark_backends.wandb import backend as backend_module
from quark_core.errors import BackendUnauthorized, BackendUnavailable
from quark_core.runs import recovery
from quark_core.system.process import ProcessIdentity, is_alive
from quark_core.testing.fakes import BatchMaker

if find_spec("wandb") is None:
    pytest.skip("needs wandb", allow_module_level=True)

HEAD = """
import os, signal, sys, time
import quark
from quark_core.backends.registry import default_registry
from quark_backends.wandb.plugin import quark_register_backends
default_registry()._definitions.setdefault("wandb", quark_register_backends()[0])
"""


def launch(tmp_path, script, **arguments):
    (tmp_path / "job.py").write_text(HEAD + textwrap.dedent(script))
    return subprocess.Popen(
        [sys.executable, "job.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, **arguments
    )


def list_workers(run_path):
    """The mirror's own processes of a run that are alive."""
    found = []
    for path in run_path.glob("mirrors/wandb/*/worker.json"):
        with contextlib.suppress(OSError, psutil.Error, msgspec.DecodeError):
            # A process that is gone has left its file, and another one may have its number.
            identity = msgspec.json.decode(path.read_bytes(), type=ProcessIdentity)
            if is_alive(identity):
                found.append(psutil.Process(identity.pid))
    return found


def find_worker(run_path, timeout_s=150):
    """The mirror's own process of a run, once there is one."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for worker in list_workers(run_path):
            return worker
        time.sleep(0.05)
    raise AssertionError("the mirror has no process")


def kill(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def wait_for_end(process, timeout_s=60):
    """Until a process is gone; nobody may be there to take the exit status of an orphan."""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, process
            time.sleep(0.02)


def sync(tmp_path, timeout_s=200):
    """What `quark sync` does, again until nothing waits."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = recovery.sync(tmp_path)
        if all(lane.state == "delivered" for lane in found):
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


TRAIN = """
session = quark.start_run(project="vision", backends="wandb")
metrics = quark.MetricsLogger(session)
print(session.run_path, flush=True)
for step in range(100000):
    metrics.log("m", float(step), step=step)
    metrics.log("n", float(step), step=step)
    # Until W&B has started on a busy machine, it would log more than that one mirrors in time.
    time.sleep(0.001 if step < 1500 else 0.05)
"""


@pytest.mark.long
@pytest.mark.parametrize("everything", [False, True], ids=["training", "all processes"])
def test_kill_and_resume_keep_every_point_once(tmp_path, read_mirror, everything):
    job = launch(tmp_path, TRAIN)
    run_path = tmp_path / ".quark" / "runs" / os.path.basename(job.stdout.readline().strip())
    worker = find_worker(run_path)
    deadline = time.monotonic() + 90
    while len(read_mirror(run_path).points("m")) < 300:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    victims = [psutil.Process(job.pid)]
    if everything:
        victims += [worker, *worker.children()]
    for victim in victims:
        kill(victim)
    job.wait()
    job.stdout.close()
    wait_for_end(worker)
    again = quark.resume_run(run_id=run_path.name, storage_dir=tmp_path, backends="wandb")
    metrics = quark.MetricsLogger(again)
    metrics.log("m", -1.0, step=10**6)
    again.end_run()
    sync(tmp_path)
    records = quark.MetricsLogger(quark.open_run(run_path.name, tmp_path)).read()
    mirrored = read_mirror(run_path)
    for key in ("m", "n"):
        kept = sorted(record.step for record in records if record.metric_key == key)
        assert len(kept) > 300
        assert sorted(step for step, _ in mirrored.points(key)) == kept
    assert len(mirrored.paths) == 1
    marks = [mark for row in mirrored.rows for mark in row["quark/seq"].split()]
    assert len(marks) == len(set(marks))


@pytest.mark.long
def test_the_process_of_the_mirror_may_be_killed_at_any_time(start, read_mirror, deliver):
    session = start()
    metrics = quark.MetricsLogger(session)
    for part in range(3):
        for step in range(part * 300, part * 300 + 300):
            metrics.log("m", float(step), step=step)
            time.sleep(0.001)
        kill(find_worker(session.run_path))
    report = deliver(session)
    assert report.unknown == 0
    session.end_run()
    mirrored = read_mirror(session.run_path)
    assert sorted(step for step, _ in mirrored.points("m")) == list(range(900))
    assert mirrored.exit_codes == [0]
    assert len(mirrored.paths) == 1


@pytest.mark.long
def test_a_batch_that_is_half_there_is_completed(definition, config, read_mirror, monkeypatch):
    """Some rows of a batch are in W&B's file, and nobody knows: the others are sent."""
    maker = BatchMaker("run0")
    backend = definition.open(config)
    backend.write(maker.start())
    batch = maker.metrics(*[("m", step, float(step)) for step in range(10)])
    # Rows of the newest two batches are held.
    later = [maker.metrics(("m", step, float(step))) for step in (10, 11)]
    backend.write_group([batch, *later])
    os.kill(backend._worker._process.pid, signal.SIGKILL)
    state = next(config.run_path.glob("mirrors/wandb/*/state.json"))
    found = json.loads(state.read_text())
    # As it would be if the process had been killed before its note.
    found["writers"]["writer0"]["number"] = 0
    found["file"]["offset"] = 0
    found |= {"held": "", "sent_step": -1, "has_steps": False, "newest_steps": []}
    state.write_text(json.dumps(found))
    (path,) = read_mirror(config.run_path).paths
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"writer0.1.6")])
    with pytest.raises(BackendUnavailable):
        backend.write(batch)
    backend.write_group([batch, *later])
    backend.close()
    mirrored = read_mirror(config.run_path)
    assert len(mirrored.paths) == 1
    assert [step for step, _ in mirrored.points("m")] == list(range(12))


@pytest.mark.long
def test_a_process_that_hangs_is_killed(start, deliver, monkeypatch, read_mirror):
    monkeypatch.setattr(backend_module, "_APPLY_TIMEOUT_S", 5.0)
    session = start()
    metrics = quark.MetricsLogger(session)
    metrics.log("m", 0.0, step=0)
    deliver(session)
    worker = find_worker(session.run_path)
    worker.suspend()
    metrics.log("m", 1.0, step=1)
    report = deliver(session)
    assert any("did not answer" in reason for reason in report.errors)
    assert not worker.is_running()
    session.end_run()
    assert read_mirror(session.run_path).points("m") == [(0, 0), (1, 1)]


@pytest.mark.long
def test_an_end_that_takes_too_long_says_how_to_send_the_rest(
    definition, config, monkeypatch, caplog
):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "2")
    backend = definition.open(config)
    maker = BatchMaker("run0")
    backend.write(maker.start())
    worker = find_worker(config.run_path)
    worker.suspend()
    backend.close()
    assert not worker.is_running()
    (line,) = [text for text in caplog.messages if "wandb sync --include-online" in text]
    folder = line.split()[-1]
    assert any(os.path.exists(os.path.join(folder, name)) for name in os.listdir(folder))


@pytest.fixture(params=["refused", "silent"])
def dead_host(request):
    """The URL of a host that refuses connections, or takes them and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "silent":
            listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.long
def test_a_dead_host_delays_nothing_and_loses_nothing(
    start, dead_host, monkeypatch, read_mirror, tmp_path
):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", dead_host)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "2")
    session = start()
    metrics = quark.MetricsLogger(session)
    longest_s = 0.0
    for step in range(500):
        began = time.monotonic()
        metrics.log("m", float(step), step=step)
        longest_s = max(longest_s, time.monotonic() - began)
        time.sleep(0.001)
    assert longest_s < 30
    find_worker(session.run_path)
    session.end_run()
    (lane,) = [each for each in session.report_delivery().lanes if not each.primary]
    assert (lane.delivered, lane.dropped, lane.unknown) == (0, 0, 0)
    assert lane.waiting == lane.submitted
    # When the host is there again (here: W&B needs none), everything goes.
    monkeypatch.setenv("WANDB_MODE", "offline")
    for worker in list_workers(session.run_path):
        kill(worker)
    sync(tmp_path)
    mirrored = read_mirror(session.run_path)
    assert sorted(step for step, _ in mirrored.points("m")) == list(range(500))


@pytest.mark.long
def test_without_credentials_the_mirror_says_so(definition, config, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    backend = definition.open(config)
    with pytest.raises(BackendUnauthorized, match="wandb login"):
        backend.write(BatchMaker("run0").start())
    backend.close()


def test_a_missing_library_is_named_with_its_extra_once(start, monkeypatch, caplog):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else real(name)
    )
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "1")
    with caplog.at_level(logging.WARNING, "quark"), start() as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
    said = [text for text in caplog.messages if "accepts no records now" in text]
    assert len(said) == 1
    assert 'pip install "quark-tracker[wandb]"' in said[0]


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("mode=live", "mode must be"),
        ("names=odd", "names must be"),
        ("layers=few", "layers must be"),
        ("colour=red", "no option 'colour'"),
    ],
)
def test_wrong_options_are_named(definition, config, uri, reason):
    name, _, value = uri.partition("=")
    with pytest.raises(BackendUnavailable, match=reason):
        definition.open(type(config)(**{**_fields(config), "options": {name: value}}))


def _fields(config):
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


@pytest.mark.long
def test_ctrl_c_does_not_reach_the_process_of_the_mirror(tmp_path, read_mirror):
    script = """
        try:
            with quark.start_run(project="vision", backends="wandb") as session:
                metrics = quark.MetricsLogger(session)
                for step in range(300):
                    metrics.log("m", float(step), step=step)
                print(session.run_path, flush=True)
                time.sleep(600)
        except KeyboardInterrupt:
            sys.exit(130)
    """
    job = launch(tmp_path, script, start_new_session=True)
    run_path = tmp_path / ".quark" / "runs" / os.path.basename(job.stdout.readline().strip())
    find_worker(run_path)
    os.killpg(job.pid, signal.SIGINT)
    assert job.wait(150) == 130
    job.stdout.close()
    mirrored = read_mirror(run_path)
    assert sorted(step for step, _ in mirrored.points("m")) == list(range(300))
    assert mirrored.exit_codes == [130]


@pytest.mark.long
def test_the_process_ends_with_training(tmp_path, read_mirror):
    job = launch(tmp_path, TRAIN)
    run_path = tmp_path / ".quark" / "runs" / os.path.basename(job.stdout.readline().strip())
    worker = find_worker(run_path)
    core = []
    deadline = time.monotonic() + 60
    while not core:
        assert time.monotonic() < deadline
        core = worker.children()
        time.sleep(0.05)
    job.kill()
    job.wait()
    job.stdout.close()
    for process in (worker, *core):
        wait_for_end(process)


@pytest.mark.long
def test_forked_children_log_too_and_hide_nothing(tmp_path, read_mirror):
    script = """
        session = quark.start_run(project="vision", backends="wandb")
        metrics = quark.MetricsLogger(session)
        for step in range(50):
            metrics.log("m", float(step), step=step)
        time.sleep(1.5)
        child = os.fork()
        if child == 0:
            for step in range(50, 100):
                metrics.log("m", float(step), step=step)
            metrics.close()
            time.sleep(0.2)
            os._exit(0)
        silent = os.fork()
        if silent == 0:
            time.sleep(600)
            os._exit(0)
        os.waitpid(child, 0)
        for step in range(100, 150):
            metrics.log("m", float(step), step=step)
        session.end_run()
        os.kill(silent, signal.SIGKILL)
        print(session.run_path, flush=True)
    """
    job = launch(tmp_path, script)
    run_path = tmp_path / ".quark" / "runs" / os.path.basename(job.stdout.readline().strip())
    assert job.wait(150) == 0
    job.stdout.close()
    sync(tmp_path)
    mirrored = read_mirror(run_path)
    assert sorted(step for step, _ in mirrored.points("m")) == list(range(150))
