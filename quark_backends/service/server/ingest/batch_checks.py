"""Checks batches from outside before a store takes them.

What the store derives and what readers make later must never fail for what
somebody has sent: every column of a body has the length and the values that
its encoding promises.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from quark_backends.service.protocol import ErrorCode, WireBatch
from quark_backends.service.server.config import Limits
from quark_backends.service.server.http.replies import ServiceFailure
from quark_backends.service.server.http.request_bodies import count_declared
from quark_core.backends.contract import Batch
from quark_core.errors import SchemaValidationError
from quark_core.records import RECORD_TYPES, ArtifactRecord, LifecycleRecord, MetricRecord
from quark_core.records.codec import Column, DecodedBody
from quark_core.records.fields import boolean_fields, column_types, optional_fields, restorers
from quark_core.records.json_object import decode_json
from quark_core.records.schema import TERMINAL_STATUSES, validate_record
from quark_core.system.process import ProcessIdentity

__all__ = ["RunKeys", "check_batches", "find_metric_keys"]

_PLAIN = b"\x00"
_ZSTD = b"\x01"
_WIDTHS = (1, 2, 4, 8)
_METRIC_NAMES = frozenset({"metric_key", "namespace", "metric_name"})
_CONTROL = re.compile(r"[\x00-\x1f]")
_INT64 = 2**63
# The years 1 to 9999, which is what a time can be written as.
_FIRST_US = -62_135_596_800_000_000
_LAST_US = 253_402_300_799_999_999


def check_batches(run_id: str, batches: Sequence[WireBatch], limits: Limits) -> list[Batch]:
    """The batches of a request for ingest, as the store takes them.

    Raises:
        ServiceFailure: One is malformed or beyond a limit; nothing is taken.
    """
    _check_sizes(batches, limits)
    return [
        _check_batch(
            Batch(
                run_id,
                wire.writer_id,
                wire.attempt,
                wire.rank,
                wire.number,
                wire.kind,
                wire.count,
                wire.body,
            ),
            f"batches[{index}]",
            limits,
        )
        for index, wire in enumerate(batches)
    ]


def find_metric_keys(batches: Sequence[Batch]) -> set[str]:
    """The stored keys of the metrics in checked batches."""
    keys: set[str] = set()
    for batch in batches:
        if batch.kind == MetricRecord.KIND:
            column = batch.decoded.column("metric_key")
            keys.update(column.head[0] if column.encoding == "t" else [column.head])
    return keys


def _check_sizes(batches: Sequence[WireBatch], limits: Limits) -> None:
    """Refuse what is too much, before anything is decompressed."""
    total = 0
    for index, wire in enumerate(batches):
        if wire.count > limits.batch_rows:
            raise ServiceFailure(
                ErrorCode.TOO_LARGE,
                f"batch {wire.number} of writer {wire.writer_id:.128} has {wire.count} records; "
                f"this server takes {limits.batch_rows} (limit batch_rows)",
                field=f"batches[{index}].count",
            )
        marker, size = wire.body[:1], len(wire.body)
        if marker == _ZSTD:
            declared = count_declared(wire.body[1:])
            if declared is None:
                raise _malformed(
                    f"batches[{index}].body", "it is no one zstd frame that says its size"
                )
            size = declared
        elif marker != _PLAIN:
            raise _malformed(f"batches[{index}].body", f"it begins with the marker {marker!r}")
        total += size
        if total > limits.decoded_bytes:
            raise ServiceFailure(
                ErrorCode.TOO_LARGE,
                f"the bodies of the batches have more than {limits.decoded_bytes} bytes once "
                "they are decompressed (limit decoded_bytes of this server)",
                field=f"batches[{index}].body",
            )


def _check_batch(batch: Batch, field: str, limits: Limits) -> Batch:
    for text, name in ((batch.writer_id, "writer_id"), (batch.kind, "kind")):
        _check_text(text, f"{field}.{name}", limits)
    if batch.kind not in RECORD_TYPES:
        # What only a newer Quark knows is kept as it is.
        return batch
    try:
        body = batch.decoded
        if body.kind != batch.kind or body.count != batch.count:
            raise SchemaValidationError(
                f"it holds {body.count} {body.kind} records, not {batch.count} {batch.kind} ones"
            )
        optional = optional_fields(batch.kind)
        for name, encoding in column_types(batch.kind).items():
            column = body.column(name)
            _check_column(column, encoding, body.count, is_optional=name in optional)
            _check_values(body, column, limits)
    except SchemaValidationError as error:
        raise _malformed(f"{field}.body", str(error)) from None
    except RecursionError:
        raise _malformed(f"{field}.body", "it is nested too deeply") from None
    if batch.kind == LifecycleRecord.KIND:
        check_lifecycle(batch, field)
    elif batch.kind == ArtifactRecord.KIND:
        _check_artifacts(batch, field)
    return batch


def _check_artifacts(batch: Batch, field: str) -> None:
    """Refuse artifacts that could name files elsewhere, on the machine of a colleague too."""
    for index, record in enumerate(batch.to_records()):
        assert isinstance(record, ArtifactRecord)
        try:
            record.check_places()
        except SchemaValidationError as error:
            raise _malformed(f"{field}.records[{index}]", str(error)) from None


def _check_column(column: Column, encoding: str, count: int, *, is_optional: bool) -> None:
    """Hold a column to its encoding and to the field that it is of."""
    found = column.encoding
    if found == "c":
        _check_constant(column, encoding, is_optional=is_optional)
        return
    if found == "j":
        if encoding != "j" or not isinstance(column.head, list) or len(column.head) != count:
            raise _bad(column, "has no JSON text for each record")
        if not all(item is None or isinstance(item, bytes) for item in column.head):
            raise _bad(column, "holds something else than JSON texts")
        return
    if found != encoding:
        raise _bad(column, f"is encoded as {found!r:.40}, its field as {encoding!r}")
    width = 8 if found == "f" else _check_head(column, found, is_optional=is_optional)
    if len(column.data) != count * width:
        raise _bad(column, f"has {len(column.data)} bytes for {count} records of {width}")
    if found == "t":
        indexes = np.frombuffer(column.data, dtype=f"<i{width}")
        if count and not 0 <= int(indexes.min()) <= int(indexes.max()) < len(column.head[0]):
            raise _bad(column, "names a text that it does not hold")
    if column.nulls:
        if len(column.nulls) != count or not is_optional or found == "t":
            raise _bad(column, "has nulls that do not fit")
        if column.nulls.translate(None, b"\x00\x01"):
            raise _bad(column, "has nulls that are neither 0 nor 1")


def _check_head(column: Column, encoding: str, *, is_optional: bool) -> int:
    """The width of a column's values."""
    head = column.head
    if not isinstance(head, list) or len(head) != 2 or head[1] not in _WIDTHS:
        raise _bad(column, "has a head that does not fit")
    first, width = head
    if encoding == "i":
        if not _is_int64(first):
            raise _bad(column, "begins with no integer of 64 bits")
    elif not isinstance(first, list) or not all(
        isinstance(text, str) or (text is None and is_optional) for text in first
    ):
        raise _bad(column, "holds something else than texts")
    return int(width)


