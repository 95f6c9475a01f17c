"""log_batch: arguments, adapters, losses that are not finite, strict runs, threads."""

import collections
import math
import threading
from collections import UserDict

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
from quark_core.errors import InvalidRunStateError, SchemaValidationError


def events(session, event_type):
    return EventLogger(session).read(event_type=event_type)


def use(session, adapter, **config):
    return DataDiagnostics(session, config=DataDiagnosticsConfig(adapter=adapter, **config))


class TupleAdapter(BatchMetadataAdapter):
    """The guide's, for batches that are tuples."""

    def extract_batch_metadata(self, batch):
        _inputs, targets, sample_ids = batch
        return BatchMetadata(
            batch_size=len(sample_ids),
            sample_ids=sample_ids,
            class_counts=targets,
            metadata={"source": "tuple_loader"},
        )


class Returns(BatchMetadataAdapter):
    def __init__(self, result):
        self.result = result

    def extract_batch_metadata(self, batch):
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


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
        ("adapter", TupleAdapter),
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


def test_the_adapter_of_the_guide_for_mappings(session):
    adapter = MappingBatchMetadataAdapter(
        sample_id_key="sample_ids",
        label_key="labels",
        sequence_length_key="lengths",
        metadata_keys=("loader",),
    )
    diagnostics = use(session, adapter)
    batch = {
        "inputs": torch.zeros(2, 3),
        "labels": torch.tensor([0, 1]),
        "sample_ids": ["a", "b"],
        "lengths": torch.tensor([3, 2]),
        "loader": "train",
    }
    record = diagnostics.log_batch(0.5, step=0, batch=batch)
    assert record.batch_size == 2
    assert record.sample_ids == ("a", "b")
    assert record.class_counts == {"0": 1, "1": 1}
    assert record.sequence_lengths == (3, 2)
    assert record.metadata == {"loader": "train"}
    assert events(session, "batch_metadata_failed") == ()


def test_the_adapter_of_the_guide_for_tuples(session):
    diagnostics = use(session, TupleAdapter())
    batch = (torch.zeros(3, 2), torch.tensor([1, 1, 0]), [7, 8, 9])
    record = diagnostics.log_batch(0.5, step=0, batch=batch)
    assert record.class_counts == {"1": 2, "0": 1}
    assert (record.batch_size, record.sample_ids) == (3, (7, 8, 9))
    assert record.metadata == {"source": "tuple_loader"}


def test_what_is_given_wins_over_what_the_adapter_finds(session):
    found = BatchMetadata(
        batch_size=2,
        sample_ids=[1, 2],
        labels=["a", "b"],
        sequence_lengths=[3, 4],
        metadata={"loader": "train", "fold": 1},
    )
    diagnostics = use(session, Returns(found))
    record = diagnostics.log_batch(0.5, batch="any", sample_ids=[5, 6], metadata={"fold": 2})
    assert record.sample_ids == (5, 6)
    assert record.class_counts == {"a": 1, "b": 1}
    assert record.metadata == {"loader": "train", "fold": 2}
    assert diagnostics.log_batch(0.5, batch="any", class_counts={"c": 9}).class_counts == {"c": 9}
    assert diagnostics.log_batch(0.5, batch="any", labels=["z", "z"]).class_counts == {"z": 2}
    assert events(session, "batch_metadata_failed") == ()


class Features:
    """Like a mapping, without being one."""

    def __init__(self, **values):
        self.values = values

    def keys(self):
        return self.values.keys()

    def __getitem__(self, key):
        return self.values[key]


@pytest.mark.parametrize("make", [dict, UserDict, lambda values: Features(**values)])
def test_a_mapping_needs_no_adapter(diagnostics, session, make):
    batch = make({"labels": [1, 2], "inputs": object()})
    record = diagnostics.log_batch(0.5, batch=batch)
    assert (record.class_counts, record.batch_size) == ({"1": 1, "2": 1}, 2)
    assert record.sample_ids is None
    assert diagnostics.log_batch(0.5, batch=make({"labels": None})).class_counts is None
    assert events(session, "batch_metadata_failed") == ()


