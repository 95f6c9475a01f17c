"""Points and records of other tools as batches of ours: names, bounds and secrets are seen to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from quark.importing.foreign import Points
from quark.importing.losses import Losses
from quark_core.config.redaction import redact_record, redact_shapes
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord, StreamRecord
from quark_core.records.codec import (
    Column,
    encode_columns,
    encode_float_array,
    encode_indexes,
    encode_integer_array,
    encode_records,
)
from quark_core.records.names import check_name, encode_name, split_name
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
        raise SchemaValidationError("name holds half of a surrogate pair") from None
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
    _tell(points, ~fits, losses, "it has a negative step, and no epoch")
    timely = (points.times_us >= FIRST_US) & (points.times_us <= LAST_US)
    _tell(points, fits & ~timely, losses, "its time lies outside the years 1 to 9999")
    fits &= timely
    keys = []
    for place, name in enumerate(points.names):
        try:
            keys.append(encode_named(name))
        except SchemaValidationError as error:
            keys.append("")
            named = points.which == place
            _tell(points, fits & named, losses, f"its name cannot be a metric's: {error}")
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
