"""What is damaged in the outbox costs the batches that it hit, and is told by numbers."""

import pytest

from quark_backends.mlflow.outbox import SegmentFiles, read_segment
from quark_core.testing.fakes import BatchMaker

COUNT = 6


@pytest.fixture
def batches():
    maker = BatchMaker("run0", writer_id="w")
    return [maker.metrics(("m", number, float(number))) for number in range(COUNT)]


@pytest.fixture
def segment(tmp_path, batches):
    files = SegmentFiles(tmp_path)
    ends = []
    for batch in batches:
        files.append(batch)
        (path,) = tmp_path.glob("*.qrec")
        ends.append(path.stat().st_size)
    return path, ends


def list_files(folder):
    return sorted(folder.glob("*.qrec"))


def flip(path, place, bit=1):
    data = bytearray(path.read_bytes())
    data[place] ^= bit
    path.write_bytes(data)


@pytest.mark.long
def test_a_flip_at_any_byte_costs_at_most_its_batch(segment, batches, caplog):
    path, ends = segment
    intact = path.read_bytes()
    for place in range(len(intact)):
        caplog.clear()
        path.write_bytes(intact)
        flip(path, place, 1 << place % 8)
        found = list(read_segment(path, "run0"))
        hit = next((number for number, end in enumerate(ends) if place < end), None)
        lost = [batch.number for batch in batches if batch not in found]
        assert lost in ([], [hit]), place
        if lost and hit < COUNT - 1:
            assert f"batches {hit} to {hit} are missing" in caplog.text
        elif lost:
            assert f"batches from {hit} on are missing" in caplog.text


def test_what_lies_behind_damage_is_not_written_over(segment, batches, tmp_path):
    path, ends = segment
    flip(path, ends[2] - 1)
    maker = BatchMaker("run0", writer_id="w")
    later = [maker.metrics(("m", number, 0.0)) for number in range(COUNT + 1)][-1]
    SegmentFiles(tmp_path).append(later)
    found = [batch.number for file in list_files(tmp_path) for batch in read_segment(file, "run0")]
    assert found == [0, 1, 3, 4, 5, 6]


def test_a_segment_whose_end_is_damaged_stays_as_it_is(segment, tmp_path):
    path, ends = segment
    flip(path, ends[-1] - 1)
    before = path.read_bytes()
    maker = BatchMaker("run0", writer_id="w")
    later = [maker.metrics(("m", number, 0.0)) for number in range(COUNT + 1)][-1]
    SegmentFiles(tmp_path).append(later)
    assert path.read_bytes() == before
    _, newer = sorted(tmp_path.glob("*.qrec"))
    assert [batch.number for batch in read_segment(newer, "run0")] == [COUNT]


def test_a_write_that_was_broken_off_comes_again_without_a_word(segment, tmp_path, caplog):
    path, _ = segment
    path.write_bytes(path.read_bytes()[:-5])
    maker = BatchMaker("run0", writer_id="w")
    again = [maker.metrics(("m", number, 0.0)) for number in range(COUNT)][-1]
    SegmentFiles(tmp_path).append(again)
    found = [batch.number for file in list_files(tmp_path) for batch in read_segment(file, "run0")]
    assert found == list(range(COUNT))
    assert not [text for text in caplog.messages if str(tmp_path) in text or path.name in text]


def test_a_segment_is_added_to_by_the_opening_alone_that_began_it(segment, batches, tmp_path):
    """Who began it may be sending it yet: sent late, it would lack what others have added."""
    path, _ = segment
    sent_late = path.read_bytes()
    maker = BatchMaker("run0", writer_id="w")
    later = [maker.metrics(("m", number, 0.0)) for number in range(COUNT + 2)][COUNT:]
    other = SegmentFiles(tmp_path)
    assert other.append(later[0]) == path
    assert other.append(later[1]) is None
    assert path.read_bytes() == sent_late
    # The first one goes on meanwhile, its file having gone up and away.
    path.unlink()
    first = SegmentFiles(tmp_path)
    for batch in later:
        first.append(batch)
    numbers = [
        [batch.number for batch in read_segment(file, "run0")] for file in list_files(tmp_path)
    ]
    assert numbers == [[COUNT, COUNT + 1]]
