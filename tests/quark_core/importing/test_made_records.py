"""Importers make records without an identity, and hear how many of them were taken."""

import re
from pathlib import Path

import pytest

import quark
from quark_core.records.base import now_us
from quark_core.records.schema import validate_record
from quark_core.writers.records import SLICE_RECORDS

PAGE = (Path(__file__).parents[3] / "docs/view/export.md").read_text("utf-8")
TIME = "2026-05-07T09:30:00.000000Z"


def test_a_made_metric_is_written_with_its_content(session):
    metadata = {"a": [1]}
    made = quark.MetricRecord.make(
        "train/deep/loss",
        0.5,
        step=3,
        epoch=1,
        timestamp=TIME,
        description="d",
        metadata=metadata,
    )
    metadata["a"] = 2
    assert validate_record(made) is made
    assert session.write([made, quark.MetricRecord.make("bare", 2, epoch=0)]) == 2
    found, bare = quark.MetricsLogger(session).read()
    assert (found.metric_key, found.namespace, found.metric_name) == (
        "train/deep/loss",
        "train/deep",
        "loss",
    )
    assert (found.value, found.step, found.epoch, found.timestamp) == (0.5, 3, 1, TIME)
    assert (found.description, found.metadata) == ("d", {"a": [1]})
    origin = session.open_run.origin
    assert (found.run_id, found.writer_id) == (session.run_id, origin.writer_id)
    assert (bare.namespace, bare.metric_name, bare.value, bare.step) == (None, "bare", 2.0, None)


def test_a_made_event_is_written_with_its_content(session):
    made = quark.EventRecord.make(
        "checkpoint_saved",
        severity="warning",
        step=1,
        epoch=2,
        status="s",
        payload={"p": 1},
        timestamp="2026-05-07T11:30:00+02:00",
    )
    assert session.write([made]) == 1
    (found,) = quark.EventLogger(session).read(event_type="checkpoint_saved")
    assert (found.severity, found.step, found.epoch, found.status) == ("warning", 1, 2, "s")
    assert (found.payload, found.timestamp) == ({"p": 1}, TIME)
    assert quark.EventRecord.make("x").severity == "info"


def test_without_a_timestamp_it_is_now():
    before = now_us()
    made = [quark.MetricRecord.make("m", 1.0, step=0), quark.EventRecord.make("x")]
    after = now_us()
    assert all(before <= record.time_us <= after for record in made)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: quark.MetricRecord.make("m", 1.0, timestamp="noon"), "^timestamp must be ISO"),
        (lambda: quark.EventRecord.make("x", timestamp=3), "^timestamp must be"),
        (lambda: quark.MetricRecord.make(3, 1.0), "^key must be a str"),
        (lambda: quark.MetricRecord.make("", 1.0), "^key must not be empty"),
        (lambda: quark.MetricRecord.make("m", 1.0, metadata={"a": object()}), r"^metadata\.a"),
        (lambda: quark.EventRecord.make("x", payload=[1]), "^payload must be"),
    ],
)
def test_what_no_record_can_have_is_named(make, message):
    with pytest.raises(quark.SchemaValidationError, match=message):
        make()


def test_the_rest_is_checked_when_it_is_written(session):
    for made, message in [
        (quark.MetricRecord.make("m", 1.0), "requires a step or an epoch"),
        (quark.MetricRecord.make("m", "high", step=0), "value must be float"),
        (quark.EventRecord.make("Upper"), r"EventRecord\.event_type"),
    ]:
        with pytest.raises(quark.SchemaValidationError, match=rf"^records\[0\]: .*{message}"):
            session.write([made])


def make_metrics(count):
    for step in range(count):
        yield quark.MetricRecord.make("m", float(step), step=step, timestamp=TIME)
    yield quark.MetricRecord.make("m", "high", step=count, timestamp=TIME)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("count", "accepted", "told"),
    [
        (SLICE_RECORDS + 5, SLICE_RECORDS, f"the first {SLICE_RECORDS} were accepted"),
        (5, 0, "none were accepted"),
    ],
)
def test_an_error_in_a_generator_says_how_many_were_accepted(session, count, accepted, told):
    with pytest.raises(quark.SchemaValidationError) as caught:
        session.write(make_metrics(count))
    assert str(caught.value).startswith(f"records[{count}]: ")
    assert str(caught.value).endswith(f"; {told}")
    assert quark.MetricsLogger(session).columns().count == accepted


@pytest.mark.long
def test_an_error_in_a_list_says_only_its_place(session):
    with pytest.raises(quark.SchemaValidationError) as caught:
        session.write(list(make_metrics(SLICE_RECORDS + 5)))
    assert "accepted" not in str(caught.value)
    assert quark.MetricsLogger(session).columns().count == 0


def test_the_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (program,) = (
        block
        for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        if "session.write" in block
    )
    (tmp_path / "old.csv").write_text(f"time,step,loss\n{TIME},0,0.5\n{TIME},1,0.25\n")
    exec(program, {})
    assert capsys.readouterr().out == "3\n"
    (run,) = quark.search_runs(where="project == 'imported'")
    opened = quark.open_run(run.run_id)
    records = quark.MetricsLogger(opened).read(metric_key="train/loss")
    assert [(r.step, r.value, r.timestamp) for r in records] == [(0, 0.5, TIME), (1, 0.25, TIME)]
    (event,) = quark.EventLogger(opened).read(event_type="log_imported")
    assert event.payload == {"path": "old.csv"}
