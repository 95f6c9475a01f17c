"""log_directory: one artifact, whole or none, of whatever lies there; and references."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from failing_disk import FailingDisk
from payload_tools import assert_clean, list_events, list_objects, sha256

import quark
from quark_core.artifacts import payload_folder
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.runs import recovery

LONG_AGO_S = 1_000_000


def fill(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))
    return folder


def paths_of(manifest):
    return [file["path"] for file in manifest["files"]]


@pytest.fixture
def tree(tmp_path):
    return fill(
        tmp_path / "data",
        {"b.txt": b"b", "a/one.bin": b"1" * 1000, "a/deep/two.bin": b"2", "c d é.txt": b"b"},
    )


def test_a_directory_is_one_artifact_that_comes_back(artifacts, session, tree, tmp_path):
    record = artifacts.log_directory(tree, step=2, aliases=["gold"]).wait(60)
    assert (record.artifact_type, record.artifact_key, record.step) == ("directory", "data", 2)
    assert (record.metadata["files"], record.metadata["total_bytes"]) == (4, 1003)
    manifest = artifacts.load(record)
    assert paths_of(manifest) == ["a/deep/two.bin", "a/one.bin", "b.txt", "c d é.txt"]
    assert manifest["files"][1]["sha256"] == sha256(b"1" * 1000)
    used = session.use_artifact("data:gold")
    copy = used.copy_to(tmp_path / "copy")
    for folder in (copy, used.path):
        found = {str(path.relative_to(folder)): path.read_bytes()
                 for path in folder.rglob("*") if path.is_file()}  # fmt: skip
        assert found == {str(path.relative_to(tree)): path.read_bytes()
                         for path in tree.rglob("*") if path.is_file()}  # fmt: skip
    assert_clean(session)


def test_what_has_not_changed_costs_nothing(artifacts, session, tree):
    time.sleep(0.2)  # what was written this moment may be written again unnoticed
    artifacts.log_directory(tree).wait(60)
    records = len(artifacts.read())
    objects = len(list_objects(session))
    again = artifacts.log_directory(tree).wait(60)
    # The manifest alone, which is the same payload.
    assert (len(artifacts.read()), len(list_objects(session))) == (records + 1, objects)
    fill(tree, {"b.txt": b"c"})
    other = artifacts.log_directory(tree).wait(60)
    assert other.sha256 != again.sha256
    assert len(list_objects(session)) == objects + 2


def test_a_file_that_is_written_again_at_once_is_not_taken_for_what_it_was(artifacts, tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "f").write_bytes(b"old")
    artifacts.log_directory(folder).wait(60)
    moment = (folder / "f").stat().st_mtime_ns
    (folder / "f").write_bytes(b"new")
    os.utime(folder / "f", ns=(moment, moment))
    record = artifacts.log_directory(folder).wait(60)
    assert artifacts.load(record)["files"][0]["sha256"] == sha256(b"new")


def test_circles_pipes_and_links_to_nothing_are_left_out(artifacts, tree):
    (tree / "loop").symlink_to(tree)
    (tree / "a" / "up").symlink_to("..")
    (tree / "nothing").symlink_to("absent")
    (tree / "to-file").symlink_to("b.txt")
    os.mkfifo(tree / "pipe")
    (tree / "bad\nname").write_bytes(b"x")
    with pytest.warns(RuntimeWarning, match="5 files are omitted"):
        pending = artifacts.log_directory(tree, exclude=["*.bin", "c d*"])
    manifest = artifacts.load(pending.wait(60))
    assert paths_of(manifest) == ["b.txt", "to-file"]
    assert set(manifest["skipped"]) == {"loop", "a/up", "nothing", "pipe", "bad\nname"}


def test_what_goes_or_cannot_be_read_meanwhile_is_left_out_and_told(
    artifacts, session, tree, monkeypatch
):
    opened = payload_folder.open_source
    ready = threading.Event()

    def refuse(path, *rest):
        ready.wait(60)
        if Path(path).name == "two.bin":
            raise SchemaValidationError(f"path {path} cannot be read: Permission denied")
        return opened(path, *rest)

    monkeypatch.setattr("quark_core.writers.artifact_writing.open_source", refuse)
    pending = artifacts.log_directory(tree)
    (tree / "b.txt").unlink()
    ready.set()
    manifest = artifacts.load(pending.wait(60))
    assert paths_of(manifest) == ["a/one.bin", "c d é.txt"]
    assert set(manifest["skipped"]) == {"a/deep/two.bin", "b.txt"}
    (event,) = list_events(session, "artifact_not_kept")
    assert "2 files are omitted" in event.payload["reason"]


def test_a_file_that_changes_while_it_is_read_is_marked(artifacts, tree, monkeypatch):
    digest = payload_folder._digest

    def grow(source, size_bytes, write):
        with open(tree / "b.txt", "ab") as file:
            file.write(b"more")
        return digest(source, size_bytes, write)

    monkeypatch.setattr(payload_folder, "_digest", grow)
    record = artifacts.log_directory(tree, exclude=["a/*", "c*"]).wait(60)
    assert record.metadata["changed_while_read"] == 1
    (file,) = artifacts.load(record)["files"]
    assert file == {
        "path": "b.txt", "size_bytes": 1, "sha256": sha256(b"b"), "changed_while_read": True
    }  # fmt: skip


@pytest.mark.parametrize("place", [3, 11])
def test_a_disk_that_is_full_in_the_middle_is_told_once(
    artifacts, session, tree, monkeypatch, tmp_path, place
):
    disk = FailingDisk(monkeypatch, tmp_path)
    disk.arm(place, stays_full=True, error=errno.ENOSPC)
    record = artifacts.log_directory(tree).wait(60)
    disk.arm(None)
    assert 0 < record.metadata["files_not_kept"] <= 4
    assert "not_kept" in record.metadata  # the manifest comes last
    events = list_events(session, "artifact_not_kept")
    assert len(events) == 2  # the files together, and the manifest
    again = artifacts.log_directory(tree).wait(60)
    assert "files_not_kept" not in again.metadata
    assert paths_of(artifacts.load(again)) == ["a/deep/two.bin", "a/one.bin", "b.txt", "c d é.txt"]
    assert_clean(session)


def test_a_strict_run_says_that_the_disk_is_full(strict_artifacts, tree, monkeypatch, tmp_path):
    disk = FailingDisk(monkeypatch, tmp_path)
    disk.arm(0, stays_full=True)
    with pytest.raises(SessionStoreError, match="4 files of the directory"):
        strict_artifacts.log_directory(tree, name="data").wait(60)
    disk.arm(None)


PROGRAM = """
import sys, quark
session = quark.start_run(project="killed", storage_dir=sys.argv[1])
artifacts = quark.ArtifactStore(session)
print(session.run_id, flush=True)
for step in range(1000):
    artifacts.log_directory(sys.argv[2], name="data", step=step).wait()
    artifacts._kept_files.clear()
    artifacts.flush()
    print(step, flush=True)
