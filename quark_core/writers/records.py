"""Writes records of any kind of the schema into a run: for importers and tools."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from math import isfinite
from typing import Any

import msgspec

from quark_core.config import settings
from quark_core.delivery.channel import ITEM_BYTES, MetricKey
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records import (
    RECORD_TYPES,
    BatchDiagnosticRecord,
    LifecycleRecord,
    MetricRecord,
    Record,
    StreamRecord,
)
from quark_core.records.json_object import JsonObject, normalize_object
from quark_core.records.names import (
    check_text,
    decode_name,
    encode_name,
    keep_encoded,
    split_name,
)
from quark_core.records.query import check_index
from quark_core.records.schema import column_types, validate_record
from quark_core.runs.open_run import OpenRun

SLICE_RECORDS = 10_000
"""Records that are checked together before any of them is accepted."""

_SLICE_BYTES = 16 * 1024 * 1024
# An object of JSON weighs about this many times its text, as `Channel.weigh` reckons.
_JSON_WEIGHT = 12
_FRAME_RECORDS = 4096
_MAX_CACHED_KEYS = 100_000
_INT64_MAX = 2**63 - 1
# The times that ISO 8601 can show: years 1 to 9999.
_FIRST_US = -62_135_596_800_000_000
_LAST_US = 253_402_300_799_999_999


def write_records(run: OpenRun, records: Iterable[StreamRecord]) -> int:
    """Check records and put them into a run's stream; see `TrainingSession.write`.

    Returns:
        How many were written.
    """
    if run.refusal is not None:
        run.refuse("write")
    # The argument may be anything; what is no iterable must say so itself.
    given: Any = records
    try:
        found = iter(given)
    except TypeError:
        raise SchemaValidationError(
            f"records must be an iterable of records, not {type(given).__name__}"
        ) from None
    check = _Check(run.strict)
    if isinstance(given, Collection):
        # It can be gone through twice, so that none is accepted unless all are good.
        for _ in _cut(check, found):
            pass
        found = iter(given)
    written = 0
    try:
        for part in _cut(check, found):
            _accept(run, part, written)
            written += len(part)
    except SchemaValidationError as error:
        accepted = f"the first {written} were accepted" if written else "none were accepted"
        raise SchemaValidationError(f"{error}; {accepted}") from error
    return written


def _cut(check: _Check, records: Iterator[object]) -> Iterator[list[StreamRecord]]:
    """Checked records in slices that are bounded in number and in weight."""
    part: list[StreamRecord] = []
    weight_bytes = 0
    for index, record in enumerate(records):
        settled, json_bytes = check.settle(record, index)
        part.append(settled)
        weight_bytes += ITEM_BYTES + _JSON_WEIGHT * json_bytes
        if len(part) >= SLICE_RECORDS or weight_bytes >= _SLICE_BYTES:
            yield part
            part, weight_bytes = [], 0
    if part:
        yield part


def _accept(run: OpenRun, part: list[StreamRecord], written: int) -> None:
    """Give a slice the identity of this process's stream, and wait until it has left memory."""
    if run.refusal is not None:
        run.refuse("write")
    for kind in {record.KIND for record in part}:
        run.stream.channel(kind).fit_frames(_FRAME_RECORDS)
    for record in part:
        # Looked up for each: the first record of a forked child gives it another stream.
        stream = run.stream
        origin, channel = stream.origin, stream.channel(record.KIND)
        _, _, _, _, _, *rest = msgspec.structs.astuple(record)
        record_type: Any = type(record)
        channel.put(
            record_type(
                *origin.head,
                channel.take_sequence(),
                *rest,
            )
        )
    timeout_s = settings.persistence_timeout_s()
    # Memory is bounded by letting the oldest go, so nobody may be faster than delivery.
    if run.stream.hand_over(timeout_s) is None:
        raise SessionStoreError(
            f"write: {written + len(part)} records are accepted, but the delivery thread did not "
            f"take the last {len(part)} within {timeout_s:g} s, so the rest is not accepted. "
            "Nothing is lost: the accepted records wait in memory and are delivered later."
        )


