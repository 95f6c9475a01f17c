"""Calls to a service that follow from the methods of the contract.

A claim is asked for again where its reply is lost, under the same request id: the service then
answers with the same trial. What has no such name is sent once.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import msgspec

from quark_backends.service.calls import (
    CALL_ROUTE,
    OF_STORE,
    decode_value,
    encode_value,
    find_result,
)
from quark_backends.service.client.http_client import (
    Call,
    Refused,
    Reply,
    ServiceClient,
    ServiceError,
    Unreachable,
)
from quark_backends.service.client.transport import ServiceAddress
from quark_backends.service.protocol import MSGPACK, NEXT_PAGE, REMOVAL_LIMIT_RUNS
from quark_core.backends.coordination import (
    SupportsCoordination,
    check_entries,
    check_new_trials,
)
from quark_core.backends.methods import (
    CHANGING_METHODS,
    list_methods,
    read_signature,
)
from quark_core.errors import SessionStoreError
from quark_core.records.base import Record
from quark_core.records.json_object import normalize_object
from quark_core.records.schema import validate_record

C = TypeVar("C", bound=type)
T = TypeVar("T")

# What says that the same call may well be served a moment later: a proxy before a server
# that is being started again answers so, too.
_LATER = frozenset({425, 429, 502, 503, 504})
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
# Of a comparison whose reply is lost nobody can tell whether it was made: see which value is there.
_COMPARISONS = frozenset({"compare_and_set", "compare_and_set_group"})
_NAMED = {each.__name__ for each in list_methods(SupportsCoordination)} - _COMPARISONS
# Carried out twice they do what they do once.
_HARMLESS = frozenset({"trash_runs", "restore_runs"})
_ATTEMPTS = 3
# As a service takes them, whatever they are here.
_PREPARED: Mapping[str, Callable[[Any], Any]] = {
    "definition": lambda given: normalize_object(given, "definition") or {},
    "trials": check_new_trials,
    "entries": check_entries,
}


def derive_calls(*protocols: type) -> Callable[[C], C]:
    """Give a `ServiceCaller` the methods of protocols that it does not have: one call each."""

    def add(kind: C) -> C:
        for protocol in protocols:
            for method in list_methods(protocol):
                if not hasattr(kind, method.__name__):
                    setattr(kind, method.__name__, _derive(method))
        return kind

    return add


def _derive(method: Callable[..., Any]) -> Callable[..., Any]:
    name = method.__name__

    @functools.wraps(method)
    def call(self: ServiceCaller, *arguments: Any, **named: Any) -> Any:
        signature, _ = read_signature(name)
        return self.call(name, signature.bind(*arguments, **named).arguments)

    return call


def refuse_writing(url: str) -> SessionStoreError:
    """The error of a store that was opened for reading only."""
    return SessionStoreError(f"the store at {url} was opened for reading only")


def cut(run_ids: Sequence[str]) -> list[list[str]]:
    """The ids in parts that one request takes."""
    return [
        list(run_ids[start : start + REMOVAL_LIMIT_RUNS])
        for start in range(0, len(run_ids), REMOVAL_LIMIT_RUNS)
    ]


class ServiceCaller:
    """Calls methods of the contract at a service.

    A service that is busy, or is being started again, is asked again for as long as a call may
    take, where the call has a name.
    """

    _address: ServiceAddress
    _client: ServiceClient
    _read_only: bool

    def _reading(self) -> AbstractContextManager[None]:
        """Makes what a call fails with what who reads is told."""
        raise NotImplementedError

    def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """What a method returns that is asked by its name; of several pages all of them.

        Raises:
            QuarkError: As the method, or the service is out of reach.
        """
        if method in CHANGING_METHODS and self._read_only:
            raise refuse_writing(self._address.url)
        run_ids = arguments.get("run_ids")
        if run_ids is not None and len(run_ids) != min(max(len(run_ids), 1), REMOVAL_LIMIT_RUNS):
            parts = [self.call(method, {**arguments, "run_ids": part}) for part in cut(run_ids)]
            return [each for part in parts for each in part or ()]
        given = {
            name: _PREPARED[name](value) if name in _PREPARED else value
            for name, value in arguments.items()
        }
        is_once = method in CHANGING_METHODS and method not in _HARMLESS
        call = Call(
            method="POST",
            path=f"{CALL_ROUTE}{method}",
            parameters={"store": self._address.store if method in OF_STORE else None},
            body=encode_value(given, MSGPACK),
            attempts=1 if is_once else _ATTEMPTS,
        )
        with self._reading():
            found, following = self._ask(call, method)
            seen: set[str] = set()
            while following is not None:
                if following in seen:
                    raise Unreachable("its list of pages does not end", answered=True)
                seen.add(following)
                parameters = {**call.parameters, "after": following}
                page, following = self._ask(
                    dataclasses.replace(call, parameters=parameters), method
                )
                found += page
        return found

    def _ask(self, call: Call, method: str) -> tuple[Any, str | None]:
        """What a reply holds, and what to ask with for what follows it."""
        body, reply = self._ask_again(call) if method in _NAMED else self._client.ask(call)
        found = _decode(body, reply, find_result(method))
        for each in found if isinstance(found, list) else [found]:
            if isinstance(each, Record):
                validate_record(each)
        return found, reply.headers.get(NEXT_PAGE.lower())

    def _fetch(self, call: Call, kind: type[T]) -> T:
        """The struct that a reply is.

        Raises:
            ServiceError: It cannot be had.
        """
        body, reply = self._client.ask(call)
        found: T = _decode(body, reply, kind)
        return found

    def _ask_again(self, call: Call) -> tuple[bytes, Reply]:
        """The reply to a call, sent again while a later one may be served."""
        ends_s = time.monotonic() + self._address.timeout_s
        pause_s = _FIRST_PAUSE_S
        left_s = self._address.timeout_s
        while True:
            try:
                return self._client.ask(dataclasses.replace(call, within_s=left_s))
            except ServiceError as error:
                left_s = ends_s - time.monotonic()
                if not _may_pass(error) or left_s <= 0.0:
                    raise
                asked_s = error.retry_after_s if isinstance(error, Refused) else None
                # Those who were turned away together shall not come back together.
                wait_s = (asked_s or pause_s) * random.uniform(0.5, 1.0)
                time.sleep(min(left_s / 2.0, wait_s))
                left_s = max(_FIRST_PAUSE_S, ends_s - time.monotonic())
                pause_s = min(_LONGEST_PAUSE_S, pause_s * 2.0)


def _decode(body: bytes, reply: Reply, kind: Any) -> Any:
    try:
        return decode_value(body, reply.media, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unreachable(f"its reply cannot be read: {error}", answered=True) from None


def _may_pass(error: ServiceError) -> bool:
    """Whether the same call may be served a moment later."""
    if isinstance(error, Refused):
        return error.status in _LATER
    return isinstance(error, Unreachable) and not (error.timed_out or error.answered)
