"""Scopes of start_step: times, marks, exceptions, and steps timed on a GPU."""

import sys
import types

import pytest
import torch
from kit.programs import run_threads

import quark
from quark import MetricsLogger, StepTelemetryScope, SystemTelemetry, SystemTelemetryConfig
from quark_core.errors import InvalidRunStateError, SchemaValidationError
from quark_core.writers.step_timing import (
    DeviceMarks,
    PendingSteps,
    StepTimes,
    find_device_index,
    is_cuda,
)


@pytest.fixture
def telemetry(session):
    config = SystemTelemetryConfig(capture_cpu=False, capture_gpu=False)
    with SystemTelemetry(session, config=config) as opened:
        yield opened


def test_times_of_a_step_add_up(telemetry, session):
    with telemetry.start_step(3, epoch=1, metadata={"split": "train"}) as scope:
        assert isinstance(scope, StepTelemetryScope)
        assert (scope.step, scope.epoch) == (3, 1)
        sum(range(1000))
        scope.mark_data_ready()
        sum(range(1000))
    (record,) = telemetry.read()
    assert record == scope.finish()
    assert (record.boundary, record.step, record.epoch) == ("step", 3, 1)
    assert record.metadata == {"split": "train"}
    assert record.data_time_ms > 0
    assert record.compute_time_ms > 0
    assert record.step_time_ms == record.data_time_ms + record.compute_time_ms
    assert {r.metric_key: r.value for r in MetricsLogger(session).read(step=3)} == {
        "system/runtime/step_time_ms": record.step_time_ms,
        "system/runtime/data_time_ms": record.data_time_ms,
        "system/runtime/compute_time_ms": record.compute_time_ms,
        "system/runtime/overflow_count": 0.0,
        "system/runtime/skipped_step_count": 0.0,
    }


def test_without_a_mark_only_the_whole_step_is_known(telemetry):
    with telemetry.start_step(0):
        pass
    (record,) = telemetry.read()
    assert record.step_time_ms > 0
    assert record.data_time_ms is record.compute_time_ms is None
    assert record.metadata is None


def test_a_later_mark_moves_the_first(telemetry):
    scope = telemetry.start_step(0)
    scope.mark_data_ready()
    first_s = scope._ready_s
    scope.mark_data_ready()
    assert scope._ready_s > first_s
    record = scope.finish()
    scope.mark_data_ready()
    assert scope.finish() is record
    assert record.data_time_ms == (scope._ready_s - scope._start_s) * 1000.0


def test_a_second_finish_returns_the_first_and_records_nothing(telemetry):
    with telemetry.start_step(0) as scope:
        record = scope.finish(overflow_occurred=True, skipped_step=True)
        assert scope.finish(overflow_occurred=True) is record
    assert (record.overflow_count, record.skipped_step_count) == (1, 1)
    assert telemetry.read() == (record,)


def test_a_bad_flag_leaves_the_step_open(telemetry):
    scope = telemetry.start_step(0)
    with pytest.raises(SchemaValidationError, match="overflow_occurred"):
        scope.finish(overflow_occurred="no")
    assert scope.finish(overflow_occurred=True).overflow_count == 1


def test_an_exception_is_recorded_and_never_replaced(telemetry, session):
    for error in (ValueError("bad batch"), KeyboardInterrupt(), StopIteration()):
        with pytest.raises(type(error)) as caught, telemetry.start_step(0):
            raise error
        assert caught.value is error
    assert [r.metadata["raised"] for r in telemetry.read()] == [
        "ValueError",
        "KeyboardInterrupt",
        "StopIteration",
    ]
    with pytest.raises(ZeroDivisionError), telemetry.start_step(1):
        telemetry.close()
        _ = 1 / 0
    assert len(telemetry.read()) == 3


