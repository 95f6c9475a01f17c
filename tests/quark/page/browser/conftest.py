"""A real browser before a real server: one Chromium and one tab for all tests of this folder.

A new tab costs three times as much of the processor as a visit in one that is there. So each test
begins in the same one, which is left empty behind it; what needs a browser of its own says so.

Playwright keeps an event loop running in this thread for as long as it is open, beside which no
other test could run one: so it is closed when the tests of this folder are left.
"""

import os
import shutil
import socket
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import pytest
from browser_runs import log_hostile, log_run, make_exploding, make_falling

from quark.page.routes.page_source import open_source
from quark.page.server import PageServer, bind_socket

DEADLINE_S = 60
VIEWPORT = {"width": 1280, "height": 900}
_STILL_LOOKS = 6
# Fewer than fit between two polls of a page.
_QUIET_LOOKS = 3
# What a tab that is there can be told; anything else needs one of its own.
_SHARED_OPTIONS = {"viewport", "color_scheme"}
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # So that strangers have names; none of them is ever looked up.
    "--host-resolver-rules=MAP *.example 127.0.0.1",
]
# What Chromium itself says of an answer that is no success, or of none.
_LOADING = "Failed to load resource"


def find_chromium():
    """Where the browser is, or None."""
    asked = os.environ.get("QUARK_CHROMIUM")
    return asked or next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """The browser of this process, opened when it is first wanted."""

    def __init__(self):
        self._playwright = None
        self._browser = None
        self._tab = None

    def open(self):
        if self._browser is None:
            is_required = os.environ.get("QUARK_REQUIRE_BROWSER") == "1"
            path = find_chromium()
            try:
                from playwright.sync_api import sync_playwright
            except ImportError:
                if is_required:
                    raise
                pytest.skip("needs playwright: pip install playwright")
            if path is None:
                if is_required:
                    pytest.fail("QUARK_REQUIRE_BROWSER=1, and there is no Chromium")
                pytest.skip("needs Chromium: apt-get install chromium, or QUARK_CHROMIUM=PATH")
            self._playwright = sync_playwright().start()
            self._browser = self._playwright.chromium.launch(executable_path=path, args=_FLAGS)
        return self._browser

    def open_tab(self):
        """The tab that tests share, one after the other."""
        if self._tab is None:
            self._tab = self.open().new_context(viewport=VIEWPORT).new_page()
        return self._tab

    def close(self):
        if self._playwright is None:
            return
        if self._browser is not None:
            self._browser.close()
        self._playwright.stop()
        self._playwright = self._browser = self._tab = None


_opened = Browser()


@pytest.fixture
def chromium():
    return _opened.open()


@pytest.fixture
def tab(chromium):
    return _opened.open_tab()


_shared = {}


# No fixture has the scope of a folder that is no package.
@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    result = yield
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        _opened.close()
        while _shared:
            _shared.popitem()[1].close()
    return result


class Server:
    """A page's server in a thread; `stop` and `start` it as often as a test likes."""

    def __init__(self, storage_dir, base="", backend=None):
        self.storage_dir = storage_dir
        self.base = base
        self.backend = backend
        # Nobody else gets the port while the server is stopped: it is bound, and does not listen.
        self._place = socket.socket()
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._place.bind(("127.0.0.1", 0))
        self.port = self._place.getsockname()[1]
        self._thread = None
        self.start()

    def start(self):
        self._source = open_source(self.storage_dir, self.backend)
        bound = bind_socket("127.0.0.1", self.port)
        self.page = PageServer(self._source, bound, base=self.base)
        self._thread = threading.Thread(target=self.page.run, daemon=True)
        self._thread.start()

    def stop(self):
        if self._thread is None:
            return
        self.page.end()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "\n".join(
            "".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()
        )
        self._thread = None
        self._source.close()

    def close(self):
        self.stop()
        self._place.close()


@pytest.fixture(scope="session")
def serve_shared():
    """Serves a folder to all tests of this process, until it leaves this folder of tests."""

    def serve(storage_dir, backend=None):
        if (storage_dir, backend) not in _shared:
            _shared[storage_dir, backend] = Server(storage_dir, backend=backend)
        return _shared[storage_dir, backend]

    return serve


