"""Media as W&B shows them, out of the payloads of artifacts. For its process only."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from quark_core.api import ArtifactRecord, PayloadFolder

_IMAGES = frozenset({".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp"})
_SUFFIXES: Mapping[str, frozenset[str]] = {
    "image": _IMAGES,
    "figure": frozenset({".png"}),
    "table": frozenset({".json"}),
    "audio": frozenset({".wav", ".mp3", ".flac", ".ogg", ".m4a"}),
    "video": frozenset({".mp4", ".gif", ".webm", ".ogg"}),
    "html": frozenset({".html", ".htm", ".txt"}),
    "point_cloud": frozenset({".ply"}),
    "histogram": frozenset({".json"}),
    "confusion_matrix": frozenset({".json"}),
    "pr_curve": frozenset({".json"}),
    "roc_curve": frozenset({".json"}),
}
# W&B takes no more of one table among its rows; the artifact has it whole.
_MAX_TABLE_ROWS = 10_000
_MAX_BYTES = 25_000_000
_MAX_RECORDING_BYTES = 250_000_000
_MAX_POINTS = 300_000
_CATEGORIES = range(1, 15)
_SAID = ("caption", "boxes", "masks", "class_labels")


class Media(msgspec.Struct, frozen=True, tag="media"):
    """An artifact on its way to W&B's own kind of it.

    Attributes:
        kind: Type of the artifact.
        sha256: Its payload.
        suffix: Of the payload's file.
        said: What its metadata say that W&B shows too.
    """

    kind: str
    sha256: str
    suffix: str
    said: dict[str, Any] = {}


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """Rows on their way to a table of W&B's."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


def describe_media(record: ArtifactRecord) -> Media | None:
    """What W&B can show of an artifact among its charts; None where it is a file and no more."""
    path = record.payload_relative_path
    kind = record.artifact_type
    if path is None or kind not in _SUFFIXES:
        return None
    limit = _MAX_RECORDING_BYTES if kind in ("audio", "video") else _MAX_BYTES
    suffix = PurePosixPath(path).suffix.lower()
    if record.size_bytes > limit or suffix not in _SUFFIXES[kind]:
        return None
    metadata: Mapping[str, Any] = record.metadata or {}
    said = {name: metadata[name] for name in _SAID if metadata.get(name) is not None}
    plain: dict[str, Any] = json.loads(json.dumps(said, default=dict))
    return Media(kind, record.sha256, suffix, plain)


@contextmanager
def showing(
    wandb: Any, payloads: PayloadFolder, values: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """A row's values with W&B's own objects for media, until the row is logged.

    What W&B does not take is left out: the artifact beside the row has it.

    Args:
        wandb: The imported library.
        payloads: Where the payloads lie.
        values: Key -> value, `Media` or `Rows`.
    """
    if not any(isinstance(value, (Media, Rows)) for value in values.values()):
        yield dict(values)
        return
    shown: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="media-", dir=payloads.root) as folder:
        files = _Files(payloads, Path(folder))
        for key, value in values.items():
            # W&B may raise anything over a broken image, and needs Pillow for a good one.
            with contextlib.suppress(Exception):
                if isinstance(value, Rows):
                    shown[key] = _make_table(wandb, value.columns, value.rows)
                elif isinstance(value, Media):
                    shown[key] = _MAKERS[value.kind](wandb, value, files, key)
                else:
                    shown[key] = value
        yield shown


class _Files:
    """Payloads under names that tell their kind: they are named by their content."""

    def __init__(self, payloads: PayloadFolder, folder: Path) -> None:
        self._payloads = payloads
        self._folder = folder

    def name(self, sha256: str, suffix: str) -> str:
        path = self._payloads.find(sha256)
        if path is None:
            raise FileNotFoundError(sha256)
        named = self._folder / f"{sha256}{suffix}"
        if not named.exists():
            try:
                os.link(path, named)
            except OSError:
                shutil.copyfile(path, named)
        return str(named)

    def read(self, media: Media) -> Any:
        return json.loads(Path(self.name(media.sha256, media.suffix)).read_bytes())


