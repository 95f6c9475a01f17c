"""MetricsLogger: what is accepted, returned, kept and read back."""

from __future__ import annotations

import decimal
import logging
import math
import warnings

import numpy as np
import pytest
import torch
from kit.programs import run_threads

import quark
from quark import EventLogger, MetricsLogger
from quark import SchemaValidationError as quark_SchemaValidationError
from quark_core.errors import InvalidRunStateError, SchemaValidationError
from quark_core.records.query import Query


def test_what_is_read_equals_what_log_returned(metrics):
    logged = tuple(metrics.log("a/b", step / 3, step=step, epoch=step // 2) for step in range(250))
    assert metrics.read() == logged
    assert logged[7].id.endswith("-7")


def test_log_many_is_the_same_as_many_logs(metrics):
    values = {"train/loss": 0.5, "lr": 1e-3, "n/count": 3}
    metrics.log_many(values, step=4, epoch=1)
    metrics.log_many(values, epoch=2, namespace="ns")
    metrics.log_many({}, step=5)
    first, second = metrics.read(step=4), metrics.read(epoch=2)
    assert [(r.metric_key, r.value, r.step, r.epoch) for r in first] == [
        ("train/loss", 0.5, 4, 1),
        ("lr", 1e-3, 4, 1),
        ("n/count", 3.0, 4, 1),
    ]
    assert [r.metric_key for r in second] == ["ns/train/loss", "ns/lr", "ns/n/count"]
    assert [r.sequence for r in first + second] == list(range(6))


def test_flush_returns_what_came_since_batch_size_last_filled(session):
    metrics = MetricsLogger(session, batch_size=3)
    kept = [metrics.log("m", float(step), step=step) for step in range(4)]
    assert metrics.flush() == (kept[3],)
    assert metrics.flush() == ()
    metrics.log_many({"a": 1.0, "b": 2.0}, step=9)
    assert [record.metric_key for record in metrics.flush()] == ["a", "b"]
    assert len(metrics.read()) == 6


def test_batch_size_bounds_a_batch(session):
    metrics = MetricsLogger(session, batch_size=10)
    for step in range(95):
        metrics.log("m", 0.0, step=step)
    metrics.flush()
    connection = session.open_run.reader._connect_reader()
    counts = [n for (n,) in connection.execute("SELECT count FROM batch WHERE kind = 'metric'")]
    connection.close()
    assert sum(counts) == 95
    assert max(counts) <= 10


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3.0),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.int64(7), 7.0),
        (np.array(2.5), 2.5),
    ],
    ids=repr,
)
def test_numbers_of_any_library(session, value, expected):
    assert MetricsLogger(session).log("m", value, step=0).value == expected


@pytest.mark.long
def test_columns_hold_what_read_holds(metrics):
    metrics.log("a", 1.0, step=3)
    metrics.log("b", math.inf, epoch=2, metadata={"k": 1})
    columns = metrics.columns()
    assert columns["metric_key"].tolist() == ["a", "b"]
    assert columns["step"].tolist() == [3, -1]
    assert columns["epoch"].tolist() == [-1, 2]
    assert columns["finite"].tolist() == [True, False]
    assert columns["value"].tolist() == [1.0, math.inf]
    assert columns["metadata"].tolist() == [None, {"k": 1}]
    assert columns["time_us"].dtype == np.int64
    assert metrics.columns(metric_key="absent").count == 0


def test_values_that_are_not_finite_are_kept_and_told_of_once(session):
    metrics, events = MetricsLogger(session), EventLogger(session)
    values = [1.0, math.nan, math.inf, -math.inf, 2.0, 3.0, math.nan]
    for step, value in enumerate(values):
        returned = metrics.log("train/loss", value, step=step).value
        assert returned == value or math.isnan(returned)
    assert [r.value for r in metrics.read(include_non_finite=False)] == [1.0, 2.0, 3.0]
    assert len(metrics.read()) == 7
    kept = metrics.columns()["value"]
    assert np.array_equal(kept, np.array(values), equal_nan=True)
    told = events.read(event_types=["non_finite_metric", "metric_recovered"])
    assert [(e.event_type, e.step) for e in told] == [
        ("non_finite_metric", 1),
        ("metric_recovered", 4),
        ("non_finite_metric", 6),
    ]
    assert told[0].payload == {"metric_key": "train/loss", "value": "NaN"}
    assert told[0].severity == "warning"
    assert told[1].payload == {"metric_key": "train/loss", "non_finite_count": 3}


def test_log_many_tells_of_the_metric_that_is_not_finite(session):
    metrics, events = MetricsLogger(session), EventLogger(session)
    metrics.log_many({"a": 1.0, "b": math.nan}, step=0)
    metrics.log_many({"a": 1.0, "b": 1.0}, step=1)
    told = events.read(event_types=["non_finite_metric", "metric_recovered"])
    assert [(e.event_type, e.payload["metric_key"]) for e in told] == [
        ("non_finite_metric", "b"),
        ("metric_recovered", "b"),
    ]


