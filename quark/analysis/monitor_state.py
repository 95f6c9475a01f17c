"""The state of a monitor: the rows read so far, and the alerts raised already."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from quark.analysis.curves import Curve
from quark.analysis.rule import SEVERITIES
from quark.analysis.run_data import MetricSamples, RunData, make_curve
from quark_core.config import settings
from quark_core.delivery.journal import split_generation
from quark_core.delivery.journal_folder import journal_directory
from quark_core.errors import SessionStoreError, UnknownKindError
from quark_core.records import RECORD_TYPES, EventRecord, MetricRecord
from quark_core.records.codec import decode_body
from quark_core.records.columns import Columns
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.findings import AlertRecord
from quark_core.records.query import Query
from quark_core.runs.open_run import RunExtension
from quark_core.runs.reading import iterate, read_rows

if TYPE_CHECKING:
    from quark_core.backends.contract import Batch, SupportsRead
    from quark_core.runs.open_run import OpenRun

# What a run has so far, taken up as it is logged: every row is read once.
#
# Points of metrics become curves as they come, so that a look costs what is new
# and what is judged, never what the run has logged since its start.

_WAITING_BYTES = 64 * 1024 * 1024


def list_kinds() -> tuple[str, ...]:
    """What analyzers look at: kinds with numbers that they did not find themselves."""
    types = RECORD_TYPES.items()
    return tuple(kind for kind, each in types if each.HAS_FIGURES and not each.IS_ANALYSIS)


class GrowingCurves:
    """The metrics of a run that goes on, of its lowest rank, in bounded memory.

    Attributes:
        newest_us: Time of the newest point, microseconds since the epoch.
    """

    def __init__(self) -> None:
        self._samples = MetricSamples()
        self._rank: int | None = None
        self._made: dict[str, tuple[int, Curve]] = {}
        self.newest_us = 0

    def add(self, columns: Columns) -> None:
        """Take further rows."""
        if not columns.count:
            return
        ranks = columns["rank"]
        least = int(ranks.min())
        if self._rank is None or least < self._rank:
            self._rank, self._samples, self._made = least, MetricSamples(), {}
        own = columns if bool((ranks == self._rank).all()) else columns.take(ranks == self._rank)
        if own.count:
            self.newest_us = max(self.newest_us, int(own["time_us"].max()))
            self._samples.add(own)

    def load(self) -> Mapping[str, Curve]:
        """Every metric; of one that has no new point the curve of the last call."""
        for name, seen, take in self._samples.peek():
            known = self._made.get(name)
            if known is None or known[0] != seen:
                self._made[name] = seen, make_curve(name, take())
        return {name: curve for name, (_, curve) in self._made.items()}


class RunFeed:
    """Collects what a run has: once from its store, then from the delivery thread.

    The delivery thread puts each batch that it closes into a queue, and that is
    all it does. Batches are decoded by `poll` on the caller's thread. Where more
    than 64 MiB wait, they are let go and the store is read again.

    One thread uses it after `open`.

    Args:
        run: A run that takes records, of this process.
        kinds: Which kinds of records are collected, metrics among them.

    Attributes:
        step: Step of the newest row that has one, or None.
        epoch: Likewise.
        is_alarmed: Whether a metric stopped being finite since this was last set to False.
    """

    def __init__(self, run: OpenRun, kinds: tuple[str, ...] | None = None) -> None:
        self._run = run
        self._kinds = list_kinds() if kinds is None else kinds
        self._tables = tuple(kind for kind in self._kinds if kind != MetricRecord.KIND)
        self._stream = run.stream
        self._writer_id = run.origin.writer_id
        self._waiting: deque[Batch] = deque()
        self._came_bytes = 0
        self._taken_bytes = 0
        self._overflowed = False
        self._base: dict[str, Columns] = {}
        self._parts: dict[str, list[Columns]] = {kind: [] for kind in self._tables}
        self._curves = GrowingCurves()
        self._config: dict[str, Any] | None = None
        self._other_writers = False
        self._journals = _find_journals(run)
        self.step: int | None = None
        self.epoch: int | None = None
        self.is_alarmed = False

    def open(self) -> None:
        """Begin to listen, then read what the run has already.

        Raises:
            SessionStoreError: The store does not answer; what is logged from now on is
                collected all the same.
        """
        for kind in (*self._kinds, EventRecord.KIND):
            self._stream.channel(kind).listen(self._take)
        reader = self._run.reader
        if reader is not None:
            stored = reader.load_run(self._run.context.run_id or "")
            self._config = None if stored.config is None else dict(stored.config.values)
        self.read_again()

    def close(self) -> None:
        """Listen no more."""
        for kind in (*self._kinds, EventRecord.KIND):
            self._stream.channel(kind).leave(self._take)
        self._waiting.clear()

    def poll(self) -> None:
        """Take up what was logged since the last call.

        Raises:
            SessionStoreError: More came than may wait, and the store cannot be read.
        """
        if self._overflowed:
            self.read_again()
            return
        for kind, columns in self._decode_waiting().items():
            self._add(kind, columns)

    def load(self, *, ended: bool) -> RunData:
        """The run as far as it was taken up.

        Args:
            ended: Whether nothing comes after it.
        """
        return RunData(
            self._read,
            self._run.context.run_id or "",
            ended=ended,
            config=self._config,
            find_curves=lambda: self._curves,
            with_torch="torch" in sys.modules,
        )

    @property
    def has_other_writers(self) -> bool:
        """Whether another process, such as a forked worker, was ever seen to log as well."""
        if not self._other_writers:
            try:
                names = os.listdir(self._journals)
            except OSError:
                return False
            self._other_writers = any(
                name != self._writer_id and split_generation(name) is None for name in names
            )
        return self._other_writers

    def read_again(self) -> None:
        """Take everything from the store, that of other writers too, and go on from there.

        Raises:
            SessionStoreError: The store cannot be read; nothing is changed.
        """
        run, reader = self._run, self._run.reader
        run_id = run.context.run_id
        if reader is None or run_id is None:
            return
        self._overflowed = False
        try:
            # What is framed before we read is then in what we read or waits in the queue.
            self._stream.flush(settings.persistence_timeout_s(), sync=False)
            base = {kind: _read_rows(reader, run_id, kind) for kind in self._tables}
            curves, newest = GrowingCurves(), -1
            for part in iterate(reader, run_id, MetricRecord.KIND, Query()):
                curves.add(part)
                newest = max(newest, _find_newest(part, self._writer_id))
                self._note_place(part)
        except SessionStoreError:
            self._overflowed = True
            raise
        came = self._decode_waiting()
        self._curves = curves
        points = came.get(MetricRecord.KIND)
        if points is not None:
            # The store takes a writer's rows in their order.
            self._add(MetricRecord.KIND, points.take(points["sequence"] > newest))
        for kind in self._tables:
            self._base[kind], self._parts[kind] = base[kind], []
            self._note_place(base[kind])
            if kind in came:
                self._add(kind, _leave_out(came[kind], base[kind], self._writer_id))

    def _take(self, batch: Batch) -> None:
        """Called by the delivery thread."""
        if self._came_bytes - self._taken_bytes > _WAITING_BYTES:
            self._overflowed = True
            return
        self._came_bytes += len(batch.body)
        self._waiting.append(batch)

    def _decode_waiting(self) -> dict[str, Columns]:
        found: dict[str, list[Columns]] = {}
        for _ in range(len(self._waiting)):
            batch = self._waiting.popleft()
            self._taken_bytes += len(batch.body)
            # Not `batch.decoded`, which would be kept as long as the batch is.
            body = decode_body(batch.body)
            if batch.kind == EventRecord.KIND:
                if "non_finite_metric" in body.to_list("event_type"):
                    self.is_alarmed = True
                continue
            origin = {
                "run_id": batch.run_id,
                "writer_id": batch.writer_id,
                "attempt": batch.attempt,
                "rank": batch.rank,
            }
            found.setdefault(batch.kind, []).append(Columns.from_body(body, origin))
        return {kind: Columns.concatenate(kind, parts) for kind, parts in found.items()}

    def _add(self, kind: str, columns: Columns) -> None:
        if not columns.count:
            return
        self._note_place(columns)
        if kind == MetricRecord.KIND:
            self._curves.add(columns)
            return
        parts = self._parts[kind]
        parts.append(columns.make_all())
        # Each part is more than twice the one after it, so that a row is copied seldom.
        while len(parts) > 1 and parts[-2].count <= 2 * parts[-1].count:
            last, before = parts.pop(), parts.pop()
            parts.append(Columns.concatenate(kind, [before, last]).make_all())

    def _note_place(self, columns: Columns) -> None:
        for name in ("step", "epoch"):
            if not columns.count or name not in columns:
                continue
            known = columns[name] >= 0
            if bool(known.any()):
                setattr(self, name, int(columns[name][known][-1]))

    def _read(self, kind: str, query: Query) -> Columns:
        kept = (self._base.get(kind), *self._parts.get(kind, ()))
        parts = [part for part in kept if part is not None]
        return Columns.concatenate(kind, [part for part in parts if part.count]).select(query)


def _find_journals(run: OpenRun) -> Path:
    """Where every process that logs to the run has a folder while it does."""
    context, run_id = run.context, run.context.run_id or ""
    path = Path(context.run.run_path)
    if "://" in context.run.run_path:
        path = context.storage_dir / ".quark" / "runs" / run_id
    return journal_directory(path, run_id)


def _find_newest(columns: Columns, writer_id: str) -> int:
    """The highest sequence of this process's writer, -1 where it has none."""
    own = columns["sequence"][np.asarray(columns["writer_id"] == writer_id, dtype=np.bool_)]
    return int(own.max()) if len(own) else -1


