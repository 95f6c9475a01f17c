"""SystemTelemetry: configuration, arguments and filters, good and bad."""

import dataclasses
import inspect

import numpy as np
import pytest
import torch

from quark import SystemTelemetry, SystemTelemetryConfig
from quark_core.errors import SchemaValidationError

QUIET = SystemTelemetryConfig(capture_cpu=False, capture_gpu=False)


@pytest.fixture
def quiet(session):
    with SystemTelemetry(session, config=QUIET) as opened:
        yield opened


def test_the_config_has_the_defaults_of_the_guide():
    fields = {f.name: f.default for f in dataclasses.fields(SystemTelemetryConfig)}
    assert fields == {
        "sample_every_n_steps": 1,
        "emit_scalar_metrics": True,
        "capture_cpu": True,
        "capture_gpu": True,
        "gpu_index": None,
        "sample_interval_s": 1.0,
        "device": None,
        # Not of the guide: on many ranks the machine is read once for each node.
        "every_rank": False,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        SystemTelemetryConfig().gpu_index = 1
    assert inspect.signature(SystemTelemetry).parameters["batch_size"].default == 20


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sample_every_n_steps", 0),
        ("sample_every_n_steps", -1),
        ("sample_every_n_steps", True),
        ("sample_every_n_steps", 1.5),
        ("sample_every_n_steps", None),
        ("emit_scalar_metrics", 1),
        ("capture_cpu", "yes"),
        ("capture_gpu", None),
        ("gpu_index", -1),
        ("gpu_index", "0"),
        ("gpu_index", False),
        ("sample_interval_s", 0),
        ("sample_interval_s", -1.0),
        ("sample_interval_s", float("nan")),
        ("sample_interval_s", float("inf")),
        ("sample_interval_s", "1"),
        ("sample_interval_s", True),
        ("device", 0),
        ("device", "cuda:x"),
        ("device", "CUDA"),
        ("device", ""),
    ],
    ids=str,
)
def test_bad_configurations_are_named(field, value):
    with pytest.raises(SchemaValidationError, match=field):
        SystemTelemetryConfig(**{field: value})


def test_a_configuration_takes_what_its_fields_mean():
    config = SystemTelemetryConfig(
        sample_every_n_steps=np.int64(5), sample_interval_s=2, device=torch.device("cpu")
    )
    assert type(config.sample_every_n_steps) is int
    assert type(config.sample_interval_s) is float
    for device in ("cpu", "cuda", "cuda:1", torch.device("cuda:0"), torch.device("meta")):
        SystemTelemetryConfig(device=device)


@pytest.mark.parametrize("config", [{}, "fast", SystemTelemetryConfig, 3], ids=repr)
def test_a_config_of_another_type_is_refused(session, config):
    with pytest.raises(SchemaValidationError, match="config"):
        SystemTelemetry(session, config=config)


