"""Clocks that jump by days change no order, lose nothing and take no lane from its process."""

import os
import shutil
import time
from pathlib import Path

import pytest
from kit.programs import log_steps, run_script, wait_until

import quark
from quark_core.runs import recovery

DAYS = 3 * 86_400
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")


class Clock:
    """The time of day, wherever this process asks for it, moved by some seconds."""

    def __init__(self, monkeypatch):
        self.shift_s = 0
        real_s, real_ns = time.time, time.time_ns

        def time_s():
            return real_s() + self.shift_s

        def time_ns():
            return real_ns() + self.shift_s * 10**9

        monkeypatch.setattr(time, "time", time_s)
        monkeypatch.setattr(time, "time_ns", time_ns)
        for module in ("quark_core.records.base", "quark_core.writers.metrics"):
            monkeypatch.setattr(f"{module}.time_ns", time_ns)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.mark.sampled
@pytest.mark.parametrize("shifts", [(-DAYS, 0), (DAYS, 0), (DAYS, -DAYS), (0, -1)])
def test_order_is_that_of_the_calls_whatever_the_clock_says(tmp_path, clock, shifts):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv") as session:
        metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)
        spans = []
        for part, shift in enumerate((0, *shifts)):
            clock.shift_s = shift
            began = time.time_ns() // 1_000
            log_steps(metrics, part * 500, part * 500 + 500)
            spans += [(began, time.time_ns() // 1_000)] * 500
            events.log(f"part{part}")
            metrics.flush()
        records = metrics.read(metric_key="m")
        assert [record.value for record in records] == list(map(float, range(1_500)))
        assert [record.sequence for record in records] == list(range(1_500))
        # Each has the time that the clock said, so that the jumps are there.
        assert all(
            began <= record.time_us <= ended
            for record, (began, ended) in zip(records, spans, strict=True)
        )
        types = [event.event_type for event in events.read()]
        assert [name for name in types if name.startswith("part")] == ["part0", "part1", "part2"]
        clock.shift_s = 0
    assert session.report_delivery().complete
    assert quark.open_run(session.run_id, tmp_path).status == "completed"


@pytest.mark.parametrize("shift", [-DAYS, DAYS])
def test_a_jump_takes_no_lane_from_a_living_process(tmp_path, clock, shift):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("m", 0.0, step=0)
        metrics.flush()
        clock.shift_s = shift
        assert [result.state for result in recovery.survey(tmp_path)] == ["held"]
        assert [result.state for result in recovery.sync(tmp_path)] == ["held"]
        assert recovery.adopt_orphans(tmp_path) is None
        reader = quark.open_run(session.run_id, tmp_path).open_run.reader
        assert reader.load_run(session.run_id).state == "running"
        with pytest.raises(quark.InvalidRunStateError, match="is running in this process"):
            quark.resume_run(run_id=session.run_id, storage_dir=tmp_path)
        metrics.log("m", 1.0, step=1)
    assert session.report_delivery().complete


@pytest.mark.parametrize("shift", [-DAYS, DAYS])
def test_timers_do_not_follow_the_clock(tmp_path, clock, shift, monkeypatch):
    monkeypatch.setattr("quark_core.delivery.stream.HEARTBEAT_S", 0.05)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        began = time.monotonic()
        clock.shift_s = shift
        metrics.log("m", 0.0, step=0)
        session.flush("durable")
        channel = session.open_run.stream.channel("lifecycle")

        def count_beats():
            return int(repr(channel.sequence)[len("count(") : -1])

        before = count_beats()
        assert wait_until(lambda: count_beats() > before + 4)
        session.flush()
        # One in 0.05 s of the time that has passed.
        assert count_beats() - before <= 20 * (time.monotonic() - began) + 1
    assert session.report_delivery().complete


JUMPING = """
from quark_core.runs import recovery
with quark.start_run(project="p", storage_dir=storage_dir) as session:
    metrics = quark.MetricsLogger(session)
    times = []
    for step in range(4000):
        times.append(metrics.log("m", float(step), step=step).time_us)
        if step % 1000 == 999:
            with open(os.environ["FAKETIME_TIMESTAMP_FILE"], "w") as file:
                file.write(["-3d", "+3d", "-1s", "+0"][step // 1000])
            threading.Event().wait(0.05)  # libfaketime breaks time.sleep
            metrics.flush()
            assert [result.state for result in recovery.sync(__import__("pathlib").Path(
                storage_dir))] == ["held"]
steps = sorted(abs(b - a) for a, b in zip(times, times[1:]))
assert steps[-1] > 5 * 86400 * 10**6, steps[-3:]
print(session.run_id, session.report_delivery().complete)
"""


def test_a_process_whose_clock_jumps_loses_nothing(tmp_path):
    if not FAKETIME.exists():
        pytest.skip("needs libfaketime (package libfaketime)")
    rc = tmp_path / "faketime"
    rc.write_text("+0")
    output, errors = run_script(
        tmp_path,
        JUMPING,
        LD_PRELOAD=str(FAKETIME),
        FAKETIME_TIMESTAMP_FILE=str(rc),
        FAKETIME_NO_CACHE="1",
        FAKETIME_DONT_FAKE_MONOTONIC="1",
    )
    run_id, complete = output.split()
    assert complete == "True"
    assert "Traceback" not in errors
    records = quark.MetricsLogger(quark.open_run(run_id, tmp_path)).read(metric_key="m")
    assert [record.value for record in records] == list(map(float, range(4_000)))
    assert recovery.survey(tmp_path) == []


@pytest.mark.long
def test_a_journal_from_the_future_is_delivered(tmp_path):
    """Files whose times lie ahead of the clock are as good as any."""
    output, _ = run_script(
        tmp_path,
        """
session = quark.start_run(project="p", storage_dir=storage_dir, backends="csv")
metrics = quark.MetricsLogger(session)
log_steps(metrics, 100)
session.flush("journaled")
print(session.run_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""",
        ends=-9,
    )
    ahead = time.time() + DAYS
    for path in (tmp_path / ".quark" / "runs").rglob("*"):
        os.utime(path, (ahead, ahead))
    recovery.sync(tmp_path)
    assert recovery.survey(tmp_path) == []
    records = quark.MetricsLogger(quark.open_run(output.strip(), tmp_path)).read(metric_key="m")
    assert [record.value for record in records] == list(map(float, range(100)))
    shutil.rmtree(tmp_path / ".quark")
