"""Edits and requests to stop, as who has a key with the scope sends them to a service."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from quark_backends.service.belonging import BelongingRequest, GroupList
from quark_backends.service.client.calls import Call, convert_reply
from quark_backends.service.client.service_errors import Refused
from quark_backends.service.protocol import (
    MSGPACK,
    EditRequest,
    ErrorCode,
    StopReply,
    StopRunRequest,
)
from quark_core.backends.contract import StoredRun
from quark_core.backends.edits import BelongingEdit, RunEdit, StoredGroup, StoredProject
from quark_core.backends.run_summary import restore_run
from quark_core.errors import SessionStoreError
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
