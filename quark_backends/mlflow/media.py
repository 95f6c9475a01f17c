"""What users log as media, as MLflow's own calls would have put it among a run's artifacts.

    image             `images/…`, by which MLflow shows it at its step (`log_image`)
    table             `KEY.json` in the form of `log_table`; images in cells are `table_images/…`
    directory         the folder `KEY/`; one with an MLmodel file is a model of MLflow's
    a file that names a flavour   the folder `KEY/` with the file and an MLmodel
    anything else     a file, `KEY.ext`, of one with a step `KEY/step-00000010.ext`

A table or a file that comes again under its name and step takes the place of the former.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from quark_backends.mirroring.sample_rows import tabulate_samples
from quark_backends.mlflow.flavours import find_flavour, make_model_files
from quark_backends.mlflow.names import encode_name
from quark_core.api import ArtifactRecord, Batch, SampleRecord, decode_name

_log = logging.getLogger("quark")
_THUMBNAIL_SIZE = 256
_MAX_DECODED_BYTES = 64 * 1024 * 1024
_MAX_TAG = 5000
_EXTENSIONS = {"json": ".json", "text": ".txt", "bytes": ""}


@dataclass(frozen=True, slots=True)
class NativeFile:
    """A file among a run's artifacts: its path there, and its content or where that lies."""

    name: str
    content: bytes | Path


@dataclass(slots=True)
class Shown:
    """What MLflow is told in tags, by which its page finds what was put there.

    Attributes:
        has_images: Whether there are images.
        tables: Paths of tables.
        models: Folder of each model -> its MLmodel, as text.
    """

    has_images: bool = False
    tables: list[str] = field(default_factory=list)
    models: dict[str, str] = field(default_factory=dict)


def list_native(
    record: ArtifactRecord, source: Path | None, shown: Shown, *, only_own_forms: bool = False
) -> Iterator[NativeFile]:
    """The files that an artifact is in MLflow.

    Args:
        record: It.
        source: Its payload; None where that is not here.
        shown: Takes what MLflow is to be told.
        only_own_forms: Leave out what would be a mere file.
    """
    if source is None:
        return
    key = encode_name(decode_name(record.artifact_key))
    if key == "quark" or key.startswith("quark/"):
        key = f"artifacts/{key}"  # that folder is the mirror's own
    make = _FORMS.get(record.artifact_type)
    flavour = find_flavour(record)
    try:
        if flavour is not None:
            yield from _list_model(record, key, flavour, source, shown)
            return
        if make is not None:
            yield from make(record, key, source, shown)
            return
    except Exception as error:  # noqa: BLE001 - a broken image raises anything
        _log.debug("backend mlflow: %s stays a file: %s", record.artifact_key, error)
    if not only_own_forms:
        yield NativeFile(_name_file(record, key), source)


def list_sample_tables(
    batch: Batch, records: Sequence[SampleRecord], shown: Shown
) -> Iterator[NativeFile]:
    """The rows of a batch of text samples as tables, one for each set, step and rank."""
    found: dict[tuple[str, int | None, int | None, int], list[SampleRecord]] = {}
    for record in records:
        place = record.set_name, record.step, record.epoch, record.rank
        found.setdefault(place, []).append(record)
    for (name, step, epoch, rank), rows in found.items():
        columns, data = tabulate_samples(rows)
        key = encode_name(decode_name(name))
        key = f"artifacts/{key}" if key.startswith("quark/") else key
        at = f"step-{step:08d}" if step is not None else f"epoch-{epoch or 0:06d}"
        # Rows of one step may come in several batches.
        unique = f"{batch.writer_id[:8]}-{batch.number}"
        path = f"{f'rank{rank}/' if rank else ''}{key}/{at}-{encode_name(unique)}.json"
        text = json.dumps({"columns": columns, "data": data}, ensure_ascii=False)
        shown.tables.append(path)
        yield NativeFile(path, text.encode("utf-8", "replace"))


def extend_tables(known: str, names: Sequence[str]) -> str | None:
    """The tag by which MLflow finds tables, with further ones; None where it has no more room.

    Args:
        known: The tag as it is, or "".
        names: Paths of the further ones.
    """
    try:
        told = json.loads(known) if known else []
    except ValueError:
        told = []
    told = told if isinstance(told, list) else []
    told += [one for name in names if (one := {"path": name, "type": "table"}) not in told]
    text = json.dumps(told)
    return text if len(text) <= _MAX_TAG else None


def _list_image(
    record: ArtifactRecord, key: str, source: Path, shown: Shown
) -> Iterator[NativeFile]:
    # As `MlflowClient.log_image` names them; the last part tells images of one step apart.
    at = f"{record.step or 0}+timestamp+{record.time_us // 1000}"
    unique = f"{record.sha256[:16]}-{record.attempt}-{record.rank}-{record.sequence}"
    stem = f"images/{key.replace('/', '~')}+step+{at}+{unique}"
    full, small = _encode_image(source)
    yield NativeFile(f"{stem}.png", full)
    yield NativeFile(f"{stem}+compressed.webp", small)
    shown.has_images = True


