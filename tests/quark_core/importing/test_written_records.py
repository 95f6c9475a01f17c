"""`session.write` takes records of every kind: checked, under the session's identity, and all."""

import dataclasses
import math
import warnings
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import count_examples

import quark
from quark_core.records import (
    RECORD_TYPES,
    EventRecord,
    LayerSummaryRecord,
    LifecycleRecord,
    MetricRecord,
    ProjectRecord,
    RunRecord,
)
from quark_core.records.json_object import JsonObject
from quark_core.records.query import Query
from quark_core.records.schema import validate_record
from quark_core.writers.records import SLICE_RECORDS

TIME_US = 1_600_000_000_000_000


def make_metric(key="train/loss", value=1.0, step=0, **changes):
    namespace, _, name = key.rpartition("/")
    record = MetricRecord(
        "old-run", "old", 3, 2, 77, TIME_US, key, namespace or None, name, value, step
    )
    return msgspec.structs.replace(record, **changes)


def make_event(**changes):
    record = EventRecord("old-run", "old", 3, 2, 5, TIME_US, "checkpoint_saved", "info", 4)
    return msgspec.structs.replace(record, **changes)


def make_layer(**changes):
    record = LayerSummaryRecord(
        "old-run", "old", 3, 2, 9, TIME_US, "net.0", "Linear", "gradient", "backward", 1, 6, 4
    )
    return msgspec.structs.replace(record, tensor_shape=(2, 3), mean=0.5, **changes)


def read(session, kind, query=None):
    return session.open_run.read(kind, query or Query()).to_records()


def read_written(session, kind):
    """The records that did not come from the session itself."""
    return [r for r in read(session, kind) if r.time_us < TIME_US + 10_000_000]


def content(record):
    return {
        name: value
        for name, value in dataclasses.asdict(record).items()
        if name not in ("run_id", "writer_id", "attempt", "rank", "sequence")
    }


def test_every_kind_is_written_as_it_is_under_the_sessions_identity(session):
    written = [
        make_metric(description="größe", metadata=JsonObject({"a": [1, None]})),
        make_event(payload=JsonObject({"path": "/x", "größe": {"b": 1}}), status="done"),
        make_layer(metadata=JsonObject({"k": "v"})),
        make_metric("acc", 0.5, None, epoch=3),
    ]
    assert session.write(written) == 4
    origin = session.open_run.origin
    for kind in ("metric", "event", "layer"):
        found = read_written(session, kind)
        wanted = [record for record in written if kind == record.KIND]
        assert list(map(content, found)) == list(map(content, wanted))
        for record in found:
            assert (record.run_id, record.writer_id) == (session.run_id, origin.writer_id)
            assert (record.attempt, record.rank) == (0, 0)
        assert len({record.id for record in read(session, kind)}) == len(read(session, kind))


def test_writing_and_logging_share_one_order(session, metrics):
    for step in range(6):
        if step % 2:
            metrics.log("m", float(step), step=step)
        else:
            session.write([make_metric("m", float(step), step)])
    found = metrics.read(metric_key="m")
    assert [record.value for record in found] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [record.sequence for record in found] == list(range(6))


def test_nothing_is_written_of_nothing(session):
    assert session.write([]) == 0
    assert session.write(iter(())) == 0


@pytest.mark.long
def test_the_records_of_one_run_go_into_another(session, tmp_path):
    with quark.start_run(project="q", storage_dir=tmp_path / "other") as other:
        metrics = quark.MetricsLogger(other)
        for step in range(100):
            metrics.log_many({"a/b": math.sin(step), "c": float(step)}, step=step)
        metrics.log("bad", math.inf, step=0)
        columns = metrics.columns()
    assert session.write(columns.to_records()) == 201
    copied = quark.MetricsLogger(session).columns()
    for name in ("time_us", "metric_key", "namespace", "metric_name", "value", "step", "epoch"):
        assert copied[name].tolist() == columns[name].tolist()


NO_STREAM_RECORD = [
    LifecycleRecord("r", "w", 0, 0, 0, 0, "heartbeat"),
    ProjectRecord("p", "p", "/", "now", "now"),
    {"metric": 1.0},
    "train/loss",
    None,
    MetricRecord,
]
BAD = [
    (make_metric(value="high"), r"MetricRecord\.value must be float"),
    (make_metric(value=10**400), r"MetricRecord\.value"),
    (make_metric(step=2**63), r"MetricRecord\.step must fit in 64 bits"),
    (make_metric(step=np.int64(3)), r"MetricRecord\.step"),
    (make_metric(step=None), "requires a step or an epoch"),
    (make_metric(metric_name="other"), r"MetricRecord\.metric_key"),
    (make_metric(metric_key=["a"]), r"MetricRecord\.metric_key"),
    (make_metric(time_us=2**60), r"MetricRecord\.time_us"),
    (make_metric(writer_id=None), r"MetricRecord\.writer_id"),
    (make_event(payload=[1]), r"EventRecord\.payload"),
    (make_event(payload={"a": object()}), r"EventRecord\.payload\.a is of type object"),
    (make_event(time_us=-(2**62)), r"EventRecord\.time_us"),
    (make_layer(std=10**400), r"LayerSummaryRecord\.std is too large"),
    (make_layer(element_count=2**63), r"LayerSummaryRecord\.element_count must fit"),
]
HUGE_SHAPE = msgspec.structs.replace(make_layer(), tensor_shape=(2**63,))