@pytest.fixture
def serve():
    """Serves a folder to this test alone."""
    servers = []

    def begin(storage_dir, base=""):
        servers.append(Server(storage_dir, base))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


class Visitor:
    """A tab of the browser, and what a test asks of it."""

    def __init__(self, page, server):
        self.server = server
        self.page = page
        self.context = page.context
        self.context.set_default_timeout(1000 * DEADLINE_S)
        self.messages, self.errors, self.requests = [], [], []
        self.asked = set()
        self._listeners = {
            "console": lambda message: self.messages.append(message.text),
            "pageerror": lambda error: self.errors.append(str(error)),
            "request": self._note_request,
            "requestfinished": lambda request: self.asked.discard(request),
            "requestfailed": lambda request: self.asked.discard(request),
            "dialog": lambda dialog: self.errors.append(f"dialog: {dialog.message}"),
        }
        for event, listener in self._listeners.items():
            page.on(event, listener)

    def forget(self):
        """Have nothing of what an earlier test had the page keep in the browser."""
        if self.server.page is None:
            return  # a file keeps nothing
        session = self.context.new_cdp_session(self.page)
        kept = {"origin": self.server.page.url.rstrip("/"), "storageTypes": "local_storage"}
        session.send("Storage.clearDataForOrigin", kept)
        session.detach()

    def leave(self):
        """Leave the tab to the next one: empty, connected, alone."""
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)
        for other in self.context.pages:
            if other is not self.page:
                other.close()
        self.page.unroute_all(behavior="ignoreErrors")
        self.context.unroute_all(behavior="ignoreErrors")
        self.context.set_offline(False)
        self.page.goto("about:blank")

    def _note_request(self, request):
        self.requests.append(request.url)
        self.asked.add(request)

    def sign_in(self):
        # Without a page: what the browser's context holds is the cookie.
        answer = self.context.request.get(self.server.page.make_link(), max_redirects=0)
        assert answer.status == 303
        return self

    def go(self, path=""):
        self.page.goto(self.server.page.url + path)
        return self

    def evaluate(self, script, argument=None):
        return self.page.evaluate(script, argument)

    def wait(self, script, argument=None):
        """The first truthy value of a function; our own policy forbids to wait within the page.

        What the function asks may not be there yet, or be gone with the page before: a function
        that fails is asked again as well.
        """
        deadline = time.monotonic() + DEADLINE_S
        while not (found := self._try(script, argument))[0]:
            assert time.monotonic() < deadline, (
                f"{script} ({argument}) stayed {found}; {self.messages} {self.errors}\n"
                + self.page.inner_text("body")[:2000]
            )
            self.page.wait_for_timeout(20)
        return found[0]

    def _try(self, script, argument):
        from playwright.sync_api import Error

        try:
            return self.evaluate(script, argument), None
        except Error as error:
            return None, error

    def wait_for_text(self, text):
        self.wait("text => document.body.innerText.includes(text)", text)

    def wait_for_chart(self, name):
        """The chart of this name; what is drawn of the same beside a finding is none."""
        return self.wait(
            """name => {
            const found = window.quark?.charts.find(name);
            return found?.type !== "evidence" && found;
        }""",
            name,
        )

    def wait_for_request(self, text):
        """Wait until the page has asked for an address with this text in it."""
        deadline = time.monotonic() + DEADLINE_S
        while not any(text in url for url in self.requests):
            assert time.monotonic() < deadline, self.requests[-20:]
            self.page.wait_for_timeout(20)

    def wait_until_looked_at(self):
        """Wait for the findings, which stand above the charts and are marked in them."""
        self.wait("!document.body.innerText.includes('The analysis is running')")
        self.wait_until_quiet()

    def wait_until_quiet(self):
        """Wait until the page asks for nothing any more, for now."""
        deadline = time.monotonic() + DEADLINE_S
        looks = 0
        while looks < _QUIET_LOOKS:
            assert time.monotonic() < deadline, [request.url for request in self.asked]
            self.page.wait_for_timeout(100)
            looks = 0 if self.asked else looks + 1

    def find_place(self, selector, nth=0):
        """Where an element is, once what comes in above it has moved it no more."""
        self.wait_until_looked_at()
        places = []
        deadline = time.monotonic() + DEADLINE_S
        while len(places) < _STILL_LOOKS or any(
            place != places[-1] for place in places[-_STILL_LOOKS:]
        ):
            assert time.monotonic() < deadline, places[-_STILL_LOOKS:]
            self.page.wait_for_timeout(100)
            places.append(self.page.locator(selector).nth(nth).bounding_box())
        return places[-1]

    def press(self, *keys):
        for key in keys:
            self.page.keyboard.press(key)

    def check_axe(self):
        """Whether axe finds something that keeps people out."""
        self.evaluate((Path(__file__).parent / "axe" / "axe.min.js").read_text("utf-8"))
        found = self.evaluate(
            """() => axe.run(document, {runOnly: {type: "tag", values: ["wcag2a", "wcag2aa",
            "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}}).then(result =>
            result.violations.map(rule => [rule.id, rule.nodes.slice(0, 3).map(
            node => node.html + node.failureSummary)]))"""
        )
        assert found == []

    def check_quiet(self, *, may_be_lost=False):
        """Nothing was said, nothing failed, and nobody but the server was asked."""
        said = [text for text in self.messages if not (may_be_lost and _LOADING in text)]
        assert (said, self.errors) == ([], [])
        strangers = [
            url
            for url in self.requests
            if not url.startswith((f"http://127.0.0.1:{self.server.port}/", "data:", "blob:"))
        ]
        assert strangers == []


