"""aggregate: a value of each batch without a point of each batch."""

from __future__ import annotations

import itertools
import math
import os
import signal
import statistics
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.programs import start_code

import quark
from quark_core.records.kinds.provenance import AggregateRecord
from quark_core.records.query import Query
from quark_core.records.running_statistics import Tally
from quark_core.runs import recovery
from quark_core.runs.run_report import summarize_records
from quark_core.writers import loop_metrics as aggregates_module
from tests.tiers import count_examples


def test_stat_aggregator_keeps_mean_deviation_and_extremes(metrics):
    values = np.linspace(-2.0, 5.0, 700)
    for value in values:
        metrics.aggregate("loss/batch", value)
    found = metrics.read_aggregates()["loss/batch"]
    assert found.count == 700
    assert found.mean == pytest.approx(values.mean())
    assert found.deviation == pytest.approx(values.std())
    assert (found.low, found.high, found.first, found.last) == (-2.0, 5.0, -2.0, 5.0)
    assert found.quantile(0.9) == pytest.approx(np.quantile(values, 0.9), rel=0.06)
    assert found.total == pytest.approx(values.sum())


def test_ring_aggregator_keeps_the_newest_fifty_with_their_steps(metrics, session):
    for step in range(120):
        metrics.aggregate("norm", float(step), keep="ring", step=step)
    found = metrics.read_aggregates()["norm"]
    assert found.values == tuple(map(float, range(70, 120)))
    assert (found.count, found.keep) == (120, "ring")
    assert found.quantile(0.5) == 95.0
    record = session.open_run.read("aggregate", Query()).to_records()[0]
    assert record.places == tuple(range(70, 120))
    assert (record.step, record.buckets) == (119, None)


def test_value_aggregator_keeps_the_newest(metrics):
    for value in (3, 2, True, 7):
        metrics.aggregate("best", value, keep="value")
    found = metrics.read_aggregates()["best"]
    assert (found.last, found.values, found.count) == (7.0, (7.0,), 4)


def test_series_aggregator_is_a_metric(metrics, session):
    for step in range(3):
        metrics.aggregate("every", step / 2, keep="series", step=step)
    session.step(9)
    metrics.aggregate("every", 4.0, keep="series")
    assert [(r.step, r.value) for r in metrics.read(metric_key="every")] == [
        (0, 0.0), (1, 0.5), (2, 1.0), (9, 4.0),
    ]  # fmt: skip
    assert len(metrics.read_aggregates()) == 0


def test_numbers_of_any_library_are_taken_and_others_refused(metrics):
    torch = pytest.importorskip("torch")
    for value in (1, np.float32(2.0), np.array(3.0), torch.tensor(4.0), torch.tensor([5.0])):
        metrics.aggregate("x", value)
    assert metrics.read_aggregates()["x"].total == 15.0
    for bad in ("1", None, [1.0], np.zeros(2), 1j):
        with pytest.raises(quark.SchemaValidationError, match="value must be a number"):
            metrics.aggregate("x", bad)


def test_what_is_not_finite_is_counted_apart(metrics):
    for value in (math.nan, 1.0, math.inf, 3.0, -math.inf):
        metrics.aggregate("x", value)
        metrics.aggregate("ring", value, keep="ring")
    found = metrics.read_aggregates()
    assert (found["x"].count, found["x"].non_finite, found["x"].mean) == (2, 3, 2.0)
    assert (found["x"].first, found["x"].last) == (1.0, 3.0)
    assert found["ring"].values == (1.0, 3.0)


def test_a_strict_run_refuses_what_is_not_finite(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, strict_mode=True) as session:
        metrics = quark.MetricsLogger(session)
        with pytest.raises(quark.SchemaValidationError, match="must be finite"):
            metrics.aggregate("x", math.nan)


