"""What other code and other programs do to the files of a store that a run has open."""

import csv
import os
import shutil
import sqlite3
import subprocess
import sys

import pytest
from click.testing import CliRunner
from kit.programs import is_sound, log_steps, read_steps, run_script, wait_until

import quark
from quark.cli.main import cli
from quark_core.errors import SessionStoreError
from quark_core.runs import recovery

STEPS = 400


def check_all_is_there(storage_dir, *run_ids):
    """Each run has all of its steps, and the database is whole."""
    assert [read_steps(run_id, storage_dir) for run_id in run_ids] == [
        list(range(STEPS)) for _ in run_ids
    ]
    assert is_sound(storage_dir)


def make_other_run(storage_dir):
    with quark.start_run(project="other", storage_dir=storage_dir) as session:
        metrics = quark.MetricsLogger(session)
        log_steps(metrics, STEPS)
    return session.id


def settle(storage_dir):
    """Bring the log into the database: in another process, which costs ours no lock."""
    code = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); "
    code += "c.execute('pragma wal_checkpoint(passive)').fetchall()"
    path = str(storage_dir / ".quark" / "quark.db")
    subprocess.run([sys.executable, "-c", code, path], check=True)


# The descriptors that end so are closed, and their numbers go to the training's own files.
TRAINING = """
ends, way = os.environ["CLOSED"].split(","), os.environ["WAY"]
session, metrics = begin()
log_steps(metrics, 200)
session.flush()
opened = {}
for name in os.listdir("/proc/self/fd"):
    try:
        opened[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        pass
if ends == [""]:
    os.closerange(3, 256)
for number, path in opened.items():
    if ends != [""] and path.endswith(tuple(ends)):
        os.close(number)
mine = [os.open(f"{storage_dir}/mine{k}", os.O_RDWR | os.O_CREAT) for k in range(40)]
log_steps(metrics, 200, 400)
if way == "kill":
    time.sleep(1.0)
    os.kill(os.getpid(), 9)
session.end_run()
assert all(os.fstat(number).st_size == 0 for number in mine)
"""


@pytest.mark.sampled
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
@pytest.mark.parametrize("way", ["end", "kill"])
@pytest.mark.parametrize(
    "closed",
    [
        pytest.param("", marks=pytest.mark.long),
        pytest.param("quark.db", marks=pytest.mark.long),
        "quark.db-wal",
        pytest.param("quark.db-shm", marks=pytest.mark.long),
        pytest.param("quark.db,quark.db-wal", marks=pytest.mark.long),
    ],
)
def test_descriptors_that_other_code_closes_cost_nothing(tmp_path, closed, way):
    other = make_other_run(tmp_path)
    said, _ = run_script(tmp_path, TRAINING, ends=0 if way == "end" else -9, CLOSED=closed, WAY=way)
    assert sum(path.stat().st_size for path in tmp_path.glob("mine*")) == 0
    recovery.sync(tmp_path)
    check_all_is_there(tmp_path, said.split()[0], other)


def empty(log, _):
    os.truncate(log, 0)


