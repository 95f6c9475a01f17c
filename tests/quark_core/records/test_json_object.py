"""JSON values of records: taken as they are at the call, plain, and read-only."""

import copy
import json
import operator
import pickle
from collections import OrderedDict
from enum import Enum, IntEnum
from pathlib import PurePosixPath
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import (
    JsonObject,
    decode_json,
    encode_json,
    normalize_json,
    normalize_object,
)

torch = pytest.importorskip("torch")

INT64_MAX = 2**63 - 1
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


class Mode(Enum):
    FAST = "fast"


class Level(IntEnum):
    HIGH = 3


class Split(str, Enum):  # noqa: UP042 - as configs have it
    TRAIN = "train"


def nest(depth, value=0):
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.long
@given(st.dictionaries(st.text(), VALUES))
def test_what_is_normalized_survives_encoding(values):
    taken = normalize_object(values, "payload")

    assert decode_json(taken.encoded) == taken
    assert json.loads(json.dumps(taken, allow_nan=False)) == taken


@pytest.mark.long
@given(VALUES)
def test_normalizing_twice_is_normalizing_once(value):
    once = normalize_json(value, "payload")

    assert normalize_json(once, "payload") == once


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.__setitem__("a", 2),
        lambda values: values.__delitem__("a"),
        lambda values: values.update(a=2),
        lambda values: values.setdefault("b", 2),
        lambda values: values.pop("a"),
        lambda values: values.popitem(),
        lambda values: values.clear(),
        lambda values: operator.ior(values, {"b": 2}),
    ],
)
def test_no_method_of_dict_changes_a_json_object(change):
    values = JsonObject({"a": 1})
    with pytest.raises(TypeError, match="immutable"):
        change(values)
    assert values == {"a": 1}


def test_a_copy_made_with_dict_can_be_changed():
    values = JsonObject({"a": 1})
    changed = dict(values)
    changed["a"] = 2
    assert (changed, values) == ({"a": 2}, {"a": 1})


def test_values_are_taken_as_they_are_at_the_call():
    original = {"layers": [1, 2], "opt": {"lr": 0.1}}
    taken = normalize_object(original, "payload")
    original["layers"].append(3)
    original["opt"]["lr"] = 0.2
    original["new"] = True

    assert taken == {"layers": [1, 2], "opt": {"lr": 0.1}}


def test_what_is_stored_does_not_follow_a_change_of_a_nested_list():
    taken = normalize_object({"layers": [1, 2]}, "payload")
    taken["layers"].append(3)
    assert json.loads(encode_json(taken)) == {"layers": [1, 2]}


def test_none_and_the_empty_mapping_stay_apart():
    assert normalize_object(None, "payload") is None
    assert normalize_object({}, "payload") == {}


@pytest.mark.parametrize("value", [[], "text", 3, [("a", 1)]])
def test_what_is_no_mapping_is_refused(value):
    with pytest.raises(SchemaValidationError, match=f"^payload .*{type(value).__name__}$"):
        normalize_object(value, "payload")


@pytest.mark.parametrize("mapping", [OrderedDict(a=1), MappingProxyType({"a": 1})])
def test_any_mapping_is_taken(mapping):
    assert normalize_object({"inner": mapping}, "payload") == {"inner": {"a": 1}}


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
        (-float("inf"), "-Infinity"),
        (np.float64("nan"), "NaN"),
        (torch.tensor(-float("inf")), "-Infinity"),
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.int64(3), 3),
        (np.uint64(2**64 - 1), str(2**64 - 1)),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array(3), 3),
        (torch.tensor(2), 2),
        (torch.tensor(True), True),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(1.5, requires_grad=True), 1.5),
        (Mode.FAST, "fast"),
        (Level.HIGH, 3),
        (Split.TRAIN, "train"),
        (PurePosixPath("a/b"), "a/b"),
        ((1, (2,)), [1, [2]]),
        ("\ud800x", "?x"),
        (INT64_MAX, INT64_MAX),
        (-(2**63), -(2**63)),
        (INT64_MAX + 1, "9223372036854775808"),
        (-(2**63) - 1, "-9223372036854775809"),
    ],
    ids=repr,
)
def test_scalars_become_plain_json(value, plain):
    found = normalize_json({"x": [value]}, "payload")["x"][0]

    assert found == plain
    assert type(found) is type(plain)


@pytest.mark.parametrize(
    ("key", "text"),
    [(1, "1"), (0.5, "0.5"), (True, "True"), (Level.HIGH, "3"), (Split.TRAIN, "train")],
)
def test_scalar_keys_become_text(key, text):
    assert list(normalize_json({key: 0}, "payload")) == [text]


def test_surrogates_in_keys_and_texts_can_be_stored():
    taken = normalize_object({"k\udc80": ["v\ud800"]}, "payload")

    assert decode_json(taken.encoded) == {"k?": ["v?"]}


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"a": object()}, "payload.a is of type object"),
        ({"a": [0, {"b": {1, 2}}]}, "payload.a[1].b is of type set"),
        ({"a": 1j}, "payload.a is of type complex"),
        ({"a": b"bytes"}, "payload.a is of type bytes"),
        ({"a": np.complex64(1)}, "payload.a is of type complex64"),
        ({"a": {None: 1}}, "payload.a has a key of type NoneType"),
        ({("a", 1): 1}, "payload has a key of type tuple"),
        ({"a": np.zeros(2)}, "payload.a is of type ndarray"),
        ({"a": torch.zeros(1)}, "payload.a is of type Tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_names_the_path(values, path):
    with pytest.raises(SchemaValidationError) as caught:
        normalize_object(values, "payload")

    assert str(caught.value).startswith(path)


def test_an_error_about_an_array_says_what_to_call():
    with pytest.raises(SchemaValidationError, match="tolist"):
        normalize_object({"a": np.zeros(2)}, "payload")


def test_sixty_levels_are_taken_and_a_thousand_refused():
    assert decode_json(normalize_object(nest(60), "payload").encoded) == nest(60)
    with pytest.raises(SchemaValidationError, match=r"^payload\.a\..*deeper"):
        normalize_object(nest(1000), "payload")


def test_a_mapping_that_holds_itself_is_refused():
    loop = {}
    loop["again"] = [loop]
    with pytest.raises(SchemaValidationError, match=r"^payload\.again"):
        normalize_object(loop, "payload")


@pytest.mark.parametrize("values", [{"n": 10**5000}, {10**5000: "n"}], ids=["value", "key"])
def test_an_integer_of_thousands_of_digits_is_taken_or_refused_by_name(values):
    try:
        back = decode_json(normalize_object(values, "payload").encoded)
    except SchemaValidationError as error:
        back = str(error)

    assert isinstance(back, JsonObject) or back.startswith("payload")


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda values: pickle.loads(pickle.dumps(values))]
)
def test_copies_and_pickles_stay_json_objects(copied):
    values = JsonObject({"a": [1, {"b": None}]})
    twin = copied(values)
    assert type(twin) is JsonObject
    assert twin == values
    assert twin.encoded == values.encoded
    with pytest.raises(TypeError, match="immutable"):
        twin["a"] = 2


@pytest.mark.parametrize("other", [{"b": 2, "a": 1}, {"a": 1.0, "b": 2}])
def test_equal_objects_have_equal_hashes(other):
    values = JsonObject({"a": 1, "b": 2})

    assert values == JsonObject(other)
    assert hash(values) == hash(JsonObject(other))
