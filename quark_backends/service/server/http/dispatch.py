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

    __slots__ = ("endpoint", "literals", "names", "order", "varying")

    def __init__(self) -> None:
        self.literals: dict[str, _Place] = {}
        self.varying: _Place | None = None
        self.endpoint: ASGIApp | None = None
        self.names: tuple[str, ...] = ()
        self.order = 0


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
        for order, route in enumerate(routes):
            self._add(route, order)

    def _add(self, route: RouteEntry, order: int) -> None:
        place = self._roots.setdefault(route.method, _Place())
        names = []
        for part in route.path.split("/"):
            if part.startswith("{"):
                names.append(part[1:-1])
                if place.varying is None:
                    place.varying = _Place()
                place = place.varying
            else:
                place = place.literals.setdefault(part, _Place())
        if place.endpoint is None:
            place.endpoint, place.names, place.order = route.endpoint, tuple(names), order

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and not scope.get("root_path"):
            found = self._find(scope["method"], scope["path"])
            if found is not None:
                endpoint, scope["path_params"] = found
                await endpoint(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _find(self, method: str, path: str) -> tuple[ASGIApp, dict[str, str]] | None:
        """What serves a path, and the parts of it that vary; of several the first route's."""
        root = self._roots.get(method)
        places: list[tuple[_Place, tuple[str, ...]]] = [] if root is None else [(root, ())]
        for part in path.split("/"):
            following = []
            for place, varying in places:
                if (literal := place.literals.get(part)) is not None:
                    following.append((literal, varying))
                if place.varying is not None and part:
                    following.append((place.varying, (*varying, part)))
            places = following
            if not places:
                return None
        first: tuple[_Place, tuple[str, ...]] | None = None
        for each in places:
            if each[0].endpoint is not None and (first is None or each[0].order < first[0].order):
                first = each
        if first is None or first[0].endpoint is None:
            return None
        return first[0].endpoint, dict(zip(first[0].names, first[1], strict=True))
