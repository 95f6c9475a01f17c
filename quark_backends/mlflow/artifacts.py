"""Artifacts of the MLflow run: records, tables, media, models and payloads."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec

from quark_backends.mirror_records import tabulate_samples
from quark_backends.mirror_state import keep_payload, make_file_name, replace_file
from quark_backends.mlflow.outbox import SUFFIX, Outbox, SegmentFiles, read_segment, write_at
from quark_backends.mlflow.points import encode_name
from quark_backends.mlflow.run import MlflowWriter
from quark_core.api import (
    ARTIFACT_STORAGE_LAYOUT,
    KEPT_SOURCES,
    MANIFEST_KEY,
    PACK_KEY,
    ArtifactDamagedError,
    ArtifactNotFoundError,
    ArtifactRecord,
    BackendUnavailable,
    Batch,
    EventRecord,
    LifecycleRecord,
    MetricRecord,
    Payload,
    PayloadFolder,
    SampleRecord,
    decode_name,
    is_plain_file,
    is_sha256,
    object_path,
    split_path,
    unpack_sources,
)

if TYPE_CHECKING:
    from quark_core.api import Columns

# Models by the flavour that the user names: an MLmodel file beside what was saved.
#
# A directory that MLflow itself has saved is a model already. Of a file, two flavours are
# known, `pytorch` (a whole module, as `torch.save` writes it) and `sklearn` (a pickle).

FLAVOURS = ("pytorch", "sklearn")
_MAX_TOLD = 50


def find_flavour(record: ArtifactRecord) -> str | None:
    """The flavour that a file's metadata names, where a model can be made of it."""
    metadata: Mapping[str, Any] = record.metadata or {}
    named = metadata.get("flavor", metadata.get("flavour"))
    is_file = record.payload_format == "bytes" and record.artifact_type != "directory_file"
    return named if is_file and named in FLAVOURS else None


def make_model_files(record: ArtifactRecord, flavour: str) -> tuple[str, str, dict[str, str]]:
    """The MLmodel of a file, the file's own name in the model's folder, and further files."""
    created = datetime.fromtimestamp(record.time_us / 1e6, UTC)
    if flavour == "pytorch":
        own = {"code": None, "model_data": "data", "pytorch_version": _find_version("torch")}
        general = {
            "data": "data",
            "loader_module": "mlflow.pytorch",
            "pickle_module_name": "pickle",
        }
        name = "data/model.pth"
        others = {"data/pickle_module_info.txt": "pickle"}
    else:
        own = {
            "code": None,
            "pickled_model": "model.pkl",
            "serialization_format": "pickle",
            "sklearn_version": _find_version("scikit-learn"),
        }
        general = {
            "loader_module": "mlflow.sklearn",
            "model_path": "model.pkl",
            "predict_fn": "predict",
        }
        name, others = "model.pkl", {}
    described = {
        "flavors": {"python_function": general, flavour: own},
        "mlflow_version": _find_version("mlflow") or _find_version("mlflow-skinny"),
        "model_uuid": record.sha256[:32],
        "utc_time_created": created.strftime("%Y-%m-%d %H:%M:%S.%f"),
    }
    # JSON is YAML.
    return json.dumps(described, indent=2) + "\n", name, others


def describe_models(known: str, models: Mapping[str, str], mlflow_run_id: str) -> str:
    """The tag by which MLflow's page lists a run's models, with further ones.

    Args:
        known: The tag as it is, or "".
        models: Folder of each new model -> its MLmodel.
        mlflow_run_id: The MLflow run.
    """
    yaml: Any = importlib.import_module("yaml")  # MLflow itself needs it
    try:
        found = json.loads(known) if known else []
    except ValueError:
        found = []
    told = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    told = [each for each in told if each.get("artifact_path") not in models]
    for folder, text in models.items():
        try:
            said = yaml.safe_load(text)
        except yaml.YAMLError:
            continue
        said = said if isinstance(said, dict) else {}
        flavours = said.get("flavors")
        told.append(
            {
                "run_id": mlflow_run_id,
                "artifact_path": folder,
                "utc_time_created": str(said.get("utc_time_created", "")),
                "model_uuid": str(said.get("model_uuid", "")),
                "flavors": flavours if isinstance(flavours, dict) else {},
            }
        )
    return json.dumps(told[-_MAX_TOLD:], default=str)


