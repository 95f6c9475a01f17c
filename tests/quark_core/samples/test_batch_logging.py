"""log_batch: arguments, losses that are not finite, strict runs, threads."""

import math
import threading

import numpy as np
import pytest
import torch

import quark
from quark import (
    BatchMetadata,
    DataDiagnostics,
    DataDiagnosticsConfig,
    EventLogger,
    MappingBatchMetadataAdapter,
)
from quark_core.errors import InvalidRunStateError, SchemaValidationError


def events(session, event_type):
    return EventLogger(session).read(event_type=event_type)


@pytest.mark.long
def test_everything_at_once(diagnostics):
    record = diagnostics.log_batch(
        loss=1.25,
        step=3,
        epoch=1,
        batch_size=2,
        labels=["cat", "dog"],
        sample_ids=[10, 11],
        sequence_lengths=(7, 9),
        metadata={"augmentation": "mixup"},
        timestamp="2026-05-07T09:30:00Z",
    )
    assert record.to_dict() == {
        "id": record.id,
        "run_id": record.run_id,
        "writer_id": record.writer_id,
        "attempt": 0,
        "rank": 0,
        "sequence": 0,
        "timestamp": "2026-05-07T09:30:00.000000Z",
        "loss": 1.25,
        "step": 3,
        "epoch": 1,
        "batch_size": 2,
        "sample_ids": [10, 11],
        "class_counts": {"cat": 1, "dog": 1},
        "sequence_lengths": [7, 9],
        "metadata": {"augmentation": "mixup"},
    }
    assert diagnostics.read() == (record,)
    assert diagnostics.flush() == (record,)
    assert diagnostics.flush() == ()


def test_a_loss_is_enough(diagnostics):
    record = diagnostics.log_batch(2)
    assert (record.loss, record.step, record.epoch, record.batch_size) == (2.0, None, None, None)
    assert record.sample_ids is record.class_counts is record.sequence_lengths is None
    assert diagnostics.read() == (record,)


@pytest.mark.parametrize("loss", [np.float32(0.5), torch.tensor(0.5, requires_grad=True), 0.5])
def test_losses_of_any_kind(diagnostics, loss):
    assert diagnostics.log_batch(loss, step=0).loss == 0.5


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"loss": "low"}, "loss"),
        ({"loss": None}, "loss"),
        ({"loss": torch.zeros(2)}, "loss"),
        ({"loss": True}, "loss"),
        ({"step": -1}, "step"),
        ({"step": 1.5}, "step"),
        ({"epoch": "1"}, "epoch"),
        ({"epoch": True}, "epoch"),
        ({"timestamp": "soon"}, "timestamp"),
        ({"batch_size": -1}, "batch_size"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"metadata": [1]}, "metadata"),
        ({"metadata": {"x": {1}}}, r"metadata\.x"),
        ({"batch": (1, 2)}, "batch is a tuple.*adapter"),
        ({"batch": BatchMetadata(batch_size=3)}, "batch is a BatchMetadata.*adapter"),
        ({"labels": [1], "class_counts": {1: 1}}, "labels and class_counts"),
    ],
    ids=str,
)
def test_misuse_is_named_in_both_modes(diagnostics, strict, arguments, named):
    for each in (diagnostics, strict):
        with pytest.raises(SchemaValidationError, match=named):
            each.log_batch(**{"loss": 0.5, **arguments})
        assert each.read() == ()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 3, "labels": [1, 2]}, "labels has 2 entries, but batch_size is 3"),
        ({"batch_size": 1, "sample_ids": [1, 2]}, "sample_ids has 2 entries, but batch_size is 1"),
        (
            {"batch_size": 0, "sequence_lengths": [1]},
            "sequence_lengths has 1 entries, but batch_size is 0",
        ),
        ({"labels": [1, 2], "sample_ids": [1]}, "labels has 2 entries, but sample_ids has 1"),
        ({"labels": [1], "sequence_lengths": []}, "sequence_lengths has 0 .* but labels has 1"),
        ({"class_counts": [1], "batch_size": 2}, "class_counts has 1 entries, but batch_size is 2"),
    ],
    ids=str,
)
def test_counts_that_differ_are_told_in_both_modes(diagnostics, strict, arguments, message):
    for each in (diagnostics, strict):
        with pytest.raises(SchemaValidationError, match=message):
            each.log_batch(0.5, **arguments)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0),
        ("batch_size", 1.0),
        ("batch_size", True),
        ("batch_size", None),
        ("adapter", object()),
        ("adapter", MappingBatchMetadataAdapter),
        ("outlier_z_score_threshold", 0),
        ("outlier_z_score_threshold", math.nan),
        ("outlier_z_score_threshold", "3"),
        ("outlier_iqr_multiplier", -0.1),
        ("outlier_iqr_multiplier", math.inf),
        ("hard_batch_percentile", 90),
        ("hard_batch_percentile", -0.1),
        ("min_batches_for_outlier_detection", 0),
        ("min_batches_for_outlier_detection", 2.5),
    ],
)
def test_bad_config_fields_are_named(field, value):
    with pytest.raises(SchemaValidationError, match=field):
        DataDiagnosticsConfig(**{field: value})