def _leave_out(columns: Columns, base: Columns, writer_id: str) -> Columns:
    """Rows of this process's writer that the store has not given already."""
    if not base.count or not columns.count:
        return columns
    own = np.asarray(base["writer_id"] == writer_id, dtype=np.bool_)
    known = base["sequence"][own]
    return columns.take(~np.isin(columns["sequence"], known))


def _read_rows(reader: SupportsRead, run_id: str, kind: str) -> Columns:
    try:
        return read_rows(reader, run_id, kind, Query())
    except UnknownKindError:
        return Columns.empty(kind)  # the server does not have the plugin


# A finding that stays away for so many looks is news when it comes back.
_FORGET_LOOKS = 10

_Key = tuple[str, str | None, bool]


class AlertDeduplicator:
    """Turns what each look finds into alerts, each raised once.

    A finding is the same one as long as its rule and its culprit are. What is
    critical is raised at once. Anything else is raised at the severity that it
    had in two looks in a row, since what a run recovers from is no news; a
    higher severity is raised again, under the id of the first alert.

    Attributes:
        raised: The newest state of every alert that was raised, in the order of the raising.
    """

    def __init__(self) -> None:
        self._before: dict[_Key, int] = {}
        self._ranks: dict[_Key, int] = {}
        self._ids: dict[_Key, str] = {}
        self._absent: dict[_Key, int] = {}
        self._raised: dict[str, AlertRecord] = {}

    @property
    def raised(self) -> tuple[AlertRecord, ...]:
        """See the class."""
        return tuple(self._raised.values())

    def update(self, alerts: Iterable[AlertRecord], *, last: bool = False) -> list[AlertRecord]:
        """Take up what a look has found; returns what is to be raised now.

        Args:
            alerts: All that it found.
            last: No look comes after it, so that nothing is waited for.
        """
        found = {_identify(alert): alert for alert in reversed(list(alerts))}
        now = {key: SEVERITIES.index(alert.severity) for key, alert in found.items()}
        due: list[tuple[_Key, AlertRecord]] = []
        for key, rank in now.items():
            sure = rank
            if not last and rank < len(SEVERITIES) - 1:
                sure = min(rank, self._before.get(key, -1))
            if sure > self._ranks.get(key, -1):
                self._ranks[key] = sure
                due.append((key, msgspec.structs.replace(found[key], severity=SEVERITIES[sure])))
        self._before = now
        self._forget(now)
        given = {alert.id: self._ids.get(key, alert.id) for key, alert in found.items()}
        for key, alert in due:
            self._ids.setdefault(key, alert.id)
        known = {*self._raised, *(self._ids[key] for key, _ in due)}
        out = [_link(alert, self._ids[key], given, known) for key, alert in reversed(due)]
        for alert in out:
            self._raised[alert.id] = alert
        return out

    def _forget(self, now: dict[_Key, int]) -> None:
        for key in list(self._ranks):
            self._absent[key] = 0 if key in now else self._absent.get(key, 0) + 1
            if self._absent[key] >= _FORGET_LOOKS:
                for table in (self._ranks, self._ids, self._absent):
                    table.pop(key, None)


