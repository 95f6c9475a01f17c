"""Data alone stops no training: counters that wrap, whole floats, one bad value among good ones."""

import decimal
import logging
import math

import numpy as np
import pytest
import torch

import quark
from quark import SchemaValidationError


def steps(metrics, key="m"):
    return [record.step for record in metrics.read(metric_key=key)]


COUNTERS = {
    "numpy": lambda n: np.array([n]).astype(np.int32)[0],
    "torch": lambda n: torch.tensor(n).to(torch.int32),
    "item": lambda n: int(np.array([n]).astype(np.int32)[0]),
    "unsigned": lambda n: np.array([n]).astype(np.uint32)[0],
}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_that_wraps_is_counted_on(session, caplog, name):
    metrics = quark.MetricsLogger(session)
    near = 2**32 if name == "unsigned" else 2**31
    expected = [near - 2 * 10**6, near - 10, near + 10, near + 5 * 10**8]
    if name in ("numpy", "torch"):
        expected += [2**32 - 10, 2**32 + 5, 2**32 + 10**9]
    for number in expected:
        metrics.log("m", 1.0, step=COUNTERS[name](number))
        metrics.log({"n": 1.0}, step=COUNTERS[name](number))
    assert steps(metrics) == steps(metrics, "n") == expected
    assert len([each for each in caplog.messages if "has wrapped" in each]) == 1


@pytest.mark.parametrize("step", [-1, np.int32(-1), np.int64(-(2**40)), np.int8(-3), -1.0])
def test_a_step_that_is_negative_without_having_wrapped_is_refused(session, step):
    metrics = quark.MetricsLogger(session)
    with pytest.raises(SchemaValidationError, match="step must not be negative"):
        metrics.log("m", 1.0, step=step)


def test_a_strict_run_counts_no_counter_on(strict_session):
    metrics = quark.MetricsLogger(strict_session)
    with pytest.raises(SchemaValidationError, match="step must not be negative"):
        metrics.log("m", 1.0, step=np.int32(-1627389952))


def test_a_loop_that_begins_anew_has_not_wrapped(session):
    metrics = quark.MetricsLogger(session)
    counted = [np.uint32(7), np.uint32(2**31), np.uint32(2**31 + 7), np.uint32(9), np.uint8(0)]
    for step in counted:
        metrics.log("m", 1.0, step=step)
    assert steps(metrics)[-1] == 0


WHOLE = [4096.0, np.float32(4096), np.float64(4096), torch.tensor(4096.0), decimal.Decimal(4096)]


@pytest.mark.parametrize("step", WHOLE, ids=lambda value: type(value).__name__)
def test_a_whole_float_is_a_step_of_every_writer(session, tmp_path, step):
    metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)
    assert metrics.log("m", 1.0, step=step, epoch=step).epoch == 4096
    metrics.log({"n": 1.0}, step=step, epoch=step)
    assert steps(metrics) == steps(metrics, "n") == [4096]
    made = [
        events.log("e", step=step, epoch=step),
        session.add_log("line", step=step),
        quark.DataDiagnostics(session).log_batch(1.0, step=step, epoch=step),
        quark.ArtifactStore(session).store("model", "m", b"x", step=step, epoch=step),
        quark.SystemTelemetry(session).record_step(step, epoch=step),
    ]
    assert [record.step for record in made] == [4096] * 5
    with session.step(step):
        assert metrics.log("k", 1.0).step == 4096
    assert session.state_dict(step=step)["step"] == 4096


@pytest.mark.parametrize("step", [1.5, math.nan, math.inf, True, "3", np.bool_(1), [1]], ids=repr)
def test_what_is_no_whole_number_is_no_step(session, step):
    with pytest.raises(SchemaValidationError, match="step must be"):
        quark.MetricsLogger(session).log("m", 1.0, step=step)


BAD = [None, "later", b"x", object(), np.zeros(3), torch.zeros(2, 2), [1.0], 1j, np.array([])]


@pytest.mark.parametrize("bad", BAD, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_one_bad_value_costs_the_good_ones_nothing_and_is_named_once(session, caplog, bad, nested):
    metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)
    row = {"good": 1.0, "part": {"note": bad}} if nested else {"good": 1.0, "note": bad}
    key = "part/note" if nested else "note"
    for step in range(3):
        assert metrics.log(row, step=step) is None
        metrics.log_many(row, step=step)
    assert [record.value for record in metrics.read()] == [1.0] * 6
    (told,) = events.read(event_type="metric_refused")
    assert told.payload["metric_key"] == key
    assert told.step == 0
    assert type(bad).__name__ in told.payload["message"]
    assert len([each for each in caplog.messages if key in each]) == 1


