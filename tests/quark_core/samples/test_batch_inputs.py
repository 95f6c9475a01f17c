"""Labels, ids and lengths of any kind, and what is no such thing."""

import array
import enum
import json
import math
import pathlib
import uuid
from collections import Counter, deque

import numpy as np
import pandas
import polars
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import count_examples

import quark
from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import decode_json
from quark_core.samples.metadata import count_labels, take_lengths, take_sample_ids


class Colour(enum.Enum):
    RED = "red"
    BLUE = 7


class Level(enum.IntEnum):
    LOW = 1


LABELS = [3, 1, 3, 3]


@pytest.mark.parametrize(
    "labels",
    [
        LABELS,
        tuple(LABELS),
        deque(LABELS),
        array.array("i", LABELS),
        np.array(LABELS),
        np.array(LABELS, dtype=np.uint8),
        np.array(LABELS, dtype=np.float32),
        np.array(LABELS, dtype=object),
        np.array(LABELS)[:, None],
        [np.int64(v) for v in LABELS],
        torch.tensor(LABELS),
        torch.tensor(LABELS, dtype=torch.int8),
        torch.tensor(LABELS, dtype=torch.float32, requires_grad=True),
        torch.tensor(LABELS, dtype=torch.bfloat16),
        torch.tensor(LABELS).reshape(4, 1),
        torch.tensor([LABELS, LABELS])[0],
        list(torch.tensor(LABELS)),
        pandas.Series(LABELS),
        polars.Series(LABELS),
        [3, 1.0, np.float32(3), torch.tensor(3)],
        ["3", "1", b"3", 3],
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_labels_of_any_kind_are_counted_as_the_same_text(diagnostics, labels):
    record = diagnostics.log_batch(0.5, labels=labels)
    assert record.class_counts == {"3": 3, "1": 1}
    assert record.batch_size == 4
    assert diagnostics.read() == (record,)


@pytest.mark.parametrize(
    ("labels", "counts"),
    [
        ([True, False, True], {"true": 2, "false": 1}),
        (torch.tensor([True, False, True]), {"true": 2, "false": 1}),
        ([1, True, 1.0], {"1": 2, "true": 1}),
        ([np.True_, np.False_], {"true": 1, "false": 1}),
        ([Colour.RED, Colour.BLUE, "red"], {"red": 2, "7": 1}),
        ([Level.LOW, 1], {"1": 2}),
        ([0.5, 4.5, 0.5], {"0.5": 2, "4.5": 1}),
        ([math.nan, float("nan"), math.inf, -math.inf], {"nan": 2, "inf": 1, "-inf": 1}),
        ([-1, 2**80, 0], {"-1": 1, str(2**80): 1, "0": 1}),
        ([-0.0, 0], {"0": 2}),
        (["grün", "a\ud800b", "grün"], {"grün": 2, "a?b": 1}),
        ([b"\xff", b"ok"], {"�": 1, "ok": 1}),
        (np.array(["cat", "dog", "cat"]), {"cat": 2, "dog": 1}),
        ([pathlib.PurePosixPath("a/b")], {"a/b": 1}),
        (range(2), {"0": 1, "1": 1}),
        ([], {}),
        (torch.empty(0), {}),
    ],
    ids=str,
)
def test_labels_become_text(diagnostics, labels, counts):
    record = diagnostics.log_batch(0.5, labels=labels)
    assert dict(record.class_counts) == counts
    assert decode_json(record.class_counts.encoded) == counts
    assert record.batch_size == len(labels)


class Unreadable:
    ndim = 1

    def tolist(self):
        raise RuntimeError("device lost")


LABELS_NOT_TAKEN = [
    (np.eye(3), r"labels .* shape is \(3, 3\); pass class_counts"),
    (torch.zeros(2, 5), r"labels .* shape is \(2, 5\); pass class_counts"),
    (torch.tensor(3), r"labels .* shape is \(\)"),
    ([[0, 1], [1]], r"labels\[0\] .* not list\. .*pass class_counts"),
    ([1, {2: 3}], r"labels\[1\] .* not dict"),
    ([1, None], r"labels\[1\] .* not NoneType"),
    ([1, 1j], r"labels\[1\] .* not complex"),
    ([torch.zeros(2)], r"labels\[0\] .* not Tensor"),
    ("cat", "labels .* be a str"),
    (b"cat", "labels .* be a bytes"),
    ({1, 2}, "labels .* be a set"),
    ({1: 2}, "labels .* be a dict"),
    (3, "labels .* not int"),
    ((label for label in [1]), "labels .* not generator"),
    (["fine", "x" * 251], r"labels\[1\] has 251 characters"),
    ([1, 10**6000], r"labels\[1\] is an integer of \d+ bits"),
    (Unreadable(), "labels cannot be read: RuntimeError"),
    (torch.zeros(3, device="meta"), "labels cannot be read"),
]


UUID = uuid.UUID(int=5)


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([1, -2, 3], (1, -2, 3)),
        (range(3), (0, 1, 2)),
        (np.arange(3, dtype=np.uint16), (0, 1, 2)),
        (torch.arange(3), (0, 1, 2)),
        (torch.arange(3)[:, None], (0, 1, 2)),
        (["a", "b"], ("a", "b")),
        (np.array(["a", "b"]), ("a", "b")),
        ([1, "a", np.int32(4)], (1, "a", 4)),
        ([b"a", b"\xff"], ("a", "�")),
        ([UUID, pathlib.PurePosixPath("x/y.png")], (str(UUID), "x/y.png")),
        ([2**63 - 1, 2**63, np.uint64(2**64 - 1)], (2**63 - 1, str(2**63), str(2**64 - 1))),
        (["é\udfff"], ("é?",)),
        ((), ()),
    ],
    ids=str,
)
def test_ids_are_numbers_or_texts(diagnostics, ids, found):
    record = diagnostics.log_batch(0.5, sample_ids=ids)
    assert record.sample_ids == found
    assert [type(item) for item in record.sample_ids] == [type(item) for item in found]
    assert diagnostics.read() == (record,)