def _make_image(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    del key
    said = media.said
    labels = {int(number): str(name) for number, name in said.get("class_labels", {}).items()}
    boxes = {name: _describe_boxes(found, labels) for name, found in said.get("boxes", {}).items()}
    masks = {}
    for item in said.get("masks", ()):
        # Of more than 256 classes W&B knows no mask; the artifact has it.
        if item.get("encoding", "L") == "L":
            mask = {"path": files.name(item["sha256"], ".png")}
            masks[item["mask"]] = {**mask, **({"class_labels": labels} if labels else {})}
    path = files.name(media.sha256, media.suffix)
    caption = said.get("caption")
    caption = None if caption is None else str(caption)
    try:
        return wandb.Image(path, caption=caption, boxes=boxes or None, masks=masks or None)
    except Exception:
        if not boxes and not masks:
            raise
        return wandb.Image(path, caption=caption)


def _describe_boxes(found: list[dict[str, Any]], labels: Mapping[int, str]) -> dict[str, Any]:
    """Boxes as W&B has them: of a class by its number."""
    names = dict(labels)
    numbers = {name: number for number, name in names.items()}
    data = []
    for item in found:
        left, top, right, bottom = item["box"]
        label = item.get("label", 0)
        if isinstance(label, str):
            number = numbers.setdefault(label, max(names, default=-1) + 1)
        else:
            number = int(label)
        names.setdefault(number, str(label))
        box = {
            "position": {"minX": left, "minY": top, "maxX": right, "maxY": bottom},
            "domain": "pixel",
            "class_id": number,
            "box_caption": names[number],
        }
        if item.get("score") is not None:
            box["scores"] = {"score": float(item["score"])}
        data.append(box)
    return {"box_data": data, "class_labels": names}


def _make_audio(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    del key
    return wandb.Audio(files.name(media.sha256, media.suffix), caption=media.said.get("caption"))


def _make_video(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    del key
    path = files.name(media.sha256, media.suffix)
    return wandb.Video(path, caption=media.said.get("caption"), format=media.suffix[1:])


def _make_html(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    del key
    # As a file: wandb takes a short text for a path.
    return wandb.Html(files.name(media.sha256, ".html"), inject=False)


def _make_points(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    del key
    import numpy as np

    data = Path(files.name(media.sha256, media.suffix)).read_bytes()
    head, _, body = data.partition(b"end_header\n")
    found = re.findall(rb"property (float|uchar) (\w+)", head)
    types = [(name.decode(), "<f4" if kind == b"float" else "u1") for kind, name in found]
    table = np.frombuffer(body, dtype=types)[:_MAX_POINTS]
    names = ["x", "y", "z"]
    known = {name.decode() for _, name in found}
    if "red" in known:
        names += ["red", "green", "blue"]
    elif "value" in known and np.isin(table["value"], list(_CATEGORIES)).all():
        names.append("value")
    return wandb.Object3D(np.stack([table[name].astype(float) for name in names], axis=1))


def _make_stored_table(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    del key
    table = files.read(media)
    if len(table["rows"]) > _MAX_TABLE_ROWS:
        raise ValueError(f"{len(table['rows'])} rows are too many for W&B")
    rows = [
        [
            wandb.Image(files.name(cell["image"], ".png"))
            if isinstance(cell, dict) and isinstance(cell.get("image"), str)
            else cell
            for cell in row
        ]
        for row in table["rows"]
    ]
    return _make_table(wandb, table["columns"], rows)


def _make_table(wandb: Any, columns: Any, rows: Any) -> Any:
    return wandb.Table(columns=list(columns), data=[list(r) for r in rows], allow_mixed_types=True)


def _make_histogram(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    del key
    from quark_backends.wandb.rows import shrink
    from quark_backends.wandb.step_rows import Histogram

    found = files.read(media)
    fitting = shrink(Histogram(tuple(found["counts"]), tuple(found["bins"])))
    return wandb.Histogram(np_histogram=(list(fitting.counts), list(fitting.edges)))


def _make_matrix(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    found = files.read(media)
    labels = found["labels"]
    columns = ["Actual", "Predicted", "nPredictions"]
    rows = [
        [str(labels[i]), str(labels[j]), count]
        for i, row in enumerate(found["matrix"])
        for j, count in enumerate(row)
    ]
    # As `wandb.plot.confusion_matrix` draws it, which wants the predictions themselves.
    return wandb.plot_table(
        data_table=wandb.Table(columns=columns, data=rows),
        vega_spec_name="wandb/confusion_matrix/v1",
        fields={column: column for column in columns},
        string_fields={"title": key},
    )


def _make_curve(wandb: Any, media: Media, files: _Files, key: str) -> Any:
    found = files.read(media)
    x, y = str(found["x"]), str(found["y"])
    rows = [
        [str(curve.get("label", "")), at, value]
        for curve in found["curves"]
        for at, value in zip(curve["x"], curve["y"], strict=True)
    ]
    # As `wandb.plot.pr_curve` and `roc_curve` draw them.
    return wandb.plot_table(
        data_table=wandb.Table(columns=["class", x, y], data=rows[:_MAX_TABLE_ROWS]),
        vega_spec_name="wandb/area-under-curve/v0",
        fields={"x": x, "y": y, "class": "class"},
        string_fields={"title": key, "x-axis-title": x, "y-axis-title": y},
    )


_MAKERS: Mapping[str, Callable[[Any, Media, _Files, str], Any]] = {
    "image": _make_image,
    "figure": _make_image,
    "table": _make_stored_table,
    "audio": _make_audio,
    "video": _make_video,
    "html": _make_html,
    "point_cloud": _make_points,
    "histogram": _make_histogram,
    "confusion_matrix": _make_matrix,
    "pr_curve": _make_curve,
    "roc_curve": _make_curve,
}
