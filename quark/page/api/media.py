"""What an artifact is shown as, what lies over a picture, and where a version comes from and goes.

Metadata is whoever's logged it, or wrote the store: of it only what has the right form is sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quark_core.errors import ArtifactNotFoundError
from quark_core.records import ArtifactRecord
from quark_core.records.names import is_sha256
from quark_core.runs.artifact_versions import ArtifactVersion, list_lineage

if TYPE_CHECKING:
    from quark.page.api.source import PageSource

AUDIO = ("audio/wav", "audio/mpeg", "audio/ogg", "audio/flac", "audio/mp4", "audio/aac")
"""What browsers play as sound."""

VIDEO = ("video/mp4", "video/webm")
"""What browsers play as a video."""

_BY_TYPE = {
    "point_cloud": "points",
    "html": "html",
    "markdown": "markdown",
    "confusion_matrix": "matrix",
    "pr_curve": "curves",
    "roc_curve": "curves",
    "histogram": "histogram",
    "directory": "directory",
    "reference": "reference",
}
_PLAIN_FACTS = ("caption", "width", "height", "duration_s", "sample_rate_hz", "channels", "fps",
    "frames", "points", "files", "total_bytes", "skipped", "accuracy", "samples", "classes",
    "clipped", "non_finite", "boxes_left_out", "changed_while_read")  # fmt: skip
_MOST_BOXES, _MOST_GROUPS, _MOST_LABELS = 1_000, 20, 1_000
_MOST_CHARACTERS = 2_000
_LABEL_CHARACTERS = 200
_MOST_VERSIONS = 500
_SIDES = 4
_FARTHEST = 1e300
_ENCODINGS = ("L", "RGB")
_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})")
# What asks the network for something of its own, whatever a policy says of what it loads, or
# changes how the rest is read.
_LOADING = re.compile(rb"<(/?)(link|meta|base|iframe|frame|object|embed|portal)\b", re.I)


def choose_view(record: ArtifactRecord, media_type: str | None) -> str | None:
    """What an artifact is shown as beside images, tables and texts; None for nothing of these."""
    if media_type in AUDIO:
        return "audio"
    if media_type in VIDEO:
        return "video"
    return _BY_TYPE.get(record.artifact_type)


def describe_facts(record: ArtifactRecord) -> dict[str, Any]:
    """The figures and the caption that were noted of an artifact."""
    noted: Mapping[str, Any] = record.metadata or {}
    facts: dict[str, Any] = {}
    for name in _PLAIN_FACTS:
        value = noted.get(name)
        if isinstance(value, str):
            facts[name] = value[:_MOST_CHARACTERS]
        elif isinstance(value, bool) or _is_number(value):
            facts[name] = value
    return facts


def describe_over(record: ArtifactRecord) -> dict[str, Any]:
    """Boxes and masks over a picture, and the names of their classes."""
    noted: Mapping[str, Any] = record.metadata or {}
    boxes, masks, labels = (noted.get(name) for name in ("boxes", "masks", "class_labels"))
    groups = {
        str(name)[:_LABEL_CHARACTERS]: [
            box for box in map(_read_box, group[:_MOST_BOXES]) if box is not None
        ]
        for name, group in list(_as_mapping(boxes).items())[:_MOST_GROUPS]
        if isinstance(group, (list, tuple))
    }
    listed = masks[:_MOST_GROUPS] if isinstance(masks, (list, tuple)) else ()
    return {
        "boxes": groups,
        "masks": [mask for mask in map(_read_mask, listed) if mask is not None],
        "labels": {
            str(number): str(name)[:_LABEL_CHARACTERS]
            for number, name in list(_as_mapping(labels).items())[:_MOST_LABELS]
        },
    }


def tell_lineage(source: PageSource, run_id: str) -> dict[str, Any]:
    """The versions that a run has made and used, with their aliases and users.

    Raises:
        RunNotFoundError: There is no such run.
        SessionStoreError: The store cannot be read.
    """
    found = list_lineage(source.reader, run_id)
    made = found.made[-_MOST_VERSIONS:]
    return {
        "made": [_describe_version(version) for version in made],
        "made_count": len(found.made),
        "used": [_describe_version(version) for version in found.used[:_MOST_VERSIONS]],
        "gone": list(found.gone[:_MOST_VERSIONS]),
    }


def defuse_html(data: bytes) -> bytes:
    """HTML in which no element is left that loads something, or leads elsewhere, by itself.

    The policy that it is sent with keeps scripts from running and anything from being loaded;
    this takes away what asks for a connection or another page all the same.
    """
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        data = data.decode("utf-16", "replace").encode()
    return _LOADING.sub(rb"<\1x-\2", data)


def _describe_version(version: ArtifactVersion) -> dict[str, Any]:
    record = version.record
    return {
        "name": version.name,
        "aliases": list(version.aliases),
        "type": record.artifact_type,
        "size_bytes": record.size_bytes,
        "step": record.step,
        "at": record.timestamp,
        "sha256": record.sha256,
        "run_id": record.run_id,
        "run_name": version.run_name,
        "used_by": list(version.used_by),
    }


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _read_box(found: Any) -> dict[str, Any] | None:
    sides = _as_mapping(found).get("box")
    if not isinstance(sides, (list, tuple)) or len(sides) != _SIDES:
        return None
    if not all(_is_number(side) for side in sides):
        return None
    box: dict[str, Any] = {"box": list(sides)}
    label, score = found.get("label"), found.get("score")
    if isinstance(label, (int, str)):
        box["label"] = str(label)[:_LABEL_CHARACTERS]
    if _is_number(score):
        box["score"] = score
    return box


def _read_mask(found: Any) -> dict[str, Any] | None:
    mask = _as_mapping(found)
    sha256, encoding = mask.get("sha256"), mask.get("encoding")
    if not isinstance(sha256, str) or not is_sha256(sha256) or encoding not in _ENCODINGS:
        return None
    return {
        "name": str(mask.get("mask"))[:_LABEL_CHARACTERS],
        "sha256": sha256,
        "encoding": encoding,
    }


def _is_number(value: Any) -> bool:
    is_plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Whole numbers of any length too: a float they would not all be.
    return is_plain and -_FARTHEST <= value <= _FARTHEST


def read_range(text: str | None, size_bytes: int) -> tuple[int, int] | None:
    """The first byte that a `Range` header asks for, and the one after the last; None for all.

    Only one range of bytes is served; what cannot be read counts as none.

    Raises:
        ArtifactNotFoundError: It begins behind the end.
    """
    found = _RANGE.fullmatch(text.strip()) if text else None
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        first, end = max(0, size_bytes - int(found[2])), size_bytes
    else:
        first = int(found[1])
        end = min(size_bytes, int(found[2]) + 1) if found[2] else size_bytes
        if found[2] and int(found[2]) < first:
            return None
    if first >= size_bytes:
        raise ArtifactNotFoundError(f"the payload has {size_bytes} bytes")
    return first, end
