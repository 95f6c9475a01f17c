"""Checks lifecycle records from outside: a store applies them, and lists of runs read them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quark_backends.service.protocol import ErrorCode
from quark_backends.service.server.http.replies import ServiceFailure
from quark_core.backends.contract import Batch
from quark_core.errors import SchemaValidationError
from quark_core.records import LifecycleRecord
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
                        f"status must be one of {', '.join(TERMINAL_STATUSES)}, "
                        f"got {found.status!r:.60}"
                    )
            if record.action == "environment" and (odd := list_odd_parts(record.data or {})):
                raise SchemaValidationError(f"its part {odd[0]} is none")
        except (msgspec.ValidationError, SchemaValidationError) as error:
            raise ServiceFailure(
                ErrorCode.REJECTED,
                f"{where} ({record.action:.20}) cannot be applied: {error}",
                field=where,
            ) from None
