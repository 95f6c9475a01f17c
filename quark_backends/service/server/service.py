"""The state that the routes of one process share, and one request to them."""

from __future__ import annotations

import mmap
import os
import tempfile
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quark_backends.service.protocol import JSON, MSGPACK, NEXT_PAGE, SHA256, ErrorCode
from quark_backends.service.server.config import Principal, Scope, ServiceConfig
from quark_backends.service.server.deployment import Deployment
from quark_backends.service.server.ingest_validation import RunKeys
from quark_backends.service.server.keys import KeyGuard
from quark_backends.service.server.payloads import PayloadVault
from quark_backends.service.server.requests import (
    SMALL_BYTES,
    BodyRoom,
    FairBudget,
    FairPlaces,
    RequestBody,
    WorkThreads,
    check_run_id,
    check_text,
    hold_body,
)
from quark_backends.service.server.responses import ServiceFailure, choose_media, make_reply
from quark_backends.service.server.stores import OpenStore, WorkspaceStores
from quark_core.config.arguments import check_label

T = TypeVar("T")

# What /metrics shows over all processes of a server.
#
# The counters of each process lie in a row of their own in a file that all of
# them map, and are added up when they are asked for: whichever process a scrape
# reaches, it shows all. That takes no more than this module; the usual client
# library keeps a file for each process and metric for the same end.

DURATION_BOUNDS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)
"""Upper bounds of the buckets of durations."""

_STATUSES = ("2xx", "3xx", "4xx", "5xx")
_SIMPLE = {
    "quark_ingested_batches_total": "Acknowledged batches.",
    "quark_ingested_rows_total": "Records in acknowledged batches.",
    "quark_received_bytes_total": "Bytes of request bodies.",
    "quark_sent_bytes_total": "Bytes of reply bodies.",
    "quark_refused_keys_total": "Requests with a rejected key.",
    "quark_rate_limited_total": "Requests over the rate limit.",
    "quark_failures_total": "Requests that failed because of a server bug.",
}
_GAUGES = {"quark_requests_in_flight": "Requests in progress."}
_VALUE_BYTES = 8


