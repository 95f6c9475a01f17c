"""Black boxes whose process and store are gone are deleted by any start; all others stay."""

import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import quark
from quark_core.delivery import crash_buffer_recovery
from quark_core.delivery.crash_buffer import SHARED_MEMORY
from quark_core.delivery.crash_buffer_recovery import sweep_black_boxes
from quark_core.runs import recovery
from quark_core.system.folders import is_surely_gone, note_place
from quark_core.system.process import current_process

pytestmark = pytest.mark.skipif(
    not SHARED_MEMORY.is_dir() or not hasattr(os, "posix_fallocate"), reason="needs shared memory"
)

KILLED = """
import os, signal, sys, quark
session = quark.start_run(project="p", storage_dir=sys.argv[1])
metrics = quark.MetricsLogger(session)
for step in range(100):
    metrics.log("m", float(step), step=step)
print(session.run_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_killed(root, **environment):
    """A run that was killed; its black box."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(root)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    (box,) = SHARED_MEMORY.glob(f"quark-{done.stdout.strip()}-*")
    return box


@pytest.fixture
def killed(tmp_path):
    """The storage root of a killed run, and its black box."""
    root = tmp_path / "above" / "root"
    root.mkdir(parents=True)
    box = run_killed(root)
    yield root, box
    shutil.rmtree(box, ignore_errors=True)


def is_swept(box):
    """Whether a sweep leaves nothing of a box; a start of another test may have been first."""
    sweep_black_boxes()
    return not box.exists()


def change(box, **values):
    path = box / "journal.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.long
def test_a_start_deletes_the_box_of_a_killed_run_whose_root_is_gone_and_looks_once_a_minute(
    killed, tmp_path, monkeypatch
):
    root, box = killed
    shutil.rmtree(root)
    cleared = []
    clear = recovery._clear
    monkeypatch.setattr(recovery, "_clear", lambda after: (clear(after), cleared.append(after)))

    def wait_for(condition):
        deadline = time.monotonic() + 60
        with quark.start_run(project="other", storage_dir=tmp_path / "other"):
            while not condition():
                assert time.monotonic() < deadline
                time.sleep(0.02)

    monkeypatch.setattr(recovery, "_clear_again_at_s", 0.0)
    wait_for(lambda: not box.exists())
    wait_for(lambda: cleared)
    assert len(cleared) == 1
    again_at_s = recovery._clear_again_at_s
    assert 50.0 < again_at_s - time.monotonic() <= 60.0
    monkeypatch.setattr(recovery, "_clear_again_at_s", again_at_s - 60.0)
    wait_for(lambda: len(cleared) == 2)


@pytest.mark.long
def test_it_is_deleted_where_more_than_the_root_is_gone(killed):
    root, box = killed
    shutil.rmtree(root.parent)
    assert is_swept(box)


@pytest.mark.long
def test_a_store_that_is_there_keeps_its_box(killed):
    _, box = killed
    assert box not in sweep_black_boxes()
    assert box.exists()


@pytest.mark.sampled
@pytest.mark.parametrize("level", ["root", "above"])
def test_a_store_that_was_renamed_keeps_its_box(killed, level):
    root, box = killed
    renamed = root if level == "root" else root.parent
    renamed.rename(renamed.with_name("new name"))
    assert box not in sweep_black_boxes()
    moved = root.with_name("new name") if level == "root" else Path(renamed.parent, "new name/root")
    recovery.sync(moved)
    run_id = box.name.split("-")[1]
    records = quark.MetricsLogger(quark.open_run(run_id, moved)).read()
    assert [record.value for record in records] == list(map(float, range(100)))


@pytest.mark.long
def test_a_start_in_a_store_that_was_moved_takes_what_its_box_has(tmp_path):
    # Between the move and the start, that of another test may take the store for a deleted one.
    assert any(_is_taken_by_a_start(tmp_path / str(trial)) for trial in range(4))


def _is_taken_by_a_start(folder):
    root, moved = folder / "above" / "root", folder / "elsewhere" / "store"
    root.mkdir(parents=True)
    moved.parent.mkdir()
    box = run_killed(root)
    root.rename(moved)
    deadline = time.monotonic() + 60
    with quark.start_run(project="other", storage_dir=moved):
        while box.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    records = quark.MetricsLogger(quark.open_run(box.name.split("-")[1], moved)).read()
    return [record.value for record in records] == list(map(float, range(100)))


@pytest.mark.long
def test_another_folder_that_has_the_number_of_the_root_is_not_taken_for_it(killed):
    root, box = killed
    manifest = json.loads((box / "journal.json").read_text())
    shutil.rmtree(root)
    other = root.with_name("other")
    other.mkdir()
    for place in manifest["places"]:
        for level in place["levels"]:
            if level[0] == os.path.realpath(root):
                level[2] = other.stat().st_ino
    change(box, places=manifest["places"])
    assert is_swept(box)


