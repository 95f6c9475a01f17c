"""The persistence service as a backend."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar
from urllib.parse import quote

import msgspec

from quark_backends.removal import SupportsTrash
from quark_backends.service.client.edits import ServiceEdits, ServiceTrash
from quark_backends.service.client.http_client import (
    BACKEND,
    Call,
    Refused,
    ServiceClient,
    ServiceError,
    Unreachable,
    describe,
    to_read_error,
    to_write_error,
)
from quark_backends.service.client.sweeps import SharesTrials
from quark_backends.service.client.transfer import BatchSender, from_wire
from quark_backends.service.client.transport import UserKey, check_key_is_for, find_address
from quark_backends.service.protocol import (
    JSON,
    MSGPACK,
    PROTOCOL_VERSION,
    ROWS,
    ChangesReply,
    ChangesRequest,
    CurvesReply,
    CurvesRequest,
    ErrorCode,
    GenerationReply,
    GenerationRequest,
    HeadsReply,
    OutputBody,
    ReadRequest,
    RunList,
    SearchRequest,
    SeriesReply,
    SummaryList,
    WireBatches,
    WorkspaceReply,
)
from quark_core.backends.contract import BackendConfig, Batch, Generation, RunLocation
from quark_core.backends.curves import Cursor, CurveQuery, CurveSet, RunChanges, RunHeads
from quark_core.backends.run_summary import StoredRun, restore_run, restore_summary
from quark_core.config import settings
from quark_core.errors import (
    BackendUnauthorized,
    BackendUnavailable,
    SchemaValidationError,
    SessionStoreError,
    StoreUnauthorizedError,
)
from quark_core.records import MetricRecord

if TYPE_CHECKING:
    import httpx

    from quark_core.backends.contract import Payload, SupportsRead
    from quark_core.backends.edits import BelongingEdit, RunEdit, StoredGroup, StoredProject
    from quark_core.backends.grids import Grid, GridQuery
    from quark_core.backends.run_pages import PageSearch, RunNames, RunPage
    from quark_core.backends.run_summary import RunSummary
    from quark_core.backends.series import Series
    from quark_core.records.columns import Columns
    from quark_core.records.query import Query, RunSearch
    from quark_core.records.runs import StopRequest

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
        from quark_backends.service.client.replies import to_curve
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
        from quark_backends.service.client.replies import to_rows
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


T = TypeVar("T")

_log = logging.getLogger("quark")

_PAGE_RUNS = 200
_SERIES_POINTS = 100_000


class ServiceBackend(SupportsTrash, SharesTrials):
    """A workspace of a persistence service, for one storage root.

    Lists and searches keep to the project store that the storage root names;
    a run is found by its id in the whole workspace. Writing belongs to the
    lane's thread, reading to any thread; both outlive `close()`.

    Args:
        config: The service, and what is opened.
        transport: What carries requests in place of connections of our own, such as
            `httpx.MockTransport`. It is used from any thread, and not closed.
        auth: What is done to requests before they are sent, for who stands before the
            service. With it a user's key is sent where there is one, and not asked for.

    Raises:
        SessionStoreError: The service, its URL or its key is no good. Only
            what a lane opens asks nothing yet: its first write says so.
        BackendUnauthorized: A run's folder names it, and the key is for another one.
        SchemaValidationError: `transport` or `auth` is none of httpx.
    """

    def __init__(
        self,
        config: BackendConfig,
        *,
        transport: httpx.BaseTransport | None = None,
        auth: httpx.Auth | None = None,
    ) -> None:
        self._address = find_address(config)
        check_key_is_for(self._address, config)
        self._read_only = config.read_only
        self._workspace: WorkspaceReply | None = None
        self._client = ServiceClient(self._address, UserKey(), transport=transport, auth=auth)
        self._sender = BatchSender(self._client)
        self._trash = ServiceTrash(
            self._address.url,
            self._address.store_root,
            self._fetch,
            self._reading,
            read_only=config.read_only,
        )
        self._edits = ServiceEdits(
            self._address.url,
            self._fetch,
            self._reading,
            read_only=config.read_only,
            store=self._address.store,
        )
        self._following = RunFollowing(
            self,
            lambda run_id, what, request, kind: self._fetch(
                self._post(f"{_run_route(run_id)}/{what}", request), kind
            ),
            lambda run_id, what, kind: self._fetch(_get(f"{_run_route(run_id)}/{what}"), kind),
        )
        if config.run_path is None and not (config.read_only or config.removes):
            if not config.unasked:
                self._check_workspace()
            if config.run_id is None:
                _claim_folder(config.storage_dir)

    @property
    def store_name(self) -> str | None:
        """Name of the project store that lists and searches keep to; None for no one store."""
        return self._address.store

    def __repr__(self) -> str:
        return f"ServiceBackend({self._address.store_root})"

    # Writing.

    def write(self, batch: Batch) -> None:
        """Store one batch."""
        self.write_group([batch])

    def write_group(self, batches: Sequence[Batch]) -> None:
        """Store several batches, as one as far as one request can hold them."""
        with self._writing():
            self._sender.send(batches)

    def close(self) -> None:
        """Give up the connections."""
        self._client.close()

    def put_payload(self, payload: Payload) -> None:
        """See `SupportsArtifacts`."""
        from quark_backends.service.client.transfer import send_payload

        with self._writing():
            send_payload(self._client, payload)

    def write_generation(self, generation: Generation) -> int:
        """See `SupportsGenerations`.

        Where the reply is lost, the generation may be there all the same.

        Raises:
            RunNotFoundError: The workspace has no such run.
            SchemaValidationError: Records of another run, or under another kind's name.
            BackendUnavailable: It is not stored now.
        """
        from quark_backends.store.reading.reader import encode_outputs

        outputs = [OutputBody(*body) for body in encode_outputs(generation)]
        request = GenerationRequest(generation.analyzer, generation.replaces, outputs)
        with self._writing(own_errors=True):
            call = self._post(f"{_run_route(generation.run_id)}/generations", request, attempts=1)
            return self._fetch(call, GenerationReply).number

    def edit_run(self, run_id: str, edit: RunEdit, *, by: str) -> StoredRun:
        """See `SupportsEdits`."""
        return self._edits.edit_run(run_id, edit, by=by)

    def request_stop(self, run_id: str, *, by: str, reason: str | None = None) -> StopRequest:
        """See `SupportsEdits`."""
        return self._edits.request_stop(run_id, by=by, reason=reason)

    def update_project(self, project: str, edit: BelongingEdit, *, by: str) -> StoredProject:
        """See `SupportsBelonging`."""
        return self._edits.update_project(project, edit, by=by)

    def update_group(self, project: str, path: str, edit: BelongingEdit, *, by: str) -> StoredGroup:
        """See `SupportsBelonging`."""
        return self._edits.update_group(project, path, edit, by=by)

    # Reading.

    def list_groups(self, project: str | None = None) -> list[StoredGroup]:
        """See `SupportsBelonging`."""
        return self._edits.list_groups(project)

    def load_project(self, project: str) -> StoredProject:
        """See `SupportsBelonging`."""
        return self._edits.load_project(project)

    def find_stop(self, run_id: str) -> StopRequest | None:
        """See `SupportsEdits`."""
        return self._edits.find_stop(run_id)

    @property
    def keeps_sources(self) -> bool:
        """Whether the service's owner wants the text of the code that runs are made of.

        Asks it, where it has not said yet.

        Raises:
            SessionStoreError: It cannot be asked; a lane's backend raises `BackendUnavailable`.
        """
        if self._workspace is None:
            with self._reading() if self._read_only else self._writing():
                self._workspace = self._fetch(_get("/v1/workspace"), WorkspaceReply)
        return self._workspace.keeps_sources

    def locate(self, run_id: str) -> RunLocation:
        """The run's URI, which says who asks with a key what the run is; it is on no disk here."""
        return RunLocation(
            store_root=self._address.store_root,
            db_path=None,
            run_path=self._address.run_path(run_id),
        )

    def find_page(self, run_id: str, *, asks: bool) -> str | None:
        """Address of the page that shows a run to people, or None where the service has none.

        Args:
            run_id: The run.
            asks: Whether the service is asked, where it has not said yet.

        Raises:
            SessionStoreError: It cannot be asked.
        """
        if self._workspace is None and asks:
            with self._reading():
                self._workspace = self._fetch(_get("/v1/workspace"), WorkspaceReply)
        found = self._workspace
        if found is None or not found.page:
            return None
        return self._address.page_path(run_id, found.workspace)

    def load_run(self, run_id: str) -> StoredRun:
        """See `SupportsRead`."""
        with self._reading():
            return restore_run(self._fetch(_get(_run_route(run_id)), dict[str, Any]))

    def list_runs(self, *, project: str | None = None, limit: int | None = None) -> list[StoredRun]:
        """See `SupportsRead`; those of the project store, where one is named."""
        found: list[StoredRun] = []
        after: str | None = None
        while limit is None or len(found) < limit:
            left = _PAGE_RUNS if limit is None else min(_PAGE_RUNS, limit - len(found))
            parameters = {
                "project": project,
                "store": self._address.store,
                "limit": str(left),
                "after": after,
            }
            with self._reading():
                page = self._fetch(_get("/v1/runs", parameters), RunList)
                found += [restore_run(data) for data in page.runs]
            if page.next is None or page.next == after:
                break
            after = page.next
        return found

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """See `SupportsRead`."""
        from quark_backends.service.client.replies import read_columns

        with self._reading():
            return read_columns(self._client, self._read_call(run_id, kind, query), kind)

    def iterate(self, run_id: str, kind: str, query: Query, *, rows: int) -> Iterator[Columns]:
        """See `SupportsSeries`."""
        from quark_backends.service.client.replies import iterate_parts

        with self._reading():
            yield from iterate_parts(self._client, self._read_call(run_id, kind, query), rows)

    def read_series(
        self,
        run_id: str,
        key: str,
        *,
        max_points: int | None,
        all_attempts: bool = False,
        rank: int | None = None,
    ) -> Series:
        """See `SupportsSeries`."""
        if max_points is not None and max_points <= _SERIES_POINTS:
            found = self._fetch_series(run_id, key, max_points, all_attempts, rank)
            if found is not None:
                return found
        # Every point is less to send as rows, which a reply may have any number of.
        from quark_core.records.query import Query
        from quark_core.runs.reading import reduce_columns

        query = Query(equals={"metric_key": key}, all_attempts=all_attempts, rank=rank)
        return reduce_columns(key, self.read(run_id, "metric", query), max_points)

    def _fetch_series(
        self, run_id: str, key: str, max_points: int, all_attempts: bool, rank: int | None
    ) -> Series | None:
        """A curve as the service reduces it; None from one that does not tell ranks apart."""
        from quark_backends.service.client.replies import to_series

        parameters = {
            "key": key,
            "max_points": str(max_points),
            "all_attempts": "true" if all_attempts else None,
            "rank": None if rank is None else str(rank),
        }
        with self._reading():
            call = _get(f"{_run_route(run_id)}/series", parameters)
            reply = self._fetch(call, SeriesReply)
            return None if reply.ranks is None else to_series(reply)

    def read_series_many(self, run_id: str, query: CurveQuery) -> CurveSet:
        """See `SupportsChanges`."""
        with self._reading():
            return self._following.read_series_many(run_id, query)

    def read_heads(self, run_id: str) -> RunHeads:
        """See `SupportsChanges`."""
        with self._reading():
            return self._following.read_heads(run_id)

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
        with self._reading():
            return self._following.read_changes(
                run_id,
                cursor,
                kinds=kinds,
                keys=keys,
                all_attempts=all_attempts,
                max_rows=max_rows,
            )

    def read_mark(self, run_id: str) -> str:
        """See `SupportsChanges`."""
        with self._reading():
            return self._following.read_mark(run_id)

    def search(self, search: RunSearch) -> list[RunSummary]:
        """See `SupportsSearch`; among the runs of the project store, where one is named."""
        source = search.source
        if source is None and (search.where is not None or search.order_by):
            from quark_core.search.fallback import select_runs

            runs = self.list_runs(project=search.project)
            return select_runs([self.summarize(str(stored.run.id)) for stored in runs], search)
        request = SearchRequest(
            where=None if source is None else source.where,
            order_by=() if source is None else source.order_by,
            project=search.project,
            store=self._address.store,
            limit=search.limit,
            archived=search.archived,
            start=0,
            where_argument="where" if source is None else source.where_argument,
            order_argument="order_by" if source is None else source.order_argument,
        )
        with self._reading():
            found: dict[str, RunSummary] = {}
            following: int | None = 0
            while following is not None:
                asked = msgspec.structs.replace(request, start=following)
                reply = self._fetch(self._post("/v1/runs/search", asked), SummaryList)
                for summary in map(restore_summary, reply.runs):
                    # A run that has begun meanwhile moves others into the next reply.
                    found.setdefault(str(summary.stored.run.id), summary)
                following = reply.next
            return list(found.values())

    def search_page(self, search: PageSearch) -> RunPage:
        """See `SupportsPages`; among the runs of the storage root's project store."""
        from quark_backends.service.client.replies import ask_page
        from quark_core.search.fallback import search_page_by_reading

        with self._reading():
            found = ask_page(self._fetch, search, self._address.store)
        # A service of an older version has no pages.
        return search_page_by_reading(self, search) if found is None else found

    def list_names(self, project: str | None, text: str, limit: int) -> RunNames:
        """See `SupportsPages`; of the runs of the project store, where one is named."""
        from quark_backends.service.client.replies import ask_names
        from quark_core.search.fallback import list_names_by_reading

        with self._reading():
            found = ask_names(self._fetch, project, text, limit, self._address.store)
        return list_names_by_reading(self, project, text, limit) if found is None else found

    def read_grid(self, run_id: str, query: GridQuery) -> Grid:
        """See `SupportsGrid`."""
        from quark_backends.service.client.replies import ask_grid

        with self._reading():
            found = ask_grid(self._fetch, _run_route(run_id), query)
        if found is not None:
            return found
        from quark_core.runs.following import read_grid_of_records

        return read_grid_of_records(self, run_id, query)

    def summarize(self, run_id: str) -> RunSummary:
        """See `SupportsSearch`."""
        with self._reading():
            found = self._fetch(_get(f"{_run_route(run_id)}/summary"), dict[str, Any])
            return restore_summary(found)

    def read_batches(self, run_id: str, writer_id: str, start: int, limit: int) -> list[Batch]:
        """See `SupportsReplay`."""
        path = f"{_run_route(run_id)}/writers/{quote(writer_id, safe='')}/batches"
        found: list[Batch] = []
        while len(found) < limit:
            # One reply may be cut short of what was asked for, but for its first batch.
            first = found[-1].number + 1 if found else start
            parameters = {"start": str(first), "limit": str(limit - len(found))}
            with self._reading():
                reply = self._fetch(_get(path, parameters), WireBatches)
            if not reply.batches:
                break
            found += [from_wire(run_id, batch) for batch in reply.batches]
        return found

    def read_outputs(self, run_id: str, kind: str, analyzer: str | None = None) -> Columns:
        """See `SupportsGenerations`."""
        from quark_backends.service.client.replies import read_columns

        path = f"{_run_route(run_id)}/outputs/{quote(kind, safe='')}"
        call = _get(path, {"analyzer": analyzer}, accept=ROWS)
        with self._reading():
            return read_columns(self._client, call, kind)

    def open_payload(self, run_id: str, sha256: str) -> BinaryIO:
        """See `SupportsArtifacts`; the payload is checked, and in a file of its own."""
        from quark_backends.service.client.transfer import fetch_payload

        with self._reading():
            return fetch_payload(self._client, run_id, sha256)

    def payload_directory(self, _run_id: str) -> Path | None:
        """None: payloads are sent."""
        return None

    def _check_workspace(self) -> None:
        """See that the service takes the key, and learn its limits.

        Raises:
            SessionStoreError: It does not, or is out of reach.
        """
        url = self._address.url
        if not self._client.is_known:
            raise StoreUnauthorizedError(
                f"{settings.USER_KEY} is not set: set it to your key of the service at {url}"
            )
        try:
            with self._reading():
                found = self._workspace = self._fetch(_get("/v1/workspace"), WorkspaceReply)
        except SessionStoreError:
            self._client.close()
            raise
        if found.protocol < PROTOCOL_VERSION:
            self._client.close()
            raise SessionStoreError(
                f"the service at {url} speaks version {found.protocol} of the protocol and this "
                f"Quark speaks {PROTOCOL_VERSION}: bring the service up to date"
            )
        if not {"ingest", "admin"} & set(found.scopes):
            self._client.close()
            raise StoreUnauthorizedError(
                f"the key {found.key_id} may not write (it has: {', '.join(found.scopes)}): set "
                f"{settings.USER_KEY} to a key with the scope ingest"
            )
        self._sender.limit(found.limits.get("body_bytes", 0) or 2**40)

    def _read_call(self, run_id: str, kind: str, query: Query) -> Call:
        request = ReadRequest(**{name: getattr(query, name) for name in query.__slots__})
        path = f"{_run_route(run_id)}/records/{quote(kind, safe='')}/read"
        return self._post(path, request, accept=ROWS)

    def _post(self, path: str, request: Any, *, accept: str = MSGPACK, attempts: int = 3) -> Call:
        return Call(
            method="POST",
            path=path,
            body=msgspec.msgpack.encode(request),
            accept=accept,
            attempts=attempts,
        )

    def _fetch(self, call: Call, kind: type[T]) -> T:
        """The struct that a reply is.

        Raises:
            ServiceError: It cannot be had.
        """
        body, reply = self._client.ask(call)
        try:
            if reply.media == JSON:
                return msgspec.json.decode(body, type=kind)
            return msgspec.msgpack.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Unreachable(f"its reply cannot be read: {error}", answered=True) from None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except ServiceError as error:
            if not self._client.is_known and isinstance(error, Refused) and error.wants_key:
                raise StoreUnauthorizedError(
                    f"{settings.USER_KEY} is not set: set it to your key of the service at "
                    f"{self._address.url}"
                ) from None
            raise to_read_error(error, self._address.url) from None
        except SchemaValidationError as error:
            raise SessionStoreError(
                f"the service at {self._address.url} has sent what cannot be read: {error}"
            ) from error

    @contextlib.contextmanager
    def _writing(self, *, own_errors: bool = False) -> Iterator[None]:
        """Make failures those of a lane's backend; with `own_errors`, those of who calls."""
        if self._read_only:
            raise BackendUnavailable("the store was opened for reading only", backend=BACKEND)
        if not self._client.is_known and not self._client.key.reload():
            raise BackendUnauthorized(
                f"{settings.USER_KEY} is not set: set it to your key of the service at "
                f"{self._address.url}",
                backend=BACKEND,
            )
        try:
            yield
        except Refused as error:
            if own_errors and error.is_final:
                raise to_read_error(error, self._address.url) from None
            raise to_write_error(error, self._address.url) from None
        except ServiceError as error:
            if own_errors:
                raise BackendUnavailable(
                    describe(error, self._address.url), backend=BACKEND
                ) from None
            raise to_write_error(error, self._address.url) from None


def _claim_folder(storage_dir: Path) -> None:
    """Mark the folder in which journals will lie as Quark's; no database is made in it.

    Without the mark, a store that is made there later would take it for somebody else's.
    """
    from quark_backends.store.databases.sqlite import ensure_marker

    try:
        ensure_marker(storage_dir)
    except SessionStoreError as error:
        # The journal says for itself what it cannot do; the service does not need the folder.
        _log.debug("the folder of journals is not marked: %s", error)


def _run_route(run_id: str) -> str:
    return f"/v1/runs/{quote(run_id, safe='')}"


def _get(
    path: str, parameters: Mapping[str, str | None] | None = None, *, accept: str = MSGPACK
) -> Call:
    return Call(method="GET", path=path, parameters=parameters or {}, accept=accept)
