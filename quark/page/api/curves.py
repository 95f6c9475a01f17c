"""Curves of metrics, and what came into them since."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quark.analysis.metric_roles import find_main_metric
from quark.page.api.cursors import PageCursor, make_mark
from quark.page.api.curve_pack import ShownCurve, pack_curves
from quark.page.api.edits import describe_edited
from quark.page.api.parameters import MAX_ENTRIES, MAX_KEYS, MAX_RUNS, Parameters
from quark.page.api.rows import describe_ending
from quark.page.api.standings import describe_progress
from quark_core.backends.contract import SupportsChanges
from quark_core.backends.curves import (
    EACH_RANK,
    Axis,
    Curve,
    CurveQuery,
    RankChoice,
    Window,
    reduce_curves,
)
from quark_core.errors import RunNotFoundError, SchemaValidationError
from quark_core.records import EventRecord, MetricRecord
from quark_core.records.names import decode_name
from quark_core.runs.following import read_changes, read_heads, read_mark, read_series_many
from quark_core.runs.reading import encode_key, read_series

if TYPE_CHECKING:
    from quark.page.api.analyses import AnalysisDesk
    from quark.page.api.source import PageSource
    from quark_core.backends.run_summary import RunSummary

_ENTRIES = 1_000
_SPARK_ENTRIES = 60
_MOST_NEW = 20_000
_MOST_CURSOR = 16_384
_MOST_MARKS = 512
# A backend that reads every point to find out is not asked each second.
_RESTS_S = 4.0
_AXES: dict[str, Axis] = {
    "step": "step",
    "time": "time_us",
    "epoch": "epoch",
}
_ATTEMPTS = ("current", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ask:
    """What is asked for of curves."""

    query: CurveQuery
    x: str
    extremes: bool
    bounds_news: bool

    @classmethod
    def read(cls, parameters: Parameters) -> _Ask:
        x = parameters.get_word("x", "step", tuple(_AXES))
        low, high = (parameters.get_number(name) for name in ("low", "high"))
        if low is not None and high is not None and low > high:
            raise SchemaValidationError(f"low must not be above high, got {low:g} and {high:g}")
        scale = 1e6 if x == "time" else 1.0
        word = parameters.get_text("ranks") or "mean"
        ranks: RankChoice = None
        if word == EACH_RANK:
            ranks = EACH_RANK
        elif word != "mean":
            rank = parameters.get_integer("ranks")
            ranks = None if rank is None else (rank,)
        query = CurveQuery.build(
            [encode_key(key, "key") for key in parameters.get_texts("key", MAX_KEYS)],
            entries=parameters.get_bounded("entries", _ENTRIES, MAX_ENTRIES),
            axis=_AXES[x],
            # Bounds are of whole steps: what lies between two of them is not outside.
            low=None if low is None else -int(-low * scale // 1),
            high=None if high is None else int(high * scale // 1),
            ranks=ranks,
            all_attempts=parameters.get_word("attempts", "current", _ATTEMPTS) == "all",
        )
        return cls(
            query=query,
            x=x,
            extremes=parameters.get_flag("extremes"),
            bounds_news=parameters.get_text("entries") is not None,
        )


def pack_series(
    source: PageSource, desk: AnalysisDesk, run_id: str, parameters: Parameters
) -> bytes:
    """The curves of some metrics of one run.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
    """
    ask = _Ask.read(parameters)
    if not ask.query.keys:
        raise SchemaValidationError("key must name a metric")
    summary = source.summarize(run_id)
    mark = make_mark(summary, desk.find(summary))
    asked = ask.query.keys
    found = read_series_many(source.reader, run_id, ask.query)
    curves = [*found.curves, *_read_epochs(source, summary, ask.query)]
    place = {key: number for number, key in enumerate(asked)}
    curves.sort(key=lambda curve: place.get(curve.key, 0))
    keys = None if isinstance(source.reader, SupportsChanges) else asked
    cursor = PageCursor(run_id=run_id, place=found.cursor, keys=keys, mark=mark)
    seen = {curve.key for curve in curves}
    missing = [key for key in asked if key not in seen and key not in summary.metrics]
    head = {"cursor": cursor.encode(), "missing": missing}
    return pack_curves(list(map(_show, curves)), head, x=ask.x, extremes=ask.extremes)


def _read_epochs(source: PageSource, summary: RunSummary, query: CurveQuery) -> Sequence[Curve]:
    """What has epochs only, which no window of steps cuts."""
    if query.window.axis != "step" or query.window.is_open:
        return ()
    metrics = summary.metrics
    keys = tuple(key for key in query.keys if key in metrics and metrics[key].last_step is None)
    if not keys:
        return ()
    whole = replace(query, keys=keys, window=Window(axis="epoch"))
    return read_series_many(source.reader, summary.run_id, whole).curves


def _show(curve: Curve) -> ShownCurve:
    return ShownCurve(curve, {"key": curve.key, "name": decode_name(curve.key)})


class ChangeDesk:
    """Answers what came since a cursor; every method may be called from any thread.

    Args:
        source: What is looked at.
        desk: The analyses.
    """

    def __init__(self, source: PageSource, desk: AnalysisDesk) -> None:
        self._source = source
        self._desk = desk
        self._lock = threading.Lock()
        self._marks: OrderedDict[str, tuple[float, str | None]] = OrderedDict()

    def begin(self, summary: RunSummary) -> str:
        """The cursor of a run of which no curve was read yet."""
        reader = self._source.reader
        place: Mapping[str, int] | None = None
        if isinstance(reader, SupportsChanges):
            place = read_heads(reader, summary.run_id).cursor
        mark = make_mark(summary, self._desk.find(summary))
        return PageCursor(run_id=summary.run_id, place=place, mark=mark).encode()

    def pack(self, run_id: str, parameters: Parameters) -> bytes | None:
        """What came since a cursor; None where nothing did.

        Raises:
            SchemaValidationError: A bad parameter.
            RunNotFoundError: There is no such run.
        """
        text = parameters.get_text("cursor", _MOST_CURSOR)
        if text is None:
            raise SchemaValidationError(
                "cursor must be one that was given with the run or its curves"
            )
        ask = _Ask.read(parameters)
        cursor = PageCursor.decode(text, run_id)
        mark = read_mark(self._source.reader, run_id)
        if self._is_still(text, mark):
            return None
        summary = self._source.summarize(run_id)
        said = make_mark(summary, self._desk.request(summary))
        head, curves = self._read(summary, cursor, ask)
        newest = PageCursor(
            run_id=run_id, place=head.pop("place"), keys=head.pop("keys"), mark=said
        ).encode()
        self._note(newest, mark)
        if newest == text and not head["reset"]:
            return None
        head |= {
            "cursor": newest,
            "run": {
                "state": summary.state,
                "ending": describe_ending(summary.stored),
                "newest_step": summary.newest_step,
                "last_metric_at": summary.last_metric_at,
                "ended_at": summary.stored.run.ended_at,
                "progress": describe_progress(self._source, summary),
                **describe_edited(summary.stored),
            },
            "metrics": self._list_new(summary, cursor, said),
            "analysis": said != cursor.mark,
        }
        return pack_curves(list(map(_show, curves)), head, x=ask.x)

    def _read(
        self, summary: RunSummary, cursor: PageCursor, ask: _Ask
    ) -> tuple[dict[str, Any], Sequence[Curve]]:
        """What came, and where to go on."""
        reader, run_id, query = self._source.reader, summary.run_id, ask.query
        knows_all = isinstance(reader, SupportsChanges)
        if cursor.place is None or (
            cursor.keys is not None and not set(query.keys) <= set(cursor.keys)
        ):
            # What was not read yet cannot be gone on with.
            place = cursor.place
            return {"place": place, "keys": cursor.keys, "reset": bool(query.keys), "events": 0}, ()
        kinds = (MetricRecord.KIND, EventRecord.KIND) if knows_all else (MetricRecord.KIND,)
        found = read_changes(
            reader,
            run_id,
            cursor.place,
            kinds=kinds,
            keys=query.keys if cursor.keys is None else cursor.keys,
            all_attempts=query.all_attempts,
            max_rows=_MOST_NEW,
        )
        head: dict[str, Any] = {"place": found.cursor, "keys": cursor.keys, "reset": False}
        events = found.records.get(EventRecord.KIND)
        head["events"] = 0 if events is None else events.count
        if found.stale or found.more:
            place = read_heads(reader, run_id).cursor if knows_all else cursor.place
            return {**head, "place": place, "reset": True}, ()
        rows = found.records.get(MetricRecord.KIND)
        if rows is None:
            return head, ()
        bounded = query.entries if ask.bounds_news else None
        return head, reduce_curves(
            rows, replace(query, entries=bounded, window=Window(axis=query.window.axis))
        )

    @staticmethod
    def _list_new(summary: RunSummary, cursor: PageCursor, said: int) -> list[list[Any]]:
        """Metrics that may be new; none where the run says the same of itself as before."""
        if said == cursor.mark:
            return []
        return [[key, decode_name(key), each.count] for key, each in summary.metrics.items()]

    def _is_still(self, text: str, mark: str | None) -> bool:
        """Whether nothing has come since an answer with this cursor, as far as is known."""
        with self._lock:
            found = self._marks.get(text)
        if found is None:
            return False
        at_s, known = found
        if mark is None or known is None:
            return time.monotonic() - at_s < _RESTS_S
        # Whether its process lives, and its analysis, no mark says.
        return mark == known and time.monotonic() - at_s < _RESTS_S

    def _note(self, text: str, mark: str | None) -> None:
        with self._lock:
            self._marks[text] = (time.monotonic(), mark)
            self._marks.move_to_end(text)
            while len(self._marks) > _MOST_MARKS:
                self._marks.popitem(last=False)


def pack_sparks(source: PageSource, parameters: Parameters) -> bytes:
    """Small curves of many runs, of one metric or of what each is judged by.

    Raises:
        SchemaValidationError: A bad parameter.
    """
    text = parameters.get_text("key")
    wanted = None if text is None else encode_key(text, "key")
    curves = []
    for run_id in parameters.get_texts("run", MAX_RUNS):
        key = wanted
        try:
            if key is None:
                main = find_main_metric(source.summarize(run_id))
                if main is None:
                    continue
                key = main.key
            series = read_series(source.reader, run_id, key, _SPARK_ENTRIES)
        except RunNotFoundError:
            continue
        if len(series):
            said = {"run": run_id, "key": key, "name": decode_name(key)}
            curves.append(ShownCurve(series, said))
    return pack_curves(curves, {})
