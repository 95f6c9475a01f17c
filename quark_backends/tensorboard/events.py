"""Records as TensorBoard's events."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quark_backends.mirroring.curves import Curves, find_place, rank_prefix
from quark_backends.tensorboard.library import Library
from quark_core.api import (
    KEPT_SOURCES,
    AlertRecord,
    ArtifactRecord,
    EventRecord,
    LifecycleRecord,
    ParameterDistributionRecord,
    PayloadFolder,
    PhaseRecord,
    SampleRecord,
    StreamRecord,
    encode_json,
    normalize_object,
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
