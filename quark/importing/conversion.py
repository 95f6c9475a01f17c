"""Points, records, payloads and histograms of other tools as batches and artifacts of ours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quark.importing.neutral_run import ForeignFile, Losses, Points
from quark_core.artifacts.payload_folder import PayloadFolder, open_source
from quark_core.artifacts.payload_formats import HEAD_BYTES, identify_media
from quark_core.config import settings
from quark_core.config.redaction import redact_record, redact_shapes
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records import ArtifactRecord, MetricRecord, StreamRecord
from quark_core.records.base import start_fields
from quark_core.records.codec import (
    Column,
    encode_columns,
    encode_float_array,
    encode_indexes,
    encode_integer_array,
    encode_records,
)
from quark_core.records.json_object import normalize_object
from quark_core.records.names import check_name, encode_name, object_path, split_name
from quark_core.records.schema import validate_record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BATCH_ROWS = 16_384
"""Records of one batch: small enough for every server, large enough to cost little."""

FIRST_US = -62_135_596_800_000_000
LAST_US = 253_402_300_799_999_999
"""Times that records may have: the years 1 to 9999."""


def encode_named(name: str) -> str:
    """The stored key of a foreign name.

    Raises:
        SchemaValidationError: It is empty, too long, or no Unicode text.
    """
    checked = check_name(redact_shapes(name), "name")
    try:
        checked.encode()
    except UnicodeEncodeError:
        raise SchemaValidationError("name contains half of a surrogate pair") from None
    return encode_name(checked)


def encode_points(points: Points, losses: Losses, first: int) -> Iterator[tuple[int, bytes]]:
    """Counts and bodies of the batches of points; what no record can have is left out and told.

    Args:
        points: The points.
        losses: Told of what is left out.
        first: Sequence of the first one.
    """
    import numpy as np

    kept, keys = _keep_points(points, losses)
    parts = [split_name(key) for key in keys]
    # Several foreign names may be none of ours; the places of those that are.
    for begin in range(0, len(kept), BATCH_ROWS):
        rows = kept[begin : begin + BATCH_ROWS]
        count = len(rows)
        used, which = np.unique(points.which[rows], return_inverse=True)
        epochs = None if points.epochs is None else points.epochs[rows]
        texts: dict[str, list[str | None]] = {
            "metric_key": [keys[place] for place in used],
            "namespace": [parts[place][0] for place in used],
            "metric_name": [parts[place][1] for place in used],
        }
        columns: dict[str, Column] = {
            "sequence": encode_integer_array(
                "sequence", np.arange(first + begin, first + begin + count, dtype=np.int64)
            ),
            "time_us": encode_integer_array("time_us", points.times_us[rows]),
            **{name: _encode_texts(name, given, which) for name, given in texts.items()},
            "value": encode_float_array("value", points.values[rows]),
            "step": _encode_counter("step", points.steps[rows]),
            "epoch": Column("epoch", "c", None)
            if epochs is None
            else _encode_counter("epoch", epochs),
        }
        yield count, encode_columns(MetricRecord.KIND, count, columns)


def _encode_texts(name: str, texts: list[str | None], which: NDArray[np.int64]) -> Column:
    distinct = list(dict.fromkeys(texts))
    if len(distinct) == 1:
        return Column(name, "c", distinct[0])
    import numpy as np

    places = np.array([distinct.index(text) for text in texts], dtype=np.int64)
    return encode_indexes(name, distinct, places[which])


def _encode_counter(name: str, values: NDArray[np.int64]) -> Column:
    return encode_integer_array(name, values, values < 0)


def _keep_points(points: Points, losses: Losses) -> tuple[NDArray[np.int64], list[str]]:
    """The rows that a record can hold, and the stored key of each name; "" where it has none."""
    import numpy as np

    fits = points.steps >= 0
    if points.epochs is not None:
        fits |= points.epochs >= 0
    _tell(points, ~fits, losses, "it has a negative step and no epoch")
    timely = (points.times_us >= FIRST_US) & (points.times_us <= LAST_US)
    _tell(points, fits & ~timely, losses, "its time is outside the years 1 to 9999")
    fits &= timely
    keys = []
    for place, name in enumerate(points.names):
        try:
            keys.append(encode_named(name))
        except SchemaValidationError as error:
            keys.append("")
            named = points.which == place
            _tell(points, fits & named, losses, f"its name is not a valid metric name: {error}")
            fits &= ~named
    return np.flatnonzero(fits), keys


def _tell(points: Points, rows: NDArray[np.bool_], losses: Losses, reason: str) -> None:
    import numpy as np

    if not rows.any():
        return
    places, counts = np.unique(points.which[rows], return_counts=True)
    for place, count in zip(places.tolist(), counts.tolist(), strict=True):
        losses.add("point", points.names[place], reason, count)


def keep_records(records: Sequence[StreamRecord], losses: Losses) -> list[StreamRecord]:
    """Records without secrets, and without those that are none; these are told."""
    kept = []
    for record in records:
        name = str(getattr(record, (record.RULES.names or ("KIND",))[0], ""))
        try:
            kept.append(validate_record(redact_record(record)))
        except SchemaValidationError as error:
            losses.add(record.KIND, name, str(error))
    return kept  # type: ignore[return-value]


def place_records(
    records: Sequence[StreamRecord], first: int, *, run_id: str, writer_id: str, attempt: int
) -> Iterator[tuple[int, bytes]]:
    """Counts and bodies of batches of records of one kind, which get their writer and sequence."""
    for begin in range(0, len(records), BATCH_ROWS):
        placed: list[Any] = [
            msgspec.structs.replace(
                record,
                run_id=run_id,
                writer_id=writer_id,
                attempt=attempt,
                rank=0,
                sequence=first + begin + place,
            )
            for place, record in enumerate(records[begin : begin + BATCH_ROWS])
        ]
        yield len(placed), encode_records(placed)


class FileIntake:
    """Keeps payloads of one run.

    Args:
        folder: Where they go.
        losses: Told of what cannot be kept.
    """

    def __init__(self, folder: PayloadFolder, losses: Losses) -> None:
        self.folder = folder
        self._losses = losses

    def keep(self, item: ForeignFile) -> ArtifactRecord | None:
        """Keep a payload; its record, or None where it cannot be kept, which is told.

        Raises:
            SessionStoreError: There is no room for it.
        """
        try:
            return self._keep(item)
        except (SchemaValidationError, OSError) as error:
            self._losses.add(item.artifact_type, item.name, str(error))
            return None

    def _keep(self, item: ForeignFile) -> ArtifactRecord:
        key = encode_named(item.name.strip("/"))
        limit = settings.artifact_limit_bytes()
        if isinstance(item.content, Path):
            source, size_bytes = open_source(item.content)
            with source:
                _check_size(size_bytes, limit)
                put = self.folder.put_file(source, size_bytes)
            head = put.head
        else:
            _check_size(len(item.content), limit)
            put = self.folder.put_bytes(item.content)
            head = bytes(item.content[:HEAD_BYTES])
        if put.failure is not None:
            raise SessionStoreError(f"{item.name} cannot be stored: {put.failure}. Free disk space")
        metadata = dict(item.metadata)
        if item.payload_format != "json":
            metadata.setdefault("media_type", identify_media(head))
        fields = (*start_fields(None)[:5], item.time_us or start_fields(None)[5])
        record = ArtifactRecord(
            *fields,
            item.artifact_type,
            key,
            *split_name(key),
            item.payload_format,
            put.size_bytes,
            put.sha256,
            item.step,
            None,
            object_path(put.sha256),
            None,
            normalize_object(metadata, "metadata"),
        )
        checked = validate_record(redact_record(record))
        assert isinstance(checked, ArtifactRecord)
        return checked


def _check_size(size_bytes: int, limit: int) -> None:
    if size_bytes > limit:
        raise SchemaValidationError(
            f"it has {size_bytes} bytes, but the limit is {limit}. To change it, set "
            f"{settings.ARTIFACT_MAX_BYTES}"
        )


_MOST_BINS = 128


def make_histogram(
    name: str,
    edges: Sequence[float],
    counts: Sequence[float],
    *,
    step: int | None,
    time_us: int,
) -> ForeignFile | None:
    """A histogram as `ArtifactStore.log_histogram` stores it; None where it has no bin that is one.

    Args:
        name: What the tool calls it.
        edges: One more than there are counts, ascending; those that do not ascend, or are not
            finite, are left out, and what lies between them counts with the next bin.
        counts: How many values lie in each bin. Of many bins, narrow neighbours become one:
            PyTorch's writer gives hundreds, most of them around 0, that no picture can show.
        step: Its step; None or a negative one where it has none.
        time_us: When it was logged.
    """
    kept_edges, kept_counts = _coarsen(*_clean(edges, counts))
    if not kept_counts:
        return None
    return ForeignFile(
        artifact_type="histogram",
        name=name,
        content=msgspec.json.encode({"bins": kept_edges, "counts": kept_counts}),
        payload_format="json",
        step=None if step is None or step < 0 else step,
        time_us=time_us,
    )


def _clean(edges: Sequence[float], counts: Sequence[float]) -> tuple[list[float], list[float]]:
    """Edges that ascend, and counts between them."""
    kept: list[float] = []
    found: list[float] = []
    waiting = 0.0
    for place, edge in enumerate(edges):
        count = counts[place - 1] if place else 0
        whole = count if math.isfinite(count) and count > 0 else 0.0
        if not math.isfinite(edge) or (kept and edge <= kept[-1]):
            # A bin without width: what lies in it counts with the next one.
            waiting += whole
            continue
        if kept:
            found.append(whole + waiting)
            waiting = 0
        kept.append(edge)
    if found and waiting:
        found[-1] += waiting
    if kept and not found and waiting:
        # All values are one: a bin around it.
        middle = kept[0]
        width = abs(middle) * 1e-6 or 1e-6
        return [middle - width, middle + width], [waiting]
    return kept, found


def _coarsen(edges: list[float], counts: list[float]) -> tuple[list[float], list[float]]:
    """At most so many bins, of the same edges: neighbours together until they are wide enough."""
    if len(counts) <= _MOST_BINS:
        return edges, counts
    least = (edges[-1] - edges[0]) / _MOST_BINS
    kept: list[float] = [edges[0]]
    found: list[float] = []
    waiting = 0.0
    for edge, count in zip(edges[1:], counts, strict=True):
        waiting += count
        if edge - kept[-1] >= least or edge == edges[-1]:
            kept.append(edge)
            found.append(waiting)
            waiting = 0.0
    return kept, found