def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# What users log as media, as MLflow's own calls would have put it among a run's artifacts.
#
# image             `images/…`, by which MLflow shows it at its step (`log_image`)
# table             `KEY.json` in the form of `log_table`; images in cells are `table_images/…`
# directory         the folder `KEY/`; one with an MLmodel file is a model of MLflow's
# a file that names a flavour   the folder `KEY/` with the file and an MLmodel
# anything else     a file, `KEY.ext`, of one with a step `KEY/step-00000010.ext`
#
# A table or a file that comes again under its name and step takes the place of the former.

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
        _log.debug("backend mlflow: %s stays a local file: %s", record.artifact_key, error)
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


# What of a run goes among its artifacts: records, events, tables, texts and payloads.
#
# quark/records/…         every record exactly, as `segments` says
# quark/events.jsonl      the events for people; those of further processes and attempts
# in events.<writer>.jsonl, those beyond 8 MB in events-0002.jsonl …
# quark/tables/…          layers, parameters and the like: <kind>/<writer>-0001.parquet, or
# .jsonl.gz without pyarrow, one `to_dict()` a line
# quark/name_map.json     keys and their names in MLflow
# quark/metrics_meta.json names and descriptions of metrics
# quark/config.json, environment.json, phases.json
# artifacts/<type>/<key>/ payloads and what is known of them, as in Quark's own store
#
# They go up at most every minute, and when the run ends; payloads at once. What is
# there is removed here when the mirror is closed.

RECORDS = "quark/records"
_METRICS_META = "quark/metrics_meta.json"
_EVENTS_LIMIT_BYTES = 8 * 1024 * 1024
_OBJECTS = ARTIFACT_STORAGE_LAYOUT["object"].format(sha256_head="*", sha256="*")
_FIRST_AFTER_S = 5.0
_EVERY_S = 60.0


