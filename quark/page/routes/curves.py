"""Up to where a page has read a run, as a text that it gives back."""

from __future__ import annotations

import base64
import binascii
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from quark.analysis.metric_roles import find_main_metric
from quark.page.pack import choose_floats, encode_pack
from quark.page.recent import Recent
from quark.page.routes.edits import describe_edited
from quark.page.routes.parameters import MAX_ENTRIES, MAX_KEYS, MAX_RUNS, Parameters
from quark.page.routes.runs import describe_ending, describe_progress
from quark_core.backends.contract import SupportsChanges
from quark_core.backends.curves import (
    EACH_RANK,
    Curve,
    CurveQuery,
    RankChoice,
    Window,
    check_cursor,
    reduce_curves,
)
from quark_core.errors import RunNotFoundError, SchemaValidationError
from quark_core.records import EventRecord, MetricRecord
from quark_core.records.names import decode_name
from quark_core.runs.following import (
    read_changes,
    read_heads,
    read_mark,
    read_series,
    read_series_many,
)
from quark_core.runs.reading import encode_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark.page.routes.analyses import AnalysisDesk
    from quark.page.routes.page_source import PageSource
    from quark.page.routes.run_analysis import Analysis
    from quark_core.backends.run_summary import RunSummary
    from quark_core.backends.series import Series

_MOST_BYTES = 2**20