def test_large_finite_values_are_no_false_alarm(session, metrics):
    metrics.log_many({"a": 1e308, "b": 1e308}, step=0)
    assert EventLogger(session).read(event_type="non_finite_metric") == ()
    assert [r.value for r in metrics.read()] == [1e308, 1e308]


def test_names_outside_the_rule_are_encoded_with_one_warning(metrics):
    with pytest.warns(RuntimeWarning, match="mean_x40_1"):
        metrics.log("val/mean@1", 0.5, step=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.log("val/mean@1", 0.6, step=1)
    assert [r.metric_key for r in metrics.read()] == ["val/mean_x40_1"] * 2
    for name in ("val/mean@1", "val/mean_x40_1"):
        assert len(metrics.read(metric_key=name)) == 2
    assert len(metrics.read(metric_name="mean@1", namespace="val")) == 2


def test_a_strict_run_refuses_what_only_data_can_cause(strict_session):
    metrics = MetricsLogger(strict_session)
    for call in (
        lambda: metrics.log("m", math.nan, step=0),
        lambda: metrics.log_many({"m": 1.0, "n": math.inf}, step=0),
        lambda: metrics.log("mean@1", 1.0, step=0),
        lambda: metrics.log_many({"mean@1": 1.0}, step=0),
    ):
        with pytest.raises(SchemaValidationError):
            call()
    assert metrics.read(include_non_finite=True) == ()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"metric": "m", "value": 1.0}, "step or epoch"),
        ({"metric": "m", "value": 1.0, "step": -1}, "step"),
        ({"metric": "m", "value": 1.0, "step": 1.5}, "step"),
        ({"metric": "m", "value": 1.0, "step": True}, "step"),
        ({"metric": "m", "value": 1.0, "step": "3"}, "step"),
        ({"metric": "m", "value": 1.0, "step": 2**63}, "step"),
        ({"metric": "m", "value": 1.0, "epoch": -2}, "epoch"),
        ({"metric": "m", "value": "0.5", "step": 0}, "value"),
        ({"metric": "m", "value": None, "step": 0}, "value"),
        ({"metric": "m", "value": np.ones(2), "step": 0}, "value"),
        ({"metric": "m", "value": 1 + 2j, "step": 0}, "value"),
        ({"metric": "", "value": 1.0, "step": 0}, "metric"),
        ({"metric": "//", "value": 1.0, "step": 0}, "metric"),
        ({"metric": "x" * 251, "value": 1.0, "step": 0}, "metric"),
        ({"metric": 7, "value": 1.0, "step": 0}, "metric"),
        ({"metric": ["m"], "value": 1.0, "step": 0}, "metric"),
        ({"metric": "m", "value": 1.0, "step": 0, "namespace": ""}, "namespace"),
        ({"metric": "m", "value": 1.0, "step": 0, "description": 3}, "description"),
        ({"metric": "m", "value": 1.0, "step": 0, "metadata": [1]}, "metadata"),
        ({"metric": "m", "value": 1.0, "step": 0, "metadata": {"a": {1, 2}}}, r"metadata\.a"),
        ({"metric": "m", "value": 1.0, "step": 0, "metadata": {"a": np.ones(2)}}, "tolist"),
        ({"metric": "m", "value": 1.0, "step": 0, "timestamp": "yesterday"}, "timestamp"),
        ({"metric": "m", "value": 1.0, "step": 0, "timestamp": 17}, "timestamp"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_arguments_are_named(metrics, arguments, named):
    with pytest.raises(SchemaValidationError, match=named):
        metrics.log(**arguments)
    assert metrics.read(include_non_finite=True) == ()


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        ([("a", 1.0)], "metrics"),
        (None, "metrics"),
        ({1: 1.0}, "metric"),
    ],
)
def test_bad_rows_are_refused_whole(session, metrics, named):
    logger = MetricsLogger(session)
    with pytest.raises(SchemaValidationError, match=named):
        logger.log_many(metrics, step=0)
    with pytest.raises(SchemaValidationError, match="step or epoch"):
        logger.log_many({"a": 1.0})
    assert logger.read() == ()


def test_bad_filters_are_named(session, metrics):
    for name in ("step", "step_min", "step_max", "epoch", "epoch_min", "epoch_max", "limit"):
        with pytest.raises(SchemaValidationError, match=name):
            metrics.read(**{name: -1})
    with pytest.raises(SchemaValidationError, match="batch_size"):
        MetricsLogger(session, batch_size=0)
    with pytest.raises(SchemaValidationError, match="session"):
        MetricsLogger("run0")