@pytest.mark.long
def test_a_run_that_ends_within_a_step_is_said(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        telemetry = SystemTelemetry(session)
        with pytest.raises(InvalidRunStateError, match="ended"), telemetry.start_step(0):
            session.end_run()
        telemetry.close()


@pytest.mark.long
def test_scopes_may_overlap(telemetry):
    outer = telemetry.start_step(0)
    with telemetry.start_step(1):
        pass
    outer.finish()
    assert [record.step for record in telemetry.read()] == [1, 0]


class FakeEvent:
    """An event that the device passes when the test lets it."""

    def __init__(self, device, enable_timing=True):
        assert enable_timing
        self.device = device

    def record(self, stream):
        assert stream == "stream"
        if self.device.error is not None:
            raise self.device.error
        self.device.clock_ms += 10.0
        self.at_ms = self.device.clock_ms

    def query(self):
        self.device.queries += 1
        if self.device.query_error is not None:
            raise self.device.query_error
        return self.at_ms <= self.device.passed_ms

    def elapsed_time(self, end):
        assert end.query()
        return end.at_ms - self.at_ms

    def synchronize(self):
        raise AssertionError("the training thread must never wait for the GPU")


class FakeCuda:
    """torch.cuda, as far as it is used."""

    def __init__(self):
        self.clock_ms = self.passed_ms = 0.0
        self.queries = 0
        self.error = self.query_error = None
        self.capturing = self.present = False
        self.Event = lambda enable_timing: FakeEvent(self, enable_timing)

    def is_available(self):
        return self.present

    def is_current_stream_capturing(self):
        return self.capturing

    def current_stream(self, index):
        assert index == 1
        return "stream"

    def synchronize(self):
        raise AssertionError("the training thread must never wait for the GPU")

    def catch_up(self):
        self.passed_ms = self.clock_ms


@pytest.fixture
def cuda(monkeypatch):
    device = FakeCuda()
    device.present = True
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=device))
    return device


@pytest.fixture
def timed(session, cuda):
    config = SystemTelemetryConfig(capture_cpu=False, capture_gpu=False, device="cuda:1")
    with SystemTelemetry(session, config=config) as opened:
        yield opened


def run_step(telemetry, step, **flags):
    scope = telemetry.start_step(step)
    scope.mark_data_ready()
    return scope.finish(**flags)


@pytest.mark.long
def test_steps_are_recorded_when_the_device_has_passed_them(timed, cuda, session):
    assert run_step(timed, 0, overflow_occurred=True) is None
    assert run_step(timed, 1) is None
    assert timed._recent_records == 0
    cuda.passed_ms = 30.0  # three marks: the first step is done
    assert run_step(timed, 2) is None
    assert timed._recent_records == 1
    cuda.catch_up()
    timed.start_step(3)  # polls too
    records = timed.read()
    assert [r.step for r in records] == [0, 1, 2]
    assert [r.overflow_count for r in records] == [1, 1, 1]
    assert [r.sequence for r in records] == [0, 1, 2]
    assert [r.time_us for r in records] == sorted(r.time_us for r in records)
    for record in records:
        assert record.metadata == {"timing": "cuda_events"}
        assert (record.step_time_ms, record.data_time_ms) == (20.0, 10.0)
        assert record.compute_time_ms == 10.0
    times = MetricsLogger(session).read(metric_key="system/runtime/step_time_ms")
    assert [(r.step, r.value, r.time_us) for r in times] == [
        (r.step, 20.0, r.time_us) for r in records
    ]


def test_no_mark_gives_the_whole_step(timed, cuda):
    timed.start_step(0).finish()
    cuda.catch_up()
    (record,) = timed.flush()
    assert (record.step_time_ms, record.data_time_ms, record.compute_time_ms) == (10.0, None, None)


@pytest.mark.parametrize("leave", ["flush", "read", "close"])
def test_what_the_device_does_not_finish_in_time_has_wall_times(timed, cuda, monkeypatch, leave):
    monkeypatch.setattr("quark_core.writers.telemetry_recording._SETTLE_TIMEOUT_S", 0.02)
    run_step(timed, 0)
    run_step(timed, 1)
    cuda.passed_ms = 30.0
    getattr(timed, leave)()
    records = timed.read()
    assert [r.metadata["timing"] for r in records] == ["cuda_events", "wall_clock"]
    assert records[0].step_time_ms == 20.0
    wall = records[1]
    assert wall.step_time_ms == wall.data_time_ms + wall.compute_time_ms
    assert wall.step_time_ms != 20.0


def test_an_exception_within_a_timed_step(timed, cuda):
    with pytest.raises(ValueError, match="bad"), timed.start_step(0, metadata={"timing": "mine"}):
        raise ValueError("bad")
    cuda.catch_up()
    assert timed.read()[0].metadata == {"raised": "ValueError", "timing": "mine"}


def test_a_device_that_fails_costs_only_its_times(timed, cuda, caplog):
    run_step(timed, 0)
    cuda.query_error = RuntimeError("CUDA error: an illegal memory access was encountered")
    run_step(timed, 1)
    cuda.error = cuda.query_error
    assert run_step(timed, 2).metadata == {"timing": "wall_clock"}
    assert [(r.step, r.metadata["timing"]) for r in timed.read()] == [
        (0, "wall_clock"),
        (1, "wall_clock"),
        (2, "wall_clock"),
    ]
    assert caplog.text.count("illegal memory access") == 1