@pytest.mark.parametrize("bad", BAD, ids=lambda value: type(value).__name__)
def test_a_strict_run_refuses_the_call(strict_session, bad):
    metrics = quark.MetricsLogger(strict_session)
    with pytest.raises(SchemaValidationError, match=r"metrics\['note'\] must be a number"):
        metrics.log({"good": 1.0, "note": bad}, step=0)
    assert metrics.read() == ()


def test_a_call_without_a_good_value_counts_no_step(session):
    metrics = quark.MetricsLogger(session, auto_step=True)
    metrics.log({"a": 1.0})
    metrics.log({"a": None})
    metrics.log({"a": 2.0})
    assert steps(metrics, "a") == [0, 1]


@pytest.mark.parametrize(
    "value", [10**400, decimal.Decimal("-1e400"), np.longdouble("1e4000")], ids=repr
)
def test_a_number_beyond_float64_is_kept_as_an_infinity_and_told_of(session, value):
    metrics = quark.MetricsLogger(session)
    metrics.log("m", value, step=0)
    metrics.log({"m": value, "n": decimal.Decimal("1.1")}, step=1)
    sign = math.copysign(math.inf, float(value > 0) - 0.5)
    assert [record.value for record in metrics.read(metric_key="m")] == [sign] * 2
    assert [record.value for record in metrics.read(metric_key="n")] == [1.1]
    (told,) = quark.EventLogger(session).read(event_type="non_finite_metric")
    assert told.payload["metric_key"] == "m"


def test_read_and_columns_hold_the_same_points(session):
    metrics = quark.MetricsLogger(session)
    for step, value in enumerate([1.0, math.nan, math.inf, 2.0]):
        metrics.log("m", value, step=step)
    for asked in ({}, {"include_non_finite": True}, {"include_non_finite": False}):
        read = [record.step for record in metrics.read(**asked)]
        parts = [step for part in metrics.iterate(**asked) for step in part["step"].tolist()]
        assert read == metrics.columns(**asked)["step"].tolist() == parts
    assert steps(metrics) == [0, 1, 2, 3]


@pytest.mark.parametrize("aliases", [None, ()], ids=repr)
def test_no_aliases_may_be_written_as_none(session, tmp_path, aliases):
    (tmp_path / "f").write_bytes(b"x")
    store = quark.ArtifactStore(session)
    assert store.store("model", "a", b"x", aliases=aliases).artifact_key == "a"
    assert store.log_file(tmp_path / "f", aliases=aliases) is not None
    with pytest.raises(SchemaValidationError, match="aliases must be a sequence"):
        store.store("model", "b", b"x", aliases=3)


@pytest.fixture(scope="module")
def mesh():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def shard(mesh, value, placement):
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(torch.as_tensor(value), mesh, [placement], run_check=False)


@pytest.mark.long
def test_the_part_of_a_sharded_tensor_is_told_of_once(session, mesh, caplog):
    from torch.distributed.tensor import Partial, Replicate

    caplog.set_level(logging.WARNING, "quark")
    metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)
    whole, part = shard(mesh, 2.0, Replicate()), shard(mesh, 0.5, Partial())
    metrics.log("whole", whole, step=0)
    metrics.log({"whole": whole, "plain": 1.0}, step=1)
    assert events.read(event_type="metric_sharded") == ()
    for step in range(3):
        assert metrics.log("norm", part, step=step).value == 0.5
        metrics.log({"other": part}, step=step)
        metrics.aggregate("sum", part, step=step)
    told = events.read(event_type="metric_sharded")
    assert [each.payload["metric_key"] for each in told] == ["norm", "other"]
    assert all("full_tensor()" in each.payload["message"] for each in told)
    assert [record.value for record in metrics.read(metric_key="whole")] == [2.0, 2.0]


@pytest.mark.long
def test_a_strict_run_refuses_the_part_of_a_sharded_tensor(strict_session, mesh):
    from torch.distributed.tensor import Partial

    metrics = quark.MetricsLogger(strict_session)
    for call in (
        lambda: metrics.log("norm", shard(mesh, 0.5, Partial()), step=0),
        lambda: metrics.log({"norm": shard(mesh, 0.5, Partial())}, step=0),
    ):
        with pytest.raises(SchemaValidationError, match=r"full_tensor\(\)"):
            call()
