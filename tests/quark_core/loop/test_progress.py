"""progress: how far a loop has come, told to whoever looks on (Track's eta)."""

import io
import itertools
import sys
import time

import pytest

import quark
from quark_core.records import LifecycleRecord
from quark_core.records.query import Query
from quark_core.records.runs import RunProgress
from quark_core.runs.open_run import ask_extensions
from quark_core.writers import progress as progress_module


class Clock:
    """Time that goes on only as a test says."""

    def __init__(self):
        self.now_s = 1_000.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


@pytest.fixture
def shown(monkeypatch):
    """Call it for a stream that takes what is printed: pytest has one of its own for each phase."""
    monkeypatch.setenv("QUARK_QUIET", "0")

    def take():
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return take


def told(session):
    (said,) = ask_extensions(session.extensions, lambda each: each.describe_heartbeat())
    return said.get("progress")


def test_eta_of_nested_loops_counts_epochs_and_batches(metrics, session, clock):
    for epoch in range(2):
        for _ in metrics.progress(range(10), total=(4, 10)):
            clock.now_s += 1
        assert told(session)["done"] == 10 * (epoch + 1)
    now = told(session)
    assert (now["total"], now["rate_per_s"]) == (40, 1.0)
    assert now["remaining_s"] == pytest.approx(20.0)


def test_evaluation_between_epochs_is_part_of_it(metrics, session, clock):
    for _ in range(2):
        for _ in metrics.progress(range(10), total=(4, 10)):
            clock.now_s += 1
        clock.now_s += 10
    assert told(session)["remaining_s"] >= 20 / (20 / 40)


def test_the_slower_of_both_rates_is_told(metrics, session, clock):
    progress = metrics.progress(total=1_000)
    for _ in range(100):
        clock.now_s += 0.1
        progress.advance()
    assert told(session)["rate_per_s"] == pytest.approx(10.0, rel=0.01)
    for _ in range(100):  # it becomes slow, which of late shows before the mean does
        clock.now_s += 1.0
        progress.advance()
        told(session)
    assert told(session)["rate_per_s"] == pytest.approx(1.0, rel=0.4)
    for _ in range(100):  # and quick again: the mean of the whole is the slower one
        clock.now_s += 0.1
        progress.advance()
    assert told(session)["rate_per_s"] == pytest.approx(300 / 120)


def test_loops_around_loops_tell_the_outer_one_with_the_part_of_its_step(metrics, session, clock):
    seen = []
    for _ in metrics.progress(range(4)):
        for _ in metrics.progress(range(5)):
            clock.now_s += 1
            seen.append(told(session)["done"])
    assert seen[:6] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert (told(session)["done"], told(session)["remaining_s"]) == (4, 0)


def test_without_a_total_there_is_a_rate_only(metrics, session, clock):
    for place in metrics.progress(itertools.count()):
        clock.now_s += 0.5
        if place == 20:
            now = told(session)
            break
    assert (now["done"], now["total"], now["remaining_s"]) == (20, None, None)
    assert now["rate_per_s"] == pytest.approx(2.0, rel=0.1)
    assert told(session) is None


def test_an_iterable_that_raises_and_a_generator_closed_early_pass_through(metrics, session):
    def failing():
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(metrics.progress(failing(), total=10))
    walk = iter(metrics.progress(range(10)))
    next(walk)
    walk.close()
    assert told(session) is None


def test_steps_are_reported_by_hand(metrics, session, clock):
    with metrics.progress(total=(10, 100)) as progress:
        clock.now_s += 5
        progress.advance()
        progress.update(99)
        assert (progress.done, progress.total) == (100, 1000)
        progress.reach((4, 20))
        assert told(session)["done"] == 420
    with pytest.raises(quark.SchemaValidationError, match="steps must be a non-negative"):
        progress.advance(-1)
    with pytest.raises(quark.SchemaValidationError, match="step has 3 numbers, but total has 2"):
        progress.reach((1, 2, 3))
    with pytest.raises(quark.SchemaValidationError, match="has nothing to iterate"):
        list(progress)


def test_a_loop_that_was_begun_elsewhere_counts_on(tmp_path, clock):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    session.end_run("interrupted")
    with quark.TrainingSession.resume_run(
        run_id=session.run_id, storage_dir=tmp_path, from_step=600
    ) as session:
        metrics = quark.MetricsLogger(session)
        for _ in zip(metrics.progress(range(600, 1000), total=1000), range(100), strict=False):
            clock.now_s += 1
        now = told(session)
        assert now is None or now["total"] == 1000
        progress = metrics.progress(total=1000)
        clock.now_s += 10
        progress.advance(10)
        assert (told(session)["done"], told(session)["rate_per_s"]) == (610, 1.0)
        assert told(session)["remaining_s"] == pytest.approx(390)
        progress.close()
        assert metrics.progress(total=(10, 100), start=(3, 7)).done == 307


