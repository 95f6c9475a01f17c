"""What a call of the service can fail with, and what callers of a backend are told of it."""

from __future__ import annotations

import email.utils
import html
import re
import time
from collections.abc import Callable, Mapping

import msgspec

from quark_backends.service.protocol import MSGPACK, ErrorBody, ErrorCode, ErrorReply
from quark_core.config import settings
from quark_core.config.redaction import redact_text
from quark_core.errors import (
    ArtifactNotFoundError,
    BackendRejected,
    BackendUnauthorized,
    BackendUnavailable,
    InvalidRunStateError,
    QuarkError,
    RunNotFoundError,
    SchemaValidationError,
    SessionStoreError,
    StoreUnauthorizedError,
    StoreUnavailableError,
    UnknownKindError,
)

BACKEND = "service"

_RETRY_CAP_S = 600.0
_SHOWN = 160
_INVISIBLE = re.compile(r"(?is)<(script|style|head)\b.*?</\1\s*>|<!--.*?-->|<[^>]*>")
_TITLE = re.compile(r"(?is)<title[^>]*>(.*?)</title>")
_LATER = frozenset({408, 425, 429})
_NEVER = frozenset(
    {
        ErrorCode.MALFORMED,
        ErrorCode.INVALID_ARGUMENT,
        ErrorCode.CONFLICT,
        ErrorCode.INVALID_STATE,
        ErrorCode.TOO_LARGE,
        ErrorCode.UNSUPPORTED,
        ErrorCode.REJECTED,
        ErrorCode.RUN_NOT_FOUND,
    }
)


class ServiceError(Exception):
    """A call that did not succeed.

    Attributes:
        reason: What happened, for people; holds no secret.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unreachable(ServiceError):
    """No whole reply came.

    Attributes:
        timed_out: Whether it took too long.
        answered: Whether anything did come, so that it is not the network's fault.
        unheard: Whether the request cannot have been carried out.
    """

    def __init__(
        self,
        reason: str,
        *,
        timed_out: bool = False,
        answered: bool = False,
        unheard: bool = False,
    ) -> None:
        super().__init__(reason)
        self.timed_out = timed_out
        self.answered = answered
        self.unheard = unheard


class Refused(ServiceError):
    """A reply came, and says no.

    Attributes:
        status: Of HTTP.
        code: Of the envelope, or None where the reply has none: it is not the service's.
        field: The argument at fault, or None.
        retry_after_s: When to come again, or None.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        *,
        code: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.field = field
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def is_final(self) -> bool:
        """Whether the same request will never be taken."""
        if self.code is not None and self.code in _NEVER:
            return True
        return self.status in (400, 409, 413, 415, 422)

    @property
    def wants_key(self) -> bool:
        """Whether another key is needed."""
        return self.status in (401, 403)


def read_refusal(
    status: int, headers: Mapping[str, str], body: bytes, hide: Callable[[str], str]
) -> Refused:
    """What a reply that is no success says.

    Args:
        status: Its status.
        headers: Its headers, with lower-case names.
        body: The beginning of its body.
        hide: Takes secrets out of a text.
    """
    found = _decode(headers.get("content-type", ""), body)
    retry_after_s = _parse_retry_after(headers.get("retry-after"))
    if found is not None:
        if retry_after_s is None and found.retry_after_s is not None:
            retry_after_s = max(0.0, min(_RETRY_CAP_S, found.retry_after_s))
        return Refused(
            status,
            hide(found.message[:2000]),
            code=found.code,
            field=found.field,
            retry_after_s=retry_after_s,
        )
    if 300 <= status < 400:
        place = redact_text(hide(headers.get("location", "")))
        where = f" to {_shorten(place)}" if place else ""
        return Refused(
            status,
            f"it answers with a redirect{where} ({status}), which is not followed: "
            f"set {settings.PERSISTENCE_URL} to where the service itself is",
        )
    said = hide(_show(body, headers.get("content-type", "")))
    reason = f"it answers {status}{f': {said}' if said else ''}"
    if status in (404, 405, 421):
        reason += (
            "; that is no answer of a Quark service: check the host and the path of "
            f"{settings.PERSISTENCE_URL}"
        )
    return Refused(status, reason, retry_after_s=retry_after_s)


def to_write_error(error: ServiceError, url: str) -> BackendUnavailable | BackendRejected:
    """What a failed write is to the lane: to be tried again, or never."""
    if isinstance(error, Refused):
        if error.wants_key:
            return BackendUnauthorized(
                describe(error, url), backend=BACKEND, retry_after_s=error.retry_after_s
            )
        if error.is_final:
            return BackendRejected(error.reason, backend=BACKEND)
        return BackendUnavailable(
            describe(error, url), backend=BACKEND, retry_after_s=error.retry_after_s
        )
    return BackendUnavailable(describe(error, url), backend=BACKEND)


def to_read_error(error: ServiceError, url: str) -> QuarkError:
    """What a failed read is to who asked for it."""
    if isinstance(error, Refused):
        if error.code == ErrorCode.RUN_NOT_FOUND:
            return RunNotFoundError(error.reason)
        if error.code == ErrorCode.PAYLOAD_NOT_FOUND:
            return ArtifactNotFoundError(error.reason)
        if error.code == ErrorCode.INVALID_STATE:
            return InvalidRunStateError(error.reason)
        if error.code == ErrorCode.INVALID_ARGUMENT:
            unknown = error.field in ("kind", "kinds")
            return (UnknownKindError if unknown else SchemaValidationError)(error.reason)
        if error.wants_key:
            return StoreUnauthorizedError(describe(error, url))
        if error.is_final:
            return SessionStoreError(describe(error, url))
    return StoreUnavailableError(describe(error, url))


def describe(error: ServiceError, url: str) -> str:
    """A failure with the service that it is about, and what to do where that is known."""
    if isinstance(error, Refused) and error.status == 401:
        return (
            f"the service at {url} does not take the key: {error.reason}; "
            f"set {settings.USER_KEY} to a key of it that is valid"
        )
    if isinstance(error, Refused) and error.status == 403:
        return (
            f"the service at {url} refuses the call: {error.reason}; "
            f"a key with that right belongs into {settings.USER_KEY}"
        )
    if isinstance(error, Refused) and error.status in _LATER:
        return f"the service at {url} asks to come again later: {error.reason}"
    if isinstance(error, Unreachable) and not error.answered:
        return (
            f"the service at {url} cannot be reached: {error.reason}; "
            f"see that it runs and that {settings.PERSISTENCE_URL} is right"
        )
    return f"the service at {url} does not serve the call: {error.reason}"


def _decode(media: str, body: bytes) -> ErrorBody | None:
    """The envelope, where the body is one."""
    try:
        if media.partition(";")[0].strip().lower() == MSGPACK:
            return msgspec.msgpack.decode(body, type=ErrorReply).error
        return msgspec.json.decode(body, type=ErrorReply).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _show(body: bytes, media: str) -> str:
    """A page of somebody else's, such as a proxy's, in a few words."""
    text = body.decode("utf-8", "replace")
    if "html" in media.lower() or text.lstrip()[:1] == "<":
        title = _TITLE.search(text)
        inside = _INVISIBLE.sub(" ", text)
        text = html.unescape(f"{title[1]} — {inside}" if title else inside)
    return redact_text(_shorten(text)).strip(" —")


def _shorten(text: str) -> str:
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}…"


def _parse_retry_after(text: str | None) -> float | None:
    """Seconds from now on; None where nothing is said, or the moment has passed."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return min(seconds, _RETRY_CAP_S) if 0.0 < seconds < float("inf") else None
