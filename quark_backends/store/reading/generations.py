"""Keeps the outputs of analyzers as generations, each visible all at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from quark_backends.store.databases.connection import StoreConnection, writing
from quark_backends.store.encoding.bodies import make_rows
from quark_backends.store.reading.reader import find_run
from quark_core.errors import BackendUnavailable, SchemaValidationError, SessionStoreError
from quark_core.records.codec import MALFORMED, decode_body, encode_columns
from quark_core.records.schema import column_types

if TYPE_CHECKING:
    from quark_core.backends.contract import Generation
    from quark_core.records import StreamRecord
    from quark_core.records.columns import Columns

_log = logging.getLogger("quark")

Bodies = list[tuple[str, int, bytes]]
"""Kind, number of records and encoded records of each output."""


def write_generation(connection: StoreConnection, generation: Generation) -> int:
    """Store a generation in one transaction; returns its number, 1 for the first.

    Raises:
        RunNotFoundError: The store has no such run.
        SchemaValidationError: Records of another run, or under another kind's name.
        BackendUnavailable: The store is busy, full or out of reach; nothing was stored.
    """
    try:
        return store_generation(connection, generation)
    except connection.Error as error:
        raise BackendUnavailable(f"{connection.product}: {error}", backend="embedded") from error


def store_generation(connection: StoreConnection, generation: Generation) -> int:
    """As `write_generation`, with the errors of the database as they are.

    Raises:
        RunNotFoundError: The store has no such run.
        SchemaValidationError: Records of another run, or under another kind's name.
    """
    bodies = encode_outputs(generation)
    with writing(connection):
        run_pk = find_run(connection, generation.run_id, for_update=True)
        (newest,) = connection.execute(
            "SELECT coalesce(max(number), 0) FROM generation WHERE run_pk = ? AND analyzer = ?",
            (run_pk, generation.analyzer),
        ).fetchone()
        number = int(newest) + 1
        add_generation(connection, run_pk, generation.analyzer, number, generation.replaces, bodies)
    return number


def encode_outputs(generation: Generation) -> Bodies:
    """Check the outputs of a generation and encode them.

    Raises:
        SchemaValidationError: Records of another run, or under another kind's name.
    """
    for kind, records in generation.outputs.items():
        for record in records:
            if kind != record.KIND or record.run_id != generation.run_id:
                raise SchemaValidationError(
                    f"outputs[{kind!r}] must hold {kind} records of run {generation.run_id}, "
                    f"got a {record.KIND} record of run {record.run_id}"
                )
    return [
        (kind, len(records), _encode(kind, records))
        for kind, records in generation.outputs.items()
        if records
    ]


def add_generation(
    connection: StoreConnection,
    run_pk: int,
    analyzer: str,
    number: int,
    replaces: bool,
    bodies: Bodies,
) -> None:
    """Add a generation, inside the caller's transaction."""
    generation_pk = connection.insert(
        "INSERT INTO generation (pk, run_pk, analyzer, number, replaces, created_us)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (run_pk, analyzer, number, int(replaces), time.time_ns() // 1000),
    )
    connection.executemany(
        "INSERT INTO output (pk, generation_pk, kind, count, body) VALUES (?, ?, ?, ?, ?)",
        [(connection.new_key(), generation_pk, *body) for body in bodies],
    )


def read_outputs(
    connection: StoreConnection, run_id: str, kind: str, analyzer: str | None
) -> Columns:
    """Outputs of one kind: of each analyzer all from its newest replacing generation on.

    Their `writer_id` is the analyzer's name and the generation's number, with a dot between.

    Raises:
        RunNotFoundError: The store has no such run.
        SessionStoreError: An output is damaged.
    """
    from quark_core.records.columns import Columns

    return Columns.concatenate(kind, list(iterate_outputs(connection, run_id, kind, analyzer)))


def iterate_outputs(
    connection: StoreConnection,
    run_id: str,
    kind: str,
    analyzer: str | None,
    limit: int | None = None,
) -> Iterator[Columns]:
    """What `read_outputs` returns, of one analysis after the other.

    Args:
        connection: The store, inside a transaction that lasts as long.
        run_id, kind, analyzer: As there.
        limit: Leave out the first of them, whose records are not among the last so many.

    Raises:
        RunNotFoundError, SessionStoreError: As there.
    """
    run_pk = find_run(connection, run_id)
    of_analyzer, arguments = ("", ()) if analyzer is None else (" AND analyzer = ?", (analyzer,))
    rows = connection.execute(
        "SELECT output.pk, analyzer, number, output.count FROM output"
        " JOIN generation AS g ON g.pk = generation_pk"
        f" WHERE run_pk = ? AND kind = ?{of_analyzer}"
        " AND number >= (SELECT coalesce(max(number), 0) FROM generation AS newest"
        " WHERE newest.run_pk = g.run_pk AND newest.analyzer = g.analyzer AND replaces <> 0)"
        " ORDER BY analyzer, number, output.pk",
        (run_pk, kind, *arguments),
    ).fetchall()
    first, left = len(rows), limit
    while first and (left is None or left > 0):
        first -= 1
        left = None if left is None else left - rows[first][3]
    for pk, its_analyzer, number, _ in rows[first:]:
        # Identity belongs to the generation, whoever made the records.
        origin = {
            "run_id": run_id,
            "writer_id": f"{its_analyzer}.{number}",
            "attempt": 0,
            "rank": 0,
        }
        (body,) = connection.execute("SELECT body FROM output WHERE pk = ?", (pk,)).fetchone()
        try:
            part, left_out, reason = make_rows(decode_body(body), origin, {})
        except (SchemaValidationError, *MALFORMED) as error:
            raise SessionStoreError(f"output {pk} of run {run_id} is damaged: {error}") from error
        if reason is not None:
            _log.warning(
                "output %d of run %s: %d records are left out: %s", pk, run_id, left_out, reason
            )
        yield part


def _encode(kind: str, records: Sequence[StreamRecord]) -> bytes:
    columns = {name: [getattr(record, name) for record in records] for name in column_types(kind)}
    return encode_columns(kind, len(records), columns)