def test_the_config(session):
    config = DataDiagnosticsConfig(batch_size=np.int64(2), hard_batch_percentile=1)
    assert (config.batch_size, config.hard_batch_percentile) == (2, 1.0)
    assert type(config.batch_size) is int
    diagnostics = DataDiagnostics(session, config=config)
    assert diagnostics.config is config
    records = [diagnostics.log_batch(0.5, step=step) for step in range(3)]
    assert diagnostics.flush() == (records[2],)
    with pytest.raises(SchemaValidationError, match="config must be a DataDiagnosticsConfig"):
        DataDiagnostics(session, config={"batch_size": 2})
    with pytest.raises(SchemaValidationError, match="session"):
        DataDiagnostics(3)


def test_losses_that_are_not_finite(diagnostics, session):
    losses = [1.0, math.nan, math.inf, 2.0, 3.0, -math.inf, 4.0]
    for step, loss in enumerate(losses):
        record = diagnostics.log_batch(loss, step=step, epoch=0)
        assert record.loss == loss or loss != loss
    assert [r.loss for r in diagnostics.read()] == [1.0, 2.0, 3.0, 4.0]
    assert repr([r.loss for r in diagnostics.read(include_non_finite=True)]) == repr(losses)
    assert [(e.step, e.severity, dict(e.payload)) for e in events(session, "non_finite_loss")] == [
        (1, "warning", {"loss": "NaN"}),
        (5, "warning", {"loss": "-Infinity"}),
    ]
    assert [(e.step, dict(e.payload)) for e in events(session, "loss_recovered")] == [
        (3, {"non_finite_count": 2}),
        (6, {"non_finite_count": 1}),
    ]


@pytest.mark.parametrize("loss", [math.nan, math.inf, torch.tensor(math.nan)])
def test_a_strict_run_refuses_losses_that_are_not_finite(strict, strict_session, loss):
    with pytest.raises(SchemaValidationError, match="loss must be finite"):
        strict.log_batch(loss, step=0)
    assert strict.read(include_non_finite=True) == ()
    assert events(strict_session, "non_finite_loss") == ()


def test_a_closed_one_reads_but_does_not_log(diagnostics):
    diagnostics.log_batch(0.5, step=0)
    diagnostics.close()
    with pytest.raises(InvalidRunStateError, match="closed"):
        diagnostics.log_batch(0.5, step=1)
    assert len(diagnostics.read()) == 1
    assert diagnostics.summarize().batch_count == 1
    diagnostics.close()


def test_an_ended_run_takes_no_batch(tmp_path):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    diagnostics = DataDiagnostics(session)
    # Two that cannot be counted any more when it is closed.
    diagnostics.log_batch(0.5, batch={"labels": [[1]]})
    diagnostics.log_batch(0.5, batch={"labels": [[1]]})
    session.end_run()
    with pytest.raises(InvalidRunStateError):
        diagnostics.log_batch(0.5)
    diagnostics.close()
    opened = quark.open_run(session.run_id, storage_dir=tmp_path)
    assert len(DataDiagnostics(opened).read()) == 2
    with pytest.raises(InvalidRunStateError):
        DataDiagnostics(opened).log_batch(0.5)


@pytest.mark.long
def test_threads(diagnostics, session):
    count, losses = 200, [0.5, math.nan]

    def log(thread):
        for number in range(count):
            diagnostics.log_batch(
                losses[number % 2], step=number, sample_ids=[thread], labels=torch.tensor([thread])
            )

    threads = [threading.Thread(target=log, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = diagnostics.read(include_non_finite=True)
    assert len(found) == 4 * count
    assert [record.sequence for record in found] == list(range(4 * count))
    summary = diagnostics.summarize()
    assert summary.exposure.class_counts == {str(number): count for number in range(4)}
    assert summary.loss_summary.non_finite_count == 2 * count
    # However the threads came through each other, each fall has one rise at most.
    falls = len(events(session, "non_finite_loss"))
    rises = events(session, "loss_recovered")
    assert falls - len(rises) in (0, 1)
    assert sum(event.payload["non_finite_count"] for event in rises) <= 2 * count
