"""The protocol between client and server, version 1: runs, reads, edits, sweeps and logs.

docs/reference/protocol.md describes it for people. All that crosses the wire is one of these
structs, in msgpack or in JSON, but for rows (`quark_backends.service.row_frames`) and payloads.
"""

from __future__ import annotations

import re
from dataclasses import fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quark_core.backends.coordination import MOST_ENTRIES, MOST_TRIALS, NewTrial, TrialWish
from quark_core.backends.edits import BelongingEdit, RunEdit
from quark_core.backends.run_pages import MOST_COLUMNS
from quark_core.backends.series import Series
from quark_core.records.runs import StopRequest
from quark_core.records.sweeps import SweepState, TrialResult
from quark_core.system.process import ProcessIdentity

if TYPE_CHECKING:
    from quark_core.backends.contract import Batch

PROTOCOL_VERSION = 1
"""Stands in every path (`/v1/…`) and in the header `Quark-Protocol` of every reply."""

JSON = "application/json"
MSGPACK = "application/msgpack"
ROWS = "application/vnd.quark.rows"
"""Rows of a read as a stream of frames; see `quark_backends.service.row_frames`."""

ENCODINGS = ("identity", "zstd", "gzip")
"""What `Content-Encoding` of a request may be."""

ACKNOWLEDGED_LIMIT_BATCHES = 256
"""A request of ingest has at most so many batches."""

REMOVAL_LIMIT_RUNS = 1000
"""A request that puts runs into the trash, or back, names at most so many."""

SERIES_COLUMNS = tuple(f.name for f in fields(Series) if f.name not in ("key", "exact", "ranks"))
"""The columns of a curve."""

CURVE_COLUMNS = (*SERIES_COLUMNS, "non_finite_step")
"""The columns of one of several curves."""

RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
SHA256 = re.compile(r"[0-9a-f]{64}")

_Text = Annotated[str, Meta(max_length=512)]
_Id = Annotated[str, Meta(min_length=1, max_length=128)]
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
    INVALID_STATE = "invalid_state"
    """409: the run is in a state that does not allow it, such as alive."""
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
    ErrorCode.INVALID_STATE: 409,
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

    analyzer: _Id
    replaces: bool
    outputs: Annotated[list[OutputBody], Meta(max_length=64)]


class GenerationReply(msgspec.Struct, frozen=True):
    """The number of the generation, 1 for the first of its analyzer."""

    number: int


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/runs/{run_id}/records/{kind}/read`: as `quark_core.records.query.Query`."""

    equals: dict[_Text, str] = {}
    any_of: dict[_Text, Annotated[tuple[str, ...], Meta(max_length=1000)]] = {}
    step: _Number | None = None
    step_min: _Number | None = None
    step_max: _Number | None = None
    epoch: _Number | None = None
    epoch_min: _Number | None = None
    epoch_max: _Number | None = None
    rank: _Number | None = None
    limit: _Number | None = None
    include_non_finite: bool = True
    all_attempts: bool = False


class SearchRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/runs/search`: in the language of docs/reference/search.md.

    Attributes:
        where, order_by, project, limit: As in `quark.search_runs`.
        store: Only runs of this project store.
        archived: Whether archived runs are searched too; older services know of none.
        start: How many of the first runs are left out; without it a reply has all, or none.
        where_argument, order_argument: What messages call these two.
    """

    where: Annotated[str, Meta(max_length=10_000)] | None = None
    order_by: Annotated[tuple[str, ...], Meta(max_length=10)] = ()
    project: str | None = None
    store: _Text | None = None
    limit: _Number | None = None
    archived: bool = False
    start: _Number | None = None
    where_argument: _Text = "where"
    order_argument: _Text = "order_by"


class PageRequest(SearchRequest, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/runs/page`: one page of a search with chosen columns.

    Attributes:
        columns: Metrics and figures of them, `config.key`, fields of the run.
        after: `next` of the page before.
        count: Whether all runs that fit are to be counted.
        columns_argument: What messages call the columns.
    """

    columns: Annotated[tuple[str, ...], Meta(max_length=MOST_COLUMNS)] = ()
    after: str | None = None
    count: bool = False
    columns_argument: _Text = "columns"