class ServerMetrics:
    """Counters of one process among those of its server.

    Args:
        routes: Names of the routes that requests are counted by.
        worker: Which of the processes this is, from 0.
        workers: How many there are.
        path: The file that they share; made where it is None.
    """

    def __init__(
        self, routes: list[str], *, worker: int = 0, workers: int = 1, path: str | None = None
    ) -> None:
        self._routes = routes
        self._slots = {name: index for index, name in enumerate(self._list_slots())}
        self._width = len(self._slots)
        self._workers = workers
        self._start = worker * self._width
        size = max(1, len(self._slots) * workers) * _VALUE_BYTES
        if path is None:
            descriptor, made = tempfile.mkstemp(prefix="quark-figures-")
            os.unlink(made)
        else:
            descriptor = os.open(path, os.O_RDWR)
        try:
            if os.fstat(descriptor).st_size < size:
                os.ftruncate(descriptor, size)
            # A page of memory begins it, so that each value is where the machine wants one.
            self._values = memoryview(mmap.mmap(descriptor, size)).cast("d")
        finally:
            os.close(descriptor)
        # What an earlier process in this place was working on is no longer worked on.
        for name in _GAUGES:
            self._values[self._start + self._slots[name]] = 0.0
        # Where the sum of a route is; its counters by status and by duration follow.
        self._sums = {route: self._start + self._slots[f"sum/{route}"] for route in routes}

    def add(self, name: str, amount: float = 1.0) -> None:
        """Add to a counter of this process."""
        self._values[self._start + self._slots[name]] += amount

    def note_request(self, route: str, status: int, duration_s: float) -> None:
        """Count a request that was answered."""
        values, place = self._values, self._sums[route]
        values[place] += duration_s
        values[place + 1 + min(max(status // 100 - 2, 0), 3)] += 1.0
        place += 1 + len(_STATUSES)
        for each in range(bisect_left(DURATION_BOUNDS_S, duration_s), len(DURATION_BOUNDS_S)):
            values[place + each] += 1.0

    def read(self, name: str) -> float:
        """A counter, over all processes."""
        return sum(self._get(worker * self._width, name) for worker in range(self._workers))

    def to_text(self) -> str:
        """All of them as Prometheus reads them."""
        return "\n".join(self._list_lines()) + "\n"

    def _list_lines(self) -> Iterator[str]:
        for kind, group in (("counter", _SIMPLE), ("gauge", _GAUGES)):
            for name, summary in group.items():
                yield f"# HELP {name} {summary}"
                yield f"# TYPE {name} {kind}"
                yield f"{name} {self.read(name):.0f}"
        yield "# HELP quark_requests_total Answered requests."
        yield "# TYPE quark_requests_total counter"
        for route in self._routes:
            for status in _STATUSES:
                if count := self.read(f"status/{route}/{status}"):
                    yield f'quark_requests_total{{route="{route}",status="{status}"}} {count:.0f}'
        yield "# HELP quark_request_seconds Duration of requests."
        yield "# TYPE quark_request_seconds histogram"
        for route in self._routes:
            count = sum(self.read(f"status/{route}/{status}") for status in _STATUSES)
            if not count:
                continue
            label = f'route="{route}"'
            for bound in DURATION_BOUNDS_S:
                below = self.read(f"bucket/{route}/{bound:g}")
                yield f'quark_request_seconds_bucket{{{label},le="{bound:g}"}} {below:.0f}'
            yield f'quark_request_seconds_bucket{{{label},le="+Inf"}} {count:.0f}'
            yield f"quark_request_seconds_sum{{{label}}} {self.read(f'sum/{route}'):.6f}"
            yield f"quark_request_seconds_count{{{label}}} {count:.0f}"

    def _list_slots(self) -> Iterator[str]:
        yield from _SIMPLE
        yield from _GAUGES
        for route in self._routes:
            yield f"sum/{route}"
            yield from (f"status/{route}/{status}" for status in _STATUSES)
            yield from (f"bucket/{route}/{bound:g}" for bound in DURATION_BOUNDS_S)

    def _get(self, start: int, name: str) -> float:
        return self._values[start + self._slots[name]]


_STREAMS = 16
_UPKEEP = 2


class Service:
    """The stores, payloads, keys, threads and metrics of one process.

    Attributes:
        config: How the server is set up.
        guard: Lets requests in.
        vault: Keeps the payloads of artifacts.
        stores: The stores of the workspaces.
        run_keys: Counts the different metrics of runs.
        threads: Where whatever blocks is done.
        bodies: The room that requests' bodies have.
        places: Leaves room for requests of other workspaces.
        metrics: What /metrics tells.
        control: The control database.
        streams: Bounds how many replies of rows are made at once: each holds a
            connection to its store for as long as its reader takes.
        upkeep: Bounds how many workspaces are measured or cleared up at once.
        is_draining: The server is about to end; it is not ready any more.
        working: Requests that are being worked on.

    Raises:
        SchemaValidationError: The configuration names something that cannot be.
        SessionStoreError: A database is of another version, or cannot be reached.
    """

    def __init__(self, config: ServiceConfig, metrics: ServerMetrics) -> None:
        self._deployment = Deployment(config)
        self._deployment.check()
        self.config = config
        self.metrics = metrics
        self.control = self._deployment.control
        self.threads = WorkThreads()
        self.guard = KeyGuard(
            self.control,
            self.threads,
            config.limits,
            cache_s=config.key_cache_s,
            workers=config.workers,
        )
        self.vault = PayloadVault(self._deployment.payload_root, self.threads)
        self.stores = WorkspaceStores(
            self._deployment.open_store,
            self.threads,
            limit=config.open_stores,
            groups=self._deployment.groups,
        )
        self.run_keys = RunKeys(config.limits.keys_per_run)
        self.bodies = BodyRoom(config.limits)
        self.places = FairPlaces(config.limits.concurrent_requests)
        self.is_draining = False
        self.working = 0
        self.streams = FairBudget(
            _STREAMS, _STREAMS // 2, "the server is sending its maximum number of replies with rows"
        )
        self.upkeep = FairBudget(
            _UPKEEP, 1, "the server is running its maximum number of maintenance tasks. Retry later"
        )

    async def probe(self) -> None:
        """Ask the control database whether it answers.

        Raises:
            QuarkError: It does not.
        """
        await self.threads.key(self.control.probe)

    async def close(self) -> None:
        """Finish what was accepted, and give up stores and threads."""
        await self.guard.note_use()
        await self.stores.close()
        self.threads.close()
        self._deployment.close()


_NUMBER_DIGITS = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a route that stands in the query or in a header.

    Attributes:
        name: Its name.
        schema: JSON schema of its value.
        summary: What it means.
        place: query or header.
    """

    name: str
    schema: dict[str, Any]
    summary: str
    place: str = "query"


@dataclass(frozen=True, slots=True)
class ServiceRoute:
    """One line of the table from which routes, checks and their description are made.

    Attributes:
        method, path: What it answers to; the path's parts in braces are parameters.
        handler: Serves it; its docstring says for people what it does.
        scope: What the key must allow; None where no key is needed.
        request: Struct that the body is, or None.
        reply: Struct of the reply, or None where it is none.
        parameters: Of the query and of headers.
        media: Media types of the reply.
        status: HTTP status of success.
        notes: More for people.
    """

    method: str
    path: str
    handler: Callable[[Call], Awaitable[ASGIApp]]
    scope: Scope | None
    request: Any = None
    reply: Any = None
    parameters: tuple[Parameter, ...] = ()
    media: tuple[str, ...] = (JSON, MSGPACK)
    status: int = 200
    notes: str = ""

    @property
    def summary(self) -> str:
        """One line for people."""
        return (self.handler.__doc__ or "").partition("\n")[0]


_NOBODY = Principal("", "", frozenset())


@dataclass(slots=True)
class Call:
    """One request.

    Attributes:
        service: What serves it.
        route: The route it takes.
        request: The request.
        request_id: What the log calls it.
        principal: Whom its key belongs to.
    """

    service: Service
    route: ServiceRoute
    request: Request
    request_id: str
    principal: Principal = field(default=_NOBODY)

    @property
    def media(self) -> str:
        """Media type of the reply: msgpack where it is asked for, else JSON."""
        return choose_media(self.request.headers.get("accept"))

    @property
    def run_id(self) -> str:
        """The run that the path names.

        Raises:
            ServiceFailure: It cannot be the id of a run.
        """
        return check_run_id(self.path_text("run_id"))

    @property
    def sha256(self) -> str:
        """The payload that the path names.

        Raises:
            ServiceFailure: It is no SHA-256.
        """
        given = self.path_text("sha256")
        if SHA256.fullmatch(given) is None:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                "sha256 must be 64 lowercase hexadecimal digits",
                field="sha256",
            )
        return given

    def path_text(self, name: str) -> str:
        """A parameter of the path.

        Raises:
            ServiceFailure: It is too long.
        """
        return self.check_text(str(self.request.path_params[name]), name)

    def query_text(self, name: str) -> str | None:
        """A parameter of the query, or None.

        Raises:
            ServiceFailure: It is given more than once, or too long.
        """
        given = self.request.query_params.getlist(name)
        if len(given) > 1:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT, f"{name} is given {len(given)} times", field=name
            )
        return self.check_text(given[0], name) if given else None

    def query_number(self, name: str, default: int | None = None) -> int | None:
        """A parameter of the query that is a number from 0 on.

        Raises:
            ServiceFailure: It is no such number.
        """
        given = self.query_text(name)
        if given is None:
            return default
        if not given.isascii() or not given.isdigit() or len(given) >= _NUMBER_DIGITS:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                f"{name} must be a non-negative number, got {given!r:.60}",
                field=name,
            )
        return int(given)

    def body(self) -> AbstractAsyncContextManager[RequestBody]:
        """The body, whose memory counts until the context is left; see `hold_body`."""
        service = self.service
        return hold_body(
            self.request,
            service.config.limits,
            service.bodies,
            self.principal,
            service.threads,
        )

    async def decode(self, kind: type[T]) -> T:
        """The struct that the body is; for bodies that are small, or kept.

        Raises:
            ServiceFailure: It is none, or cannot be read.
        """
        async with self.body() as body:
            if len(body.data) <= SMALL_BYTES:
                return body.decode(kind)
            return await self.service.threads.write(body.decode_values, kind)

    def store(self) -> AbstractAsyncContextManager[OpenStore]:
        """The store of the key's workspace; see `WorkspaceStores.lease`."""
        return self.service.stores.lease(self.principal.workspace)

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the workspace's store on a thread."""
        async with self.store() as opened:
            return await self.service.threads.read(getattr(opened.store, method), *args, **kwargs)

    async def read(self, method: str, *args: Any, **kwargs: Any) -> Response:
        """A reply with what a method of the workspace's store returns, made on one thread."""
        async with self.store() as opened:
            return await self.answer(partial(getattr(opened.store, method), *args, **kwargs))

    def name_caller(self, by: str) -> str:
        """The client as it names itself, and its key, which it cannot make up.

        Raises:
            SchemaValidationError: `by` names nobody.
        """
        return f"{check_label(by, 'by')} (key {self.principal.key_id})"

    def reply(self, value: Any, following: str | None = None) -> Response:
        """A reply that holds one small value, in the media type that was asked for.

        Args:
            value: It.
            following: What `after` has to be for what follows it; None where nothing does.
        """
        headers = None if following is None else {NEXT_PAGE: following}
        return make_reply(value, self.media, status=self.route.status, headers=headers)

    async def answer(self, make: Callable[[], Any], following: str | None = None) -> Response:
        """A reply whose value is made and encoded on a thread: others must not wait for it."""
        return await self.service.threads.read(lambda: self.reply(make(), following))

    def check_text(self, text: str, name: str) -> str:
        """A text that names something.

        Raises:
            ServiceFailure: It is too long, or nothing that a database can hold.
        """
        if len(text) > self.service.config.limits.key_bytes:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                f"{name} has {len(text)} characters, but this server accepts "
                f"{self.service.config.limits.key_bytes} (limit key_bytes)",
                field=name,
            )
        return check_text(text, name)