def test_bad_arguments_are_named(metrics):
    with pytest.raises(quark.SchemaValidationError, match="one of 'stat', 'ring', 'value'"):
        metrics.aggregate("x", 1.0, keep="mean")
    with pytest.raises(quark.SchemaValidationError, match="key must be a str"):
        metrics.aggregate(None, 1.0)
    with pytest.raises(quark.SchemaValidationError, match="step"):
        metrics.aggregate("x", 1.0, step=-1)
    metrics.aggregate("y", 1.0)
    with pytest.raises(quark.SchemaValidationError, match="'ring' is not possible"):
        metrics.aggregate("y", 1.0, keep="ring")


def test_ten_thousand_keys_are_bounded_and_told_once(metrics, caplog):
    for number in range(10_000):
        metrics.aggregate(f"k{number}", 1.0)
        with metrics.timer(f"t{number}"):
            pass
    assert len(metrics.read_aggregates()) == 1_000
    assert caplog.text.count("more than 1000 keys") == 1


def test_a_queue_that_nobody_drains_is_folded_by_who_fills_it(metrics, session):
    for _ in range(100_000):
        metrics.aggregate("x", 1.0)
    gathering = metrics._gatherings["x"]
    assert len(gathering.items) <= aggregates_module.LONG_QUEUE
    assert metrics.read_aggregates()["x"].count == 100_000


def test_windows_that_a_resumed_attempt_does_again_are_hidden(tmp_path):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    metrics = quark.MetricsLogger(session)
    for step in (5, 15):
        session.step(step)
        metrics.aggregate("x", float(step))
        session.flush()
    session.end_run("interrupted")
    session = quark.TrainingSession.resume_run(
        run_id=session.run_id, storage_dir=tmp_path, from_step=10
    )
    with session:
        metrics = quark.MetricsLogger(session)
        metrics.aggregate("x", 100.0, step=12)
        found = metrics.read_aggregates()["x"]
        assert (found.count, found.low, found.high) == (2, 5.0, 100.0)
        assert metrics.read_aggregates(all_attempts=True)["x"].count == 3


def test_eight_ranks_add_up_to_the_whole():
    rng = np.random.default_rng(1)
    values = rng.lognormal(size=(8, 3, 400))
    records = []
    for rank in range(8):
        for window in range(3):
            part = values[rank, window]
            tally = aggregates_module.Tally()
            tally.add_values(part.tolist())
            records.append(
                AggregateRecord(
                    "r", f"w{rank}", 0, rank, window, 10 + window, "x", "timer", "s", window,
                    None, None, tally.count, tally.mean, tally.m2, tally.low, tally.high,
                    1.0 + rank if window == 0 else None, float(part[-1]), 0, 1, "wall_clock",
                    quark_object(tally.encode_buckets()),
                )
            )  # fmt: skip
    rng.shuffle(records)
    found = summarize_records(records)["x"]
    assert found.count == values.size
    assert found.mean == pytest.approx(values.mean(), rel=1e-12)
    assert found.deviation == pytest.approx(values.std(), rel=1e-12)
    for share in (0.01, 0.5, 0.99):
        assert found.quantile(share) == pytest.approx(np.quantile(values, share), rel=0.06)
    assert found.failed == 24
    assert found.first == 8.0
    assert found.total == pytest.approx(values.sum() + sum(range(1, 9)))


def quark_object(values):
    from quark_core.records.json_object import JsonObject

    return JsonObject(values)


