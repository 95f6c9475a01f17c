"""A record makes curves of the same names in every mirror."""

from types import SimpleNamespace

import pytest

from quark_backends.mlflow.points import key_and_text, list_values, make_metric
from quark_backends.tensorboard.backend import EventMaker
from quark_backends.wandb.history import RowMaker
from quark_backends.wandb.local_files import WandbState
from quark_core.artifacts.payload_folder import PayloadFolder
from quark_core.records import (
    LayerSummaryRecord,
    ParameterSummaryRecord,
)

LAYER = {
    "module_name": "layers.fc1",
    "module_type": "Linear",
    "summary_type": "activation",
    "hook_direction": "forward",
    "call_index": 0,
    "tensor_shape": (8, 4),
    "element_count": 32,
    "step": 3,
    "mean": 0.5,
    "std": 1.0,
    "norm": 2.0,
    "dead_unit_ratio": 0.25,
    "saturation_ratio": 0.5,
    "zero_ratio": 0.125,
    "sample_variation_ratio": 0.75,
    "nan_count": 1,
    "inf_count": 2,
}
PARAMETER = {
    "module_name": "fc1",
    "module_type": "Linear",
    "parameter_name": "fc1.weight",
    "parameter_role": "weight",
    "dtype": "float32",
    "element_count": 4,
    "step": 3,
    "value_norm": 1.0,
    "gradient_norm": 2.0,
    "update_to_parameter_ratio": 0.001,
    "value_near_zero_ratio": 0.0,
}


def make(record_type, rank=0, **fields):
    known = {"run_id": "run0", "writer_id": "w", "attempt": 0, "rank": rank, "sequence": 0}
    return record_type(**known, time_us=1, **fields)


RECORDS = [
    make(LayerSummaryRecord, **LAYER),
    make(LayerSummaryRecord, **{**LAYER, "call_index": 1}),
    make(LayerSummaryRecord, **LAYER, rank=1),
    make(LayerSummaryRecord, **{**LAYER, "module_name": ""}),
    make(ParameterSummaryRecord, **PARAMETER),
    make(ParameterSummaryRecord, **PARAMETER, rank=2),
]


def list_mlflow(record):
    values = list_values(record.KIND, [record], 20)
    return {key_and_text(make_metric(*value))[1] for value in values}


def list_wandb(record):
    maker = RowMaker(WandbState(), strict_names=False, layers=None)
    batch = SimpleNamespace(writer_id="w", number=0)
    keys = {key for row in maker.make(batch, [record]) for key in row.values}
    return {key for key in keys if not key.startswith("quark/")}


def list_tensorboard(record, tmp_path):
    scalars = []

    class Library:
        """Takes note of what becomes a curve."""

        def make_scalar(self, name, value):
            scalars.append(name)

        def encode_event(self, *_):
            return b""

    EventMaker(Library(), PayloadFolder(tmp_path)).make([record], {})
    return set(scalars)


@pytest.mark.parametrize("record", RECORDS, ids=range(len(RECORDS)))
def test_a_record_has_the_same_curves_in_every_mirror(record, tmp_path):
    names = list_mlflow(record)
    assert names == list_wandb(record) == list_tensorboard(record, tmp_path)
    assert len(names) == (9 if record.KIND == "layer" else 4)


def test_the_second_call_of_a_module_is_a_module_of_its_own():
    assert "layers/layers.fc1.call1/activation/mean" in list_mlflow(RECORDS[1])
