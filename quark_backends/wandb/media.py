"""Images and tables as W&B shows them, out of the payloads of artifacts. For its process only."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from quark_core.artifacts.payload_folder import PayloadFolder
from quark_core.records import ArtifactRecord

__all__ = ["Media", "describe_media", "showing"]

_IMAGES = frozenset({".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp"})
# W&B takes no more of one table among its rows; the artifact has it whole.
_MAX_TABLE_ROWS = 10_000
_MAX_BYTES = 25_000_000


class Media(msgspec.Struct, frozen=True, tag="media"):
    """An image or a table on its way to W&B.

    Attributes:
        kind: image or table.
        sha256: Its payload.
        suffix: Of the payload's file.
        caption: A text beside an image, or None.
    """

    kind: str
    sha256: str
    suffix: str
    caption: str | None = None


def describe_media(record: ArtifactRecord) -> Media | None:
    """What W&B can show of an artifact among its charts; None where it is a file and no more."""
    path = record.payload_relative_path
    if path is None or record.size_bytes > _MAX_BYTES:
        return None
    suffix = PurePosixPath(path).suffix.lower()
    metadata: Mapping[str, Any] = record.metadata or {}
    if record.artifact_type == "image" and suffix in _IMAGES:
        caption = metadata.get("caption")
        return Media("image", record.sha256, suffix, None if caption is None else str(caption))
    if record.artifact_type == "table" and suffix == ".json":
        return Media("table", record.sha256, suffix)
    return None


@contextmanager
def showing(
    wandb: Any, payloads: PayloadFolder, values: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """A row's values with W&B's own objects for media, until the row is logged.

    What W&B does not take is left out: the artifact beside the row has it.

    Args:
        wandb: The imported library.
        payloads: Where the payloads lie.
        values: Key -> value or `Media`.
    """
    if not any(isinstance(value, Media) for value in values.values()):
        yield dict(values)
        return
    shown: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="media-", dir=payloads.root) as folder:
        for key, value in values.items():
            if not isinstance(value, Media):
                shown[key] = value
                continue
            path = payloads.find(value.sha256)
            # W&B may raise anything over a broken image, and needs Pillow for a good one.
            with contextlib.suppress(Exception):
                if path is not None:
                    shown[key] = _make(wandb, value, path, Path(folder))
        yield shown


def _make(wandb: Any, media: Media, path: Path, folder: Path) -> Any:
    if media.kind == "image":
        # W&B tells the kind of an image by its name, and payloads are named by their content.
        named = folder / f"{media.sha256}{media.suffix}"
        try:
            os.link(path, named)
        except OSError:
            shutil.copyfile(path, named)
        return wandb.Image(str(named), caption=media.caption)
    table = json.loads(path.read_bytes())
    rows = table["rows"]
    if len(rows) > _MAX_TABLE_ROWS:
        raise ValueError(f"{len(rows)} rows are too many for W&B")
    return wandb.Table(columns=table["columns"], data=rows, allow_mixed_types=True)