IDS_NOT_TAKEN = [
    ([1, True], r"sample_ids\[1\] .* not bool"),
    ([1.0, 2.0], r"sample_ids\[0\] .* not float"),
    ([1, None], r"sample_ids\[1\] .* not NoneType"),
    ([(1, 2)], r"sample_ids\[0\] .* not tuple\. Join an ID"),
    (np.zeros((2, 2), dtype=int), r"sample_ids .* shape is \(2, 2\)"),
    ("abc", "sample_ids .* str"),
    (["x" * 1001], r"sample_ids\[0\] has 1001 characters"),
    (["x" * 1001 + "é"], r"sample_ids\[0\] has 1002 characters"),
]


@pytest.mark.parametrize(
    "lengths",
    [
        [5, 0, 512],
        (5, 0, 512),
        np.array([5, 0, 512], dtype=np.int32),
        np.array([5, 0, 512], dtype=np.float64),
        torch.tensor([5, 0, 512]),
        torch.tensor([5.0, 0.0, 512.0]),
        [torch.tensor(5), np.int8(0), 512.0],
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_lengths_of_any_kind(diagnostics, lengths):
    record = diagnostics.log_batch(0.5, sequence_lengths=lengths)
    assert record.sequence_lengths == (5, 0, 512)
    assert {type(length) for length in record.sequence_lengths} == {int}
    assert diagnostics.read() == (record,)


LENGTHS_NOT_TAKEN = [
    ([1, -2], r"sequence_lengths\[1\] must not be negative, got -2"),
    (torch.tensor([1, 2, -7]), r"sequence_lengths\[2\] must not be negative, got -7"),
    ([1.5], r"sequence_lengths\[0\] must be a whole number, got 1.5"),
    ([-1.0], r"sequence_lengths\[0\] must not be negative"),
    ([math.nan], r"sequence_lengths\[0\] must be a whole number"),
    ([True], r"sequence_lengths\[0\]"),
    (["5"], r"sequence_lengths\[0\] .* not str"),
    ([None], r"sequence_lengths\[0\] .* not None"),
    ([2**63], r"sequence_lengths\[0\] must fit in 64 bits"),
    (torch.ones(3, 4), r"sequence_lengths .* shape is \(3, 4\)"),
    (7, "sequence_lengths .* not int"),
]


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ({"cat": 3, "dog": 0}, {"cat": 3, "dog": 0}),
        (Counter([1, 1, 2]), {"1": 2, "2": 1}),
        ({1: 2, "1": 3, 1.5: np.int64(4)}, {"1": 5, "1.5": 4}),
        ({Colour.RED: torch.tensor(2), True: 1.0}, {"red": 2, "true": 1}),
        (["cat", "cat"], {"cat": 2}),
        ({}, {}),
    ],
    ids=str,
)
def test_class_counts_may_be_given_as_they_are(diagnostics, counts, found):
    record = diagnostics.log_batch(0.5, class_counts=counts, batch_size=2)
    assert dict(record.class_counts) == found
    assert record.batch_size == 2
    assert diagnostics.read() == (record,)


