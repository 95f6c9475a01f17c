"""Builds the data of a run for the analyzers, out of plain curves."""

import numpy as np

from quark.analysis.run_data import RunData
from quark_core.records import (
    LayerSummaryRecord,
    MetricRecord,
    ParameterSummaryRecord,
)
from quark_core.records.columns import Columns, fill_array
from quark_core.records.json_object import JsonObject

RUN_ID = "run-a"


class RunBuilder:
    """Collects records; `build()` gives a RunData over them."""

    def __init__(self):
        self.records = {}
        self._clock = 1_767_225_600_000_000

    def _head(self, kind, rank=0):
        self._clock += 1000
        sequence = len(self.records.setdefault(kind, []))
        return RUN_ID, f"writer-{'abcdefgh'[rank]}", 1, rank, sequence, self._clock

    def metric(self, key, values, *, steps=None, epochs=None):
        """A metric; over 0, 1, 2 … where nothing else is said."""
        if steps is None and epochs is None:
            steps = range(len(values))
        for index, value in enumerate(values):
            head = self._head("metric")
            namespace, _, name = key.rpartition("/")
            step = None if steps is None else int(steps[index])
            epoch = None if epochs is None else int(epochs[index])
            self.records["metric"].append(
                MetricRecord(*head, key, namespace or None, name, float(value), step, epoch)
            )
        return self

    def layer(self, name, kind="Linear", summary="activation", *, steps, metadata=None, **figures):
        """A layer's summaries; each figure, and the metadata, is one thing or one a step."""
        for index, step in enumerate(steps):
            head = self._head("layer")
            one = {
                key: float(value[index]) if np.ndim(value) else float(value)
                for key, value in figures.items()
            }
            for key in ("nan_count", "inf_count"):
                one[key] = int(one.get(key, 0))
            count = int(one.pop("element_count", 100))
            self.records["layer"].append(
                LayerSummaryRecord(
                    *head, name, kind, summary,
                    "forward" if summary == "activation" else "backward", 0, count, int(step),
                    metadata=_take_metadata(metadata, index), **one,
                )
            )  # fmt: skip
        return self

    def parameter(
        self, name, *, steps, kind="Linear", role="weight", requires_grad=True, in_optimizer=True,
        element_count=100, metadata=None, rank=0, **figures,
    ):  # fmt: skip
        """A parameter's summaries; figures, flags and metadata are one thing or one a step."""
        module = name.rpartition(".")[0]
        for index, step in enumerate(steps):
            head = self._head("parameter", rank)
            one = {}
            for key, value in figures.items():
                number = float(value[index]) if np.ndim(value) else float(value)
                one[key] = None if np.isnan(number) else number
            for key in ("non_finite_value_count", "non_finite_gradient_count"):
                one[key] = int(one.get(key) or 0)
            self.records["parameter"].append(
                ParameterSummaryRecord(
                    *head, module, kind, name, role, "float32", element_count,
                    _take(requires_grad, index), _take(in_optimizer, index), int(step),
                    metadata=_take_metadata(metadata, index), **one,
                )
            )  # fmt: skip
        return self

    def read(self, kind, _query):
        """Columns of one kind."""
        return Columns.from_records(kind, self.records.get(kind, []))

    def build(self):
        """The run's data."""
        return RunData(self.read, RUN_ID)


def _take(flag, index):
    return flag[index] if isinstance(flag, list) else flag


def _take_metadata(metadata, index):
    one = _take(metadata, index)
    return None if one is None else JsonObject(one)


def falling(count=200, start=2.0, end=0.1, noise=0.02, seed=0, rate=5.0):
    """A loss that falls as an exponential, with noise."""
    rng = np.random.default_rng(seed)
    curve = end + (start - end) * np.exp(-rate * np.arange(count) / count)
    return curve + noise * rng.standard_normal(count)


def make_part(key, start, values, *, rank=0):
    """Rows of one metric, as a store gives a part of them."""
    count = len(values)
    steps = np.arange(start, start + count)
    texts = {"run_id": "r", "writer_id": "w", "metric_key": key, "metric_name": key}
    arrays = {name: fill_array(count, text) for name, text in texts.items()}
    arrays |= {name: fill_array(count, None) for name in ("namespace", "description", "metadata")}
    arrays |= {"attempt": np.zeros(count, np.int64), "rank": np.full(count, rank)}
    arrays |= {"sequence": steps, "step": steps, "epoch": np.full(count, -1)}
    arrays |= {"time_us": steps + 1_767_225_600_000_000, "value": np.asarray(values, float)}
    return Columns("metric", count, arrays)
