"""A figure of layers over steps as a grid: each cell the maximum of what it stands for."""

import math
from dataclasses import replace

import numpy as np
import pytest

from quark_core.backends import grids
from quark_core.backends.grids import EMPTY, FINITE, NOT_FINITE, GridBuilder, GridQuery
from quark_core.errors import SchemaValidationError
from quark_core.records import LayerSummaryRecord, ParameterSummaryRecord, SystemTelemetryRecord
from quark_core.records.columns import Columns
from quark_core.runs.following import read_grid

NAMES = ["stem", "blocks.2", "blocks.10", "head"]


def head(sequence, rank=0):
    return "run0", f"writer{rank}", 0, rank, sequence, 1_767_225_600_000_000


def make_layers(steps=range(0, 40, 2), rank=0, norm=lambda place, step: 10.0 * place + step):
    """Activations in the model's order, gradients in the opposite one."""
    records = []
    for step in steps:
        for summary, direction, names in (
            ("activation", "forward", NAMES), ("gradient", "backward", NAMES[::-1]),
        ):  # fmt: skip
            for name in names:
                value = norm(NAMES.index(name), step)
                records.append(
                    LayerSummaryRecord(
                        *head(len(records), rank), name, "Linear", summary, direction, 0, 100,
                        step, norm=value if summary == "activation" else 2 * value,
                        nan_count=0, inf_count=0,
                    )
                )  # fmt: skip
    return records


