"""The TensorBoard mirror as a backend.

A run becomes event files: `tensorboard/` of the run's directory, or
`DIR/<run id>/` for `tensorboard:DIR` (a relative DIR counts from storage_dir).
Each of these is a run to TensorBoard:

    .                    scalars and texts of attempt 0
    attempt-<n>/         those of a resumed run, so that curves do not go back and forth
    …/media/             histograms and images, which are slow to read
    …/writer-<id>/       what other processes of the attempt have logged

See `quark_backends.mirroring.curves` for what the curves are called. Steps are
steps, else epochs, else the order in which records were made; values are
float32, as all scalars of TensorBoard are.

Each folder holds the files of one writer, since TensorBoard follows one file
per folder. `state/` says how far they are acknowledged; what lies beyond, a
killed process has left, and it is cut off before the batch is written again.
So every point is there once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from quark_backends.mirroring.saved_state import digest_batch, is_new, keep_payload, make_file_name
from quark_backends.tensorboard.event_file import (
    EventFile,
    EventFileState,
    claim_folder,
    load_writer,
    save_writer,
)
from quark_backends.tensorboard.events import EventMaker
from quark_backends.tensorboard.library import Library
from quark_core.api import (
    BackendConfig,
    BackendRejected,
    BackendUnavailable,
    Batch,
    Payload,
    PayloadFolder,
    SchemaValidationError,
    StreamRecord,
)


class TensorboardBackend:
    """Mirrors one run into event files; see the module for which."""

    def __init__(self, config: BackendConfig) -> None:
        if config.options:
            raise _unavailable(
                f"the TensorBoard mirror has no option {min(config.options)!r}; it has none"
            )
        if config.run_id is None or config.read_only:
            raise _unavailable("the TensorBoard mirror is opened for writing one run only")
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
