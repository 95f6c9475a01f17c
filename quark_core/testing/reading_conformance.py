"""The part of the conformance kit for backends that give back records, or payloads of artifacts."""

from __future__ import annotations

import hashlib
import math
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quark_core.backends.contract import BackendDefinition, Capability, Payload, SupportsRead
from quark_core.backends.curves import EACH_RANK, CurveQuery, CurveSet, reduce_curves
from quark_core.errors import (
    ArtifactNotFoundError,
    BackendRejected,
    BackendUnavailable,
    RunNotFoundError,
)
from quark_core.records.json_object import JsonObject
from quark_core.records.query import Query
from quark_core.records.runs import SettingOrigin
from quark_core.runs.following import read_changes, read_heads, read_mark, read_series_many
from quark_core.testing.fakes import FIRST_TIME_US, ODD_TEXT, BatchMaker, make_samples
from quark_core.testing.kit import RUN_ID, BackendKit, Opener, needs

_ODD_TEXTS = {
    "scripts": ODD_TEXT,
    "empty": "",
    "blank": " ",
    "nan": "nan",
    "none": "None",
    "long": "x" * 200_000,
    "line-ends": "\r\n",
    "quote": "'",
}

_QUERIES = {
    "key": Query(equals={"metric_key": "a/x"}),
    "namespace": Query(equals={"namespace": "a", "metric_name": "y"}),
    "absent": Query(equals={"metric_key": "absent"}),
    "any-of": Query(any_of={"metric_key": ("a/x", "b")}),
    "step": Query(step=3),
    "steps": Query(step_min=2, step_max=5),
    "epochs": Query(epoch_min=0),
    "limit": Query(limit=3),
    "key-steps-limit": Query(equals={"metric_key": "a/x"}, step_min=1, limit=2),
    "nothing": Query(limit=0),
    "finite": Query(include_non_finite=False),
}


