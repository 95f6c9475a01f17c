"""Curves out of roll-ups are those of the points, with every extreme."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import Store
from tiers import count_examples

from quark_backends.store.chunks import CODEC_PCODEC, CODEC_ZSTD
from quark_backends.store.rollups import decode_rollups, encode_rollup, summarize_blocks
from quark_core.backends.contract import Batch
from quark_core.records.codec import encode_columns
from quark_core.records.query import Query


def fill(store, writer, values, *, steps=None, epochs=None, key="loss", batch=5_000):
    """Log an array of values, quickly."""
    count = len(values)
    steps = list(range(count)) if steps is None else list(steps)
    for start in range(0, count, batch):
        part = slice(start, min(start + batch, count))
        rows = part.stop - part.start
        columns = {
            "sequence": list(range(part.start, part.stop)),
            "time_us": [
                1_767_225_600_000_000 + 20_000 * n + n % 97 for n in range(*part.indices(count))
            ],
            "metric_key": [key] * rows,
            "namespace": [None] * rows,
            "metric_name": [key] * rows,
            "value": [float(v) for v in values[part]],
            "step": steps[part],
            "epoch": [None] * rows if epochs is None else list(epochs[part]),
        }
        body = encode_columns("metric", rows, columns)
        head = (store.run_id, writer.id, writer.attempt, writer.rank, writer.number)
        store.ingest.write([Batch(*head, "metric", rows, body)])
        writer.number += 1


def check(series, values, steps):
    """Every promise of a Series, against the points themselves."""
    values, steps = np.asarray(values, dtype=float), np.asarray(steps)
    edges = np.concatenate(([0], np.cumsum(series.count)))
    assert edges[-1] == series.points == len(values)
    for entry, (start, end) in enumerate(pairwise(edges)):
        part, its_steps = values[start:end], steps[start:end]
        finite = np.isfinite(part)
        assert series.step[entry] == its_steps[0]
        assert series.non_finite[entry] == len(part) - finite.sum()
        np.testing.assert_equal(series.last[entry], part[-1])
        if not finite.any():
            assert np.isnan([series.low[entry], series.high[entry], series.mean[entry]]).all()
            assert series.low_step[entry] == series.high_step[entry] == -1
            continue
        assert series.low[entry] == part[finite].min()
        assert series.high[entry] == part[finite].max()
        assert series.low_step[entry] == its_steps[np.flatnonzero(part == series.low[entry])[0]]
        assert series.high_step[entry] == its_steps[np.flatnonzero(part == series.high[entry])[0]]
        assert series.mean[entry] == pytest.approx(part[finite].mean(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("single", "codec", "reductions"),
    [
        (True, CODEC_ZSTD, (1, 7, 500)),
        *(
            pytest.param(single, codec, (1, 2, 7, 100, 500, 3_000, 39_999), marks=pytest.mark.long)
            for single in (True, False)
            for codec in (CODEC_ZSTD, CODEC_PCODEC)
        ),
    ],
)
def test_a_spike_of_one_point_is_in_every_reduction(store, codec, single, reductions):
    count = 40_000
    generator = np.random.default_rng(0)
    values = generator.normal(size=count)
    values = values.astype(np.float32).astype(float) if single else values
    values[31_007], values[12_345] = 1e6, -1e6
    fill(store, store.start(), values)
    for compacted in (False, True):
        if compacted:
            store.compact(codec=codec)
        for max_points in reductions:
            series = store.reader.read_series(store.run_id, "loss", max_points=max_points)
            assert len(series) <= max_points
            assert (series.high.max(), series.low.min()) == (1e6, -1e6)
            assert series.high_step[series.high.argmax()] == 31_007
            assert series.low_step[series.low.argmin()] == 12_345
            check(series, values, np.arange(count))
    exact = store.reader.read_series(store.run_id, "loss", max_points=None)
    assert exact.exact
    assert exact.last.tolist() == values.tolist()
    assert len(store.reader.read_series(store.run_id, "none", max_points=10)) == 0


@pytest.mark.long
@settings(
    max_examples=count_examples(40),
    deadline=None,
)
@given(st.data())
def test_curves_of_anything_agree_with_the_points(tmp_path_factory, data):
    count = data.draw(st.integers(1, 2_000))
    seed = data.draw(st.integers(0, 100))
    generator = np.random.default_rng(seed)
    values = generator.normal(size=count).round(data.draw(st.integers(0, 6)))
    for bad in (math.nan, math.inf, -math.inf):
        values[generator.random(count) < data.draw(st.sampled_from([0, 0, 0.01, 0.6]))] = bad
    steps = np.arange(count) * data.draw(st.integers(0, 5))
    if data.draw(st.booleans()):
        steps = generator.integers(0, 50, size=count)
    epochs = (np.arange(count) // 100).tolist() if data.draw(st.booleans()) else None
    store = Store(tmp_path_factory.mktemp("store"))
    try:
        fill(store, store.start(), values, steps=steps.tolist(), epochs=epochs, batch=300)
        if data.draw(st.booleans()):
            store.compact(codec=data.draw(st.sampled_from([CODEC_ZSTD, CODEC_PCODEC])))
        max_points = data.draw(st.integers(1, 40))
        series = store.reader.read_series(store.run_id, "loss", max_points=max_points)
        assert len(series) <= max_points
        check(series, values, steps)
        if epochs is not None:
            firsts = np.concatenate(([0], np.cumsum(series.count)[:-1]))
            assert series.epoch.tolist() == [epochs[first] for first in firsts]
    finally:
        store.close()


def test_rollups_come_back_as_the_blocks_they_were(store):
    generator = np.random.default_rng(1)
    values = generator.normal(size=8_192 * 2 + 100)
    values[500:700] = math.nan
    fill(store, store.start(), values)
    columns = store.reader.read(store.run_id, "metric", Query())
    parts = [columns.take(slice(start, start + 8_192)) for start in range(0, len(values), 8_192)]
    blocks = decode_rollups([encode_rollup(part) for part in parts])
    assert sum(len(part.count) for part in blocks) == 2 * 128 + 2
    whole = [summarize_blocks(part) for part in parts]
    for name in ("count", "step", "time_us", "low", "high", "mean", "last", "high_step"):
        joined = np.concatenate([getattr(part, name) for part in blocks])
        np.testing.assert_array_equal(joined, np.concatenate([getattr(w, name) for w in whole]))


def test_a_damaged_rollup_costs_time_and_nothing_else(store):
    values = np.arange(30_000) % 777
    fill(store, store.start(), values)
    store.compact()
    store.connection.execute("UPDATE chunk SET rollup = substr(rollup, 1, 50)")
    series = store.reader.read_series(store.run_id, "loss", max_points=100)
    check(series, values, np.arange(30_000))


def test_the_tail_that_is_not_compacted_is_part_of_the_curve(store):
    writer = store.start()
    values = np.sin(np.arange(20_000) / 300)
    fill(store, writer, values[:17_000])
    store.compact()
    tail = [("loss", float(v), 17_000 + n) for n, v in enumerate(values[17_000:])]
    writer.sequences["metric"] = 17_000
    writer.log(*tail)
    check(store.reader.read_series(store.run_id, "loss", max_points=50), values, np.arange(20_000))
