"""The protocol between client and server, version 1: runs, reads, edits, sweeps and logs.

docs/reference/protocol.md describes it for people. All that crosses the wire is one of these
structs, in msgpack or in JSON, but for rows (`quark_backends.service.row_frames`) and payloads.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from quark_core.backends.edits import RunUsage

if TYPE_CHECKING:
    from quark_core.backends.contract import Batch

PROTOCOL_VERSION = 1
"""Stands in every path (`/v1/…`) and in the header `Quark-Protocol` of every reply."""

JSON = "application/json"
MSGPACK = "application/msgpack"
ROWS = "application/vnd.quark.rows"
"""Rows of a read as a stream of frames; see `quark_backends.service.row_frames`."""

NEXT_PAGE = "Quark-Next"
"""Header of a reply that holds only the first of what was asked for: what `after` has to be."""

ENCODINGS = ("identity", "zstd", "gzip")
"""What `Content-Encoding` of a request may be."""

ACKNOWLEDGED_LIMIT_BATCHES = 256
"""A request of ingest has at most so many batches."""

REMOVAL_LIMIT_RUNS = 1000
"""A request that puts runs into the trash, or back, names at most so many."""

RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
SHA256 = re.compile(r"[0-9a-f]{64}")

_Text = Annotated[str, Meta(max_length=512)]
_Id = Annotated[str, Meta(min_length=1, max_length=128)]
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class ErrorCode(StrEnum):
    """The kind of an error, for programs; the message says it for people.

    Attributes:
        status: Of HTTP.
    """

    status: int

    def __new__(cls, text: str, status: int) -> ErrorCode:
        """A code, by its text and status."""
        code = str.__new__(cls, text)
        code._value_, code.status = text, status
        return code

    MALFORMED = "malformed", 400
    """The request cannot be read."""
    INVALID_ARGUMENT = "invalid_argument", 400
    """It can, and asks for something that makes no sense; `field` names it."""
    UNAUTHORIZED = "unauthorized", 401
    """No key, or one that is unknown, revoked or expired."""
    FORBIDDEN = "forbidden", 403
    """The key lacks the scope."""
    NOT_FOUND = "not_found", 404
    """No such route."""
    RUN_NOT_FOUND = "run_not_found", 404
    """The workspace has no such run."""
    PAYLOAD_NOT_FOUND = "payload_not_found", 404
    """The run has no such payload."""
    METHOD_NOT_ALLOWED = "method_not_allowed", 405
    """The route does not take this method."""
    TIMEOUT = "timeout", 408
    """The body came too slowly."""
    CONFLICT = "conflict", 409
    """The batch, the attempt or the payload is there already, and is another one."""
    INVALID_STATE = "invalid_state", 409
    """The run is in a state that does not allow it, such as alive."""
    TOO_LARGE = "too_large", 413
    """A limit of this server; the message names it."""
    UNSUPPORTED = "unsupported", 415
    """A media type or an encoding that the server does not take."""
    RANGE = "range", 416
    """A range that the payload does not have."""
    MISDIRECTED = "misdirected", 421
    """The request names a host that this server does not answer for."""
    REJECTED = "rejected", 422
    """The batch can never be stored."""
    RATE_LIMITED = "rate_limited", 429
    """Later; `retry_after_s` says when."""
    INTERNAL = "internal", 500
    """A bug of the server; its log has the same `request_id`."""
    UNAVAILABLE = "unavailable", 503
    """The store is busy or out of reach, or the server is about to end."""


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
        writer_id, attempt, rank, number, kind, count, body: As in a `Batch` of the contract.
    """

    writer_id: _Id
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


class Acknowledged(msgspec.Struct, frozen=True, omit_defaults=True):
    """The batches are stored and synced.

    Attributes:
        batches: How many, those included that had been stored before.
        removed: The run was removed for good: what comes late for it is let go.
    """

    batches: int
    removed: bool = False


class OutputBody(msgspec.Struct, frozen=True):
    """Outputs of one kind, encoded as a batch's body is."""

    kind: Annotated[str, Meta(min_length=1, max_length=64)]
    count: _Number
    body: bytes


class GenerationRequest(msgspec.Struct, frozen=True):
    """`POST /v1/runs/{run_id}/generations`: one analysis, visible all at once."""

    analyzer: _Id
    replaces: bool
    outputs: Annotated[list[OutputBody], Meta(max_length=64)]


class GenerationReply(msgspec.Struct, frozen=True):
    """The number of the generation, 1 for the first of its analyzer."""

    number: int


class PayloadReply(msgspec.Struct, frozen=True):
    """`PUT /v1/runs/{run_id}/payloads/{sha256}`: the payload is kept and synced."""

    sha256: str
    size_bytes: int


class CollectRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/trash/collect`.

    Attributes:
        older_than_s: Only what has been in the trash for so long.
        run_ids: Only these, and what was begun before; all by default.
        dry_run: Only say what would go.
    """

    older_than_s: Annotated[float, Meta(ge=0, le=1e10)] = 0.0
    run_ids: Annotated[list[_Id], Meta(max_length=REMOVAL_LIMIT_RUNS)] | None = None
    dry_run: bool = False


class CollectReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection has done so far, or, of a dry run, would do.

    Attributes:
        removed: Runs that were removed for good, with what they took up when it began.
        skipped: Runs that stay in the trash for now: id -> why.
        leftovers: Payloads of runs that were removed before: id -> bytes.
        before_bytes, after_bytes: What the workspace took up before, and takes now.
        notes: What could not be done, and why.
        done: Whether this was all. If not, the same request goes on.
    """

    removed: list[RunUsage]
    skipped: dict[str, str]
    leftovers: dict[str, int]
    before_bytes: int
    after_bytes: int
    notes: list[str]
    done: bool


class WorkspaceReply(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/workspace`: whom the key lets in, and what the server takes.

    Attributes:
        workspace, key_id, scopes: Of the key, without its secret, and what it may do.
        protocol, server: Newest version of the protocol that it speaks, and its own.
        limits: Name -> bound, as the server was set up.
        page, keeps_sources: Whether it shows runs to people too; wants the text of their code.
    """

    workspace: str
    key_id: str
    scopes: tuple[str, ...]
    protocol: int
    server: str
    limits: dict[str, int]
    page: bool = False
    keeps_sources: bool = False


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
        scopes: Some of read, ingest, write and admin; admin implies the others.
        expires_in_s: How long it lives; None for ever.
    """

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    scopes: Annotated[list[str], Meta(min_length=1, max_length=4)]
    expires_in_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None


class RotateRequest(msgspec.Struct, frozen=True):
    """`POST /v1/keys/{key_id}/rotate`: how long the old key lives on, a day by default."""

    overlap_s: Annotated[float, Meta(ge=0, le=1e8)] = 86_400.0


class NewKey(msgspec.Struct, frozen=True):
    """A key that was made: the only time that all of it is told."""

    key: str
    info: KeyInfo