def make_grid(records, field="norm", kind="layer", parts=1, **asked):
    builder = GridBuilder(GridQuery.build(kind, field, **asked))
    columns = Columns.from_records(kind, records)
    size = -(-columns.count // parts)
    for start in range(0, columns.count, size):
        builder.add_columns(columns.take(slice(start, start + size)))
    return builder.make_grid()


@pytest.mark.parametrize("parts", [1, 7])
def test_a_grid_of_few_steps_has_a_column_for_each(parts):
    grid = make_grid(make_layers(), summary_type="gradient", parts=parts)
    assert (grid.names, grid.exact, grid.depth) == (tuple(NAMES), True, None)
    assert grid.starts.tolist() == grid.ends.tolist() == list(range(0, 40, 2))
    expected = 2 * (10.0 * np.arange(4)[:, None] + np.arange(0, 40, 2))
    np.testing.assert_array_equal(grid.values, expected)
    assert (grid.marks == FINITE).all()
    assert grid.points == 80


@pytest.mark.parametrize("held", [2_000_000, 50])
def test_more_steps_than_columns_become_stretches_that_keep_the_maximum(held, monkeypatch):
    monkeypatch.setattr(grids, "_HELD_ROWS", held)
    spike = {(2, 333): 1e6}
    records = make_layers(range(500), norm=lambda p, s: spike.get((p, s), float(p)))
    grid = make_grid(records, summary_type="activation", bins=16, parts=40)
    assert not grid.exact
    assert 8 <= len(grid.starts) <= 16
    assert grid.starts[0] == 0
    assert (grid.starts[1:] == grid.ends[:-1] + 1).all()
    column = int(np.searchsorted(grid.ends, 333))
    assert grid.values[2, column] == 1e6
    grid.values[2, column] = 2.0
    np.testing.assert_array_equal(grid.values, np.arange(4.0)[:, None] + 0 * grid.starts)
    inside = make_grid(records, summary_type="activation", bins=16, low=330, high=340, parts=3)
    assert (inside.exact, inside.starts.tolist()) == (True, list(range(330, 341)))


def test_what_is_not_finite_is_told_from_what_is_not_there():
    records = make_layers([0, 4])
    broken = [
        replace_fields(records[0], norm=math.nan),
        replace_fields(records[1], norm=math.inf),
        replace_fields(records[2], norm=5.0, nan_count=3),
        replace_fields(records[3], norm=None),
        *(replace_fields(record, norm=None, inf_count=2) for record in records[8:9]),
    ]
    grid = make_grid(broken, summary_type="activation")
    assert grid.names == ("stem", "blocks.2", "blocks.10")
    assert grid.marks.tolist() == [
        [NOT_FINITE, NOT_FINITE], [NOT_FINITE, EMPTY], [NOT_FINITE, EMPTY]
    ]  # fmt: skip
    np.testing.assert_array_equal(grid.values, [[np.nan] * 2, [np.nan] * 2, [5.0, np.nan]])


def replace_fields(record, **fields):
    import msgspec

    return msgspec.structs.replace(record, **fields)


def test_rows_stand_in_the_order_of_the_model():
    gradients = [r for r in make_layers([3]) if r.summary_type == "gradient"]
    assert make_grid(gradients).names == tuple(NAMES)
    late = [*make_layers([3]), replace_fields(make_layers([9])[0], module_name="late")]
    assert make_grid(late, under="blocks.10").names == ("blocks.10",)
    assert make_grid(late).names == (*NAMES, "late")


def test_more_rows_than_asked_for_are_folded_by_module():
    records = [
        ParameterSummaryRecord(
            *head(i), f"blocks.{i // 4}.fc", "Linear", f"blocks.{i // 4}.fc.{name}", "weight",
            "float32", 1, step=0, gradient_norm=float(i), non_finite_gradient_count=int(i == 6),
        )
        for i, name in enumerate(["weight", "bias", "gain", "shift"] * 5)
    ]  # fmt: skip
    grid = make_grid(records, "gradient_norm", "parameter", rows=5)
    assert (grid.names, grid.depth, grid.left_out) == (
        tuple(f"blocks.{i}.fc" for i in range(5)), 3, 0,
    )  # fmt: skip
    assert grid.values[:, 0].tolist() == [3.0, 7.0, 11.0, 15.0, 19.0]
    assert grid.marks[:, 0].tolist() == [FINITE, NOT_FINITE, FINITE, FINITE, FINITE]
    assert make_grid(records, "gradient_norm", "parameter", rows=4).names == ("blocks",)
    flat = [replace_fields(record, parameter_name=f"p{i}") for i, record in enumerate(records)]
    cut = make_grid(flat, "gradient_norm", "parameter", rows=4)
    assert (cut.names, cut.left_out) == (("p0", "p1", "p2", "p3"), 16)


def test_ranks_are_rows_of_telemetry():
    records = [
        SystemTelemetryRecord(*head(step, rank), "step", step, step_time_ms=rank + step / 10)
        for rank in (10, 2)
        for step in range(3)
    ]
    grid = make_grid(records, "step_time_ms", "telemetry")
    assert grid.names == ("2", "10")
    np.testing.assert_allclose(grid.values, [[2.0, 2.1, 2.2], [10.0, 10.1, 10.2]])
    by_rank = make_grid(make_layers([0], rank=3), by="rank", summary_type="gradient")
    assert (by_rank.names, by_rank.values.tolist()) == (("3",), [[60.0]])


def test_a_run_without_such_records_gives_an_empty_grid():
    grid = GridBuilder(GridQuery.build("layer", "norm")).make_grid()
    assert (grid.names, grid.values.shape, grid.exact) == ((), (0, 0), True)


class ReadOnly:
    """A backend that can only be read."""

    def __init__(self, kind, records):
        self._columns = Columns.from_records(kind, records)

    def read(self, run_id, kind, query):
        assert run_id == "run0"
        return self._columns.select(query)

    def load_run(self, run_id):
        raise NotImplementedError

    def list_runs(self, *, project=None, limit=None):
        raise NotImplementedError


def test_any_backend_that_reads_has_grids():
    records = [*make_layers(rank=0), *make_layers(rank=1, norm=lambda p, s: -1.0)]
    reader = ReadOnly("layer", records)
    asked = GridQuery.build("layer", "norm", summary_type="activation", low=3, high=9)
    grid = read_grid(reader, "run0", asked)
    assert grid.starts.tolist() == [4, 6, 8]
    np.testing.assert_array_equal(grid.values[1], [14.0, 16.0, 18.0])
    one = read_grid(reader, "run0", replace(asked, rank=1))
    assert (one.values == -1.0).all()


@pytest.mark.parametrize(
    ("kind", "field", "asked", "message"),
    [
        ("metric", "value", {}, "kind must be one of layer, parameter, telemetry"),
        ("layer", "module_name", {}, "field of layer records must be one of"),
        ("layer", "step", {}, "field of layer records must be one of"),
        ("parameter", "value_norm", {"summary_type": "gradient"}, "only layers have one"),
        ("layer", "norm", {"summary_type": "weight"}, "summary_type must be"),
        (
            "telemetry",
            "step_time_ms",
            {"by": "name"},
            "records must be one of rank",
        ),
        ("layer", "norm", {"bins": 0}, "bins must be from 1 to 4000"),
        ("layer", "norm", {"rows": 3_000}, "rows must be from 1 to 2000"),
        ("layer", "norm", {"low": -1}, "low must not be negative"),
        ("telemetry", "step_time_ms", {"under": "a"}, "under must name a module"),
    ],
)
def test_what_makes_no_sense_is_refused(kind, field, asked, message):
    with pytest.raises(SchemaValidationError, match=message):
        GridQuery.build(kind, field, **asked)
