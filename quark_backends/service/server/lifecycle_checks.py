"""Checks what lifecycle records from outside say: a store applies it to its tables."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quark_backends.service.protocol import ErrorCode
from quark_backends.service.server.failure import ServiceFailure
from quark_core.backend import Batch
from quark_core.errors import SchemaValidationError
from quark_core.process import ProcessIdentity
from quark_core.records import LifecycleRecord
from quark_core.schema import TERMINAL_STATUSES, validate_record

__all__ = ["check_lifecycle"]

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


class _Start(msgspec.Struct):
    project: _Project
    run: _Run
    process: ProcessIdentity
    store: _Store | None = None
    from_step: _Index | None = None


class _Config(msgspec.Struct):
    values: dict[str, Any]
    notes: list[str]
    raw: dict[str, Any] | None = None


class _Tag(msgspec.Struct):
    tag: _Name


class _Status(msgspec.Struct):
    status: str


_FORMS: dict[str, type[msgspec.Struct]] = {
    "start": _Start,
    "config": _Config,
    "tag": _Tag,
    "status": _Status,
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
