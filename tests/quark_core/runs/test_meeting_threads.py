"""Threads of one process that come to a run at the same moment."""

import threading

import pytest

import quark
from quark_core.errors import InvalidRunStateError, StopRequested, TrainingHalted
from quark_core.records.runs import StopRequest
from quark_core.runs import opening
from quark_core.runs.open_run import open_runs
from quark_core.system.process import list_members
from quark_core.writers import buffered_writer

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
