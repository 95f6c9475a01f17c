"""A damaged journal costs what was hit: it is told by numbers, and its files stay."""

import json
import os
import shutil
import signal

import pytest
from click.testing import CliRunner
from kit.programs import run_script

import quark
from quark.cli.main import cli
from quark_core.delivery.crash_buffer import SHARED_MEMORY, remove_black_box
from quark_core.delivery.journal import JournalReader
from quark_core.delivery.segments import encode_frame
from quark_core.delivery.sync import sync_folder
from quark_core.runs import recovery

POINTS = 300
PER_BATCH = 10


def train(storage_dir, **arguments):
    """A run whose points are in batches of ten."""
    with quark.start_run(project="p", storage_dir=storage_dir, **arguments) as session:
        metrics = quark.MetricsLogger(session)
        session.open_run.stream._tick_s = 600  # a flush alone ends a batch
        session.flush("journaled")
        for step in range(POINTS):
            metrics.log("m", float(step), step=step)
            if step % PER_BATCH == PER_BATCH - 1:
                session.flush("journaled")
    return session.run_id


@pytest.fixture
def network(monkeypatch):
    """On a network file system the journal is the store."""
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")


KILLED = """
from quark_core.errors import BackendUnavailable
session = quark.start_run(project="p", storage_dir=storage_dir, backends=sys.argv[2:] or None)
def write(*_):
    raise BackendUnavailable("planted outage")
metrics = quark.MetricsLogger(session)
session.open_run.stream._tick_s = 600  # a flush alone ends a batch
session.flush("journaled")
for lane in session.open_run.stream._lanes:
    lane._write_one = lane._write_group = write
for step in range(300):
    metrics.log("m", float(step), step=step)
    if step % 10 == 9:
        session.flush("journaled")
session.flush("durable")
print(session.run_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def left_behind(tmp_path):
    """A journal that waits for the embedded store, whose process was killed."""
    output, _ = run_script(tmp_path, KILLED, ends=-signal.SIGKILL)
    return output.strip()


def find_segment(storage_dir, run_id):
    (path,) = (storage_dir / ".quark" / "runs" / run_id / "journal").glob("*/*.qj")
    return path


def list_batches(storage_dir, run_id):
    return list(JournalReader(find_segment(storage_dir, run_id).parent).read())


def choose(batches, first_step, last_step):
    """The batches whose points lie within these steps."""
    found = [b for b in batches if b.kind == "metric"]
    found = [b for b in found if all(first_step <= r.step <= last_step for r in b.to_records())]
    assert found
    return found


def flip(path, batch, offset=40):
    """Flip one bit in the frame of a batch."""
    data = bytearray(path.read_bytes())
    data[data.index(encode_frame(batch)) + offset] ^= 1
    path.write_bytes(data)


def read_steps(storage_dir, run_id):
    return [r.step for r in quark.MetricsLogger(quark.open_run(run_id, storage_dir)).read()]


def read_gaps(storage_dir, run_id):
    events = quark.EventLogger(quark.open_run(run_id, storage_dir))
    return [record.payload for record in events.read(event_type="records_dropped")]


def command(*arguments):
    return CliRunner().invoke(cli, list(arguments), env={"COLUMNS": "200"})


def lost_steps(*batches):
    return {record.step for batch in batches for record in batch.to_records()}


@pytest.mark.long
def test_one_flipped_bit_of_a_journal_only_run_is_told_everywhere(tmp_path, network):
    run_id = train(tmp_path)
    path = find_segment(tmp_path, run_id)
    (hit,) = choose(list_batches(tmp_path, run_id), 100, 109)
    flip(path, hit)
    before = path.read_bytes()
    assert read_steps(tmp_path, run_id) == [s for s in range(POINTS) if not 100 <= s < 110]
    assert quark.open_run(run_id, tmp_path).status == "completed"
    (gap,) = read_gaps(tmp_path, run_id)
    assert gap["batches"] == [hit.number, hit.number]
    assert gap["records"] == {"metric": PER_BATCH}
    told = f"batch {hit.number} is missing"
    for _ in range(2):
        done = command("sync", str(tmp_path))
        assert done.exit_code == 1
        assert told in done.output
        assert told in command("doctor", "-d", str(tmp_path)).output
    assert path.read_bytes() == before


@pytest.mark.long
def test_a_damaged_journal_that_becomes_a_store_is_delivered_once_and_stays(
    tmp_path, network, monkeypatch
):
    run_id = train(tmp_path)
    path = find_segment(tmp_path, run_id)
    batches = list_batches(tmp_path, run_id)
    hit = choose(batches, 100, 129)
    for batch in hit:
        flip(path, batch)
    before = path.read_bytes()
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "0")
    done = command("sync", str(tmp_path))
    numbers = [batch.number for batch in hit]
    told = f"batches {numbers[0]} to {numbers[-1]} are missing"
    assert done.exit_code == 1
    assert told in done.output
    expected = [s for s in range(POINTS) if not 100 <= s < 130]
    for _ in range(2):
        assert read_steps(tmp_path, run_id) == expected
        (gap,) = read_gaps(tmp_path, run_id)
        assert gap["batches"] == [numbers[0], numbers[-1]]
        assert path.read_bytes() == before
        doctor = json.loads(command("doctor", "-d", str(tmp_path), "--json").output)
        (found,) = doctor["damaged_journals"]
        assert (found["run_id"], found["missing"]) == (run_id, [f"embedded: {told}"])
        assert told in command("doctor", "-d", str(tmp_path)).output
        assert command("sync", str(tmp_path)).exit_code == 0
    # A later start in that root takes no offence at it either.
    train(tmp_path)
    assert path.read_bytes() == before


@pytest.mark.long
def test_a_flip_in_a_journal_that_waits_costs_its_batch_only(tmp_path, left_behind):
    path = find_segment(tmp_path, left_behind)
    (hit,) = choose(list_batches(tmp_path, left_behind), 50, 59)
    flip(path, hit)
    (dry,) = json.loads(command("sync", str(tmp_path), "--dry-run", "--json").output)
    assert dry["missing"] == [[hit.number, hit.number]]
    (lane,) = recovery.sync(tmp_path)
    assert (lane.state, lane.missing) == ("delivered", [(hit.number, hit.number)])
    assert read_steps(tmp_path, left_behind) == [s for s in range(POINTS) if not 50 <= s < 60]
    assert len(read_gaps(tmp_path, left_behind)) == 1
    assert path.exists()


@pytest.mark.long
def test_the_next_start_tells_and_keeps_a_damaged_journal(tmp_path, left_behind, caplog):
    path = find_segment(tmp_path, left_behind)
    (hit,) = choose(list_batches(tmp_path, left_behind), 50, 59)
    flip(path, hit)
    recovery.adopt_run(tmp_path, left_behind, 30)
    assert f"batch {hit.number} is missing" in caplog.text
    assert len(read_steps(tmp_path, left_behind)) == POINTS - PER_BATCH
    assert path.exists()


def harm(data, batches, kind):
    """A journal with damage of one kind; the steps that it may cost."""
    frames = [encode_frame(batch) for batch in choose(batches, 100, 139)]
    start = data.index(frames[0])
    end = data.index(frames[-1]) + len(frames[-1])
    if kind == "zeros":
        return data[:start] + bytes(end - start) + data[end:], set(range(100, 140))
    if kind == "cut out of the middle":
        return data[: start + 30] + data[end:], set(range(100, 140))
    if kind == "twice":
        return data[:end] + data[start:end] + data[end:], set()
    if kind == "two flips":
        changed = bytearray(data)
        changed[start + 40] ^= 1
        changed[end - 1] ^= 1
        return bytes(changed), {*range(100, 110), *range(130, 140)}
    changed = bytearray(data)
    changed[9] ^= 1
    return bytes(changed), set()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kind", ["zeros", "cut out of the middle", "twice", "two flips", "its header"]
)
def test_a_region_costs_what_lies_in_it(tmp_path, left_behind, kind):
    path = find_segment(tmp_path, left_behind)
    batches = list_batches(tmp_path, left_behind)
    data, cost = harm(path.read_bytes(), batches, kind)
    path.write_bytes(data)
    (lane,) = recovery.sync(tmp_path)
    gone = set(range(POINTS)) - set(read_steps(tmp_path, left_behind))
    assert gone == cost
    assert lane.state == "delivered"
    lost = [n for first, last in lane.missing for n in range(first, last + 1)]
    assert lost_steps(*[batch for batch in batches if batch.number in lost]) == cost
    assert path.exists() == bool(cost)
    assert len(read_gaps(tmp_path, left_behind)) == len(lane.missing)


@pytest.mark.sampled
@pytest.mark.parametrize("place", ["journal", "store"])
def test_a_run_whose_start_was_hit_is_there_all_the_same(tmp_path, network, monkeypatch, place):
    run_id = train(tmp_path)
    path = find_segment(tmp_path, run_id)
    batches = list_batches(tmp_path, run_id)
    (hit,) = [
        b for b in batches if b.kind == "lifecycle" and "start" in b.decoded.to_list("action")
    ]
    flip(path, hit)
    if place == "store":
        monkeypatch.setenv("QUARK_JOURNAL_ONLY", "0")
        assert command("sync", str(tmp_path)).exit_code == 1
    assert read_steps(tmp_path, run_id) == list(range(POINTS))
    found = quark.open_run(run_id, tmp_path)
    assert (found.project_name, found.status) == ("p", "completed")


@pytest.mark.long
def test_what_the_store_has_already_is_not_missing(tmp_path, left_behind, monkeypatch):
    batches = list_batches(tmp_path, left_behind)
    copy = tmp_path / "copy"
    shutil.copytree(find_segment(tmp_path, left_behind).parent, copy)
    recovery.sync(tmp_path)
    # The journal comes back, as from a backup, with its lanes' marks lost and one bit flipped.
    folder = tmp_path / ".quark" / "runs" / left_behind / "journal" / batches[0].writer_id
    shutil.copytree(copy, folder, ignore=shutil.ignore_patterns("lanes"))
    flip(find_segment(tmp_path, left_behind), choose(batches, 50, 59)[0])
    (lane,) = recovery.sync(tmp_path)
    assert (lane.state, lane.missing, lane.damage) == ("delivered", [], [])
    assert read_steps(tmp_path, left_behind) == list(range(POINTS))
    assert not folder.exists()


@pytest.mark.long
def test_each_lane_is_told_the_same(tmp_path):
    output, _ = run_script_with(tmp_path, "csv")
    run_id = output.strip()
    hit = choose(list_batches(tmp_path, run_id), 50, 79)
    for batch in hit:
        flip(find_segment(tmp_path, run_id), batch)
    lanes = recovery.sync(tmp_path)
    assert {lane.backend for lane in lanes} == {"embedded", "csv"}
    gap = [(hit[0].number, hit[-1].number)]
    assert [lane.missing for lane in lanes] == [gap, gap]
    assert len(read_gaps(tmp_path, run_id)) == 1
    events = (tmp_path / ".quark" / "runs" / run_id / "csv" / "events.csv").read_text()
    assert events.count("records_dropped") == 1


def run_script_with(tmp_path, *backends):
    head = f"sys.argv[2:] = {list(backends)!r}\n"
    return run_script(tmp_path, head + KILLED, ends=-signal.SIGKILL)


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.mark.long
def test_a_sync_that_is_killed_on_the_way_forgets_nothing(tmp_path, left_behind, monkeypatch):
    path = find_segment(tmp_path, left_behind)
    hit = choose(list_batches(tmp_path, left_behind), 50, 79)
    for batch in hit:
        flip(path, batch)
    (folder,) = recovery.find_folders(tmp_path)

    def die(self, number):
        finish(self, number)
        raise Killed

    from quark_core.delivery import sync
    from quark_core.delivery.delivery_state import LaneMark

    finish = LaneMark.finish
    monkeypatch.setattr(sync, "GROUP_BATCHES", 1)
    monkeypatch.setattr(LaneMark, "finish", die)
    rounds = 0
    while path.parent.joinpath("journal.json").exists() and rounds < 200:
        rounds += 1
        with pytest.raises(Killed):
            sync_folder(folder, folder.read_manifest(), recovery.open_lane)
        if folder.mark("embedded").done > hit[-1].number + 5:
            break
    monkeypatch.undo()
    recovery.sync(tmp_path)
    assert read_steps(tmp_path, left_behind) == [s for s in range(POINTS) if not 50 <= s < 80]
    (gap,) = read_gaps(tmp_path, left_behind)
    assert gap["batches"] == [hit[0].number, hit[-1].number]
    assert path.exists()
    (found,) = recovery.list_lost(tmp_path)
    assert found.missing == (f"embedded: batches {hit[0].number} to {hit[-1].number} are missing",)


@pytest.mark.long
def test_a_torn_tail_of_a_killed_process_is_cut_without_a_word(tmp_path, left_behind, caplog):
    path = find_segment(tmp_path, left_behind)
    # What was never written whole is in no box either: that one says which batches were.
    for box in SHARED_MEMORY.glob(f"quark-{left_behind}-*"):
        remove_black_box(box)
    os.truncate(path, path.stat().st_size - 7)
    (lane,) = recovery.sync(tmp_path)
    assert (lane.state, lane.missing, lane.damage) == ("delivered", [], [])
    assert not path.exists()
    assert "missing" not in caplog.text
