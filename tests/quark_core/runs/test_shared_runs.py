"""Sessions and writers belong to their process, strict runs tell what went wrong at their end."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import quark
from quark_core.errors import (
    InvalidRunStateError,
    SchemaValidationError,
    SessionStoreError,
    StopRequested,
    TrainingHalted,
)
from quark_core.records.runs import StopRequest
from quark_core.runs import opening
from quark_core.runs.late_delivery import wait_for_late_delivery
from quark_core.runs.open_run import open_runs
from quark_core.system.process import list_members
from quark_core.writers import buffered_writer


@pytest.mark.parametrize("act", [pickle.dumps, copy.copy, copy.deepcopy])
def test_pickling_says_what_to_do(session, act):
    for thing in (session, quark.MetricsLogger(session), quark.ArtifactStore(session)):
        with pytest.raises(TypeError, match=r"session\.context"):
            act(thing)
    assert pickle.loads(pickle.dumps(session.context)) == session.context


def test_a_flag_that_is_no_bool_is_refused(tmp_path):
    with pytest.raises(SchemaValidationError, match=r"^strict_mode must be True or False"):
        quark.start_run(project="p", storage_dir=tmp_path, strict_mode="no")
    assert not (tmp_path / ".quark").exists()


def test_an_unknown_severity_is_refused_when_reading(session):
    with pytest.raises(SchemaValidationError, match=r"^severity must be one of 'debug'"):
        quark.EventLogger(session).read(severity="warn")


def test_resuming_hints_at_runs_that_may_be_meant(session, tmp_path):
    with pytest.raises(quark.InvalidRunStateError, match=f"{session.run_id} is running in this"):
        quark.resume_run(run_id=session.run_id[:6], storage_dir=tmp_path)
    with pytest.raises(quark.RunNotFoundError, match=f"Similar IDs: {session.run_id}"):
        quark.resume_run(run_id=f"{session.run_id[:8]}-", storage_dir=tmp_path)


@pytest.mark.long
def test_batches_that_are_not_finite_can_be_written_again(session, tmp_path):
    diagnostics = quark.DataDiagnostics(session)
    diagnostics.log_batch(math.nan, step=1)
    diagnostics.log_batch(0.5, step=2)
    records = diagnostics.read(include_non_finite=True)
    with quark.start_run(project="copy", storage_dir=tmp_path) as other:
        assert other.write(records) == 2
        found = quark.DataDiagnostics(other).read(include_non_finite=True)
    assert [str(record.loss) for record in found] == ["nan", "0.5"]


def test_a_handler_of_a_run_that_is_over_is_refused(tmp_path):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    session.end_run()
    with pytest.raises(InvalidRunStateError, match=r"^LoggingHandler: the run has ended"):
        quark.LoggingHandler(session)


def test_closing_in_strict_mode_waits_for_the_primary(tmp_path, monkeypatch):
    with quark.start_run(project="p", storage_dir=tmp_path, strict_mode=True) as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("m", 1.0, step=0)
        session.flush()
        backend = session.open_run.reader

        def refuse(batches):
            raise quark.SessionStoreError("planted failure")

        monkeypatch.setattr(backend, "write_group", refuse)
        metrics.log("m", 2.0, step=1)
        with pytest.raises(SessionStoreError, match="planted failure"):
            metrics.close()
        monkeypatch.undo()


DEADLINE_S = 60


@pytest.fixture
def context(session):
    """Of a run that, as in another process, is held open by nobody here."""
    open_runs._sessions.remove(session)
    yield session.context
    open_runs.add(session)


def test_the_first_writers_of_a_context_share_one_stream(context, monkeypatch):
    met = threading.Barrier(4)
    attach, opened = opening.attach_run, []

    def count(target):
        opened.append(attach(target))
        return opened[-1]

    monkeypatch.setattr(opening, "attach_run", count)

    def write(number):
        met.wait(DEADLINE_S)
        writers[number] = quark.MetricsLogger(context)

    writers = {}
    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [*opened] == [writers[0].open_run]
    assert {id(writer.open_run) for writer in writers.values()} == {id(opened[0])}
    for writer in writers.values():
        writer.close()


def test_a_writer_that_comes_as_the_last_one_goes_has_a_stream(context, monkeypatch):
    first = quark.MetricsLogger(context)
    resolve, found = buffered_writer.resolve_target, []

    def find_and_be_late(target):
        found.append(resolve(target))
        if len(found) == 1:
            first.close()
        return found[-1]

    monkeypatch.setattr(buffered_writer, "resolve_target", find_and_be_late)
    with quark.MetricsLogger(context) as second:
        second.log("loss", 1.0, step=0)
    assert len(found) == 2
    assert found[0] is first.open_run is not second.open_run


def make_stop():
    return StopRequested("stop", StopRequest("", "anna", "2026-01-01T00:00:00Z", ""))


def test_each_of_two_halts_is_raised(session):
    run, metrics = session.open_run, quark.MetricsLogger(session)
    halts = [make_stop(), TrainingHalted("it diverges", None)]
    assert [run.halt(error) for error in halts] == [True, True]
    for error in halts:
        with pytest.raises(type(error)):
            metrics.log("loss", 1.0, step=0)
    metrics.log("loss", 1.0, step=1)
    assert [row.step for row in metrics.read()] == [1]


def test_who_takes_back_a_halt_takes_back_its_own(session):
    run, metrics = session.open_run, quark.MetricsLogger(session)
    stop, halt = make_stop(), TrainingHalted("it diverges", None)
    run.halt(stop)
    run.halt(halt)
    run.withdraw_halt(halt)
    with pytest.raises(StopRequested):
        metrics.log("loss", 1.0, step=0)
    metrics.log("loss", 1.0, step=1)


def test_a_halt_that_comes_as_the_run_ends_opens_it_to_nobody(session, monkeypatch):
    run, metrics = session.open_run, quark.MetricsLogger(session)
    run.halt(make_stop())
    close = run.stream.close

    def close_and_halt(*arguments, **options):
        assert not run.halt(TrainingHalted("too late", None))
        return close(*arguments, **options)

    monkeypatch.setattr(run.stream, "close", close_and_halt)
    session.end_run()
    for step in range(2):
        with pytest.raises(InvalidRunStateError, match="the run has ended"):
            metrics.log("loss", 1.0, step=step)


def test_members_are_listed_while_others_come():
    class Member:
        pass

    import weakref

    members, kept, is_over = weakref.WeakSet(), [], threading.Event()

    def add():
        while not is_over.is_set():
            kept.append(Member())
            members.add(kept[-1])
            if len(kept) > 500:
                kept.clear()

    thread = threading.Thread(target=add)
    thread.start()
    try:
        for _ in range(2_000):
            assert all(isinstance(member, Member) for member in list_members(members))
    finally:
        is_over.set()
        thread.join()


RUN = "0123456789abcdef"


@pytest.fixture
def deliver(tmp_path):
    """Start a process that looks like one that delivers the run, for some seconds."""
    started = []

    def begin(seconds):
        command = [sys.executable, "-c", f"import time; time.sleep({seconds})"]
        process = subprocess.Popen([*command, "quark_core.runs.late_delivery", str(tmp_path), RUN])
        started.append(process)
        note = tmp_path / ".quark" / "runs" / RUN / "late_delivery"
        note.parent.mkdir(parents=True)
        note.write_text(str(process.pid))
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_a_wait_that_is_noticed_is_told_once(tmp_path, deliver, caplog):
    process = deliver(60)

    class EndAfterMessage(logging.Handler):
        def emit(self, record):
            threading.Timer(0.5, process.kill).start()

    handler = EndAfterMessage()
    logging.getLogger("quark").addHandler(handler)
    try:
        wait_for_late_delivery(tmp_path, 60)
    finally:
        logging.getLogger("quark").removeHandler(handler)
    (told,) = [each.getMessage() for each in caplog.records]
    assert told == "run 01234567 is still being written to its mirrors. Waiting for it"


def test_no_wait_is_no_message(tmp_path, deliver, caplog):
    deliver(60).kill()
    begin = time.monotonic()
    time.sleep(0.2)
    wait_for_late_delivery(tmp_path, 20.0)
    assert time.monotonic() - begin < 10.0
    assert caplog.records == []


def test_a_process_that_just_began_is_waited_for(tmp_path, deliver, monkeypatch):
    process, read = deliver(60), Path.read_bytes

    def read_before_the_arguments_are_there(path):
        if path.name != "cmdline":
            return read(path)
        threading.Timer(0.3, process.kill).start()
        return b""

    monkeypatch.setattr(Path, "read_bytes", read_before_the_arguments_are_there)
    begin = time.monotonic()
    wait_for_late_delivery(tmp_path, 60)
    assert 0.3 <= time.monotonic() - begin < 30