"""


def test_a_process_that_is_killed_leaves_whole_directories_or_none(tmp_path):
    tree = fill(tmp_path / "data", {f"{n % 7}/{n}": os.urandom(2000) for n in range(300)})
    arguments = [sys.executable, "-c", PROGRAM, str(tmp_path / "runs"), str(tree)]
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    run_id = child.stdout.readline().strip()
    child.stdout.readline()
    time.sleep(0.15)
    child.send_signal(signal.SIGKILL)
    done = child.communicate()[0].split()
    recovery.sync(tmp_path / "runs")
    session = quark.open_run(run_id, tmp_path / "runs")
    artifacts = quark.ArtifactStore(session)
    directories = artifacts.read(artifact_type="directory")
    assert len(directories) >= len(done) + 1
    kept = list_objects(session)
    for record in directories:
        manifest = artifacts.load(record)
        assert len(manifest["files"]) == 300
        assert all(file["sha256"] in kept for file in manifest["files"])


@pytest.mark.long
def test_ten_thousand_files_are_one_artifact(artifacts, session, tmp_path):
    tree = fill(tmp_path / "data", {f"{n % 50}/{n}.txt": b"%d" % n for n in range(10_000)})
    record = artifacts.log_directory(tree).wait(400)
    assert record.metadata["files"] == 10_000
    assert len(list_objects(session)) == 10_001
    assert artifacts.log_directory(tree).wait(400).sha256 == record.sha256


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"path": "/absent"}, "not a directory"),
        ({"path": 3}, "path"),
        ({"path": "a\0b", "name": "a"}, "cannot be read|not a directory"),
        ({"path": ".", "exclude": "*.py"}, "exclude"),
        ({"path": ".", "aliases": ["latest"]}, "alias"),
        ({"path": ".", "aliases": "best"}, "aliases"),
        ({"path": ".", "name": "../x"}, "name"),
    ],
)
def test_bad_arguments_are_refused_at_once(artifacts, arguments, word):
    with pytest.raises(SchemaValidationError, match=word):
        artifacts.log_directory(**arguments)


def test_a_manifest_of_somebody_else_leads_nowhere(artifacts, session, tmp_path):
    for entry in (
        {"path": "../out", "size_bytes": 1, "sha256": sha256(b"x")},
        {"path": "/etc/x", "size_bytes": 1, "sha256": sha256(b"x")},
        {"path": "x", "size_bytes": 1, "sha256": "../../x"},
        "x",
    ):
        artifacts.store("directory", "evil", json.loads(json.dumps({"files": [entry]})))
        with pytest.raises(quark.ArtifactNotFoundError, match="invalid path"):
            session.use_artifact("evil").copy_to(tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())


def test_a_maze_of_links_has_an_end(artifacts, tmp_path):
    maze = tmp_path / "maze"
    rooms = [maze / str(place) for place in range(12)]
    for room in rooms:
        room.mkdir(parents=True)
        for other in rooms:
            if other != room:
                (room / other.name).symlink_to(other)
    with pytest.raises(SchemaValidationError, match="links to directories"):
        artifacts.log_directory(maze)


def test_a_file_of_somebody_else_is_copied_out_under_a_name_that_hides_nothing(
    artifacts, session, tmp_path
):
    with pytest.warns(RuntimeWarning, match="naming rule"):
        artifacts.store("file", ".bashrc", b"rm -r", payload_format="bytes")
    copied = session.use_artifact(".bashrc").copy_to(tmp_path / "out")
    assert copied.parent == tmp_path / "out"
    assert not copied.name.startswith(".")


def test_a_reference_says_where_a_file_lies_and_no_secret(artifacts, session, tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"words")
    record = artifacts.log_reference("corpus", path)
    found = artifacts.load(record)
    assert (found["uri"], found["size_bytes"], found["sha256"]) == (
        path.as_uri(), 5, sha256(b"words")
    )  # fmt: skip
    assert record.metadata["reference"] == found
    used = session.use_artifact("corpus")
    assert (used.path, used.uri) == (path, path.as_uri())
    path.write_bytes(b"other words")
    with pytest.raises(quark.ArtifactNotFoundError, match="had 5"):
        used.path  # noqa: B018
    path.unlink()
    with pytest.raises(quark.ArtifactNotFoundError, match="does not exist"):
        used.path  # noqa: B018
    remote = artifacts.log_reference("r", "s3://user:hunter22@bucket/x", size_bytes=10**12)
    assert "hunter22" not in json.dumps(artifacts.load(remote))
    with pytest.raises(quark.ArtifactNotFoundError, match="the tool that stores it"):
        session.use_artifact("r").path  # noqa: B018
    assert "missing" in artifacts.load(artifacts.log_reference("gone", tmp_path / "absent"))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"uri": ""}, "uri"),
        ({"uri": "s3://a\nb"}, "uri"),
        ({"uri": 3}, "uri"),
        ({"uri": "s3://a", "sha256": "x"}, "sha256"),
        ({"uri": "s3://a", "size_bytes": -1}, "size_bytes"),
    ],
)
def test_what_is_no_address_is_refused(artifacts, arguments, word):
    with pytest.raises(SchemaValidationError, match=word):
        artifacts.log_reference("r", **arguments)


def test_nothing_is_warned_of_a_plain_directory(artifacts, tree):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        artifacts.log_directory(tree).wait(60)