def cut(log, _):
    os.truncate(log, log.stat().st_size // 2)


def put_back(log, earlier):
    log.write_bytes(earlier)


def put_back_renamed(log, earlier):
    new = log.with_name("new")
    new.write_bytes(earlier)
    os.replace(new, log)


def fill(log, _):
    log.write_bytes(b"\0" * log.stat().st_size)


CHANGES = {
    "emptied": empty,
    "cut": cut,
    "rolled back": put_back,
    "replaced": put_back_renamed,
    "zeroed": fill,
}


@pytest.mark.sampled
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["in the run", "before its end"])
def test_a_log_that_another_program_changes_costs_nothing(tmp_path, caplog, change, when):
    other = make_other_run(tmp_path)
    log = tmp_path / ".quark" / "quark.db-wal"
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        log_steps(metrics, STEPS // 4)
        session.flush()
        earlier = log.read_bytes()
        log_steps(metrics, STEPS // 4, STEPS // 2)
        session.flush()
        CHANGES[change](log, earlier)
        log_steps(metrics, STEPS // 2, STEPS)
        if when == "in the run":
            session.flush()
            assert read_steps(session.id, tmp_path) == list(range(STEPS))
    assert session.report_delivery().complete
    check_all_is_there(tmp_path, session.id, other)
    # Once, whatever it was.
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    aside = list((tmp_path / ".quark").glob("*.damaged-*"))
    assert [str(path) in told for path in aside] == [True] * (change != "replaced")
    assert not any((tmp_path / ".quark" / "runs").glob("*/journal/*"))


def test_a_log_that_is_emptied_after_a_kill_is_filled_from_the_journal(tmp_path):
    other = make_other_run(tmp_path)
    said, _ = run_script(
        tmp_path,
        """
session = quark.start_run(project="p", storage_dir=storage_dir)
metrics = quark.MetricsLogger(session)
log_steps(metrics, 400)
session.flush()
print(session.id, flush=True)
os.kill(os.getpid(), 9)
""",
        ends=-9,
    )
    os.truncate(tmp_path / ".quark" / "quark.db-wal", 0)
    recovery.sync(tmp_path)
    assert read_steps(said.strip(), tmp_path) == list(range(STEPS))
    assert read_steps(other, tmp_path) == list(range(STEPS))


@pytest.mark.parametrize("way", ["over it", "made anew"])
def test_an_older_copy_that_is_written_over_the_database_costs_nothing(tmp_path, caplog, way):
    other = make_other_run(tmp_path)
    path, copy = tmp_path / ".quark" / "quark.db", tmp_path / "copy.db"
    shutil.copyfile(path, copy)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for part in range(4):
            log_steps(metrics, part * 100, part * 100 + 100)
            session.flush()
            settle(tmp_path)
            if part == 2:
                with path.open("r+b" if way == "over it" else "wb") as file:
                    file.write(copy.read_bytes())
                    file.truncate()
    check_all_is_there(tmp_path, session.id, other)
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert "an older copy replaced" in told


@pytest.mark.parametrize("since", ["before the run", "in the run"])
def test_an_older_copy_of_all_files_of_the_database_costs_nothing(tmp_path, caplog, since):
    # Log and index agree with the database then: they tell nothing.
    other = make_other_run(tmp_path)
    store, copy = tmp_path / ".quark", tmp_path / "copy"
    with quark.open_run(other, tmp_path), quark.start_run(project="q", storage_dir=tmp_path):
        shutil.copytree(store, copy)
        with quark.start_run(project="p", storage_dir=tmp_path) as session:
            metrics = quark.MetricsLogger(session)
            for part in range(4):
                log_steps(metrics, part * 100, part * 100 + 100)
                session.flush("stored")
                if part == 0 and since == "in the run":
                    shutil.rmtree(copy)
                    shutil.copytree(store, copy)
                if part == 2:
                    for path in sorted(copy.glob("quark.db*")):
                        (store / path.name).write_bytes(path.read_bytes())
    check_all_is_there(tmp_path, session.id, other)
    told = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    # A write in the middle of the copying finds a log that is cut.
    assert "an older copy replaced" in told[0] or "another program changed" in told[0]


def test_another_database_in_the_place_of_the_one_that_is_open_takes_no_page_of_its_log(tmp_path):
    other = make_other_run(tmp_path)
    path, packed = tmp_path / ".quark" / "quark.db", tmp_path / "packed.db"
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for part in range(4):
            log_steps(metrics, part * 100, part * 100 + 100)
            session.flush("stored")
            if part == 1:
                # Other pages than those of the log have these numbers in it.
                connection = sqlite3.connect(path)
                connection.execute("VACUUM INTO ?", (str(packed),))
                connection.close()
            if part == 2:
                os.replace(packed, path)
    check_all_is_there(tmp_path, session.id, other)


RESTORED = """
import pathlib, shutil
way = os.environ["WAY"]
session, metrics = begin(system_metrics=False)
store, copy = pathlib.Path(storage_dir, ".quark"), pathlib.Path(storage_dir, "copy")
for part in range(4):
    log_steps(metrics, part * 100, part * 100 + 100)
    session.flush("stored")
    if part == 0:
        shutil.copytree(store, copy)
    if part == 2 and way == "over it":
        shutil.copytree(copy, store, dirs_exist_ok=True)
    elif part == 2 and way == "file by file":
        for path in sorted(copy.rglob("*")):
            if path.is_file():
                shutil.copyfile(path, copy / "new")
                os.replace(copy / "new", store / path.relative_to(copy))
    elif part == 2:
        os.rename(store, store.with_name("old"))
        os.rename(copy, store)
        if way == "deleted":
            shutil.rmtree(store.with_name("old"))
if os.environ["END"] == "kill":
    session.flush("journaled")
    os.kill(os.getpid(), 9)
session.end_run()
"""


@pytest.mark.sampled
@pytest.mark.parametrize("end", ["end", "kill"])
@pytest.mark.parametrize("way", ["over it", "file by file", "renamed", "deleted"])
def test_a_store_that_is_put_back_as_a_whole_has_all_of_a_run_or_says_what_it_lacks(
    tmp_path, way, end
):
    ends = -9 if end == "kill" else 0
    said, logged = run_script(tmp_path, RESTORED, ends=ends, WAY=way, END=end, QUARK_QUIET="0")
    run_id = said.strip()
    steps = read_steps(run_id, tmp_path)
    recovery.sync(tmp_path)
    assert read_steps(run_id, tmp_path) == steps
    assert is_sound(tmp_path)
    assert [*range(100), *range(300, STEPS)] == [s for s in steps if s < 100 or s >= 300]
    lost = recovery.list_lost(tmp_path, run_id)
    assert bool(lost) == (steps != list(range(STEPS)))
    if way != "over it":
        assert not lost
        return
    # The journal's own file was overwritten: what it had is known to no one.
    assert lost
    for words in (("doctor",), ("runs",), ("show", run_id)):
        told = CliRunner().invoke(cli, [*words, "-d", str(tmp_path)]).output
        assert "lost" in told or "missing" in told, words
    if end == "end":
        assert "some records are lost" in logged
    events = quark.EventLogger(quark.open_run(run_id, tmp_path)).read()
    assert "records_dropped" in {event.event_type for event in events}


REPLACED = """
import sqlite3, subprocess
way, settles = os.environ["WAY"], os.environ["SETTLES"]
path, packed = f"{storage_dir}/.quark/quark.db", f"{storage_dir}/packed.db"
session, metrics = begin()
for part in range(4):
    log_steps(metrics, part * 100, part * 100 + 100)
    session.flush("stored")
    if part == 1:
        connection = sqlite3.connect(path)
        if way == "vacuum":
            connection.execute("VACUUM INTO ?", (packed,))
        else:
            copy = sqlite3.connect(packed)
            connection.backup(copy)
            copy.close()
        connection.close()
    if part == 2 and settles:
        code = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); "
        code += "c.execute('pragma wal_checkpoint(truncate)').fetchall()"
        subprocess.run([sys.executable, "-c", code, path], check=True)
os.replace(packed, path)
os.kill(os.getpid(), 9)
"""


@pytest.mark.sampled
@pytest.mark.parametrize("settles", ["", "in between"])
@pytest.mark.parametrize("way", ["vacuum", "backup"])
def test_another_file_in_the_place_of_a_killed_process_is_read_without_its_log(
    tmp_path, caplog, way, settles
):
    other = make_other_run(tmp_path)
    said, _ = run_script(tmp_path, REPLACED, ends=-9, WAY=way, SETTLES=settles)
    run_id = said.strip()
    assert read_steps(other, tmp_path) == list(range(STEPS))
    (aside,) = (tmp_path / ".quark").glob("*.damaged-*")
    assert [str(aside) in r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == [
        True
    ]
    steps = read_steps(run_id, tmp_path)
    recovery.sync(tmp_path)
    assert read_steps(run_id, tmp_path) == steps
    assert is_sound(tmp_path)
    # What was in the earlier file for good is in no journal any more: that is said.
    lost = recovery.list_lost(tmp_path)
    if settles:
        assert steps == [*range(200), *range(steps[200], STEPS)]
        assert bool(lost) == (len(steps) < STEPS)
    else:
        assert (steps, lost) == (list(range(STEPS)), [])


def test_a_file_that_is_no_store_costs_no_log(tmp_path):
    said, _ = run_script(
        tmp_path, REPLACED.replace("os.replace(packed, path)", ""), ends=-9, WAY="", SETTLES=""
    )
    path = tmp_path / ".quark" / "quark.db"
    os.rename(path, tmp_path / "kept.db")
    path.write_bytes(b"something else" * 1000)
    with pytest.raises(SessionStoreError, match="cannot be opened"):
        read_steps(said.strip(), tmp_path)
    os.replace(tmp_path / "kept.db", path)
    assert read_steps(said.strip(), tmp_path) == list(range(STEPS))


def move_database(storage_dir, back=False):
    ends = (storage_dir / "aside", storage_dir / ".quark")
    source, target = ends if back else reversed(ends)
    target.mkdir(exist_ok=True)
    for path in list(source.glob("quark.db*")):
        os.rename(path, target / path.name)


@pytest.mark.parametrize("is_back", ["in the run", "after a kill"])
def test_records_wait_for_a_store_that_was_moved_away(tmp_path, is_back):
    if is_back == "in the run":
        with quark.start_run(project="p", storage_dir=tmp_path) as session:
            metrics = quark.MetricsLogger(session)
            for step in range(STEPS):
                if step == 100:
                    session.flush()
                    move_database(tmp_path)
                metrics.log("m", float(step), step=step)
            assert wait_until(lambda: session.report_delivery().lanes[0].errors)
            move_database(tmp_path, back=True)
            session.flush()
        assert read_steps(session.id, tmp_path) == list(range(STEPS))
        return
    said, _ = run_script(
        tmp_path,
        """
session, metrics = begin()
for step in range(400):
    if step == 100:
        session.flush()
        os.mkdir(f"{storage_dir}/aside")
        for name in ("quark.db", "quark.db-wal", "quark.db-shm"):
            os.rename(f"{storage_dir}/.quark/{name}", f"{storage_dir}/aside/{name}")
    metrics.log("m", float(step), step=step)
session.flush("journaled")
os.kill(os.getpid(), 9)
""",
        ends=-9,
    )
    (lane,) = recovery.sync(tmp_path)
    assert lane.state == "waiting"
    assert "was moved away" in lane.reason
    assert not (tmp_path / ".quark" / "quark.db").exists()
    move_database(tmp_path, back=True)
    recovery.sync(tmp_path)
    assert read_steps(said.strip(), tmp_path) == list(range(STEPS))


def test_what_a_store_has_refused_is_offered_again_and_fails_a_sync(tmp_path):
    said, _ = run_script(
        tmp_path,
        """
from quark_backends.embedded.backend import EmbeddedBackend
from quark_core.errors import BackendRejected

session = quark.start_run(project="p", storage_dir=storage_dir)
metrics = quark.MetricsLogger(session)
metrics.log("m", 0.0, step=0)
session.flush()

def refuse(*_):
    raise BackendRejected("never started in this store")

EmbeddedBackend.write = EmbeddedBackend.write_group = refuse
log_steps(metrics, 1, 400)
session.end_run()
print(session.id, flush=True)
""",
    )
    assert read_steps(said.strip(), tmp_path) == [0]
    assert recovery.count_quarantined(tmp_path)
    (lane,) = recovery.sync(tmp_path)
    assert (lane.state, lane.quarantined) == ("delivered", {})
    assert lane.delivered >= STEPS - 1
    assert not recovery.count_quarantined(tmp_path)
    assert read_steps(said.strip(), tmp_path) == list(range(STEPS))
    assert quark.open_run(said.strip(), tmp_path).status == "completed"


REFUSING = """
import importlib
from quark_core.errors import BackendRejected

module, name, first, last = os.environ["REFUSES"].split()
backend = getattr(importlib.import_module(module), name)
write_group = backend.write_group

def write_or_refuse(self, batches):
    for batch in batches:
        if int(first) <= batch.number < int(last):
            raise BackendRejected("not today")
        write_group(self, [batch])

backend.write_group = write_or_refuse
backend.write = lambda self, batch: write_or_refuse(self, [batch])
session = quark.start_run(
    project="p", storage_dir=storage_dir, system_metrics=False, backends=os.environ["BACKENDS"]
)
metrics = quark.MetricsLogger(session)
for step in range(10):
    metrics.log("m", float(step), step=step)
    session.flush("journaled")
session.end_run()
print(session.id, flush=True)
"""
STORE = "quark_backends.embedded.backend EmbeddedBackend"
MIRROR = "quark_backends.csv.backend CsvBackend"


@pytest.mark.sampled
@pytest.mark.parametrize("last", [6, 1000])
@pytest.mark.parametrize("refusing", [STORE, MIRROR])
def test_what_was_refused_is_kept_until_it_is_there(tmp_path, refusing, last, monkeypatch):
    place = tmp_path / "elsewhere"
    storage_dir = tmp_path / "root"
    # Whoever starts runs here chooses the mirror with its place.
    monkeypatch.setenv("QUARK_BACKENDS", f"csv:{place}")
    said, _ = run_script(
        storage_dir, REFUSING, REFUSES=f"{refusing} 3 {last}", BACKENDS=f"csv:{place}"
    )
    run_id = said.strip()

    def find_steps():
        if refusing == STORE:
            return read_steps(run_id, storage_dir)
        (table,) = place.rglob("metrics_long.csv")
        rows = csv.DictReader(table.read_text().splitlines())
        return sorted(int(row["step"]) for row in rows)

    assert recovery.count_quarantined(storage_dir)
    before = find_steps()
    assert len(before) < 10
    for _ in range(2):
        recovery.sync(storage_dir)
        left = recovery.count_quarantined(storage_dir)
        if last == 1000 or refusing == STORE:
            # A store takes them under numbers behind those that it has.
            assert not left
            assert find_steps() == list(range(10))
        else:
            # It has later ones, does not say which, and would leave these out as known.
            assert left
            assert find_steps() == before


SPOILED = """
import msgspec
from quark_core.delivery import batch_log
from quark_core.records.codec import Column, decode_body
from quark_core.records.schema import column_types

encode_frame_body = batch_log.encode_frame_body

def spoil(kind, items):
    count, body = encode_frame_body(kind, items)
    decoded = decode_body(body)
    if kind != "metric" or "spoiled" not in decoded.to_list("metric_key"):
        return count, body
    columns = []
    for column in (decoded.column(name) for name in column_types(kind) if name in decoded):
        if column.name == "metric_key":
            texts, width = column.head
            head = [[[5] if text == "spoiled" else text for text in texts], width]
            column = Column(column.name, column.encoding, head, column.nulls, column.data)
        columns.append(column)
    return count, b"\\x00" + msgspec.msgpack.encode([decoded.version, kind, count, columns])

batch_log.encode_frame_body = spoil
session = quark.start_run(project="p", storage_dir=storage_dir, system_metrics=False)
metrics = quark.MetricsLogger(session)
for step in range(9):
    metrics.log("spoiled" if step == 4 else "m", 1.0, step=step)
session.flush("journaled")
metrics.log("m", 1.0, step=9)
session.end_run()
print(session.id, flush=True)
"""


def test_the_good_rest_of_a_refused_batch_is_delivered_and_the_bad_record_named(tmp_path):
    said, logged = run_script(tmp_path, SPOILED)
    (before,) = recovery.count_quarantined(tmp_path)
    assert before.records >= 9, logged
    for looks in range(2):
        results = [lane for lane in recovery.sync(tmp_path) if lane.quarantined]
        assert [sum(lane.quarantined.values()) for lane in results] == [1]
        assert read_steps(said.strip(), tmp_path) == [0, 1, 2, 3, *range(5, 10)], looks
    assert CliRunner().invoke(cli, ["sync", str(tmp_path)]).exit_code == 1
    told = CliRunner().invoke(cli, ["doctor", "-d", str(tmp_path), "--json"]).output
    assert said.strip() in told[told.index("quarantine") :]


@pytest.mark.sampled
@pytest.mark.parametrize("length", [0, 5000])
def test_an_index_that_another_program_cuts_ends_no_training(tmp_path, length):
    other = make_other_run(tmp_path)
    said, _ = run_script(
        tmp_path,
        """
session = quark.start_run(project="p", storage_dir=storage_dir)
metrics = quark.MetricsLogger(session)
for step in range(400):
    metrics.log("m", float(step), step=step)
    if step % 100 == 50:
        session.flush()
        os.truncate(f"{storage_dir}/.quark/quark.db-shm", int(os.environ["LENGTH"]))
session.flush()
assert len(metrics.read(metric_key="m")) == 400
os.truncate(f"{storage_dir}/.quark/quark.db-shm", int(os.environ["LENGTH"]))
print(session.id, flush=True)
""",
        LENGTH=str(length),
    )
    check_all_is_there(tmp_path, said.strip(), other)