def test_metadata_is_taken_at_the_call(metrics):
    metadata = {"split": "train", "ids": [1, 2]}
    record = metrics.log("m", 1.0, step=0, metadata=metadata)
    metadata["split"] = "changed"
    metadata["ids"].append(3)
    record.metadata["ids"].append(4)
    with pytest.raises(TypeError, match="immutable"):
        record.metadata["split"] = "changed"
    assert metrics.read()[0].metadata == {"split": "train", "ids": [1, 2]}


def test_timestamps_are_kept_to_the_microsecond(metrics):
    record = metrics.log("m", 1.0, step=0, timestamp="2026-05-07T11:30:00.000001+02:00")
    assert record.timestamp == "2026-05-07T09:30:00.000001Z"
    assert metrics.read() == (record,)


def test_a_closed_logger_reads_but_does_not_log(session):
    with MetricsLogger(session) as metrics:
        metrics.log("m", 1.0, step=0)
    with pytest.raises(InvalidRunStateError, match="closed"):
        metrics.log("m", 2.0, step=1)
    with pytest.raises(InvalidRunStateError, match="closed"):
        metrics.log_many({"m": 2.0}, step=1)
    assert [r.value for r in metrics.read()] == [1.0]
    metrics.close()


def test_a_read_flushes_every_writer_of_the_run(session):
    one, other = MetricsLogger(session), MetricsLogger(session)
    one.log("a", 1.0, step=0)
    assert [r.metric_key for r in other.read()] == ["a"]
    assert session.open_run.read("event", Query()).count == 1


@pytest.mark.long
def test_threads_lose_nothing_and_share_no_number(metrics):

    def work(name):
        for step in range(2000):
            if step % 10:
                metrics.log(name, float(step), step=step)
            else:
                metrics.log_many({name: float(step), f"{name}x": 0.0}, step=step)

    run_threads(work, [f"t{i}" for i in range(4)])
    records = metrics.read()
    assert len({record.sequence for record in records}) == len(records) == 4 * 2200
    for i in range(4):
        assert [r.value for r in metrics.read(metric_key=f"t{i}")] == list(map(float, range(2000)))


def steps(metrics, key="m"):
    return [record.step for record in metrics.read(metric_key=key)]


COUNTERS = {
    "numpy": lambda n: np.array([n]).astype(np.int32)[0],
    "torch": lambda n: torch.tensor(n).to(torch.int32),
    "item": lambda n: int(np.array([n]).astype(np.int32)[0]),
    "unsigned": lambda n: np.array([n]).astype(np.uint32)[0],
}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_that_wraps_is_counted_on(metrics, caplog, name):
    near = 2**32 if name == "unsigned" else 2**31
    expected = [near - 2 * 10**6, near - 10, near + 10, near + 5 * 10**8]
    if name in ("numpy", "torch"):
        expected += [2**32 - 10, 2**32 + 5, 2**32 + 10**9]
    for number in expected:
        metrics.log("m", 1.0, step=COUNTERS[name](number))
        metrics.log({"n": 1.0}, step=COUNTERS[name](number))
    assert steps(metrics) == steps(metrics, "n") == expected
    assert len([each for each in caplog.messages if "overflowed" in each]) == 1


@pytest.mark.parametrize("step", [-1, np.int32(-1), np.int64(-(2**40)), np.int8(-3), -1.0])
def test_a_step_that_is_negative_without_having_wrapped_is_refused(metrics, step):
    with pytest.raises(quark_SchemaValidationError, match="step must not be negative"):
        metrics.log("m", 1.0, step=step)


def test_a_strict_run_counts_no_counter_on(strict_session):
    metrics = quark.MetricsLogger(strict_session)
    with pytest.raises(quark_SchemaValidationError, match="step must not be negative"):
        metrics.log("m", 1.0, step=np.int32(-1627389952))


def test_a_loop_that_begins_anew_has_not_wrapped(metrics):
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
    with pytest.raises(quark_SchemaValidationError, match="step must be"):
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
    with pytest.raises(quark_SchemaValidationError, match=r"metrics\['note'\] must be a number"):
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
def test_a_number_beyond_float64_is_kept_as_an_infinity_and_told_of(session, metrics, value):
    metrics.log("m", value, step=0)
    metrics.log({"m": value, "n": decimal.Decimal("1.1")}, step=1)
    sign = math.copysign(math.inf, float(value > 0) - 0.5)
    assert [record.value for record in metrics.read(metric_key="m")] == [sign] * 2
    assert [record.value for record in metrics.read(metric_key="n")] == [1.1]
    (told,) = quark.EventLogger(session).read(event_type="non_finite_metric")
    assert told.payload["metric_key"] == "m"


def test_read_and_columns_hold_the_same_points(metrics):
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
    with pytest.raises(quark_SchemaValidationError, match="aliases must be a sequence"):
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
        with pytest.raises(quark_SchemaValidationError, match=r"full_tensor\(\)"):
            call()
