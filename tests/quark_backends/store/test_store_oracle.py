"""What the store answers is what a list of all acknowledged records would answer."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import START_US, Store, Writer
from tiers import count_examples

from quark_backends.store.chunks import CODEC_PCODEC, CODEC_ZSTD
from quark_core.records import EventRecord, LayerSummaryRecord, MetricRecord
from quark_core.records.json_object import JsonObject
from quark_core.records.query import Query

KINDS = ("metric", "layer", "event")
KEYS = ("a", "b/c", "b/d", "x/y/z")
CODECS = st.sampled_from([CODEC_ZSTD, CODEC_PCODEC])
FLOATS = st.floats(width=64) | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1.5])
STEPS = st.none() | st.integers(0, 12) | st.just(2**62)
METADATA = st.sampled_from([None, JsonObject({"x": [1, None, "ä"]}), JsonObject({})])
POINTS = st.fixed_dictionaries(
    {
        "key": st.sampled_from(KEYS),
        "value": FLOATS,
        "step": STEPS,
        "epoch": st.none() | st.integers(0, 3),
        "time_us": st.integers(-(10**15), 10**15),
        "text": st.sampled_from([None, "", "größer"]),
        "metadata": METADATA,
        "optional": st.none() | FLOATS,
        "shape": st.sampled_from([None, (), (3,), (2**40, 1)]),
    }
)
BOUNDS = st.none() | st.integers(0, 13)
SETTINGS = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=count_examples(60),
    deadline=None,
)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks and turns so small that a few records fill several of them."""
    monkeypatch.setattr("quark_backends.store.upkeep.compaction.CHUNK_ROWS", 8)
    monkeypatch.setattr("quark_backends.store.upkeep.compaction._TURN_BATCHES", 3)


class Model:
    """A store beside the list of everything that it has acknowledged."""

    def __init__(self, folder):
        self.store = Store(folder)
        self.records = {kind: [] for kind in KINDS}
        self.from_steps = {}
        self.started = {}
        self.writers = []
        self.add_writers(self.store.start())

    def add_writers(self, first):
        self.writers += [first, Writer(self.store, first.attempt), Writer(self.store, 0, rank=1)]
        self.writers[-1].attempt = first.attempt
        self.started[first.id] = START_US

    def resume(self, from_step):
        first = self.store.start(from_step=from_step)
        if from_step is not None:
            self.from_steps[first.attempt] = from_step
        self.add_writers(first)

    def write(self, writer, kind, points, displaced):
        first = writer.sequences.get(kind, 0)
        writer.sequences[kind] = first + len(points)
        sequences = list(range(first, first + len(points)))
        if displaced:
            sequences = sequences[::-1]
        records = [
            make_record(writer, kind, sequence, point)
            for sequence, point in zip(sequences, points, strict=True)
        ]
        writer.write(records)
        self.records[kind] += records
        self.started.setdefault(writer.id, min(record.time_us for record in records))

    def order(self, kind):
        return sorted(
            self.records[kind],
            key=lambda r: (r.attempt, r.rank, self.started[r.writer_id], r.writer_id, r.sequence),
        )

    def is_replaced(self, kind, record, ordered):
        """Whether a later attempt that does not say from where it goes on has repeated it."""
        if kind == "event":
            return False
        for attempt in {r.attempt for r in ordered} - self.from_steps.keys():
            its = [
                other
                for other in ordered
                if other.attempt == attempt > record.attempt
                and (kind != "metric" or other.metric_key == record.metric_key)
            ]
            steps = [(other.rank, other.step) for other in its if other.step is not None]
            place = record.step
            if not steps:
                steps = [(other.rank, other.epoch) for other in its if other.epoch is not None]
                place = record.epoch if record.step is None else None
            if place is not None and steps:
                first = min(dict(reversed(steps)).values())
                if first <= place <= max(step for _, step in steps):
                    return True
        return False

    def is_hidden(self, kind, record, ordered):
        if self.is_replaced(kind, record, ordered):
            return True
        hiding = [s for number, s in self.from_steps.items() if number > record.attempt]
        if not hiding or kind == "event":
            return False
        if record.step is not None:
            return record.step >= min(hiding)
        beyond = [
            other.sequence
            for other in self.records[kind]
            if other.writer_id == record.writer_id
            and other.step is not None
            and other.step >= min(hiding)
        ]
        return bool(beyond) and record.sequence > min(beyond)

    def expect(self, kind, query):
        records = self.order(kind)
        fitting = [
            record
            for record in records
            if (query.all_attempts or not self.is_hidden(kind, record, records))
            and fits(query, record)
        ]
        if query.limit is None:
            return fitting
        return fitting[max(0, len(fitting) - query.limit) :]


