"""SystemTelemetry: records, cadence, counts, mirrors, reasons."""

import threading
import time

import numpy as np
import pytest
import torch
from fake_nvml import NVMLError_NotSupported
from kit.programs import run_code, run_threads

import quark
from quark import MetricsLogger, SystemTelemetry, SystemTelemetryConfig, SystemTelemetryRecord
from quark_core.errors import InvalidRunStateError, SessionStoreError
from quark_core.records.schema import validate_record
from quark_core.system.hardware_readings import HardwareReading
from quark_core.writers.telemetry_recording import MIRRORED_KEYS

# The guide's list: mirrored metric key -> field of the record.
MIRRORS = {
    "system/runtime/step_time_ms": "step_time_ms",
    "system/runtime/data_time_ms": "data_time_ms",
    "system/runtime/compute_time_ms": "compute_time_ms",
    "system/cpu/usage_percent": "cpu_usage_percent",
    "system/ram/usage_percent": "ram_usage_percent",
    "system/ram/used_bytes": "ram_used_bytes",
    "system/process/rss_bytes": "process_rss_bytes",
    "system/gpu/utilization_percent": "gpu_utilization_percent",
    "system/gpu/memory_used_bytes": "gpu_memory_used_bytes",
    "system/gpu/memory_usage_percent": "gpu_memory_usage_percent",
    "system/runtime/overflow_count": "overflow_count",
    "system/runtime/skipped_step_count": "skipped_step_count",
}
QUIET = SystemTelemetryConfig(capture_cpu=False, capture_gpu=False)


@pytest.fixture
def telemetry(session):
    with SystemTelemetry(session) as opened:
        yield opened


@pytest.fixture
def quiet(session):
    with SystemTelemetry(session, config=QUIET) as opened:
        yield opened


def let_the_test_read(sampler, telemetry, monkeypatch):
    """From now on only the test gives readings: the thread that the telemetry began is gone."""
    thread = sampler._thread
    sampler.unwatch(telemetry._watch)
    thread.join(30)  # which the sampler does for half a second
    monkeypatch.setattr(sampler, "watch", lambda watch: None)
    sampler.reading = None
    sampler.running = True


def mirrored(session, step):
    records = MetricsLogger(session).read(step=step)
    assert len({record.metric_key for record in records}) == len(records)
    return {record.metric_key: record for record in records}


@pytest.mark.long
def test_constructing_starts_the_sampler_and_waits_for_nothing(tmp_path):
    program = """
import sys, threading, quark
with quark.start_run(project="p", storage_dir=sys.argv[1]) as session:
    assert not {"psutil", "numpy", "torch"} & set(sys.modules)
    quiet = quark.SystemTelemetryConfig(capture_cpu=False, capture_gpu=False)
    quark.SystemTelemetry(session, config=quiet).record_step(0)
    assert not [t for t in threading.enumerate() if t.name == "quark-hardware"]
    telemetry = quark.SystemTelemetry(session)
    assert [t for t in threading.enumerate() if t.name == "quark-hardware"]
    assert "torch" not in sys.modules
"""
    done = run_code(program, tmp_path)
    assert "Traceback" not in done.stderr


def test_what_is_read_equals_what_was_returned(nvml, session, telemetry, sampler, wait_until):
    first = telemetry.record_step(0, epoch=0, step_time_ms=37.5, metadata={"split": "train"})
    wait_until(
        lambda: (
            sampler.reading is not None and sampler.reading.processor.cpu_usage_percent is not None
        )
    )
    second = telemetry.record_step(
        1, step_time_ms=5, data_time_ms=np.float32(2), compute_time_ms=torch.tensor(3.0)
    )
    third = telemetry.sample(epoch=2, timestamp="2026-01-01T00:00:00Z")
    fourth = telemetry.sample(step=7)
    logged = (first, second, third, fourth)
    assert telemetry.flush() == logged
    assert telemetry.flush() == ()
    assert telemetry.read() == logged
    for record in logged:
        assert isinstance(validate_record(record), SystemTelemetryRecord)
    assert [r.boundary for r in logged] == ["step", "step", "time", "step"]
    assert first.metadata["split"] == "train"
    assert (second.step_time_ms, second.data_time_ms, second.compute_time_ms) == (5.0, 2.0, 3.0)
    assert second.metadata["reading_age_ms"] >= 0
    assert third.timestamp == "2026-01-01T00:00:00.000000Z"
    for record in (second, third, fourth):
        assert [gpu.name for gpu in record.gpus] == ["Fake 0", "Fake 1"]
        assert (record.gpu_index, record.gpu_utilization_percent) == (0, 10.0)
        assert 0 <= record.cpu_usage_percent <= 100
        assert record.ram_used_bytes > record.process_rss_bytes > 0
        assert record.node