def test_reading_a_batch_does_not_change_it(diagnostics):
    batch = collections.defaultdict(list)
    diagnostics.log_batch(0.5, batch=batch)
    assert batch == {}


def test_keys_that_are_named_must_be_there(session, strict_session):
    adapter = MappingBatchMetadataAdapter(label_key="target", metadata_keys=["loader"])
    record = use(session, adapter).log_batch(0.5, step=4, batch={"sample_ids": [1, 2]})
    assert (record.batch_size, record.sample_ids, record.class_counts) == (2, (1, 2), None)
    found = events(session, "batch_metadata_failed")
    assert [(event.step, event.severity, event.payload["reason"]) for event in found] == [
        (4, "warning", "batch has no key 'target'"),
        (4, "warning", "batch has no key 'loader'"),
    ]
    with pytest.raises(SchemaValidationError, match=r"MappingBatchMetadataAdapter: .*'target'"):
        use(strict_session, adapter).log_batch(0.5, batch={"sample_ids": [1, 2]})


def test_every_key_of_the_mapping_adapter():
    adapter = MappingBatchMetadataAdapter(
        sample_id_key=None, class_counts_key="seen", batch_size_key="n", sequence_length_key=None
    )
    batch = {"seen": {"a": 1}, "n": 5, "labels": [1], "sample_ids": [1], "sequence_lengths": [1]}
    found = adapter.extract_batch_metadata(batch)
    assert found == BatchMetadata(class_counts={"a": 1}, batch_size=5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"sample_id_key": 3}, "sample_id_key"),
        ({"label_key": ""}, "label_key"),
        ({"sequence_length_key": ["a"]}, "sequence_length_key"),
        ({"metadata_keys": "loader"}, "metadata_keys"),
        ({"metadata_keys": 3}, "metadata_keys"),
        ({"metadata_keys": ["a", 1]}, r"metadata_keys\[1\]"),
        ({"label_key": "y", "class_counts_key": "z"}, "label_key or class_counts_key"),
    ],
    ids=str,
)
def test_bad_arguments_of_the_mapping_adapter_are_named(arguments, named):
    with pytest.raises(SchemaValidationError, match=named):
        MappingBatchMetadataAdapter(**arguments)


BAD_RESULTS = [
    (Returns(KeyError("secret")), "the adapter raised KeyError at .* in extract_batch_metadata"),
    (Returns({"labels": [1]}), "must return a BatchMetadata, not dict"),
    (Returns(None), "must return a BatchMetadata, not NoneType"),
    (Returns(BatchMetadata(sample_ids=[1.5])), r"sample_ids\[0\]"),
    (Returns(BatchMetadata(labels=[[1]])), r"labels\[0\]"),
    (Returns(BatchMetadata(sequence_lengths=[-1])), r"sequence_lengths\[0\] must not be negative"),
    (Returns(BatchMetadata(batch_size="3")), "batch_size"),
    (Returns(BatchMetadata(labels=[1], class_counts={1: 1})), "labels and class_counts"),
    (Returns(BatchMetadata(metadata={"x": torch.zeros(3)})), r"metadata\.x"),
    (Returns(BatchMetadata(metadata=3)), "metadata must be a mapping"),
    (Returns(BatchMetadata(problems=("no labels today",))), "no labels today"),
    (Returns(BatchMetadata(batch_size=3, labels=[1])), "labels has 1 entries, but batch_size is 3"),
    (MappingBatchMetadataAdapter(), "batch must be a mapping, not tuple"),
]


@pytest.mark.parametrize(("adapter", "message"), BAD_RESULTS)
def test_a_failing_adapter_costs_nothing_but_what_it_should_have_found(session, adapter, message):
    diagnostics = use(session, adapter)
    record = diagnostics.log_batch(0.5, step=7, batch=(1, 2), metadata={"k": 1})
    assert (record.loss, record.metadata) == (0.5, {"k": 1})
    assert record.sample_ids is record.class_counts is record.sequence_lengths is None
    (event,) = events(session, "batch_metadata_failed")
    assert (event.severity, event.step) == ("warning", 7)
    assert event.payload["adapter"] == type(adapter).__name__
    assert event.payload["count"] == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(event.payload["reason"])


