"""Keeps records of edits and of requests to stop for the routes that make them.

They say who has changed a run, and by which key. Whoever could send them with a training's batches
could change a run without a trace, or leave a trace of what nobody has done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quark_backends.service.protocol import ErrorCode
from quark_backends.service.server.config import Principal
from quark_backends.service.server.http.replies import ServiceFailure
from quark_core.backends.contract import Batch
from quark_core.backends.edits import RUN_EDITED, STOP_REQUESTED
from quark_core.records import EventRecord, LifecycleRecord

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
                f"records of edits and of requests to stop ({', '.join(sorted(reserved))}) need "
                "the scope write: a training has none, and who edits or stops a run does so by "
                "routes of their own",
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
                f"a lifecycle record of an edit or a request to stop comes with the event "
                f"{event_type!r} that tells of it, in one request: by the same, and of the same "
                "changes",
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
