"""Adapters: what they find, what they lack, and what goes wrong in them."""

import collections
from collections import UserDict

import pytest
import torch

from quark import (
    BatchMetadata,
    BatchMetadataAdapter,
    DataDiagnostics,
    DataDiagnosticsConfig,
    EventLogger,
    MappingBatchMetadataAdapter,
)
from quark_core.errors import SchemaValidationError


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


@pytest.mark.long
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
        ({"label_key": "y", "class_counts_key": "z"}, "label_key and class_counts_key"),
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
