"""Makes batches of what people send as JSON: records as objects with the fields of their kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from quark_backends.service.protocol import (
    ACKNOWLEDGED_LIMIT_BATCHES,
    ErrorCode,
    WireBatch,
)
from quark_backends.service.server.config import Limits
from quark_backends.service.server.http.replies import ServiceFailure
from quark_backends.service.server.http.request_bodies import check_nesting
from quark_backends.service.server.ingest.batch_checks import check_batches
from quark_core.backends.contract import Batch
from quark_core.errors import SchemaValidationError
from quark_core.records import RECORD_TYPES, StreamRecord
from quark_core.records.base import check_timestamp, now_us
from quark_core.records.codec import encode_records
from quark_core.records.json_object import JsonObject, normalize_object
from quark_core.records.names import check_name, decode_name, encode_name, split_name
from quark_core.records.schema import ORIGIN_FIELDS, restorers, validate_record

_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_SEQUENCES_OF_A_BATCH = 2**20


class JsonBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch whose records are objects.

    Attributes:
        writer_id, number: Identity of the batch within its run.
        kind: Kind of the records.
        attempt, rank: Of the writer.
        records: Each has the fields of its kind; `timestamp` (ISO 8601) or `time_us`
            says when it was, now where neither is there. `sequence` is counted
            where it is left out.
    """

    writer_id: Annotated[str, Meta(min_length=1, max_length=128)]
    number: Annotated[int, Meta(ge=0, le=2**42)]
    kind: Annotated[str, Meta(min_length=1, max_length=64)]
    attempt: _Number = 0
    rank: _Number = 0
    records: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=65_536)]

    @property
    def is_timed(self) -> bool:
        """Whether every record says when it was."""
        return all("timestamp" in each or "time_us" in each for each in self.records)


class JsonIngest(msgspec.Struct, frozen=True):
    """`POST /v1/runs/{run_id}/batches` as JSON: all of them are stored, or none."""

    batches: Annotated[list[JsonBatch], Meta(min_length=1, max_length=ACKNOWLEDGED_LIMIT_BATCHES)]


def encode_json_batches(run_id: str, batches: Sequence[JsonBatch], limits: Limits) -> list[Batch]:
    """The batches, checked by the record types and encoded.

    Raises:
        ServiceFailure: A record that does not fit; `field` says which.
    """
    return check_batches(
        run_id,
        [
            _encode(run_id, batch, f"batches[{index}]", limits)
            for index, batch in enumerate(batches)
        ],
        limits,
    )


def _encode(run_id: str, batch: JsonBatch, field: str, limits: Limits) -> WireBatch:
    if batch.kind not in RECORD_TYPES:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            f"{field}.kind must be one of {', '.join(sorted(RECORD_TYPES))}, "
            f"got {batch.kind!r:.60}",
            field=f"{field}.kind",
        )
    moment = now_us()
    records = []
    for index, given in enumerate(batch.records):
        where = f"{field}.records[{index}]"
        check_nesting(given, limits.nesting, where)
        try:
            records.append(_make_record(run_id, batch, index, given, moment))
        except SchemaValidationError as error:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT, f"{where}: {error}", field=where
            ) from None
    return WireBatch(
        batch.writer_id,
        batch.attempt,
        batch.rank,
        batch.number,
        batch.kind,
        len(records),
        encode_records(records),
    )


def _make_record(
    run_id: str, batch: JsonBatch, index: int, given: Mapping[str, Any], moment_us: int
) -> StreamRecord:
    record_type: Any = RECORD_TYPES[batch.kind]
    values = dict(given)
    for name in (*ORIGIN_FIELDS, "id"):
        values.pop(name, None)
    if "timestamp" in values:
        values["time_us"] = check_timestamp(values.pop("timestamp"))
    values.setdefault("time_us", moment_us)
    values.setdefault("sequence", batch.number * _SEQUENCES_OF_A_BATCH + index)
    _complete_names(batch.kind, values)
    fields = {each.name: each for each in msgspec.structs.fields(record_type)}
    unknown = sorted(values.keys() - fields.keys())
    if unknown:
        raise SchemaValidationError(
            f"{batch.kind} records have no field {unknown[0]!r:.100}; they have "
            f"{', '.join(name for name in fields if name not in ORIGIN_FIELDS)}"
        )
    hints = get_type_hints(record_type)
    for name, each in fields.items():
        if name in ORIGIN_FIELDS:
            continue
        if name in values:
            values[name] = _convert(batch.kind, name, values[name], hints[name])
        elif each.default is msgspec.NODEFAULT and each.default_factory is msgspec.NODEFAULT:
            if type(None) not in get_args(hints[name]):
                raise SchemaValidationError(f"{name} is missing")
            values[name] = None
    record: StreamRecord = record_type(
        run_id=run_id,
        writer_id=batch.writer_id,
        attempt=batch.attempt,
        rank=batch.rank,
        **values,
    )
    validate_record(record)
    return record


def _complete_names(kind: str, values: dict[str, Any]) -> None:
    """A metric's or artifact's key is enough: its parts, and its stored form, follow from it."""
    if kind not in ("metric", "artifact"):
        return
    key = values.get(f"{kind}_key")
    if isinstance(key, str):
        check_name(key, f"{kind}_key")
        if decode_name(key) == key:
            key = values[f"{kind}_key"] = encode_name(key)
        values["namespace"], values[f"{kind}_name"] = split_name(key)


def _convert(kind: str, name: str, value: Any, hint: Any) -> Any:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None:
        return None
    if JsonObject in options:
        return normalize_object(value, name)
    if name in restorers(kind):
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise SchemaValidationError(f"{name} must be a list, not {type(value).__name__}")
        try:
            return restorers(kind)[name](list(value))
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise SchemaValidationError(f"{name} does not fit: {error}") from None
    if float in options and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise SchemaValidationError(f"{name} does not fit into a float64") from None
    return value