COUNTS_NOT_TAKEN = [
    ({"cat": -1}, r"class_counts\['cat'\] must not be negative"),
    ({"cat": 0.5}, r"class_counts\['cat'\] must be a whole number"),
    ({"cat": "3"}, r"class_counts\['cat'\] .* not str"),
    ({"cat": None}, r"class_counts\['cat'\] .* not None"),
    ({None: 1}, "a label of class_counts"),
    ({(1, 2): 1}, "a label of class_counts"),
    ("cat", "class_counts"),
]


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        *(("labels", *each) for each in LABELS_NOT_TAKEN),
        *(("sample_ids", *each) for each in IDS_NOT_TAKEN),
        *(("sequence_lengths", *each) for each in LENGTHS_NOT_TAKEN),
        *(("class_counts", *each) for each in COUNTS_NOT_TAKEN),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 90 else type(value).__name__,
)
def test_what_is_none_of_these_is_named(diagnostics, argument, value, message):
    with pytest.raises(SchemaValidationError, match=message):
        diagnostics.log_batch(0.5, **{argument: value})
    assert diagnostics.read() == ()


def test_what_the_caller_does_later_changes_nothing(diagnostics):
    labels, ids, lengths, metadata = [1, 2], ["a", "b"], np.array([3, 4]), {"k": [1]}
    record = diagnostics.log_batch(
        0.5, labels=labels, sample_ids=ids, sequence_lengths=lengths, metadata=metadata
    )
    labels.append(3)
    ids[0] = "z"
    lengths[:] = 0
    metadata["k"].append(2)
    (found,) = diagnostics.read()
    assert found == record
    assert (found.sample_ids, found.sequence_lengths) == (("a", "b"), (3, 4))
    assert found.metadata == {"k": [1]}


_SETTINGS = settings(deadline=None, max_examples=count_examples(150))


@_SETTINGS
@given(st.lists(st.integers(-5, 5) | st.booleans() | st.text(max_size=3), max_size=40))
def test_no_label_is_lost(labels):
    counts, number = count_labels(labels, "labels")
    assert number == len(labels) == sum(counts.values())
    texts = [
        str(v).lower() if isinstance(v, bool) else str(v).encode("utf-8", "replace").decode()
        for v in labels
    ]
    assert dict(counts) == Counter(texts)
    assert json.loads(counts.encoded) == dict(counts)


@_SETTINGS
@given(st.lists(st.integers(0, 2**62), max_size=40), st.sampled_from([list, np.array, tuple]))
def test_ids_and_lengths_are_kept_as_they_are(values, make):
    made = make(values) if make is not np.array else np.array(values, dtype=np.int64)
    assert take_sample_ids(made, "sample_ids") == tuple(values)
    assert take_lengths(made, "sequence_lengths") == tuple(values)


def test_the_records_fit_the_schema(diagnostics):
    record = diagnostics.log_batch(
        0.5, step=1, labels=[1, "a"], sample_ids=[2, "b"], sequence_lengths=[3, 4]
    )
    assert quark.validate_record(record) is record
    assert json.loads(json.dumps(quark.dump_record(record)))["class_counts"] == {"1": 1, "a": 1}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu(diagnostics):
    with pytest.warns(RuntimeWarning, match="CUDA"):
        record = diagnostics.log_batch(
            torch.tensor(0.5, device="cuda"),
            labels=torch.tensor(LABELS, device="cuda"),
            sample_ids=torch.arange(4, device="cuda"),
            sequence_lengths=torch.full((4,), 9, device="cuda"),
        )
    assert record.loss == 0.5
    assert record.class_counts == {"3": 3, "1": 1}
    assert record.sample_ids == (0, 1, 2, 3)
    assert record.sequence_lengths == (9, 9, 9, 9)
