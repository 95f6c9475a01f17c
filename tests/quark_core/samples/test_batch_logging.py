"""log_batch: arguments, losses that are not finite, strict runs, threads."""

import math
import multiprocessing
import os
import threading

import numpy as np
import pytest
import torch

import quark
from quark import (
    BatchMetadata,
    BatchMetadataAdapter,
    DataDiagnostics,
    DataDiagnosticsConfig,
    EventLogger,
    MappingBatchMetadataAdapter,
)
from quark_backends.store.databases.sqlite import connect, ensure_store
from quark_backends.store.upkeep.compaction import Compactor
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
        ({"loss": True}, "loss"),
        ({"step": -1}, "step"),
        ({"epoch": "1"}, "epoch"),
        ({"timestamp": "soon"}, "timestamp"),
        ({"batch_size": -1}, "batch_size"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
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


# Reading batches back: by sample, by range, after a resume, after compaction; and no sample.


def steps(records):
    return [record.step for record in records]


def compact(storage_dir):
    """Compact all there is, as the background does when a run is done."""
    connection = connect(ensure_store(storage_dir))
    try:
        compactor = Compactor(connection)
        done = 0
        while work := compactor.find_work(minimum=1):
            done += sum(compactor.compact(item) for item in work)
        (left,) = connection.execute("SELECT count(*) FROM batch").fetchone()
    finally:
        connection.close()
    assert left == 0
    return done


@pytest.fixture
def traced(diagnostics):
    for step in range(20):
        diagnostics.log_batch(
            math.nan if step == 4 else 1.0 + step,
            step=step,
            epoch=step // 10,
            sample_ids=[step % 4, str(step), "shared", f"img-{step % 3}"],
        )
    diagnostics.log_batch(1.0, step=20)
    return diagnostics


def test_a_sample_is_found_in_whichever_form_it_was_logged(traced):
    assert steps(traced.read(sample_id=3)) == [3, 7, 11, 15, 19]
    assert traced.read(sample_id="3") == traced.read(sample_id=np.int64(3))
    assert traced.read(sample_id="03") == ()
    assert steps(traced.read(sample_id="img-1", step_max=9)) == [1, 7]
    assert steps(traced.read(sample_id=b"img-1", epoch=1)) == [10, 13, 16, 19]
    assert steps(traced.read(sample_id=17)) == [17]
    assert traced.read(sample_id=999) == traced.read(sample_id="img-") == ()


def test_a_limit_counts_what_fits_everything_else(traced):
    assert steps(traced.read(sample_id=3, limit=2)) == [15, 19]
    assert steps(traced.read(sample_id="shared", limit=3, step_max=12)) == [10, 11, 12]
    assert traced.read(sample_id=3, limit=0) == ()
    assert steps(traced.read(limit=2)) == [19, 20]
    assert steps(traced.read(step_min=3, step_max=5)) == [3, 5]
    assert steps(traced.read(step=4)) == []
    assert steps(traced.read(step=4, include_non_finite=True)) == [4]
    assert steps(traced.read(sample_id="shared", epoch=0, include_non_finite=True)) == [*range(10)]
    assert steps(traced.read(epoch_min=1, epoch_max=1, limit=1)) == [19]


@pytest.mark.long
def test_compaction_changes_nothing_of_it(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        diagnostics = DataDiagnostics(session, config=DataDiagnosticsConfig(batch_size=7))
        for step in range(60):
            diagnostics.log_batch(
                {10: math.nan, 30: 99.0}.get(step, 1.0 + step / 100),
                step=step,
                labels=[step % 3, "a"],
                sample_ids=[step, "x"],
                sequence_lengths=[step, 2],
                metadata={"k": [step]},
            )
            if step % 20 == 0:
                diagnostics.flush()

        def see():
            return (
                diagnostics.read(),
                repr(diagnostics.read(include_non_finite=True)),
                diagnostics.read(sample_id="x", limit=5),
                repr(diagnostics.summarize()),
                repr(diagnostics.find_hard_batches(step_min=5)),
            )

        before = see()
        assert len(before[0]) == 59
        diagnostics.flush()
    compact(tmp_path)
    opened = quark.open_run(session.run_id, storage_dir=tmp_path)
    diagnostics = DataDiagnostics(opened)
    assert see() == before


@pytest.mark.long
def test_a_resumed_run_hides_the_batches_that_it_does_again(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        diagnostics = DataDiagnostics(session)
        for step in range(10):
            diagnostics.log_batch(100.0 if step == 8 else 1.0, step=step, labels=["old"])
        session.end_run("interrupted")
    with quark.resume_run(run_id=session.run_id, storage_dir=tmp_path, from_step=6) as resumed:
        diagnostics = DataDiagnostics(resumed)
        for step in range(6, 12):
            diagnostics.log_batch(2.0, step=step, labels=["new"])
        assert [(r.attempt, r.step) for r in diagnostics.read()] == [
            *((0, step) for step in range(6)),
            *((1, step) for step in range(6, 12)),
        ]
        assert len(diagnostics.read(all_attempts=True)) == 16
        assert diagnostics.summarize_exposure().class_counts == {"old": 6, "new": 6}
        assert diagnostics.summarize_exposure(all_attempts=True).class_counts["old"] == 10
        assert diagnostics.summarize().loss_summary.max == 2.0
        # Both attempts have a record of each sequence, and the right one is found.
        (hardest, *_) = diagnostics.find_hard_batches(all_attempts=True)
        assert (hardest.step, hardest.loss, hardest.class_counts) == (8, 100.0, {"old": 1})


SECRET = "the raw text of a sample that must never be stored"


class Telltale(BatchMetadataAdapter):
    """Puts pieces of the sample wherever an error could carry them."""

    def extract_batch_metadata(self, batch):
        if batch["case"] == 0:
            raise ValueError(f"cannot read {batch['text']}")
        if batch["case"] == 1:
            return batch["text"]
        if batch["case"] == 2:
            return BatchMetadata(labels=[[batch["text"]]], sample_ids=[batch["text"] * 30])
        if batch["case"] == 3:
            return BatchMetadata(labels=[batch["text"] * 30], sequence_lengths=[batch["text"]])
        if batch["case"] == 4:
            return BatchMetadata(labels=batch["inputs"], metadata={"inputs": batch["inputs"]})
        raise KeyError(batch["text"])


@pytest.mark.long
def test_no_sample_is_ever_stored(tmp_path):
    pattern = np.frombuffer(SECRET.encode(), dtype=np.uint8)
    inputs = torch.from_numpy(np.tile(pattern, 4000).copy()).reshape(1000, -1).float()
    numbers = torch.full((4, 1000), 1234567.875)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        plain = DataDiagnostics(session)
        adapted = DataDiagnostics(session, config=DataDiagnosticsConfig(adapter=Telltale()))
        batch = {"text": SECRET, "inputs": inputs, "numbers": numbers, "raw": SECRET.encode()}
        for step in range(6):
            plain.log_batch(1.0, step=step, batch={**batch, "labels": [step], "sample_ids": [step]})
            plain.log_batch(1.0, step=step, batch={**batch, "labels": numbers})
            adapted.log_batch(1.0, step=step, batch={**batch, "case": step})
        assert len(plain.read()) == 18
        reasons = quark.EventLogger(session).read(event_type="batch_metadata_failed")
        assert len(reasons) == 10
        adapted.close()
        plain.close()
        found = quark.EventLogger(session).read()
        # What is on the disk is compressed, so that it is also looked at as it is read back.
        for record in (*found, *plain.read()):
            text = str(record.to_dict())
            assert "raw text" not in text
            assert "1234567" not in text
            assert len(text) < 5_000
        files = 0
        for folder, _, names in os.walk(tmp_path):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:
                    content = file.read()
                files += 1
                assert SECRET[:12].encode() not in content
                assert inputs[0, :16].numpy().tobytes() not in content
                assert numbers[0, :2].numpy().tobytes() not in content
                assert b"1234567.875" not in content
        assert files > 2


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_worker_logs_batches_of_its_own(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        diagnostics = DataDiagnostics(session)
        diagnostics.log_batch(1.0, step=0, labels=["parent"])

        def work():
            diagnostics.log_batch(2.0, step=1, labels=["child"])
            diagnostics.close()

        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join(250)
        assert process.exitcode == 0
        diagnostics.log_batch(3.0, step=2, labels=["parent"])
    opened = quark.open_run(session.run_id, storage_dir=tmp_path)
    found = DataDiagnostics(opened).read()
    assert sorted(steps(found)) == [0, 1, 2]
    assert len({record.writer_id for record in found}) == 2
    exposure = DataDiagnostics(opened).summarize_exposure()
    assert exposure.class_counts == {"parent": 2, "child": 1}


@pytest.mark.long
def test_more_batches_than_one_part_holds(diagnostics):
    for step in range(9000):
        diagnostics.log_batch(500.0 if step in (10, 8999) else 1.0, step=step, sample_ids=[step])
    assert [finding.step for finding in diagnostics.find_hard_batches()] == [10, 8999]
    (found,) = diagnostics.read(sample_id=8_500)
    assert found.step == 8_500
    assert diagnostics.summarize_exposure().unique_sample_count == 9000
