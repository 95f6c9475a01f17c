"""Reads runs and records back as columns, and generations of the outputs of analyzers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from quark_backends.store.batch_bodies import make_rows
from quark_backends.store.databases.connection import StoreConnection, close_with, writing
from quark_backends.store.reading import table_rows
from quark_backends.store.reading.table_rows import (
    ROW_SIZE,
    RUN_QUERY,
    RUN_TABLES,
    read_settings,
    read_stop,
    run_not_found,
    to_stored_run,
)
from quark_core.errors import (
    BackendUnavailable,
    RunNotFoundError,
    SchemaValidationError,
    SessionStoreError,
)
from quark_core.records.codec import MALFORMED, decode_body, encode_columns
from quark_core.records.schema import column_types

if TYPE_CHECKING:
    from quark_backends.store.reading.curves import MetricTails
    from quark_backends.store.reading.stored_rows import BlockCache, StoredRows, WriterRow
    from quark_core.backends.contract import Batch, Generation
    from quark_core.backends.curves import Cursor, CurveQuery, CurveSet, RunChanges, RunHeads
    from quark_core.backends.grids import Grid, GridQuery
    from quark_core.backends.run_pages import (
        PageSearch,
        RunConfiguration,
        RunLabel,
        RunNames,
        RunPage,
    )
    from quark_core.backends.run_summary import RunSummary, StoredRun
    from quark_core.backends.series import Series
    from quark_core.records import StreamRecord
    from quark_core.records.columns import Columns
    from quark_core.records.query import Query, RunSearch
    from quark_core.records.runs import StopRequest


P = ParamSpec("P")
T = TypeVar("T")


def _of_moment(
    function: Callable[Concatenate[StoreConnection, P], T],
) -> Callable[Concatenate[StoreReader, P], T]:
    """A method of a reader that asks its connection, at one moment of the store."""

    @wraps(function)
    def ask(self: StoreReader, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.begin() as connection:
            return function(connection, *args, **kwargs)

    return ask


class StoreReader:
    """Reads over connections of its own; may be used from any thread.

    Each read sees one moment of the store: every acknowledged record once,
    whether it is compacted or not.

    Args:
        connect: Opens a connection for reading.
        find_blocks: Gives what several readers keep of chunks; by default this one keeps its own.
        lock: Whoever is at the connection holds this; by default it is this reader's alone.
    """

    def __init__(
        self,
        connect: Callable[[], StoreConnection],
        find_blocks: Callable[[], BlockCache] | None = None,
        lock: threading.RLock | None = None,
    ) -> None:
        self._connect = connect
        self._find_blocks = find_blocks
        self._blocks: BlockCache | None = None
        self._tails: MetricTails | None = None
        self._connection: StoreConnection | None = None
        self._close_connection: Callable[[], object] | None = None
        self._rows: StoredRows | None = None
        self._lock = lock or threading.RLock()

    def close(self) -> None:
        """Give up the connection; a later read opens another."""
        with self._lock:
            if self._close_connection is not None:
                self._close_connection()
            self._connection = self._close_connection = self._rows = self._tails = None

    def met_backlog(self) -> bool:
        """Whether, since the last call, much was read that ought to be compacted."""
        with self._lock:
            if self._rows is None or not self._rows.met_backlog:
                return False
            self._rows.met_backlog = False
            return True

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """Rows of one kind that fit the query, in persistence order.

        Raises:
            RunNotFoundError: The store has no such run.
            SessionStoreError: The store cannot be read.
        """
        from quark_core.records.columns import Columns

        every = replace(query, limit=None)
        with self.begin() as connection:
            rows = self._stored_rows(connection)
            parts = [
                rows.load(writer, kind, every)
                for writer in find_writers(connection, run_id, query.rank)
            ]
        joined = Columns.concatenate(kind, [part for part in parts if part.count])
        return joined.keep_newest(query.limit)

    def read_series(
        self,
        run_id: str,
        key: str,
        *,
        max_points: int | None,
        all_attempts: bool = False,
        rank: int | None = None,
    ) -> Series:
        """One metric as a curve; see `SupportsSeries`."""
        from quark_backends.store.reading.curves import read_curve

        with self.begin() as connection:
            writers = find_writers(connection, run_id, rank)
            rows = self._stored_rows(connection)
            return read_curve(rows, writers, key, max_points, all_attempts)

    def read_series_many(self, run_id: str, query: CurveQuery) -> CurveSet:
        """Several metrics within a window; see `SupportsChanges`."""
        from quark_backends.store.reading.curves import MetricTails, read_curves
        from quark_backends.store.reading.incremental_reads import read_heads
        from quark_core.backends.curves import CurveSet

        with self.begin() as connection:
            writers = find_writers(connection, run_id)
            if self._tails is None:
                self._tails = MetricTails()
            curves = read_curves(
                self._stored_rows(connection),
                self._tails,
                self._block_cache(),
                writers,
                query,
            )
            heads = read_heads(self._stored_rows(connection), find_run(connection, run_id))
        return CurveSet(curves=curves, cursor=heads.cursor)

    def read_heads(self, run_id: str) -> RunHeads:
        """How far a run has come; see `SupportsChanges`."""
        from quark_backends.store.reading.incremental_reads import read_heads

        with self.begin() as connection:
            return read_heads(self._stored_rows(connection), find_run(connection, run_id))

    def read_changes(
        self,
        run_id: str,
        cursor: Cursor,
        *,
        kinds: Sequence[str],
        keys: Sequence[str] | None = None,
        all_attempts: bool = False,
        max_rows: int,
    ) -> RunChanges:
        """What came since a cursor; see `SupportsChanges`."""
        from quark_backends.store.reading.incremental_reads import read_changes

        with self.begin() as connection:
            return read_changes(
                self._stored_rows(connection),
                find_run(connection, run_id),
                find_writers(connection, run_id),
                cursor,
                kinds=kinds,
                keys=keys,
                all_attempts=all_attempts,
                max_rows=max_rows,
            )

    def read_grid(self, run_id: str, query: GridQuery) -> Grid:
        """A figure over rows and steps; see `SupportsGrid`."""
        from quark_backends.store.reading.curves import load_grid

        with self.begin() as connection:
            writers = find_writers(connection, run_id, query.rank)
            return load_grid(self._stored_rows(connection), writers, query)

    def iterate(self, run_id: str, kind: str, query: Query, *, rows: int) -> Iterator[Columns]:
        """What `read` returns, in parts; see `SupportsSeries`."""
        if query.limit is not None:
            found = self.read(run_id, kind, query)
            for start in range(0, found.count, rows):
                yield found.take(slice(start, start + rows))
            return

        from quark_backends.store.reading.incremental_reads import iterate_writer
        from quark_backends.store.reading.stored_rows import StoredRows

        with self._begin_apart() as connection:
            stored = StoredRows(connection)
            for writer in find_writers(connection, run_id, query.rank):
                yield from iterate_writer(stored, writer, kind, query, rows)

    def read_batches(
        self, run_id: str, writer_id: str, start: int, limit: int, limit_bytes: int | None = None
    ) -> list[Batch]:
        """A writer's batches from a number on, in order; see `SupportsReplay`.

        Args:
            run_id, writer_id, start, limit: As there.
            limit_bytes: Of so many bytes at most, or one that is larger; of any by default.
        """
        from quark_backends.store.reading.incremental_reads import replay_batches

        with self.begin() as connection:
            for writer in find_writers(connection, run_id):
                if writer.writer_id == writer_id:
                    return replay_batches(
                        connection,
                        self._stored_rows(connection),
                        writer,
                        start,
                        limit,
                        limit_bytes,
                    )
        return []

    def read_outputs(self, run_id: str, kind: str, analyzer: str | None = None) -> Columns:
        """Outputs of analyzers; see `SupportsGenerations`."""
        with self.begin() as connection:
            return read_outputs(connection, run_id, kind, analyzer)

    def iterate_outputs(
        self, run_id: str, kind: str, analyzer: str | None = None, *, limit: int | None = None
    ) -> Iterator[Columns]:
        """What `read_outputs` returns, of one analysis after the other; see `iterate_outputs`."""
        with self._begin_apart() as connection:
            yield from iterate_outputs(connection, run_id, kind, analyzer, limit)

    def load_run(self, run_id: str) -> StoredRun:
        """One run.

        Raises:
            RunNotFoundError: The store has no such run, or has it in the trash.
            SessionStoreError: The store cannot be read.
        """
        with self.begin() as connection:
            row = connection.execute(f"{RUN_QUERY} WHERE run.id = ?", (run_id,)).fetchone()
            find_run(connection, run_id)
        return to_stored_run(row)

    def find_stop(self, run_id: str) -> StopRequest | None:
        """See `SupportsEdits`."""
        with self.begin() as connection:
            row = connection.execute("SELECT stop FROM run WHERE id = ?", (run_id,)).fetchone()
        if row is None:
            raise run_not_found(run_id)
        return read_stop(row[0])

    def list_runs(
        self,
        *,
        project: str | None = None,
        limit: int | None = None,
        store_name: str | None = None,
        after: tuple[int, str] | None = None,
    ) -> list[StoredRun]:
        """Runs, newest first.

        Args:
            project: Only those of this project.
            limit: At most so many.
            store_name: Only those that were started for a storage root of this label.
            after: When the last run of the page before was made, in microseconds, and
                its id: only those that come after it.
        """
        listed = _list_newest(project, limit, store_name, after)
        with self.begin() as connection:
            rows = connection.execute(f"{RUN_QUERY} {listed[0]}", listed[1]).fetchall()
        return [to_stored_run(row) for row in rows]

    def measure_runs(
        self,
        *,
        project: str | None = None,
        limit: int | None = None,
        store_name: str | None = None,
        after: tuple[int, str] | None = None,
    ) -> list[int]:
        """About how many bytes each of the runs has that `list_runs` returns."""
        listed = _list_newest(project, limit, store_name, after)
        sql = f"SELECT {ROW_SIZE} FROM {RUN_TABLES} {listed[0]}"
        with self.begin() as connection:
            return [size for (size,) in connection.execute(sql, listed[1])]

    list_groups = _of_moment(table_rows.list_groups)
    load_group = _of_moment(table_rows.load_group)
    load_project = _of_moment(table_rows.load_project)
    list_sweeps = _of_moment(table_rows.list_sweeps)
    load_sweep = _of_moment(table_rows.load_sweep)
    list_trials = _of_moment(table_rows.list_trials)
    read_entries = _of_moment(table_rows.read_entries)

    def list_configurations(
        self, *, project: str | None = None, limit: int | None = None
    ) -> list[RunConfiguration]:
        """See `SupportsConfigurations`."""
        from quark_core.backends.run_pages import RunConfiguration as Configuration

        sql = "SELECT run.id, archived_us, config FROM run WHERE trashed_us IS NULL"
        arguments = list[str | int]()
        if project is not None:
            # An equality, so that an index has them in order.
            sql += " AND project_id = (SELECT id FROM project WHERE name = ?)"
            arguments.append(project)
        sql += " ORDER BY run.created_us DESC, run.pk DESC"
        if limit is not None:
            sql += " LIMIT ?"
            arguments.append(limit)
        with self.begin() as connection:
            rows = connection.execute(sql, arguments).fetchall()
        return [
            Configuration(run_id, archived_us is not None, read_settings(config))
            for run_id, archived_us, config in rows
        ]

    def list_labels(self, beginning: str, limit: int | None) -> list[RunLabel]:
        """See `SupportsLabels`."""
        from quark_core.backends.run_pages import RunLabel as Label

        # All ids are ASCII, so that the next character ends what begins so.
        sql = (
            "SELECT run.id, project.name, run.name, status FROM run JOIN project ON project.id = "
            "project_id WHERE run.id >= ? AND run.id < ? AND trashed_us IS NULL ORDER BY "
            "run.created_us DESC, run.pk DESC"
        )
        arguments: list[str | int] = [beginning, f"{beginning}\x7f"]
        if limit is not None:
            sql += " LIMIT ?"
            arguments.append(limit)
        with self.begin() as connection:
            return [Label(*row) for row in connection.execute(sql, arguments).fetchall()]

    def search(self, search: RunSearch, store_name: str | None = None) -> list[RunSummary]:
        """The runs that fit; see `iterate_search`."""
        from quark_backends.store.reading.search import iterate_search

        with self.begin() as connection:
            return list(iterate_search(connection, search, store_name))

    def iterate_search(
        self, search: RunSearch, store_name: str | None = None, *, start: int = 0
    ) -> Generator[RunSummary, None, None]:
        """Yield the runs that `search` returns, a few at a time in memory."""
        from quark_backends.store.reading.search import iterate_search

        with self._begin_apart() as connection:
            yield from iterate_search(connection, search, store_name, start=start)

    def search_page(self, page: PageSearch, store_name: str | None = None) -> RunPage:
        """One page of the runs that fit; see `load_page`."""
        from quark_backends.store.reading.run_pages import load_page

        with self.begin() as connection:
            return load_page(connection, page, store_name)

    def list_names(
        self, project: str | None, text: str, limit: int, store_name: str | None = None
    ) -> RunNames:
        """The names that runs have; see `SupportsPages`."""
        from quark_backends.store.reading.run_pages import load_names

        with self.begin() as connection:
            return load_names(connection, project, text, limit, store_name)

    def summarize(self, run_id: str) -> RunSummary:
        """One run with its metrics summed up, in the trash or not."""
        from quark_backends.store.reading.search import summarize

        with self.begin() as connection:
            return summarize(connection, run_id)

    @contextmanager
    def _begin_apart(self) -> Iterator[StoreConnection]:
        """A transaction over a connection of its own: it lasts as long as whoever iterates."""
        connection = self._connect()
        try:
            connection.begin_read()
            yield connection
        except connection.Error as error:
            raise SessionStoreError(f"{connection.store_name} cannot be read: {error}") from error
        finally:
            connection.close()

    @contextmanager
    def begin(self) -> Iterator[StoreConnection]:
        """A transaction for reading, of one thread at a time."""
        with self._lock, self._moment() as connection:
            yield connection

    def _stored_rows(self, connection: StoreConnection) -> StoredRows:
        from quark_backends.store.reading.stored_rows import StoredRows

        if self._rows is None:
            self._rows = StoredRows(connection)
        self._rows.connection = connection
        return self._rows

    def _block_cache(self) -> BlockCache:
        if self._find_blocks is not None:
            return self._find_blocks()
        if self._blocks is None:
            from quark_backends.store.reading.stored_rows import BlockCache

            self._blocks = BlockCache()
        return self._blocks

    @contextmanager
    def _moment(self) -> Iterator[StoreConnection]:
        """A transaction for reading: what is committed meanwhile does not show."""
        connection = self._connection
        if connection is None:
            connection = self._connection = self._connect()
            self._close_connection = close_with(self, connection.close, self._lock)
        try:
            connection.begin_read()
            try:
                yield connection
            finally:
                connection.commit()
        except connection.Error as error:
            raise SessionStoreError(f"{connection.store_name} cannot be read: {error}") from error
        finally:
            if connection.is_shared:
                # Others may have it meanwhile; what was read last is kept without it.
                assert self._close_connection is not None
                self._close_connection()
                self._connection = self._close_connection = None


def _list_newest(
    project: str | None, limit: int | None, store_name: str | None, after: tuple[int, str] | None
) -> tuple[str, list[str | int]]:
    """The end of a statement over runs, newest first, as `StoreReader.list_runs` has it."""
    sql, arguments = "WHERE trashed_us IS NULL", list[str | int]()
    if after is not None:
        # A run that is gone since leaves its moment, so that the list goes on behind it.
        sql += (
            " AND run.created_us <= ? AND (run.created_us < ? OR run.pk <"
            " (SELECT coalesce(min(last.pk), -1) FROM run AS last WHERE last.id = ?))"
        )
        arguments += [after[0], after[0], after[1]]
    for column, wanted in (("project.name", project), ("store_name", store_name)):
        if wanted is not None:
            sql += f" AND {column} = ?"
            arguments.append(wanted)
    sql += " ORDER BY run.created_us DESC, run.pk DESC"
    if limit is not None:
        sql += " LIMIT ?"
        arguments.append(limit)
    return sql, arguments


def find_run(connection: StoreConnection, run_id: str, *, for_update: bool = False) -> int:
    """Number of a run.

    Args:
        connection: The store.
        run_id: The run.
        for_update: Whether nobody else may write it until the transaction ends.

    Raises:
        RunNotFoundError: There is none, or it is in the trash.
    """
    lock = connection.for_update if for_update else ""
    row = connection.execute(
        f"SELECT pk, trashed_us FROM run WHERE id = ?{lock}", (run_id,)
    ).fetchone()
    if row is None:
        raise run_not_found(run_id)
    if row[1] is not None:
        raise RunNotFoundError(
            f"run_id {run_id}: this run is in the trash; `quark restore {run_id}` restores it"
        )
    return int(row[0])


def find_writers(
    connection: StoreConnection, run_id: str, rank: int | None = None
) -> list[WriterRow]:
    """The writers of a run, or of one of its ranks, in persistence order.

    Raises:
        RunNotFoundError: There is no such run, or it is in the trash.
    """
    from quark_backends.store.reading.attempt_progress import load_attempt_writers
    from quark_backends.store.reading.stored_rows import WriterRow

    run_pk = find_run(connection, run_id)
    rows = connection.execute(
        "SELECT pk, id, attempt, rank, hidden_step FROM writer WHERE run_pk = ?"
        " ORDER BY attempt, rank, started_us, id",
        (run_pk,),
    ).fetchall()
    goes_on = len({row[2] for row in rows}) > 1
    others = tuple(load_attempt_writers(connection, run_pk)) if goes_on else ()
    writers = [
        WriterRow(pk, run_id, writer_id, attempt, its_rank, hidden_step, others)
        for pk, writer_id, attempt, its_rank, hidden_step in rows
    ]
    return [writer for writer in writers if rank in (None, writer.rank)]


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
                    f"outputs[{kind!r}] must contain {kind} records of run {generation.run_id}, "
                    f"not {record.KIND} records of run {record.run_id}"
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
        "SELECT output.pk, analyzer, number, output.count FROM output JOIN generation AS g ON "
        f"g.pk = generation_pk WHERE run_pk = ? AND kind = ?{of_analyzer} AND number >= (SELECT "
        "coalesce(max(number), 0) FROM generation AS newest WHERE newest.run_pk = g.run_pk AND "
        "newest.analyzer = g.analyzer AND replaces <> 0) ORDER BY analyzer, number, output.pk",
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
                "output %d of run %s: %d records are omitted: %s", pk, run_id, left_out, reason
            )
        yield part


def _encode(kind: str, records: Sequence[StreamRecord]) -> bytes:
    columns = {name: [getattr(record, name) for record in records] for name in column_types(kind)}
    return encode_columns(kind, len(records), columns)