class PageReply(msgspec.Struct, frozen=True, kw_only=True):
    """As `quark_core.backends.run_pages.RunPage`; in JSON what is not finite is null.

    Attributes:
        rows: Of each run its id and its values, in the order of the columns.
        next: What to give as `after`, or null on the last page.
        count: How many runs fit, or null.
    """

    rows: list[tuple[str, list[Any]]]
    next: str | None = None
    count: int | None = None


class NamesReply(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/names`: as `quark_core.backends.run_pages.RunNames`.

    Attributes:
        metrics: How a search writes each.
        config: Of each key the key, how a search writes it, its types and some values.
        tags: Each with the number of runs that have it.
        complete: Whether these are all.
    """

    metrics: tuple[str, ...]
    config: tuple[tuple[str, str, tuple[str, ...], tuple[Any, ...]], ...]
    tags: tuple[tuple[str, int], ...]
    complete: bool


class GridReply(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/runs/{run_id}/grid`: as `quark_core.backends.grids.Grid`.

    In msgpack `starts` and `ends` are the bytes of little-endian int64, `values` of float64
    and `marks` of uint8, row after row. In JSON each is a list, with null for NaN.
    """

    names: tuple[str, ...]
    starts: bytes | list[int]
    ends: bytes | list[int]
    values: bytes | list[float | None]
    marks: bytes | list[int]
    exact: bool
    depth: int | None = None
    left_out: int = 0
    points: int = 0


class SeriesReply(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/runs/{run_id}/series`: as `quark_core.backends.series.Series`.

    In msgpack each column is the bytes of its little-endian values: int64 for
    step, epoch, time_us, low_step, high_step, count and non_finite, float64
    for low, high, mean and last. In JSON each is a list, with null for NaN and
    the infinities.

    Attributes:
        key: The metric's stored key.
        exact: Whether every entry is one point.
        columns: Name of a field of `Series` -> its values.
        ranks: The ranks whose points these are; None from a server that strings one
            rank after another, whichever was asked for.
    """

    key: str
    exact: bool
    columns: dict[str, bytes | list[int | float | None]]
    ranks: tuple[int, ...] | None = None


class CurvesRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/runs/{run_id}/curves`: several metrics within a window, of one moment.

    Attributes:
        keys: Stored keys of the metrics.
        entries: At most so many of each curve; null for every point.
        axis: What `low` and `high` bound and the curves are sorted by; times are
            microseconds since the epoch.
        low, high: Both inclusive; null leaves that side open.
        ranks: Null for a curve across ranks, "each" for one of each, or the ranks of
            which there shall be one.
        all_attempts: With points that a later attempt has hidden.
    """

    keys: Annotated[tuple[_Text, ...], Meta(min_length=1, max_length=1000)]
    entries: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    axis: Literal["step", "epoch", "time_us"] = "step"
    low: _Number | None = None
    high: _Number | None = None
    ranks: Literal["each"] | Annotated[tuple[_Number, ...], Meta(max_length=10_000)] | None = None
    all_attempts: bool = False


class CurveReply(msgspec.Struct, frozen=True, kw_only=True):
    """One of the curves of `CurvesReply`, as `quark_core.backends.curves.Curve`.

    Attributes:
        key, exact, ranks, columns: As in `SeriesReply`; one more column is
            `non_finite_step`, int64.
        attempt: Whose points these are.
        rank: Likewise; null across ranks.
    """

    key: str
    attempt: int
    rank: int | None
    ranks: tuple[int, ...]
    exact: bool
    columns: dict[str, bytes | list[int | float | None]]


class CurvesReply(msgspec.Struct, frozen=True, kw_only=True):
    """Curves of one moment, and what to ask with for all that comes after it."""

    curves: list[CurveReply]
    cursor: dict[str, int]


class HeadsReply(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/runs/{run_id}/heads`: how far a run has come.

    Attributes:
        cursor: What to ask with for all that comes after this moment.
        outputs: How many generations of analysis outputs there are.
    """

    cursor: dict[str, int]
    outputs: int


class ChangesRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/runs/{run_id}/changes`: what came since a cursor.

    Attributes:
        cursor: As it was given; empty for everything.
        kinds: Kinds of records.
        keys: Stored keys of the metrics that are wanted; null for all.
        all_attempts: With points that a later attempt has hidden.
        max_rows: About how many records the reply has at most.
    """

    cursor: Annotated[dict[_Text, _Number], Meta(max_length=100_000)]
    kinds: Annotated[tuple[_Text, ...], Meta(max_length=64)]
    keys: Annotated[tuple[_Text, ...], Meta(max_length=10_000)] | None = None
    all_attempts: bool = False
    max_rows: Annotated[int, Meta(ge=1, le=100_000)] = 10_000


class ChangesReply(msgspec.Struct, frozen=True, kw_only=True):
    """What came, as `quark_core.backends.curves.RunChanges`.

    Attributes:
        cursor: To go on with.
        records: By kind. In msgpack frames of rows, as a stream of rows has them, one after
            the other and without an end; in JSON a list of records.
        more, stale, outputs: As in `RunChanges`.
    """

    cursor: dict[str, int]
    records: dict[str, bytes | list[dict[str, Any]]]
    more: bool
    stale: bool
    outputs: int


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


class SummaryList(msgspec.Struct, frozen=True, omit_defaults=True):
    """Replies to a search: runs as `RunSummary.to_dict()`, and the `start` of what follows."""

    runs: list[dict[str, Any]]
    next: int | None = None


class EditRequest(RunEdit, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/runs/{run_id}/edit`: what is to be changed of a run, by whom.

    Attributes:
        by: Who changes it, as `user@host`; the service adds the id of the key.
    """

    by: Annotated[str, Meta(min_length=1, max_length=250)]


class StopRunRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/runs/{run_id}/stop`: the run's newest attempt is to stop.

    Attributes:
        by: Who asks, as `user@host`; the service adds the id of the key.
        reason: Why.
    """

    by: Annotated[str, Meta(min_length=1, max_length=250)]
    reason: Annotated[str, Meta(max_length=1000)] | None = None


class StopReply(msgspec.Struct, frozen=True):
    """The request to stop that stands for a run's newest attempt, or null."""

    stop: StopRequest | None


class RunIds(msgspec.Struct, frozen=True):
    """`POST /v1/runs/trash`, `/restore` and `/usage`: some runs; the first two answer with them."""

    run_ids: Annotated[list[_Id], Meta(min_length=1, max_length=REMOVAL_LIMIT_RUNS)]


class UsageList(msgspec.Struct, frozen=True):
    """What runs take up, as `quark_core.backends.edits.RunUsage.to_dict()`."""

    runs: list[dict[str, Any]]


class UsageReply(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/usage`: what the workspace and each of its runs take up, in bytes.

    Attributes:
        runs: Its runs, those in the trash too, the largest first.
        database_file_bytes, free_bytes, shared_bytes, total_bytes: As in
            `quark_core.backends.edits.StoreUsage`; the total has the payloads too.
    """

    runs: list[dict[str, Any]]
    database_file_bytes: int
    free_bytes: int
    shared_bytes: int
    total_bytes: int


class DamagedList(msgspec.Struct, frozen=True):
    """`GET /v1/damaged`: what could not be read, as `DamagedRecords`."""

    records: list[dict[str, Any]]


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

    removed: list[dict[str, Any]]
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


class BelongingRequest(BelongingEdit, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/project` and `POST /v1/groups`: what is to be changed of a project or group.

    Attributes:
        project: Name of the project.
        by: Who changes it, as `user@host`; the service adds the id of the key.
        path: The group's; null for the project.
    """

    project: _Text
    by: Annotated[str, Meta(min_length=1, max_length=250)]
    path: _Text | None = None


class GroupList(msgspec.Struct, frozen=True):
    """`GET /v1/groups`: groups as `quark_core.backends.edits.StoredGroup.to_dict()`."""

    groups: list[dict[str, Any]]


PAGE_TRIALS = 1000
"""A page of trials has at most so many."""

PAGE_BYTES = 8 * 2**20
"""A page of trials or entries ends where it has about so many bytes."""

_Label = Annotated[str, Meta(min_length=1, max_length=250)]
_Lease = Annotated[float, Meta(gt=0)]


class OpenSweepRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/sweeps`: the sweep of this name, which is made where there is none.

    Attributes:
        project: Of which project.
        name: What it is called there.
        definition: What it is, as JSON values: the same for all who come.
        max_failures: How many failed runs of a trial make it broken.
    """

    project: _Label
    name: _Label
    definition: dict[str, Any]
    max_failures: Annotated[int, Meta(ge=1, le=1_000_000)] = 3


class SweepList(msgspec.Struct, frozen=True):
    """`GET /v1/sweeps`: sweeps as `StoredSweep.to_dict()`, newest first."""

    sweeps: list[dict[str, Any]]


class SweepStateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/sweeps/{sweep_id}/state`: pause, go on with or cancel a sweep.

    Attributes:
        state: What it shall be.
        by: Who asks, as `user@host`; the service adds the id of the key.
    """

    state: SweepState
    by: _Label


class AddTrialsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/sweeps/{sweep_id}/trials`: add trials, all of them or none.

    Attributes:
        trials: What is to be added.
        key: Names the addition: of several who add under one key, the first does.
    """

    trials: Annotated[list[NewTrial], Meta(min_length=1, max_length=MOST_TRIALS)]
    key: _Label


class TrialList(msgspec.Struct, frozen=True):
    """Trials as `StoredTrial.to_dict()`, by their number.

    Attributes:
        trials: Some of them.
        next: What to give as `start` for those that may follow; null where there are none, and
            where these are all that were added.
    """

    trials: list[dict[str, Any]]
    next: int | None = None


class ClaimRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/sweeps/{sweep_id}/claim`: a trial that nobody else holds.

    Attributes:
        request_id: Names the claim: sent again with the same name, it is answered with the
            same trial and token.
        worker: Who claims; null for whoever has no process that could be asked.
        lease_s: For how long it is held without a word of its run.
        wish: Which trials it may be.
    """

    request_id: _Label
    worker: ProcessIdentity | None = None
    lease_s: _Lease = 60.0
    wish: TrialWish | None = None


class TrialReply(msgspec.Struct, frozen=True):
    """A trial as `StoredTrial.to_dict()`; null where there is none to have now."""

    trial: dict[str, Any] | None


class SettleRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/sweeps/{sweep_id}/settle`: what became of a trial, or that it is held still.

    Attributes:
        number, token: The claim. One that is not the newest changes nothing: the reply says so.
        result: What became of it; null renews the lease.
        lease_s: For how long it is held from now on, where it is held.
    """

    number: _Number
    token: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    result: TrialResult | None = None
    lease_s: _Lease = 60.0


class AppendRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/entries`: append texts to a log, all of them or none, one after the other.

    Attributes:
        log: Which log; it begins with its first entry.
        entries: The texts.
        request_id: Names the request: sent again with the same name, it appends nothing more.
    """

    log: _Label
    entries: Annotated[list[str], Meta(min_length=1, max_length=MOST_ENTRIES)]
    request_id: _Label


class EntryList(msgspec.Struct, frozen=True):
    """`GET /v1/entries`: entries of a log.

    Attributes:
        entries: Some of them, in their order.
        next: What to give as `start` for those that may follow; null where there are none.
    """

    entries: list[str]
    next: int | None = None


class CompareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/runs/{run_id}/compare_and_set`: set a field of a run if its value is `expect`.

    Attributes:
        field: Its name.
        expect, value: Values before and after; null where the field is not there.
        by: Who asks, as `user@host`; the service adds the id of the key.
    """

    field: _Label
    expect: Any
    value: Any
    by: _Label


class CompareBelongingRequest(CompareRequest, frozen=True, kw_only=True):
    """`POST /v1/groups/compare_and_set` and `POST /v1/project/compare_and_set`.

    Attributes:
        project: Name of the project.
        path: The group's; empty for the project.
    """

    project: Annotated[str, Meta(max_length=512)]
    path: Annotated[str, Meta(max_length=512)] = ""


class CompareReply(msgspec.Struct, frozen=True):
    """Whether the value was `expect`, and so has been set."""

    was_set: bool
