"""Sweeps, trials and logs of a service, which workers on any number of machines share.

A claim is asked for again where its reply is lost, under the same request id: the service then
answers with the same trial. What has no such name is sent once.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from quark_backends.service.client.http_client import Call, Refused, ServiceError, Unreachable
from quark_backends.service.client.transport import ServiceAddress
from quark_backends.service.protocol import (
    PAGE_TRIALS,
    AddTrialsRequest,
    AppendRequest,
    ClaimRequest,
    CompareBelongingRequest,
    CompareReply,
    CompareRequest,
    EntryList,
    ErrorCode,
    OpenSweepRequest,
    SettleRequest,
    SweepList,
    SweepStateRequest,
    TrialList,
    TrialReply,
)
from quark_core.backends.coordination import (
    MOST_ENTRIES,
    AppendedEntries,
    NewTrial,
    TrialWish,
    check_entries,
    check_new_trials,
)
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records.json_object import JsonObject, normalize_object
from quark_core.records.schema import validate_record
from quark_core.records.sweeps import StoredSweep, StoredTrial, SweepState, TrialResult
from quark_core.system.process import ProcessIdentity

# Sweeps, trials and logs of a service, which workers on any number of machines share.
#
# A claim is asked for again where its reply is lost, under the same request id: the service then
# answers with the same trial. What has no such name is sent once.

T = TypeVar("T")
R = TypeVar("R", StoredSweep, StoredTrial)

_NO_ROUTE = (ErrorCode.NOT_FOUND, ErrorCode.METHOD_NOT_ALLOWED)
# What says that the same call may well be served a moment later: a proxy before a server
# that is being started again answers so, too.
_LATER = frozenset({425, 429, 502, 503, 504})
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class SharesTrials:
    """What `ServiceBackend` has of `SupportsCoordination`: of the whole workspace.

    A service that is busy, or is being started again, is asked again for as long as a call may
    take.
    """

    _address: ServiceAddress
    _read_only: bool

    def _fetch(self, call: Call, kind: type[T]) -> T:
        """The struct that the reply to a call is."""
        raise NotImplementedError

    def _reading(self) -> AbstractContextManager[None]:
        """Makes what a call fails with what who reads is told."""
        raise NotImplementedError

    def open_sweep(
        self, project: str, name: str, definition: Mapping[str, Any], *, max_failures: int
    ) -> StoredSweep:
        """See `SupportsCoordination`; needs the scope ingest."""
        request = OpenSweepRequest(
            project=project,
            name=name,
            definition=normalize_object(definition, "definition") or {},
            max_failures=max_failures,
        )
        return _restore(self._change("/v1/sweeps", request, dict[str, Any]), StoredSweep)

    def update_sweep(self, sweep_id: str, state: SweepState, *, by: str) -> StoredSweep:
        """See `SupportsCoordination`; needs the scope write."""
        request = SweepStateRequest(state=state, by=by)
        reply = self._change(_route(sweep_id, "state"), request, dict[str, Any])
        return _restore(reply, StoredSweep)

    def add_trials(
        self, sweep_id: str, trials: Sequence[NewTrial], *, key: str
    ) -> list[StoredTrial]:
        """See `SupportsCoordination`; needs the scope ingest."""
        request = AddTrialsRequest(trials=check_new_trials(trials), key=key)
        reply = self._change(_route(sweep_id, "trials"), request, TrialList)
        return [_restore(each, StoredTrial) for each in reply.trials]

    def claim_trial(
        self,
        sweep_id: str,
        *,
        request_id: str,
        worker: ProcessIdentity,
        lease_s: float,
        wish: TrialWish | None = None,
    ) -> StoredTrial | None:
        """See `SupportsCoordination`; needs the scope ingest."""
        request = ClaimRequest(request_id=request_id, worker=worker, lease_s=lease_s, wish=wish)
        found = self._change(_route(sweep_id, "claim"), request, TrialReply).trial
        return None if found is None else _restore(found, StoredTrial)

    def settle_trial(
        self, sweep_id: str, number: int, token: int, result: TrialResult | None, *, lease_s: float
    ) -> StoredTrial:
        """See `SupportsCoordination`; needs the scope ingest."""
        request = SettleRequest(number=number, token=token, result=result, lease_s=lease_s)
        found = self._change(_route(sweep_id, "settle"), request, TrialReply).trial
        return _restore(found or {}, StoredTrial)

    def append_entries(
        self, log: str, entries: Sequence[str], *, request_id: str
    ) -> AppendedEntries:
        """See `SupportsCoordination`; needs the scope ingest."""
        request = AppendRequest(log=log, entries=check_entries(entries), request_id=request_id)
        return self._change("/v1/entries", request, AppendedEntries)

    def read_entries(self, log: str, start: int, *, limit: int = MOST_ENTRIES) -> list[str]:
        """See `SupportsCoordination`; with any key."""
        parameters = {"log": log, "start": str(start), "limit": str(limit)}
        return self._ask_for("/v1/entries", EntryList, parameters).entries

    def compare_and_set(self, run_id: str, field: str, expect: Any, value: Any, *, by: str) -> bool:
        """See `SupportsCoordination`; needs the scope ingest.

        Where the reply is lost, nobody can tell whether it was set: see which value is there.
        """
        path = f"/v1/runs/{quote(run_id, safe='')}/compare_and_set"
        request = CompareRequest(field=field, expect=expect, value=value, by=by)
        return self._change(path, request, CompareReply, again=False).was_set

    def compare_and_set_group(
        self, project: str, path: str, field: str, expect: Any, value: Any, *, by: str
    ) -> bool:
        """See `SupportsCoordination`; needs the scope write. Of a lost reply see above."""
        request = CompareBelongingRequest(
            project=project, path=path, field=field, expect=expect, value=value, by=by
        )
        route = "/v1/groups/compare_and_set" if path else "/v1/project/compare_and_set"
        return self._change(route, request, CompareReply, again=False).was_set

    def list_sweeps(self, project: str | None = None) -> list[StoredSweep]:
        """See `SupportsCoordination`; needs the scope read."""
        page = self._ask_for("/v1/sweeps", SweepList, {"project": project})
        return [_restore(each, StoredSweep) for each in page.sweeps]

    def load_sweep(self, sweep_id: str) -> StoredSweep:
        """See `SupportsCoordination`; with any key."""
        reply = self._ask_for(f"/v1/sweeps/{quote(sweep_id, safe='')}", dict[str, Any], {})
        return _restore(reply, StoredSweep)

    def list_trials(
        self, sweep_id: str, *, start: int = 0, limit: int | None = None
    ) -> list[StoredTrial]:
        """See `SupportsCoordination`; with any key."""
        found: list[StoredTrial] = []
        following: int | None = start
        while following is not None and (limit is None or len(found) < limit):
            left = PAGE_TRIALS if limit is None else min(PAGE_TRIALS, limit - len(found))
            parameters = {"start": str(following), "limit": str(left)}
            page = self._ask_for(_route(sweep_id, "trials"), TrialList, parameters)
            trials = [_restore(each, StoredTrial) for each in page.trials]
            if [trial.number for trial in trials] != [*range(following, following + len(trials))]:
                raise SessionStoreError(
                    f"the service at {self._address.url} has sent trials out of their order"
                )
            found += trials
            following = following + len(trials) if trials and page.next is not None else None
        return found

    def _ask_for(self, path: str, kind: type[T], parameters: Mapping[str, str | None]) -> T:
        return self._ask(Call(method="GET", path=path, parameters=parameters), kind)

    def _change(
        self, path: str, request: msgspec.Struct, kind: type[T], *, again: bool = True
    ) -> T:
        if self._read_only:
            raise SessionStoreError(f"the store at {self._address.url} was opened for reading only")
        body = msgspec.msgpack.encode(request)
        return self._ask(Call(method="POST", path=path, body=body, attempts=1), kind, again=again)

    def _ask(self, call: Call, kind: type[T], *, again: bool = True) -> T:
        """The reply to a call, sent again while a later one may be served.

        Raises:
            SessionStoreError: There is none within the time, or the service has no such route.
        """
        ends_s = time.monotonic() + self._address.timeout_s
        pause_s = _FIRST_PAUSE_S
        left_s = self._address.timeout_s
        with self._reading():
            while True:
                try:
                    return self._send(dataclasses.replace(call, within_s=left_s), kind)
                except ServiceError as error:
                    left_s = ends_s - time.monotonic()
                    if not again or not _may_pass(error) or left_s <= 0.0:
                        raise
                    asked_s = error.retry_after_s if isinstance(error, Refused) else None
                    # Those who were turned away together shall not come back together.
                    wait_s = (asked_s or pause_s) * random.uniform(0.5, 1.0)
                    time.sleep(min(left_s / 2.0, wait_s))
                    left_s = max(_FIRST_PAUSE_S, ends_s - time.monotonic())
                    pause_s = min(_LONGEST_PAUSE_S, pause_s * 2.0)

    def _send(self, call: Call, kind: type[T]) -> T:
        try:
            found: T = self._fetch(call, kind)
        except Refused as error:
            if error.code not in _NO_ROUTE:
                raise
            raise SessionStoreError(
                f"the service at {self._address.url} is too old to know of sweeps: whoever runs "
                "it has to bring it up to date"
            ) from None
        return found


def _may_pass(error: ServiceError) -> bool:
    """Whether the same call may be served a moment later."""
    if isinstance(error, Refused):
        return error.status in _LATER
    return isinstance(error, Unreachable) and not (error.timed_out or error.answered)


def _restore(data: Mapping[str, Any], kind: type[R]) -> R:
    """A sweep or trial of a reply.

    Raises:
        SessionStoreError: It is none.
    """
    try:
        found = msgspec.convert(data, kind, dec_hook=_to_json_object)
        validate_record(found)
    except (msgspec.ValidationError, SchemaValidationError) as error:
        raise SessionStoreError(f"the service has sent what cannot be read: {error}") from None
    return found


def _to_json_object(_kind: type, value: Any) -> Any:
    found = None if value == {} else normalize_object(value, "reply")
    return JsonObject() if found is None else found


def _route(sweep_id: str, what: str) -> str:
    return f"/v1/sweeps/{quote(sweep_id, safe='')}/{what}"