def test_every_mirrored_field_is_a_metric_of_the_step(
    nvml, session, telemetry, sampler, wait_until
):
    assert tuple(MIRRORS) == MIRRORED_KEYS
    telemetry.record_step(0)
    wait_until(
        lambda: (
            sampler.reading is not None and sampler.reading.processor.cpu_usage_percent is not None
        )
    )
    record = telemetry.record_step(
        1,
        epoch=4,
        step_time_ms=5.0,
        data_time_ms=2.0,
        compute_time_ms=3.0,
        overflow_occurred=True,
        skipped_step=True,
    )
    found = mirrored(session, 1)
    assert {key: metric.value for key, metric in found.items()} == {
        key: float(getattr(record, field)) for key, field in MIRRORS.items()
    }
    for metric in found.values():
        assert (metric.time_us, metric.epoch, metric.rank) == (record.time_us, 4, record.rank)
        assert metric.writer_id == record.writer_id


def test_only_what_is_known_is_mirrored(session, quiet):
    quiet.record_step(0, data_time_ms=1.0)
    assert set(mirrored(session, 0)) == {
        "system/runtime/data_time_ms",
        "system/runtime/overflow_count",
        "system/runtime/skipped_step_count",
    }


def test_mirrors_and_metrics_of_the_user_share_one_order(metrics, quiet):
    for step in range(5):
        metrics.log("train/loss", 1.0, step=step)
        quiet.record_step(step, step_time_ms=1.0)
    records = metrics.read()
    # The counts are mirrored where they have changed, which the first ones have.
    assert [r.sequence for r in records] == list(range(12))
    assert [r.step for r in records] == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_a_reading_is_mirrored_once_and_a_count_when_it_changes(
    session, telemetry, sampler, wait_until
):
    # Whether the first step knows the first reading is up to the sampler's thread.
    records = [telemetry.record_step(0)]
    wait_until(lambda: sampler.reading is not None)
    records += [
        telemetry.record_step(step, overflow_occurred=step in (50, 150)) for step in range(1, 200)
    ]
    seen = [record.ram_used_bytes for record in records]
    assert None not in seen[1:]
    metrics = MetricsLogger(session)
    used = [r.value for r in metrics.read(metric_key="system/ram/used_bytes")]
    # A new reading may say what the last one said.
    assert 1 <= len(used) < 20
    assert set(used) == {float(ram) for ram in seen if ram is not None}
    counts = metrics.read(metric_key="system/runtime/overflow_count")
    assert [(r.step, r.value) for r in counts] == [(0, 0.0), (50, 1.0), (150, 2.0)]


def test_a_sample_of_no_step_and_no_epoch_mirrors_nothing(nvml, session, telemetry):
    telemetry.sample()
    assert MetricsLogger(session).read() == ()
    telemetry.sample(epoch=3)
    found = MetricsLogger(session).read(epoch=3)
    assert {record.metric_key for record in found} == set(MIRRORED_KEYS[3:])
    assert {record.step for record in found} == {None}


def test_mirrors_can_be_left_out(session):
    config = SystemTelemetryConfig(emit_scalar_metrics=False)
    with SystemTelemetry(session, config=config) as telemetry:
        telemetry.record_step(0, step_time_ms=1.0)
        assert len(telemetry.read()) == 1
    assert MetricsLogger(session).read() == ()


def test_captures_that_are_off_are_no_gaps(nvml, session, sampler):
    with SystemTelemetry(session, config=QUIET) as telemetry:
        for record in (telemetry.record_step(0), telemetry.sample()):
            assert record.metadata is None
            assert record.cpu_usage_percent is record.gpus is record.process_rss_bytes is None
        assert not sampler.running
    only_gpu = SystemTelemetryConfig(capture_cpu=False)
    with SystemTelemetry(session, config=only_gpu) as telemetry:
        record = telemetry.sample()
        assert record.gpu_utilization_percent == 10.0
        assert record.process_rss_bytes is None
        assert record.metadata is None
    assert nvml.calls > 0


