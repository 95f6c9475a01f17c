"""The route of a request is that which Starlette would find, trying one after the other."""

import asyncio
import random

from starlette.routing import Match, Route

from quark_backends.service.server.http.dispatch import RouteDispatch, RouteEntry
from quark_backends.service.server.routes import ROUTES


class Named:
    """What serves a route: remembers that it was asked, and with which parameters."""

    def __init__(self, name):
        self.name = name
        self.asked = []

    async def __call__(self, scope, receive, send):
        self.asked.append(dict(scope.get("path_params", {})))


def make_dispatch(paths):
    entries = [RouteEntry(method, path, Named(f"{method} {path}")) for method, path in paths]
    inside = Named("inside")
    return RouteDispatch(inside, entries), entries, inside


def find_by_turns(entries, method, path):
    """The first route that Starlette finds, and its parameters; None where there is none."""
    for entry in entries:
        route = Route(entry.path, entry.endpoint, methods=[entry.method])
        match, found = route.matches({"type": "http", "method": method, "path": path})
        if match is Match.FULL and method == entry.method:
            return entry.endpoint, found["path_params"]
    return None


def ask(dispatch, method, path, **more):
    asyncio.run(dispatch({"type": "http", "method": method, "path": path, **more}, None, None))


def test_every_route_of_the_table_is_found_as_by_turns():
    dispatch, entries, inside = make_dispatch([(each.method, each.path) for each in ROUTES])
    chance = random.Random(3)
    parts = sorted({part for each in ROUTES for part in each.path.split("/") if "{" not in part})
    for _ in range(800):
        entry = chance.choice(entries)
        path = "/".join(
            chance.choice((*parts, "x", "a\nb")) if "{" in part else part
            for part in entry.path.split("/")
        )
        if chance.random() < 0.3:
            path = chance.choice((f"{path}/", path[:-1], path.replace("/", "//", 1), f"{path}/x"))
        method = chance.choice((entry.method, entry.method, "GET", "POST", "HEAD", "BREW"))
        expected = find_by_turns(entries, method, path)
        ask(dispatch, method, path)
        if expected is None:
            assert len(inside.asked) == 1, (method, path)
            inside.asked.clear()
        else:
            endpoint, parameters = expected
            assert endpoint.asked == [parameters], (method, path)
            endpoint.asked.clear()


def test_where_two_fit_the_first_of_the_table_is_taken():
    dispatch, entries, inside = make_dispatch(
        [("GET", "/a/{x}"), ("GET", "/a/b"), ("GET", "/c/d"), ("GET", "/c/{x}"), ("GET", "/a/b/e")]
    )
    for path, place in (("/a/b", 0), ("/c/d", 2), ("/c/e", 3), ("/a/b/e", 4)):
        ask(dispatch, "GET", path)
        assert len(entries[place].endpoint.asked) == 1
        entries[place].endpoint.asked.clear()
    assert not inside.asked


def test_what_is_mounted_under_a_path_is_left_to_the_application_inside():
    dispatch, _, inside = make_dispatch([("GET", "/a")])
    ask(dispatch, "GET", "/a", root_path="/under")
    assert len(inside.asked) == 1
