"""Run folders as somebody writes them who means harm."""

import hashlib
import os

import quark
from quark_core.delivery.journal import Journal
from quark_core.delivery.journal_folder import JournalFolder, LaneEntry, Manifest
from quark_core.delivery.segments import Origin
from quark_core.records import ArtifactRecord
from quark_core.records.names import split_name
from quark_core.system.process import ProcessIdentity
from quark_core.testing.fakes import FIRST_TIME_US, BatchMaker

GONE = ProcessIdentity("another host", 1, "1")
EMBEDDED = LaneEntry("embedded", "embedded", True)


def make_journal(
    root, *, run_id=None, writer_id="writer0", lanes=(EMBEDDED,), batches=None, **said
):
    """A journal below a storage root whose writer has ended; `said` is what its manifest claims."""
    if not (root / ".quark").exists():
        with quark.start_run(project="other", storage_dir=root, backends="embedded"):
            pass
    run_id = run_id or f"run-{os.urandom(4).hex()}"
    run_path = root / ".quark" / "runs" / run_id
    folder = JournalFolder(run_path / "journal" / writer_id)
    fields = {
        "run_id": run_id,
        "writer_id": writer_id,
        "attempt": 0,
        "rank": 0,
        "project": "shared",
        "storage_dir": str(root),
        "run_path": str(run_path),
        "lanes": tuple(lanes),
        "process": GONE,
        **said,
    }
    folder.write_manifest(Manifest(**fields))
    journal = Journal(folder.path, Origin(run_id, writer_id))
    if batches is None:
        maker = BatchMaker(run_id, writer_id=writer_id)
        batches = [
            maker.start(project="shared"),
            maker.metrics(("loss", 0, 0.5)),
            maker.lifecycle(("status", {"status": "completed"})),
        ]
    journal.append(batches)
    journal.close()
    folder.close()
    return folder


def make_artifact(maker, data=b"payload of an attacker", **fields):
    """A batch with one artifact, which says of itself whatever it is told to."""
    said = {
        "artifact_type": "file",
        "artifact_key": "notes",
        "payload_format": "bytes",
        "size_bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "payload_relative_path": "artifacts/file/notes/step-1.bin",
        **fields,
    }
    namespace, name = split_name(said["artifact_key"])
    record = ArtifactRecord(
        *(maker.run_id, maker.writer_id, 0, 0, 0, FIRST_TIME_US),
        namespace=namespace,
        artifact_name=name,
        **said,
    )
    return maker.batch([record])


def list_tree(folder):
    """Every path below a folder, with what it is and holds."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found