PROGRAM = """
import sys, time, quark
session = quark.start_run(project="p", storage_dir=sys.argv[1])
metrics = quark.MetricsLogger(session)
print(session.run_id, flush=True)
for _ in range(10):
    metrics.aggregate("before", 1.0)
session.flush("journaled")
for _ in range(5):
    metrics.aggregate("since", 1.0)
with metrics.timer("open"):
    print("inside", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM"])
def test_a_kill_costs_what_came_since_the_last_record_and_sigterm_nothing(tmp_path, number):
    process = start_code(textwrap.dedent(PROGRAM), tmp_path, env={**os.environ, "QUARK_QUIET": "1"})
    with process:
        run_id = process.stdout.readline().strip()
        assert process.stdout.readline() == "inside\n"
        process.send_signal(getattr(signal, number))
    recovery.sync(tmp_path)
    found = quark.MetricsLogger(quark.open_run(run_id, tmp_path)).read_aggregates()
    counts = {each.key: each.count for each in found}
    assert counts["before"] == 10
    assert counts.get("since") == (5 if number == "SIGTERM" else None)


def test_means_are_curves_of_mirrors():
    from quark_backends.mirror_records import Curves

    def make(keep, **more):
        return AggregateRecord("r", "w", 0, more.pop("rank", 0), 0, 1, "fwd", keep, count=2,
                               mean=0.5, last=0.7, step=3, **more)  # fmt: skip

    curves = Curves("system")
    assert curves.list_values(make("timer")) == [("timers/fwd", 0.5)]
    assert curves.list_values(make("stat", rank=2)) == [("rank2/aggregates/fwd", 0.5)]
    assert curves.list_values(make("value")) == [("aggregates/fwd", 0.7)]


numbers = st.floats(min_value=-1e9, max_value=1e9, allow_subnormal=False)
many = st.lists(numbers, min_size=1, max_size=60)
few = settings(max_examples=count_examples(300), deadline=None)


def tally(values):
    made = Tally()
    made.add_values(values)
    return made


def merge(parts):
    """In a tree, from the last to the first, so that no order is a special one."""
    made = [tally(part) for part in parts]
    while len(made) > 1:
        right, left = made.pop(), made.pop(0)
        right.add(left)
        made.append(right)
    return made[0]


@st.composite
def cut(draw):
    values = draw(many)
    places = sorted(draw(st.lists(st.integers(0, len(values)), max_size=8)))
    edges = [0, *places, len(values)]
    parts = [values[a:b] for a, b in itertools.pairwise(edges)]
    return values, draw(st.permutations(parts))


@few
@given(cut())
def test_parts_in_any_grouping_and_order_are_the_whole(given_parts):
    values, parts = given_parts
    whole, merged = tally(values), merge(parts)
    scale = max(1.0, *(abs(value) for value in values))
    assert merged.count == len(values)
    assert merged.mean == pytest.approx(statistics.fmean(values), abs=1e-9 * scale)
    assert merged.deviation == pytest.approx(statistics.pstdev(values), rel=1e-6, abs=1e-7 * scale)
    assert (merged.low, merged.high) == (min(values), max(values))
    assert merged.encode_buckets() == whole.encode_buckets()


@few
@given(
    st.lists(st.one_of(st.floats(1e-9, 1e9), st.floats(-1e9, -1e-9)), min_size=1, max_size=80),
    st.floats(0.01, 0.99),
)
def test_a_quantile_is_within_six_percent(values, share):
    expected = sorted(values)[math.ceil(share * len(values)) - 1]
    assert tally(values).find_quantile(share) == pytest.approx(expected, rel=0.06)


def test_extremes_of_float64_neither_raise_nor_spoil_the_rest():
    made = tally([1.7e308, 1.7e308, -1.7e308, 5e-324, 0.0, math.nan, math.inf, -math.inf])
    assert (made.count, made.non_finite) == (5, 3)
    assert math.isfinite(made.mean)
    assert made.deviation is None
    assert made.find_quantile(0) == -1.7e308
    assert made.find_quantile(1) == 1.7e308
    assert sum(made.encode_buckets().values()) == 5


def test_buckets_come_back_from_a_record_and_what_is_none_is_left_out():
    made = tally([-3.0, 0.0, 2.0, 2.0])
    again = Tally()
    again.decode_buckets({**made.encode_buckets(), "no": 1, "4": -1, "nn": True, "5": "x"})
    assert again.encode_buckets() == made.encode_buckets()
