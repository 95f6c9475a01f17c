"""What client and server say to each other: version 1 of the protocol.

docs/reference/protocol.md describes it for people; this module is what both
sides import. Everything that crosses the wire is one of these structs, in
msgpack or in JSON, but for the rows of a read (`quark_backends.service.rows`)
and the payloads of artifacts, which are streams of bytes.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from quark_core.backend import Batch

__all__ = [
    "ACKNOWLEDGED_LIMIT_BATCHES",
    "ENCODINGS",
    "JSON",
    "MSGPACK",
    "PROTOCOL_VERSION",
    "ROWS",
    "Acknowledged",
    "ErrorBody",
    "ErrorCode",
    "ErrorReply",
    "GenerationReply",
    "GenerationRequest",
    "IngestRequest",
    "KeyInfo",
    "KeyList",
    "KeyRequest",
    "NewKey",
    "OutputBody",
    "PayloadReply",
    "ReadRequest",
    "RecordList",
    "RotateRequest",
    "RunList",
    "SearchRequest",
    "SeriesReply",
    "SummaryList",
    "WireBatch",
    "WireBatches",
    "WorkspaceReply",
    "status_of",
]

PROTOCOL_VERSION = 1
"""Stands in every path (`/v1/…`) and in the header `Quark-Protocol` of every reply."""

JSON = "application/json"
MSGPACK = "application/msgpack"
ROWS = "application/vnd.quark.rows"
"""Rows of a read as a stream of frames; see `quark_backends.service.rows`."""

ENCODINGS = ("identity", "zstd", "gzip")
"""What `Content-Encoding` of a request may be."""

ACKNOWLEDGED_LIMIT_BATCHES = 256
"""A request of ingest has at most so many batches."""

RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
SHA256 = re.compile(r"[0-9a-f]{64}")

_Text = Annotated[str, Meta(max_length=512)]
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class ErrorCode(StrEnum):
    """What went wrong, for programs; the message says it for people."""

    MALFORMED = "malformed"
    """400: the request cannot be read."""
    INVALID_ARGUMENT = "invalid_argument"
    """400: it can, and asks for something that makes no sense; `field` names it."""
    UNAUTHORIZED = "unauthorized"
    """401: no key, or one that is unknown, revoked or expired."""
    FORBIDDEN = "forbidden"
    """403: the key lacks the scope."""
    NOT_FOUND = "not_found"
    """404: no such route."""
    RUN_NOT_FOUND = "run_not_found"
    """404: the workspace has no such run."""
    PAYLOAD_NOT_FOUND = "payload_not_found"
    """404: the run has no such payload."""
    METHOD_NOT_ALLOWED = "method_not_allowed"
    """405."""
    TIMEOUT = "timeout"
    """408: the body came too slowly."""
    CONFLICT = "conflict"
    """409: the batch, the attempt or the payload is there already, and is another one."""
    TOO_LARGE = "too_large"
    """413: a limit of this server; the message names it."""
    UNSUPPORTED = "unsupported"
    """415: a media type or an encoding that the server does not take."""
    RANGE = "range"
    """416: a range that the payload does not have."""
    MISDIRECTED = "misdirected"
    """421: the request names a host that this server does not answer for."""
    REJECTED = "rejected"
    """422: the batch can never be stored."""
    RATE_LIMITED = "rate_limited"
    """429: later; `retry_after_s` says when."""
    INTERNAL = "internal"
    """500: a bug of the server; its log has the same `request_id`."""
    UNAVAILABLE = "unavailable"
    """503: the store is busy or out of reach, or the server is about to end."""


_STATUS = {
    ErrorCode.MALFORMED: 400,
    ErrorCode.INVALID_ARGUMENT: 400,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.RUN_NOT_FOUND: 404,
    ErrorCode.PAYLOAD_NOT_FOUND: 404,
    ErrorCode.METHOD_NOT_ALLOWED: 405,
    ErrorCode.TIMEOUT: 408,
    ErrorCode.CONFLICT: 409,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.UNSUPPORTED: 415,
    ErrorCode.RANGE: 416,
    ErrorCode.MISDIRECTED: 421,
    ErrorCode.REJECTED: 422,
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.INTERNAL: 500,
    ErrorCode.UNAVAILABLE: 503,
}


def status_of(code: ErrorCode) -> int:
    """The HTTP status of an error."""
    return _STATUS[code]


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One error.

    Attributes:
        code: One of `ErrorCode`; a client treats one that it does not know by the status.
        message: What happened and what to do.
        field: Which part of the request is at fault, such as `batches[3].body`.
        retry_after_s: When to come again; the header Retry-After says the same.
        request_id: What the server's log calls the request.
    """

    code: str
    message: str
    field: str | None = None
    retry_after_s: float | None = None
    request_id: str | None = None


class ErrorReply(msgspec.Struct, frozen=True):
    """The envelope of every error, whichever route it comes from."""

    error: ErrorBody


class WireBatch(msgspec.Struct, frozen=True, array_like=True):
    """A batch of the journal, under the identity (run, writer_id, number).

    Attributes:
        writer_id, attempt, rank, number, kind, count, body: As in `quark_core.backend.Batch`.
    """

    writer_id: Annotated[str, Meta(min_length=1, max_length=128)]
    attempt: _Number
    rank: _Number
    number: _Number
    kind: Annotated[str, Meta(min_length=1, max_length=64)]
    count: Annotated[int, Meta(ge=1, le=2**31)]
    body: bytes

    @classmethod
    def of(cls, batch: Batch) -> WireBatch:
        """A batch as it is sent."""
        return cls(
            batch.writer_id,
            batch.attempt,
            batch.rank,
            batch.number,
            batch.kind,
            batch.count,
            batch.body,
        )


