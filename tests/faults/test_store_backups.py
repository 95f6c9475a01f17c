"""`quark backup`: everything is lost, and comes back out of a copy that was made meanwhile."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from backups import TRAINING, call, wait_until
from kit.programs import run_code, start_code

import quark
from quark_backends.store.databases.sqlite import connect, find_store
from quark_backends.store.upkeep.backup import BackupFolder, back_up_store, verify_backup
from quark_backends.store.upkeep.trash import RunTrash
from quark_core.errors import SessionStoreError


def lose_and_restore(store, backup):
    """What the guide says: copy the folder back, and deliver what its journals hold."""
    for journal in store.glob(".quark/runs/*/journal/*/journal.json"):
        # The machine is lost too: what a killed process left in its memory would come as well.
        if (box := json.loads(journal.read_text())["black_box"]) is not None:
            shutil.rmtree(box, ignore_errors=True)
    shutil.rmtree(store)
    store.mkdir()
    shutil.copytree(backup / ".quark", store / ".quark", symlinks=True)
    call("sync", store)


def read_steps(store, run_id):
    session = quark.open_run(run_id, store)
    return [record.step for record in quark.MetricsLogger(session).read(metric_key="loss")]


def make_store(store, steps=100, payload=b"payload" * 100):
    with quark.start_run(project="p", storage_dir=store) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(steps):
            metrics.log("loss", float(step), step=step)
        artifact = quark.ArtifactStore(session).store("bytes", "weights", payload, step=1)
    return session.run_id, artifact


def find_payload(store, content):
    sha256 = hashlib.sha256(content).hexdigest()
    (found,) = store.glob(f".quark/*/*/artifacts/.objects/*/{sha256}")
    return found


@pytest.mark.long
def test_all_that_was_stored_comes_back_after_everything_was_lost(tmp_path):
    store = tmp_path / "store"
    told = [tmp_path / f"told{number}" for number in range(2)]
    trainings = [
        subprocess.Popen([sys.executable, "-c", TRAINING, str(store), str(path)]) for path in told
    ]
    try:
        wait_until(lambda: all(path.exists() for path in told), "nothing was stored")
        befores = []
        for number in range(3):
            befores.append([json.loads(path.read_text()) for path in told])
            assert "verified" in call("backup", "-d", store, tmp_path / f"backup{number}")
            wait_until(
                lambda: all(
                    json.loads(path.read_text())["steps"] > before["steps"]
                    for path, before in zip(told, befores[-1], strict=True)
                ),
                "the trainings do not go on",
            )
        assert all(training.poll() is None for training in trainings)
    finally:
        for training in trainings:
            training.kill()
            training.wait()
    for number, before in enumerate(befores):
        backup = tmp_path / f"backup{number}"
        verify_backup(backup)
        lose_and_restore(store, backup)
        for run in before:
            steps = read_steps(store, run["run_id"])
            assert steps[: run["steps"]] == list(range(run["steps"]))
            assert steps == list(range(len(steps)))  # each once, also those that came later
            artifacts = quark.ArtifactStore(quark.open_run(run["run_id"], store))
            for artifact_id, sha256 in run["hashes"].items():
                assert hashlib.sha256(artifacts.load(artifact_id)).hexdigest() == sha256
            # What a backup's records name is in it, whatever came while it was made.
            for record in artifacts.read():
                assert hashlib.sha256(artifacts.load(record.id)).hexdigest() == record.sha256
        # A restored run goes on as any that was lost.
        with quark.resume_run(run_id=run["run_id"], storage_dir=store) as session:
            quark.MetricsLogger(session).log("loss", 0.0, step=len(steps))
        assert read_steps(store, run["run_id"]) == list(range(len(steps) + 1))


@pytest.mark.long
def test_a_backup_is_a_storage_root(tmp_path):
    run_id, artifact = make_store(tmp_path / "store")
    call("backup", "-d", tmp_path / "store", tmp_path / "backup")
    assert run_id in call("runs", "-d", tmp_path / "backup", "--json")
    opened = quark.open_run(run_id, tmp_path / "backup")
    assert quark.ArtifactStore(opened).load(artifact.id) == b"payload" * 100
    # Reading it has not made another of it.
    assert "is complete and undamaged" in call("backup", "--verify", tmp_path / "backup")


@pytest.mark.long
def test_what_a_killed_process_left_in_its_journal_and_in_memory_is_in_it(tmp_path):
    store = tmp_path / "store"
    script = (
        "import os, signal, sys, quark\n"
        "session = quark.start_run(project='p', storage_dir=sys.argv[1])\n"
        "print(session.run_id, flush=True)\n"
        "metrics = quark.MetricsLogger(session)\n"
        "for step in range(2_000):\n    metrics.log('loss', float(step), step=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = run_code(script, store, ends=-signal.SIGKILL)
    call("backup", "-d", store, tmp_path / "backup")
    lose_and_restore(store, tmp_path / "backup")
    assert read_steps(store, done.stdout.strip()) == list(range(2_000))


@pytest.mark.long
def test_what_memory_still_has_of_what_came_later_is_delivered_and_the_hole_is_told(tmp_path):
    store = tmp_path / "store"
    script = (
        "import os, signal, sys, quark\n"
        "session = quark.start_run(project='p', storage_dir=sys.argv[1])\n"
        "metrics = quark.MetricsLogger(session)\n"
        "def log(steps):\n"
        "    for step in steps:\n"
        "        metrics.log('loss', float(step), step=step)\n"
        "log(range(100))\n"
        "session.flush('stored')\n"
        "print(session.run_id, flush=True)\n"
        "input()\n"
        "for start in range(100, 1_000, 100):\n"
        "    log(range(start, start + 100))\n"
        "    session.flush('stored')\n"
        # What comes now stays in the black box: the delivery thread stands still from here on.
        "session.open_run.stream._tick = lambda *, sync: True\n"
        "session.open_run.stream._ask(60, sync=False)\n"
        "log(range(1_000, 1_002))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = start_code(script, store, stdin=subprocess.PIPE)
    run_id = process.stdout.readline().strip()
    call("backup", "-d", store, tmp_path / "backup")
    process.communicate("go on\n")
    shutil.rmtree(store)
    store.mkdir()
    shutil.copytree(tmp_path / "backup" / ".quark", store / ".quark", symlinks=True)
    told = " ".join(re.findall(r"[\w']+", call("doctor", "-d", store)))
    # Two points, and on a slow machine a heartbeat.
    assert re.search(r"its last [23] records are in its crash buffer only", told)
    call("sync", store, expected=1)
    assert read_steps(store, run_id) == [*range(100), 1_000, 1_001]
    assert re.search(r"batches \d+ to \d+ are missing", call("doctor", "-d", store))


@pytest.mark.long
def test_what_is_done_to_a_backup_does_not_reach_a_training_that_goes_on(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path / "store") as session:
        metrics = quark.MetricsLogger(session)
        for step in range(100):
            metrics.log("loss", float(step), step=step)
        session.flush("stored")
        call("backup", "-d", tmp_path / "store", tmp_path / "backup")
        journal = json.loads(
            next(tmp_path.glob("store/.quark/runs/*/journal/*/journal.json")).read_text()
        )
        call("sync", tmp_path / "backup")
        assert journal["black_box"] is None or Path(journal["black_box"]).exists()
        for step in range(100, 200):
            metrics.log("loss", float(step), step=step)
    assert session.report_delivery().complete
    assert read_steps(tmp_path / "store", session.run_id) == list(range(200))
    assert read_steps(tmp_path / "backup", session.run_id) == list(range(100))


@pytest.mark.parametrize("place", ["quark.db", "store.json", "*.objects/*/*", "*/*.metadata.json"])
def test_a_flipped_byte_is_told(tmp_path, place):
    make_store(tmp_path / "store")
    call("backup", "-d", tmp_path / "store", tmp_path / "backup")
    path = next(
        path
        for path in sorted((tmp_path / "backup" / ".quark").rglob(place.rpartition("/")[2]))
        if path.is_file() and path.match(place)
    )
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(SessionStoreError, match="has different content"):
        call("backup", "--verify", tmp_path / "backup")


@pytest.mark.long
def test_a_flipped_byte_anywhere_in_the_manifest_is_told(tmp_path):
    make_store(tmp_path / "store", steps=1)
    back_up_store(tmp_path / "store", tmp_path / "backup")
    path = tmp_path / "backup" / "backup.json"
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(
            SessionStoreError, match=r"is damaged|is not a (complete )?backup|was changed"
        ):
            verify_backup(tmp_path / "backup")
    path.write_bytes(content)
    verify_backup(tmp_path / "backup")


def test_files_that_went_came_or_became_links_are_told(tmp_path):
    make_store(tmp_path / "store")
    backup = tmp_path / "backup"
    back_up_store(tmp_path / "store", backup)
    (backup / "more").touch()
    with pytest.raises(SessionStoreError, match="more was added"):
        verify_backup(backup)
    (backup / "more").unlink()
    (backup / ".quark" / "store.json").rename(tmp_path / "store.json")
    with pytest.raises(SessionStoreError, match=r"store\.json is missing"):
        verify_backup(backup)
    (backup / ".quark" / "store.json").symlink_to(tmp_path / "store.json")
    with pytest.raises(SessionStoreError, match=r"store\.json is missing"):
        verify_backup(backup)
    (backup / ".quark" / "store.json").unlink()
    (tmp_path / "store.json").rename(backup / ".quark" / "store.json")
    verify_backup(backup)
    with connect(find_store(backup)) as connection:
        connection.execute("UPDATE run SET status = 'failed'")
        with pytest.raises(SessionStoreError, match=r"quark\.db was changed"):
            verify_backup(backup)
    connection.close()
    with pytest.raises(SessionStoreError, match=r"quark\.db has different content"):
        verify_backup(backup)


@pytest.mark.sampled
@pytest.mark.parametrize("payload_bytes", [100, 4_000_000])
def test_a_disk_that_fills_leaves_nothing_that_looks_like_a_backup(
    tmp_path, make_disk, payload_bytes
):
    disk = make_disk("tmpfs")
    make_store(tmp_path / "store", steps=50_000, payload=os.urandom(payload_bytes))
    with (disk / "filler").open("wb") as file:
        file.write(bytes(1_900_000))  # so that the database does not fit either
    with pytest.raises(
        SessionStoreError, match=r"backup cannot be created: .*. Nothing is left of it"
    ):
        call("backup", "-d", tmp_path / "store", disk / "backup")
    assert [path.name for path in disk.iterdir()] == ["filler"]
    assert "Traceback" not in call("runs", "-d", tmp_path / "store")


@pytest.mark.long
def test_a_backup_that_is_killed_half_way_is_none(tmp_path):
    make_store(tmp_path / "store", payload=os.urandom(1_000_000))
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from quark_backends.store.upkeep import backup\n"
        "left = [int(sys.argv[3])]\n"
        "real = os.fsync\n"
        "def sync(descriptor):\n"
        "    left[0] -= 1\n"
        "    if left[0] < 0:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    real(descriptor)\n"
        "os.fsync = sync\n"
        "backup.back_up_store(Path(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    for syncs in range(100):
        target = tmp_path / f"backup{syncs}"
        arguments = [str(tmp_path / "store"), str(target), str(syncs)]
        done = subprocess.run([sys.executable, "-c", script, *arguments])
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        # The last sync is of the folder that it lies in, once it has its name.
        if target.exists():
            verify_backup(target)
        for part in tmp_path.glob(f".{target.name}.part-*"):
            shutil.rmtree(part) if (part / "backup.json").exists() else None
        for part in tmp_path.glob(f".{target.name}.part-*"):
            with pytest.raises(SessionStoreError, match=r"is not a (complete )?backup"):
                verify_backup(part)
    assert syncs > 5
    verify_backup(target)


def test_what_is_there_is_not_overwritten(tmp_path):
    make_store(tmp_path / "store", steps=1)
    (tmp_path / "there").mkdir()
    with pytest.raises(SessionStoreError, match="already exists"):
        call("backup", "-d", tmp_path / "store", tmp_path / "there")
    for inside in (".quark/backup", ".quark"):
        with pytest.raises(SessionStoreError, match=r"is in the store itself|already exists"):
            call("backup", "-d", tmp_path / "store", tmp_path / "store" / inside)
    with pytest.raises(SessionStoreError, match="no Quark store in"):
        call("backup", "-d", tmp_path / "there", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "there"]
    with pytest.raises(SessionStoreError, match=r"is not a (complete )?backup"):
        call("backup", "--verify", tmp_path / "there")


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_a_store_that_is_not_whole_is_told_before_it_is_needed(tmp_path, what):
    make_store(tmp_path / "store")
    path = find_payload(tmp_path / "store", b"payload" * 100)
    if what == "missing":
        path.unlink()
    else:
        path.chmod(0o600)
        path.write_bytes(b"x" * 700)
    with pytest.raises(SessionStoreError, match=r"the store is damaged: .*--keep-going"):
        call("backup", "-d", tmp_path / "store", tmp_path / "backup")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    told = call("backup", "-d", tmp_path / "store", tmp_path / "backup", "--keep-going")
    holder = "payload" if what == "missing" else ".quark"
    assert f"missing in the store and the backup: {holder}" in told
    assert "missing in the store and the backup" in call("backup", "--verify", tmp_path / "backup")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_run_that_is_removed_meanwhile_is_in_it_whole_or_not_at_all(
    tmp_path, monkeypatch, moment
):
    store = tmp_path / "store"
    run_id, artifact = make_store(store)
    trash = RunTrash(find_store(store))
    real = BackupFolder.copy_database

    def copy_database(self, db_path, path):
        if moment == "after":
            real(self, db_path, path)
        trash.trash_runs([run_id])
        assert [usage.run_id for usage in trash.collect_trash().runs] == [run_id]
        if moment == "before":
            real(self, db_path, path)

    monkeypatch.setattr(BackupFolder, "copy_database", copy_database)
    manifest = back_up_store(store, tmp_path / "backup")
    assert manifest.counts["runs"] == (moment == "after")
    if moment == "after":
        opened = quark.open_run(run_id, tmp_path / "backup")
        assert quark.ArtifactStore(opened).load(artifact.id) == b"payload" * 100


@pytest.mark.long
def test_a_run_that_came_and_was_removed_meanwhile_is_no_loss(tmp_path, monkeypatch):
    store = tmp_path / "store"
    make_store(store)
    trash = RunTrash(find_store(store))
    real = BackupFolder.copy_database

    def copy_database(self, db_path, path):
        run_id, _ = make_store(store, payload=b"another")
        real(self, db_path, path)
        trash.trash_runs([run_id])
        trash.collect_trash()

    monkeypatch.setattr(BackupFolder, "copy_database", copy_database)
    assert back_up_store(store, tmp_path / "backup").lacking == []


@pytest.mark.long
def test_what_is_in_the_trash_comes_back_too(tmp_path):
    store = tmp_path / "store"
    run_id, artifact = make_store(store)
    RunTrash(find_store(store)).trash_runs([run_id])
    back_up_store(store, tmp_path / "backup")
    lose_and_restore(store, tmp_path / "backup")
    call("restore", "-d", store, run_id)
    opened = quark.open_run(run_id, store)
    assert quark.ArtifactStore(opened).load(artifact.id) == b"payload" * 100


def test_journals_that_lie_elsewhere_are_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_JOURNAL_DIR", str(tmp_path / "journals"))
    with quark.start_run(project="p", storage_dir=tmp_path / "store") as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
        session.flush("stored")
        manifest = back_up_store(tmp_path / "store", tmp_path / "backup")
        (journal,) = (tmp_path / "backup").glob(".quark/runs/*/journal/*/journal.json")
    assert manifest.counts["journals"] == 1
    assert journal.parent.name


@pytest.mark.long
def test_a_store_of_journals_is_copied_too(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    run_id, artifact = make_store(tmp_path / "store")
    assert back_up_store(tmp_path / "store", tmp_path / "backup").counts["runs"] == 1
    shutil.rmtree(tmp_path / "store")
    shutil.copytree(tmp_path / "backup" / ".quark", tmp_path / "store" / ".quark", symlinks=True)
    assert read_steps(tmp_path / "store", run_id) == list(range(100))
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "0")
    call("sync", tmp_path / "store")
    assert read_steps(tmp_path / "store", run_id) == list(range(100))
    opened = quark.open_run(run_id, tmp_path / "store")
    assert quark.ArtifactStore(opened).load(artifact.id) == b"payload" * 100


def test_a_store_of_an_older_version_is_copied_as_it_is(tmp_path):
    shutil.copytree(
        Path(__file__).parents[1] / "assets" / "stores" / "5" / "store", tmp_path / ".quark"
    )
    before = (tmp_path / ".quark" / "quark.db").read_bytes()
    # Only its database is kept here.
    assert back_up_store(tmp_path, tmp_path / "backup", keep_going=True).counts["runs"] > 0
    assert (tmp_path / ".quark" / "quark.db").read_bytes() == before
    assert quark.search_runs(storage_dir=tmp_path / "backup")


def test_a_link_that_leads_out_is_not_followed_and_is_told(tmp_path):
    store = tmp_path / "store"
    run_id, _ = make_store(store)
    (tmp_path / "secret").write_text("secret")
    run_path = store / ".quark" / "runs" / run_id
    (run_path / "out").symlink_to(tmp_path / "secret")
    (run_path / "up").symlink_to("../../../../secret")
    with pytest.raises(SessionStoreError, match="leads out of its folder"):
        back_up_store(store, tmp_path / "backup")
    manifest = back_up_store(store, tmp_path / "backup", keep_going=True)
    assert len(manifest.lacking) == 2
    assert not any(
        "secret" in path.read_text("utf-8", "ignore") for path in (tmp_path / "backup").rglob("out")
    )
