"""A service with the page of its team, and people who log in there without a browser."""

import contextlib
import html
import re

import httpx
from service_fixtures import ingest, serving

from quark.cli.team_page import make_team_page
from quark_core.testing.fakes import BatchMaker


@contextlib.contextmanager
def serving_team(folder, **settings):
    """A server as `quark serve --ui` runs it, in a thread."""
    with serving(folder, make_page=make_team_page, ui=True, **settings) as server:
        yield server


def find_id(key):
    return key.split("_")[1]


def add_run(server, workspace, run_id, *, tags=(), ended=True):
    """A run of one point."""
    maker = BatchMaker(run_id)
    batches = [maker.start(tags=list(tags)), maker.metrics(("loss", 0, 0.5))]
    if ended:
        batches.append(maker.lifecycle(("status", {"status": "completed"})))
    with server.client(workspace, "ingest") as client:
        assert ingest(client, *batches).status_code == 200


class Person:
    """Somebody with a browser of their own."""

    def __init__(self, server, **settings):
        self.server = server
        self.http = httpx.Client(base_url=server.url, timeout=60, verify=False, **settings)
        self.csrf = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.close()

    def ask_for_form(self, path="/login"):
        """The hidden fields of the form."""
        answer = self.http.get(path)
        assert answer.status_code == 200
        fields = re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', answer.text)
        return {name: html.unescape(value) for name, value in fields}

    def send_form(self, key, fields=None, *, origin=None, **more):
        fields = {**(self.ask_for_form() if fields is None else fields), "key": key, **more}
        headers = {"origin": origin or self.server.url}
        return self.http.post("/login", data=fields, headers=headers)

    def log_in(self, key, **more):
        answer = self.send_form(key, **more)
        assert answer.status_code == 303, answer.text
        self.csrf = self.get("/api/session").json()["csrf"]
        return answer

    @property
    def cookie(self):
        (name,) = [name for name in self.http.cookies if "team" in name]
        return name, self.http.cookies[name]

    def get(self, path, **parameters):
        return self.http.get(path, params=parameters or None)

    def post(self, path, body=None, **headers):
        head = {"origin": self.server.url, "quark-csrf": self.csrf, **headers}
        sent = {name: value for name, value in head.items() if value is not None}
        return self.http.post(path, json={} if body is None else body, headers=sent)

    def list_runs(self, **parameters):
        return [row["id"] for row in self.get("/api/runs", **parameters).json()["rows"]]
