"""Routes of the payloads of artifacts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quark_backends.service.protocol import ErrorCode, PayloadReply
from quark_backends.service.server.responses import ServiceFailure, make_reply
from quark_backends.service.server.service import Call
from quark_core.errors import RunNotFoundError

_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")


async def put_payload(call: Call) -> ASGIApp:
    """Keep the payload of an artifact; 201 where it is new."""
    run_id, sha256 = call.run_id, call.sha256
    limit = call.service.config.limits.artifact_bytes
    declared = call.request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    if call.request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ServiceFailure(
            ErrorCode.UNSUPPORTED,
            "a payload must be sent without Content-Encoding",
            field="Content-Encoding",
        )
    await _check_kept(call)
    with call.service.bodies.arrive(call.principal.key_id):
        size_bytes, is_new = await call.service.vault.put(
            call.principal.workspace, run_id, sha256, _read_pieces(call, limit)
        )
    try:
        await _check_kept(call)
    except RunNotFoundError:
        # The run was removed while this came, and nobody would ever take it away.
        await call.service.vault.forget_run(call.principal.workspace, run_id)
        raise
    return make_reply(PayloadReply(sha256, size_bytes), call.media, status=201 if is_new else 200)


async def head_payload(call: Call) -> ASGIApp:
    """The size of a payload."""
    size_bytes = await _measure(call)
    return Response(headers=_describe(call.sha256, size_bytes))


async def get_payload(call: Call) -> ASGIApp:
    """A payload, or one range of it."""
    size_bytes = await _measure(call)
    headers = _describe(call.sha256, size_bytes)
    start, end, status = 0, size_bytes, 200
    asked = call.request.headers.get("range")
    condition = call.request.headers.get("if-range")
    if asked is not None and condition in (None, headers["ETag"]):
        found = _parse_range(asked, size_bytes)
        if found is not None:
            start, end = found
            status = 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size_bytes}"
    headers["Content-Length"] = str(end - start)
    return _PayloadReply(call, status, headers, start, end - start)


class _PayloadReply:
    """Streams a part of a payload; whoever takes nothing of it for a while is let go."""

    def __init__(
        self, call: Call, status: int, headers: dict[str, str], start: int, size_bytes: int
    ) -> None:
        self._call = call
        self._status = status
        self._headers = headers
        self._start = start
        self._size_bytes = size_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        call = self._call
        stall_s = call.service.config.limits.reader_stall_s
        pieces = call.service.vault.read(
            call.principal.workspace, call.run_id, call.sha256, self._start, self._size_bytes
        )
        headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in self._headers.items()
        ]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        async for piece in pieces:
            async with asyncio.timeout(stall_s):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _check_kept(call: Call) -> None:
    """See that the run is there, in the trash or not: out of it, it comes back with its payloads.

    Raises:
        RunNotFoundError: It never was, or is removed for good.
    """
    async with call.store() as opened:
        await call.service.threads.read(opened.store.trash.check_kept, call.run_id)


async def _measure(call: Call) -> int:
    await call.ask("load_run", call.run_id)
    found = await call.service.vault.measure(call.principal.workspace, call.run_id, call.sha256)
    if found is None:
        raise ServiceFailure(
            ErrorCode.PAYLOAD_NOT_FOUND,
            f"run {call.run_id} has no payload {call.sha256}",
            field="sha256",
        )
    return found


def _describe(sha256: str, size_bytes: int) -> dict[str, str]:
    return {
        "Content-Type": "application/octet-stream",
        "Content-Length": str(size_bytes),
        "Content-Disposition": "attachment",
        "X-Content-Type-Options": "nosniff",
        "Accept-Ranges": "bytes",
        "ETag": f'"{sha256}"',
    }


def _parse_range(text: str, size_bytes: int) -> tuple[int, int] | None:
    """First byte and the one after the last; None where the whole is sent, as for several ranges.

    Raises:
        ServiceFailure: The payload has no such range.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if first == "":
        start, end = max(0, size_bytes - int(last)), size_bytes
    else:
        start = int(first)
        end = min(int(last) + 1, size_bytes) if last else size_bytes
        if last and int(last) < start:
            return None
    if start >= size_bytes or start == end:
        raise ServiceFailure(
            ErrorCode.RANGE, f"the payload has {size_bytes} bytes, not {text[:60]!r}", field="Range"
        )
    return start, end


async def _read_pieces(call: Call, limit: int) -> AsyncIterator[bytes]:
    """The body as it arrives, counted; each piece has its own time."""
    size_bytes = 0
    pieces = call.request.stream()
    timeout_s = call.service.config.limits.body_timeout_s
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                piece = await anext(pieces, None)
        except TimeoutError:
            raise ServiceFailure(
                ErrorCode.TIMEOUT,
                f"no data of the payload arrived for {timeout_s:g} s (limit body_timeout_s of "
                "this server)",
            ) from None
        if piece is None:
            return
        size_bytes += len(piece)
        if size_bytes > limit:
            raise _too_large(limit)
        yield piece


def _too_large(limit: int) -> ServiceFailure:
    return ServiceFailure(
        ErrorCode.TOO_LARGE,
        f"the payload has more than {limit} bytes (limit artifact_bytes of this server)",
    )