class _Check:
    """Validates records, and brings them into the form that the stream takes.

    Args:
        strict: Whether values that are not finite, and metric names outside
            the naming rule, are refused.
    """

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._keys: dict[tuple[str, str | None, str], MetricKey] = {}

    def settle(self, record: object, index: int) -> tuple[StreamRecord, int]:
        """The record with plain values, and the length of its JSON in bytes.

        Raises:
            SchemaValidationError: It does not fit; the message gives its place.
        """
        if type(record) is MetricRecord:
            key = self._find_key(record)
            if key is not None:
                return record if _is_settled(record, key) else _rename(record, key), 0
        try:
            return self._settle(record)
        except SchemaValidationError as error:
            raise SchemaValidationError(f"records[{index}]: {error}") from error

    def _find_key(self, record: MetricRecord) -> MetricKey | None:
        """The stored key of an ordinary metric under a name that was validated before.

        `validate_record` takes a hundred times as long. What is not quite
        ordinary is left to it.
        """
        time_us, step, epoch = record.time_us, record.step, record.epoch
        namespace, description = record.namespace, record.description
        if (
            type(record.value) is float
            and isfinite(record.value)
            and type(time_us) is int
            and _FIRST_US <= time_us <= _LAST_US
            and (step is None or (type(step) is int and 0 <= step <= _INT64_MAX))
            and (epoch is None or (type(epoch) is int and 0 <= epoch <= _INT64_MAX))
            and (step is not None or epoch is not None)
            and (description is None or (type(description) is str and description.isascii()))
            and record.metadata is None
            and type(record.metric_key) is type(record.metric_name) is str
            and (namespace is None or type(namespace) is str)
            and _has_plain_origin(record)
        ):
            return self._keys.get((record.metric_key, namespace, record.metric_name))
        return None

    def _settle(self, record: object) -> tuple[StreamRecord, int]:
        if (
            not isinstance(record, StreamRecord)
            or RECORD_TYPES.get(record.KIND) is not type(record)
            # A run's life is told by its session alone.
            or isinstance(record, LifecycleRecord)
        ):
            writable = [each for each in RECORD_TYPES.values() if each is not LifecycleRecord]
            raise SchemaValidationError(
                f"{type(record).__name__} cannot be written. Records of these types can: "
                f"{', '.join(each.__name__ for each in writable)}"
            )
        self._validate(record)
        json_bytes = 0
        changes: dict[str, Any] = {}
        for name, encoding in column_types(record.KIND).items():
            value = getattr(record, name)
            if value is None or name in ("sequence", "time_us"):
                continue
            settled = _settle_value(value, encoding, f"{type(record).__name__}.{name}")
            if isinstance(settled, JsonObject):
                json_bytes += len(settled.encoded)
            changes[name] = settled
        if isinstance(record, MetricRecord):
            changes |= self._resolve(record)._asdict()
        return msgspec.structs.replace(record, **changes), json_bytes

    def _validate(self, record: StreamRecord) -> None:
        # As in `log` and `log_batch`: only data can cause it, so it is kept as it is.
        if not self._strict and isinstance(record, MetricRecord) and _is_odd(record.value):
            record = msgspec.structs.replace(record, value=0.0)
        if not self._strict and isinstance(record, BatchDiagnosticRecord) and _is_odd(record.loss):
            record = msgspec.structs.replace(record, loss=0.0)
        validate_record(record)

    def _resolve(self, record: MetricRecord) -> MetricKey:
        """The stored key of a validated metric: encoded, where it is outside the naming rule."""
        given = record.metric_key, record.namespace, record.metric_name
        found = self._keys.get(given)
        if found is not None:
            return found
        name = check_text(record.metric_key, "MetricRecord.metric_key")
        stored = encode_name(name) if decode_name(name) == name else name
        keep_encoded(name, stored, "MetricRecord.metric_key", "metric", strict=self._strict)
        if len(self._keys) >= _MAX_CACHED_KEYS:
            self._keys.clear()
        key = self._keys[given] = MetricKey(stored, *split_name(stored))
        return key


def _is_odd(value: object) -> bool:
    return isinstance(value, float) and not isfinite(value)


def _has_plain_origin(record: StreamRecord) -> bool:
    """Whether the fields that are going to be replaced are of the right types, and not negative."""
    attempt, rank, sequence = record.attempt, record.rank, record.sequence
    return (
        type(attempt) is type(rank) is type(sequence) is int
        and min(attempt, rank, sequence) >= 0
        and max(attempt, rank, sequence) <= _INT64_MAX
        and type(record.writer_id) is str
        and (record.run_id is None or type(record.run_id) is str)
    )


def _is_settled(record: MetricRecord, key: MetricKey) -> bool:
    return key == (record.metric_key, record.namespace, record.metric_name)


def _rename(record: MetricRecord, key: MetricKey) -> MetricRecord:
    renamed: MetricRecord = msgspec.structs.replace(record, **key._asdict())
    return renamed


def _settle_value(value: Any, encoding: str, where: str) -> Any:
    """A valid value as the codec can take it: one that it cannot would cost a whole batch."""
    if encoding == "i":
        return value if isinstance(value, bool) else check_index(value, where)
    if encoding == "f":
        try:
            return float(value)
        except OverflowError:
            raise SchemaValidationError(f"{where} is too large for a float64") from None
    if encoding == "t":
        return value if type(value) is str and value.isascii() else check_text(value, where)
    if isinstance(value, tuple):
        return tuple(_settle_item(item, f"{where}[{i}]") for i, item in enumerate(value))
    return normalize_object(value, where)


def _settle_item(item: Any, where: str) -> Any:
    if isinstance(item, Record):
        texts = {
            name: check_text(getattr(item, name), f"{where}.{name}")
            for name in item.__struct_fields__
            if isinstance(getattr(item, name), str)
        }
        return msgspec.structs.replace(item, **texts)
    if isinstance(item, str):
        return check_text(item, where)
    if isinstance(item, float):
        return float(item)
    if not -_INT64_MAX - 1 <= item <= _INT64_MAX:
        raise SchemaValidationError(f"{where} must fit in 64 bits")
    return int(item)
