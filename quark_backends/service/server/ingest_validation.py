"""Validates batches, lifecycle records and reserved records before a store accepts them."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quark_backends.service.protocol import ErrorCode, WireBatch
from quark_backends.service.server.config import Limits, Principal
from quark_backends.service.server.requests import count_declared
from quark_backends.service.server.responses import ServiceFailure
from quark_core.backends.contract import Batch
from quark_core.backends.edits import RUN_EDITED, STOP_REQUESTED
from quark_core.errors import SchemaValidationError
from quark_core.records import RECORD_TYPES, EventRecord, LifecycleRecord, MetricRecord
from quark_core.records.body_checks import check_body, open_body_of
from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.records.runs import list_odd_parts
from quark_core.records.schema import TERMINAL_STATUSES, validate_record
from quark_core.system.process import ProcessIdentity

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


class _Ending(msgspec.Struct):
    cause: Annotated[str, Meta(max_length=100)]
    message: Annotated[str, Meta(max_length=20_000)]


class _Status(msgspec.Struct):
    status: str
    exit_code: Annotated[int, Meta(ge=0, le=255)] | None = None
    ending: _Ending | None = None


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


class _Group(msgspec.Struct):
    add: Annotated[list[_Path], Meta(max_length=1000)] = []
    remove: Annotated[list[_Path], Meta(max_length=1000)] = []


class _Fields(msgspec.Struct):
    set: Annotated[dict[str, Any], Meta(max_length=10_000)] = {}
    remove: Annotated[list[str], Meta(max_length=10_000)] = []


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
    "group": _Group,
    "fields": _Fields,
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
                        f"status must be one of {', '.join(map(repr, TERMINAL_STATUSES))}, "
                        f"got {found.status!r:.60}"
                    )
            if record.action == "environment" and (odd := list_odd_parts(record.data or {})):
                raise SchemaValidationError(f"its part {odd[0]} is invalid")
        except (msgspec.ValidationError, SchemaValidationError) as error:
            raise ServiceFailure(
                ErrorCode.REJECTED,
                f"{where} ({record.action:.20}) cannot be applied: {error}",
                field=where,
            ) from None


# Checks batches from outside before a store takes them.
#
# What the store derives and what readers make later must never fail for what
# somebody has sent: `quark_core.records.body_checks` says what a body may be,
# and here stands how much of it this server takes. What a batch declares counts
# before any of it is made.

_PLAIN = b"\x00"
_ZSTD = b"\x01"
_METRIC_NAMES = frozenset({"metric_key", "namespace", "metric_name"})
_CONTROL = re.compile(r"[\x00-\x1f]")
# Records of one request: of all kinds, of those that are looked at one by one, and of those
# that a store applies one by one while nobody else may write. No batch of Quark's own has more.
_BATCH_BYTES = 32 * 2**20
_MOST_ROWS = 262_144
_MOST_SINGLE = 262_144
_MOST_APPLIED = 8_192
# What follows a batch has the number after it, and its records sequences of their own.
_LAST_NUMBER = 2**42
_APPLIED = (LifecycleRecord.KIND, FingerprintRecord.KIND)
# Kinds whose columns are checked as a whole: there are thousands of them at each step.
_COLUMNAR = frozenset({"metric", "layer", "parameter"})


def check_declared(batches: Sequence[WireBatch], limits: Limits) -> tuple[int, int]:
    """Refuse what is too much, before anything is decompressed or made.

    Returns:
        How many records the batches declare, and how many bytes once they are decompressed.

    Raises:
        ServiceFailure: More than this server takes.
    """
    total = rows = single = applied = 0
    for index, wire in enumerate(batches):
        if wire.count > limits.batch_rows:
            raise ServiceFailure(
                ErrorCode.TOO_LARGE,
                f"batch {wire.number} of writer {wire.writer_id:.128} has {wire.count} records, "
                f"but this server accepts {limits.batch_rows} (limit batch_rows)",
                field=f"batches[{index}].count",
            )
        if wire.number > _LAST_NUMBER:
            raise ServiceFailure(
                ErrorCode.REJECTED,
                f"batch number {wire.number} is too large; the maximum is {_LAST_NUMBER}",
                field=f"batches[{index}].number",
            )
        rows += wire.count
        single += 0 if wire.kind in _COLUMNAR else wire.count
        applied += wire.count if wire.kind in _APPLIED else 0
        size = _find_size(wire, f"batches[{index}].body")
        total += size
        if size > _BATCH_BYTES or total > limits.decoded_bytes:
            raise ServiceFailure(
                ErrorCode.TOO_LARGE,
                f"the bodies of the batches have more than {limits.decoded_bytes} bytes once "
                "they are decompressed (limit decoded_bytes of this server), or one of them has "
                f"more than {_BATCH_BYTES}",
                field=f"batches[{index}].body",
            )
    for found, most, which in (
        (rows, _MOST_ROWS, ""),
        (single, _MOST_SINGLE, f" that are not of {', '.join(sorted(_COLUMNAR))}"),
        (applied, _MOST_APPLIED, f" of {' and '.join(_APPLIED)}"),
    ):
        if found > most:
            raise ServiceFailure(
                ErrorCode.TOO_LARGE,
                f"the batches have {found} records{which} together, but this server accepts "
                f"{most} in one request",
                field="batches",
            )
    return rows, total


def check_batches(run_id: str, batches: Sequence[WireBatch], limits: Limits) -> list[Batch]:
    """The batches of a request for ingest, as the store takes them.

    Raises:
        ServiceFailure: One is malformed or beyond a limit; nothing is taken.
    """
    check_declared(batches, limits)
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


def _find_size(wire: WireBatch, field: str) -> int:
    """How many bytes a body has once it is decompressed."""
    marker = wire.body[:1]
    if marker == _PLAIN:
        return len(wire.body)
    if marker != _ZSTD:
        raise _malformed(field, f"it starts with the marker {marker!r}")
    declared = count_declared(wire.body[1:])
    if declared is None:
        raise _malformed(field, "it is not a single zstd frame that states its size")
    return declared


def _check_batch(batch: Batch, field: str, limits: Limits) -> Batch:
    for text, name in ((batch.writer_id, "writer_id"), (batch.kind, "kind")):
        _check_text(text, f"{field}.{name}", limits)
    if batch.kind not in RECORD_TYPES:
        # What only a newer Quark knows is kept as it is.
        return batch
    try:
        body = open_body_of(batch.body, batch.kind, batch.count)
        check_body(body)
    except SchemaValidationError as error:
        raise _malformed(f"{field}.body", str(error)) from None
    # What was opened with care is not opened again without.
    batch.__dict__["decoded"] = body
    if batch.kind == MetricRecord.KIND:
        # Other kinds hold what users call their modules and files, whatever that is.
        for name in _METRIC_NAMES:
            column = body.column(name)
            for text in column.head[0] if column.encoding == "t" else [column.head]:
                if text is not None:
                    _check_text(text, name, limits)
    elif batch.kind == LifecycleRecord.KIND:
        check_lifecycle(batch, field)
    return batch


def _check_text(text: str, field: str, limits: Limits) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _malformed(field, "it contains half of a surrogate pair") from None
    if size > limits.key_bytes:
        raise ServiceFailure(
            ErrorCode.REJECTED,
            f"{field} has {size} bytes; this server accepts {limits.key_bytes} (limit key_bytes)",
            field=field,
        )
    if _CONTROL.search(text):
        raise _malformed(field, "it contains a control character")


def _malformed(field: str, reason: str) -> ServiceFailure:
    return ServiceFailure(ErrorCode.REJECTED, f"{field}: {reason}", field=field)


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
                f"run {run_id} would have {len(known) + len(new)} different metrics, but this "
                f"server accepts {self._limit} (limit keys_per_run). Do the names contain a "
                "step, an ID or a time?",
                field="batches",
            )
        known |= new
        self._count += len(new)
        while self._count > _KNOWN_KEYS and len(self._known) > 1:
            _, forgotten = self._known.popitem(last=False)
            self._count -= len(forgotten)


# Keeps records of edits and of requests to stop for the routes that make them.
#
# They say who has changed a run, and by which key. Whoever could send them with a training's
# batches could change a run without a trace, or leave a trace of what nobody has done.

# Lifecycle action -> the event by which it is told.
_TOLD_BY = {"edit": RUN_EDITED, "stop": STOP_REQUESTED}
_FIELDS = {
    LifecycleRecord.KIND: ("action", frozenset(_TOLD_BY)),
    EventRecord.KIND: ("event_type", frozenset(_TOLD_BY.values())),
}


def check_reserved(batches: Sequence[Batch], principal: Principal) -> None:
    """Refuse records of edits and of requests to stop that a key may not bring.

    One with the scope admin may bring any: it replays what another store has. One with the scope
    write may bring those of an import, each with the event that tells of it, and in nobody else's
    name. A training has none.

    Raises:
        ServiceFailure: The batches hold such a record.
    """
    if "admin" in principal.scopes:
        return
    changes: list[tuple[str, tuple[str, bytes], int]] = []
    told: set[tuple[str, tuple[str, bytes]]] = set()
    for index, batch in enumerate(batches):
        name, reserved = _FIELDS.get(batch.kind, ("", frozenset()))
        if not name or reserved.isdisjoint(_list_texts(batch, name)):
            continue
        if "write" not in principal.scopes:
            raise _forbid(
                f"records of edits and stop requests ({', '.join(sorted(reserved))}) require "
                "the scope 'write'. Training processes do not have it. Use the routes for edits "
                "and stop requests",
                index,
            )
        for record in batch.to_records():
            kind: str = getattr(record, name)
            if kind not in reserved:
                continue
            is_event = isinstance(record, EventRecord)
            what = _read_change(getattr(record, "payload" if is_event else "data") or {})
            if "(key " in what[0] and not what[0].endswith(f"(key {principal.key_id})"):
                raise _forbid(f"{kind!r} is in the name of another key: {what[0]!r:.100}", index)
            if is_event:
                told.add((kind, what))
            else:
                changes.append((_TOLD_BY[kind], what, index))
    for event_type, what, index in changes:
        if (event_type, what) not in told:
            raise _forbid(
                "a lifecycle record of an edit or a stop request must be in one request with "
                f"its event {event_type!r}, with the same author and changes",
                index,
            )


def _list_texts(batch: Batch, name: str) -> Sequence[Any]:
    """The different texts of a column, however many records there are."""
    column = batch.decoded.column(name)
    texts: Sequence[Any] = column.head[0] if column.encoding == "t" else [column.head]
    return texts


def _read_change(said: Mapping[str, Any]) -> tuple[str, bytes]:
    """By whom, and what: the same in a record and in the event that tells of it."""
    what = said.get("changes"), said.get("reason")
    return str(said.get("by")), msgspec.json.encode(what, order="deterministic")


def _forbid(message: str, index: int) -> ServiceFailure:
    return ServiceFailure(ErrorCode.FORBIDDEN, message, field=f"batches[{index}]")
