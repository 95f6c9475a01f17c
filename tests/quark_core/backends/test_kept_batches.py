"""Batches as JSON and back, and runs read out of batches that lie about in any order."""

import json
import math
import random

import pytest

from quark_core.backends.stored_batches import describe_run, dump_batch, restore_batch, select_rows
from quark_core.errors import RunNotFoundError, SchemaValidationError
from quark_core.records import RECORD_TYPES
from quark_core.records.query import Query
from quark_core.records.schema import validate_record
from quark_core.testing.fakes import FIRST_TIME_US, BatchMaker, make_samples


def through_json(batch):
    return restore_batch(json.loads(json.dumps(dump_batch(batch))))


@pytest.mark.parametrize("kind", sorted(RECORD_TYPES))
def test_a_batch_of_any_kind_comes_back_through_json(kind):
    for record in make_samples(kind, "run0"):
        validate_record(record)
    batch = BatchMaker("run0", attempt=2, rank=1).samples(kind)
    assert through_json(batch) == batch


def test_values_that_are_not_finite_come_back():
    batch = BatchMaker("run0").metrics(("m", 0, math.nan), ("m", 1, -math.inf), ("m", 2, -0.0))
    assert repr([r.value for r in through_json(batch).to_records()]) == "[nan, -inf, -0.0]"


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "hologram"},
        {"records": [{"sequence": "one"}]},
        {"records": None},
        {"number": "one"},
        {"writer_id": 3},
    ],
)
def test_what_is_no_batch_is_refused(change):
    data = dump_batch(BatchMaker("run0").metrics(("m", 0, 1.0)))
    with pytest.raises(SchemaValidationError, match="not a valid batch"):
        restore_batch({**data, **change})
    with pytest.raises(SchemaValidationError):
        restore_batch({})


def make_run():
    first = BatchMaker("run0")
    later = BatchMaker("run0", attempt=1, writer_id="w1", started_us=FIRST_TIME_US + 10**6)
    rank = BatchMaker("run0", rank=1, writer_id="r1")
    return [
        first.start(project="vision", tags=["b"]),
        first.metrics(*[("m", step, float(step)) for step in range(6)]),
        rank.metrics(("m", 2, 20.0)),
        first.lifecycle(("tag", {"tag": "a"})),
        first.lifecycle(("status", {"status": "failed"})),
        later.start(project="vision", from_step=4),
        later.metrics(("m", 4, 40.0)),
        later.lifecycle(("config", {"values": {"lr": 0.5}, "notes": []})),
        later.lifecycle(("status", {"status": "completed"})),
    ]


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_arrival_and_repetition_change_nothing(seed):
    batches = make_run() * 2
    random.Random(seed).shuffle(batches)
    found = select_rows(batches, "metric", Query())
    assert found["value"].tolist() == [0.0, 1.0, 2.0, 3.0, 20.0, 40.0]
    every = select_rows(batches, "metric", Query(all_attempts=True))
    assert every["value"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 20.0, 40.0]
    assert select_rows(batches, "metric", Query(limit=1))["value"].tolist() == [40.0]
    run = describe_run(batches)
    assert (run.run.status, run.run.resume_count, run.run.tags) == ("completed", 1, ("a", "b"))
    assert (run.project.name, run.config.values) == ("vision", {"lr": 0.5})
    assert run.run.ended_at is not None


def test_what_starts_no_run_is_none():
    with pytest.raises(RunNotFoundError):
        describe_run([BatchMaker("run0").metrics(("m", 0, 1.0))])
    assert select_rows([], "metric", Query()).count == 0