def test_while_a_graph_is_captured_no_event_is_touched(timed, cuda):
    run_step(timed, 0)
    cuda.capturing = True
    queries = cuda.queries
    run_step(timed, 1)
    assert cuda.queries == queries
    cuda.capturing = False
    cuda.catch_up()
    # In order, although the second step waits for nothing.
    assert [(r.step, r.metadata["timing"]) for r in timed.read()] == [
        (0, "cuda_events"),
        (1, "wall_clock"),
    ]


def test_a_bounded_number_of_steps_waits(timed, monkeypatch):
    monkeypatch.setattr("quark_core.writers.step_timing._MAX_PENDING_STEPS", 3)
    monkeypatch.setattr("quark_core.writers.telemetry_recording._SETTLE_TIMEOUT_S", 0.0)
    for step in range(5):
        run_step(timed, step)
    assert len(timed._pending) == 3
    assert [r.step for r in timed.flush()] == [0, 1, 2, 3, 4]
    assert len(timed._pending) == 0


@pytest.mark.long
def test_the_end_of_the_run_waits_a_moment_for_steps_of_the_device(tmp_path, cuda):
    config = SystemTelemetryConfig(capture_cpu=False, capture_gpu=False, device="cuda:1")
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        telemetry = SystemTelemetry(session, config=config)
        run_step(telemetry, 0)
        session.end_run()
        cuda.catch_up()
        telemetry.close()
        (record,) = telemetry.read()
        assert record.metadata == {"timing": "wall_clock"}


def test_a_device_without_cuda_is_timed_by_the_wall_clock(session, cuda):
    cuda.present = False
    config = SystemTelemetryConfig(capture_cpu=False, capture_gpu=False, device="cuda:1")
    with SystemTelemetry(session, config=config) as telemetry:
        assert run_step(telemetry, 0).metadata == {"timing": "wall_clock"}
    config = SystemTelemetryConfig(capture_cpu=False, capture_gpu=False, device="cpu")
    with SystemTelemetry(session, config=config) as telemetry:
        assert run_step(telemetry, 1).metadata is None


def test_pending_steps_are_emitted_once_by_several_threads(cuda):
    clock = types.SimpleNamespace(can_query=lambda: True)
    pending = PendingSteps(clock)
    emitted = []
    for step in range(500):
        start, end = FakeEvent(cuda), FakeEvent(cuda)
        start.record("stream")
        end.record("stream")
        pending.add(
            DeviceMarks(start, None, end),
            StepTimes(1.0, None, None),
            lambda times, timing, step=step: emitted.append(step),
        )
    cuda.catch_up()
    run_threads(pending.settle, [10.0 for _ in range(4)])
    assert emitted == list(range(500))


def test_devices_and_their_names():
    assert is_cuda("cuda")
    assert is_cuda(torch.device("cuda:3"))
    assert not is_cuda("cpu")
    assert not is_cuda(None)
    assert find_device_index("cuda") is None
    assert find_device_index("cuda:12") == 12
    assert find_device_index(torch.device("cuda", 3)) == 3
    for bad in (3, "gpu 0", object(), types.SimpleNamespace(type="cuda", index="0")):
        with pytest.raises(SchemaValidationError, match="device"):
            find_device_index(bad)


@pytest.mark.gpu
def test_a_real_device(session):
    config = SystemTelemetryConfig(capture_cpu=False, device=torch.device("cuda", 0))
    with SystemTelemetry(session, config=config) as telemetry:
        for step in range(5):
            with telemetry.start_step(step) as scope:
                a = torch.rand(2048, 2048, device="cuda")
                scope.mark_data_ready()
                for _ in range(10):
                    a = a @ a
        torch.cuda.synchronize()
        records = telemetry.read()
    assert [r.step for r in records] == list(range(5))
    for record in records:
        assert record.metadata["timing"] == "cuda_events"
        assert record.step_time_ms == record.data_time_ms + record.compute_time_ms > 0


@pytest.mark.gpu
def test_a_real_device_times_what_the_host_does_not_wait_for(session):
    """The events stand around the work of the device, which the clock of the host does not see."""
    config = SystemTelemetryConfig(capture_cpu=False, capture_gpu=True, device="cuda:0")
    torch.zeros(1, device="cuda").item()  # the device is awake
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    with SystemTelemetry(session, config=config) as telemetry:
        with telemetry.start_step(0):
            marks[0].record()
            torch.cuda._sleep(100_000_000)
            marks[1].record()
        torch.cuda.synchronize()
        (record,) = telemetry.read()
    taken_ms = marks[0].elapsed_time(marks[1])
    assert record.metadata["timing"] == "cuda_events"
    assert record.step_time_ms >= taken_ms > 0
    assert record.gpu_memory_used_bytes > 0