@pytest.mark.parametrize(("adapter", "message"), BAD_RESULTS)
def test_a_failing_adapter_raises_in_a_strict_run(strict_session, adapter, message):
    diagnostics = use(strict_session, adapter)
    with pytest.raises(
        SchemaValidationError, match=f"{type(adapter).__name__}: .*{message}"
    ) as raised:
        diagnostics.log_batch(0.5, step=7, batch=(1, 2))
    if isinstance(getattr(adapter, "result", None), Exception):
        assert raised.value.__cause__ is adapter.result
    assert diagnostics.read() == ()


def test_what_is_good_is_kept_beside_what_is_bad(session):
    found = BatchMetadata(sample_ids=[1, 2], labels=[[1], [2]], sequence_lengths=[1, 2, 3])
    record = use(session, Returns(found)).log_batch(0.5, batch=1)
    assert (record.sample_ids, record.batch_size) == ((1, 2), 2)
    assert record.class_counts is record.sequence_lengths is None
    assert len(events(session, "batch_metadata_failed")) == 2


def test_a_size_that_contradicts_what_was_given_is_told(session):
    diagnostics = use(session, Returns(BatchMetadata(batch_size=3)))
    assert diagnostics.log_batch(0.5, batch=1, labels=[1, 2]).batch_size == 2
    (event,) = events(session, "batch_metadata_failed")
    assert event.payload["reason"] == "batch_size is 3, but labels has 2 entries"
    # The caller's own word is final.
    assert diagnostics.log_batch(0.5, batch=1, batch_size=9).batch_size == 9


def test_each_reason_is_told_once_and_counted_at_the_end(session):
    class Sometimes(BatchMetadataAdapter):
        def extract_batch_metadata(self, batch):
            if batch % 2:
                raise ValueError(f"cannot read {batch}")
            return BatchMetadata(batch_size=batch, labels=[1])

    with use(session, Sometimes()) as diagnostics:
        for batch in range(2, 10):
            diagnostics.log_batch(0.5, step=batch, batch=batch)
        assert len(diagnostics.read()) == 8
    first, second, last = events(session, "batch_metadata_failed")
    assert first.payload["reason"] == "labels has 1 entries, but batch_size is 2"
    assert "ValueError" in second.payload["reason"]
    assert last.payload == {
        "adapter": "Sometimes",
        "count": 8,
        "reasons": [
            {"reason": first.payload["reason"], "count": 4},
            {"reason": second.payload["reason"], "count": 4},
        ],
    }
    diagnostics.close()
    assert len(events(session, "batch_metadata_failed")) == 3


def test_reasons_are_bounded(session):
    class Inventive(BatchMetadataAdapter):
        def extract_batch_metadata(self, batch):
            return BatchMetadata(problems=("x" * batch,))

    with use(session, Inventive()) as diagnostics:
        for batch in range(1, 60):
            diagnostics.log_batch(0.5, batch=batch)
    found = events(session, "batch_metadata_failed")
    assert len(found) == 22
    assert found[20].payload["reason"] == "other reasons"
    assert found[-1].payload["reasons"][-1] == {"reason": "other reasons", "count": 39}


def test_an_interrupt_in_an_adapter_is_not_swallowed(session):
    with pytest.raises(KeyboardInterrupt):
        use(session, Returns(KeyboardInterrupt())).log_batch(0.5, batch=1)


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
    diagnostics = use(session, Returns(None))
    diagnostics.log_batch(0.5, batch=1)
    diagnostics.log_batch(0.5, batch=1)
    session.end_run()
    with pytest.raises(InvalidRunStateError):
        diagnostics.log_batch(0.5)
    diagnostics.close()
    opened = quark.open_run(session.run_id, storage_dir=tmp_path)
    assert len(DataDiagnostics(opened).read()) == 2
    with pytest.raises(InvalidRunStateError):
        DataDiagnostics(opened).log_batch(0.5)


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
