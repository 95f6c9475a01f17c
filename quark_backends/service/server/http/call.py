"""One request on its way through the service, and the table's entry that it belongs to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quark_backends.service.protocol import RUN_ID, SHA256, ErrorCode
from quark_backends.service.server.config import Principal, Scope
from quark_backends.service.server.http.replies import ServiceFailure, choose_media, make_reply
from quark_backends.service.server.http.request_bodies import SMALL_BYTES, RequestBody, hold_body
from quark_core.config.arguments import check_label

if TYPE_CHECKING:
    from quark_backends.service.server.service import Service
    from quark_backends.service.server.workspaces.stores import OpenStore

T = TypeVar("T")

_NUMBER_DIGITS = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a route that stands in the query or in a header.

    Attributes:
        name: Its name.
        schema: JSON schema of its value.
        summary: What it means.
        place: query or header.
        required: Whether it must be given.
    """

    name: str
    schema: dict[str, Any]
    summary: str
    place: str = "query"
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRoute:
    """One line of the table from which routes, checks and their description are made.

    Attributes:
        method, path: What it answers to; the path's parts in braces are parameters.
        handler: Serves it.
        summary: One line for people.
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
    summary: str
    scope: Scope | None
    request: Any = None
    reply: Any = None
    parameters: tuple[Parameter, ...] = ()
    media: tuple[str, ...] = ()
    status: int = 200
    notes: str = ""


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
        given = self.path_text("run_id")
        if RUN_ID.fullmatch(given) is None:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                "run_id must be 1 to 128 letters, digits, '.', '_' and '-' that do not begin "
                f"with '.', got {given!r:.200}",
                field="run_id",
            )
        return given

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
        return self._check_text(str(self.request.path_params[name]), name)

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
        return self._check_text(given[0], name) if given else None

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
                f"{name} must be a number from 0 on, got {given!r:.60}",
                field=name,
            )
        return int(given)

    def query_flag(self, name: str) -> bool:
        """A parameter of the query that is true or false; false where it is absent.

        Raises:
            ServiceFailure: It is neither.
        """
        given = self.query_text(name)
        if given not in (None, "0", "1", "false", "true"):
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                f"{name} must be true or false, got {given!r:.60}",
                field=name,
            )
        return given in ("1", "true")

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
        """What a method of the workspace's store returns, called on a thread."""
        async with self.store() as opened:
            return await self.service.threads.read(getattr(opened.store, method), *args, **kwargs)

    def name_caller(self, by: str) -> str:
        """Who asks, as the client says, and by which key, which it cannot make up.

        Raises:
            SchemaValidationError: `by` names nobody.
        """
        return f"{check_label(by, 'by')} (key {self.principal.key_id})"

    def reply(self, value: Any) -> Response:
        """A reply that holds one small value, in the media type that was asked for."""
        return make_reply(value, self.media, status=self.route.status)

    async def answer(self, make: Callable[[], Any]) -> Response:
        """A reply whose value is made and encoded on a thread: others must not wait for it."""
        return await self.service.threads.read(lambda: self.reply(make()))

    def _check_text(self, text: str, name: str) -> str:
        if len(text) > self.service.config.limits.key_bytes:
            raise ServiceFailure(
                ErrorCode.INVALID_ARGUMENT,
                f"{name} has {len(text)} characters; this server takes "
                f"{self.service.config.limits.key_bytes} (limit key_bytes)",
                field=name,
            )
        return check_text(text, name)


def check_text(text: str, name: str) -> str:
    """A text that a database can hold.

    Raises:
        ServiceFailure: There is a NUL in it, or half of a surrogate pair.
    """
    is_whole = text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
    if "\x00" in text or not is_whole:
        raise ServiceFailure(
            ErrorCode.INVALID_ARGUMENT, f"{name} holds what no text may hold", field=name
        )
    return text
