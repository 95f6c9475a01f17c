"""Which records go among the artifacts, since MLflow would give an analyzer something else."""

import math

import pytest

from quark_backends.mlflow.reader import needs_file, reduce_batch
from quark_core.records import LifecycleRecord, MetricRecord
from quark_core.records.json_object import JsonObject
from quark_core.testing.fakes import BatchMaker

ORIGIN = ("run0", "w0", 0, 0, 0, 10**15)


def keep(record):
    kept = reduce_batch(BatchMaker("run0").batch([record]), [record])
    return kept, kept is not None and needs_file(kept, [record])


@pytest.mark.parametrize(
    ("value", "step", "epoch", "is_kept"),
    [
        (1.0, 3, None, False),
        (math.nan, 3, None, False),
        (math.inf, 3, None, True),
        (1.0, 3, 1, True),
        (1.0, None, 1, True),
        (1.0, None, None, True),
    ],
)
def test_metrics_are_kept_that_have_no_place_in_a_point(value, step, epoch, is_kept):
    record = MetricRecord(*ORIGIN, "loss", None, "loss", value, step, epoch)
    kept, is_needed = keep(record)
    assert (kept is not None, is_needed) == (is_kept, is_kept)


@pytest.mark.parametrize(
    ("values", "is_needed"),
    [
        ({"lr": 0.1, "name": "x", "deep": None, "sizes": [1, 2], "fast": True}, False),
        ({"model": {"depth": 3}}, True),
        ({"version": "1"}, True),
        ({"text": "x" * 7000}, True),
    ],
)
def test_a_configuration_is_needed_that_params_do_not_give_back(values, is_needed):
    record = LifecycleRecord(*ORIGIN, "config", JsonObject({"values": values}))
    assert keep(record)[1] == is_needed


def test_of_the_environment_only_what_was_imported_is_kept():
    data = {"imported": ["torch"], "host": {"name": "secret"}, "packages": {"torch": "2.4"}}
    kept, is_needed = keep(LifecycleRecord(*ORIGIN, "environment", JsonObject(data)))
    assert not is_needed
    (record,) = kept.to_records()
    assert record.data == {"imported": ["torch"]}
