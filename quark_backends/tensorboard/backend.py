"""The TensorBoard mirror as a backend: records as events, appended to files.

A run becomes event files: `tensorboard/` of the run's directory, or
`DIR/<run id>/` for `tensorboard:DIR` (a relative DIR counts from storage_dir).
Each of these is a run to TensorBoard:

    .                    scalars and texts of attempt 0
    attempt-<n>/         those of a resumed run, so that curves do not go back and forth
    …/media/             histograms and images, which are slow to read
    …/writer-<id>/       what other processes of the attempt have logged

See `quark_backends.mirror_records` for what the curves are called. Steps are
steps, else epochs, else the order in which records were made; values are
float32, as all scalars of TensorBoard are.

Each folder holds the files of one writer, since TensorBoard follows one file
per folder. `state/` says how far they are acknowledged; what lies beyond, a
killed process has left, and it is cut off before the batch is written again.
So every point is there once.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from quark_backends.mirror_records import Curves, find_place, rank_prefix
from quark_backends.mirror_state import (
    digest_batch,
    is_new,
    keep_payload,
    load_state,
    make_file_name,
    save_state,
)
from quark_core.api import (
    KEPT_SOURCES,
    AlertRecord,
    ArtifactRecord,
    BackendConfig,
    BackendRejected,
    BackendUnavailable,
    BackendUnusable,
    Batch,
    EventRecord,
    LifecycleRecord,
    ParameterDistributionRecord,
    Payload,
    PayloadFolder,
    PhaseRecord,
    SampleRecord,
    SchemaValidationError,
    StreamRecord,
    encode_json,
    importing,
    normalize_object,
    split_generation,
)

_MODULES = {
    "event": "tensorboard.compat.proto.event_pb2",
    "summary": "tensorboard.compat.proto.summary_pb2",
    "checksum": "tensorboard.compat.tensorflow_stub.pywrap_tensorflow",
    "text": "tensorboard.plugins.text.summary_v2",
    "hparams": "tensorboard.plugins.hparams.summary_v2",
    "hparams_data": "tensorboard.plugins.hparams.plugin_data_pb2",
    "hparams_metadata": "tensorboard.plugins.hparams.metadata",
    "hparams_api": "tensorboard.plugins.hparams.api_pb2",
}
# float32 is all that a TensorBoard scalar has.
_LARGEST = 3.4028234663852886e38


class Library:
    """Makes TensorBoard's messages.

    Raises:
        BackendUnusable: The library is not installed.
        BackendUnavailable: It cannot be imported.
    """

    def __init__(self) -> None:
        try:
            with importing():
                self._modules: dict[str, Any] = {
                    name: importlib.import_module(module) for name, module in _MODULES.items()
                }
        except ModuleNotFoundError as error:
            # A folder of that name counts as a package, in which nothing is found.
            if error.name not in ("tensorboard", "tensorboard.compat"):
                raise _broken(error) from error
            raise BackendUnusable(
                'tensorboard is not installed: pip install "quark-tracker[tensorboard]"; '
                "the records wait",
                backend="tensorboard",
            ) from error
        except Exception as error:
            # A wrong protobuf ends in a TypeError, for one.
            raise _broken(error) from error

    def compute_checksum(self, data: bytes) -> int:
        """The checksum of the parts of an event file."""
        return int(self._modules["checksum"].masked_crc32c(data))

    def encode_header(self, time_s: float) -> bytes:
        """The event that an event file begins with."""
        event = self._modules["event"].Event(wall_time=time_s, file_version="brain.Event:2")
        return bytes(event.SerializeToString())

    def encode_event(self, time_s: float, step: int, summary: Any) -> bytes:
        """A summary at a step."""
        event = self._modules["event"].Event(wall_time=time_s, step=step, summary=summary)
        # Maps of a message have no order of their own, and the bytes must be the same each time.
        return bytes(event.SerializeToString(deterministic=True))

    def make_scalar(self, name: str, value: float) -> Any:
        """One value of a curve; beyond float32 it becomes infinite."""
        if abs(value) > _LARGEST:
            value = float("inf") if value > 0 else float("-inf")
        return self._summary([self._modules["summary"].Summary.Value(tag=name, simple_value=value)])

    def make_text(self, name: str, text: str) -> Any:
        """A text, shown as Markdown."""
        return self._modules["text"].text_pb(name, text)

    def make_histogram(self, name: str, counts: Sequence[int], edges: Sequence[float]) -> Any:
        """A histogram; its sums are reckoned from the middle of each bin."""
        summary = self._modules["summary"]
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        histogram = summary.HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
            sum_squares=sum(c * middle**2 for c, middle in zip(counts, middles, strict=True)),
            # A first bin without content, so that the first edge is not lost.
            bucket_limit=list(edges),
            bucket=[0, *counts],
        )
        return self._summary([summary.Summary.Value(tag=name, histo=histogram)])

    def make_image(self, name: str, data: bytes, width: int, height: int) -> Any:
        """An encoded image."""
        summary = self._modules["summary"].Summary
        image = summary.Image(width=width, height=height, colorspace=4, encoded_image_string=data)
        return self._summary([summary.Value(tag=name, image=image)])

    def make_hparams(self, values: Mapping[str, Any], run_id: str, time_s: float) -> Any:
        """The hyperparameters of a run."""
        return self._modules["hparams"].hparams_pb(
            dict(values), trial_id=run_id, start_time_secs=time_s
        )

    def make_session_end(self, time_s: float, *, completed: bool) -> Any:
        """The end of a run, as the page of hyperparameters shows it."""
        api, data = self._modules["hparams_api"], self._modules["hparams_data"]
        status = api.STATUS_SUCCESS if completed else api.STATUS_FAILURE
        end = data.SessionEndInfo(status=status, end_time_secs=time_s)
        metadata = self._modules["hparams_metadata"]
        content = data.HParamsPluginData(session_end_info=end)
        value = self._modules["summary"].Summary.Value(
            tag=metadata.SESSION_END_INFO_TAG,
            metadata=metadata.create_summary_metadata(content),
            tensor=metadata.NULL_TENSOR,
        )
        return self._summary([value])

    def _summary(self, values: list[Any]) -> Any:
        return self._modules["summary"].Summary(value=values)


def _broken(error: Exception) -> BackendUnavailable:
    return BackendUnavailable(
        f"TensorBoard cannot be imported ({type(error).__name__}: {error})",
        backend="tensorboard",
    )


_MAX_IMAGE_BYTES = 8 * 1024 * 1024
_PNG = b"\x89PNG\r\n\x1a\n"
_IMAGE_FORMATS = (_PNG, b"\xff\xd8\xff", b"GIF8")
_MAX_HPARAMS = 500


class Events(NamedTuple):
    """Encoded events of a batch.

    Attributes:
        main: Scalars, texts and the configuration.
        media: Histograms and images, which have a file of their own, since
            TensorBoard reads a file with them far more slowly.
    """

    main: list[bytes]
    media: list[bytes]


class EventMaker:
    """Makes events; the same bytes again from the same records and counts.

    Args:
        library: TensorBoard's own classes.
        payloads: Where the payloads of artifacts lie.
    """

    def __init__(self, library: Library, payloads: PayloadFolder) -> None:
        self._library = library
        self._payloads = payloads
        self._curves = Curves(machine="system")

    def make(self, records: Sequence[StreamRecord], counts: dict[str, int]) -> Events:
        """The events of a batch.

        Args:
            records: The batch's records.
            counts: Series of events -> how many there were so far; added to.
        """
        events = Events([], [])
        phases = 0
        for record in records:
            values = self._curves.list_values(record)
            if isinstance(record, (EventRecord, PhaseRecord)):
                name, count = self._curves.count(record, counts, phases)
                values = [(name, float(count))]
                phases += 1
            for name, value in values:
                events.main.append(self._encode(record, self._library.make_scalar(name, value)))
            for name, text in _list_texts(record):
                tag = f"{rank_prefix(record)}{name}"
                events.main.append(self._encode(record, self._library.make_text(tag, text)))
            for summary in self._list_sessions(record):
                events.main.append(self._encode(record, summary))
            for summary in self._list_media(record):
                events.media.append(self._encode(record, summary))
        return events

    def _encode(self, record: StreamRecord, summary: Any) -> bytes:
        """An event; without a step it stands at the epoch, else in the order written."""
        place = find_place(record)
        step = place.step if place.step is not None else place.epoch
        return self._library.encode_event(
            record.time_us / 1e6, record.sequence if step is None else step, summary
        )

    def _list_sessions(self, record: StreamRecord) -> Iterator[Any]:
        """What TensorBoard's page of hyperparameters shows."""
        if not isinstance(record, LifecycleRecord):
            return
        data: Mapping[str, Any] = record.data or {}
        if record.action == "config":
            flat = dict(list(_flatten(data.get("values", {})))[:_MAX_HPARAMS])
            yield self._library.make_hparams(flat, record.run_id or "", record.time_us / 1e6)
        elif record.action == "status" and data.get("status") != "running":
            completed = data.get("status") == "completed"
            yield self._library.make_session_end(record.time_us / 1e6, completed=completed)

    def _list_media(self, record: StreamRecord) -> Iterator[Any]:
        if isinstance(record, ParameterDistributionRecord) and record.counts:
            yield self._library.make_histogram(
                self._curves.distribution(record), record.counts, record.bin_edges
            )
        elif isinstance(record, ArtifactRecord) and record.size_bytes <= _MAX_IMAGE_BYTES:
            path = self._payloads.find(record.sha256)
            found = None if path is None else read_image(path)
            if found is not None:
                tag = f"{rank_prefix(record)}artifacts/{record.artifact_key}"
                yield self._library.make_image(tag, *found)


