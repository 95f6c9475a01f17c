"""A run in a notebook's cell, live: what is new of it goes to the browser as it comes.

Needs anywidget, which is imported by who asks for a view and by nobody else. Whatever fails here
is told once on the log; neither the thread that trains nor the cell notices.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets
from IPython.display import DisplayHandle, display

from quark.page.cards import show_still
from quark.page.live_feed import LiveFeed
from quark.page.report_file import link_widget
from quark_core.backends.registry import default_registry
from quark_core.errors import QuarkError
from quark_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quark.page.api.source import PageSource
    from quark_core.backends.contract import DeliveryReport
    from quark_core.records.runs import RunContext
    from quark_core.sessions.session import TrainingSession

_log = logging.getLogger("quark")

_EVERY_S = 1.0
# Of one core: who logs faster than that can be read is looked at less often.
_SHARE = 0.02
_LONGEST_S = 10.0
# Something is said at least this often, so that the browser knows whether anybody is there.
_BEAT_S = 5.0
_STILL_EVERY_S = 10.0
_END_S = 5.0
# All of it comes again after so many parts, then after twice as many: who has missed one, or came
# later, is put right without being asked.
_FIRST_PARTS, _MOST_PARTS = 4, 64


class RunWidget(anywidget.AnyWidget):
    """What the browser has of a view: the newest whole, and the newest part behind it.

    Attributes:
        key: Tells it from others in the browser.
        whole, news: Packs of `LiveFeed`.
    """

    key = traitlets.Unicode().tag(sync=True)
    whole = traitlets.Bytes().tag(sync=True)
    news = traitlets.Bytes().tag(sync=True)

    def __init__(self, key: str) -> None:
        # Here, and not in the class: it is made of the page's modules when it is first wanted.
        self._esm = link_widget()
        super().__init__(key=key)


class LiveView:
    """One run that is shown live, in as many cells as it was asked for.

    A thread of its own reads what is new, at most once a second and in at most a fiftieth of the
    time, and hands it to the browser. It rests while nobody looks, and ends with the run: then a
    card with the report stands where the view was, which needs neither the kernel nor scripts.

    Args:
        session: The run.
        source: Where it lies.
    """

    def __init__(self, session: TrainingSession, source: PageSource) -> None:
        self._session = session
        self._feed = LiveFeed(source, session.open_run)
        self._widget = RunWidget(str(session.run_id))
        self._widget.on_msg(self._hear)
        self._lock = threading.Lock()
        self._places: list[tuple[DisplayHandle, DisplayHandle]] = []
        self._lookers: dict[str, int] = {}
        self._wanted = threading.Event()
        self._rests = threading.Event()
        self._ending = threading.Event()
        self._told = False
        self._parts = self._parts_due = 0
        self._sent_s = self._stilled_s = 0.0
        self.sent_bytes = self.sent_count = 0
        """What went to the browser as packs so far."""
        self.spent_s = 0.0
        """Time of the processor that the thread has taken so far."""
        self._thread = threading.Thread(target=self._watch, name="quark-notebook", daemon=True)

    def start(self) -> None:
        """Read what there is, and begin to watch.

        Raises:
            QuarkError: The run cannot be read.
        """
        self._send(self._feed.read_whole())
        self._thread.start()

    def show(self) -> None:
        """Show it in the cell that runs now."""
        bundle = self._widget._repr_mimebundle_()
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        data = {**(data or {}), "text/plain": repr(self._session)}
        place = display(data, metadata=metadata, raw=True, display_id=True)
        still = display(self._make_still(), raw=True, display_id=True)
        with self._lock:
            self._places.append((place, still))

    @property
    def is_live(self) -> bool:
        """Whether it still follows its run."""
        return self._thread.is_alive() and not self._ending.is_set()

    def close(self) -> None:
        """The run has ended: show its last state; waits for that for 5 s at most."""
        self._ending.set()
        self._wanted.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def _hear(self, _: object, content: Mapping[str, Any], __: object) -> None:
        """What the browser says: how many look, or that it has missed a part."""
        who = content.get("from")
        if isinstance(who, str) and isinstance(content.get("views"), int):
            self._lookers[who] = content["views"]
        if content.get("asks") == "whole":
            self._parts = self._parts_due
        if self._is_looked_at:
            self._wanted.set()

    @property
    def _is_looked_at(self) -> bool:
        """Whether anybody looks; who has not said anything yet may well."""
        return not self._lookers or any(self._lookers.values())

    def _watch(self) -> None:
        """The thread."""
        pause_s = _EVERY_S
        while not self._ending.wait(pause_s):
            if not self._is_looked_at:
                self._rest()
                continue
            before_s = time.thread_time()
            if not self._take_turn():
                break
            spent_s = time.thread_time() - before_s
            self.spent_s += spent_s
            pause_s = min(_LONGEST_S, max(_EVERY_S, spent_s / _SHARE))
        self._ending.set()
        self._finish()

    def _rest(self) -> None:
        """Nobody looks: wait for somebody, who is told all of it."""
        self._wanted.clear()
        if not self._is_looked_at and not self._ending.is_set():
            self._rests.set()
            self._wanted.wait()
            self._rests.clear()
        self._parts = self._parts_due

    def _take_turn(self) -> bool:
        """Send what is new; whether to go on."""
        try:
            try:
                part = self._read()
            except QuarkError as error:
                self._tell("it cannot be read now", error)
                part = self._feed.say(f"The store cannot be read now: {error}")
            now_s = time.monotonic()
            if part is None and now_s - self._sent_s >= _BEAT_S:
                part = self._feed.say("")
            if part is not None:
                self._send(part)
            if now_s - self._stilled_s >= _STILL_EVERY_S:
                self._stilled_s = now_s
                self._update_stills(self._make_still())
        except Exception as error:  # noqa: BLE001 - a browser that is gone is no reason to stop
            self._tell("what is new does not reach the browser", error)
            return False
        return not self._feed.is_over

    def _read(self) -> bytes | None:
        if self._parts < self._parts_due:
            return self._feed.read_news()
        self._parts_due = min(_MOST_PARTS, 2 * self._parts_due or _FIRST_PARTS)
        self._parts = 0
        return self._feed.read_whole()

    def _send(self, part: bytes) -> None:
        """Hand a part to the browser, which is a message that nobody waits for."""
        if self._feed.is_whole:
            self._widget.whole = part
        else:
            self._widget.news = part
            self._parts += 1
        self._sent_s = time.monotonic()
        self.sent_bytes += len(part)
        self.sent_count += 1

    def _finish(self) -> None:
        """Put a card that stays into the places of the view."""
        try:
            self._send(self._feed.read_whole())
            html = self._session._repr_html_() or ""
            with self._lock:
                places = list(self._places)
            said = {"text/html": html, "text/plain": repr(self._session)}
            for place, still in places:
                still.update({"text/html": "", "text/plain": ""}, raw=True)
                place.update(said, raw=True)
            self._widget.close()
        except Exception as error:  # noqa: BLE001 - the run has ended, and that must not fail
            self._tell("its last state cannot be shown", error)
        finally:
            self._feed.close()
            with _views_lock:
                if _views.get(str(self._session.run_id)) is self:
                    del _views[str(self._session.run_id)]

    def _make_still(self) -> dict[str, str]:
        return {"text/html": show_still(self._feed.said, self._feed.lines), "text/plain": ""}

    def _update_stills(self, said: dict[str, str]) -> None:
        with self._lock:
            places = list(self._places)
        for _, still in places:
            still.update(said, raw=True)

    def _tell(self, what: str, error: BaseException) -> None:
        if self._told:
            return
        self._told = True
        _log.warning(
            "run %s is shown in a notebook, and %s (the training goes on): %s: %s",
            self._session.run_id,
            what,
            type(error).__name__,
            error,
        )


_views: dict[str, LiveView] = {}
_views_lock = threading.Lock()


class _EndListener:
    """Closes the view of a run that has ended."""

    @hookimpl
    def quark_run_ended(self, context: RunContext, report: DeliveryReport) -> None:  # noqa: ARG002
        """See `quark_core.hookspecs`."""
        with _views_lock:
            view = _views.pop(str(context.run_id), None)
        if view is not None:
            view.close()


@functools.cache
def _listen() -> None:
    default_registry().register(_EndListener(), name="quark-notebook")


def show_live(session: TrainingSession) -> None:
    """Show a run that goes on in the cell that runs now.

    Raises:
        QuarkError: The run cannot be read.
    """
    from quark.page.report import open_session_source

    key = str(session.run_id)
    with _views_lock:
        view = _views.get(key)
        if view is None or not view.is_live:
            view = LiveView(session, open_session_source(session, flushes=False))
            view.start()
            _views[key] = view
    _listen()
    view.show()