class PageCursor(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Up to where a page has read a run; equal moments give equal texts.

    Attributes:
        run_id: The run.
        place: What the backend goes on from; None where nothing was read yet, of a backend
            that only knows by reading.
        keys: The metrics that `place` speaks of; None for all.
        mark: Of what was known of the run beside its records; see `make_mark`.
    """

    run_id: str
    place: Mapping[str, int] | None
    keys: tuple[str, ...] | None = None
    mark: int = 0

    def encode(self) -> str:
        """The text."""
        place = None if self.place is None else dict(sorted(self.place.items()))
        sorted_cursor = msgspec.structs.replace(self, place=place)
        packed = zlib.compress(msgspec.msgpack.encode(sorted_cursor), 1)
        return base64.urlsafe_b64encode(packed).rstrip(b"=").decode()

    @classmethod
    def decode(cls, text: str, run_id: str) -> PageCursor:
        """The cursor of a text.

        Raises:
            SchemaValidationError: It is none of this run.
        """
        try:
            packed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            unpacker = zlib.decompressobj()
            data = unpacker.decompress(packed, _MOST_BYTES)
            found = msgspec.msgpack.decode(data, type=cls)
            if found.place is not None:
                check_cursor(found.place)
        except (binascii.Error, zlib.error, msgspec.DecodeError, ValueError) as error:
            raise SchemaValidationError(
                "cursor must be one that the server returned with the run or its curves"
            ) from error
        if found.run_id != run_id:
            raise SchemaValidationError("cursor must belong to this run")
        return found


def make_mark(summary: RunSummary, analysis: Analysis | None) -> int:
    """What changes with the run's state, the number of its metrics, and its analysis."""
    known = f"{summary.state}|{len(summary.metrics)}|{analysis.mark if analysis else ''}"
    return zlib.crc32(known.encode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class ShownCurve:
    """A curve with what the head says of it.

    Attributes:
        series: The curve; a `Curve` of one attempt says more.
        said: What the head has besides: key, name, and so on.
    """

    series: Series
    said: Mapping[str, Any] = field(default_factory=dict)


def pack_curves(
    curves: Sequence[ShownCurve],
    head: Mapping[str, Any],
    *,
    x: str = "step",
    extremes: bool = False,
) -> bytes:
    """A pack of curves.

    Args:
        curves: The curves.
        head: What else the head says.
        x: `step`, `time` or `epoch`: a column besides.
        extremes: Whether the steps of lowest and highest points are wanted.
    """
    listed, columns = lay_out_curves(curves, x=x, extremes=extremes)
    return encode_pack({**head, "curves": listed}, columns)


def lay_out_curves(
    curves: Sequence[ShownCurve], *, x: str = "step", extremes: bool = False
) -> tuple[list[dict[str, Any]], dict[str, NDArray[Any]]]:
    """What the head says of curves, and their columns; arguments as in `pack_curves`."""
    listed: list[dict[str, Any]] = []
    columns: dict[str, NDArray[Any]] = {}
    for place, curve in enumerate(curves):
        said, arrays = _lay_out(curve, x, extremes)
        listed.append(said)
        columns.update({f"{place}.{name}": array for name, array in arrays.items()})
    return listed, columns


def _lay_out(
    curve: ShownCurve, x: str, extremes: bool
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    import numpy as np

    series = curve.series
    by_epoch = len(series) > 0 and bool((series.step < 0).all()) and bool((series.epoch >= 0).any())
    said = {
        "attempt": getattr(series, "attempt", None),
        "rank": getattr(series, "rank", None),
        **curve.said,
        "points": int(series.count.sum()),
        "exact": bool(series.exact),
        "non_finite": int(series.non_finite.sum()),
        "low": _find_extreme(series.low, series.low_step, np.argmin),
        "high": _find_extreme(series.high, series.high_step, np.argmax),
        "unit": "epoch" if by_epoch else "step",
    }
    dtype = choose_floats(series.low, series.high)
    arrays = {
        "step": _to_places(series.epoch if by_epoch else series.step),
        "mean": series.mean.astype(dtype),
    }
    if not series.exact:
        arrays |= {"low": series.low.astype(dtype), "high": series.high.astype(dtype)}
        if extremes:
            arrays["low_step"] = _to_places(series.low_step)
            arrays["high_step"] = _to_places(series.high_step)
    if x == "time":
        arrays["time"] = series.time_us / 1e6
    elif x == "epoch":
        arrays["epoch"] = _to_places(series.epoch)
    if said["non_finite"]:
        arrays["non_finite"] = series.non_finite.astype("f4")
        at = getattr(series, "non_finite_step", None)
        if at is None:
            at = np.where(series.non_finite > 0, series.step, -1)
        arrays["non_finite_step"] = _to_places(at)
    return said, arrays


def _to_places(values: NDArray[Any]) -> NDArray[Any]:
    """Steps or epochs; NaN where there is none."""
    import numpy as np

    return np.where(values < 0, np.nan, values.astype(np.float64))


def _find_extreme(values: NDArray[Any], steps: NDArray[Any], find: Any) -> list[Any] | None:
    import numpy as np

    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return None
    place = known[find(values[known])]
    step = int(steps[place])
    return [float(values[place]), None if step < 0 else step]


_ENTRIES = 1_000
_SPARK_ENTRIES = 60
_MOST_NEW = 20_000
_MOST_CURSOR = 16_384
_MOST_MARKS = 512
# A backend that reads every point to find out is not asked each second.
_RESTS_S = 4.0
_AXES: dict[str, str] = {
    "step": "step",
    "time": "time_us",
    "epoch": "epoch",
}
GROUP_AXES: dict[str, str] = {
    "step": "step",
    "epoch": "epoch",
    "relative": "relative_us",
}
"""Axes of curves of several runs."""
_ATTEMPTS = ("current", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveAsk:
    """A request for curves.

    Attributes:
        query: Of the store.
        x: The axis, as the address names it.
        extremes: Whether the steps of lowest and highest points are wanted.
        bounds_news: Whether what came since a cursor is bounded, too.
    """

    query: CurveQuery
    x: str
    extremes: bool
    bounds_news: bool

    @classmethod
    def read(
        cls, parameters: Parameters, axes: Mapping[str, str] = _AXES, *, of_group: bool = False
    ) -> CurveAsk:
        """Read the parameters of a request, over one of some axes.

        The curve of a group has neither ranks nor attempts to choose from.

        Raises:
            SchemaValidationError: A bad parameter.
        """
        x = parameters.get_word("x", "step", tuple(axes))
        low, high = (parameters.get_number(name) for name in ("low", "high"))
        if low is not None and high is not None and low > high:
            raise SchemaValidationError(f"low must not be above high, got {low:g} and {high:g}")
        scale = 1e6 if axes[x].endswith("_us") else 1.0
        word = (not of_group and parameters.get_text("ranks")) or "mean"
        ranks: RankChoice = None
        if word == EACH_RANK:
            ranks = EACH_RANK
        elif word != "mean":
            rank = parameters.get_integer("ranks")
            ranks = None if rank is None else (rank,)
        query = CurveQuery.build(
            [encode_key(key, "key") for key in parameters.get_texts("key", MAX_KEYS)],
            entries=parameters.get_bounded("entries", _ENTRIES, MAX_ENTRIES),
            axis=axes[x],
            # Bounds are of whole steps: what lies between two of them is not outside.
            low=None if low is None else -int(-low * scale // 1),
            high=None if high is None else int(high * scale // 1),
            ranks=ranks,
            all_attempts=not of_group
            and parameters.get_word("attempts", "current", _ATTEMPTS) == "all",
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
    ask = CurveAsk.read(parameters)
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
        self._marks = Recent[str, tuple[float, str | None]](_MOST_MARKS)

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
                "cursor must be one that the server returned with the run or its curves"
            )
        ask = CurveAsk.read(parameters)
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
        self, summary: RunSummary, cursor: PageCursor, ask: CurveAsk
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


# Runs of one side as one curve: their mean, the lowest and the highest run, and how many.
#
# A group is put together by itself, on its own places: what other groups there are changes nothing.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCurve:
    """One metric of one run, over one axis.

    Attributes:
        x: Places of the entries, ascending; each is there once.
        mean, low, high: float64, over the finite points of each entry; NaN where it has none.
        non_finite: Points of each entry that are not finite.
        points: How many points stand behind all entries.
        exact: Whether each entry is one point.
    """

    x: NDArray[Any]
    mean: NDArray[Any]
    low: NDArray[Any]
    high: NDArray[Any]
    non_finite: NDArray[Any]
    points: int
    exact: bool

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCurve:
    """One metric of a group.

    Attributes:
        x: Places, ascending.
        mean: Over the runs that have a value there; NaN where none has.
        low, high: The lowest and the highest run there; of one run those of its own points.
        count: How many runs have a value there.
        non_finite: Points of all runs that are not finite, at the place nearest below.
        points: How many points stand behind it.
        exact: Whether every run has exactly these places, and a point at each.
    """

    x: NDArray[Any]
    mean: NDArray[Any]
    low: NDArray[Any]
    high: NDArray[Any]
    count: NDArray[Any]
    non_finite: NDArray[Any]
    points: int
    exact: bool


def join_attempts(curves: Sequence[Curve], axis: str, start_us: int = 0) -> RunCurve | None:
    """The curves of a run's attempts as one, in the order of the axis; None without an entry.

    Args:
        curves: Of one metric of one run, across ranks.
        axis: `step` (epochs, where a curve has no steps), `epoch`, or `relative`: seconds
            since `start_us`.
        start_us: When the run began, microseconds since 1970.
    """
    import numpy as np

    if not curves:
        return None
    x = np.concatenate([_place(curve, axis, start_us) for curve in curves])
    mean, low, high, non_finite = (
        np.concatenate([getattr(curve, name) for curve in curves])
        for name in ("mean", "low", "high", "non_finite")
    )
    kept = np.flatnonzero(np.isfinite(x))
    if not len(kept):
        return None
    # Of several entries at one place the last one counts, as it does for readers of a run.
    order = kept[np.argsort(x[kept], kind="stable")]
    is_last = np.append(np.diff(x[order]) > 0, True)
    order = order[is_last]
    return RunCurve(
        x=x[order],
        mean=mean[order],
        low=low[order],
        high=high[order],
        non_finite=non_finite[order],
        points=sum(curve.points for curve in curves),
        exact=all(curve.exact for curve in curves),
    )


def _place(curve: Curve, axis: str, start_us: int) -> NDArray[Any]:
    import numpy as np

    if axis == "relative":
        seconds: NDArray[Any] = (curve.time_us - start_us) / 1e6
        return seconds
    by_epoch = axis == "epoch" or bool((curve.step < 0).all())
    places = curve.epoch if by_epoch else curve.step
    return np.where(places < 0, np.nan, places.astype(np.float64))


def merge_runs(runs: Sequence[RunCurve], entries: int) -> GroupCurve:
    """The curve of a group.

    Where the runs have a place in common it is taken as it is; between two places a run
    is taken to go straight, and before its first and after its last value it has none.

    Args:
        runs: One curve of each run, one or more.
        entries: At most so many places where the runs have none in common.
    """
    import numpy as np

    if len(runs) == 1:
        one = runs[0]
        return GroupCurve(
            x=one.x,
            mean=one.mean,
            low=one.low,
            high=one.high,
            count=np.isfinite(one.mean).astype(np.int32),
            non_finite=one.non_finite,
            points=one.points,
            exact=one.exact,
        )
    x, is_common = _choose_places(runs, entries)
    values = np.stack([_read_at(run, x, is_common=is_common) for run in runs])
    known = np.isfinite(values)
    count = known.sum(axis=0)
    total = np.where(known, values, 0.0).sum(axis=0)
    non_finite = np.zeros(len(x), dtype=np.int64)
    for run in runs:
        bad = np.flatnonzero(run.non_finite)
        at = np.clip(np.searchsorted(x, run.x[bad], side="right") - 1, 0, None)
        np.add.at(non_finite, at, run.non_finite[bad])
    return GroupCurve(
        x=x,
        mean=np.where(count > 0, total / np.maximum(count, 1), np.nan),
        low=np.where(count > 0, np.where(known, values, np.inf).min(axis=0), np.nan),
        high=np.where(count > 0, np.where(known, values, -np.inf).max(axis=0), np.nan),
        count=count.astype(np.int32),
        non_finite=non_finite,
        points=sum(run.points for run in runs),
        exact=is_common and all(run.exact for run in runs),
    )


def _choose_places(runs: Sequence[RunCurve], entries: int) -> tuple[NDArray[Any], bool]:
    """Places for all runs, and whether each run has just these."""
    import numpy as np

    first = runs[0].x
    if all(len(run) == len(first) and np.array_equal(run.x, first) for run in runs[1:]):
        return first, True
    union = np.unique(np.concatenate([run.x for run in runs]))
    if len(union) <= entries:
        return union, False
    return np.linspace(union[0], union[-1], entries), False


def _read_at(run: RunCurve, x: NDArray[Any], *, is_common: bool) -> NDArray[Any]:
    import numpy as np

    if is_common:
        return run.mean
    known = np.flatnonzero(np.isfinite(run.mean))
    if not len(known):
        return np.full(len(x), np.nan)
    values: NDArray[Any] = np.interp(x, run.x[known], run.mean[known], left=np.nan, right=np.nan)
    return values