@pytest.fixture
def visit(chromium, tab, serve):
    """Opens a page of a server; at the end of the test it must have been quiet.

    It needs `serve` only to be left before it: a page asks until it is left.
    """
    visitors, own = [], []
    lost, attacked = [], []

    def begin(server, path=None, *, may_be_lost=False, is_attacked=False, **options):
        is_shared = not visitors and options.keys() <= _SHARED_OPTIONS
        options = {"viewport": VIEWPORT, "color_scheme": "light", **options}
        if is_shared:
            visitor = Visitor(tab, server)
            tab.set_viewport_size(options["viewport"])
            tab.emulate_media(color_scheme=options["color_scheme"], media="null")
            visitor.forget()
        else:
            visitor = Visitor(chromium.new_context(**options).new_page(), server)
            own.append(visitor)
        visitors.append(visitor)
        if may_be_lost:
            lost.append(visitor)
        if is_attacked:
            # What the browser refuses to others it says, and others are asked.
            attacked.append(visitor)
        if path is not None:
            visitor.sign_in().go(path)
        return visitor

    yield begin
    for visitor in visitors:
        if visitor in own:
            visitor.page.close()
            visitor.context.close()
        else:
            visitor.leave()
    for visitor in visitors:
        if visitor not in attacked:
            visitor.check_quiet(may_be_lost=visitor in lost)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Runs that tests only look at."""
    root = tmp_path_factory.mktemp("runs")
    log_run(root, "quiet", {"train/loss": make_falling(200), "val/loss": make_falling(200)[::4]},
            name="quiet", tags=["baseline"], config={"lr": 0.05, "optimizer": {"name": "sgd"}},
            notes="see https://quark.example/notes and nothing else", analyzes=False)  # fmt: skip
    exploding = {"train/loss": make_exploding(300), "grad_norm": make_exploding(300)}
    log_run(root, "exploding", {**exploding, "system/cpu": [1.0] * 30},
            name="exploding", config={"lr": 50.0})  # fmt: skip
    with warnings.catch_warnings():
        # Quark says that it stores odd names encoded.
        warnings.simplefilter("ignore", RuntimeWarning)
        log_hostile(root)
    log_run(root, "one-point", {"train/loss": [1.0]}, name="one point")
    log_run(root, "only-nan", {"train/loss": [float("nan")] * 20}, name="only NaN")
    return root
