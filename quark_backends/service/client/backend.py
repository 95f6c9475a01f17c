"""The persistence service as a backend."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast
from urllib.parse import quote

import msgspec

from quark_backends.service.calls import CALL_ROUTE, describe_search, encode_value
from quark_backends.service.client.derived_calls import (
    ServiceCaller,
    cut,
    derive_calls,
    refuse_writing,
)
from quark_backends.service.client.http_client import (
    BACKEND,
    Call,
    Refused,
    ServiceClient,
    ServiceError,
    describe,
    to_read_error,
    to_write_error,
)
from quark_backends.service.client.transfer import BatchSender
from quark_backends.service.client.transport import UserKey, check_key_is_for, find_address
from quark_backends.service.protocol import (
    MSGPACK,
    PROTOCOL_VERSION,
    ROWS,
    CollectReply,
    CollectRequest,
    GenerationReply,
    GenerationRequest,
    OutputBody,
    WorkspaceReply,
)
from quark_core.backends.contract import (
    BackendConfig,
    Batch,
    Generation,
    RunLocation,
    SupportsChanges,
    SupportsGrid,
    SupportsPages,
    SupportsRead,
    SupportsReplay,
    SupportsSearch,
)
from quark_core.backends.coordination import SupportsCoordination
from quark_core.backends.edits import (
    Collection,
    CollectionProgress,
    RunUsage,
    StoreUsage,
    SupportsBelonging,
    SupportsEdits,
    SupportsRemoval,
)
from quark_core.backends.methods import read_signature
from quark_core.config import settings
from quark_core.errors import (
    BackendUnauthorized,
    BackendUnavailable,
    SchemaValidationError,
    SessionStoreError,
    StoreUnauthorizedError,
    StoreUnavailableError,
)

if TYPE_CHECKING:
    import httpx

    from quark_core.backends.contract import Payload
    from quark_core.backends.curves import CurveQuery, CurveSet
    from quark_core.backends.run_pages import PageSearch, RunPage
    from quark_core.backends.run_summary import RunSummary
    from quark_core.backends.series import Series
    from quark_core.records.columns import Columns
    from quark_core.records.query import Query, RunSearch

_log = logging.getLogger("quark")

_SERIES_POINTS = 100_000
_PATIENCE = 5
_FIRST_PAUSE_S = 0.2
_WORKSPACE = Call(method="GET", path="/v1/workspace")


class _DerivedCalls(SupportsSearch, SupportsChanges, Protocol):
    """What `derive_calls` adds to a backend, for type checkers."""


@derive_calls(
    SupportsRead,
    SupportsReplay,
    SupportsSearch,
    SupportsPages,
    SupportsGrid,
    SupportsChanges,
    SupportsEdits,
    SupportsBelonging,
    SupportsRemoval,
    SupportsCoordination,
)
class ServiceBackend(ServiceCaller):
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
        if config.run_path is None and not (config.read_only or config.removes):
            if not config.unasked:
                self._check_workspace()
            if config.run_id is None:
                _claim_folder(config.storage_dir)

    @property
    def _derived(self) -> _DerivedCalls:
        return cast(_DerivedCalls, self)

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
            call = Call(
                method="POST",
                path=f"/v1/runs/{quote(generation.run_id, safe='')}/generations",
                body=msgspec.msgpack.encode(request),
                attempts=1,
            )
            return self._fetch(call, GenerationReply).number

    # Reading.

    @property
    def keeps_sources(self) -> bool:
        """Whether the service's owner wants the text of the code that runs are made of.

        Asks it, where it has not said yet.

        Raises:
            SessionStoreError: It cannot be asked; a lane's backend raises `BackendUnavailable`.
        """
        if self._workspace is None:
            with self._reading() if self._read_only else self._writing():
                self._workspace = self._fetch(_WORKSPACE, WorkspaceReply)
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
                self._workspace = self._fetch(_WORKSPACE, WorkspaceReply)
        found = self._workspace
        if found is None or not found.page:
            return None
        return self._address.page_path(run_id, found.workspace)

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """See `SupportsRead`."""
        from quark_backends.service.client.replies import read_columns

        with self._reading():
            return read_columns(self._client, self._ask_rows("read", run_id, kind, query), kind)

    def iterate(self, run_id: str, kind: str, query: Query, *, rows: int) -> Iterator[Columns]:
        """See `SupportsSeries`."""
        from quark_backends.service.client.replies import iterate_parts

        with self._reading():
            call = self._ask_rows("read", run_id, kind, query)
            yield from iterate_parts(self._client, call, rows)

    def read_outputs(self, run_id: str, kind: str, analyzer: str | None = None) -> Columns:
        """See `SupportsGenerations`."""
        from quark_backends.service.client.replies import read_columns

        with self._reading():
            call = self._ask_rows("read_outputs", run_id, kind, analyzer)
            return read_columns(self._client, call, kind)

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
            asked = {"run_id": run_id, "key": key, "max_points": max_points}
            found = self.call("read_series", {**asked, "all_attempts": all_attempts, "rank": rank})
            return cast("Series", found)
        # Every point is less to send as rows, which a reply may have any number of.
        from quark_core.records.query import Query
        from quark_core.runs.reading import reduce_columns

        query = Query(equals={"metric_key": key}, all_attempts=all_attempts, rank=rank)
        return reduce_columns(key, self.read(run_id, "metric", query), max_points)

    def read_series_many(self, run_id: str, query: CurveQuery) -> CurveSet:
        """See `SupportsChanges`."""
        from quark_core.backends.curves import CurveSet

        if not query.keys:
            return CurveSet(curves=(), cursor=self._derived.read_heads(run_id).cursor)
        try:
            found = self.call("read_series_many", {"run_id": run_id, "query": query})
        except SchemaValidationError:
            # Every point may be more than one reply has; as rows there may be any number.
            if query.entries is not None:
                raise
            from quark_core.runs.following import reduce_series_many

            return reduce_series_many(self._derived, run_id, query)
        return cast(CurveSet, found)

    def read_mark(self, run_id: str) -> str:
        """See `SupportsChanges`; how far the run has come, as one short reply says."""
        heads = self._derived.read_heads(run_id)
        return f"{sorted(heads.cursor.items())}/{heads.outputs}"

    def search(self, search: RunSearch) -> list[RunSummary]:
        """See `SupportsSearch`; among the runs of the project store, where one is named."""
        asked = describe_search(search)
        if asked is None:
            from quark_core.search.fallback import select_runs

            runs = self._derived.list_runs(project=search.project)
            return select_runs(
                [self._derived.summarize(str(stored.run.id)) for stored in runs], search
            )
        # A run that has begun meanwhile moves others into the next reply.
        found: dict[str, RunSummary] = {}
        for summary in self.call("search", {"search": asked}):
            found.setdefault(summary.run_id, summary)
        return list(found.values())

    def search_page(self, search: PageSearch) -> RunPage:
        """See `SupportsPages`; among the runs of the storage root's project store."""
        from quark_backends.service.client.replies import restore_tuples

        asked = describe_search(search)
        if asked is None:
            from quark_core.search.fallback import search_page_by_reading

            return search_page_by_reading(self._derived, search)
        page: RunPage = self.call("search_page", {"search": asked})
        return restore_tuples(page, search)

    def open_payload(self, run_id: str, sha256: str) -> BinaryIO:
        """See `SupportsArtifacts`; the payload is checked, and in a file of its own."""
        from quark_backends.service.client.transfer import fetch_payload

        with self._reading():
            return fetch_payload(self._client, run_id, sha256)

    def payload_directory(self, _run_id: str) -> Path | None:
        """None: payloads are sent."""
        return None

    # The trash of all stores of the workspace, for keys with the scope.

    def list_trash(self) -> list[RunUsage]:
        """See `SupportsRemoval`."""
        found: list[RunUsage] = self.call("list_trash", {})
        return found

    def measure_store(self) -> StoreUsage:
        """See `SupportsRemoval`; of the whole workspace."""
        found: StoreUsage = self.call("measure_store", {})
        return replace(found, store_root=self._address.store_root)

    def collect_trash(
        self,
        *,
        older_than_s: float = 0.0,
        run_ids: Sequence[str] | None = None,
        dry_run: bool = False,
        on_progress: CollectionProgress | None = None,
    ) -> Collection:
        """See `SupportsRemoval`. The service works while it is asked, a few seconds each time."""
        plan = self._collect(CollectRequest(older_than_s=older_than_s, dry_run=True))
        wanted = None if run_ids is None else set(run_ids)
        planned = tuple(run for run in plan.removed if wanted is None or run.run_id in wanted)
        if dry_run:
            return _to_collection(plan, planned, plan, plan.leftovers)
        if self._read_only:
            raise refuse_writing(self._address.url)
        total_bytes = sum(usage.total_bytes for usage in planned)
        leftovers = dict(plan.leftovers)
        reply = plan
        # What comes into the trash while it works is left to the next call.
        for part in cut([usage.run_id for usage in planned]) or [[]]:
            request = CollectRequest(older_than_s=older_than_s, run_ids=part)
            is_done = False
            while not is_done:
                reply = self._collect(request)
                is_done = reply.done
                if on_progress is not None:
                    done_bytes = max(0, plan.before_bytes - reply.after_bytes)
                    on_progress("removing runs", done_bytes, max(done_bytes, total_bytes))
        # Whatever was killed or lost its reply on the way, what is left says what is gone.
        left = {usage.run_id for usage in self.list_trash()}
        removed = tuple(usage for usage in planned if usage.run_id not in left)
        return _to_collection(plan, removed, reply, leftovers)

    def _collect(self, request: CollectRequest) -> CollectReply:
        """One turn, asked for again where the service is busy: it goes on where it was."""
        body = msgspec.msgpack.encode(request)
        call = Call(method="POST", path="/v1/trash/collect", body=body)
        for attempt in range(_PATIENCE):
            try:
                with self._reading():
                    return self._fetch(call, CollectReply)
            except StoreUnavailableError:
                if attempt == _PATIENCE - 1:
                    raise
                time.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise AssertionError  # pragma: no cover - the last attempt returns or raises

    def _check_workspace(self) -> None:
        """See that the service takes the key, and learn its limits.

        Raises:
            SessionStoreError: It does not, or is out of reach.
        """
        url = self._address.url
        if not self._client.is_known:
            raise StoreUnauthorizedError(
                f"{settings.USER_KEY} is not set. Set it to your key of the server at {url}"
            )
        try:
            with self._reading():
                found = self._workspace = self._fetch(_WORKSPACE, WorkspaceReply)
        except SessionStoreError:
            self._client.close()
            raise
        if found.protocol < PROTOCOL_VERSION:
            self._client.close()
            raise SessionStoreError(
                f"the Quark server at {url} uses protocol version {found.protocol}, but this "
                f"Quark uses {PROTOCOL_VERSION}. Upgrade the server"
            )
        if not {"ingest", "admin"} & set(found.scopes):
            self._client.close()
            raise StoreUnauthorizedError(
                f"the key {found.key_id} cannot write (its scopes: {', '.join(found.scopes)}). "
                f"Set {settings.USER_KEY} to a key with the scope 'ingest'"
            )
        self._sender.limit(found.limits.get("body_bytes", 0) or 2**40)

    def _ask_rows(self, method: str, run_id: str, kind: str, asked: Any) -> Call:
        """The call of a method whose rows come as a stream."""
        names = read_signature(method)[0].parameters
        arguments = dict(zip(names, (run_id, kind, asked), strict=True))
        return Call(
            method="POST",
            path=f"{CALL_ROUTE}{method}",
            body=encode_value(arguments, MSGPACK),
            accept=ROWS,
        )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except ServiceError as error:
            if not self._client.is_known and isinstance(error, Refused) and error.wants_key:
                raise StoreUnauthorizedError(
                    f"{settings.USER_KEY} is not set. Set it to your key of the server at "
                    f"{self._address.url}"
                ) from None
            raise to_read_error(error, self._address.url) from None
        except SchemaValidationError as error:
            raise SessionStoreError(
                f"the reply of the Quark server at {self._address.url} cannot be read: {error}"
            ) from error

    @contextlib.contextmanager
    def _writing(self, *, own_errors: bool = False) -> Iterator[None]:
        """Make failures those of a lane's backend; with `own_errors`, those of who calls."""
        if self._read_only:
            raise BackendUnavailable("the store was opened for reading only", backend=BACKEND)
        if not self._client.is_known and not self._client.key.reload():
            raise BackendUnauthorized(
                f"{settings.USER_KEY} is not set. Set it to your key of the server at "
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


def _to_collection(
    plan: CollectReply, removed: tuple[RunUsage, ...], last: CollectReply, leftovers: dict[str, int]
) -> Collection:
    return Collection(
        runs=removed,
        skipped=last.skipped,
        leftovers=leftovers,
        before_bytes=plan.before_bytes,
        after_bytes=last.after_bytes,
        notes=tuple(last.notes),
    )


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