def make_record(writer, kind, sequence, point):
    head = writer.head(kind, point["time_us"], sequence)
    step, epoch = point["step"], point["epoch"]
    if kind == "metric":
        namespace, _, name = point["key"].rpartition("/")
        return MetricRecord(
            *head,
            point["key"],
            namespace or None,
            name,
            point["value"],
            step,
            epoch,
            point["text"],
            point["metadata"],
        )
    if kind == "event":
        return EventRecord(
            *head, point["key"], "info", step, epoch, point["text"], point["metadata"]
        )
    return LayerSummaryRecord(
        *head,
        point["key"],
        "Linear",
        "activation",
        "forward",
        0,
        64,
        step,
        epoch,
        point["shape"],
        point["value"],
        point["optional"],
        metadata=point["metadata"],
    )


def fits(query, record):
    for name, value in query.equals.items():
        if getattr(record, name) != value:
            return False
    for name, values in query.any_of.items():
        if getattr(record, name) not in values:
            return False
    for name in ("step", "epoch"):
        value = getattr(record, name)
        exact, low, high = (getattr(query, name + end) for end in ("", "_min", "_max"))
        if (exact, low, high) == (None, None, None):
            continue
        if value is None or (exact is not None and value != exact):
            return False
        if (low is not None and value < low) or (high is not None and value > high):
            return False
    if not query.include_non_finite and record.KIND == "metric":
        return math.isfinite(record.value)
    return True


@st.composite
def queries(draw, kind):
    name = {"metric": "metric_key", "layer": "module_name", "event": "event_type"}[kind]
    equals, any_of = {}, {}
    if draw(st.booleans()):
        equals[name] = draw(st.sampled_from([*KEYS, "none"]))
    if draw(st.booleans()):
        any_of[name] = tuple(draw(st.lists(st.sampled_from(KEYS), max_size=3)))
    if kind == "metric" and draw(st.booleans()):
        equals[draw(st.sampled_from(["namespace", "metric_name"]))] = draw(
            st.sampled_from(["b", "c", "d", "x/y"])
        )
    bounds = ("step", "step_min", "step_max", "epoch", "epoch_min", "epoch_max")
    chosen = draw(st.sets(st.sampled_from(bounds), max_size=2))
    return Query(
        equals=equals,
        any_of=any_of,
        **{bound: draw(BOUNDS) for bound in bounds if bound in chosen},
        limit=draw(st.none() | st.integers(0, 20)),
        include_non_finite=draw(st.booleans()),
        all_attempts=draw(st.booleans()),
    )


def fill_randomly(model, data):
    for _ in range(data.draw(st.integers(1, 9))):
        action = data.draw(st.sampled_from(["write"] * 6 + ["compact", "resume", "read"]))
        if action == "resume" and model.store.attempt < 4:
            model.resume(data.draw(st.none() | st.integers(0, 12)))
        elif action == "compact":
            model.store.compact(codec=data.draw(CODECS))
        elif action == "read":
            # Fills the reader's caches in the middle of it all.
            model.store.reader.read("run0", data.draw(st.sampled_from(KINDS)), Query())
        else:
            points = data.draw(st.lists(POINTS, min_size=1, max_size=12))
            model.write(
                data.draw(st.sampled_from(model.writers)),
                data.draw(st.sampled_from(KINDS)),
                points,
                data.draw(st.booleans()),
            )


def by_bits(records):
    return [repr(record) for record in records]


@pytest.mark.long
@SETTINGS
@given(st.data())
def test_any_query_of_any_store_is_answered_as_a_list_would(small_chunks, tmp_path_factory, data):
    model = Model(tmp_path_factory.mktemp("store"))
    try:
        fill_randomly(model, data)
        asked = [
            (kind, data.draw(queries(kind)))
            for kind in data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
        ]
        for compacted in (False, True):
            if compacted:
                model.store.compact(codec=data.draw(CODECS))
            for kind, query in asked:
                expected = by_bits(model.expect(kind, query))
                found = model.store.reader.read("run0", kind, query)
                assert by_bits(found.to_records()) == expected
                assert by_bits(found.to_records()) == expected
                rows = data.draw(st.integers(1, 30))
                parts = list(model.store.reader.iterate("run0", kind, query, rows=rows))
                assert all(part.count <= rows for part in parts)
                records = itertools.chain.from_iterable(part.to_records() for part in parts)
                assert by_bits(records) == expected
    finally:
        model.store.close()


