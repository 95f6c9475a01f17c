"""What records keep of a batch's samples: labels by count, ids and lengths as tuples.

Labels, ids and lengths come as lists, tuples, ranges, other sequences, numpy
arrays, torch tensors (one on a GPU is brought over by a single copy, for which
the call waits) or whatever else has `tolist()`; none of their libraries is
imported here. An array of shape (N, 1) counts as one of N.

A label becomes text: 3 and 3.0 are "3", 0.5 is "0.5", True is "true", bytes
are read as UTF-8, and an enum member is its value.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from enum import Enum
from pathlib import PurePath
from typing import Any, NoReturn
from uuid import UUID

from quark_core.errors import SchemaValidationError
from quark_core.json_object import JsonObject, encode_json
from quark_core.names import MAX_NAME_LENGTH, check_text
from quark_core.query import check_index

__all__ = [
    "MAX_ID_LENGTH",
    "count_labels",
    "spell_sample_id",
    "take_class_counts",
    "take_lengths",
    "take_sample_ids",
]

MAX_ID_LENGTH = 1000
"""Characters of a sample's id; what is longer is taken for a sample, which is never stored."""

_INT64_MAX = 2**63 - 1
_ONLY_INTS = {int}
_ONLY_TEXTS = {str}
# Types of which equal values have equal text, as long as a batch has one of them only.
_COUNTED = (_ONLY_INTS, _ONLY_TEXTS, {bool}, {float})


def count_labels(labels: object, argument: str) -> tuple[JsonObject, int]:
    """Number of samples of each label, and of all of them.

    Raises:
        SchemaValidationError: Not one label for each sample.
    """
    values = _take_values(labels, argument, "label", "; pass class_counts={label: count} instead")
    kinds = set(map(type, values))
    if kinds == _ONLY_INTS:
        numbers = Counter(values)
        if min(numbers) >= -_INT64_MAX and max(numbers) <= _INT64_MAX:
            # What most batches have.
            spelled = dict(zip(map(str, numbers), numbers.values(), strict=True))
            return JsonObject(spelled, encode_json(spelled)), len(values)
    if kinds in _COUNTED:
        counted = Counter(values)
        texts = [_spell_label(label, argument, values) for label in counted]
        counts = dict(zip(texts, counted.values(), strict=True))
        if len(counts) < len(texts):  # such as NaN, which differs from itself
            counts = _add_up(zip(texts, counted.values(), strict=True))
    else:
        counts = Counter(
            _spell_label(label, f"{argument}[{index}]") for index, label in enumerate(values)
        )
    return JsonObject(counts), len(values)


def take_class_counts(counts: Mapping[Any, Any], argument: str) -> JsonObject:
    """A mapping of labels to numbers of samples, with the labels as text.

    Raises:
        SchemaValidationError: A label that is none, or a count that is no
            non-negative integer.
    """
    try:
        items = list(counts.items())
    except Exception as error:  # noqa: BLE001 - a foreign object may raise anything
        _refuse_unreadable(argument, error)
    found = []
    for label, count in items:
        text = _spell_label(label, f"a label of {argument}")
        found.append((text, _check_count(count, f"{argument}[{text!r:.60}]")))
    return JsonObject(_add_up(found))


def take_sample_ids(sample_ids: object, argument: str) -> tuple[int | str, ...]:
    """Ids of the samples, in their order; each an int of 64 bits or text.

    Raises:
        SchemaValidationError: Not one id for each sample.
    """
    values = _take_values(sample_ids, argument, "id")
    kinds = set(map(type, values))
    if kinds == _ONLY_INTS and min(values) >= -_INT64_MAX and max(values) <= _INT64_MAX:
        return tuple(values)
    are_ascii = kinds == _ONLY_TEXTS and all(map(str.isascii, values))
    if are_ascii and max(map(len, values)) <= MAX_ID_LENGTH:
        return tuple(values)
    return tuple(
        spell_sample_id(value, f"{argument}[{index}]") for index, value in enumerate(values)
    )


def spell_sample_id(value: Any, argument: str) -> int | str:
    """One id as records keep it: an int of 64 bits, or text.

    Raises:
        SchemaValidationError: Neither an integer nor text, bytes, a path or a UUID.
    """
    found = _unwrap(value)
    if isinstance(found, int) and not isinstance(found, bool):
        number = int(found)
        return number if -_INT64_MAX <= number <= _INT64_MAX else _spell_integer(number, argument)
    text = _spell_text(found, argument)
    if text is None:
        raise SchemaValidationError(
            f"{argument} must be an int or a str, not {type(value).__name__}; "
            "an id of several parts can be joined to one text"
        )
    return _bound_text(text, argument, MAX_ID_LENGTH)


def take_lengths(lengths: object, argument: str) -> tuple[int, ...]:
    """Length of each sample, in their order.

    Raises:
        SchemaValidationError: Not one non-negative integer for each sample.
    """
    values = _take_values(lengths, argument, "length")
    if set(map(type, values)) == _ONLY_INTS and min(values) >= 0 and max(values) <= _INT64_MAX:
        return tuple(values)
    return tuple(_check_count(value, f"{argument}[{index}]") for index, value in enumerate(values))


