"""What a run folder of somebody else says is not believed: it reaches nothing outside of itself."""

import os

import pytest
from hostile_folders import make_journal

from quark_core.delivery.crash_buffer import SHARED_MEMORY, BlackBox, find_box_path
from quark_core.delivery.crash_buffer_recovery import find_orphan_boxes
from quark_core.delivery.journal_folder import JournalFolder, Manifest
from quark_core.delivery.segments import Origin
from quark_core.runs import recovery
from quark_core.system.process import ProcessIdentity, current_process


@pytest.fixture
def victim(tmp_path):
    """A file of the reader's, outside of any store."""
    file = tmp_path / "home" / "thesis.txt"
    file.parent.mkdir()
    file.write_text("years of work")
    return file


def test_a_black_box_of_another_name_is_not_touched(tmp_path, victim):
    folder = make_journal(tmp_path / "shared", black_box=str(victim))
    results = recovery.sync(tmp_path / "shared")
    assert [result.state for result in results] == ["delivered"]
    assert victim.read_text() == "years of work"
    assert not folder.path.exists()


@pytest.mark.parametrize("ids", [("r/../../etc", "w"), ("run", "../w"), ("run", "w-w"), ("", "")])
def test_ids_that_name_other_places_have_no_black_box(ids):
    assert find_box_path(*ids) is None


def test_a_link_in_place_of_a_black_box_is_not_followed(tmp_path, victim):
    folder = make_journal(tmp_path / "shared", black_box="yes")
    manifest = folder.read_manifest()
    box = find_box_path(manifest.run_id, manifest.writer_id)
    os.symlink(victim, box)
    try:
        (result,) = recovery.survey(tmp_path / "shared")
        recovery.sync(tmp_path / "shared")
        assert "belongs to another user" in result.reason
        assert victim.read_text() == "years of work"
        assert box.is_symlink()
        assert folder.path.exists()
    finally:
        box.unlink()


@pytest.mark.long
def test_the_own_black_box_is_still_found(tmp_path):
    folder = make_journal(tmp_path, black_box="/anything")
    manifest = folder.read_manifest()
    box = find_box_path(manifest.run_id, manifest.writer_id)
    BlackBox(box, Origin(manifest.run_id, manifest.writer_id), capacity_bytes=2**22)
    assert box.exists()
    recovery.sync(tmp_path)
    assert not box.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to give files away")
@pytest.mark.parametrize("owner", [12345, 0])
def test_a_box_of_another_user_makes_no_journal(tmp_path, owner):
    """Anybody may put something into shared memory, with a place to write to in it."""
    box = JournalFolder(SHARED_MEMORY / f"quark-planted{os.getpid()}-w")
    own = current_process()
    box.write_manifest(
        Manifest(
            run_id="planted",
            writer_id="w",
            attempt=0,
            rank=0,
            project="p",
            storage_dir=str(tmp_path),
            run_path=str(tmp_path),
            lanes=(),
            process=ProcessIdentity(own.host, 2**22 + 1, "1"),
            journal=str(tmp_path / "anywhere"),
        )
    )
    try:
        os.chmod(box.path, 0o777)
        os.chown(box.path, owner, -1)
        found = [folder.path for folder, _ in find_orphan_boxes(tmp_path)]
        assert found == ([box.path] if owner == os.geteuid() else [])
    finally:
        box.path.joinpath("journal.json").unlink()
        box.path.rmdir()