@pytest.mark.long
@SETTINGS
@given(st.data())
def test_any_curve_holds_every_point_and_every_extreme(monkeypatch, tmp_path_factory, data):
    monkeypatch.setattr("quark_backends.store.upkeep.compaction.CHUNK_ROWS", 130)
    model = Model(tmp_path_factory.mktemp("store"))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**20)))
    try:
        step = 0
        for _ in range(data.draw(st.integers(1, 8))):
            action = data.draw(st.sampled_from(["write"] * 5 + ["compact", "resume"]))
            if action == "resume" and model.store.attempt < 3:
                step = max(0, step - data.draw(st.integers(0, 300)))
                model.resume(data.draw(st.sampled_from([step, None])))
            elif action == "compact":
                model.store.compact()
            else:
                writer = data.draw(st.sampled_from(model.writers[-3:]))
                count = data.draw(st.integers(1, 400))
                without = data.draw(st.sampled_from([0.0, 0.0, 0.1]))
                bad = data.draw(st.sampled_from([0.0, 0.0, 0.05, 1.0]))
                points = []
                for value in generator.normal(size=count).round(3).tolist():
                    points.append(
                        {
                            "key": "a" if generator.random() < 0.9 else "b/c",
                            "value": math.nan if generator.random() < bad else value,
                            "step": None if generator.random() < without else step,
                            "epoch": 0,
                            "time_us": START_US,
                            "text": None,
                            "metadata": None,
                        }
                    )
                    step += 1
                model.write(writer, "metric", points, data.draw(st.booleans()))
        for all_attempts in (False, True):
            expected = model.expect(
                "metric", Query(equals={"metric_key": "a"}, all_attempts=all_attempts)
            )
            if not expected:
                continue  # its own test
            ranks = sorted({record.rank for record in expected})
            for max_points in (None, 1, 2, 3, data.draw(st.integers(1, 100)), len(expected)):

                def read(max_points=max_points, all_attempts=all_attempts, **arguments):
                    arguments |= {"max_points": max_points, "all_attempts": all_attempts}
                    return model.store.reader.read_series("run0", "a", **arguments)

                for rank in ranks:
                    own = [record for record in expected if record.rank == rank]
                    check_series(read(rank=rank), own, max_points)
                if len(ranks) == 1:
                    check_series(read(), expected, max_points)
                else:
                    check_across(read(), expected, max_points)
    finally:
        model.store.close()


def check_across(series, records, max_points):
    """A curve across ranks: each point once, at each step of each attempt one entry."""
    assert (series.points, series.exact) == (len(records), False)
    assert max_points is None or len(series) <= max_points
    finite = [record.value for record in records if math.isfinite(record.value)]
    assert int(series.non_finite.sum()) == len(records) - len(finite)
    if finite:
        assert (np.nanmin(series.low), np.nanmax(series.high)) == (min(finite), max(finite))
    if max_points is not None:
        return
    places = {}
    for record in records:
        place = (record.attempt, -1 if record.step is None else record.step)
        places.setdefault(place, []).append(record.value)
    assert series.step.tolist() == [step for _, step in sorted(places)]
    assert series.count.tolist() == [len(places[place]) for place in sorted(places)]
    for mean, place in zip(series.mean, sorted(places), strict=True):
        own = [value for value in places[place] if math.isfinite(value)]
        assert mean == pytest.approx(np.mean(own)) if own else math.isnan(mean)


def check_series(series, records, max_points):
    assert series.points == len(records)
    assert max_points is None or len(series) <= max_points
    values = np.array([record.value for record in records])
    steps = [-1 if record.step is None else record.step for record in records]
    start = 0
    for entry, count in enumerate(series.count.tolist()):
        part = values[start : start + count]
        finite = part[np.isfinite(part)]
        assert series.step[entry] == steps[start]
        assert series.non_finite[entry] == count - len(finite)
        np.testing.assert_equal(series.last[entry], part[-1])
        if len(finite):
            assert series.low[entry] == finite.min()
            assert series.high[entry] == finite.max()
            assert series.mean[entry] == pytest.approx(finite.mean(), rel=1e-6, abs=1e-9)
            its_steps = steps[start : start + count]
            assert series.low_step[entry] == its_steps[part.tolist().index(finite.min())]
            assert series.high_step[entry] == its_steps[part.tolist().index(finite.max())]
        else:
            assert math.isnan(series.low[entry])
        start += count