class MirrorFiles:
    """The files of one run's mirror on this machine, and their way to MLflow.

    Args:
        folder: The mirror's own folder.
        upload: Puts a file into a folder of the run's artifacts.
        refuse: Told of an artifact that MLflow will never take, and why.
        list_remote: Names of the segments that the run has in MLflow.
        max_payload_bytes: Larger payloads are left out; None for no limit.
        keeps_all: Whether the run gets all that Quark knows, tables of its records too.
    """

    def __init__(
        self,
        folder: Path,
        upload: Callable[[Path, str], None],
        refuse: Callable[[str, str], None],
        list_remote: Callable[[], Sequence[str]],
        max_payload_bytes: int | None,
        keeps_all: Callable[[], bool],
    ) -> None:
        self._folder = folder
        self._keeps_all = keeps_all
        self._upload = upload
        self._refuse = refuse
        self._list_remote = list_remote
        self._max_payload_bytes = max_payload_bytes
        self._outbox = Outbox(folder)
        self._segments = SegmentFiles(self._outbox.path_of(RECORDS))
        # Every process that mirrors the run goes by it.
        self._held = folder / "held"
        self._is_needed = False
        self._first_indexes: dict[str, int] = {}
        self._due = time.monotonic() + _FIRST_AFTER_S
        self._reasons: set[str] = set()
        self._closed: set[str] = set()
        self._tabled: dict[str, int] = {}
        # Each opening has its own: what one has staged another must not take.
        own = f"{os.getpid()}-{time.monotonic_ns()}"
        self._staged = PayloadFolder(folder / "staged" / own)
        self._meta: dict[str, Any] | None = None
        # What this opening has written: others of the run may be at their files.
        self._own: set[str] = set()
        self._attempt = 0
        self._taken: set[Path] = set()
        self._sources: set[Path] = set()

    @property
    def is_due(self) -> bool:
        """Whether it is time to upload."""
        return time.monotonic() >= self._due

    def put_text(self, name: str, value: Any) -> None:
        """Keep a JSON value as `quark/<name>`."""
        text = json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        self._own.add(f"quark/{name}")
        self._outbox.put(f"quark/{name}", text.encode("utf-8", "replace"))

    def describe_metrics(self, described: Iterable[tuple[str, str, str]]) -> None:
        """Keep (name in MLflow, key, description) of metrics."""
        if self._meta is None:
            try:
                path = self._outbox.path_of(_METRICS_META)
                self._meta = json.loads(path.read_text("utf-8"))
            except (FileNotFoundError, ValueError):
                self._meta = {}
        new = {name: {"key": key, "description": text} for name, key, text in described}
        if any(self._meta.get(name) != one for name, one in new.items()):
            self._meta.update(new)
            self.put_text("metrics_meta.json", self._meta)

    @property
    def has_records(self) -> bool:
        """Whether the segments go among the artifacts: a batch of this run needs them."""
        return not self._is_held() and self._outbox.path_of(RECORDS).is_dir()

    def keep_batch(
        self, batch: Batch, run_id: str, *, is_needed: bool = True, is_late: bool = False
    ) -> None:
        """Keep a batch exactly; again changes nothing.

        Args:
            batch: It.
            run_id: The run.
            is_needed: False where its segment waits here until a batch comes that is
                needed; what was needed once stays so.
            is_late: Whether it comes after later ones of its writer.
        """
        if not is_needed and not self._held.exists():
            replace_file(self._held, b"")
        elif is_needed and not self._is_needed:
            replace_file(self._held, b"no")
            self._is_needed = True
        self._attempt = max(self._attempt, batch.attempt)
        full = self._segments.append(
            batch, self._find_first_index(batch.writer_id), is_late=is_late
        )
        if full is not None:
            self._make_tables(full, run_id)
            self._closed.add(f"{RECORDS}/{full.name}")

    def keep_events(
        self,
        writer_id: str,
        writer: MlflowWriter,
        records: Sequence[EventRecord],
        *,
        is_first: bool,
    ) -> MlflowWriter:
        """Append events to the text file of their writer; returns how far the writer is then.

        Args:
            writer_id: The writer.
            writer: How far it is acknowledged; what is beyond is written over.
            records: The events.
            is_first: Whether this writer began the run.
        """
        number = writer.events_file or self._find_first_index(writer_id)
        size = writer.events_bytes
        stem = _name_events(writer_id, is_first=is_first)
        if size >= _EVENTS_LIMIT_BYTES or (
            # It went up whole, and is here no more.
            size and not self._outbox.path_of(_number(stem, number)).exists()
        ):
            number, size = number + 1, 0
        data = encode_lines(records)
        while True:
            name = _number(stem, number)
            path = self._outbox.path_of(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                size = min(size, path.stat().st_size)
            if write_at(path, size, data):
                break
            number, size = number + 1, 0
        self._own.add(name)
        return msgspec.structs.replace(writer, events_file=number, events_bytes=size + len(data))

    def stage_payload(self, payload: Payload) -> None:
        """Take a payload whose record is still to come.

        Raises:
            OSError: It cannot be kept now.
            BackendRejected: It is not what its hash says.
        """
        keep_payload(self._staged.root, payload, backend="mlflow")

    def find_payload(self, sha256: str) -> Path | None:
        """A payload that is staged here, or None."""
        return self._staged.find(sha256)

    def keep_artifacts(self, records: Sequence[ArtifactRecord], *, keeps_all: bool) -> Shown:
        """Give staged payloads the names that they have in MLflow.

        Args:
            records: What they are.
            keeps_all: Whether they also get the names that their records say, with the
                records beside them.

        Returns:
            What MLflow's page is to be told of them.
        """
        taken = self._taken
        shown = Shown()
        for record in records:
            if record.artifact_type == KEPT_SOURCES:
                self._keep_sources(record)
                continue
            described = record.to_dict()
            if not is_sha256(record.sha256):
                self._refuse(record.id or "", "its record has no payload hash")
                continue
            source = self._staged.root / object_path(record.sha256)
            limit = self._max_payload_bytes
            name = name_payload(record)
            if limit is not None and record.size_bytes > limit:
                described["left_out"] = f"larger than max_payload_mb, {limit} bytes"
                taken.add(source)
            elif is_plain_file(source):
                for file in list_native(record, source, shown, only_own_forms=keeps_all):
                    if isinstance(file.content, bytes):
                        self._outbox.put(file.name, file.content)
                    else:
                        self._outbox.put_file(file.name, file.content)
                if keeps_all:
                    self._outbox.put_file(name, source)
                taken.add(source)
            if not keeps_all:
                continue
            text = json.dumps(described, indent=1, ensure_ascii=False) + "\n"
            described_at = f"{name}.metadata.json"
            if name == record.payload_relative_path and _is_shown(record.metadata_relative_path):
                described_at = record.metadata_relative_path or described_at
            self._outbox.put(described_at, text.encode("utf-8", "replace"))
        return shown

    def _keep_sources(self, record: ArtifactRecord) -> None:
        """Lay out the code of a run; of one whose user has not asked for that nothing is here."""
        source = self.find_payload(record.sha256)
        if source is None:
            return
        self._sources.add(source)
        if record.artifact_key == PACK_KEY:
            return  # the manifest names what is in it, and comes after it
        if record.artifact_key != MANIFEST_KEY:
            self._outbox.put_file(record.artifact_key, source)
            self._taken.add(source)
            return
        with contextlib.suppress(ArtifactDamagedError):
            for path, data in unpack_sources(source.read_bytes(), self._read_staged):
                self._outbox.put(f"sources/{path}", data)
        self._taken |= self._sources

    def _read_staged(self, sha256: str) -> bytes:
        found = self.find_payload(sha256)
        if found is None:
            raise ArtifactNotFoundError(f"payload {sha256:.80} does not exist here")
        return found.read_bytes()

    def drop_taken(self) -> None:
        """Remove what is staged of payloads that have their names.

        Only when a group of batches is through: several of it may name one payload.
        """
        for source in self._taken:
            source.unlink(missing_ok=True)
        self._taken.clear()

    def keep_samples(self, batch: Batch, records: Sequence[SampleRecord]) -> Shown:
        """Keep text samples as tables, one for each set and step of a batch."""
        shown = Shown()
        for file in list_sample_tables(batch, records, shown):
            assert isinstance(file.content, bytes)
            self._outbox.put(file.name, file.content)
        return shown

    def forget(self) -> None:
        """The MLflow run is another one now: what is here goes up again."""
        self._outbox.forget()

    def send(self, run_id: str, *, final: bool = False, only_payloads: bool = False) -> bool:
        """Upload what waits; where that fails, it is tried again later.

        Args:
            run_id: The run.
            final: Make the tables of the newest segments too.
            only_payloads: Only what users have logged, and nothing of `quark/`.

        Returns:
            Whether MLflow has all of it.
        """
        if not only_payloads:
            self._due = time.monotonic() + _EVERY_S
        if final:
            for path in self._segments.list_open():
                self._make_tables(path, run_id)
        try:
            self._outbox.send(
                self._upload,
                self._refuse,
                self._is_disposable,
                _is_payload if only_payloads else self._is_to_go,
            )
        except BackendUnavailable as error:
            if str(error) not in self._reasons:
                self._reasons.add(str(error))
                _log.warning(
                    "backend mlflow: files cannot be added to the run's artifacts now (%s). "
                    "They wait in %s",
                    error,
                    self._outbox.root,
                )
            return False
        return True

    def close(self, run_id: str, first_writer: str | None = None) -> None:
        """Upload what is left, and remove here what is there.

        Args:
            run_id: The run.
            first_writer: The writer that began it.

        Raises:
            BackendUnavailable: Something cannot be uploaded; it stays here for the
                next process that opens the mirror.
        """
        self.drop_taken()
        for staged in sorted(self._staged.root.glob(_OBJECTS)):
            self._outbox.put_file(name_loose_payload(staged.name), staged)
        shutil.rmtree(self._staged.root, ignore_errors=True)
        with contextlib.suppress(OSError):  # another opening has some
            self._staged.root.parent.rmdir()
        older = self._segments.list_older(self._attempt)
        for path in (*self._segments.list_open(), *(path for path, _ in older)):
            self._make_tables(path, run_id)
        self._outbox.send(self._upload, self._refuse, self._is_disposable, self._is_to_go)
        settled = {f"{RECORDS}/{path.name}" for path in self._segments.list_open()} | self._own
        stems = []
        for path, writer_id in older:
            # Most often their attempt has ended; who still delivers it goes on in files anew.
            settled.add(f"{RECORDS}/{path.name}")
            stems.append(_name_events(writer_id, is_first=writer_id == first_writer))
        pattern = re.compile(f"(?:{'|'.join(map(re.escape, stems))})" + r"(?:-\d{4})?\.jsonl")
        self._outbox.clear(
            # Descriptions of metrics are added to by whoever opens the mirror next.
            lambda name: (
                name != _METRICS_META
                and (name in settled or bool(stems and pattern.fullmatch(name)))
            )
        )

    def count_waiting(self) -> int:
        """How many files are still to go up."""
        return len(self._outbox.list_waiting(self._is_to_go))

    def _is_held(self) -> bool:
        try:
            return not self._held.read_bytes()
        except FileNotFoundError:
            return False

    def _is_to_go(self, name: str) -> bool:
        return not name.startswith(f"{RECORDS}/") or not self._is_held()

    def _is_disposable(self, name: str) -> bool:
        own = name.startswith(("quark/tables/", "quark/payloads/")) or name in self._closed
        return own or _is_payload(name)

    def _make_tables(self, segment: Path, run_id: str) -> None:
        if not self._keeps_all():
            return
        try:
            size = segment.stat().st_size
            if self._tabled.get(segment.name) == size:
                return
            for name, data in make_tables(segment, run_id):
                self._outbox.put(name, data)
        except FileNotFoundError:
            return
        self._tabled[segment.name] = size

    def _find_first_index(self, writer_id: str) -> int:
        """Number of a writer's first segment here: after those that a lost folder has sent."""
        if writer_id not in self._first_indexes:
            first = 1
            if not self._segments.has(writer_id):
                stem = re.escape(make_file_name(writer_id))
                pattern = re.compile(rf"{stem}-(\d+){re.escape(SUFFIX)}")
                found = (pattern.fullmatch(name.rpartition("/")[2]) for name in self._list_remote())
                first = 1 + max((int(match[1]) for match in found if match), default=0)
            self._first_indexes[writer_id] = first
        return self._first_indexes[writer_id]


def _name_events(writer_id: str, *, is_first: bool) -> str:
    place = "" if is_first else f".{re.sub(r'[^A-Za-z0-9._-]', '_', writer_id)}"
    return f"quark/events{place}"


def _number(stem: str, number: int) -> str:
    return f"{stem}.jsonl" if number == 1 else f"{stem}-{number:04d}.jsonl"


def name_payload(record: ArtifactRecord) -> str:
    """Where an artifact's payload lies among the run's artifacts."""
    given = record.payload_relative_path or ""
    if _is_shown(given):
        return given
    # A store without links names the object itself, by its hash alone.
    at = f"step-{record.step:08d}-" if record.step is not None else ""
    place = f"artifacts/{record.artifact_type}/{record.artifact_key}/{at}{record.sha256[:12]}"
    # What a record says may be anybody's, and lead anywhere.
    return place if _is_shown(place) else name_loose_payload(record.sha256)


def _is_payload(name: str) -> bool:
    """Whether a file is one that the user has logged."""
    return not name.startswith("quark/")


def _is_shown(path: str | None) -> bool:
    """Whether a record's path is one among the artifacts that people see."""
    parts = split_path(path or "") or (".",)
    return parts[0] == ARTIFACT_STORAGE_LAYOUT["root"] and not any(p[0] == "." for p in parts)


def name_loose_payload(sha256: str) -> str:
    """Where a payload lies whose record never came."""
    return f"quark/payloads/{sha256[:2]}/{sha256}"


# Those are in MLflow itself, or in events.jsonl.
_ELSEWHERE = frozenset({MetricRecord.KIND, EventRecord.KIND, LifecycleRecord.KIND})


def make_tables(segment: Path, run_id: str) -> list[tuple[str, bytes]]:
    """Path among the artifacts and content of each table that a segment gives.

    Raises:
        OSError: The segment cannot be read.
    """
    from quark_core.api import Columns

    by_kind: dict[str, list[Columns]] = {}
    for batch in read_segment(segment, run_id):
        if batch.kind not in _ELSEWHERE:
            origin = {name: getattr(batch, name) for name in ("run_id", "writer_id", "attempt")}
            columns = Columns.from_body(batch.decoded, {**origin, "rank": batch.rank})
            by_kind.setdefault(batch.kind, []).append(columns)
    stem = segment.name.removesuffix(SUFFIX)
    made = []
    for kind, parts in by_kind.items():
        ending, data = _write(Columns.concatenate(kind, parts))
        made.append((f"quark/tables/{kind}/{stem}.{ending}", data))
    return made


def _write(columns: Columns) -> tuple[str, bytes]:
    if importlib.util.find_spec("pyarrow") is None:
        return "jsonl.gz", gzip.compress(encode_lines(columns.to_records()), mtime=0)
    pa = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    sink = pa.BufferOutputStream()
    parquet.write_table(columns.to_arrow(), sink, compression="zstd")
    return "parquet", sink.getvalue().to_pybytes()


def encode_lines(records: Sequence[object]) -> bytes:
    """Records as JSON lines; a value that is not finite is its name as text."""
    lines = [
        msgspec.json.encode({k: _spell(v) for k, v in record.to_dict().items()})  # type: ignore[attr-defined]
        for record in records
    ]
    return b"".join(line + b"\n" for line in lines)


def _spell(value: object) -> object:
    is_odd = isinstance(value, float) and (value != value or value in (float("inf"), -float("inf")))
    return str(value) if is_odd else value
