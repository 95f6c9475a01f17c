"""Metadata of a batch: adapters that extract it, and its checks.

Labels, ids and lengths come as lists, tuples, ranges, other sequences, numpy
arrays, torch tensors (one on a GPU is brought over by a single copy, for which
the call waits) or whatever else has `tolist()`; none of their libraries is
imported here. An array of shape (N, 1) counts as one of N.

A label becomes text: 3 and 3.0 are "3", 0.5 is "0.5", True is "true", bytes
are read as UTF-8, and an enum member is its value.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, NoReturn, TypeAlias
from uuid import UUID

from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import JsonObject, encode_json, normalize_object
from quark_core.records.names import MAX_NAME_LENGTH, check_text
from quark_core.records.query import check_index

NoteProblem: TypeAlias = Callable[[SchemaValidationError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMetadata:
    """Data that an adapter extracts from one batch; None is unknown.

    Labels, IDs and lengths may be lists, tuples, NumPy arrays or torch tensors on any device. They
    are not kept.

    Attributes:
        batch_size: Number of samples. Defaults to the number of IDs, labels or lengths.
        sample_ids: One int or str per sample, in order.
        labels: One label per sample.
        class_counts: Mapping of label to number of samples, or one label per sample. The sum may
            differ from `batch_size`.
        sequence_lengths: One length per sample, in order.
        metadata: JSON values.
        problems: Descriptions of missing data. Each is logged to the run; strict mode raises.
    """

    batch_size: int | None = None
    sample_ids: Any = None
    labels: Any = None
    class_counts: Any = None
    sequence_lengths: Any = None
    metadata: Mapping[str, Any] | None = None
    problems: tuple[str, ...] = ()


class BatchMetadataAdapter(ABC):
    """Base class of adapters that read custom batches for DataDiagnostics.

    One instance is used by all threads that log.
    """

    @abstractmethod
    def extract_batch_metadata(self, batch: Any) -> BatchMetadata:
        """Return the metadata of a batch, without changing the batch.

        If it raises or returns another type, a strict run raises SchemaValidationError. Otherwise
        the batch is logged without this data, with a `batch_metadata_failed` event.

        Args:
            batch: The batch that was passed to `log_batch`.
        """


class _UsualKey(str):
    """A key that a batch may lack, since nobody has named it."""

    __slots__ = ()


_SAMPLE_IDS = _UsualKey("sample_ids")
_LABELS = _UsualKey("labels")
_SEQUENCE_LENGTHS = _UsualKey("sequence_lengths")


class MappingBatchMetadataAdapter(BatchMetadataAdapter):
    """Adapter for batches that are mappings, or have `keys()` and `[key]`.

    Only the given keys are read. A key that you pass must be in each batch. The default keys may be
    missing. A value of None is unknown.

    Args:
        sample_id_key: Key of one ID per sample, or None.
        label_key: Key of one label per sample, or None.
        sequence_length_key: Key of one length per sample, or None.
        metadata_keys: Keys of JSON values that become metadata.
        class_counts_key: Key of a mapping of label to number of samples, or of the labels. Read
            instead of `label_key`.
        batch_size_key: Key of the number of samples.

    Raises:
        SchemaValidationError: A key is not a str. The message names the argument.
    """

    def __init__(
        self,
        *,
        sample_id_key: str | None = _SAMPLE_IDS,
        label_key: str | None = _LABELS,
        sequence_length_key: str | None = _SEQUENCE_LENGTHS,
        metadata_keys: Iterable[str] = (),
        class_counts_key: str | None = None,
        batch_size_key: str | None = None,
    ) -> None:
        if class_counts_key is not None and isinstance(label_key, _UsualKey):
            label_key = None
        keys = {
            "sample_ids": ("sample_id_key", sample_id_key),
            "labels": ("label_key", label_key),
            "sequence_lengths": ("sequence_length_key", sequence_length_key),
            "class_counts": ("class_counts_key", class_counts_key),
            "batch_size": ("batch_size_key", batch_size_key),
        }
        for argument, key in keys.values():
            if key is not None and (not isinstance(key, str) or not key):
                raise SchemaValidationError(
                    f"{argument} must be a key of the batches (a str) or None, "
                    f"not {type(key).__name__ if key != '' else 'empty'}"
                )
        if label_key is not None and class_counts_key is not None:
            raise SchemaValidationError("label_key and class_counts_key cannot be combined")
        if isinstance(metadata_keys, str) or not isinstance(metadata_keys, Iterable):
            raise SchemaValidationError(
                f"metadata_keys must be an iterable of str, not {type(metadata_keys).__name__}"
            )
        self._keys = {field: key for field, (_, key) in keys.items() if key is not None}
        self._metadata_keys = tuple(metadata_keys)
        for index, key in enumerate(self._metadata_keys):
            if not isinstance(key, str):
                raise SchemaValidationError(
                    f"metadata_keys[{index}] must be a str, not {type(key).__name__}"
                )

    def extract_batch_metadata(self, batch: Any) -> BatchMetadata:
        """Return the values of the keys; `problems` lists missing keys.

        Args:
            batch: The batch.

        Raises:
            SchemaValidationError: `batch` is not like a mapping.
        """
        if not is_like_mapping(batch):
            raise SchemaValidationError(
                f"batch must be a mapping, not {type(batch).__name__}. For other batches, "
                "subclass BatchMetadataAdapter"
            )
        problems: list[str] = []
        found = {field: _look_up(batch, key, problems) for field, key in self._keys.items()}
        metadata = {}
        for key in self._metadata_keys:
            value = _look_up(batch, key, problems)
            if value is not None:
                metadata[key] = value
        return BatchMetadata(**found, metadata=metadata or None, problems=tuple(problems))


def is_like_mapping(batch: object) -> bool:
    """Whether values can be looked up in a batch by key."""
    kind = type(batch)
    return isinstance(batch, Mapping) or (hasattr(kind, "keys") and hasattr(kind, "__getitem__"))


def _look_up(batch: Any, key: str, problems: list[str]) -> Any:
    # A lookup in a defaultdict would put the key into the batch.
    if not isinstance(batch, Mapping) or key in batch:
        try:
            return batch[str(key)]
        except KeyError:
            pass
    if not isinstance(key, _UsualKey):
        problems.append(f"batch has no key {key!r}")
    return None


class BatchContents:
    """What one record will hold of a batch, as it comes together.

    What the caller has given comes first and wins; what an adapter has found
    fills in the rest.

    Attributes:
        size: Number of samples, or None.
        sample_ids, class_counts, sequence_lengths, metadata: As in the record.
    """

    __slots__ = (
        "_size_source",
        "class_counts",
        "metadata",
        "sample_ids",
        "sequence_lengths",
        "size",
    )

    def __init__(
        self,
        batch_size: object,
        sample_ids: object,
        labels: object,
        class_counts: object,
        sequence_lengths: object,
        metadata: Mapping[str, Any] | None,
    ) -> None:
        self.size: int | None = None
        self._size_source = "batch_size"
        self.sample_ids: tuple[int | str, ...] | None = None
        self.class_counts: JsonObject | None = None
        self.sequence_lengths: tuple[int, ...] | None = None
        if batch_size is not None:
            self.size = check_index(batch_size, "batch_size")
        if sample_ids is not None:
            self.take_sample_ids(sample_ids)
        if labels is not None or class_counts is not None:
            self.take_classes(labels, class_counts)
        if sequence_lengths is not None:
            self.take_sequence_lengths(sequence_lengths)
        self.metadata = None if metadata is None else normalize_object(metadata, "metadata")

    def fill(self, found: BatchMetadata, note_problem: NoteProblem) -> None:
        """Take from an adapter what is not known yet; each thing that is bad is left out."""
        for problem in found.problems:
            note_problem(SchemaValidationError(problem))
        self._try(note_problem, self._fill_size, found.batch_size)
        if self.sample_ids is None and found.sample_ids is not None:
            self._try(note_problem, self.take_sample_ids, found.sample_ids)
        if self.class_counts is None and (
            found.labels is not None or found.class_counts is not None
        ):
            self._try(note_problem, self.take_classes, found.labels, found.class_counts)
        if self.sequence_lengths is None and found.sequence_lengths is not None:
            self._try(note_problem, self.take_sequence_lengths, found.sequence_lengths)
        if found.metadata is not None:
            self._try(note_problem, self._fill_metadata, found.metadata)

    def take_sample_ids(self, sample_ids: object) -> None:
        """Keep the ids.

        Raises:
            SchemaValidationError: Bad ids, or not as many as there are samples.
        """
        taken = take_sample_ids(sample_ids, "sample_ids")
        self._fit(len(taken), "sample_ids")
        self.sample_ids = taken

    def take_classes(self, labels: object, class_counts: object) -> None:
        """Keep how many samples each label has.

        Raises:
            SchemaValidationError: Both are given, bad labels or counts, or
                not as many labels as there are samples.
        """
        if labels is not None and class_counts is not None:
            raise SchemaValidationError("labels and class_counts cannot be combined")
        if isinstance(class_counts, Mapping):
            self.class_counts = _take_class_counts(class_counts, "class_counts")
            return
        argument, given = ("class_counts", class_counts) if labels is None else ("labels", labels)
        counts, number = count_labels(given, argument)
        self._fit(number, argument)
        self.class_counts = counts

    def take_sequence_lengths(self, sequence_lengths: object) -> None:
        """Keep the lengths.

        Raises:
            SchemaValidationError: Bad lengths, or not as many as there are samples.
        """
        taken = take_lengths(sequence_lengths, "sequence_lengths")
        self._fit(len(taken), "sequence_lengths")
        self.sequence_lengths = taken

    def _fit(self, count: int, argument: str) -> None:
        if self.size is None:
            self.size, self._size_source = count, argument
        elif count != self.size:
            is_or_has = "is" if self._size_source == "batch_size" else "has"
            raise SchemaValidationError(
                f"{argument} has {count} entries, but {self._size_source} {is_or_has} {self.size}"
            )

    def _fill_size(self, batch_size: object) -> None:
        size = check_index(batch_size, "batch_size")
        if self.size is None:
            self.size = size
        elif size is not None and self._size_source != "batch_size" and size != self.size:
            raise SchemaValidationError(
                f"batch_size is {size}, but {self._size_source} has {self.size} entries"
            )

    def _fill_metadata(self, metadata: Mapping[str, Any]) -> None:
        found = normalize_object(metadata, "metadata")
        if found:
            self.metadata = JsonObject({**found, **(self.metadata or {})})

    @staticmethod
    def _try(note_problem: NoteProblem, take: Callable[..., None], *given: object) -> None:
        try:
            take(*given)
        except SchemaValidationError as error:
            note_problem(error)


_MAX_ID_LENGTH = 1000
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


def _take_class_counts(counts: Mapping[Any, Any], argument: str) -> JsonObject:
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
    if are_ascii and max(map(len, values)) <= _MAX_ID_LENGTH:
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
            f"{argument} must be an int or a str, not {type(value).__name__}. Join an ID of "
            "several parts to one string"
        )
    return _bound_text(text, argument, _MAX_ID_LENGTH)


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
            f"{argument} must contain one {noun} for each sample, in order, and cannot be a {what}"
        )
    shape = getattr(given, "shape", None)
    if shape is not None:
        shape = tuple(map(int, shape))
        if not shape or any(size != 1 for size in shape[1:]):
            raise SchemaValidationError(
                f"{argument} must have one {noun} for each sample, but its shape is {shape}{hint}"
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
            f"{argument} must be one label (an int, a str, a bool, a float or an enum member), "
            f"not {type(label).__name__}. For several labels per sample, or shares of labels, "
            "pass class_counts={label: count} instead"
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
            f"{argument} has {len(text)} characters; at most {limit} are allowed, because "
            "sample contents are not stored"
        )
    return text


def _check_count(value: Any, argument: str) -> int:
    found = _unwrap(value)
    if isinstance(found, float) and found.is_integer():
        found = int(found)
    if isinstance(found, float):
        raise SchemaValidationError(f"{argument} must be a whole number, got {found!r:.60}")
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