def _check_constant(column: Column, encoding: str, *, is_optional: bool) -> None:
    head = column.head
    if head is None:
        # Records of an older Quark lack fields that are asked for today.
        fits = is_optional
    elif encoding == "i":
        fits = _is_int64(head)
    elif encoding == "f":
        fits = isinstance(head, (int, float)) and not isinstance(head, bool)
    else:
        fits = encoding == "t" and isinstance(head, str)
    if not fits:
        raise _bad(column, f"cannot be {head!r:.60}")


def _check_values(body: DecodedBody, column: Column, limits: Limits) -> None:
    name = column.name
    if column.encoding == "t" or (column.encoding == "c" and isinstance(column.head, str)):
        # Other kinds hold what users call their modules and files, whatever that is.
        if body.kind == MetricRecord.KIND and name in _METRIC_NAMES:
            for text in column.head[0] if column.encoding == "t" else [column.head]:
                if text is not None:
                    _check_text(text, name, limits)
    elif column.encoding == "j":
        try:
            if name in restorers(body.kind):
                body.to_list(name)
            else:
                for item in column.head:
                    if item is not None:
                        decode_json(item)
        except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, ValueError) as error:
            raise _bad(column, f"holds a JSON text that cannot be read: {error}") from None
    elif name == "time_us":
        times = body.to_array(name)
        if body.count and not _FIRST_US <= int(times.min()) <= int(times.max()) <= _LAST_US:
            raise _bad(column, "holds a time outside the years 1 to 9999")
    elif (
        name in boolean_fields(body.kind)
        and column.encoding == "i"
        and not bool(np.isin(body.to_array(name), (-1, 0, 1)).all())
    ):
        raise _bad(column, "holds what is neither true nor false")


def _check_text(text: str, field: str, limits: Limits) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _malformed(field, "it holds half of a surrogate pair") from None
    if size > limits.key_bytes:
        raise ServiceFailure(
            ErrorCode.REJECTED,
            f"{field} has {size} bytes; this server takes {limits.key_bytes} (limit key_bytes)",
            field=field,
        )
    if _CONTROL.search(text):
        raise _malformed(field, "it holds a control character")