def test_bad_arguments_are_named(metrics):
    for bad in ("x", -1, True, 1.5, (), (1, "a"), (3, -1)):
        with pytest.raises(quark.SchemaValidationError, match="total"):
            metrics.progress([1], total=bad)
    with pytest.raises(quark.SchemaValidationError, match=r"iterable must be .*write total=5"):
        metrics.progress(5)
    with pytest.raises(quark.SchemaValidationError, match="start"):
        metrics.progress([1], total=2, start=(1, 2))


def test_a_pipe_gets_a_line_each_ten_seconds_at_most(metrics, clock, shown):
    stream = shown()
    for _ in metrics.progress(range(1_000)):
        clock.now_s += 0.1
    lines = stream.getvalue().splitlines()
    assert 8 <= len(lines) <= 11
    assert all(line.startswith("quark: ") and line.endswith(" left") for line in lines)
    assert lines[5].startswith("quark: 50 %, ")


def test_short_epochs_put_off_no_line_of_a_pipe(metrics, clock, shown):
    stream = shown()
    for _ in range(20):
        for _ in metrics.progress(range(6), total=(20, 6)):
            clock.now_s += 1
    assert 10 <= len(stream.getvalue().splitlines()) <= 13


def test_a_terminal_is_written_in_place(metrics, clock, shown, monkeypatch):
    stream = shown()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    for _ in metrics.progress(range(40)):
        clock.now_s += 0.5
    said = stream.getvalue()
    assert said.count("\n") == 1
    assert said.count("\r") > 10
    assert said.endswith("\n")
    assert said.rstrip().endswith("100 %")


@pytest.mark.parametrize("name", ["QUARK_QUIET", "QUARK_PROGRESS"])
def test_nothing_is_printed_where_it_is_not_wanted(metrics, clock, shown, monkeypatch, name):
    stream = shown()
    monkeypatch.setenv(name, "0" if name == "QUARK_PROGRESS" else "1")
    for _ in metrics.progress(range(100)):
        clock.now_s += 1
    assert stream.getvalue() == ""


def test_nothing_is_printed_under_tqdm(metrics, session, clock, shown):
    stream = shown()
    tqdm = pytest.importorskip("tqdm")
    for _ in metrics.progress(tqdm.tqdm(range(30), file=io.StringIO())):
        clock.now_s += 1
    with tqdm.tqdm(total=5, file=io.StringIO()):
        for _ in metrics.progress(range(30)):
            clock.now_s += 1
    assert stream.getvalue() == ""
    assert told(session)["done"] == 30


def test_a_stream_that_is_gone_costs_no_step(metrics, clock, shown):
    stream = shown()
    stream.close()
    for _ in metrics.progress(range(100)):
        clock.now_s += 1


def test_heartbeats_carry_it_and_without_a_loop_they_are_as_before(tmp_path, monkeypatch):
    monkeypatch.setattr("quark_core.delivery.stream.HEARTBEAT_S", 0.05)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        channel = session.open_run.stream.channel("lifecycle")

        def wait_for_beat():
            before, deadline = channel.count_drawn(), time.monotonic() + 60
            while channel.count_drawn() < before + 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)

        wait_for_beat()
        with quark.MetricsLogger(session).progress(total=10) as progress:
            progress.advance(5)
            wait_for_beat()
        found = session.open_run.read(LifecycleRecord.KIND, Query()).to_records()
        beats = [record.data for record in found if record.action == "heartbeat"]
        assert beats[0] is None
        said = [data["progress"] for data in beats if data is not None]
        # One may have come before the first step.
        assert {data["done"] for data in said} <= {0, 5}
        assert (said[-1]["done"], said[-1]["total"]) == (5, 10)


def test_it_is_told_in_a_few_words():
    assert RunProgress(410, 1000, 1.0, 700.0).describe() == "41 %, 12 min left"
    assert RunProgress(5, None, 2.0).describe() == "5 steps, 2.0/s"
    assert RunProgress(5, None, 0.25).describe() == "5 steps, 4.0 s a step"
    assert RunProgress(999, 1000, 1.0, 1.0).describe() == "99 %, 1.0 s left"
    assert RunProgress(10, 10, 1.0, 0.0).describe() == "100 %"
    said = RunProgress(1, 10, 1.0, 100.0, "2026-01-01T00:00:00Z")
    assert said.describe(1_767_225_610_000_000) == "10 %, 90 s left"
    assert said.describe(1_777_225_610_000_000) == "10 %, 80 s left"
    assert RunProgress(1, 10, 1.0, 100.0, "nonsense").describe(5) == "10 %, 100 s left"
