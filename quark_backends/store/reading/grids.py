"""Grids out of chunks, of which only the columns are decoded that the grid is of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quark_backends.store.encoding.bodies import number_texts
from quark_backends.store.encoding.chunks import Chunk
from quark_backends.store.reading.stored_rows import StoredRows, WriterRow
from quark_core.backends.grids import Grid, GridBuilder, GridQuery, find_counters
from quark_core.errors import SchemaValidationError
from quark_core.records.attempts import HiddenRows
from quark_core.records.codec import DecodedBody

# So many rows of batches are put together before they are looked at.
_HELD_ROWS = 262_144
_MALFORMED = (SchemaValidationError, ValueError, TypeError, KeyError, IndexError)


def load_grid(stored: StoredRows, writers: Sequence[WriterRow], query: GridQuery) -> Grid:
    """The grid of what these writers have logged; see `SupportsGrid`."""
    builder = GridBuilder(query)
    read: dict[bytes, list[Any]] = {}
    for writer in writers:
        hidden = stored.find_hidden_by(writer, query.kind, query.query)
        for chunk in stored.iterate_chunks(
            query.kind, stored.find_chunks(writer, query.kind, query.query)
        ):
            try:
                _add_chunk(builder, chunk, writer, query, hidden, read)
            except SchemaValidationError as error:
                stored.warn_of_chunk(chunk.count, error)
        _add_tail(builder, stored, writer, query, hidden)
    return builder.make_grid()


def _add_tail(
    builder: GridBuilder,
    stored: StoredRows,
    writer: WriterRow,
    query: GridQuery,
    hidden: HiddenRows | None,
) -> None:
    """Add what is not compacted yet: of each batch a few columns, and many batches at once."""
    names: dict[str, int] = {str(writer.rank): 0} if query.by == "rank" else {}
    parts: list[tuple[Any, ...]] = []
    held = rows = batches = 0

    def flush() -> None:
        if parts:
            codes, *rest = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            builder.add(list(names), codes, *rest)
            parts.clear()

    for number, count, body in stored.open_batches(writer, query.kind, -1):
        rows, batches = rows + count, batches + 1
        if body is None:
            continue
        try:
            part = _read_body(body, names, query, hidden)
        except _MALFORMED as error:
            stored.warn_of_batch(writer, number, count, error)
            continue
        parts.append(part)
        held += count
        if held > _HELD_ROWS:
            flush()
            held = 0
    flush()
    stored.note_backlog(rows, batches)


def _read_body(
    body: DecodedBody, names: dict[str, int], query: GridQuery, hidden: HiddenRows | None
) -> tuple[Any, ...]:
    """What `GridBuilder.add` takes of a batch, behind the names."""
    count = body.count
    none = np.zeros(count, dtype=np.bool_)
    steps, values = body.to_array("step"), body.to_array(query.field)
    by_name = query.by == "name"
    codes = number_texts(body, query.row_column, names) if by_name else np.zeros(count, np.int64)
    nulls = body.nulls(query.field)
    broken = none
    for counter in find_counters(query.kind, query.field):
        broken = broken | (body.to_array(counter) > 0)
    kinds = none
    if query.kind == "layer":
        types: dict[str, int] = {"gradient": 0}
        kinds = number_texts(body, "summary_type", types) == 0
    found = (codes, steps, values, none if nulls is None else nulls, broken, kinds)
    if any(len(array) != count for array in found):
        raise SchemaValidationError("columns are of different lengths")
    if hidden is None:
        return found
    shown = ~hidden.find_hidden(steps, body.to_array("sequence"), body.to_array("epoch"))
    return tuple(array[shown] for array in found)


def _add_chunk(
    builder: GridBuilder,
    chunk: Chunk,
    writer: WriterRow,
    query: GridQuery,
    hidden: HiddenRows | None,
    read: dict[bytes, list[Any]],
) -> None:
    steps = chunk.array("step")
    values = chunk.array(query.field)
    nulls = chunk.nulls(query.field)
    if query.by == "rank":
        texts, codes = [str(writer.rank)], np.zeros(chunk.count, dtype=np.uint8)
    else:
        texts, codes = chunk.codes(query.row_column, read)
    kinds: Any = None
    if query.kind == "layer":
        types, type_codes = chunk.codes("summary_type", read)
        if len(types) == 1:
            kinds = types[0] == "gradient"
        else:
            kinds = np.array([kind == "gradient" for kind in types], dtype=np.bool_)[type_codes]
    broken: Any = None
    for counter in find_counters(query.kind, query.field):
        # Mostly it is one number for all rows, and 0.
        if chunk.constant(counter) in ((0,), (None,)):
            continue
        found = chunk.array(counter) > 0
        broken = found if broken is None else broken | found
    if hidden is not None:
        shown = ~hidden.find_hidden(steps, chunk.array("sequence"), chunk.array("epoch"))
        if not shown.all():
            steps, values, codes = steps[shown], values[shown], codes[shown]
            nulls = None if nulls is None else nulls[shown]
            kinds = kinds[shown] if isinstance(kinds, np.ndarray) else kinds
            broken = None if broken is None else broken[shown]
    builder.add(texts, codes, steps, values, nulls, broken, kinds)