class IngestRequest(msgspec.Struct, frozen=True):
    """`POST /v1/runs/{run_id}/batches`: all of them are stored, or none."""

    batches: Annotated[list[WireBatch], Meta(min_length=1, max_length=ACKNOWLEDGED_LIMIT_BATCHES)]


class Acknowledged(msgspec.Struct, frozen=True):
    """The batches are stored and synced.

    Attributes:
        batches: How many, those included that had been stored before.
    """

    batches: int


class WireBatches(msgspec.Struct, frozen=True):
    """`GET /v1/runs/{run_id}/writers/{writer_id}/batches`: batches as they came."""

    batches: list[WireBatch]


class OutputBody(msgspec.Struct, frozen=True):
    """Outputs of one kind, encoded as a batch's body is."""

    kind: Annotated[str, Meta(min_length=1, max_length=64)]
    count: _Number
    body: bytes


class GenerationRequest(msgspec.Struct, frozen=True):
    """`POST /v1/runs/{run_id}/generations`: one analysis, visible all at once."""

    analyzer: Annotated[str, Meta(min_length=1, max_length=128)]
    replaces: bool
    outputs: Annotated[list[OutputBody], Meta(max_length=64)]


class GenerationReply(msgspec.Struct, frozen=True):
    """The number of the generation, 1 for the first of its analyzer."""

    number: int


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/runs/{run_id}/records/{kind}/read`: as `quark_core.query.Query`."""

    equals: dict[_Text, str] = {}
    any_of: dict[_Text, Annotated[tuple[str, ...], Meta(max_length=1000)]] = {}
    step: _Number | None = None
    step_min: _Number | None = None
    step_max: _Number | None = None
    epoch: _Number | None = None
    epoch_min: _Number | None = None
    epoch_max: _Number | None = None
    limit: _Number | None = None
    include_non_finite: bool = True
    all_attempts: bool = False


class SearchRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/runs/search`: in the language of docs/reference/search.md.

    Attributes:
        where, order_by, project, limit: As in `quark.search_runs`.
        store: Only runs of this project store.
        where_argument, order_argument: What messages call these two.
    """

    where: Annotated[str, Meta(max_length=10_000)] | None = None
    order_by: Annotated[tuple[str, ...], Meta(max_length=10)] = ()
    project: str | None = None
    store: _Text | None = None
    limit: _Number | None = None
    where_argument: _Text = "where"
    order_argument: _Text = "order_by"


class SeriesReply(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/runs/{run_id}/series`: as `quark_core.series.Series`.

    In msgpack each column is the bytes of its little-endian values: int64 for
    step, epoch, time_us, low_step, high_step, count and non_finite, float64
    for low, high, mean and last. In JSON each is a list, with null for NaN and
    the infinities.

    Attributes:
        key: The metric's stored key.
        exact: Whether every entry is one point.
        columns: Name of a field of `Series` -> its values.
    """

    key: str
    exact: bool
    columns: dict[str, bytes | list[int | float | None]]


class RecordList(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a read, or outputs, as JSON: records as `to_dict()`.

    Attributes:
        kind: Kind of the records.
        count: How many there are here.
        records: The newest of them that the server's limit and the request's allow.
    """

    kind: str
    count: int
    records: list[dict[str, Any]]


class PayloadReply(msgspec.Struct, frozen=True):
    """`PUT /v1/runs/{run_id}/payloads/{sha256}`: the payload is kept and synced."""

    sha256: str
    size_bytes: int


class RunList(msgspec.Struct, frozen=True):
    """`GET /v1/runs`: runs as `StoredRun.to_dict()`, newest first.

    Attributes:
        runs: One page of them.
        next: What to give as `after` for the next page; None where this was the last.
    """

    runs: list[dict[str, Any]]
    next: str | None = None


class SummaryList(msgspec.Struct, frozen=True):
    """Replies to a search: runs as `RunSummary.to_dict()`."""

    runs: list[dict[str, Any]]


class WorkspaceReply(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/workspace`: whom the key lets in, and what the server takes.

    Attributes:
        workspace: Name of the key's workspace.
        key_id: The key, without its secret.
        scopes: What the key may do.
        protocol: Newest version of the protocol that the server speaks.
        server: Version of the server.
        limits: Name -> bound, as the server was set up.
    """

    workspace: str
    key_id: str
    scopes: tuple[str, ...]
    protocol: int
    server: str
    limits: dict[str, int]


class KeyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret; times are ISO 8601 text in UTC, or None for never."""

    id: str
    name: str
    scopes: tuple[str, ...]
    created_at: str
    expires_at: str | None
    revoked_at: str | None
    last_used_at: str | None


class KeyList(msgspec.Struct, frozen=True):
    """`GET /v1/keys`: the keys of the workspace, oldest first."""

    keys: list[KeyInfo]


class KeyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/keys`.

    Attributes:
        name: For people.
        scopes: Some of read, ingest and admin; admin implies the others.
        expires_in_s: How long it lives; None for ever.
    """

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    scopes: Annotated[list[str], Meta(min_length=1, max_length=3)]
    expires_in_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None


class RotateRequest(msgspec.Struct, frozen=True):
    """`POST /v1/keys/{key_id}/rotate`: how long the old key lives on, a day by default."""

    overlap_s: Annotated[float, Meta(ge=0, le=1e8)] = 86_400.0


class NewKey(msgspec.Struct, frozen=True):
    """A key that was made: the only time that all of it is told."""

    key: str
    info: KeyInfo
