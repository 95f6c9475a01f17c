"""Edits of runs, requests to stop, and the trash of a workspace, for keys with the scope."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from quark_backends.service.client.http_client import Call, Refused, convert_reply
from quark_backends.service.protocol import (
    MSGPACK,
    REMOVAL_LIMIT_RUNS,
    BelongingRequest,
    CollectReply,
    CollectRequest,
    DamagedList,
    EditRequest,
    ErrorCode,
    GroupList,
    RunIds,
    StopReply,
    StopRunRequest,
    UsageList,
    UsageReply,
    WorkspaceReply,
)
from quark_core.backends.edits import (
    BelongingEdit,
    Collection,
    CollectionProgress,
    DamagedRecords,
    RunEdit,
    RunUsage,
    StoredGroup,
    StoredProject,
    StoreUsage,
)
from quark_core.backends.run_summary import StoredRun, restore_run
from quark_core.errors import SessionStoreError, StoreUnavailableError
from quark_core.records.runs import StopRequest

T = TypeVar("T")

_NO_ROUTE = (ErrorCode.NOT_FOUND, ErrorCode.METHOD_NOT_ALLOWED)


class ServiceEdits:
    """See `SupportsEdits`: of the whole workspace.

    Args:
        url: The service.
        fetch: Sends a call and returns the struct that its reply is.
        reading: Makes what a call fails with what who reads is told.
        read_only: Refuse whatever would change something.
        store: Label of the project store that lists keep to; None for no one store.
    """

    def __init__(
        self,
        url: str,
        fetch: Callable[[Call, type[Any]], Any],
        reading: Callable[[], AbstractContextManager[None]],
        *,
        read_only: bool,
        store: str | None = None,
    ) -> None:
        self._url = url
        self._fetch = fetch
        self._reading = reading
        self._read_only = read_only
        self._store = store

    def edit_run(self, run_id: str, edit: RunEdit, *, by: str) -> StoredRun:
        """See `SupportsEdits`; needs the scope write."""
        fields = {name: getattr(edit, name) for name in RunEdit.__struct_fields__}
        with self._reading():
            reply: dict[str, Any] = self._post(
                _route(run_id, "edit"), EditRequest(by=by, **fields), dict[str, Any]
            )
            stored = restore_run(reply)
        missed = {*edit.add_groups} - {*stored.run.groups} or {*edit.set_fields} - {*stored.fields}
        if missed:
            # It reads what it knows of a request, and lets the rest go.
            raise SessionStoreError(
                f"the service at {self._url} is too old to keep groups and fields, so "
                f"{sorted(missed)[0]!r} was not kept: whoever runs it has to bring it up to date"
            )
        return stored

    def request_stop(self, run_id: str, *, by: str, reason: str | None = None) -> StopRequest:
        """See `SupportsEdits`; needs the scope write."""
        with self._reading():
            request = StopRunRequest(by=by, reason=reason)
            stop = self._post(_route(run_id, "stop"), request, StopReply).stop
        if stop is None:
            raise SessionStoreError(f"the service at {self._url} has answered with no request")
        return stop

    def find_stop(self, run_id: str) -> StopRequest | None:
        """See `SupportsEdits`; None, too, of a service that is too old to know of requests."""
        with self._reading():
            try:
                reply = self._fetch(Call(method="GET", path=_route(run_id, "stop")), StopReply)
            except Refused as error:
                if error.code in _NO_ROUTE:
                    return None
                raise
        found: StopRequest | None = reply.stop
        return found

    def list_groups(self, project: str | None = None) -> list[StoredGroup]:
        """See `SupportsBelonging`; of the project store that the storage root names."""
        return [
            convert_reply(group, StoredGroup)
            for group in self._ask("groups", project, GroupList).groups
        ]

    def load_project(self, project: str) -> StoredProject:
        """See `SupportsBelonging`; of the project store that the storage root names."""
        return convert_reply(self._ask("project", project, dict[str, Any]), StoredProject)

    def update_project(self, project: str, edit: BelongingEdit, *, by: str) -> StoredProject:
        """See `SupportsBelonging`; needs the scope write."""
        return convert_reply(self._update("project", project, None, edit, by), StoredProject)

    def update_group(self, project: str, path: str, edit: BelongingEdit, *, by: str) -> StoredGroup:
        """See `SupportsBelonging`; needs the scope write."""
        return convert_reply(self._update("groups", project, path, edit, by), StoredGroup)

    def _ask(self, what: str, project: str | None, kind: type[T]) -> T:
        parameters = {"project": project, "store": self._store}
        call = Call(method="GET", path=f"/v1/{what}", parameters=parameters, accept=MSGPACK)
        with self._reading():
            return self._fetch_new(call, kind, "know of projects and groups")

    def _update(
        self, what: str, project: str, path: str | None, edit: BelongingEdit, by: str
    ) -> dict[str, Any]:
        fields = {name: getattr(edit, name) for name in BelongingEdit.__struct_fields__}
        request = BelongingRequest(project=project, path=path, by=by, **fields)
        with self._reading():
            return self._post(f"/v1/{what}", request, dict[str, Any])

    def _post(self, path: str, request: msgspec.Struct, kind: type[T]) -> T:
        if self._read_only:
            raise SessionStoreError(f"the store at {self._url} was opened for reading only")
        # Sent once: what is asked twice is noted in the run twice.
        call = Call(method="POST", path=path, body=msgspec.msgpack.encode(request), attempts=1)
        return self._fetch_new(
            call, kind, "edit or to stop runs, or to describe projects and groups"
        )

    def _fetch_new(self, call: Call, kind: type[T], what: str) -> T:
        """The reply of a route that earlier versions of the service do not have."""
        try:
            found: T = self._fetch(call, kind)
        except Refused as error:
            if error.code not in _NO_ROUTE:
                raise
            raise SessionStoreError(
                f"the service at {self._url} is too old to {what}: whoever runs it has to bring it "
                "up to date"
            ) from None
        return found


def _route(run_id: str, what: str) -> str:
    return f"/v1/runs/{quote(run_id, safe='')}/{what}"


_PATIENCE = 5
_FIRST_PAUSE_S = 0.2


class ServiceTrash:
    """See `SupportsRemoval`: of all project stores of the workspace.

    Args:
        url: The service.
        store_root: The store as its backend names it.
        fetch: Sends a call and returns the struct that its reply is.
        reading: Makes what a call fails with what who reads is told.
        read_only: Refuse whatever would change something.
    """

    def __init__(
        self,
        url: str,
        store_root: str,
        fetch: Callable[[Call, type[Any]], Any],
        reading: Callable[[], AbstractContextManager[None]],
        *,
        read_only: bool,
    ) -> None:
        self._url = url
        self._store_root = store_root
        self._fetch = fetch
        self._reading = reading
        self._read_only = read_only

    def measure_store(self) -> StoreUsage:
        """See `SupportsRemoval`; of the whole workspace."""
        found = self._get("/v1/usage", UsageReply)
        return StoreUsage(
            store_root=self._store_root,
            runs=tuple(_to_usage(run) for run in found.runs),
            database_file_bytes=found.database_file_bytes,
            free_bytes=found.free_bytes,
            shared_bytes=found.shared_bytes,
            elsewhere_bytes=0,
            total_bytes=found.total_bytes,
        )

    def measure_runs(self, run_ids: Sequence[str]) -> list[RunUsage]:
        """See `SupportsRemoval`."""
        found: list[RunUsage] = []
        for part in _cut(run_ids):
            reply = self._post("/v1/runs/usage", RunIds(part), UsageList)
            usages = {usage.run_id: usage for usage in map(_to_usage, reply.runs)}
            found += [usages[run_id] for run_id in part]
        return found

    def list_trash(self) -> list[RunUsage]:
        """See `SupportsRemoval`."""
        return [_to_usage(run) for run in self._get("/v1/trash", UsageList).runs]

    def list_damaged(self) -> list[DamagedRecords]:
        """See `SupportsRemoval`."""
        found = self._get("/v1/damaged", DamagedList)
        return [convert_reply(each, DamagedRecords) for each in found.records]

    def trash_runs(self, run_ids: Sequence[str]) -> None:
        """See `SupportsRemoval`; more than a thousand go in parts, each all or none."""
        self._check_writable()
        for part in _cut(run_ids):
            self._post("/v1/runs/trash", RunIds(part), RunIds)

    def restore_runs(self, run_ids: Sequence[str]) -> None:
        """See `SupportsRemoval`; in parts, as `trash_runs`."""
        self._check_writable()
        for part in _cut(run_ids):
            self._post("/v1/runs/restore", RunIds(part), RunIds)

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
        planned = tuple(
            usage
            for usage in map(_to_usage, plan.removed)
            if wanted is None or usage.run_id in wanted
        )
        if dry_run:
            return _to_collection(plan, planned, plan, plan.leftovers)
        self._check_writable()
        total_bytes = sum(usage.total_bytes for usage in planned)
        leftovers = dict(plan.leftovers)
        reply = plan
        # What comes into the trash while it works is left to the next call.
        for part in _cut([usage.run_id for usage in planned]) or [[]]:
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
        for attempt in range(_PATIENCE):
            try:
                return self._post("/v1/trash/collect", request, CollectReply)
            except StoreUnavailableError:
                if attempt == _PATIENCE - 1:
                    raise
                time.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise AssertionError  # pragma: no cover - the last attempt returns or raises

    def _get(self, path: str, kind: type[T]) -> T:
        return self._send(Call(method="GET", path=path), kind)

    def _post(self, path: str, request: msgspec.Struct, kind: type[T]) -> T:
        return self._send(
            Call(method="POST", path=path, body=msgspec.msgpack.encode(request)), kind
        )

    def _send(self, call: Call, kind: type[T]) -> T:
        with self._reading():
            try:
                found: T = self._fetch(call, kind)
            except Refused as error:
                if error.code not in _NO_ROUTE:
                    raise
                raise self._too_old() from None
            return found

    def _too_old(self) -> SessionStoreError:
        """The error for a service of an earlier version, which has no trash."""
        found: WorkspaceReply = self._fetch(
            Call(method="GET", path="/v1/workspace"), WorkspaceReply
        )
        return SessionStoreError(
            f"the service at {self._url} is Quark {found.server}, which can neither measure nor "
            "remove runs: whoever runs it has to bring it up to date"
        )

    def _check_writable(self) -> None:
        if self._read_only:
            raise SessionStoreError(f"the store {self._store_root} was opened for reading only")


def _to_usage(data: dict[str, Any]) -> RunUsage:
    return convert_reply(data, RunUsage)


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


def _cut(run_ids: Sequence[str]) -> list[list[str]]:
    """The ids in parts that one request takes."""
    return [
        list(run_ids[start : start + REMOVAL_LIMIT_RUNS])
        for start in range(0, len(run_ids), REMOVAL_LIMIT_RUNS)
    ]