def _list_table(
    record: ArtifactRecord, key: str, source: Path, shown: Shown
) -> Iterator[NativeFile]:
    table = json.loads(source.read_bytes())
    rows = [[_point_to(cell, key) for cell in row] for row in table["rows"]]
    name = _name_file(record, key, ".json")
    data = json.dumps({"columns": table["columns"], "data": rows}, ensure_ascii=False)
    yield NativeFile(name, data.encode("utf-8", "replace"))
    shown.tables.append(name)


def _list_table_image(
    record: ArtifactRecord, key: str, source: Path, shown: Shown
) -> Iterator[NativeFile]:
    del shown
    full, small = _encode_image(source)
    stem = _name_table_image(key, record.sha256)
    yield NativeFile(f"{stem}.png", full)
    yield NativeFile(f"{stem}.webp", small)


def _list_directory(
    record: ArtifactRecord, key: str, source: Path, shown: Shown
) -> Iterator[NativeFile]:
    """Nothing by itself: its files make it."""
    del record, key, source, shown
    yield from ()


def _list_directory_file(
    record: ArtifactRecord, key: str, source: Path, shown: Shown
) -> Iterator[NativeFile]:
    del record
    folder, _, name = key.rpartition("/")
    if name == "MLmodel":
        shown.models[folder] = source.read_text("utf-8")
    yield NativeFile(key, source)


def _list_model(
    record: ArtifactRecord, key: str, flavour: str, source: Path, shown: Shown
) -> Iterator[NativeFile]:
    folder = str(PurePosixPath(key).with_suffix("")) if PurePosixPath(key).suffix else key
    if record.step is not None:
        folder = f"{folder}/step-{record.step:08d}"
    described, file_name, others = make_model_files(record, flavour)
    yield NativeFile(f"{folder}/{file_name}", source)
    for name, text in {**others, "MLmodel": described}.items():
        yield NativeFile(f"{folder}/{name}", text.encode())
    shown.models[folder] = described


_FORMS: Mapping[str, Callable[[ArtifactRecord, str, Path, Shown], Iterator[NativeFile]]] = {
    "image": _list_image,
    "table": _list_table,
    "table_image": _list_table_image,
    "directory": _list_directory,
    "directory_file": _list_directory_file,
}


def _name_file(record: ArtifactRecord, key: str, extension: str | None = None) -> str:
    """Where a file lies that MLflow has no form of its own for."""
    if extension is None:
        given = PurePosixPath(record.payload_relative_path or "").suffix
        extension = given or _EXTENSIONS.get(record.payload_format, "")
    stem = key.removesuffix(extension) if extension else key
    if record.artifact_type == "image_mask":
        return f"{stem}/masks/{record.sha256[:12]}.png"
    place = stem
    if record.step is not None:
        place = f"{stem}/step-{record.step:08d}"
    elif record.epoch is not None:
        place = f"{stem}/epoch-{record.epoch:06d}"
    return f"{place}{extension}"


def _name_table_image(key: str, sha256: str) -> str:
    return f"table_images/{key}/{sha256[:16]}"


def _point_to(cell: Any, key: str) -> Any:
    """A cell as `log_table` writes it: an image is a path."""
    if isinstance(cell, Mapping) and isinstance(cell.get("image"), str) and len(cell) <= 3:
        stem = _name_table_image(key, cell["image"])
        return {
            "type": "image",
            "filepath": f"{stem}.png",
            "compressed_filepath": f"{stem}.webp",
        }
    return cell


def _encode_image(source: Path) -> tuple[bytes | Path, bytes]:
    """An image as PNG, as it is where it is one, and a small WebP of it.

    Raises:
        Exception: It is none, or Pillow is not installed.
    """
    pil: Any = importlib.import_module("PIL.Image")
    with pil.open(source) as image:
        if image.width * image.height * 4 > _MAX_DECODED_BYTES:
            raise ValueError("too large for a preview")
        image.load()
        full: bytes | Path = source
        if image.format != "PNG":
            file = io.BytesIO()
            image.convert("RGBA" if "A" in image.mode else "RGB").save(file, format="PNG")
            full = file.getvalue()
        small = image.convert("RGBA" if "A" in image.mode else "RGB")
        ratio = _THUMBNAIL_SIZE / max(small.width, small.height)
        size = (max(1, int(small.width * ratio)), max(1, int(small.height * ratio)))
        file = io.BytesIO()
        small.resize(size).save(file, format="WEBP")
        return full, file.getvalue()