@pytest.mark.sampled
@pytest.mark.parametrize(("bad", "message"), BAD, ids=lambda value: None)
def test_a_bad_record_is_named_with_its_place_and_none_is_written(session, bad, message):
    good = make_metric("good")
    for records in ([good] * 3 + [bad, good], iter([good] * 3 + [bad, good])):
        with pytest.raises(quark.SchemaValidationError, match=r"^records\[3\]: .*" + message):
            session.write(records)
    assert read_written(session, "metric") == []
    # What could not be encoded would take the rest of its batch along.
    session.write([good])
    assert len(read_written(session, "metric")) == 1


def test_a_shape_that_no_json_holds_is_refused(session):
    with pytest.raises(quark.SchemaValidationError, match=r"tensor_shape\[0\] must fit"):
        session.write([HUGE_SHAPE])


@pytest.mark.parametrize("record", NO_STREAM_RECORD, ids=lambda record: type(record).__name__)
def test_what_is_no_record_of_the_stream_is_refused_by_name(session, record):
    name = type(record).__name__
    with pytest.raises(
        quark.SchemaValidationError, match=rf"^records\[0\]: {name} cannot be written"
    ) as caught:
        session.write([record])
    assert "MetricRecord, EventRecord, SystemTelemetryRecord, LayerSummaryRecord" in str(
        caught.value
    )


def test_the_record_of_a_run_is_refused(session):
    assert isinstance(session.context.run, RunRecord)
    with pytest.raises(quark.SchemaValidationError, match=r"RunRecord cannot be written"):
        session.write([session.context.run])


@pytest.mark.parametrize("records", [None, 3, make_metric()], ids=["None", "int", "record"])
def test_what_is_no_iterable_is_refused(session, records):
    with pytest.raises(quark.SchemaValidationError, match=r"^records must be an iterable"):
        session.write(records)


@pytest.mark.long
def test_a_collection_is_written_whole_or_not_at_all(session):
    many = [make_metric("m", float(i), i) for i in range(2 * SLICE_RECORDS + 5)]
    for records in ([*many, "bad"], (*many, "bad")):
        with pytest.raises(quark.SchemaValidationError, match=rf"records\[{len(many)}\]"):
            session.write(records)
        assert read(session, "metric") == ()
    assert session.write(tuple(many)) == len(many)


@pytest.mark.long
def test_of_an_iterator_whole_slices_are_written_before_a_bad_record(session):
    def generate():
        for i in range(2 * SLICE_RECORDS + 5):
            yield make_metric("m", float(i), i)
        yield "bad"

    with pytest.raises(quark.SchemaValidationError, match=rf"records\[{2 * SLICE_RECORDS + 5}\]"):
        session.write(generate())
    steps = [record.step for record in read(session, "metric")]
    assert steps == list(range(2 * SLICE_RECORDS))


@pytest.mark.long
def test_an_iterator_that_raises_leaves_whole_slices(session):
    def generate():
        for i in range(SLICE_RECORDS + 5):
            yield make_metric("m", float(i), i)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        session.write(generate())
    assert len(read(session, "metric")) == SLICE_RECORDS


@pytest.mark.long
def test_an_iterator_is_not_gone_through_ahead_of_what_is_written(session):
    """A generator of any length fits: never more than a slice of it is held."""
    seen = []

    def generate():
        for i in range(3 * SLICE_RECORDS):
            if i == 2 * SLICE_RECORDS:
                seen.append(session.report_delivery().lanes[0].submitted)
            yield make_metric("m", float(i), i)

    session.write(generate())
    assert seen[0] >= 2 * SLICE_RECORDS


@pytest.mark.long
def test_values_that_are_not_finite_are_kept_unless_the_run_is_strict(session, tmp_path):
    values = [math.nan, math.inf, -math.inf, 1.0]
    records = [make_metric("m", value, step) for step, value in enumerate(values)]
    events = len(read(session, "event"))
    assert session.write(records) == 4
    columns = quark.MetricsLogger(session).columns()
    assert str(columns["value"].tolist()) == str(values)
    # Copied data is not news: no event is made of it.
    assert len(read(session, "event")) == events
    with quark.start_run(project="p", storage_dir=tmp_path / "strict", strict_mode=True) as strict:
        for value in values[:3]:
            with pytest.raises(quark.SchemaValidationError, match=r"records\[1\].*value"):
                strict.write([records[3], make_metric("m", value)])
        assert read(strict, "metric") == ()


