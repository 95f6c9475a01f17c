"""A client of a page's server as its own page is one, and a plain run to look at."""

import time
import warnings

from starlette.testclient import TestClient

import quark
from quark.page.app import make_app
from quark.page.auth import Guard, Sessions
from quark.page.pack import decode_pack
from quark.page.routes.edits import RootEditor
from quark.page.routes.run_analysis import LocalAnalyzer

PORT = 7410
DEADLINE_S = 60


class PageClient:
    """Asks one server as its own page does; `bare` has no cookie."""

    def __init__(self, source, *, base="", hosts=(), analyzer=None, by=None):
        self.source = source
        self.base = base
        self.sessions = Sessions()
        # The tests of the process itself have one; it takes half a second of the others.
        self.analyzer = analyzer or LocalAnalyzer(source.open_run)
        editor = None if by is None else RootEditor(source.storage_dir)
        self.app = make_app(source, base=base, analyzer=self.analyzer, editor=editor)
        guard = Guard(
            self.app,
            self.sessions,
            cookie_name=f"quark_page_{PORT}",
            hosts=hosts,
            base=base,
            editor=by,
        )
        self.bare = self.connect(guard)
        self.http = self.connect(guard)
        self.http.cookies.set(f"quark_page_{PORT}", self.sessions.trade(self.sessions.make_token()))

    @staticmethod
    def connect(app):
        return TestClient(app, base_url=f"http://127.0.0.1:{PORT}", follow_redirects=False)

    def get(self, path, **parameters):
        # Given no parameters at all, httpx keeps those that stand in the address.
        return self.http.get(f"{self.base}{path}", params=parameters or None)

    def post(self, path, body=b"{}", **headers):
        """Change something, as the page does; a header of None is left out."""
        given = {"origin": f"http://127.0.0.1:{PORT}", **headers}
        given.setdefault("quark-csrf", self.json("/api/session")["csrf"])
        sent = {name: value for name, value in given.items() if value is not None}
        return self.http.post(f"{self.base}{path}", content=body, headers=sent)

    def json(self, path, **parameters):
        answer = self.get(path, **parameters)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        return answer.json()

    def pack(self, path, **parameters):
        answer = self.get(path, **parameters)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/vnd.quark.pack"
        return decode_pack(answer.content)

    def refused(self, status, path, **parameters):
        """The message of an error."""
        answer = self.get(path, **parameters)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["status"] == status
        return error["message"]

    def curves(self, run_id, *keys, **parameters):
        """Key -> list of its curves, each the head with its columns under their own names."""
        head, columns = self.pack(f"/api/runs/{run_id}/series", key=list(keys), **parameters)
        return head, split_curves(head, columns)


def split_curves(head, columns):
    found = {}
    for place, said in enumerate(head["curves"]):
        its = {
            name.partition(".")[2]: values
            for name, values in columns.items()
            if name.startswith(f"{place}.")
        }
        found.setdefault(said["key"], []).append({**said, **its})
    return found


def log_plain_run(storage_dir, *, steps=50, project="p", **arguments):
    """An ended run of two metrics."""
    session = quark.start_run(project=project, storage_dir=storage_dir, **arguments)
    with session, quark.MetricsLogger(session) as metrics, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a name that is encoded
        for step in range(steps):
            metrics.log("train/loss", 1.0 / (step + 1), step=step)
            metrics.log("val/acc@1", step / steps, step=step)
    return session.run_id


def wait_for_analysis(client, run_id):
    end = time.monotonic() + DEADLINE_S
    while True:
        analysis = client.json(f"/api/runs/{run_id}/analysis")["analysis"]
        if analysis["state"] != "computing":
            return analysis
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_for_verdict(client, **parameters):
    return wait_for_answer(client, "/api/compare/verdict", **parameters)


def wait_for_answer(client, path, **parameters):
    end = time.monotonic() + DEADLINE_S
    while (said := client.json(path, **parameters))["state"] == "computing":
        assert time.monotonic() < end
        time.sleep(0.02)
    return said
