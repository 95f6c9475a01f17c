"""Records: dataclasses to whoever asks, immutable, hashable, and dicts on request."""

import copy
import dataclasses
import json
import pickle
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from record_samples import ALL, CONFIG, EVENT, LIFECYCLE, METRIC, TIME

from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord, format_time, parse_time
from quark_core.records.base import check_timestamp
from quark_core.records.json_object import JsonObject
from quark_core.records.sweeps import StoredSweep

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

every_record = pytest.mark.parametrize("record", ALL, ids=lambda record: type(record).__name__)


@every_record
def test_every_record_is_a_dataclass(record):
    names = [field.name for field in dataclasses.fields(record)]

    assert dataclasses.is_dataclass(record)
    assert dataclasses.is_dataclass(type(record))
    assert dataclasses.asdict(record) == {name: getattr(record, name) for name in names}
    assert type(record)(**{name: getattr(record, name) for name in names}) == record


@every_record
def test_replace_changes_one_field_of_a_copy(record):
    name = dataclasses.fields(record)[0].name
    changed = dataclasses.replace(record, **{name: "another"})

    assert type(changed) is type(record)
    assert getattr(changed, name) == "another"
    assert changed != record
    assert dataclasses.replace(changed, **{name: getattr(record, name)}) == record


def test_fields_know_their_types_and_defaults():
    fields = {field.name: field for field in dataclasses.fields(MetricRecord)}

    assert list(fields)[:6] == ["run_id", "writer_id", "attempt", "rank", "sequence", "time_us"]
    assert fields["value"].type is float
    assert fields["value"].default is dataclasses.MISSING
    assert fields["step"].default is None
    assert "KIND" not in fields


@every_record
def test_no_field_can_be_set_or_deleted(record):
    before = record.to_dict()
    for field in dataclasses.fields(record):
        with pytest.raises((AttributeError, TypeError)):
            setattr(record, field.name, None)
        with pytest.raises((AttributeError, TypeError)):
            delattr(record, field.name)
    with pytest.raises((AttributeError, TypeError)):
        record.unheard_of = 1

    assert record.to_dict() == before


@every_record
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda record: pickle.loads(pickle.dumps(record))]
)
def test_copies_and_pickles_are_equal_and_of_the_same_types(record, copied):
    twin = copied(record)

    assert type(twin) is type(record)
    assert twin == record
    assert hash(twin) == hash(record)
    for field in dataclasses.fields(record):
        assert type(getattr(twin, field.name)) is type(getattr(record, field.name))


@every_record
def test_to_dict_is_plain_json(record):
    values = record.to_dict()

    assert json.loads(json.dumps(values, allow_nan=False)) == values


@every_record
def test_to_dict_is_a_new_dict_each_time(record):
    values = record.to_dict()
    values.clear()

    assert record.to_dict()


def test_changing_what_to_dict_returned_leaves_the_record_alone():
    METRIC.to_dict()["metadata"]["lr"].append(0.2)
    CONFIG.to_dict()["values"]["model"]["depth"] = 5

    assert METRIC.metadata == {"lr": [0.1, None]}
    assert CONFIG.values == {"model": {"depth": 4}}


def test_to_dict_of_a_stream_record_begins_with_its_id_and_tells_the_time_as_text():
    values = METRIC.to_dict()

    assert next(iter(values)) == "id"
    assert values["id"] == METRIC.id
    assert values["timestamp"] == TIME
    assert "time_us" not in values


def test_an_id_is_made_of_writer_kind_and_sequence():
    ids = [METRIC.id, EVENT.id, LIFECYCLE.id]

    assert ids == ["w1-metric-7", "w1-event-7", "w1-lifecycle-7"]
    assert dataclasses.replace(METRIC, sequence=8).id != METRIC.id


def test_equal_records_of_different_key_order_have_equal_hashes():
    one = dataclasses.replace(METRIC, metadata=JsonObject({"a": 1, "b": 2}))
    two = dataclasses.replace(METRIC, metadata=JsonObject({"b": 2, "a": 1}))

    assert one == two
    assert len({one, two}) == 1


def test_records_of_different_types_differ():
    assert len(set(ALL)) == len(ALL)


MOMENTS = st.datetimes(timezones=st.just(UTC))


@given(MOMENTS)
@example(datetime(1, 1, 1, tzinfo=UTC))
@example(datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC))
@example(datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC))
def test_a_formatted_time_parses_to_the_same_microsecond(moment):
    time_us = (moment - EPOCH) // timedelta(microseconds=1)
    text = format_time(time_us)

    assert parse_time(text) == time_us
    assert datetime.fromisoformat(text) == moment


@given(MOMENTS, st.integers(-14 * 60, 14 * 60))
def test_every_timestamp_that_is_taken_can_be_formatted(moment, offset_min):
    local = moment.replace(tzinfo=timezone(timedelta(minutes=offset_min)))
    try:
        time_us = check_timestamp(local)
    except SchemaValidationError:
        return

    assert datetime.fromisoformat(format_time(time_us)) == local


@pytest.mark.parametrize(
    "timestamp",
    ["9999-12-31T23:30:00-01:00", "0001-01-01T00:30:00+01:00", "soon", "", 1_778_146_200, None],
)
def test_a_timestamp_that_no_record_could_show_is_refused(timestamp):
    with pytest.raises(SchemaValidationError, match=r"^timestamp "):
        check_timestamp(timestamp)


@pytest.mark.parametrize(
    "text",
    ["2026-05-07T09:30:00.000001", "2026-05-07T11:30:00.000001+02:00", "20260507T093000.000001Z"],
)
def test_a_time_is_read_with_its_offset_and_without_one_as_utc(text):
    assert format_time(parse_time(text)) == TIME


@pytest.mark.parametrize(
    ("state", "trials", "counts", "is_done"),
    [
        ("running", 3, {"completed": 2, "broken": 1}, True),
        ("running", 3, {"completed": 2, "suspended": 1}, False),
        ("running", 4, {"completed": 3}, False),
        ("running", None, {"completed": 3}, False),
        ("paused", 3, {"completed": 3}, False),
        ("running", 3, {"completed": "3"}, False),
    ],
)
def test_a_sweep_is_done_when_all_it_was_opened_for_have_ended(state, trials, counts, is_done):
    moment = "2026-01-01T00:00:00.000000Z"
    sweep = StoredSweep(
        id="s1",
        project="p",
        name="n",
        definition=JsonObject({"trials": trials}),
        state=state,
        counts=JsonObject(counts),
        created_at=moment,
        updated_at=moment,
    )
    assert sweep.is_done is is_done