@pytest.mark.long
def test_a_name_outside_the_rule_is_stored_as_log_stores_it(session, tmp_path):
    records = [make_metric("mAP@50", 0.5, 0), make_metric("mAP@50", 0.6, 1)]
    for given_records in (records, iter(records)):
        with pytest.warns(RuntimeWarning, match="stored as 'mAP_x40_50'") as caught:
            assert session.write(given_records) == 2
        assert len(caught) == 1
        assert Path(caught[0].filename) == Path(__file__)
    metrics = quark.MetricsLogger(session)
    assert [r.value for r in metrics.read(metric_key="mAP@50")] == [0.5, 0.6] * 2
    stored = metrics.read()
    assert {(r.metric_key, r.namespace, r.metric_name) for r in stored} == {
        ("mAP_x40_50", None, "mAP_x40_50")
    }
    # What was stored before is stored again as it is.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.write(stored)
    assert {r.metric_key for r in metrics.read()} == {"mAP_x40_50"}
    with (
        quark.start_run(project="p", storage_dir=tmp_path / "strict", strict_mode=True) as strict,
        pytest.raises(quark.SchemaValidationError, match="naming rule"),
    ):
        strict.write(records)


def test_values_are_brought_into_the_form_that_is_stored(session):
    class Text(str):
        pass

    session.write(
        [
            make_metric(value=3, description="half \ud800"),
            make_metric(value=np.float64(0.25)),
            make_event(payload={"a": (1, 2), "x": math.nan}, status=Text("ok")),
        ]
    )
    first, second = read_written(session, "metric")
    assert (type(first.value), first.value, first.description) == (float, 3.0, "half ?")
    assert (type(second.value), second.value) == (float, 0.25)
    (event,) = read_written(session, "event")
    assert event.payload == {"a": [1, 2], "x": "NaN"}
    assert event.status == "ok"


def test_what_the_caller_changes_later_changes_nothing(session):
    payload = {"a": 1}
    session.write([make_event(payload=payload)])
    payload["a"] = 2
    assert read_written(session, "event")[0].payload == {"a": 1}


def test_a_run_that_takes_no_records_refuses(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        session.write([make_metric()])
    with pytest.raises(quark.InvalidRunStateError, match="write: the run has ended"):
        session.write([make_metric()])
    with pytest.raises(quark.InvalidRunStateError, match=r"write: .*reading only"):
        quark.open_run(session.run_id, tmp_path).write([make_metric()])


def test_a_run_that_keeps_nothing_takes_records(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="none") as session:
        assert session.write([make_metric()] * 3) == 3


@pytest.mark.long
def test_half_a_million_records_are_all_there_once(session):
    count = 500_000
    written = session.write(make_metric("m", float(i), i) for i in range(count))
    assert written == count
    columns = quark.MetricsLogger(session).columns()
    assert np.array_equal(columns["sequence"], np.arange(count))
    assert np.array_equal(columns["step"], np.arange(count))
    report = session.report_delivery()
    assert (report.lanes[0].dropped, report.lanes[0].quarantined) == (0, {})


@pytest.mark.long
def test_heavy_records_are_all_there_once(session):
    """Each takes far more memory than its share of what may wait."""
    text = "x" * 200_000
    payloads = [JsonObject({"text": text, "place": place}) for place in range(300)]
    assert session.write(make_event(payload=payload) for payload in payloads) == 300
    found = read_written(session, "event")
    assert [record.payload["place"] for record in found] == list(range(300))
    assert session.report_delivery().lanes[0].dropped == 0


NUMBERS = (-1, 0, 3, 2**62, 2**63, TIME_US, True, 0.5, 10**400, math.nan)
TEXTS = ("", "a", "a/b", "gradient", "info", "\ud800", b"x")
CONTAINERS = ((), (1,), ("x",), (2**63,), {}, {"a": 1}, [1])
odd = st.sampled_from([None, *NUMBERS, *TEXTS, *CONTAINERS])
base_records = st.sampled_from([make_metric(), make_event(), make_layer()])


@pytest.mark.long
@settings(max_examples=count_examples(300))
@given(data=st.data(), again=st.booleans())
def test_what_the_schema_refuses_is_refused_and_nothing_harms_the_rest(session, data, again):
    """The short way for ordinary metrics accepts nothing that `validate_record` refuses."""
    base = data.draw(base_records)
    names = data.draw(st.lists(st.sampled_from(base.__struct_fields__), min_size=1, max_size=2))
    changed = msgspec.structs.replace(base, **{name: data.draw(odd) for name in names})
    # A name that was seen before takes the short way.
    records = [base, changed] if again else [changed]
    try:
        validate_record(changed)
    except quark.SchemaValidationError:
        is_data = isinstance(changed, MetricRecord) and changed.value != changed.value
        if not is_data:
            with pytest.raises(quark.SchemaValidationError):
                session.write(records)
            return
    before = len(read(session, base.KIND))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            written = session.write(records)
    except quark.SchemaValidationError:
        # Beyond the schema: what no column of 64 bits could hold.
        written = 0
    assert len(read(session, base.KIND)) == before + written
    assert session.open_run.stream.report().lanes[0].dropped == 0


def test_every_kind_of_the_schema_but_the_runs_own_life_can_be_written(session):
    makers = {"metric": make_metric, "event": make_event, "layer": make_layer}
    assert set(RECORD_TYPES) >= {*makers, "lifecycle"}
    for make in makers.values():
        assert session.write([make()]) == 1
