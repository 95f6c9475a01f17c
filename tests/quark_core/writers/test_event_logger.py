"""EventLogger: severities, payloads, logs, filters."""

import pytest

import quark
from quark import EventLogger
from quark_core.errors import InvalidRunStateError, SchemaValidationError
from quark_core.writers.events import DEFAULT_SEVERITIES, default_severity


@pytest.fixture
def events(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        yield EventLogger(session)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("event_type", "severity"),
    [
        ("checkpoint_saved", "info"),
        ("probe_completed", "debug"),
        ("early_stopping", "warning"),
        ("data_warning", "warning"),
        ("upload_failed", "error"),
        ("runtime_error", "error"),
        ("out_of_memory", "critical"),
        ("my.own/type-x", "info"),
        *((name, name) for name in ("debug", "info", "warning", "error", "critical")),
        ("warn", "warning"),
        ("oom", "critical"),
        ("cuda.oom", "critical"),
        ("loader/error", "error"),
        ("download-exception", "error"),
        ("errors", "info"),
        ("terror", "info"),
        ("error_rate", "info"),
    ],
)
def test_default_severities(events, event_type, severity):
    assert events.log(event_type).severity == severity == default_severity(event_type)


def test_the_table_of_severities_is_in_the_documentation():
    from quark_core.writers import events as module

    for event_type in DEFAULT_SEVERITIES:
        assert event_type in module.__doc__


def test_what_is_read_equals_what_log_returned(events):
    logged = (
        events.log("saved", step=1, epoch=0, payload={"path": "a", "n": [1, None]}, status="ok"),
        events.log("saved", severity="critical", timestamp="2026-01-01T00:00:00Z"),
        events.add_log("a line", identifier="Error", step=2, event_type="note", payload={"k": 1}),
        events.add_log("another", identifier=None),
    )
    assert events.read()[1:] == logged  # the first is run_started
    assert logged[2].payload == {"message": "a line", "identifier": "Error", "k": 1}
    assert [record.severity for record in logged] == ["info", "critical", "error", "info"]
    assert events.flush() == logged
    assert events.flush() == ()


def test_filters(events):
    for step in range(6):
        events.log("even" if step % 2 == 0 else "odd", step=step, epoch=step // 3)
    events.log("other", severity="error")

    def types_and_steps(**filters):
        return [(e.event_type, e.step) for e in events.read(**filters)]

    assert types_and_steps(event_type="odd") == [("odd", 1), ("odd", 3), ("odd", 5)]
    assert types_and_steps(event_types=["odd", "other"], step_min=3) == [("odd", 3), ("odd", 5)]
    assert types_and_steps(severity="error") == [("other", None)]
    assert types_and_steps(epoch=1, limit=2) == [("even", 4), ("odd", 5)]
    assert types_and_steps(event_types=[]) == []


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"event_type": "Upper"}, "event_type"),
        ({"event_type": None}, "event_type"),
        ({"event_type": "e", "step": -1}, "step"),
        ({"event_type": "e", "epoch": 1.5}, "epoch"),
        ({"event_type": "e", "status": 3}, "status"),
        ({"event_type": "e", "payload": "text"}, "payload"),
        ({"event_type": "e", "payload": {"x": {1}}}, r"payload\.x"),
        ({"event_type": "e", "timestamp": "soon"}, "timestamp"),
    ],
    ids=str,
)
def test_bad_events_are_named(events, arguments, named):
    with pytest.raises(SchemaValidationError, match=named):
        events.log(**arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"message": 3}, "message"),
        ({"message": "m", "payload": {"message": "x"}}, "message"),
        ({"message": "m", "payload": {"identifier": "x"}}, "identifier"),
        ({"message": "m", "event_type": "Bad"}, "event_type"),
    ],
    ids=str,
)
def test_bad_logs_are_named(events, arguments, named):
    for call in (events.add_log, quark.add_log):
        with pytest.raises(SchemaValidationError, match=named):
            call(**arguments)


def test_a_filter_of_types_is_no_single_text(events):
    with pytest.raises(SchemaValidationError, match="event_types"):
        events.read(event_types="saved")


def test_a_closed_logger_reads_but_does_not_log(events):
    events.log("saved")
    events.close()
    for call in (lambda: events.log("late"), lambda: events.add_log("late")):
        with pytest.raises(InvalidRunStateError, match="closed"):
            call()
    assert [e.event_type for e in events.read(event_type="saved")] == ["saved"]


@pytest.mark.parametrize(
    ("severity", "kept"),
    [("fatal", "critical"), ("WARN", "warning"), ("Error", "error"), ("odd", "info"), (30, "info")],
    ids=repr,
)
def test_an_unknown_severity_costs_no_event_and_is_said_once(events, caplog, severity, kept):
    assert events.log("saved", severity=severity).severity == kept
    assert events.add_log("a line", identifier=severity).severity == kept
    assert len([each for each in caplog.messages if "must be one of" in each]) == 1
    assert len(events.read(event_types=["saved", "user_log"])) == 2


def test_an_unknown_severity_is_that_of_the_type(events):
    assert events.log("loader_error", severity="grave").severity == "error"


def test_a_strict_run_refuses_an_unknown_severity(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, strict_mode=True) as session:
        events = quark.EventLogger(session)
        with pytest.raises(SchemaValidationError, match="severity must be one of"):
            events.log("saved", severity="fatal")
        with pytest.raises(SchemaValidationError, match="identifier must be one of"):
            session.add_log("a line", identifier="Fatal")
