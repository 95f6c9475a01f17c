"""What a batch says of itself: adapters that take it out of a batch, and its checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from quark_core.batch_contents import (
    count_labels,
    take_class_counts,
    take_lengths,
    take_sample_ids,
)
from quark_core.errors import SchemaValidationError
from quark_core.json_object import JsonObject, normalize_object
from quark_core.query import check_index

__all__ = [
    "BatchContents",
    "BatchMetadata",
    "BatchMetadataAdapter",
    "MappingBatchMetadataAdapter",
    "NoteProblem",
]

NoteProblem: TypeAlias = Callable[[SchemaValidationError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMetadata:
    """What an adapter found out about one batch. What is None is not known.

    Labels, ids and lengths may be lists, tuples, numpy arrays or torch tensors
    on any device; they are checked by `DataDiagnostics.log_batch`, which keeps
    no reference to them.

    Attributes:
        batch_size: Number of samples; by default as many as there are ids,
            labels or lengths.
        sample_ids: One int or str for each sample, in their order.
        labels: One label for each sample.
        class_counts: A mapping of label to number of samples, whose sum need
            not be `batch_size`; or the labels themselves, one for each sample.
        sequence_lengths: One length for each sample, in their order.
        metadata: JSON values.
        problems: What could not be found out, in words without anything of a
            sample. The run is told of each, in strict mode by an error.
    """

    batch_size: int | None = None
    sample_ids: Any = None
    labels: Any = None
    class_counts: Any = None
    sequence_lengths: Any = None
    metadata: Mapping[str, Any] | None = None
    problems: tuple[str, ...] = ()


class BatchMetadataAdapter(ABC):
    """Takes out of a batch of your own kind what DataDiagnostics keeps of it.

    One instance serves every thread that logs.
    """

    @abstractmethod
    def extract_batch_metadata(self, batch: Any) -> BatchMetadata:
        """What is known of a batch, which must not be changed.

        Where it raises, or returns anything else, a strict run raises
        SchemaValidationError; otherwise the batch is logged with what else is
        known of it, and the run gets an event `batch_metadata_failed`.
        """


class _UsualKey(str):
    """A key that a batch may lack, since nobody has named it."""

    __slots__ = ()


_SAMPLE_IDS = _UsualKey("sample_ids")
_LABELS = _UsualKey("labels")
_SEQUENCE_LENGTHS = _UsualKey("sequence_lengths")


class MappingBatchMetadataAdapter(BatchMetadataAdapter):
    """Reads batches that are mappings, or have `keys()` and `[key]` like one.

    Nothing but the values of these keys is read. A key that you name must be
    in every batch; the default keys are left out where a batch lacks them. A
    value of None is not known.

    Args:
        sample_id_key: Of one id for each sample; None to read none.
        label_key: Of one label for each sample; None to read none.
        sequence_length_key: Of one length for each sample; None to read none.
        metadata_keys: Keys whose values, which must be JSON values, become metadata.
        class_counts_key: Of a mapping of label to number of samples, or of
            the labels; it is read in place of `label_key`.
        batch_size_key: Of the number of samples.

    Raises:
        SchemaValidationError: A key is not a str; the message names the argument.
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
            raise SchemaValidationError("label_key or class_counts_key must be None: not both")
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
        """The values of the keys; `problems` names those that the batch lacks.

        Raises:
            SchemaValidationError: `batch` is not like a mapping.
        """
        if not is_like_mapping(batch):
            raise SchemaValidationError(
                f"batch must be a mapping, not {type(batch).__name__}; subclass "
                "BatchMetadataAdapter for batches of another kind"
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
            raise SchemaValidationError("labels and class_counts must not both be given")
        if isinstance(class_counts, Mapping):
            self.class_counts = take_class_counts(class_counts, "class_counts")
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
