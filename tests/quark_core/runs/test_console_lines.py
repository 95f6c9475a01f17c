"""Lines of a console that are read while more of them come."""

import pytest

from quark_backends.csv.backend import CsvBackend
from quark_backends.embedded.backend import EmbeddedBackend
from quark_core.backends.contract import BackendConfig
from quark_core.errors import StoreUnavailableError
from quark_core.records import EventRecord
from quark_core.records.kinds.console import ConsoleRecord
from quark_core.runs import console_lines
from quark_core.runs.console_lines import ConsoleFollower
from quark_core.testing.fakes import FIRST_TIME_US, BatchMaker


@pytest.fixture(params=[CsvBackend, EmbeddedBackend])
def backend(request, tmp_path):
    opened = request.param(BackendConfig(storage_dir=tmp_path, run_id="run0", location="out"))
    yield opened
    opened.close()


class Printing:
    """A run that prints a line, or one more state of its last line."""

    def __init__(self, backend):
        self.backend = backend
        self.maker = BatchMaker("run0")
        self.lines = self.states = 0
        backend.write(self.maker.start())

    def _head(self):
        self.states += 1
        return "run0", "writer0", 0, 0, self.states - 1, FIRST_TIME_US + self.states

    def print(self, *texts, is_whole=True, left_out=0):
        for text in texts:
            line = ConsoleRecord(*self._head(), "stdout", self.lines, text, is_whole, left_out)
            self.backend.write(self.maker.batch([line]))
            self.lines += is_whole

    def tell(self, text):
        record = EventRecord(
            *self._head(), event_type="told", severity="info", payload={"message": text}
        )
        self.backend.write(self.maker.batch([record]))


@pytest.fixture
def run(backend):
    return Printing(backend)


def show(records):
    return [
        record.payload["message"] if record.KIND == "event" else record.text for record in records
    ]


@pytest.fixture
def during(monkeypatch):
    """What is to happen once the rows of a kind were read, and before anything else is."""
    waiting = []
    read_rows = console_lines.read_rows

    def read(reader, run_id, kind, query):
        rows = read_rows(reader, run_id, kind, query)
        while kind == ConsoleRecord.KIND and waiting:
            waiting.pop()()
        return rows

    monkeypatch.setattr(console_lines, "read_rows", read)
    return waiting.append


def test_what_comes_while_the_first_lines_are_read_comes_once_and_in_order(backend, run, during):
    run.print("0", "1")
    follower = ConsoleFollower(backend, "run0", ["event"])
    run.print("2", "3")
    run.tell("saved")
    during(lambda: (run.print("4"), run.tell("ended")))
    assert show(follower.read_first()) == ["0", "1", "2", "3", "saved", "4", "ended"]
    assert follower.read() == []
    run.print("5")
    assert show(follower.read()) == ["5"]


def test_the_newest_lines_are_those_of_the_last_moment(backend, run, during):
    run.print("0", "1")
    follower = ConsoleFollower(backend, "run0")
    run.print("2", "3", "4")
    during(lambda: run.print("5"))
    assert show(follower.read_first(tail=2)) == ["4", "5"]
    assert follower.read() == []


def test_states_of_one_line_are_one_and_what_was_left_out_is_counted_once(backend, run, during):
    run.print("10 %", is_whole=False, left_out=3)
    follower = ConsoleFollower(backend, "run0")
    run.print("20 %", is_whole=False, left_out=4)
    during(lambda: run.print("100 %", left_out=5))
    lines = follower.read_first(is_wanted=lambda line: "%" in line.text)
    assert [(line.text, line.is_whole, line.left_out) for line in lines] == [("100 %", True, 12)]
    assert follower.read() == []


@pytest.mark.parametrize("backend", [EmbeddedBackend], indirect=True)
def test_what_cannot_be_read_to_its_end_is_read_again(backend, run, monkeypatch):
    follower = ConsoleFollower(backend, "run0")
    assert follower.read_first() == []
    run.print("0", "1", "2")
    read_changes = console_lines.read_changes
    calls = []

    def read(reader, run_id, cursor, *, kinds, max_rows):
        calls.append(cursor)
        if len(calls) == 2:
            raise StoreUnavailableError("gone")
        return read_changes(reader, run_id, cursor, kinds=kinds, max_rows=1)

    monkeypatch.setattr(console_lines, "read_changes", read)
    with pytest.raises(StoreUnavailableError):
        follower.read()
    assert show(follower.read()) == ["0", "1", "2"]


@pytest.mark.parametrize("backend", [EmbeddedBackend], indirect=True)
def test_a_later_attempt_takes_no_line_from_who_follows(backend, run):
    run.print("step 1")
    follower = ConsoleFollower(backend, "run0", kinds=[EventRecord.KIND])
    assert show(follower.read_first()) == ["step 1"]
    run.print("RuntimeError: out of memory")
    run.tell("failed")
    later = BatchMaker("run0", attempt=1, writer_id="later", started_us=FIRST_TIME_US + 999)
    backend.write(later.start(from_step=0))
    assert show(follower.read()) == ["RuntimeError: out of memory", "failed"]
    run.print("resumed")
    assert show(follower.read()) == ["resumed"]