def read_image(path: Path) -> tuple[bytes, int, int] | None:
    """An image that browsers show, with its width and height where they are told; else None."""
    data = path.read_bytes()
    if not data.startswith(_IMAGE_FORMATS):
        return None
    if data.startswith(_PNG) and len(data) >= 24:
        width, height = struct.unpack(">II", data[16:24])
        return data, width, height
    return data, 0, 0


def _list_texts(record: StreamRecord) -> Iterator[tuple[str, str]]:
    if isinstance(record, EventRecord):
        payload: Mapping[str, Any] = record.payload or {}
        message = payload.get("message")
        if isinstance(message, str):
            yield f"logs/{record.severity}", message
        else:
            text = f"{record.severity} {record.status or ''}".strip()
            yield f"events/{record.event_type}", f"{text}{_as_block(payload)}"
    elif isinstance(record, AlertRecord):
        lines = (record.title, record.summary, record.fact, record.inference)
        yield f"alerts/{record.rule_id}", "\n\n".join((record.severity, *lines))
    elif isinstance(record, SampleRecord):
        row = {"prompt": record.prompt, "completion": record.completion, "reward": record.reward}
        # As a block: what a model says is no markup.
        cells = normalize_object({**row, **(record.columns or {})}, "sample")
        yield f"samples/{record.set_name}", _as_block(cells or {})
    elif isinstance(record, PhaseRecord):
        yield "phases", f"{record.display_name}\n\n{record.summary}"
    elif isinstance(record, ArtifactRecord) and record.artifact_type != KEPT_SOURCES:
        yield f"artifacts/{record.artifact_key}", _as_block(record.to_dict())
    elif isinstance(record, LifecycleRecord) and record.action != "heartbeat":
        yield f"run/{record.action}", _as_block(record.data or {})


