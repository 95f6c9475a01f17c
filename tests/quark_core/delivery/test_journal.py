"""The journal: what it promises of segments, damage, full disks and failed syncs."""

from __future__ import annotations

import errno
import os
import re
import struct

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiers import count_examples

import quark
from quark_core.backends.contract import BackendConfig
from quark_core.delivery.batch_log import BatchLog
from quark_core.delivery.delivery_state import Files
from quark_core.delivery.journal import Journal, JournalReader
from quark_core.delivery.journal_folder import JournalFolder, LaneEntry, Manifest
from quark_core.delivery.segments import (
    END_MARK,
    FrameSearch,
    NewerSegment,
    Origin,
    encode_end_mark,
    encode_frame,
    encode_header,
    parse_segment,
)
from quark_core.runs import recovery
from quark_core.system.process import ProcessIdentity
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


@pytest.mark.sampled
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


def fill(tmp_path, replay, count=60, **arguments):
    journal = Journal(tmp_path, Origin("run0", "writer0"), segment_bytes=600)
    log = BatchLog(
        journal=journal,
        window_bytes=500,
        journal_capacity_bytes=2000,
        replay=replay,
        **arguments,
    )
    primary, mirror = log.open_cursor(primary=True), log.open_cursor()
    maker = BatchMaker("run0")
    batches = [maker.metrics(("m", step, 0.0)) for step in range(count)]
    for batch in batches:
        log.append(batch)
        primary.advance([batch])
        log.release_journal()
    return log, mirror, batches, journal


def read_all(cursor):
    found = []
    while batches := cursor.peek(7):
        found += batches
        cursor.advance(batches)
    return found


def test_a_mirror_that_is_behind_is_served_from_the_primary(tmp_path):
    asked = []

    def replay(start, limit):
        asked.append(start)
        return batches[start : start + limit]

    _, mirror, batches, journal = fill(tmp_path, replay)
    assert journal.size_bytes < 4000
    assert next(JournalReader(tmp_path).read()).number > 0
    assert read_all(mirror) == batches
    assert asked[0] == 0
    assert mirror.count_records() == (60, 0, 0)


def test_what_nobody_has_is_counted_as_dropped(tmp_path, caplog):
    _, mirror, batches, _ = fill(tmp_path, lambda start, limit: [])
    found = read_all(mirror)
    assert found == batches[-len(found) :]
    assert 0 < len(found) < 60
    assert mirror.count_records() == (60, 0, 60 - len(found))
    assert "are missing" in caplog.text


def test_without_pressure_nothing_is_let_go(tmp_path):
    journal = Journal(tmp_path, Origin("run0", "writer0"), segment_bytes=600)
    log = BatchLog(journal=journal, journal_capacity_bytes=10**6)
    primary, mirror = log.open_cursor(primary=True), log.open_cursor()
    maker = BatchMaker("run0")
    for step in range(60):
        batch = maker.metrics(("m", step, 0.0))
        log.append(batch)
        primary.advance([batch])
        log.release_journal()
    assert [b.number for b in JournalReader(tmp_path).read()] == list(range(60))
    assert len(read_all(mirror)) == 60


