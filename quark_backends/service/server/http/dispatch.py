"""Finds the route of a request by the parts of its path, without trying one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["RouteDispatch", "RouteEntry"]


class RouteEntry(NamedTuple):
    """A route: its method, its path with `{name}` for what varies, and what serves it."""

    method: str
    path: str
    endpoint: ASGIApp


class _Place:
    """What may come after the beginning of a path."""

    __slots__ = ("endpoint", "literals", "names", "varying")

    def __init__(self) -> None:
        self.literals: dict[str, _Place] = {}
        self.varying: _Place | None = None
        self.endpoint: ASGIApp | None = None
        self.names: tuple[str, ...] = ()


class RouteDispatch:
    """Serves requests of known routes; leaves all others to the application inside.

    That has the same routes, and says which requests are none.

    Args:
        app: What is inside.
        routes: In the order in which they are tried there.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[RouteEntry]) -> None:
        self._app = app
        self._roots: dict[str, _Place] = {}
        for route in routes:
            self._add(route)

    def _add(self, route: RouteEntry) -> None:
        place = self._roots.setdefault(route.method, _Place())
        names = []
        for part in route.path.split("/"):
            if part.startswith("{"):
                names.append(part[1:-1])
                if place.varying is None:
                    place.varying = _Place()
                place = place.varying
            elif place.varying is not None and part not in place.literals:
                return  # behind one that may fit, too: whoever tries them in turn decides
            else:
                place = place.literals.setdefault(part, _Place())
        if place.endpoint is None:
            place.endpoint, place.names = route.endpoint, tuple(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and not scope.get("root_path"):
            place = self._roots.get(scope["method"])
            varying = []
            for part in scope["path"].split("/"):
                if place is None:
                    break
                following = place.literals.get(part)
                if following is None and part:
                    varying.append(part)
                    following = place.varying
                place = following
            if place is not None and place.endpoint is not None:
                scope["path_params"] = dict(zip(place.names, varying, strict=True))
                await place.endpoint(scope, receive, send)
                return
        await self._app(scope, receive, send)