def _is_int64(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_INT64 <= value < _INT64


def _bad(column: Column, reason: str) -> SchemaValidationError:
    return SchemaValidationError(f"column {column.name!r} {reason}")


def _malformed(field: str, reason: str) -> ServiceFailure:
    return ServiceFailure(ErrorCode.REJECTED, f"{field}: {reason}", field=field)


_Name = Annotated[str, Meta(min_length=1, max_length=512)]
_Path = Annotated[str, Meta(max_length=4096)]
_Index = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Project(msgspec.Struct):
    id: _Name
    name: _Name
    root_path: _Path


class _Run(msgspec.Struct):
    name: _Name | None
    notes: Annotated[str, Meta(max_length=200_000)] | None
    parent_run_id: _Name | None
    lineage_root_run_id: _Name | None
    run_path: _Path
    git_commit: _Name | None
    strict_mode: bool
    tags: Annotated[list[_Name], Meta(max_length=1000)]


class _Store(msgspec.Struct):
    name: _Name
    path: _Path


class _Offline(msgspec.Struct):
    reason: Annotated[str, Meta(max_length=4096)]
    replaces: _Name | None = None


class _Fork(msgspec.Struct):
    run_id: _Name
    step: _Index


class _Start(msgspec.Struct):
    project: _Project
    run: _Run
    process: ProcessIdentity
    store: _Store | None = None
    from_step: _Index | None = None
    fork: _Fork | None = None
    offline: _Offline | None = None


class _Origin(msgspec.Struct):
    key: str
    source: Annotated[str, Meta(max_length=4096)]
    place: Annotated[str, Meta(max_length=4096)] | None = None
    value: Any = None


class _Config(msgspec.Struct):
    values: dict[str, Any]
    notes: list[str]
    raw: dict[str, Any] | None = None
    origins: Annotated[list[_Origin], Meta(max_length=20_000)] | None = None


class _Tag(msgspec.Struct):
    tag: _Name


class _Status(msgspec.Struct):
    status: str
    exit_code: Annotated[int, Meta(ge=0, le=255)] | None = None


class _TextChange(msgspec.Struct):
    before: Annotated[str, Meta(max_length=200_000)] | None
    after: Annotated[str, Meta(max_length=200_000)] | None


class _TagsChange(msgspec.Struct):
    added: Annotated[list[_Name], Meta(max_length=1000)]
    removed: Annotated[list[_Name], Meta(max_length=1000)]


class _FlagChange(msgspec.Struct):
    before: bool
    after: bool


class _Changes(msgspec.Struct):
    name: _TextChange | None = None
    notes: _TextChange | None = None
    tags: _TagsChange | None = None
    archived: _FlagChange | None = None


class _Edit(msgspec.Struct):
    by: _Name
    changes: _Changes


class _Stop(msgspec.Struct):
    id: _Name
    by: _Name
    reason: Annotated[str, Meta(max_length=4096)] | None


class _StopSeen(msgspec.Struct):
    id: _Name


_FORMS: dict[str, type[msgspec.Struct]] = {
    "start": _Start,
    "config": _Config,
    "tag": _Tag,
    "status": _Status,
    "edit": _Edit,
    "stop": _Stop,
    "stop_seen": _StopSeen,
}


def check_lifecycle(batch: Batch, field: str) -> None:
    """Refuse records that no store could apply, or that no reader could read.

    Raises:
        ServiceFailure: One of them.
    """
    for index, record in enumerate(batch.to_records()):
        assert isinstance(record, LifecycleRecord)
        where = f"{field}.records[{index}]"
        try:
            validate_record(record)
            if form := _FORMS.get(record.action):
                found = msgspec.convert(record.data or {}, form)
                if isinstance(found, _Status) and found.status not in TERMINAL_STATUSES:
                    raise SchemaValidationError(
                        f"status must be one of {', '.join(TERMINAL_STATUSES)}, "
                        f"got {found.status!r:.60}"
                    )
        except (msgspec.ValidationError, SchemaValidationError) as error:
            raise ServiceFailure(
                ErrorCode.REJECTED,
                f"{where} ({record.action:.20}) cannot be applied: {error}",
                field=where,
            ) from None


_KNOWN_KEYS = 1_000_000


class RunKeys:
    """Remembers the keys of the runs that were written to last; of one event loop.

    Several processes and requests that come at the same moment may let in a few
    more than the limit.

    Args:
        limit: Keys that one run may have.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[tuple[str, str], set[str]] = OrderedDict()
        self._count = 0

    async def check(
        self,
        workspace: str,
        run_id: str,
        keys: set[str],
        load: Callable[[], Awaitable[Iterable[str]]],
    ) -> None:
        """Take note of keys that a run is about to have.

        Args:
            workspace, run_id: The run.
            keys: Those of some batches.
            load: Returns the keys that the run has; asked when it is not remembered.

        Raises:
            ServiceFailure: They would be too many.
        """
        place = (workspace, run_id)
        known = self._known.get(place)
        if known is not None and keys <= known:
            self._known.move_to_end(place)
            return
        if known is None:
            loaded = set(await load())
            known = self._known.setdefault(place, set())
            self._count += len(loaded - known)
            known |= loaded
        new = keys - known
        if len(known) + len(new) > self._limit:
            raise ServiceFailure(
                ErrorCode.REJECTED,
                f"run {run_id} would have {len(known) + len(new)} different metrics; this server "
                f"takes {self._limit} (limit keys_per_run). Is a step, an id or a time part of "
                "their names?",
                field="batches",
            )
        known |= new
        self._count += len(new)
        while self._count > _KNOWN_KEYS and len(self._known) > 1:
            _, forgotten = self._known.popitem(last=False)
            self._count -= len(forgotten)
