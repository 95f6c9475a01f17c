"""A grid is the same whether its records are compacted, hidden in part, or damaged in part."""

import logging
import math

import numpy as np
import pytest

from quark_backends.store.chunks import CODEC_PCODEC, CODEC_ZSTD
from quark_core.backends.grids import FINITE, NOT_FINITE, GridBuilder, GridQuery
from quark_core.records import SystemTelemetryRecord

NAMES = [f"blocks.{i}.{part}" for i in range(3) for part in ("attn", "mlp")]


def log_layers(writer, steps, offset=0.0):
    for step in steps:
        writer.write(
            [
                writer.layer(
                    name, step,
                    norm=math.nan if (place, step) == (1, 12) else offset + place + step / 100,
                    dead_unit_ratio=None if place == 2 else 0.5,
                    nan_count=int((place, step) == (3, 5)), inf_count=0,
                )
                for place, name in enumerate(NAMES)
            ]
        )  # fmt: skip


def assert_as_records_say(store, **asked):
    kind, field = asked.pop("kind", "layer"), asked.pop("field", "norm")
    query = GridQuery.build(kind, field, **asked)
    grid = store.reader.read_grid("run0", query)
    builder = GridBuilder(query)
    builder.add_columns(store.reader.read("run0", kind, query.query))
    known = builder.make_grid()
    for name in ("names", "exact", "depth", "left_out", "points"):
        assert getattr(grid, name) == getattr(known, name)
    for name in ("starts", "ends", "values", "marks"):
        np.testing.assert_array_equal(getattr(grid, name), getattr(known, name))
    return grid


@pytest.mark.parametrize("codec", [CODEC_ZSTD, CODEC_PCODEC])
def test_a_grid_out_of_chunks_is_that_of_the_records(store, codec):
    log_layers(store.writer, range(40))
    store.compact(codec=codec)
    log_layers(store.writer, range(40, 60))
    resumed = store.start(from_step=50)
    log_layers(resumed, range(50, 70), offset=100.0)
    store.compact(codec=codec)
    log_layers(resumed, range(70, 72), offset=100.0)
    grid = assert_as_records_say(store)
    assert (grid.names, grid.values.shape) == (tuple(NAMES), (6, 72))
    assert grid.values[0, 49:51].tolist() == [0.49, 100.5]
    assert (grid.marks == NOT_FINITE).sum() == 2
    assert grid.marks[1, 12] == grid.marks[3, 5] == NOT_FINITE
    for asked in (
        {"bins": 7}, {"low": 30, "high": 55}, {"under": "blocks.1"}, {"all_attempts": True},
        {"field": "dead_unit_ratio"}, {"field": "nan_count"}, {"field": "saturation_ratio"},
        {"by": "rank"}, {"rows": 3}, {"summary_type": "gradient"}, {"rank": 5},
    ):  # fmt: skip
        assert_as_records_say(store, **asked)
    both = assert_as_records_say(store, all_attempts=True, low=50, high=50)
    assert both.values[0].tolist() == [100.5]
    assert "blocks.1.attn" not in assert_as_records_say(store, field="dead_unit_ratio").names


def test_ranks_are_rows_of_telemetry(store):
    for rank in (1, 0):
        writer = store.writer if rank == 0 else type(store.writer)(store, 0, rank)
        writer.write(
            [
                SystemTelemetryRecord(
                    *writer.head("telemetry"), "step", step, step_time_ms=10.0 * rank + step
                )
                for step in range(5)
            ]
        )
        store.compact()
    grid = assert_as_records_say(store, kind="telemetry", field="step_time_ms")
    assert (grid.names, grid.values[1].tolist()) == (("0", "1"), [10.0, 11.0, 12.0, 13.0, 14.0])


def test_a_damaged_chunk_is_left_out_and_told(store, caplog):
    log_layers(store.writer, range(20))
    store.compact()
    body = store.connection.execute("SELECT body FROM chunk WHERE kind = 'layer'").fetchone()[0]
    store.connection.execute(
        "UPDATE chunk SET body = ? WHERE kind = 'layer'", (body[:-1] + bytes([body[-1] ^ 1]),)
    )
    log_layers(store.writer, range(20, 22))
    with caplog.at_level(logging.WARNING):
        grid = store.reader.read_grid("run0", GridQuery.build("layer", "norm"))
    assert grid.starts.tolist() == [20, 21]
    assert (grid.marks == FINITE).all()
    assert "its 120 records are omitted" in caplog.text
