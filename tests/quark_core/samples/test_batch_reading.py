"""Reading batches back: by sample, by range, after a resume, after compaction; and no sample."""

import math
import multiprocessing
import os

import numpy as np
import pytest
import torch

import quark
from quark import BatchMetadata, BatchMetadataAdapter, DataDiagnostics, DataDiagnosticsConfig
from quark_backends.store.databases.sqlite import connect, ensure_store
from quark_backends.store.upkeep.compaction import Compactor


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