class ReadingConformance(BackendKit):
    """Standard tests of backends that declare READ."""

    @needs(Capability.READ)
    def test_records_are_read_as_they_were_written(self, opened: Any, maker: BatchMaker) -> None:
        """Every field of metrics and events comes back."""
        metadata = JsonObject({"split": 'a,b\n"c"', "k": [1, 2.5, None]})
        opened.write(maker.start())
        metrics = maker.metrics(
            ("a/b", 3, 0.1),
            ("c", None, 2.0),
            description="Grüße,\n两行",
            metadata=metadata,
        )
        events = maker.events("saved", "loaded", payload=metadata, status="ok")
        for batch in (metrics, events):
            opened.write(batch)
        for batch in (metrics, events):
            found = opened.read(self.RUN_ID, batch.kind, Query()).to_records()
            assert list(found) == batch.to_records()

    @pytest.mark.parametrize("query", _QUERIES.values(), ids=_QUERIES)
    @needs(Capability.READ)
    def test_filters(self, backend: Any, maker: BatchMaker, query: Query) -> None:
        """Each filter keeps what it says, in persistence order."""
        batches = [
            maker.metrics(*[("a/x", step, float(step)) for step in range(4)]),
            maker.metrics(("a/y", 3, math.nan), ("b", None, 1.0)),
            maker.metrics(*[("a/x", step, float(step)) for step in range(4, 7)], ("b", 2, 1.5)),
        ]
        for batch in batches:
            backend.write(batch)
        expected = [r for batch in batches for r in batch.to_records() if _fits(query, r)]
        expected = expected[-query.limit :] if query.limit else expected
        expected = [] if query.limit == 0 else expected
        found = backend.read(self.RUN_ID, "metric", query).to_records()
        assert [r.id for r in found] == [r.id for r in expected]

    @needs(Capability.READ)
    def test_persistence_order(self, opened: Any, maker: BatchMaker) -> None:
        """Attempt, rank, start of the writer, sequence: whatever arrived first."""
        later = {"attempt": 1, "started_us": FIRST_TIME_US + 10**6}
        resumed = BatchMaker(self.RUN_ID, writer_id="resumed", **later)
        other = BatchMaker(self.RUN_ID, rank=1, writer_id="rank1")
        second = BatchMaker(self.RUN_ID, writer_id="second", started_us=FIRST_TIME_US + 10**5)
        start = maker.start()
        swapped = maker.metrics(("m", 0, 0.0), ("m", 1, 1.0)).to_records()
        batches = [
            start,
            resumed.start(),
            resumed.metrics(("m", 5, 5.0)),
            other.metrics(("m", 4, 4.0)),
            second.metrics(("m", 3, 3.0)),
            maker.batch(swapped[::-1]),
            maker.metrics(("m", 2, 2.0)),
        ]
        for batch in batches:
            opened.write(batch)
        found = opened.read(self.RUN_ID, "metric", Query())
        assert found["value"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert found["attempt"].tolist() == [0, 0, 0, 0, 0, 1]
        assert found["rank"].tolist() == [0, 0, 0, 0, 1, 0]

    @needs(Capability.READ)
    def test_a_rank_is_read_by_itself(self, backend: Any, maker: BatchMaker) -> None:
        """`rank` is a filter as any other: it comes before the limit."""
        other = BatchMaker(self.RUN_ID, rank=1, writer_id="rank1")
        backend.write(maker.metrics(*[("m", step, float(step)) for step in range(5)]))
        backend.write(other.metrics(*[("m", step, 10.0 + step) for step in range(5)]))

        def read(**filters: Any) -> list[float]:
            return list(backend.read(self.RUN_ID, "metric", Query(**filters))["value"])

        assert read(rank=0) == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert read(rank=0, limit=2) == [3.0, 4.0]
        assert read(rank=1, limit=2, step_max=2) == [11.0, 12.0]
        assert read(rank=2) == []
        assert read(limit=6) == [4.0, 10.0, 11.0, 12.0, 13.0, 14.0]

    @needs(Capability.READ)
    def test_lifecycle_is_applied(self, opened: Any, maker: BatchMaker) -> None:
        """Project, tags, config, status and exit code come back; a late status changes nothing."""
        opened.write(maker.start(project="vision", tags=["b", "a"]))
        opened.write(maker.lifecycle(("tag", {"tag": "c"})))
        running = opened.load_run(self.RUN_ID)
        assert (running.run.status, running.project.name) == ("running", "vision")
        assert running.run.tags == ("a", "b", "c")
        assert running.config is not None
        assert running.config.values == {"lr": 0.1}
        # A store that keeps values alone has none; others have what was told.
        origin = SettingOrigin("lr", "defaults", "train.py:4", 0.1)
        assert running.config.origins in ((), (origin,))
        resumed = BatchMaker(
            self.RUN_ID, attempt=1, writer_id="resumed", started_us=FIRST_TIME_US + 10**6
        )
        opened.write(resumed.start())
        opened.write(maker.lifecycle(("status", {"status": "failed"})))
        assert opened.load_run(self.RUN_ID).run.status == "running"
        status = {"status": "interrupted", "exit_code": 3}
        opened.write(resumed.lifecycle(("status", status)))
        ended = opened.load_run(self.RUN_ID)
        assert (ended.run.status, ended.state) == ("interrupted", "interrupted")
        assert ended.exit_code == 3
        assert ended.run.resume_count == 1
        assert ended.run.ended_at is not None
        assert [stored.run.id for stored in opened.list_runs()] == [self.RUN_ID]
        assert opened.list_runs(project="other") == []

    @needs(Capability.READ)
    def test_unknown_runs_are_said_to_be_unknown(self, backend: Any) -> None:
        """Reading a run that is not there is no empty answer."""
        with pytest.raises(RunNotFoundError):
            backend.load_run("absent")
        with pytest.raises(RunNotFoundError):
            backend.read("absent", "metric", Query())

    @pytest.mark.parametrize("text", _ODD_TEXTS.values(), ids=_ODD_TEXTS)
    @needs(Capability.READ)
    def test_odd_texts_are_kept(self, opened: Any, maker: BatchMaker, text: str) -> None:
        """Wherever a user may write one."""
        values = JsonObject({"text": text, "key": {text: 1}})
        opened.write(maker.start(tags=["a"]))
        opened.write(maker.lifecycle(("config", {"values": dict(values), "notes": []})))
        metrics = maker.metrics(("m", 0, 1.0), description=text, metadata=values)
        events = maker.events("e", payload=values)
        for batch in (metrics, events):
            opened.write(batch)
            found = opened.read(self.RUN_ID, batch.kind, Query()).to_records()
            assert list(found) == batch.to_records()
        config = opened.load_run(self.RUN_ID).config
        assert config is not None
        assert config.values == values

    @needs(Capability.READ)
    def test_reading_while_writing(self, backend: Any, maker: BatchMaker) -> None:
        """Readers in other threads see a growing, gap-free beginning."""
        done = threading.Event()
        wrong: list[object] = []

        def look() -> None:
            seen = 0
            try:
                while not done.is_set():
                    values = backend.read(self.RUN_ID, "metric", Query())["value"].tolist()
                    if len(values) < seen or values != [float(i) for i in range(len(values))]:
                        wrong.append(values)
                    seen = len(values)
                    if backend.load_run(self.RUN_ID).run.status != "running":
                        wrong.append("it runs")
            except Exception as error:  # noqa: BLE001 - whatever it is, the test must show it
                wrong.append(error)

        threads = [threading.Thread(target=look, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for step in range(50):
                backend.write(maker.metrics(("m", step, float(step))))
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert wrong == []
        assert backend.read(self.RUN_ID, "metric", Query()).count == 50

    @needs(Capability.READ)
    def test_what_was_written_is_read_after_closing(
        self, opened: Any, open_backend: Opener, maker: BatchMaker
    ) -> None:
        """By a backend that was opened for reading only, without a run."""
        opened.write(maker.start(project="vision"))
        batch = maker.metrics(("m", 0, 0.5), ("m", 1, math.nan))
        opened.write(batch)
        opened.close()
        reader: Any = open_backend(run_id=None, project=None, run_path=None, read_only=True)
        found = reader.read(self.RUN_ID, "metric", Query())
        assert [repr(value) for value in found["value"].tolist()] == ["0.5", "nan"]
        assert reader.load_run(self.RUN_ID).project.name == "vision"
        assert [stored.run.id for stored in reader.list_runs()] == [self.RUN_ID]


def _fits(query: Query, record: Any) -> bool:
    """The plain reading of a query, one record at a time."""
    for name, value in query.equals.items():
        if getattr(record, name) != value:
            return False
    for name, values in query.any_of.items():
        if getattr(record, name) not in values:
            return False
    for name in ("step", "epoch"):
        value = getattr(record, name)
        exact = getattr(query, name)
        low, high = getattr(query, f"{name}_min"), getattr(query, f"{name}_max")
        if (exact, low, high) == (None, None, None):
            continue
        if value is None or (exact is not None and value != exact):
            return False
        if (low is not None and value < low) or (high is not None and value > high):
            return False
    return query.include_non_finite or math.isfinite(record.value)


_RUN = RUN_ID


class ArtifactConformance(BackendKit):
    """Standard tests of payloads."""

    @needs(Capability.ARTIFACTS)
    def test_a_payload_comes_back_as_it_was(
        self, backend: Any, open_backend: Opener, tmp_path: Path
    ) -> None:
        """Whatever bytes it has, given once or twice, and after the backend was closed."""
        contents = [b"", b"\x00", bytes(range(256)) * 5000]
        for content in (*contents, contents[1]):
            backend.put_payload(_make_payload(tmp_path, content))
        backend.close()
        again: Any = open_backend()
        for content in contents:
            with again.open_payload(_RUN, hashlib.sha256(content).hexdigest()) as file:
                assert file.read() == content

    @needs(Capability.ARTIFACTS)
    def test_a_payload_is_taken_when_it_is_put(self, backend: Any, tmp_path: Path) -> None:
        """The file that it came from may go, and the payload's source is left as it is."""
        payload = _make_payload(tmp_path, b"kept")
        backend.put_payload(payload)
        assert payload.path.read_bytes() == b"kept"
        payload.path.unlink()
        with backend.open_payload(_RUN, payload.sha256) as file:
            assert file.read() == b"kept"

    @needs(Capability.ARTIFACTS)
    def test_a_payload_that_is_not_there_says_so(self, backend: Any) -> None:
        """By ArtifactNotFoundError."""
        with pytest.raises(ArtifactNotFoundError):
            backend.open_payload(_RUN, "0" * 64)

    @needs(Capability.ARTIFACTS)
    def test_a_record_and_its_payload_are_found_together(
        self, backend: Any, definition: BackendDefinition, tmp_path: Path, maker: BatchMaker
    ) -> None:
        """As the lane brings them: the payload first, and both again after a lost reply."""
        payload = _make_payload(tmp_path, b"weights" * 1000)
        (sample, _) = make_samples("artifact", _RUN)
        record = msgspec.structs.replace(
            sample, sha256=payload.sha256, size_bytes=payload.size_bytes
        )
        batch = maker.batch([record])
        for _ in range(2 if Capability.IDEMPOTENT in definition.capabilities else 1):
            backend.put_payload(payload)
            backend.write(batch)
        if Capability.READ in definition.capabilities:
            found = backend.read(_RUN, "artifact", Query()).to_records()
            assert list(found) == batch.to_records()
        with backend.open_payload(_RUN, payload.sha256) as file:
            assert file.read() == b"weights" * 1000

    @needs(Capability.ARTIFACTS)
    def test_a_payload_that_is_cut_short_is_not_taken(self, backend: Any, tmp_path: Path) -> None:
        """Bytes that are not what their hash says are refused, and never given out."""
        payload = _make_payload(tmp_path, b"whole")
        payload.path.write_bytes(b"who")
        with pytest.raises((BackendRejected, BackendUnavailable)):
            backend.put_payload(payload)
        with pytest.raises(ArtifactNotFoundError):
            backend.open_payload(_RUN, payload.sha256)
        payload.path.write_bytes(b"whole")
        backend.put_payload(payload)
        with backend.open_payload(_RUN, payload.sha256) as file:
            assert file.read() == b"whole"


def _make_payload(directory: Path, content: bytes) -> Payload:
    sha256 = hashlib.sha256(content).hexdigest()
    path = directory / f"source-{sha256[:8]}"
    path.write_bytes(content)
    return Payload(run_id=_RUN, sha256=sha256, size_bytes=len(content), path=path)


def _read_curves(
    backend: SupportsRead, keys: list[str], *, entries: int | None = None, **asked: Any
) -> CurveSet:
    return read_series_many(backend, _RUN, CurveQuery.build(keys, entries=entries, **asked))


class FollowingConformance(BackendKit):
    """Standard tests of backends that declare READ, and of what CHANGES adds to it.

    They read as `quark_core.runs.following` does, so that a backend which declares no more
    than READ is held to the same answers.
    """

    @needs(Capability.READ)
    def test_a_window_has_every_extreme_of_its_points(
        self, backend: Any, maker: BatchMaker
    ) -> None:
        """However few entries; each curve is exact where the window holds few points."""
        values = [math.sin(step / 9) for step in range(600)]
        values[333], values[477], values[500] = 50.0, -50.0, math.nan
        for begin in range(0, 600, 150):
            rows = [("m", step, values[step]) for step in range(begin, begin + 150)]
            backend.write(maker.metrics(*rows, ("n", begin, float(begin))))
        rows = backend.read(_RUN, "metric", Query())
        for axis, low, high in (
            ("step", None, None),
            ("step", 300, 520),
            ("step", 333, 333),
            ("time_us", int(rows["time_us"][40]), int(rows["time_us"][500])),
            ("relative_us", 20, 400),
        ):
            asked: dict[str, Any] = {"low": low, "high": high, "axis": axis}
            for entries in (None, 1, 7, 250):
                found = _read_curves(backend, ["n", "m", "no"], entries=entries, **asked)
                every = _read_curves(backend, ["n", "m", "no"], **asked)
                assert [curve.key for curve in found.curves] == [c.key for c in every.curves]
                for curve, points in zip(found.curves, every.curves, strict=True):
                    assert entries is None or len(curve) <= entries
                    assert points.exact
                    assert curve.exact == (len(points) <= (entries or len(points)))
                    assert curve.points == len(points)
                    assert np.nanmin(curve.low) == np.nanmin(points.low)
                    assert np.nanmax(curve.high) == np.nanmax(points.high)
                    bad = curve.non_finite > 0
                    assert curve.non_finite.sum() == points.non_finite.sum()
                    assert set(curve.non_finite_step[bad].tolist()) <= {500}
        (curve,) = _read_curves(backend, ["m"], entries=250, low=300, high=520).curves
        wanted = reduce_curves(rows, CurveQuery.build(["m"], entries=250, low=300, high=520))
        assert curve.step.tolist() == wanted[0].step.tolist() == list(range(300, 521))
        np.testing.assert_array_equal(curve.last, values[300:521])
        with pytest.raises(RunNotFoundError):
            read_series_many(backend, "absent", CurveQuery.build(["m"], entries=5))

    @needs(Capability.READ)
    def test_ranks_and_attempts_have_curves_of_their_own(self, opened: Any) -> None:
        """And none has steps that run twice; what a later attempt hides is in none."""
        first, second = BatchMaker(_RUN), BatchMaker(_RUN, rank=1, writer_id="rank1")
        opened.write(first.start())
        opened.write(first.metrics(*[("m", step, float(step)) for step in range(60)]))
        opened.write(second.metrics(*[("m", step, 500.0 + step) for step in range(60)]))
        later = BatchMaker(_RUN, attempt=1, writer_id="later", started_us=FIRST_TIME_US + 999)
        opened.write(later.start(from_step=40))
        opened.write(later.metrics(("m", 40, -1.0), ("m", 41, -2.0)))
        each = _read_curves(opened, ["m"], ranks=EACH_RANK).curves
        assert [(c.attempt, c.rank, c.points) for c in each] == [(0, 0, 40), (0, 1, 40), (1, 0, 2)]
        assert [c.step.tolist() for c in each[:2]] == [list(range(40))] * 2
        across = _read_curves(opened, ["m"], entries=20).curves
        assert [(c.attempt, c.rank, c.ranks) for c in across] == [
            (0, None, (0, 1)),
            (1, None, (0,)),
        ]
        assert (across[0].points, across[0].low.min(), across[0].high.max()) == (80, 0.0, 539.0)
        assert np.diff(across[0].step).min() > 0
        one = _read_curves(opened, ["m"], ranks=[1]).curves
        assert [(c.attempt, c.rank) for c in one] == [(0, 1)]
        every = _read_curves(opened, ["m"], entries=20, all_attempts=True).curves
        assert [c.points for c in every] == [120, 2]

    @needs(Capability.READ)
    def test_what_came_since_a_cursor_comes_once(self, backend: Any, maker: BatchMaker) -> None:
        """Nothing is missing between a curve and what is added to it, and nothing there twice."""
        backend.write(maker.metrics(("m", 0, 0.0), ("n", 0, 9.0)))
        found = _read_curves(backend, ["m", "late"])
        assert [curve.step.tolist() for curve in found.curves] == [[0]]
        heads = read_heads(backend, _RUN, kinds=["event"])
        assert not read_changes(backend, _RUN, found.cursor, keys=["m", "late"])
        other = BatchMaker(_RUN, rank=1, writer_id="rank1")
        backend.write(maker.metrics(("m", 1, 1.0), ("n", 1, 8.0), ("late", 1, 7.0)))
        backend.write(other.metrics(("m", 1, 5.0)))
        backend.write(maker.events("saved"))
        changes = read_changes(backend, _RUN, found.cursor, keys=["m", "late"])
        rows = changes.records["metric"]
        shown = zip(rows["metric_key"], rows["rank"], rows["step"], rows["value"], strict=True)
        assert sorted(shown) == [("late", 0, 1, 7.0), ("m", 0, 1, 1.0), ("m", 1, 1, 5.0)]
        assert set(changes.records) == {"metric"}
        assert not read_changes(backend, _RUN, changes.cursor, keys=["m", "late"])
        events = read_changes(backend, _RUN, heads.cursor, kinds=["event"]).records["event"]
        assert events["event_type"].tolist() == ["saved"]
        everything = read_changes(backend, _RUN, {}, kinds=["metric", "event"])
        assert everything.records["metric"].count == 6
        with pytest.raises(RunNotFoundError):
            read_changes(backend, "absent", {})

    @needs(Capability.READ)
    def test_a_cursor_of_what_is_hidden_now_is_stale(self, backend: Any, maker: BatchMaker) -> None:
        """Who has read it is told to read anew, and not given more to add to it."""
        backend.write(maker.metrics(*[("m", step, float(step)) for step in range(6)]))
        found = _read_curves(backend, ["m"])
        later = BatchMaker(_RUN, attempt=1, writer_id="later", started_us=FIRST_TIME_US + 999)
        backend.write(later.start(from_step=4))
        backend.write(later.metrics(("m", 4, 40.0)))
        changes = read_changes(backend, _RUN, found.cursor, keys=["m"])
        assert (changes.stale, dict(changes.records)) == (True, {})
        again = _read_curves(backend, ["m"])
        assert [curve.points for curve in again.curves] == [4, 1]
        assert not read_changes(backend, _RUN, again.cursor, keys=["m"])

    @needs(Capability.READ)
    def test_a_cursor_of_what_was_replaced_is_stale(self, backend: Any, maker: BatchMaker) -> None:
        """As long as an attempt repeats steps, and no more once it has come further."""
        backend.write(maker.metrics(*[("m", step, float(step)) for step in range(6)]))
        later = BatchMaker(_RUN, attempt=1, writer_id="later", started_us=FIRST_TIME_US + 999)
        for step, left, is_stale in ((4, 5, True), (5, 4, True), (6, 4, False), (7, 4, False)):
            found = _read_curves(backend, ["m"])
            if step == 4:
                backend.write(later.start())
            backend.write(later.metrics(("m", step, 40.0)))
            changes = read_changes(backend, _RUN, found.cursor, keys=["m"])
            assert changes.stale is is_stale
            if not is_stale:
                assert changes.records["metric"]["step"].tolist() == [step]
            again = _read_curves(backend, ["m"])
            assert [curve.points for curve in again.curves] == [left, step - 3]
            assert not read_changes(backend, _RUN, again.cursor, keys=["m"])

    @needs(Capability.READ)
    def test_what_is_never_hidden_is_followed_over_attempts(
        self, backend: Any, maker: BatchMaker
    ) -> None:
        """A later attempt hides no events: each of them comes once to who follows only those."""
        backend.write(maker.metrics(*[("m", step, float(step)) for step in range(6)]))
        backend.write(maker.events("saved"))
        heads = read_heads(backend, _RUN, kinds=["event"])
        backend.write(maker.events("out of memory"))
        later = BatchMaker(_RUN, attempt=1, writer_id="later", started_us=FIRST_TIME_US + 999)
        backend.write(later.start(from_step=4))
        backend.write(later.events("resumed"))
        changes = read_changes(backend, _RUN, heads.cursor, kinds=["event"])
        assert not changes.stale
        assert sorted(changes.records["event"]["event_type"]) == ["out of memory", "resumed"]
        assert not read_changes(backend, _RUN, changes.cursor, kinds=["event"])

    @needs(Capability.CHANGES)
    def test_much_that_came_is_given_in_parts(self, backend: Any, maker: BatchMaker) -> None:
        """Each leads to the next one, and a mark says when there is something to ask for."""
        marks = [read_mark(backend, _RUN)]
        for begin in range(0, 200, 20):
            rows = [("m", step, float(step)) for step in range(begin, begin + 20)]
            backend.write(maker.metrics(*rows))
        marks += [read_mark(backend, _RUN), read_mark(backend, _RUN)]
        assert marks[0] != marks[1] == marks[2]
        steps: list[int] = []
        cursor = read_heads(backend, _RUN).cursor
        assert not read_changes(backend, _RUN, cursor)
        changes = read_changes(backend, _RUN, {}, max_rows=30)
        assert changes.more
        while changes:
            steps += changes.records["metric"]["step"].tolist()
            changes = read_changes(backend, _RUN, changes.cursor, max_rows=30)
        assert steps == list(range(200))
        assert dict(changes.cursor) == dict(cursor)
        with pytest.raises(RunNotFoundError):
            read_mark(backend, "absent")
