"""For those who look on at a run: many curves at once, and what came since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import ASGIApp

from quark_backends.service.protocol import (
    CURVE_COLUMNS,
    JSON,
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
from quark_backends.service.server.http.replies import REPLY_BYTES, ServiceFailure, encode_body
from quark_backends.service.server.workspaces.read_routes import MOST_ENTRIES, encode_array
from quark_core.backends.curves import Curve, CurveQuery, check_keys
from quark_core.records import RECORD_TYPES
from quark_core.records.columns import Columns

if TYPE_CHECKING:
    from quark_backends.service.server.workspaces.stores import WorkspaceStore


async def read_curves(call: Call) -> ASGIApp:
    """Several metrics within a window."""
    request = await call.decode(CurvesRequest)
    query = CurveQuery.build(**msgspec.structs.asdict(request))
    # What is asked for is the most that is wanted, so that no reading is larger than a reply.
    most = max(1, MOST_ENTRIES // max(1, len(query.keys)))
    bounded = replace(query, entries=most if query.entries is None else min(query.entries, most))
    found = await call.ask("read_series_many", call.run_id, bounded)
    entries = sum(map(len, found.curves))
    if query.entries is not None and entries > MOST_ENTRIES:
        # Each attempt and rank has a curve: of many of them each has fewer entries.
        fewer = max(1, min(query.entries, most) * MOST_ENTRIES // entries)
        found = await call.ask("read_series_many", call.run_id, replace(query, entries=fewer))
    is_cut = query.entries is None and not all(curve.exact for curve in found.curves)
    if is_cut or sum(map(len, found.curves)) > MOST_ENTRIES:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT,
            f"the curves have more than {MOST_ENTRIES} entries: ask for fewer keys, a narrower "
            "window or fewer entries",
            field="entries",
        )
    packed = call.media == MSGPACK
    return await call.answer(
        lambda: CurvesReply(curves=_encode_curves(found.curves, packed), cursor=dict(found.cursor))
    )


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
    asked: dict[str, Any] = {
        "kinds": tuple(dict.fromkeys(request.kinds)),
        "keys": None if request.keys is None else check_keys(request.keys),
        "all_attempts": request.all_attempts,
    }
    most = rows if packed else min(rows, call.service.config.limits.json_rows)

    def make(store: WorkspaceStore) -> ChangesReply:
        left = most
        while True:
            changes = store.read_changes(call.run_id, request.cursor, max_rows=left, **asked)
            records = _encode_records(changes.records, packed, bounded=left > 1)
            if records is not None:
                break
            # Few long rows make a reply: what does not fit is read again, and less of it.
            left = max(1, left // 8)
        return ChangesReply(
            cursor=dict(changes.cursor),
            records=records,
            more=changes.more,
            stale=changes.stale,
            outputs=changes.outputs,
        )

    async with call.store() as opened:
        return await call.answer(lambda: make(opened.store))


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


def _encode_records(
    records: Mapping[str, Columns], packed: bool, *, bounded: bool = True
) -> dict[str, Any] | None:
    """Rows as the reply has them; None where they are more than one reply takes."""
    if packed:
        return {kind: b"".join(encode_columns(found)) for kind, found in records.items()}
    made: dict[str, Any] = {}
    size_bytes = 0
    for kind, found in records.items():
        rows = made[kind] = []
        for record in found.to_records():
            encoded = encode_body(record.to_dict(), JSON)
            size_bytes += len(encoded)
            if bounded and size_bytes > REPLY_BYTES:
                return None
            rows.append(msgspec.Raw(encoded))
    return made
