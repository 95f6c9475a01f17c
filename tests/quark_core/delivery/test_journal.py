"""The journal: what it promises of segments, damage, full disks and failed syncs."""

import errno
import os

import pytest
import xxhash

from quark_core.delivery.delivery_state import Files
from quark_core.delivery.journal import Journal, JournalReader
from quark_core.delivery.segments import (
    NewerSegment,
    Origin,
    encode_frame,
    encode_header,
    parse_segment,
)
from quark_core.testing.fakes import BatchMaker

ORIGIN = Origin("run0", "writer0")


def make_batches(count):
    maker = BatchMaker("run0")
    return [maker.metrics(("m", number, float(number))) for number in range(count)]


class FailingFiles(Files):
    """Fails the N-th call of one operation, with an errno; a write may be a short one first."""

    def __init__(self, operation, nth, code=errno.EIO, *, short=False, times=1):
        self.operation, self.nth, self.code = operation, nth, code
        self.short, self.times = short, times
        self.calls = 0

    def _fails(self, operation):
        if operation != self.operation:
            return False
        self.calls += 1
        return self.nth <= self.calls < self.nth + self.times

    def write(self, descriptor, data):
        if self._fails("write"):
            if self.short and len(data) > 1:
                return super().write(descriptor, data[: len(data) // 2])
            raise OSError(self.code, os.strerror(self.code))
        return super().write(descriptor, data)

    def sync(self, descriptor):
        if self._fails("sync"):
            raise OSError(self.code, os.strerror(self.code))
        super().sync(descriptor)

    def create(self, path):
        if self._fails("create"):
            raise OSError(self.code, os.strerror(self.code))
        return super().create(path)

    def truncate(self, descriptor, size_bytes):
        if self._fails("truncate"):
            raise OSError(self.code, os.strerror(self.code))
        super().truncate(descriptor, size_bytes)


def read_numbers(directory, start=0):
    return [batch.number for batch in JournalReader(directory).read(start)]


def test_what_is_appended_is_read_back(tmp_path):
    journal, batches = Journal(tmp_path, ORIGIN), make_batches(20)
    journal.append(batches[:5])
    journal.append(batches[5:])
    assert list(JournalReader(tmp_path).read()) == batches
    assert list(JournalReader(tmp_path).read(7)) == batches[7:]
    assert (journal.end, journal.durable_end) == (20, 0)
    journal.sync()
    assert journal.durable_end == 20
    journal.close()


def test_segments_are_small_and_go_when_all_have_passed(tmp_path):
    journal = Journal(tmp_path, ORIGIN, segment_bytes=500)
    for batch in make_batches(30):
        journal.append([batch])
    names = JournalReader(tmp_path).segment_names()
    assert len(names) > 3
    journal.release(17)
    left = read_numbers(tmp_path)
    assert left[-1] == 29
    assert left[0] <= 17
    assert len(JournalReader(tmp_path).segment_names()) < len(names)
    journal.release(30)
    assert len(JournalReader(tmp_path).segment_names()) == 1
    journal.close()


@pytest.mark.parametrize("operation", ["write", "create", "sync", "truncate"])
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_the_nth_failing_call_loses_nothing(tmp_path, operation, short, code):
    for nth in range(1, 12):
        directory = tmp_path / f"{operation}{nth}{short}{code}"
        files = FailingFiles(operation, nth, code, short=short)
        journal = Journal(directory, ORIGIN, files=files, segment_bytes=400)
        batches, waiting = make_batches(12), []
        for batch in batches:
            waiting.append(batch)
            try:
                journal.append(waiting)
                waiting = []
                journal.sync()
            except OSError:
                continue
        while waiting:
            try:
                journal.append(waiting)
                waiting = []
            except OSError:
                continue
        journal.close()
        assert list(JournalReader(directory).read()) == batches
        if files.calls < nth and nth > 1:
            return  # every call there is has failed once


def test_a_disk_that_stays_full_takes_nothing_half(tmp_path):
    files = FailingFiles("write", 2, errno.ENOSPC, short=True, times=10**6)
    journal = Journal(tmp_path, ORIGIN, files=files)
    batches = make_batches(10)
    journal.append(batches[:1])
    for batch in batches[1:]:
        with pytest.raises(OSError, match="space"):
            files.short = not files.short
            journal.append([batch])
    assert read_numbers(tmp_path) == [0]
    files.times = 0
    journal.append(batches[1:])
    journal.close()
    assert list(JournalReader(tmp_path).read()) == batches


def test_after_a_failed_sync_everything_unsynced_is_written_again(tmp_path):
    files = FailingFiles("sync", 2)
    journal = Journal(tmp_path, ORIGIN, files=files)
    batches = make_batches(6)
    journal.append(batches[:2])
    journal.sync()
    journal.append(batches[2:4])
    with pytest.raises(OSError, match="error"):
        journal.sync()
    assert journal.durable_end == 2
    journal.append(batches[4:])
    journal.sync()
    assert journal.durable_end == 6
    newest = JournalReader(tmp_path).segment_names()[-1]
    again = parse_segment((tmp_path / newest).read_bytes()).batches
    assert [batch.number for batch in again] == [2, 3, 4, 5]
    assert list(JournalReader(tmp_path).read()) == batches
    journal.close()


def make_newer(header, version):
    """The header as a Quark of a newer format would write it."""
    head = header[:4] + version.to_bytes(2, "little") + header[6:-8]
    return head + xxhash.xxh3_64_digest(head)[::-1]


def test_a_duplicated_frame_is_read_once(tmp_path):
    batches = make_batches(2)
    frames = [encode_frame(batch) for batch in batches]
    data = encode_header("run0", "writer0", 0, 0, 0) + frames[0] * 3 + frames[1] + frames[0]
    (tmp_path / "00000001.qj").write_bytes(data)
    assert list(JournalReader(tmp_path).read()) == batches


def test_a_torn_tail_of_the_newest_segment_is_no_damage(tmp_path):
    batches = make_batches(3)
    data = encode_header("run0", "writer0", 0, 0, 0) + b"".join(map(encode_frame, batches))
    (tmp_path / "00000001.qj").write_bytes(data[:-5])
    told = []
    reader = JournalReader(tmp_path, on_damage=lambda name, what: told.append(what))
    assert [batch.number for batch in reader.read()] == [0, 1]
    assert told == []


def test_a_segment_of_a_newer_version_is_left_alone(tmp_path):
    header = make_newer(encode_header("run0", "writer0", 0, 0, 0), 9)
    with pytest.raises(NewerSegment, match="version 9"):
        parse_segment(header, ORIGIN)
    (tmp_path / "00000001.qj").write_bytes(header + encode_frame(make_batches(1)[0]))
    told = []
    assert list(JournalReader(tmp_path, on_damage=lambda *a: told.append(a)).read()) == []
    assert "version 9" in told[0][1]


def test_a_kind_without_a_number_of_its_own_goes_through():
    import msgspec

    batch = msgspec.structs.replace(make_batches(1)[0], kind="something_new")
    data = encode_header("run0", "writer0", 0, 0, 0) + encode_frame(batch)
    assert parse_segment(data).batches == [batch]


def test_a_descriptor_that_came_to_mean_another_file_is_neither_written_nor_closed(tmp_path):
    journal = Journal(tmp_path / "journal", ORIGIN)
    batches = make_batches(6)
    journal.append(batches[:2])
    os.close(journal._descriptor)
    with (tmp_path / "other").open("wb") as other:
        assert other.fileno() == journal._descriptor
        with pytest.raises(OSError, match="other code closed"):
            journal.append(batches[2:4])
        journal.append(batches[2:4])
        journal.sync()
        os.close(journal._descriptor)
        with (tmp_path / "another").open("wb") as another:
            assert another.fileno() == journal._descriptor
            with pytest.raises(OSError, match="other code closed"):
                journal.append(batches[4:])
            journal.append(batches[4:])
            journal.close()
            another.write(b"another")
        other.write(b"other")
    assert (tmp_path / "other").read_bytes() == b"other"
    assert (tmp_path / "another").read_bytes() == b"another"
    assert list(JournalReader(tmp_path / "journal").read()) == batches