@pytest.mark.long
def test_a_store_on_a_disk_that_is_not_mounted_keeps_its_box(killed):
    root, box = killed
    manifest = json.loads((box / "journal.json").read_text())
    for place in manifest["places"]:
        for level in place["levels"]:
            # What is above was the mount point, and is of another device now.
            level[1] += 1
    change(box, places=manifest["places"])
    shutil.rmtree(root)
    assert box not in sweep_black_boxes()
    assert box.exists()


@pytest.mark.long
def test_a_store_on_a_disk_of_its_own_that_is_gone_keeps_its_box(killed):
    root, box = killed
    manifest = json.loads((box / "journal.json").read_text())
    for place in manifest["places"]:
        for level in place["levels"]:
            if level[0].startswith(os.path.realpath(root)):
                level[1] += 1
    change(box, places=manifest["places"])
    shutil.rmtree(root)
    assert box not in sweep_black_boxes()


@pytest.mark.long
def test_a_journal_elsewhere_that_is_there_keeps_its_box(tmp_path):
    root = tmp_path / "root"
    box = run_killed(root, QUARK_JOURNAL_DIR=str(tmp_path / "journals"))
    try:
        shutil.rmtree(root)
        assert box not in sweep_black_boxes()
        shutil.rmtree(tmp_path / "journals")
        assert is_swept(box)
    finally:
        shutil.rmtree(box, ignore_errors=True)


@pytest.mark.sampled
@pytest.mark.parametrize("what", ["lives", "is of another machine"])
def test_a_process_that_is_not_surely_dead_keeps_its_box(killed, what):
    root, box = killed
    manifest = json.loads((box / "journal.json").read_text())
    process = {**manifest["process"], "host": "another|boot|namespace"}
    if what == "lives":
        own = current_process()
        process = {name: getattr(own, name) for name in own.__struct_fields__}
    change(box, process=process)
    shutil.rmtree(root)
    assert box not in sweep_black_boxes()
    assert box.exists()


@pytest.mark.long
def test_a_box_of_another_user_stays(killed, monkeypatch):
    root, box = killed
    another = box.stat().st_uid + 1
    shutil.rmtree(root)
    monkeypatch.setattr(os, "geteuid", lambda: another)
    assert sweep_black_boxes() == []


def test_a_place_that_cannot_be_seen_is_not_gone(tmp_path, monkeypatch):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    place = note_place(folder)
    assert not is_surely_gone(place)
    folder.rmdir()
    assert is_surely_gone(place)
    look = os.lstat

    def refuse(path, **named):
        if str(path) == str(folder):
            raise PermissionError(path)
        return look(path, **named)

    monkeypatch.setattr(os, "lstat", refuse)
    assert not is_surely_gone(place)


def test_a_link_that_leads_nowhere_now_is_not_gone(tmp_path):
    target, link = tmp_path / "disk" / "store", tmp_path / "link"
    target.mkdir(parents=True)
    link.symlink_to(target)
    place = note_place(link)
    shutil.rmtree(target)
    assert not is_surely_gone(place)
    link.unlink()
    assert is_surely_gone(place)


@pytest.fixture(params=["box without a name", "box without places"])
def nameless(request, tmp_path):
    """A box that does not say where its store was."""
    path = SHARED_MEMORY / f"quark-test{os.getpid()}-{request.param.replace(' ', '')}"
    if request.param == "box without a name":
        path.mkdir()
        (path / "000000.records").write_bytes(bytes(4096))
    else:
        root = tmp_path / "root"
        path = run_killed(root)
        change(path, places=[])
        shutil.rmtree(root)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_a_box_that_says_little_stays_for_a_month(nameless, monkeypatch):
    assert nameless not in sweep_black_boxes()
    # In a month, the boxes of others on this machine would be of no use either.
    monkeypatch.setattr(crash_buffer_recovery, "_find_boxes", lambda: iter([nameless]))
    now = time.time()
    monkeypatch.setattr(crash_buffer_recovery.time, "time", lambda: now + 29 * 86400)
    assert nameless not in sweep_black_boxes()
    monkeypatch.setattr(crash_buffer_recovery.time, "time", lambda: now + 31 * 86400)
    with next(nameless.glob("*.records")).open("r+b") as opened, mmap.mmap(opened.fileno(), 0):
        assert nameless not in sweep_black_boxes()
    assert nameless in sweep_black_boxes()
    assert not nameless.exists()


def test_what_is_no_box_stays(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    link = SHARED_MEMORY / f"quark-link{os.getpid()}-x"
    link.symlink_to(target)
    try:
        assert link not in sweep_black_boxes()
        assert target.is_dir()
    finally:
        link.unlink()