@pytest.mark.long
def test_sync_takes_from_the_primary_what_the_journal_let_go(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_JOURNAL_MAX_BYTES", "0")
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.3")
    monkeypatch.setattr(Journal.__init__, "__kwdefaults__", {"files": None, "segment_bytes": 400})
    (tmp_path / "out").write_text("in the way of the mirror")
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv:out") as session:
        metrics = quark.MetricsLogger(session)
        for step in range(50):
            metrics.log("m", float(step), step=step)
            metrics.flush()
    (tmp_path / "out").unlink()
    (folder,) = session.run_path.glob("journal/*")
    assert next(JournalReader(folder).read()).number > 0
    results = {result.backend: result for result in recovery.sync(tmp_path)}
    assert results["csv"].state == "delivered", results["csv"].reason
    from quark_backends.csv.backend import CsvBackend
    from quark_core.records.query import Query

    mirror = CsvBackend(BackendConfig(storage_dir=tmp_path, location="out", read_only=True))
    found = mirror.read(session.run_id, "metric", Query())
    assert found["step"].tolist() == list(range(50))
    assert not folder.exists()


MANIFEST = Manifest(
    run_id="run0",
    writer_id="writer0",
    attempt=0,
    rank=0,
    project="p",
    storage_dir="/nowhere",
    run_path="/nowhere/run0",
    lanes=(LaneEntry("embedded", "embedded", True),),
    process=ProcessIdentity("elsewhere", 1, "1"),
)


def make_some_batches(count):
    maker = BatchMaker("run0")
    return [
        maker.events("e", payload=None) if number % 5 == 4 else maker.metrics(("m", number, 0.5))
        for number in range(count)
    ]


BATCHES = make_some_batches(12)
FRAMES = [encode_frame(batch) for batch in BATCHES]
PER_SEGMENT = 4


def encode_segments(per_segment=PER_SEGMENT):
    """Bytes of each segment of a journal that holds `BATCHES`."""
    starts = range(0, len(BATCHES), per_segment)
    return [
        encode_header("run0", "writer0", 0, 0, start)
        + b"".join(FRAMES[start : start + per_segment])
        for start in starts
    ]


SEGMENTS = encode_segments()


def write_journal(directory, segments, *, closed, manifest=True):
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    for index, data in enumerate(segments, 1):
        (directory / f"{index:08d}.qj").write_bytes(data)
    if manifest:
        JournalFolder(directory).write_manifest(MANIFEST)
    if closed:
        (directory / END_MARK).write_bytes(encode_end_mark(len(BATCHES)))


def read_journal(directory, start=0, **arguments):
    """Batches of a journal, numbers that it says are missing, and what it tells of damage."""
    told = []
    reader = JournalReader(
        directory, on_damage=lambda name, what: told.append((name, what)), **arguments
    )
    return list(reader.read(start)), reader.missing, told


def spread(missing):
    """Each number of the gaps that a reader tells."""
    gaps = [(first, len(BATCHES) - 1 if last is None else last) for first, last in missing]
    return [number for first, last in gaps for number in range(first, last + 1)]


def places(size):
    return st.tuples(st.integers(0, size - 1), st.integers(1, 200))


KINDS = st.sampled_from(["flip", "two flips", "zero", "garbage", "cut out", "double", "truncate"])


def harm(data, kind, place, length, bit, second):
    """Bytes with one kind of damage at a place."""
    place %= len(data)
    end = min(len(data), place + length)
    changed = bytearray(data)
    if kind in ("flip", "two flips"):
        changed[place] ^= 1 << bit
        if kind == "two flips":
            changed[second % len(data)] ^= 1 << (bit ^ 3)
    elif kind == "zero":
        changed[place:end] = bytes(end - place)
    elif kind == "garbage":
        changed[place:end] = bytes(os.urandom(end - place))
    elif kind == "cut out":
        del changed[place:end]
    elif kind == "double":
        changed[end:end] = data[place:end]
    else:
        del changed[place:]
    return bytes(changed)


@pytest.mark.long
@settings(
    max_examples=count_examples(600),
    deadline=None,
)
@given(
    st.integers(0, len(SEGMENTS) - 1),
    KINDS,
    st.integers(0, 2000),
    st.integers(1, 400),
    st.integers(0, 7),
    st.integers(0, 2000),
    st.booleans(),
)
@example(2, "flip", len(SEGMENTS[2]) - 1, 1, 0, 0, False)
@example(0, "zero", 0, 2000, 0, 0, True)
@example(0, "cut out", 0, 263, 0, 0, False)
@example(1, "cut out", 0, 39, 0, 0, True)
@example(0, "zero", 0, 2000, 0, 0, False)
@example(2, "zero", 0, 2000, 0, 0, True)
def test_each_whole_frame_is_read_and_the_missing_numbers_are_told(
    tmp_path, index, kind, place, length, bit, second, closed
):
    harmed = harm(SEGMENTS[index], kind, place, length, bit, second)
    segments = [*SEGMENTS[:index], harmed, *SEGMENTS[index + 1 :]]
    write_journal(tmp_path / "j", segments, closed=closed)
    found, missing, told = read_journal(tmp_path / "j")
    numbers = [batch.number for batch in found]
    assert found == [BATCHES[number] for number in numbers]
    intact = [n for n, frame in enumerate(FRAMES) if any(frame in data for data in segments)]
    assert set(intact) <= set(numbers)
    assert numbers == sorted(numbers)
    lost = sorted(set(range(len(BATCHES))) - set(numbers))
    if closed or not lost or index < len(SEGMENTS) - 1:
        assert spread(missing) == lost
    else:
        # Of a process that was killed, nobody knows how many frames a torn end was to be.
        unknown = [n for n in lost if n > max(numbers, default=-1)]
        assert spread(missing) in (lost, [n for n in lost if n not in unknown])
        if kind in ("flip", "garbage"):
            assert spread(missing) == lost or torn_end(harmed, numbers)
    assert bool(told) == bool(missing)
    for first, _ in missing:
        assert any(str(first) in what for _, what in told)


def torn_end(data, numbers):
    """Whether the last frame says that it ends behind the end of the file."""
    start = data.rindex(FRAMES[max(numbers)]) + len(FRAMES[max(numbers)]) if numbers else 0
    return len(data) - start < 26 or struct.unpack_from("<I", data, start)[0] > len(data) - start


@pytest.mark.long
def test_a_flip_of_each_bit_of_a_killed_journal_costs_at_most_its_frame(tmp_path):
    header = len(encode_header("run0", "writer0", 0, 0, 0))
    data = encode_segments(per_segment=len(BATCHES))[0]
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 0x10
        parsed = parse_segment(bytes(changed), ORIGIN)
        numbers = [batch.number for batch in parsed.batches]
        lost = set(range(len(BATCHES))) - set(numbers)
        assert len(lost) <= (place >= header), place
        assert not any(part.is_torn for part in parsed.damaged), place


def test_a_damaged_length_costs_nothing(tmp_path):
    for index in range(PER_SEGMENT):
        place = len(SEGMENTS[2]) - sum(map(len, FRAMES[8 + index :]))
        for bit in range(32):
            changed = bytearray(SEGMENTS[2])
            changed[place + bit // 8] ^= 1 << bit % 8
            write_journal(tmp_path / "j", [*SEGMENTS[:2], bytes(changed)], closed=False)
            assert read_journal(tmp_path / "j") == (BATCHES, [], [])


@pytest.mark.long
def test_a_torn_tail_is_no_damage_where_the_process_was_killed(tmp_path):
    for cut in range(1, len(FRAMES[-1])):
        write_journal(tmp_path / "j", [*SEGMENTS[:2], SEGMENTS[2][:-cut]], closed=False)
        assert read_journal(tmp_path / "j") == (BATCHES[:-1], [], [])
        # The same file after its process has closed it was cut by something else.
        write_journal(tmp_path / "j", [*SEGMENTS[:2], SEGMENTS[2][:-cut]], closed=True)
        found, missing, told = read_journal(tmp_path / "j")
        assert (found, missing, len(told)) == (BATCHES[:-1], [(11, 11)], 1)


def test_how_a_journal_ends_is_not_judged_while_it_is_written(tmp_path):
    changed = bytearray(SEGMENTS[2])
    changed[-1] ^= 1
    write_journal(tmp_path / "j", [*SEGMENTS[:2], bytes(changed)], closed=False)
    assert read_journal(tmp_path / "j", is_written=True) == (BATCHES[:-1], [], [])
    found, missing, told = read_journal(tmp_path / "j")
    assert (found, missing) == (BATCHES[:-1], [(11, None)])
    assert "batches from 11 on are missing" in told[0][1]


@pytest.mark.long
def test_what_a_later_segment_has_again_is_not_missing(tmp_path):
    # After a failed sync what is not durable is written again, in a new segment.
    again = encode_header("run0", "writer0", 0, 0, 2) + b"".join(FRAMES[2:])
    for place in range(len(SEGMENTS[0]) - len(FRAMES[2] + FRAMES[3]), len(SEGMENTS[0])):
        changed = bytearray(SEGMENTS[0])
        changed[place] ^= 0x40
        write_journal(tmp_path / "j", [bytes(changed), again], closed=True)
        assert read_journal(tmp_path / "j") == (BATCHES, [], [])


def test_a_torn_segment_that_was_gone_on_with_is_no_damage(tmp_path):
    for cut in (1, len(FRAMES[3]) - 1, len(FRAMES[3])):
        rest = encode_header("run0", "writer0", 0, 0, 3) + b"".join(FRAMES[3:])
        write_journal(tmp_path / "j", [SEGMENTS[0][:-cut], rest], closed=True)
        assert read_journal(tmp_path / "j") == (BATCHES, [], [])


@pytest.mark.parametrize("manifest", [True, False])
def test_frames_behind_a_damaged_header_are_read(tmp_path, manifest):
    for place in range(len(encode_header("run0", "writer0", 0, 0, 0))):
        changed = bytearray(SEGMENTS[0])
        changed[place] ^= 4
        write_journal(
            tmp_path / "j", [bytes(changed), *SEGMENTS[1:]], closed=True, manifest=manifest
        )
        assert read_journal(tmp_path / "j") == (BATCHES, [], [])


def test_a_segment_that_nobody_can_say_anything_of_is_told(tmp_path):
    changed = bytearray(SEGMENTS[0])
    changed[8] ^= 1
    write_journal(tmp_path / "j", [bytes(changed)], closed=False, manifest=False)
    found, _, told = read_journal(tmp_path / "j")
    assert found == []
    assert told == [("00000001.qj", "the header is damaged")]


def test_only_numbers_that_are_asked_for_are_missing(tmp_path):
    changed = bytearray(SEGMENTS[1])
    changed[-1] ^= 1
    write_journal(tmp_path / "j", [SEGMENTS[0], bytes(changed), SEGMENTS[2]], closed=True)
    assert read_journal(tmp_path / "j", 7)[1] == [(7, 7)]
    assert read_journal(tmp_path / "j", 8) == (BATCHES[8:], [], [])


def test_a_journal_that_is_closed_says_where_it_ends(tmp_path):
    journal = Journal(tmp_path, ORIGIN, segment_bytes=600)
    for batch in BATCHES:
        journal.append([batch])
    journal.close()
    assert read_journal(tmp_path) == (BATCHES, [], [])
    newest = JournalReader(tmp_path).segment_names()[-1]
    (tmp_path / newest).unlink()
    found, missing, told = read_journal(tmp_path)
    assert found == BATCHES[: len(found)]
    assert (missing, len(told)) == ([(len(found), 11)], 1)
    assert f"{len(found)} to 11 are missing" in told[0][1]


def test_a_journal_that_is_gone_on_with_says_its_new_end(tmp_path):
    journal = Journal(tmp_path, ORIGIN)
    journal.append(BATCHES[:5])
    journal.close()
    again = Journal.reopen(tmp_path, ORIGIN)
    again.append(BATCHES[5:])
    again.close()
    assert read_journal(tmp_path) == (BATCHES, [], [])
    (tmp_path / "00000002.qj").unlink()
    assert read_journal(tmp_path)[1] == [(5, 11)]


def test_what_looks_like_frames_at_every_byte_is_searched_in_linear_time():
    checked = 0

    def is_whole(position, end):
        nonlocal checked
        checked += end - position
        return False

    def claim_end(position):
        return len(data) if position + 26 <= len(data) else None

    data = b"\x01\x00" * 200_000
    search = FrameSearch(
        data, head=re.compile(b"\x01\x00"), head_offset=12, claim_end=claim_end, is_whole=is_whole
    )
    position = 0
    while (found := search.find_next(position, lambda _: False)) is not None:
        position = found
    assert search.is_exhausted
    assert checked <= 20 * len(data) + 2 * 1024 * 1024


def test_a_segment_of_frames_that_claim_each_other_ends(tmp_path):
    # Each head is plausible, and none of their checksums is right.
    head = struct.pack("<IQBBQI", 100_000, 7, 1, 0, 1, 1)
    data = encode_header("run0", "writer0", 0, 0, 0) + head * 40_000 + FRAMES[0]
    parsed = parse_segment(data)
    assert parsed.damaged
    assert "too much of the rest looks like frames" in parsed.damaged[0].what or parsed.batches
