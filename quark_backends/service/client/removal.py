"""The trash of a service's workspace, as who has a key with the scope reaches it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import msgspec

from quark_backends.service.client.calls import Call, convert_reply
from quark_backends.service.client.service_errors import Refused
from quark_backends.service.protocol import (
    REMOVAL_LIMIT_RUNS,
    CollectReply,
    CollectRequest,
    DamagedList,
    ErrorCode,
    RunIds,
    UsageList,
    UsageReply,
    WorkspaceReply,
)
from quark_core.backends.edits import (
    Collection,
    CollectionProgress,
    DamagedRecords,
    RunUsage,
    StoreUsage,
)
from quark_core.errors import SessionStoreError, StoreUnavailableError

T = TypeVar("T")

_NO_ROUTE = (ErrorCode.NOT_FOUND, ErrorCode.METHOD_NOT_ALLOWED)
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
