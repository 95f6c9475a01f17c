"""The machine is recorded of every run by itself, and disturbs nobody."""

import os
import subprocess
import sys
import threading
import time

import pytest

import quark
from quark.analysis.run_data import RunData
from quark_core.errors import SchemaValidationError
from quark_core.records.query import Query
from quark_core.system.hardware_sampler import shared_sampler

DEADLINE_S = 60


def read(session, storage_dir):
    found = quark.open_run(session.run_id, storage_dir).open_run.read("telemetry", Query())
    return list(found.to_records())


def start(storage_dir, interval_s=0.2, **arguments):
    return quark.start_run(
        project="p", storage_dir=storage_dir, system_metrics=interval_s, capture=None, **arguments
    )


def wait_for(condition):
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def count(session):
    return session.open_run.stream.channel("telemetry").count_drawn()


def test_the_machine_is_recorded_where_training_has_come_to(tmp_path):
    session = start(tmp_path)
    metrics = quark.MetricsLogger(session)
    metrics.log("train/loss", 1.0, step=7, epoch=2)
    metrics.flush()
    wait_for(lambda: count(session) >= 3)
    session.end_run()
    record = read(session, tmp_path)[-1]
    assert (record.boundary, record.step, record.epoch) == ("time", 7, 2)
    assert record.step_time_ms is None
    assert 0 <= record.cpu_usage_percent <= 100
    assert record.ram_used_bytes > 0
    assert record.process_rss_bytes > 0
    assert {"network_received_bytes_per_s", "disk_usage_percent"} <= record.metadata.keys()
    assert count(session) == len(read(session, tmp_path))


def test_without_a_metric_there_is_no_step(tmp_path):
    session = start(tmp_path)
    wait_for(lambda: count(session) >= 1)
    session.end_run()
    assert {(record.step, record.epoch) for record in read(session, tmp_path)} == {(None, None)}


def test_it_ends_with_the_run_and_a_later_one_has_its_own(tmp_path):
    first, second = start(tmp_path), start(tmp_path)
    wait_for(lambda: count(first) and count(second))
    first.end_run()
    assert shared_sampler.running
    second.end_run()
    assert not shared_sampler.running
    assert read(first, tmp_path)
    assert read(second, tmp_path)


@pytest.mark.parametrize("value", [False, 0, 0.0])
def test_it_is_off_by_an_argument(tmp_path, value):
    session = start(tmp_path, value)
    assert not shared_sampler.running
    session.end_run()


def test_the_variable_says_how_often_and_the_argument_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_SYSTEM_METRICS", "0")
    with quark.start_run(project="p", storage_dir=tmp_path):
        assert not shared_sampler.running
    monkeypatch.setenv("QUARK_SYSTEM_METRICS", "30")
    with quark.start_run(project="p", storage_dir=tmp_path):
        assert shared_sampler.running
    with quark.start_run(project="p", storage_dir=tmp_path, system_metrics=False):
        assert not shared_sampler.running


@pytest.mark.parametrize("value", [-1, "often", float("nan"), float("inf"), [1]])
def test_what_is_no_number_of_seconds_is_refused(tmp_path, value):
    with pytest.raises(SchemaValidationError, match="system_metrics must be"):
        start(tmp_path, value)


@pytest.mark.long
def test_a_telemetry_of_the_users_is_not_doubled(tmp_path):
    session = start(tmp_path)
    with quark.SystemTelemetry(session) as telemetry:
        wait_for(lambda: shared_sampler.reading is not None)
        for step in range(60):
            telemetry.record_step(step, step_time_ms=1.0)
            time.sleep(0.05)
    session.end_run()
    records = read(session, tmp_path)
    own = [record for record in records if record.boundary == "step"]
    assert len(own) == 60
    # At most before its first record.
    assert len(records) - len(own) <= 2


def test_a_telemetry_that_records_no_machine_goes_beside_it(tmp_path):
    session = start(tmp_path)
    config = quark.SystemTelemetryConfig(capture_cpu=False, capture_gpu=False)
    with quark.SystemTelemetry(session, config=config) as telemetry:
        for step in range(40):
            telemetry.record_step(step, step_time_ms=1.0)
            time.sleep(0.05)
    wait_for(lambda: count(session) >= 42)
    session.end_run()
    assert {record.boundary for record in read(session, tmp_path)} == {"step", "time"}


def test_rules_look_at_steps_and_not_at_moments(tmp_path):
    session = start(tmp_path)
    with quark.SystemTelemetry(session, config=None) as telemetry:
        telemetry.record_step(0, skipped_step=True)
    wait_for(lambda: count(session) >= 3)
    session.end_run()
    run = quark.open_run(session.run_id, tmp_path).open_run
    data = RunData(run.read, session.run_id)
    assert data.telemetry.count == 1
    assert data.rank_telemetry[0].count == 1


def test_a_sensor_that_hangs_holds_up_nobody(tmp_path, monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr(shared_sampler._processor, "read", lambda **_: hangs.wait(DEADLINE_S))
    session = start(tmp_path)
    wait_for(lambda: shared_sampler.running)
    time.sleep(0.5)
    begin = time.monotonic()
    with quark.MetricsLogger(session) as metrics:
        metrics.log("train/loss", 1.0, step=0)
    session.end_run()
    assert time.monotonic() - begin < DEADLINE_S / 2
    hangs.set()


def test_other_processes_of_a_node_leave_it_to_the_first(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with start(tmp_path):
        assert not shared_sampler.running


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_records_nothing(tmp_path):
    session = start(tmp_path)
    wait_for(lambda: count(session) >= 1)
    pid = os.fork()
    if not pid:
        time.sleep(0.7)
        os._exit(shared_sampler.running or threading.active_count() != 1)
    assert os.waitpid(pid, 0)[1] == 0
    session.end_run()
    assert len({record.writer_id for record in read(session, tmp_path)}) == 1


def test_nothing_heavy_is_imported_before_the_first_log(tmp_path):
    code = (
        "import sys, quark\n"
        "session = quark.start_run(project='p', storage_dir=sys.argv[1])\n"
        "quark.MetricsLogger(session).log('train/loss', 1.0, step=0)\n"
        "print([name for name in ('psutil', 'numpy', 'pty') if name in sys.modules])\n"
        "session.end_run()\n"
    )
    environment = {**os.environ, "QUARK_SYSTEM_METRICS": "", "QUARK_CAPTURE": ""}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
