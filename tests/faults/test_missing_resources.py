"""No threads, no memory, no stack: a clear error or a smaller run, never a hang."""

import threading

import pytest
from journaled import adds_up, open_stream, put_event, put_metric, stored_values
from kit.programs import log_steps, wait_for_adoption, wait_until

import quark
from quark_core.delivery import batch_log, journal, stream
from quark_core.runs import recovery
from quark_core.testing.fakes import ScriptedBackend

START = threading.Thread.start


def refuse_threads(monkeypatch, fits):
    """Let the start of every thread fail whose name fits; returns the names that failed."""
    refused = []

    def start(thread):
        if fits(thread.name):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        START(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return refused


@pytest.mark.sampled
@pytest.mark.parametrize("nth", range(4))
def test_a_thread_that_cannot_start_is_a_clear_error_or_a_smaller_run(tmp_path, monkeypatch, nth):
    monkeypatch.setenv("QUARK_PERSISTENCE_TIMEOUT_SECONDS", "10")
    before = set(threading.enumerate())
    names = []

    def is_the_nth(name):
        if name.startswith("quark"):
            names.append(name)
        return len(names) == nth + 1 and name.startswith("quark")

    refused = refuse_threads(monkeypatch, is_the_nth)
    try:
        session = quark.start_run(project="p", storage_dir=tmp_path, backends="csv")
    except quark.SessionStoreError as error:
        assert "thread" in str(error)  # noqa: PT017
    else:
        metrics = quark.MetricsLogger(session)
        metrics.log("m", 1.0, step=0)
        session.end_run()
        assert [record.value for record in metrics.read()] == [1.0]
    assert len(refused) == 1
    monkeypatch.undo()
    # What could not be started leaves nothing that lives on.
    left = [thread for thread in set(threading.enumerate()) - before if "quark" in thread.name]
    for thread in left:
        thread.join(60)
    assert [thread.name for thread in left if thread.is_alive()] == []
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
    assert session.report_delivery().complete
    wait_for_adoption()
    recovery.sync(tmp_path)
    assert recovery.survey(tmp_path) == []


def test_threads_that_run_out_later_do_not_stop_delivery(tmp_path, monkeypatch):
    """The delivery thread itself starts threads, for what forked children leave."""
    monkeypatch.setattr(stream, "SYNC_S", 0.02)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("m", 0.0, step=0)
        metrics.flush()
        session.open_run.background.join()
        (own,) = (session.run_path / "journal").iterdir()
        other = own.with_name("a-child")
        other.mkdir()
        other.joinpath("journal.json").write_text("{}")
        refused = refuse_threads(monkeypatch, lambda name: name == "quark-children")
        assert wait_until(lambda: len(refused) >= 1)
        log_steps(metrics, 1, 500)
        metrics.flush()
        assert len(metrics.read(metric_key="m")) == 500
        monkeypatch.undo()
    assert session.report_delivery().complete


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
def test_an_encoding_that_fails_is_counted_and_costs_one_frame(
    tmp_path, monkeypatch, error, caplog
):
    backend = ScriptedBackend()
    opened = open_stream(tmp_path / "j", backend, tick_s=60)
    encode, calls = batch_log.encode_frame_body, []

    def fail_once(kind, items):
        calls.append(kind)
        if len(calls) == 2:
            raise error
        return encode(kind, items)

    monkeypatch.setattr(batch_log, "encode_frame_body", fail_once)
    for value in range(300):
        put_metric(opened, value)
    opened.flush(60)
    (lane,) = opened.close(60).lanes
    assert (lane.submitted, lane.delivered, lane.dropped) == (300, 200, 100)
    expected = [value for value in range(300) if not 100 <= value < 200]
    assert stored_values(backend) == list(map(float, expected))
    assert caplog.text.count("could not be encoded") == 1


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
@pytest.mark.parametrize("place", [(journal, "encode_frame"), (batch_log, "Batch")])
def test_memory_that_runs_out_on_the_way_to_the_journal_loses_nothing_uncounted(
    tmp_path, monkeypatch, error, place
):
    module, name = place
    backend = ScriptedBackend()
    opened = open_stream(tmp_path / "j", backend, segment_bytes=3_000)
    put_event(opened)
    opened.flush(60)
    real, calls = getattr(module, name), []

    def fail_sometimes(*arguments):
        calls.append(arguments)
        if len(calls) in (2, 5):
            raise error
        return real(*arguments)

    monkeypatch.setattr(module, name, fail_sometimes)
    for value in range(1_000):
        put_metric(opened, value)
    opened.flush(60)
    for value in range(1_000, 1_100):
        put_metric(opened, value)
    opened.flush(60)
    (lane,) = opened.close(60).lanes
    assert len(calls) >= 2
    assert adds_up(lane)
    assert lane.submitted == 1_101
    found = stored_values(backend)
    assert found == sorted(set(found))
    # A frame may be dropped where memory ends, but then it is counted.
    assert lane.delivered == len(found) + 1
    assert lane.delivered + lane.dropped == 1_101


class Greedy:
    """Cannot be turned into anything."""

    def __init__(self, error):
        self.error = error

    def __float__(self):
        raise self.error

    def __str__(self):
        raise self.error

    __repr__ = __index__ = __str__


@pytest.mark.parametrize("error", [MemoryError(), RecursionError()])
def test_a_value_that_cannot_be_taken_spoils_no_other(tmp_path, error):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(100):
            with pytest.raises(quark.SchemaValidationError):
                metrics.log("m", Greedy(error), step=step)
            with pytest.raises(quark.SchemaValidationError):
                metrics.log("m", 1.0, step=step, metadata={"x": Greedy(error)})
            metrics.log("m", float(step), step=step)
    assert session.report_delivery().complete
    assert [record.value for record in metrics.read()] == list(map(float, range(100)))


def test_logging_at_the_end_of_the_stack_raises_no_more_than_that(tmp_path):
    """A caller that is out of stack gets an error of that, and the run stays whole."""
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        logged = []

        def dive(depth):
            try:
                metrics.log("m", float(depth), step=depth, metadata={"depth": [depth]})
                logged.append(float(depth))
                dive(depth + 1)
            except (RecursionError, quark.SchemaValidationError):
                return

        dive(0)
        metrics.log("m", -1.0, step=0)
    assert session.report_delivery().complete
    found = [record.value for record in metrics.read()]
    assert found == [*logged, -1.0]