def _as_block(values: Mapping[str, Any]) -> str:
    if not values:
        return ""
    text = json.dumps(json.loads(encode_json(values)), indent=2, ensure_ascii=False)
    # Four spaces are code in Markdown.
    return "\n\n" + "\n".join(f"    {line}" for line in text.splitlines())


def _flatten(values: Mapping[str, Any], stem: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{stem}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{name}.")
        elif isinstance(value, (bool, int, float, str)):
            yield name, value
        elif value is not None:
            yield name, encode_json(value).decode()


# Event files, of which only the acknowledged part counts, and how far that goes.
#
# Of each writer there is one file that says so, and of each folder one that says
# whose it is. A writer's lane is driven by one process at a time, so no two write
# one file.

_FOLDER = "state"
_PLACE = re.compile(r"(?:\.|attempt-[0-9]+)?(?:/writer-[A-Za-z0-9_-]+)?")
_NAME = re.compile(r"events\.out\.tfevents\.[0-9]+\.[A-Za-z0-9_-]*")
_BINARY = getattr(os, "O_BINARY", 0)
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")


class EventFile:
    """Appends events after the acknowledged part, and cuts off what lies beyond it.

    A reader that has seen what is cut off loses nothing: the same batch makes
    the same bytes again.

    Args:
        path: The file; made at the first append, with the version that
            TensorBoard expects first.
        checksum: TensorBoard's masked CRC-32C.
        header: The event that an event file begins with, encoded.
    """

    def __init__(self, path: Path, checksum: Any, header: bytes) -> None:
        self.path = path
        self._checksum = checksum
        self._header = header

    def append(self, events: Iterable[bytes], size_bytes: int) -> int:
        """Write events and sync them; returns the new size, which the caller acknowledges.

        Args:
            events: Encoded events.
            size_bytes: What is acknowledged.

        Raises:
            OSError: The file cannot be written; it may be called again.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | _BINARY, 0o666)
        try:
            # Shorter than that where somebody has emptied it: what was there is gone anyway.
            size_bytes = min(size_bytes, os.fstat(descriptor).st_size)
            head = [] if size_bytes else [self._header]
            data = b"".join(self._frame(event) for event in (*head, *events))
            os.ftruncate(descriptor, size_bytes)
            os.lseek(descriptor, 0, os.SEEK_END)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return size_bytes + len(data)

    def _frame(self, event: bytes) -> bytes:
        length = _LENGTH.pack(len(event))
        return b"".join(
            (
                length,
                _CHECKSUM.pack(self._checksum(length)),
                event,
                _CHECKSUM.pack(self._checksum(event)),
            )
        )


class EventFileState(msgspec.Struct, frozen=True):
    """How far a writer is mirrored, and where.

    Attributes:
        number: Its newest acknowledged batch.
        digest: Hash of that batch.
        place: Folder of its files, relative; "" before it has one.
        name: Name of its files.
        started_us: Time of its first record.
        sizes_bytes: main and media -> acknowledged size of the file.
        counts: Events by the name of their curve.
    """

    number: int = -1
    digest: str = ""
    place: str = ""
    name: str = ""
    started_us: int = 0
    sizes_bytes: dict[str, int] = {}
    counts: dict[str, int] = {}


def load_writer(folder: Path, writer_id: str) -> EventFileState:
    """A writer as it was last saved; a new one where there is none."""
    found = load_state(_path_of(folder, writer_id), EventFileState)
    # The folder may be somebody's who means files elsewhere.
    own = _PLACE.fullmatch(found.place) and (not found.name or _NAME.fullmatch(found.name))
    return found if own else EventFileState()


def save_writer(folder: Path, writer_id: str, writer: EventFileState) -> None:
    """Replace what is saved of a writer whole, and sync it."""
    save_state(_path_of(folder, writer_id), writer, is_synced=True)


def claim_folder(folder: Path, attempt: int, writer_id: str) -> str:
    """The folder for a writer's files: the attempt's own for its first process."""
    place = f"attempt-{attempt}" if attempt else "."
    if split_generation(writer_id) is not None:
        return f"{place}/writer-{make_file_name(writer_id, has_dots=False)}"
    owner = folder / _FOLDER / f"owner-{attempt}"
    owner.parent.mkdir(parents=True, exist_ok=True)
    try:
        with owner.open("x") as file:
            file.write(writer_id)
            return place
    except FileExistsError:
        if owner.read_text() == writer_id:
            return place
    return f"{place}/writer-{make_file_name(writer_id, has_dots=False)}"


def _path_of(folder: Path, writer_id: str) -> Path:
    return folder / _FOLDER / f"writer-{make_file_name(writer_id, has_dots=False)}.json"


class TensorboardBackend:
    """Mirrors one run into event files; see the module for which."""

    def __init__(self, config: BackendConfig) -> None:
        if config.options:
            raise _unavailable(
                f"the TensorBoard mirror has no option {min(config.options)!r}. It has no options"
            )
        if config.run_id is None or config.read_only:
            raise _unavailable("the TensorBoard mirror can only write, and one run only")
        self._folder = _find_folder(config, config.run_id)
        self._library = Library()
        self._payloads = PayloadFolder(self._folder / "payloads")
        self._maker = EventMaker(self._library, self._payloads)
        self._writers: dict[str, EventFileState] = {}

    def write(self, batch: Batch) -> None:
        """Append a batch's events and sync them.

        Raises:
            BackendRejected: Other content under a known number, or a body that
                cannot be read.
            BackendUnavailable: The files cannot be written now.
        """
        self.write_group([batch])

    def write_group(self, batches: Sequence[Batch]) -> None:
        """Append several batches and sync once per writer; raises as `write` does."""
        try:
            fresh = [(batch, _decode(batch)) for batch in batches if self._is_new(batch)]
            for writer_id in dict.fromkeys(batch.writer_id for batch, _ in fresh):
                self._append([each for each in fresh if each[0].writer_id == writer_id])
        except OSError as error:
            # What was written and not acknowledged is cut off at the next try.
            self._writers.clear()
            raise _unavailable(f"event files: {error}") from error

    def close(self) -> None:
        """Nothing is left to do: what was written is in the files."""

    def put_payload(self, payload: Payload) -> None:
        """See `SupportsArtifacts`; images are shown, other payloads only kept."""
        try:
            keep_payload(self._payloads.root, payload, backend="tensorboard")
        except OSError as error:
            raise _unavailable(f"a payload cannot be kept: {error}") from error

    def open_payload(self, run_id: str, sha256: str) -> BinaryIO:
        """See `SupportsArtifacts`."""
        del run_id
        return self._payloads.open(sha256)

    def payload_directory(self, run_id: str) -> Path | None:
        """See `SupportsArtifacts`; payloads have to be sent."""
        del run_id
        return None

    def _is_new(self, batch: Batch) -> bool:
        writer = self._load(batch)
        return is_new(batch, writer.number, writer.digest, backend="tensorboard")

    def _load(self, batch: Batch) -> EventFileState:
        found = self._writers.get(batch.writer_id)
        if found is None:
            found = self._writers[batch.writer_id] = load_writer(self._folder, batch.writer_id)
        return found

    def _append(self, decoded: Sequence[tuple[Batch, Sequence[StreamRecord]]]) -> None:
        """Append batches of one writer."""
        first, records = decoded[0]
        writer = self._load(first)
        if not writer.place:
            started_us = min(record.time_us for record in records)
            writer = msgspec.structs.replace(
                writer,
                place=claim_folder(self._folder, first.attempt, first.writer_id),
                name=_name_file(started_us, first.writer_id),
                started_us=started_us,
            )
            # Noted before the file is made, so that the next try finds the same one.
            save_writer(self._folder, first.writer_id, writer)
        counts = dict(writer.counts)
        events = [self._maker.make(each, counts) for _, each in decoded]
        sizes_bytes = dict(writer.sizes_bytes)
        for stream, folder in (("main", ""), ("media", "media")):
            encoded = [event for each in events for event in getattr(each, stream)]
            path = self._folder / writer.place / folder / writer.name
            if encoded:
                file = EventFile(
                    path,
                    self._library.compute_checksum,
                    self._library.encode_header(writer.started_us / 1e6),
                )
                sizes_bytes[stream] = file.append(encoded, sizes_bytes.get(stream, 0))
        newest = decoded[-1][0]
        writer = msgspec.structs.replace(
            writer,
            number=newest.number,
            digest=digest_batch(newest),
            sizes_bytes=sizes_bytes,
            counts=counts,
        )
        save_writer(self._folder, newest.writer_id, writer)
        self._writers[newest.writer_id] = writer


def _decode(batch: Batch) -> Sequence[StreamRecord]:
    try:
        return batch.to_records()
    except SchemaValidationError as error:
        raise BackendRejected(str(error), backend="tensorboard") from error


def _find_folder(config: BackendConfig, run_id: str) -> Path:
    if config.location:
        # A run's id may hold what no file name may.
        kept = make_file_name(run_id)
        if kept != run_id:
            kept = f"{kept[:100]}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"
        return (config.storage_dir / Path(config.location).expanduser()).resolve() / kept
    run_path = config.run_path or config.storage_dir / ".quark" / "runs" / run_id
    return run_path.resolve() / "tensorboard"


def _name_file(started_us: int, writer_id: str) -> str:
    # TensorBoard knows its files by `tfevents`, and reads those of a folder by their names.
    kept = make_file_name(writer_id, has_dots=False)
    return f"events.out.tfevents.{started_us // 10**6:010d}.{kept}"


def _unavailable(message: str) -> BackendUnavailable:
    return BackendUnavailable(message, backend="tensorboard")
