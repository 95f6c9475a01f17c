"""Replies of the service: structs in JSON or msgpack, failures and their envelope."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from quark_backends.service.calls import encode_value
from quark_backends.service.protocol import (
    JSON,
    MSGPACK,
    ROWS,
    ErrorBody,
    ErrorCode,
    ErrorReply,
)
from quark_core.errors import (
    ArtifactNotFoundError,
    BackendRejected,
    BackendUnavailable,
    InvalidRunStateError,
    QuarkError,
    RunNotFoundError,
    SchemaValidationError,
)


class ServiceFailure(Exception):
    """A request that is not served.

    Attributes:
        code: What went wrong; it decides the HTTP status.
        message: What happened and what to do; never a secret.
        field: Which part of the request is at fault, or None.
        retry_after_s: When the client may come again, or None.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


_log = logging.getLogger("quark.service")

_MSGPACK_NAMES = (MSGPACK, "application/x-msgpack", "application/vnd.msgpack")
# Words of the store's refusals that say another one was first.
_CONFLICTS = ("came again with other content", "was started by another process")
_RETRY_AFTER_S = 1.0


def choose_media(accept: str | None, *, rows: bool = False) -> str:
    """The media type of a reply: the first one asked for that there is, or JSON."""
    for part in (accept or "").split(","):
        name = part.partition(";")[0].strip().lower()
        if name in _MSGPACK_NAMES:
            return MSGPACK
        if rows and name == ROWS:
            return ROWS
        if name in (JSON, "*/*"):
            return JSON
    return JSON


REPLY_BYTES = 16 * 2**20
"""What the records or runs of one reply have together, unless a single one is larger."""

MOST_REPLY_BYTES = 128 * 2**20
"""No reply of one piece has more, whichever route it is of: a run may have so much by itself."""


def encode_within(items: Iterable[Any], media: str) -> Iterator[Any]:
    """Each of some values as a reply holds it, as many of the first as make one reply."""
    size_bytes = 0
    for place, item in enumerate(items):
        encoded = encode_value(item, media)
        size_bytes += len(encoded)
        if place and size_bytes > REPLY_BYTES:
            return
        yield msgspec.Raw(encoded)


def keep_newest(items: Iterable[Any], media: str) -> list[Any]:
    """Each of some values as a reply holds it, as many of the last as make one reply."""
    kept: deque[msgspec.Raw] = deque()
    size_bytes = 0
    for item in items:
        encoded = encode_value(item, media)
        kept.append(msgspec.Raw(encoded))
        size_bytes += len(encoded)
        while len(kept) > 1 and size_bytes > REPLY_BYTES:
            size_bytes -= len(memoryview(kept.popleft()))
    return list(kept)


def make_reply(
    value: Any, media: str, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A reply that holds one value.

    Raises:
        ServiceFailure: It would be larger than any reply may be.
    """
    body = encode_value(value, media)
    if len(body) > MOST_REPLY_BYTES:
        raise ServiceFailure(
            ErrorCode.TOO_LARGE,
            f"the reply would have {len(body)} bytes, but the maximum is {MOST_REPLY_BYTES}. "
            "Request less at once",
        )
    return Response(body, status_code=status, headers=headers, media_type=media)


def make_failure_reply(failure: ServiceFailure, media: str, request_id: str) -> Response:
    """The envelope of an error."""
    headers = {"Cache-Control": "no-store"}
    if failure.retry_after_s is not None:
        # Whole seconds, and never sooner than was said.
        headers["Retry-After"] = str(max(1, -int(-failure.retry_after_s // 1)))
    if failure.code == ErrorCode.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    body = ErrorBody(
        code=str(failure.code),
        message=failure.message,
        field=failure.field,
        retry_after_s=failure.retry_after_s,
        request_id=request_id,
    )
    return make_reply(ErrorReply(body), media, status=failure.code.status, headers=headers)


def to_failure(error: Exception, request_id: str) -> ServiceFailure:
    """What a request fails with, by what was raised while it was served.

    What only the operator should know, such as paths of the server's disk, goes to the log.
    """
    if isinstance(error, ServiceFailure):
        return error
    if isinstance(error, HTTPException):
        return _from_status(error)
    if isinstance(error, RunNotFoundError):
        return ServiceFailure(ErrorCode.RUN_NOT_FOUND, str(error), field="run_id")
    if isinstance(error, ArtifactNotFoundError):
        return ServiceFailure(ErrorCode.PAYLOAD_NOT_FOUND, "the run does not have this payload")
    if isinstance(error, InvalidRunStateError):
        return ServiceFailure(ErrorCode.INVALID_STATE, str(error), field="run_id")
    if isinstance(error, SchemaValidationError):
        return ServiceFailure(ErrorCode.INVALID_ARGUMENT, str(error))
    if isinstance(error, BackendRejected):
        taken = any(words in str(error) for words in _CONFLICTS)
        return ServiceFailure(ErrorCode.CONFLICT if taken else ErrorCode.REJECTED, str(error))
    if isinstance(error, QuarkError):
        _log.warning("request %s: %s: %s", request_id, type(error).__name__, error)
        after = error.retry_after_s if isinstance(error, BackendUnavailable) else None
        return ServiceFailure(
            ErrorCode.UNAVAILABLE,
            "the store is busy or unreachable. The server's log states the reason. Retry.",
            retry_after_s=after or _RETRY_AFTER_S,
        )
    _log.error("request %s failed", request_id, exc_info=error)
    return ServiceFailure(
        ErrorCode.INTERNAL,
        f"the server has failed. Its log states the reason under the request ID {request_id}",
    )


def _from_status(error: HTTPException) -> ServiceFailure:
    if error.status_code == 405:
        return ServiceFailure(ErrorCode.METHOD_NOT_ALLOWED, "the route does not allow this method")
    if error.status_code == 404:
        return ServiceFailure(
            ErrorCode.NOT_FOUND, "the route does not exist. /openapi.json lists the routes"
        )
    return ServiceFailure(ErrorCode.MALFORMED, "the request cannot be read")