@pytest.mark.parametrize(
    "flag", [True, 1, 1.0, np.True_, np.float32(1), torch.tensor(True), torch.tensor(1.0)], ids=repr
)
def test_flags_come_from_any_library(quiet, flag):
    assert quiet.record_step(0, overflow_occurred=flag).overflow_count == 1
    with quiet.start_step(1) as scope:
        assert scope.finish(skipped_step=flag).skipped_step_count == 1


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"step": None}, "step"),
        ({"step": -1}, "step"),
        ({"epoch": "1"}, "epoch"),
        ({"step_time_ms": float("nan")}, "step_time_ms"),
        ({"step_time_ms": float("inf")}, "step_time_ms"),
        ({"step_time_ms": -0.1}, "step_time_ms"),
        ({"step_time_ms": True}, "step_time_ms"),
        ({"step_time_ms": "1"}, "step_time_ms"),
        ({"data_time_ms": [1.0]}, "data_time_ms"),
        ({"compute_time_ms": np.array([1.0, 2.0])}, "compute_time_ms"),
        ({"compute_time_ms": 1j}, "compute_time_ms"),
        ({"overflow_occurred": "no"}, "overflow_occurred"),
        ({"overflow_occurred": None}, "overflow_occurred"),
        ({"skipped_step": 2}, "skipped_step"),
        ({"skipped_step": torch.tensor([True, False])}, "skipped_step"),
        ({"skipped_step": torch.empty((), device="meta")}, "skipped_step"),
        ({"metadata": {"x": {1}}}, r"metadata\.x"),
        ({"timestamp": "soon"}, "timestamp"),
    ],
    ids=str,
)
def test_bad_steps_are_named_and_count_nothing(quiet, arguments, named):
    good = {"step": 0, "overflow_occurred": True, "skipped_step": True}
    with pytest.raises(SchemaValidationError, match=named):
        quiet.record_step(**{**good, **arguments})
    record = quiet.record_step(0)
    assert (record.overflow_count, record.skipped_step_count) == (0, 0)
    assert quiet.read() == (record,)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"step": -1}, "step"),
        ({"step": "1"}, "step"),
        ({"epoch": 1.5}, "epoch"),
        ({"metadata": 3}, "metadata"),
        ({"metadata": {"x": {1}}}, r"metadata\.x"),
        ({"timestamp": "soon"}, "timestamp"),
    ],
    ids=str,
)
def test_bad_samples_are_named(quiet, arguments, named):
    with pytest.raises(SchemaValidationError, match=named):
        quiet.sample(**arguments)
    if "timestamp" not in arguments:
        with pytest.raises(SchemaValidationError, match=named):
            quiet.start_step(**{"step": 0, **arguments})
    assert quiet.read() == ()


def test_filters(quiet):
    for step in range(6):
        quiet.record_step(step, epoch=step // 3)
    quiet.sample()
    quiet.sample(step=9)

    def steps(**filters):
        return [record.step for record in quiet.read(**filters)]

    assert steps(boundary="time") == [None]
    assert steps(boundary="step", step_min=4) == [4, 5, 9]
    assert steps(step=3) == [3]
    assert steps(step_max=1) == [0, 1]
    assert steps(epoch=1) == [3, 4, 5]
    assert steps(epoch_min=0, epoch_max=0, limit=2) == [1, 2]
    assert steps(limit=1) == [9]
    for bad in ({"boundary": "epoch"}, {"boundary": 3}, {"step_min": -1}, {"limit": "x"}):
        with pytest.raises(SchemaValidationError, match=next(iter(bad))):
            quiet.read(**bad)


def test_steps_may_go_backwards(quiet):
    for step in (5, 3, 3, 8):
        quiet.record_step(step)
    assert [record.step for record in quiet.read()] == [5, 3, 3, 8]


def test_a_gpu_index_that_does_not_exist_is_a_reason(nvml, session):
    config = SystemTelemetryConfig(gpu_index=5, capture_cpu=False)
    with SystemTelemetry(session, config=config) as telemetry:
        record = telemetry.sample(step=0)
    assert "gpu_index 5 does not exist" in record.metadata["unavailable"]["gpu"]
    assert record.gpu_index is record.gpu_memory_used_bytes is None
    assert len(record.gpus) == 2


@pytest.mark.parametrize(
    ("config", "environ", "index"),
    [
        ({"gpu_index": 1}, {}, 1),
        ({"device": "cuda:1"}, {}, 1),
        ({"device": "cuda:1"}, {"CUDA_VISIBLE_DEVICES": "1,0"}, 0),
        ({"device": "cuda:1", "gpu_index": 1}, {"CUDA_VISIBLE_DEVICES": "1,0"}, 1),
        ({"device": "cpu"}, {"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({}, {"LOCAL_RANK": "1"}, 1),
    ],
    ids=str,
)
def test_the_chosen_gpu_stands_in_the_record_itself(
    nvml, session, monkeypatch, config, environ, index
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with SystemTelemetry(session, config=SystemTelemetryConfig(**config)) as telemetry:
        record = telemetry.sample(step=0)
    assert record.gpu_index == index
    assert record.gpu_utilization_percent == record.gpus[index].utilization_percent
    assert record.gpu_memory_total_bytes == record.gpus[index].memory_total_bytes