def test_the_cadence_leaves_records_out_and_no_count(session):
    config = SystemTelemetryConfig(sample_every_n_steps=10, capture_cpu=False, capture_gpu=False)
    with SystemTelemetry(session, config=config) as telemetry:
        returned = []
        for step in range(31):
            overflow = step % 3 == 0
            if step % 2:
                with telemetry.start_step(step) as scope:
                    pass
                returned.append(scope.finish())
            else:
                returned.append(telemetry.record_step(step, overflow_occurred=overflow))
        kept = [record for record in returned if record is not None]
        assert [record.step for record in kept] == [0, 10, 20, 30]
        # 0, 6, 12, 18, 24 and 30 are even and divided by three.
        assert [record.overflow_count for record in kept] == [1, 2, 4, 6]
        assert telemetry.read() == tuple(kept)
        telemetry.record_step(1, skipped_step=True)
        with telemetry.start_step(2) as scope:
            scope.finish(skipped_step=True, overflow_occurred=True)
        last = telemetry.record_step(40, skipped_step=True)
        assert (last.overflow_count, last.skipped_step_count) == (7, 3)
        sampled = telemetry.sample()
        assert (sampled.overflow_count, sampled.skipped_step_count) == (7, 3)


def test_why_figures_are_missing_is_said_once_for_each_reason(
    nvml, telemetry, sampler, monkeypatch
):
    let_the_test_read(sampler, telemetry, monkeypatch)

    def take(**options):
        sampler.reading = HardwareReading(
            time.monotonic(), sampler._processor.read(fresh=True), sampler._gpus.read()
        )

    first, second = telemetry.record_step(0), telemetry.record_step(1)
    assert set(first.metadata["unavailable"]) == {"cpu", "gpu"}
    assert "first reading" in first.metadata["unavailable"]["cpu"]
    assert second.metadata is None
    take()
    assert "unavailable" not in telemetry.record_step(2).metadata
    nvml.gpus[0].answers["utilization"] = NVMLError_NotSupported("Not Supported")
    take()
    third, fourth = telemetry.record_step(3), telemetry.record_step(4)
    assert list(third.metadata["unavailable"]) == ["gpu"]
    assert "Not Supported" in third.metadata["unavailable"]["gpu"]
    assert third.gpu_memory_used_bytes == 2**30
    assert third.gpu_utilization_percent is None
    assert "unavailable" not in fourth.metadata
    nvml.gpus[0].answers["utilization"] = 1
    take()
    telemetry.record_step(5)
    nvml.gpus[0].answers["utilization"] = NVMLError_NotSupported("Not Supported")
    take()
    # It was there in between, so that it is news again.
    assert "unavailable" in telemetry.record_step(6).metadata
    sampler.running = False


def test_a_reading_that_is_too_old_says_nothing(nvml, telemetry, sampler, monkeypatch):
    let_the_test_read(sampler, telemetry, monkeypatch)
    sampler.reading = HardwareReading(
        time.monotonic() - 31.0, sampler._processor.read(fresh=True), sampler._gpus.read()
    )
    record = telemetry.record_step(0)
    assert record.cpu_usage_percent is record.gpus is None
    assert "no reading for a long time" in record.metadata["unavailable"]["gpu"]
    assert "reading_age_ms" not in record.metadata
    sampler.running = False


def test_metadata_of_the_caller_wins_and_is_taken_at_the_call(telemetry):
    own = {"reading_age_ms": "mine", "unavailable": 1, "list": [1]}
    record = telemetry.record_step(0, metadata=own)
    own["list"].append(2)
    assert record.metadata == {"reading_age_ms": "mine", "unavailable": 1, "list": [1]}
    assert telemetry.read()[0].metadata == record.metadata
    assert telemetry.sample(metadata={"unavailable": "no"}).metadata == {"unavailable": "no"}


