"""The names under which people find a run's artifacts: a link to the payload, and its metadata."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from quark_core.artifacts.layout import ARTIFACT_STORAGE_LAYOUT, choose_stem, object_path

__all__ = ["write_record_files"]

_TRIES = 8


def write_record_files(
    root: Path,
    *,
    sha256: str,
    artifact_type: str,
    artifact_key: str,
    step: int | None,
    epoch: int | None,
    extension: str,
    description: Mapping[str, Any],
) -> tuple[str, str | None]:
    """Give a payload that is in place its name for people, and put its metadata beside it.

    Args:
        root: The run's directory.
        sha256: The payload's hash.
        artifact_type, artifact_key, step, epoch: Of the artifact.
        extension: What the name ends in, without a dot.
        description: The metadata, as JSON values.

    Returns:
        Relative paths of the payload and of the metadata. Where the file
        system takes no links, the payload's is that of the object itself;
        where the metadata cannot be written, its is None.
    """
    target = object_path(sha256)
    for _ in range(_TRIES):
        names = {
            "artifact_type": artifact_type,
            "artifact_key": artifact_key,
            "stem": choose_stem(step, epoch, os.urandom(4).hex()),
            "extension": extension,
        }
        payload = ARTIFACT_STORAGE_LAYOUT["payload"].format(**names)
        metadata = ARTIFACT_STORAGE_LAYOUT["metadata"].format(**names)
        path = root / payload
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Relative, so that a run's directory can be moved and copied.
            os.symlink(os.path.relpath(root / target, path.parent), path)
        except FileExistsError:
            continue
        except (OSError, NotImplementedError):
            payload = target
        return payload, _write_metadata(root, metadata, description)
    return target, None


def _write_metadata(root: Path, relative: str, description: Mapping[str, Any]) -> str | None:
    folder = root / ARTIFACT_STORAGE_LAYOUT["partial"]
    scratch = folder / f"{os.getpid()}-{os.urandom(8).hex()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(description), indent=2))
        os.replace(scratch, root / relative)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        return None
    return relative
