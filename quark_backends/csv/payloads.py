"""The payloads of artifacts, which lie under their hashes, under their names for people too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import msgspec

from quark_backends.csv.files import write_atomically
from quark_core.artifacts.layout import ARTIFACT_STORAGE_LAYOUT, object_path
from quark_core.records import ArtifactRecord

__all__ = ["name_payloads"]

_ROOT = ARTIFACT_STORAGE_LAYOUT["root"]


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
