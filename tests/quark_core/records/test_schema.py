"""The schema: what validates, and that every bad field is refused by its name."""

import dataclasses
import json

import pytest
from record_samples import ALL, CONFIG, ENVIRONMENT, EVENT, LIFECYCLE, METRIC, PROJECT, RUN

from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord
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
    ],
    ids=lambda value: type(value).__name__ if dataclasses.is_dataclass(value) else repr(value)[:20],
)
def test_a_bad_field_is_refused_by_record_and_field(record, field, value):
    with pytest.raises(SchemaValidationError) as caught:
        validate_record(change(record, **{field: value}))

    assert str(caught.value).startswith(f"{type(record).__name__}.{field} ")


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
