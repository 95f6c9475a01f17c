"""Summaries of layers: one layer over all steps, and the heat map of all of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, print_figures, time_side_by_side

from quark_core.backends.contract import Batch
from quark_core.backends.grids import GridQuery
from quark_core.records.query import Query
from storage.stores import RUN_ID, START_US, STEP_US, BenchStore, make_batch

_STATISTICS = ("mean", "std", "norm", "variance", "dead_unit_ratio", "saturation_ratio")


def measure_layers(*, quick: bool) -> dict[str, float]:
    layers, steps, rounds = (100, 100, 5) if quick else (1_000, 1_000, 7)
    with tempfile.TemporaryDirectory() as name:
        store = BenchStore(Path(name))
        batches = list(_make_batches(layers, steps))
        begin = time.perf_counter()
        store.fill(batches)
        written_s = time.perf_counter() - begin
        before_bytes = store.measure_bytes()
        begin = time.perf_counter()
        store.compact()
        compacted_s = time.perf_counter() - begin
        store.give_space_back()
        after_bytes = store.measure_bytes()

        def read(names: tuple[str, ...], **equals: str) -> list[Any]:
            reader = store.open_reader()
            columns = reader.read(RUN_ID, "layer", Query(equals=equals))
            found = [columns[name] for name in names]
            reader.close()
            return found

        layer = _name_layer(layers // 2)
        (found_steps,) = read(("step",), module_name=layer)
        assert np.array_equal(found_steps, np.arange(steps))
        assert len(read(("norm",))[0]) == layers * steps

        def read_grid() -> Any:
            reader = store.open_reader()
            grid = reader.read_grid(RUN_ID, GridQuery.build("layer", "norm"))
            reader.close()
            return grid

        assert read_grid().values.shape == (layers, steps)
        taken_s = time_side_by_side(
            {
                "grid": read_grid,
                "one": lambda: read(("step", "norm"), module_name=layer),
                "all": lambda: read(("module_name", "step", "norm")),
            },
            rounds,
        )
        store.close()
    rows = layers * steps
    return print_figures(
        f"Summaries of {layers:,} layers x {steps:,} steps, 8 statistics each, compacted",
        [
            Figure("one layer over all steps, ms", taken_s["one"] * 1000, at_most=100),
            Figure("heat map of one statistic, ms", taken_s["all"] * 1000, at_most=200),
            Figure("grid of one statistic, ms", taken_s["grid"] * 1000, at_most=200),
            Figure("bytes a row before compaction", before_bytes / rows),
            Figure("bytes a row after compaction", after_bytes / rows),
            Figure("written, no fsync, rows/s", rows / written_s),
            Figure("compacted, rows/s", rows / compacted_s),
        ],
    )


def _name_layer(index: int) -> str:
    return f"encoder.layers.{index // 4}.{('q', 'k', 'v', 'out')[index % 4]}_proj"


def _make_batches(layers: int, steps: int) -> Iterator[Batch]:
    """A batch a step, its statistics out of single precision, as a model's are."""
    generator = np.random.default_rng(0)
    modules = [_name_layer(index) for index in range(layers)]
    elements = (generator.integers(1, 64, layers) * 4096).tolist()
    shapes = [(32, count // 32) for count in elements]
    for step in range(steps):
        statistics = generator.random((len(_STATISTICS), layers), dtype=np.float32)
        columns = {
            "sequence": list(range(step * layers, (step + 1) * layers)),
            "time_us": [START_US + step * STEP_US + 7 * index for index in range(layers)],
            "module_name": modules,
            "module_type": ["Linear"] * layers,
            "summary_type": ["activation"] * layers,
            "hook_direction": ["forward"] * layers,
            "call_index": [0] * layers,
            "element_count": elements,
            "step": [step] * layers,
            "epoch": [None] * layers,
            "tensor_shape": shapes,
            **dict(zip(_STATISTICS, statistics.astype(np.float64).tolist(), strict=True)),
            "metadata": [None] * layers,
        }
        yield make_batch(step + 1, "layer", columns)
