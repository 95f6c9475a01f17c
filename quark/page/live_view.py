"""A run in a notebook's cell, live: what is new of it goes to the browser as it comes.

Needs anywidget, which is imported by who asks for a view and by nobody else. Whatever fails here
is told once on the log; neither the thread that trains nor the cell notices.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import anywidget
import numpy as np
import traitlets
from IPython.display import DisplayHandle, display

from quark.analysis.health import place_alert
from quark.analysis.metric_roles import find_main_metric
from quark.page.cards import show_still
from quark.page.pack import decode_pack, encode_pack
from quark.page.report import link_widget, open_session_source
from quark.page.routes.analyses import AnalysisDesk
from quark.page.routes.curves import ChangeDesk, pack_series
from quark.page.routes.page_source import PageSource
from quark.page.routes.parameters import Parameters
from quark.page.routes.run_analysis import Analysis, AnalysisProcess
from quark.page.routes.run_details import place_metric
from quark.page.routes.runs import describe_ending, describe_standing
from quark_core.backends.contract import SupportsPrimary
from quark_core.backends.registry import default_registry
from quark_core.errors import QuarkError
from quark_core.hookspecs import hookimpl
from quark_core.records.names import decode_name
from quark_core.system.process import list_members

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark_core.backends.contract import DeliveryReport
    from quark_core.backends.run_summary import RunSummary
    from quark_core.records import AlertRecord
    from quark_core.records.runs import RunContext
    from quark_core.runs.open_run import OpenRun
    from quark_core.sessions.session import TrainingSession

# What is new of a run that goes on, in bounded parts, for who shows it outside of a page.
#
# Reads what the store has and flushes nothing, so the thread that trains never waits for it.

MOST_CURVES = 6
"""So many metrics are drawn."""

_ENTRIES = 300
# Of each curve in one part: a loop of thousands of steps a second is drawn by their extremes.
_NEW_ENTRIES = 40
_MOST_FINDINGS = 4
_MOST_TEXT = 300
_ANALYZED_EVERY_S, _ANALYZED_SHARE = 30.0, 0.05
# Of the pace that is shown.
_PACE_S = 10.0
# An analysis of less than this finds nothing, and the next one comes half a minute later.
_LEAST_STEPS = 20


class _OneLook(PageSource):
    """A source that sums a run up once in a look, whoever asks."""

    def __init__(self, source: PageSource) -> None:
        super().__init__(
            source.reader,
            place=source.place,
            backend=source.backend,
            storage_dir=source.storage_dir,
            specification=source.specification,
            open_run=source.open_run,
        )
        self._known: RunSummary | None = None

    def look(self) -> None:
        """What is asked for from now on is read anew."""
        self._known = None

    def summarize(self, run_id: str) -> RunSummary:
        """See `PageSource`."""
        if self._known is None:
            self._known = super().summarize(run_id)
        return self._known


class _PacedProcess(AnalysisProcess):
    """Analyses that take a twentieth of the time at most, since the training is beside them."""

    every_s = _ANALYZED_EVERY_S

    def analyze(self, run_id: str) -> Analysis:
        """See `RunAnalyzer`."""
        began_s = time.monotonic()
        try:
            return super().analyze(run_id)
        finally:
            spent_s = time.monotonic() - began_s
            self.every_s = max(_ANALYZED_EVERY_S, spent_s / _ANALYZED_SHARE)


class _LiveDesk(AnalysisDesk):
    """Knows what the monitor of a run has found, else what is stored or computed elsewhere."""

    def __init__(self, source: PageSource, run: OpenRun) -> None:
        self._process = _PacedProcess(source)
        super().__init__(source, self._process)
        self._watched = run
        # The process that analyzes opens the store of the root, where another tool's is not.
        self._computes = isinstance(source.reader, SupportsPrimary)

    def find(self, summary: RunSummary) -> Analysis | None:
        found = _read_monitor(self._watched, summary)
        return super().find(summary) if found is None else found

    def request(self, summary: RunSummary) -> Analysis | None:
        found = _read_monitor(self._watched, summary)
        if found is not None:
            return found
        self.live_every_s = self._process.every_s
        has_begun = (summary.newest_step or 0) >= _LEAST_STEPS
        return super().request(summary) if self._computes and has_begun else super().find(summary)


def _read_monitor(run: OpenRun, summary: RunSummary) -> Analysis | None:
    """What the monitor of a run in this process knows; None before it has looked."""
    from quark.analysis.monitor import TrainingMonitor

    monitor = next(
        (each for each in list_members(run.writers) if isinstance(each, TrainingMonitor)), None
    )
    if monitor is None or monitor.result is None:
        return None
    raised = {(alert.rule_id, alert.culprit): alert for alert in monitor.alerts}
    return Analysis(
        state="computed",
        at=summary.last_metric_at,
        alerts=tuple(raised.values()),
        scores=monitor.result.health_scores,
    )


class LiveFeed:
    """Reads one run again and again; for one thread at a time.

    Each part is a pack, as `docs/contributing/page-api.md` has it: its head says in `number` which
    part it is, in `whole` whether all curves are in it or only what is to be put behind them.
    What has not changed since the part before is left out of the head.

    Args:
        source: Where the run lies; not closed with the feed.
        run: The run, as it is open here.
    """

    def __init__(self, source: PageSource, run: OpenRun) -> None:
        self._source = _OneLook(source)
        self._run_id = str(run.context.run_id)
        self._desk = _LiveDesk(source, run)
        self._changes = ChangeDesk(self._source, self._desk)
        self._keys: tuple[str, ...] = ()
        self._cursor = ""
        self._number = 0
        self._pace: deque[tuple[float, int]] = deque()
        self.said: dict[str, Any] = {}
        """What the heads of all parts together say."""
        self.lines: dict[str, list[NDArray[Any]]] = {}
        """Name of each metric -> steps and values of all parts together."""
        self.is_whole = False
        """Whether the newest part has all curves in it."""
        self.is_over = False
        """Whether the run had ended, as the store knows it, when it was last read."""

    def read_whole(self) -> bytes:
        """All that is shown of the run: at most `MOST_CURVES` curves of 300 entries.

        Raises:
            QuarkError: The store cannot be read.
        """
        self._source.look()
        summary = self._source.summarize(self._run_id)
        self._keys = _choose_metrics(summary)
        columns: Mapping[str, Any] = {}
        curves: Sequence[Any] = ()
        if self._keys:
            asked = [("key", key) for key in self._keys]
            pack = pack_series(
                self._source,
                self._desk,
                self._run_id,
                Parameters([*asked, ("entries", str(_ENTRIES))]),
            )
            head, columns = decode_pack(pack)
            self._cursor, curves = head["cursor"], head["curves"]
        else:
            self._cursor = self._changes.begin(summary)
        self.said = {}
        return self._pack(summary, curves, columns, whole=True)

    def read_news(self) -> bytes | None:
        """What came since; None where nothing did.

        Raises:
            QuarkError: The store cannot be read.
        """
        if not self._number:
            return self.read_whole()
        self._source.look()
        asked = [("key", key) for key in self._keys]
        pack = self._changes.pack(
            self._run_id,
            Parameters([*asked, ("cursor", self._cursor), ("entries", str(_NEW_ENTRIES))]),
        )
        if pack is None:
            return None
        head, columns = decode_pack(pack)
        summary = self._source.summarize(self._run_id)
        if head["reset"] or _choose_metrics(summary) != self._keys:
            return self.read_whole()
        self._cursor = head["cursor"]
        return self._pack(summary, head["curves"], columns, whole=False)

    def say(self, note: str) -> bytes:
        """A part that only says something."""
        return self._encode({"note": note}, (), {}, whole=False)

    def close(self) -> None:
        """Compute no more."""
        self._desk.close()

    def _pack(
        self,
        summary: RunSummary,
        curves: Sequence[Any],
        columns: Mapping[str, Any],
        *,
        whole: bool,
    ) -> bytes:
        self.is_over = summary.state != "running"
        self._keep_lines(curves, columns, whole=whole)
        analysis = self._desk.request(summary)
        run = summary.stored.run
        standing = describe_standing(self._source, self._desk, summary)
        says = {
            "run": {
                "id": run.id,
                "name": run.name,
                "project": summary.stored.project.name,
                "tags": list(run.tags),
                "state": summary.state,
                "ending": describe_ending(summary.stored),
                "newest_step": summary.newest_step,
            },
            "progress": {
                **standing["progress"],
                **self._measure_pace(summary, standing["progress"]),
            },
            "health": standing["health"],
            "findings": [] if analysis is None else _list_findings(analysis.alerts),
            "finding_count": 0 if analysis is None else sum(map(_is_grave, analysis.alerts)),
            "metric_count": len(summary.metrics),
            "names": [decode_name(key) for key in self._keys],
            "note": "",
        }
        news = {name: value for name, value in says.items() if self.said.get(name) != value}
        return self._encode(news, curves, columns, whole=whole)

    def _measure_pace(self, summary: RunSummary, progress: Mapping[str, Any]) -> dict[str, Any]:
        """The pace of late, in place of that over the whole run, and what is left at it."""
        step, at = summary.newest_step, summary.last_metric_at
        if step is None or at is None:
            return {}
        now_s = datetime.fromisoformat(at).timestamp()
        while self._pace and (now_s - self._pace[0][0] > _PACE_S or self._pace[-1][1] > step):
            self._pace.popleft()
        if not self._pace or self._pace[-1] != (now_s, step):
            self._pace.append((now_s, step))
        (began_s, first), of = self._pace[0], progress["of"]
        if now_s - began_s < 1.0 or step <= first or progress["ms_per_step"] is None:
            return {}
        step_s = (now_s - began_s) / (step - first)
        eta_s = None if of is None else max(0.0, (of - step) * step_s)
        return {"ms_per_step": 1e3 * step_s, "eta_s": eta_s}

    def _keep_lines(
        self, curves: Sequence[Any], columns: Mapping[str, Any], *, whole: bool
    ) -> None:
        """What is drawn where scripts do not run."""
        if whole:
            self.lines = {}
        for place, curve in enumerate(curves):
            came = [columns[f"{place}.step"], columns[f"{place}.mean"]]
            known = self.lines.get(curve["name"])
            both = (
                came if known is None else list(map(np.concatenate, zip(known, came, strict=True)))
            )
            self.lines[curve["name"]] = both

    def _encode(
        self,
        news: Mapping[str, Any],
        curves: Sequence[Any],
        columns: Mapping[str, Any],
        *,
        whole: bool,
    ) -> bytes:
        self.said.update(news)
        self.is_whole = whole
        self._number += 1
        now_s = self.said["at"] = time.time()
        head = {**news, "number": self._number, "whole": whole, "at": now_s, "curves": curves}
        return encode_pack(head, columns)


def _choose_metrics(summary: RunSummary) -> tuple[str, ...]:
    """What the run is judged by, then the others as a page has them; the machine's not."""
    main = find_main_metric(summary)
    keys = {key: decode_name(key) for key in summary.metrics}
    ordered = sorted(keys, key=lambda key: place_metric(keys[key], keys[key].rpartition("/")[0]))
    kept = [key for key in ordered if not keys[key].startswith(("system/", "quark/"))]
    first = [main.key] if main is not None else []
    return tuple(dict.fromkeys([*first, *kept]))[:MOST_CURVES]


def _is_grave(alert: AlertRecord) -> bool:
    return alert.severity != "info"


def _list_findings(alerts: Sequence[AlertRecord]) -> list[dict[str, Any]]:
    """The worst, in few words."""
    grave = sorted(filter(_is_grave, alerts), key=place_alert)
    return [
        {
            "severity": alert.severity,
            "title": alert.title,
            "culprit": alert.culprit and decode_name(alert.culprit),
            "step": alert.step,
            "fact": (alert.fact or alert.summary)[:_MOST_TEXT],
        }
        for alert in grave[:_MOST_FINDINGS]
    ]


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
            self._tell("new data does not reach the browser", error)
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
            "run %s is shown in a notebook, and %s (training continues): %s: %s",
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
    key = str(session.run_id)
    with _views_lock:
        view = _views.get(key)
        if view is None or not view.is_live:
            view = LiveView(session, open_session_source(session, flushes=False))
            view.start()
            _views[key] = view
    _listen()
    view.show()