def test_no_record_reads_the_machine(nvml, telemetry, sampler, wait_until, monkeypatch):
    telemetry.record_step(0)
    wait_until(lambda: sampler.reading is not None)
    thread = sampler._thread
    sampler.unwatch(telemetry._watch)
    thread.join(30)  # which the sampler does for half a second
    calls = nvml.calls
    monkeypatch.setattr(sampler, "watch", lambda watch: None)
    sampler.running = True
    monkeypatch.setattr(sampler._processor, "read", None)
    for step in range(1, 10):
        telemetry.record_step(step)
        with telemetry.start_step(step) as scope:
            scope.mark_data_ready()
    assert nvml.calls == calls
    sampler.running = False


def test_one_sampler_serves_all_until_the_last_is_closed(nvml, session, sampler):
    first, second = SystemTelemetry(session), SystemTelemetry(session)
    first.record_step(0)
    second.record_step(0)
    first.close()
    assert sampler.running
    second.close()
    second.close()
    assert not sampler.running


def test_closing_does_not_wait_for_a_driver_that_hangs(nvml, session, sampler):
    nvml.hang = threading.Event()
    telemetry = SystemTelemetry(session)
    telemetry.record_step(0)
    assert nvml.hanging.wait(30)
    telemetry.record_step(1)
    hung = sampler._thread
    telemetry.close()
    assert hung.is_alive()
    nvml.hang.set()
    hung.join(30)


def test_the_sampler_ends_with_a_run_whose_telemetry_was_never_closed(
    nvml, tmp_path, sampler, wait_until
):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        config = SystemTelemetryConfig(sample_interval_s=0.02)
        telemetry = SystemTelemetry(session, config=config)
        telemetry.record_step(0)
        assert sampler.running
    wait_until(lambda: not sampler.running)
    with pytest.raises(InvalidRunStateError, match="ended"):
        telemetry.record_step(1)


def test_a_closed_telemetry_reads_but_does_not_record(quiet):
    kept = quiet.record_step(0)
    scope = quiet.start_step(1)
    quiet.close()
    for call in (
        lambda: quiet.record_step(1),
        lambda: quiet.start_step(1),
        lambda: quiet.sample(),
        scope.finish,
    ):
        with pytest.raises(InvalidRunStateError, match="closed"):
            call()
    assert quiet.read() == (kept,)


def test_threads_lose_no_record_and_no_count(session):
    config = SystemTelemetryConfig(sample_every_n_steps=2, sample_interval_s=0.01)
    with SystemTelemetry(session, config=config) as telemetry:

        def record(first):
            for step in range(first, first + 200):
                telemetry.record_step(step, step_time_ms=1.0, overflow_occurred=True)
                with telemetry.start_step(step):
                    pass

        run_threads(record, [1000 * n for n in range(4)])
        records = telemetry.read()
        assert len(records) == 800
        assert telemetry.record_step(0).overflow_count == 800
        assert sorted(record.sequence for record in records) == list(range(800))
    metrics = MetricsLogger(session).read(metric_key="system/runtime/step_time_ms")
    assert len(metrics) == 800


def test_a_strict_run_raises_what_the_store_refused(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, strict_mode=True) as session:
        telemetry = SystemTelemetry(session, config=QUIET)
        scope = telemetry.start_step(0)
        session.open_run.note_failure(OSError("the disk is full"))
        for call in (lambda: telemetry.record_step(1), scope.finish, telemetry.sample):
            with pytest.raises(SessionStoreError, match="the disk is full"):
                call()
        with pytest.raises(SessionStoreError, match="the disk is full"):
            telemetry.close()


def test_nothing_is_kept_and_nothing_hurts_where_no_store_is(tmp_path, nvml):
    with (
        quark.start_run(project="p", storage_dir=tmp_path, backends="none") as session,
        SystemTelemetry(session) as telemetry,
    ):
        assert telemetry.record_step(0, step_time_ms=1.0).step == 0
        assert telemetry.read() == ()
        assert telemetry.flush() == ()


@pytest.mark.long
def test_real_figures_come_without_a_fake(session):
    with SystemTelemetry(session) as telemetry:
        record = telemetry.sample(step=0)
    assert 0 <= record.cpu_usage_percent <= 100
    assert record.ram_total_bytes > record.process_rss_bytes > 0
    assert (record.gpus is None) == ("gpu" in (record.metadata or {}).get("unavailable", {}))