class RaisedAlerts(RunExtension):
    """Counts the alerts that monitors have raised in a run of this process.

    Attributes:
        severities: The severity of each.
    """

    def __init__(self) -> None:
        self.severities: list[str] = []

    def list_faults(self) -> list[str]:
        """How many there are of each severity, the worst first."""
        counts = {each: self.severities.count(each) for each in reversed(SEVERITIES[1:])}
        counted = [f"{count} {each}" for each, count in counts.items() if count]
        return [f"alerts: {', '.join(counted)}"] if counted else []


class Pace:
    """When the next look is due, so that all of them take a bounded share of the time.

    Args:
        least_s: The shortest time from one look to the next.
        share: The share of the time that looks may take.
    """

    def __init__(self, least_s: float, share: float) -> None:
        self._least_s = least_s
        self._share = share
        self._due = 0.0
        self.spacing_s = least_s
        """Time from the last look to the next."""

    def is_due(self, now: float) -> bool:
        """Whether a look may be taken now, on a clock in seconds."""
        return now >= self._due

    def note(self, began: float, cost_s: float) -> None:
        """Take up what a look has cost: seconds of processor time since the look before."""
        self.spacing_s = max(self._least_s, cost_s / self._share)
        self._due = began + self.spacing_s


def describe_alert(alert: AlertRecord) -> JsonObject:
    """What the event that tells of an alert carries."""
    return JsonObject(
        {
            "alert_id": alert.id,
            "rule_id": alert.rule_id,
            "category": alert.category,
            "title": alert.title,
            "message": alert.summary,
            "fact": alert.fact,
            "inference": alert.inference,
            "culprit": alert.culprit,
            "first_step": alert.step,
            "first_epoch": alert.epoch,
            "suggested_check": alert.suggested_check,
        }
    )


def _identify(alert: AlertRecord) -> _Key:
    return alert.rule_id, alert.culprit, bool(dict(alert.metadata or {}).get("hard_limit"))


def _link(alert: AlertRecord, alert_id: str, given: dict[str, str], known: set[str]) -> AlertRecord:
    """The alert under its id, with its links to those only that were raised."""
    metadata: dict[str, Any] = dict(alert.metadata or {})
    cause = given.get(str(metadata.pop("caused_by", "")))
    if cause in known:
        metadata["caused_by"] = cause
    follows = [given.get(str(item), "") for item in metadata.pop("consequences", ())]
    raised = [item for item in follows if item in known]
    if raised:
        metadata["consequences"] = raised
    return msgspec.structs.replace(alert, alert_id=alert_id, metadata=JsonObject(metadata))
