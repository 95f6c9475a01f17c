"""For those who look on at a run: many curves at once, and what came since."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import ASGIApp

from quark_backends.service.protocol import (
    CURVE_COLUMNS,
    MSGPACK,
    ChangesReply,
    ChangesRequest,
    CurveReply,
    CurvesReply,
    CurvesRequest,
    ErrorCode,
    HeadsReply,
)
from quark_backends.service.rows import encode_columns
from quark_backends.service.server.http.call import Call
from quark_backends.service.server.http.replies import ServiceFailure
from quark_backends.service.server.workspaces.read_routes import encode_array
from quark_core.backends.curves import Curve, CurveQuery, check_keys
from quark_core.records import RECORD_TYPES
from quark_core.records.columns import Columns

__all__ = ["read_changes", "read_curves", "read_heads"]

# Of 8 bytes in each column; more is read as rows, which a reply may have any number of.
_REPLY_ENTRIES = 1_000_000


async def read_curves(call: Call) -> ASGIApp:
    """Several metrics within a window."""
    request = await call.decode(CurvesRequest)
    query = CurveQuery.build(**msgspec.structs.asdict(request))
    found = await call.ask("read_series_many", call.run_id, query)
    if sum(map(len, found.curves)) > _REPLY_ENTRIES:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            f"the curves have more than {_REPLY_ENTRIES} entries: ask for fewer keys, a narrower "
            "window or fewer entries",
            field="entries",
        )
    packed = call.media == MSGPACK
    reply = await call.service.threads.read(_encode_curves, found.curves, packed)
    return call.reply(CurvesReply(curves=reply, cursor=dict(found.cursor)))


async def read_heads(call: Call) -> ASGIApp:
    """How far a run has come."""
    heads = await call.ask("read_heads", call.run_id)
    return call.reply(HeadsReply(cursor=dict(heads.cursor), outputs=heads.outputs))


async def read_changes(call: Call) -> ASGIApp:
    """What came since a cursor."""
    request = await call.decode(ChangesRequest)
    for kind in request.kinds:
        if kind not in RECORD_TYPES:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                f"kinds must be of {', '.join(sorted(RECORD_TYPES))}, got {kind!r:.60}",
                field="kinds",
            )
    packed = call.media == MSGPACK
    rows = request.max_rows
    changes = await call.ask(
        "read_changes",
        call.run_id,
        request.cursor,
        kinds=tuple(dict.fromkeys(request.kinds)),
        keys=None if request.keys is None else check_keys(request.keys),
        all_attempts=request.all_attempts,
        max_rows=rows if packed else min(rows, call.service.config.limits.json_rows),
    )
    records = await call.service.threads.read(_encode_records, changes.records, packed)
    return call.reply(
        ChangesReply(
            cursor=dict(changes.cursor),
            records=records,
            more=changes.more,
            stale=changes.stale,
            outputs=changes.outputs,
        )
    )


def _encode_curves(curves: tuple[Curve, ...], packed: bool) -> list[CurveReply]:
    return [
        CurveReply(
            key=curve.key,
            attempt=curve.attempt,
            rank=curve.rank,
            ranks=curve.ranks,
            exact=bool(curve.exact),
            columns={
                name: encode_array(getattr(curve, name), packed=packed) for name in CURVE_COLUMNS
            },
        )
        for curve in curves
    ]


def _encode_records(records: dict[str, Columns], packed: bool) -> dict[str, Any]:
    if packed:
        return {kind: b"".join(encode_columns(found)) for kind, found in records.items()}
    return {
        kind: [record.to_dict() for record in found.to_records()] for kind, found in records.items()
    }
