"""Records: dataclasses to whoever asks, immutable, hashable, and dicts on request."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import re
from datetime import UTC, datetime, timedelta, timezone

import golden
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from record_samples import ALL, CONFIG, ENVIRONMENT, EVENT, LIFECYCLE, METRIC, PROJECT, RUN, TIME
from record_strategies import BATCHES

from quark_core.errors import SchemaValidationError
from quark_core.records import (
    RECORD_TYPES,
    EvidenceRecord,
    GpuReading,
    MetricRecord,
    format_time,
    parse_time,
)
from quark_core.records.base import check_timestamp
from quark_core.records.checks import check_event_type
from quark_core.records.json_object import JsonObject
from quark_core.records.schema import (
    EVENT_SEVERITIES,
    LOG_IDENTIFIERS,
    RUN_STATUSES,
    TERMINAL_STATUSES,
    dump_record,
    validate_record,
)
from quark_core.records.sweeps import StoredSweep
from quark_core.testing.fakes import make_samples

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
def test_to_dict_is_plain_json_and_a_new_dict_each_time(record):
    values = record.to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
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


# Some of the stored ones are not finite on purpose.
GOOD = {kind: make_samples(kind, "run0")[0] for kind in RECORD_TYPES} | {
    kind: next(
        record
        for record in records
        if math.isfinite(getattr(record, {"metric": "value", "batch": "loss"}.get(kind, ""), 0.0))
    )
    for kind, records in golden.RECORDS.items()
}
DIGEST = "0" * 63


@pytest.mark.parametrize("kind", sorted(RECORD_TYPES))
def test_a_good_record_of_every_type_validates_and_dumps(kind):
    record = GOOD[kind]
    assert validate_record(record) is record
    dumped = json.loads(json.dumps(dump_record(record), allow_nan=False))
    assert dumped["id"] == record.id
    assert dumped["timestamp"] == record.timestamp
    assert set(dumped) == {"id", "timestamp", *record.__struct_fields__} - {"time_us"}


@pytest.mark.parametrize("kind", sorted(RECORD_TYPES))
def test_a_record_is_a_dataclass_that_can_be_replaced(kind):
    @given(BATCHES[kind])
    def check(record):
        assert dataclasses.is_dataclass(record)
        assert [field.name for field in dataclasses.fields(record)] == list(
            record.__struct_fields__
        )
        assert dataclasses.replace(record, sequence=7).sequence == 7

    check()


def test_what_is_inside_of_a_record_is_validated_too():
    bad = EvidenceRecord("metric", "loss", "It fell.", step_start=-1)
    with pytest.raises(SchemaValidationError, match=r"^EvidenceRecord\.step_start must not"):
        validate_record(dataclasses.replace(GOOD["alert"], evidence=(bad,)))


def change(record, **fields):
    return dataclasses.replace(record, **fields)


@pytest.mark.parametrize("record", ALL, ids=lambda record: type(record).__name__)
def test_a_good_record_is_returned_as_it_is(record):
    assert validate_record(record) is record
    assert dump_record(record) == record.to_dict()
    json.dumps(dump_record(record), allow_nan=False)


@pytest.mark.parametrize(
    "record",
    [
        change(METRIC, run_id=None),
        change(METRIC, value=3),
        change(METRIC, step=None, epoch=0),
        change(METRIC, step=2**63 - 1),
        change(METRIC, metric_key="loss", namespace=None),
        change(METRIC, metric_key="a/b/loss", namespace="a/b"),
        change(METRIC, metadata=JsonObject()),
        change(EVENT, event_type="eval/done-2.b", step=0, epoch=0, status="ok"),
        change(RUN, id=None, tags=()),
        change(CONFIG, notes=("config.x was kept as its repr",)),
        *(change(EVENT, severity=severity) for severity in EVENT_SEVERITIES),
        *(change(RUN, status=status) for status in RUN_STATUSES),
    ],
)
def test_the_borders_of_what_is_allowed_are_allowed(record):
    assert validate_record(record) is record


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        (METRIC, "run_id", 1),
        (METRIC, "writer_id", None),
        (METRIC, "attempt", -1),
        (METRIC, "attempt", None),
        (METRIC, "rank", -1),
        (METRIC, "rank", "0"),
        (METRIC, "sequence", -1),
        (METRIC, "sequence", True),
        (METRIC, "time_us", 1.5),
        (METRIC, "metric_key", ""),
        (METRIC, "metric_key", "another/loss"),
        (METRIC, "metric_key", "n" * 251),
        (METRIC, "metric_key", None),
        (METRIC, "value", "0.5"),
        (METRIC, "value", True),
        (METRIC, "value", None),
        (METRIC, "value", float("nan")),
        (METRIC, "value", float("inf")),
        (METRIC, "value", -float("inf")),
        (METRIC, "value", 10**400),
        (METRIC, "step", -1),
        (METRIC, "step", 1.0),
        (METRIC, "step", True),
        (METRIC, "epoch", -1),
        (METRIC, "description", 3),
        (METRIC, "metadata", [1]),
        (METRIC, "metadata", "{}"),
        (EVENT, "event_type", "Checkpoint"),
        (EVENT, "event_type", ""),
        (EVENT, "event_type", "a b"),
        (EVENT, "severity", "fatal"),
        (EVENT, "severity", "INFO"),
        (EVENT, "severity", None),
        (EVENT, "status", 200),
        (EVENT, "payload", ["a"]),
        (LIFECYCLE, "action", None),
        (LIFECYCLE, "action", "explode"),
        (LIFECYCLE, "data", "good"),
        (PROJECT, "name", None),
        (RUN, "status", "lost"),
        (RUN, "status", "Running"),
        (RUN, "status", None),
        (RUN, "tags", ["a"]),
        (RUN, "tags", ("a", 1)),
        (RUN, "strict_mode", 1),
        (RUN, "attempt", -1),
        (RUN, "resume_count", -1),
        (RUN, "resume_count", False),
        (RUN, "created_at", None),
        (CONFIG, "values", None),
        (CONFIG, "notes", "one"),
        (ENVIRONMENT, "values", []),
        (GOOD["telemetry"], "boundary", "minute"),
        (GOOD["telemetry"], "step_time_ms", math.nan),
        (GOOD["telemetry"], "compute_time_ms", "1"),
        (GOOD["telemetry"], "ram_used_bytes", -1),
        (GOOD["telemetry"], "overflow_count", None),
        (GOOD["telemetry"], "gpus", [GpuReading(0)]),
        (GOOD["telemetry"], "gpus", (1,)),
        (GOOD["layer"], "summary_type", "weight"),
        (GOOD["layer"], "hook_direction", "up"),
        (GOOD["layer"], "element_count", -1),
        (GOOD["layer"], "module_name", ""),
        (GOOD["layer"], "tensor_shape", (2, -1)),
        (GOOD["parameter"], "parameter_role", "gain"),
        (GOOD["parameter"], "parameter_name", ""),
        (GOOD["parameter"], "in_optimizer", 1),
        (GOOD["parameter"], "non_finite_value_count", -1),
        (GOOD["parameter"], "shape", [1]),
        (GOOD["parameter_distribution"], "distribution_type", "activation"),
        (GOOD["parameter_distribution"], "bin_edges", (0.0, 1.0)),
        (GOOD["parameter_distribution"], "bin_edges", (0.0, 0.0, 1.0)),
        (GOOD["parameter_distribution"], "counts", (1, -2)),
        (GOOD["batch"], "loss", math.inf),
        (GOOD["batch"], "loss", None),
        (GOOD["batch"], "batch_size", -1),
        (GOOD["batch"], "sample_ids", (1.5, "a", 2)),
        (GOOD["batch"], "sample_ids", ("a", "b")),
        (GOOD["batch"], "sequence_lengths", (1, 2, -3)),
        (GOOD["batch"], "class_counts", JsonObject({"cat": -1})),
        (GOOD["batch"], "class_counts", JsonObject({"cat": 1.5})),
        (GOOD["artifact"], "artifact_key", "another/name"),
        (GOOD["artifact"], "artifact_type", ""),
        (GOOD["artifact"], "payload_format", "pickle"),
        (GOOD["artifact"], "size_bytes", -1),
        (GOOD["artifact"], "sha256", DIGEST),
        (GOOD["artifact"], "sha256", DIGEST + "A"),
        (GOOD["alert"], "category", "overall"),
        (GOOD["alert"], "severity", "debug"),
        (GOOD["alert"], "evidence", ("fact",)),
        (GOOD["health_score"], "score", 100.5),
        (GOOD["health_score"], "score", math.nan),
        (GOOD["health_score"], "score_key", "speed"),
        (GOOD["health_score"], "status", "good"),
        (GOOD["health_score"], "contributing_alert_ids", (1,)),
        (GOOD["phase"], "step_start", -1),
        (GOOD["phase"], "summary", None),
    ],
    ids=lambda value: type(value).__name__ if dataclasses.is_dataclass(value) else repr(value)[:20],
)
def test_a_bad_field_is_refused_by_record_and_field(record, field, value):
    with pytest.raises(SchemaValidationError) as caught:
        validate_record(change(record, **{field: value}))

    assert re.match(rf"{type(record).__name__}\.{field}\W", str(caught.value))


def test_a_metric_needs_a_step_or_an_epoch():
    with pytest.raises(SchemaValidationError, match=r"^MetricRecord .*step or an epoch"):
        validate_record(change(METRIC, step=None, epoch=None))


@pytest.mark.parametrize("record", [None, {}, {"value": 1.0}, "record", MetricRecord])
def test_what_is_no_record_is_refused(record):
    with pytest.raises(SchemaValidationError, match=r"^record must be"):
        validate_record(record)


@pytest.mark.parametrize("field", [{"value": "high"}, {"time_us": 2**62}, {"time_us": -(2**62)}])
def test_nothing_bad_is_dumped(field):
    with pytest.raises(SchemaValidationError):
        dump_record(change(METRIC, **field))


@pytest.mark.parametrize("name", ["a", "user_log", "eval/done", "a.b-c_d/2"])
def test_an_event_type_within_the_rule_is_returned(name):
    assert check_event_type(name) == name


@pytest.mark.parametrize(
    "name", ["", "A", "1a", "_a", "a b", "a\n", "é", "a@", "a" * 251, None, 3, b"a"]
)
def test_an_event_type_outside_the_rule_is_refused(name):
    with pytest.raises(SchemaValidationError, match=r"^event_type "):
        check_event_type(name)


def test_the_constants_agree_with_each_other():
    assert set(TERMINAL_STATUSES) == set(RUN_STATUSES) - {"running"}
    assert set(LOG_IDENTIFIERS.values()) <= set(EVENT_SEVERITIES)
