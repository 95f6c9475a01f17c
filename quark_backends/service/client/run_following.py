"""Asks a service for many curves at once, and for what came into a run since a cursor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from quark_backends.service.client.service_errors import Refused
from quark_backends.service.protocol import (
    ChangesReply,
    ChangesRequest,
    CurvesReply,
    CurvesRequest,
    ErrorCode,
    HeadsReply,
)
from quark_core.backends.curves import Cursor, CurveQuery, CurveSet, RunChanges, RunHeads
from quark_core.records import MetricRecord

if TYPE_CHECKING:
    from quark_core.backends.contract import SupportsRead

_NO_ROUTE = (ErrorCode.NOT_FOUND, ErrorCode.METHOD_NOT_ALLOWED)
_MAX_ROWS = 100_000

Post = Callable[[str, str, Any, type], Any]
Get = Callable[[str, str, type], Any]


class RunFollowing:
    """What `SupportsChanges` asks of a service; of one that is older, by its rows.

    Args:
        reader: Reads rows of the same service.
        post: Sends a request about a run, and returns the reply.
        get: Asks for something of a run.
    """

    def __init__(self, reader: SupportsRead, post: Post, get: Get) -> None:
        self._reader = reader
        self._post = post
        self._get = get
        self._marks = itertools.count()

    def read_series_many(self, run_id: str, query: CurveQuery) -> CurveSet:
        """See `SupportsChanges`."""
        from quark_backends.service.client.row_replies import to_curve
        from quark_core.runs.following import reduce_series_many

        request = CurvesRequest(
            keys=query.keys,
            entries=query.entries,
            axis=query.window.axis,
            low=query.window.low,
            high=query.window.high,
            ranks=query.ranks,
            all_attempts=query.all_attempts,
        )
        if not query.keys:
            return CurveSet(curves=(), cursor=self.read_heads(run_id).cursor)
        try:
            reply = self._post(run_id, "curves", request, CurvesReply)
        except Refused as error:
            # Every point may be more than one reply has; as rows there may be any number.
            is_much = query.entries is None and error.code == ErrorCode.INVALID_ARGUMENT
            if error.code not in _NO_ROUTE and not is_much:
                raise
            return reduce_series_many(self._reader, run_id, query)
        return CurveSet(curves=tuple(map(to_curve, reply.curves)), cursor=reply.cursor)

    def read_heads(self, run_id: str) -> RunHeads:
        """See `SupportsChanges`."""
        from quark_core.runs.following import note_heads

        try:
            reply = self._get(run_id, "heads", HeadsReply)
        except Refused as error:
            if error.code not in _NO_ROUTE:
                raise
            return note_heads(self._reader, run_id, (MetricRecord.KIND,), None)
        return RunHeads(cursor=reply.cursor, outputs=reply.outputs)

    def read_changes(
        self,
        run_id: str,
        cursor: Cursor,
        *,
        kinds: Sequence[str],
        keys: Sequence[str] | None = None,
        all_attempts: bool = False,
        max_rows: int,
    ) -> RunChanges:
        """See `SupportsChanges`."""
        from quark_backends.service.client.row_replies import to_rows
        from quark_core.runs.following import find_changes

        request = ChangesRequest(
            cursor=dict(cursor),
            kinds=tuple(kinds),
            keys=None if keys is None else tuple(keys),
            all_attempts=all_attempts,
            max_rows=min(max_rows, _MAX_ROWS),
        )
        try:
            reply = self._post(run_id, "changes", request, ChangesReply)
        except Refused as error:
            if error.code not in _NO_ROUTE:
                raise
            return find_changes(
                self._reader, run_id, cursor, kinds=kinds, keys=keys, all_attempts=all_attempts
            )
        return RunChanges(
            cursor=reply.cursor,
            records={kind: to_rows(kind, found) for kind, found in reply.records.items()},
            more=reply.more,
            stale=reply.stale,
            outputs=reply.outputs,
        )

    def read_mark(self, run_id: str) -> str:
        """See `SupportsChanges`; how far the run has come, as one short reply says."""
        try:
            reply = self._get(run_id, "heads", HeadsReply)
        except Refused as error:
            if error.code not in _NO_ROUTE:
                raise
            return f"unknown {next(self._marks)}"
        return f"{sorted(reply.cursor.items())}/{reply.outputs}"
