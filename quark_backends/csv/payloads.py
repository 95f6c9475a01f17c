"""The payloads of artifacts as files of the mirror, each also under its name for people."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import msgspec

from quark_backends.csv.files import write_atomically
from quark_core.artifacts.contract import Payload
from quark_core.artifacts.layout import ARTIFACT_STORAGE_LAYOUT, object_path
from quark_core.artifacts.payload_folder import PayloadFolder
from quark_core.errors import BackendRejected
from quark_core.records import ArtifactRecord

__all__ = ["keep_payload", "name_payloads"]

_ROOT = ARTIFACT_STORAGE_LAYOUT["root"]


def keep_payload(folder: Path, payload: Payload) -> None:
    """Put a payload into the mirror's folder of a run.

    One that nobody may write to, as Quark's own are, is linked where the file
    system can, so that it takes no space of its own.

    Raises:
        OSError: It cannot be kept now.
        BackendRejected: It is not what its hash says.
    """
    path = folder / object_path(payload.sha256)
    if path.is_file() and path.stat().st_size == payload.size_bytes:
        return
    if not stat.S_IMODE(payload.path.stat().st_mode) & 0o222:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError, NotImplementedError):
            os.link(payload.path, path)
            return
    with payload.path.open("rb") as source:
        put = PayloadFolder(folder).put_file(source, payload.size_bytes)
    if put.failure is not None:
        raise OSError(f"payload {payload.sha256} cannot be kept: {put.failure}")
    if put.sha256 != payload.sha256:
        raise BackendRejected(
            f"payload {payload.sha256} is damaged: its content has the hash {put.sha256}",
            backend="csv",
        )


def name_payloads(folder: Path, records: Sequence[ArtifactRecord]) -> None:
    """Give payloads the names that their records have in the run's own directory.

    Raises:
        OSError: The disk takes no more.
    """
    for record in records:
        target = folder / object_path(record.sha256)
        path = _resolve(folder, record.payload_relative_path)
        if path is not None and path != target and target.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_symlink():
                # Without links the payload lies under its hash alone, as in the run's directory.
                with contextlib.suppress(FileExistsError, NotImplementedError, PermissionError):
                    os.symlink(os.path.relpath(target, path.parent), path)
        path = _resolve(folder, record.metadata_relative_path)
        if path is not None and not path.exists():
            text = msgspec.json.format(msgspec.json.encode(record.to_dict()), indent=2)
            write_atomically(path, text)


def _resolve(folder: Path, relative: str | None) -> Path | None:
    """A path of a record's, unless it leads out of the artifacts."""
    if relative is None:
        return None
    parts = PurePosixPath(relative).parts
    if parts[:1] != (_ROOT,) or ".." in parts or "\0" in relative:
        return None
    return folder.joinpath(*parts)