def _take_values(given: Any, argument: str, noun: str, hint: str = "") -> Sequence[Any]:
    """One value for each sample, as Python objects."""
    if type(given) is list or type(given) is tuple:
        return given
    try:
        # Of the arrays, which are the common case, no question is asked twice.
        if getattr(given, "ndim", None) == 1:
            values: list[Any] = given.tolist()
            return values
        return _convert_values(given, argument, noun, hint)
    except SchemaValidationError:
        raise
    except Exception as error:  # noqa: BLE001 - a foreign object may raise anything
        _refuse_unreadable(argument, error)


def _convert_values(given: Any, argument: str, noun: str, hint: str) -> Sequence[Any]:
    if isinstance(given, (str, bytes, bytearray, Mapping, Set)) or given is None:
        what = type(given).__name__
        raise SchemaValidationError(
            f"{argument} must hold one {noun} for each sample, in their order, not be a {what}"
        )
    shape = getattr(given, "shape", None)
    if shape is not None:
        shape = tuple(map(int, shape))
        if not shape or any(size != 1 for size in shape[1:]):
            raise SchemaValidationError(
                f"{argument} must hold one {noun} for each sample, but it is of shape {shape}{hint}"
            )
        if len(shape) > 1:
            given = given.reshape(shape[0])
    for method in ("tolist", "to_list", "numpy"):
        convert: Callable[[], Any] | None = getattr(given, method, None)
        if callable(convert):
            values = convert()
            return list(values)
    if isinstance(given, Sequence):
        return list(given)
    raise SchemaValidationError(
        f"{argument} must be a list, a tuple, an array or a tensor with one {noun} for each "
        f"sample, not {type(given).__name__}"
    )


def _spell_label(label: Any, argument: str, values: Sequence[Any] | None = None) -> str:
    """A label as text; the place of a bad one is looked up in `values` where they are given."""
    kind = type(label)
    if kind is int and -_INT64_MAX <= label <= _INT64_MAX:
        return str(label)
    if kind is str and len(label) <= MAX_NAME_LENGTH and label.isascii():
        return label  # type: ignore[no-any-return]
    if values is not None:
        argument = f"{argument}[{values.index(label)}]" if label == label else argument
    found = _unwrap(label)
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, int):
        return _spell_integer(int(found), argument)
    if isinstance(found, float):
        return str(int(found)) if found.is_integer() else repr(float(found))
    text = _spell_text(found, argument)
    if text is None:
        raise SchemaValidationError(
            f"{argument} must be one label (an int, a str, a bool, a float or an enum member), not "
            f"{type(label).__name__}; for several labels of a sample, or shares of labels, pass "
            "class_counts={label: count} instead"
        )
    return _bound_text(text, argument, MAX_NAME_LENGTH)


def _unwrap(value: Any) -> Any:
    """The plain value of an enum member, or of a scalar of numpy or torch."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, (int, float, str, bytes)):
        return value
    try:
        is_scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
        return value.item() if is_scalar else value
    except Exception:  # noqa: BLE001 - a foreign object may raise anything
        return value


def _spell_text(value: Any, argument: str) -> str | None:
    if isinstance(value, str):
        return check_text(value, argument)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, (PurePath, UUID)):
        return check_text(str(value), argument)
    return None


def _spell_integer(value: int, argument: str) -> str:
    # Python refuses to spell out integers of thousands of digits.
    if value.bit_length() > 8 * MAX_NAME_LENGTH:
        raise SchemaValidationError(f"{argument} is an integer of {value.bit_length()} bits")
    return str(value)


def _bound_text(text: str, argument: str, limit: int) -> str:
    if len(text) > limit:
        # The text itself must not get into a message: it may be a sample.
        raise SchemaValidationError(
            f"{argument} has {len(text)} characters; at most {limit} are allowed, since samples "
            "themselves are never stored"
        )
    return text


def _check_count(value: Any, argument: str) -> int:
    found = _unwrap(value)
    if isinstance(found, float) and found.is_integer():
        found = int(found)
    if isinstance(found, float):
        raise SchemaValidationError(f"{argument} must be a whole number, got {found!r}")
    try:
        # Of an index that is out of bounds the number itself helps.
        number = operator.index(found)
    except Exception:  # noqa: BLE001 - a foreign object may raise anything
        number = 0
    if number < 0:
        raise SchemaValidationError(f"{argument} must not be negative, got {number!r:.40}")
    checked = check_index(found, argument)
    if checked is None:
        raise SchemaValidationError(f"{argument} must be a non-negative integer, not None")
    return checked


def _add_up(items: Iterable[tuple[str, int]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for text, count in items:
        counts[text] = counts.get(text, 0) + count
    return counts


def _refuse_unreadable(argument: str, error: Exception) -> NoReturn:
    raise SchemaValidationError(f"{argument} cannot be read: {type(error).__name__}") from error
