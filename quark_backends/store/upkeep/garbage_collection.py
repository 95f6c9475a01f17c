"""Removes trashed runs for good, and gives free pages back to the disk, in short steps."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from quark_backends.store.databases.connection import SqliteConnection, StoreConnection
from quark_backends.store.databases.layout import StoreLayout
from quark_backends.store.databases.write_ahead_log import empty_log
from quark_backends.store.upkeep.usage import (
    find_journals,
    find_journals_elsewhere,
    find_trashed,
    is_written,
    list_paths,
    measure_present,
    measure_schema,
    measure_tree,
    trash_path,
)
from quark_core.backends.edits import Collection, CollectionProgress, RunUsage
from quark_core.delivery.crash_buffer import remove_black_box
from quark_core.delivery.crash_buffer_recovery import find_black_box
from quark_core.records import parse_time
from quark_core.records.names import ARTIFACT_STORAGE_LAYOUT
from quark_core.system.process import ProcessIdentity, find_lost_reason

_STEP_S = 0.02
_SHORTEST_PAUSE_S = 0.002
_LEAST_BYTES = 64 * 1024
_MOST_BYTES = 16 * 1024 * 1024
_PAGES_AT_ONCE = 16


class Stopped(Exception):
    """Whoever asked for the work wants no further step of it now."""


class StepPace:
    """Short transactions with pauses between them, so that others can write beside.

    Where nobody may stop the work, steps follow each other in one transaction
    until it has held the lock for a while: a pause after each of very many small
    ones would take longest of all. How much a step may do follows from how long
    the last one took.

    Args:
        connection: In autocommit mode; for one thread.
        should_stop: Asked before each step but the first: whoever asks again gets on.
    """

    def __init__(
        self, connection: StoreConnection, should_stop: Callable[[], bool] | None = None
    ) -> None:
        self._connection = connection
        self._should_stop = should_stop
        self._has_begun = False
        self._joins_steps = should_stop is None and not connection.is_shared
        self._begun_s = 0.0
        self.step_bytes = 1024 * 1024

    @contextmanager
    def step(self, *, is_work: bool = True) -> Iterator[int]:
        """Part of a transaction, which may change about so many bytes.

        It is committed by a later step, or by `finish`; what fails takes back what
        was not committed, each step of which leaves a whole store.

        Args:
            is_work: Whether it brings the work forward. What is done anew whenever
                the work goes on does not, so none is stopped before or for it.

        Raises:
            Stopped: There is to be no further one; nothing was begun.
        """
        if is_work:
            if self._has_begun and self._should_stop is not None and self._should_stop():
                raise Stopped
            self._has_begun = True
        if not self._connection.in_transaction:
            self._connection.begin_write()
            self._begun_s = time.monotonic()
        step_s = time.monotonic()
        try:
            yield self.step_bytes
        except BaseException:
            self._connection.rollback()
            raise
        now_s = time.monotonic()
        if now_s - step_s > _STEP_S:
            self.step_bytes = max(_LEAST_BYTES, self.step_bytes // 2)
        elif now_s - step_s < _STEP_S / 4:
            self.step_bytes = min(_MOST_BYTES, self.step_bytes * 2)
        if not self._joins_steps or now_s - self._begun_s >= _STEP_S / 2:
            self.finish()

    def finish(self) -> None:
        """Commit what the steps so far have done, and give others their turn."""
        if not self._connection.in_transaction:
            return
        try:
            self._connection.commit()
        except BaseException:
            self._connection.rollback()
            raise
        time.sleep(max(_SHORTEST_PAUSE_S, time.monotonic() - self._begun_s))


def give_space_back(
    connection: sqlite3.Connection,
    pace: StepPace,
    on_progress: CollectionProgress | None = None,
) -> None:
    """Make the database's files smaller by what they hold in vain.

    Args:
        connection: In no transaction.
        pace: How steps are taken.
        on_progress: See `SupportsRemoval`.
    """
    pace.finish()
    if _read(connection, "freelist_count"):
        _vacuum_in_steps(connection, pace, on_progress)
    pace.finish()
    # The file is then as short as it can be.
    empty_log(connection)


def _vacuum_in_steps(
    connection: sqlite3.Connection, pace: StepPace, on_progress: CollectionProgress | None
) -> None:
    page_bytes = _read(connection, "page_size")
    total = _read(connection, "freelist_count")
    done = 0
    # Pages that others free meanwhile are left to the next time, or this might never end.
    while done < total:
        with pace.step():
            before = _read(connection, "page_count")
            stop_s = time.monotonic() + _STEP_S
            while done < total and time.monotonic() < stop_s:
                # One by one: Python's driver stops at the first page of several.
                for _ in range(min(_PAGES_AT_ONCE, total - done)):
                    connection.execute("PRAGMA incremental_vacuum(1)")
                    done += 1
            if _read(connection, "page_count") == before:
                return
        if on_progress is not None:
            on_progress("freeing disk space", done * page_bytes, total * page_bytes)


def _read(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


# Removes trashed runs for good, in steps that keep no training waiting.
#
# For each run: its tombstone (`removed`), then its rows, then its files. Rows go
# in transactions of some milliseconds, with a pause after each that is as long.
# Every step leaves a whole store, so whatever ends this, the next call goes on
# from there.
#
# The highest number of `run` and of `writer` is kept, in a row without content,
# until there is a higher one: SQLite would give it out again, and a process that
# still has it in mind would take one run's rows for another's. PostgreSQL's are
# drawn at random, and its foreign keys leave no row without its run.

_STEP_ROWS = 1000
_MEASURED_AT_ONCE = 50
# So many tombstones are up before the first of their runs goes.
_RUNS_AT_ONCE = 64
_SCRATCH_AGE_S = 3600.0

# Tables of rows with a body, which hang on a writer, with what tells the rows of one writer apart.
_WRITER_TABLES = {"batch": "pk", "chunk": "pk", "frame": "first_number", "damaged": "pk"}
# Tables of small rows, which hang on a run, with what tells the rows of one run apart.
_RUN_TABLES = {
    "run_metric": "name_pk",
    "run_config": "key",
    "run_field": "key",
    "run_fingerprint": "key",
    "run_group_member": "path",
    "run_tag": "tag",
    "attempt": "number",
}
_GONE = "run_pk NOT IN (SELECT pk FROM run WHERE trashed_us IS NULL OR run_path != '')"


class TrashCollector:
    """One collection over one connection, which is in no transaction.

    Args:
        connection: For writing; for reading where there is only a plan to make.
        layout: Where the store lies; None for one without files, in PostgreSQL.
        on_progress: See `SupportsRemoval`.
        should_stop: Asked before each step: for a server, whose requests have an end.

    Attributes:
        removed: What it has removed.
        is_stopped: Whether it was stopped before the end.
    """

    def __init__(
        self,
        connection: StoreConnection,
        layout: StoreLayout | None,
        on_progress: CollectionProgress | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self._connection = connection
        self._layout = layout
        self._pace = StepPace(connection, should_stop)
        self._in_steps = should_stop is not None
        self._on_progress = on_progress
        self._elsewhere = {} if layout is None else find_journals_elsewhere(layout)
        self._done_bytes = self._total_bytes = 0
        # Of SQLite alone: see above.
        self._spare = "" if connection.is_shared else "AND pk < (SELECT MAX(pk) FROM {})"
        self.removed: list[RunUsage] = []
        self.is_stopped = False

    def plan(self, older_than_s: float, run_ids: Sequence[str] | None = None) -> Collection:
        """What `collect` would do."""
        skipped: dict[str, str] = {}
        trashed = self._find_trashed(run_ids)
        chosen = self._choose(trashed, older_than_s, skipped)
        store_bytes = self._measure_store()
        return Collection(
            runs=tuple(chosen),
            skipped=skipped,
            leftovers={str(path): measure_tree(path) for path in self._find_leftovers()},
            before_bytes=store_bytes,
            after_bytes=store_bytes,
        )

    def collect(self, older_than_s: float, run_ids: Sequence[str] | None = None) -> Collection:
        """Remove, for good, what has been in the trash for so long, and give the space back.

        Args:
            older_than_s: For how long.
            run_ids: Only these, and what was begun before; all by default.
        """
        before_bytes = self._measure_store()
        if not self._connection.is_shared:
            # A commit that a power loss takes back is only done again: none waits for the disk.
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute("PRAGMA secure_delete=FAST")
        skipped: dict[str, str] = {}
        leftovers: dict[str, int] = {}
        trashed = self._find_trashed(run_ids)
        # Who may be stopped measures no more than it is likely to come to.
        at_once = _MEASURED_AT_ONCE if self._in_steps else max(1, len(trashed))
        try:
            for start in range(0, len(trashed), at_once):
                part = trashed[start : start + at_once]
                self._remove(self._choose(part, older_than_s, skipped), skipped)
            for path in self._find_leftovers():
                leftovers[str(path)] = self._delete_files(path)
            self._clear_up()
        except Stopped:
            self.is_stopped = True
        return Collection(
            runs=tuple(self.removed),
            skipped=skipped,
            leftovers=leftovers,
            before_bytes=before_bytes,
            after_bytes=self._measure_store(),
        )

    def _remove(self, chosen: list[RunUsage], skipped: dict[str, str]) -> None:
        self._total_bytes += sum(usage.total_bytes for usage in chosen)
        # Who may be stopped has whole runs done by then.
        at_once = 1 if self._in_steps else _RUNS_AT_ONCE
        for start in range(0, len(chosen), at_once):
            self._remove_group(chosen[start : start + at_once], skipped)

    def _remove_group(self, chosen: list[RunUsage], skipped: dict[str, str]) -> None:
        buried = [(usage, self._bury(usage.run_id, skipped)) for usage in chosen]
        # No process may begin one of them anew of which nothing is in any table any more.
        self._pace.finish()
        removed = [(usage, run_pk) for usage, run_pk in buried if run_pk is not None]
        for _, run_pk in removed:
            self._delete_run(run_pk)
        # Files go last: as long as they are there, it is known what they are of.
        self._pace.finish()
        for usage, _ in removed:
            for path in self._find_files(usage.run_id):
                self._delete_files(path)
            self.removed.append(usage)

    def _clear_up(self) -> None:
        """Give back what the removed runs held."""
        if self._layout is None:
            return
        assert isinstance(self._connection, SqliteConnection)
        with suppress(OSError):
            (self._layout.root / "trash").rmdir()
        self._sweep_orphans()
        give_space_back(self._connection, self._pace, self._on_progress)

    def _measure_store(self) -> int:
        if self._layout is not None:
            return measure_tree(self._layout.root)
        return measure_schema(self._connection)

    def _find_trashed(self, run_ids: Sequence[str] | None) -> list[str]:
        found = find_trashed(self._connection)
        if run_ids is None:
            return found
        wanted = {*run_ids, *self._list("SELECT run_id FROM removed")}
        return [run_id for run_id in found if run_id in wanted]

    def _choose(
        self, trashed: list[str], older_than_s: float, skipped: dict[str, str]
    ) -> list[RunUsage]:
        """Those to remove of some runs; `skipped` gets those that cannot be now, and why."""
        newest_us = time.time_ns() // 1000 - int(older_than_s * 1e6)
        begun = set(self._list("SELECT run_id FROM removed"))
        chosen = []
        for usage in measure_present(self._connection, self._layout, trashed):
            if usage.run_id not in begun:
                if usage.trashed_at is None or parse_time(usage.trashed_at) > newest_us:
                    continue
                if usage.state == "running":
                    skipped[usage.run_id] = "it is running again"
                    continue
                if any(is_written(path) for path in self._find_files(usage.run_id)):
                    skipped[usage.run_id] = "a process is still writing its journal"
                    continue
            chosen.append(usage)
        return chosen

    def _bury(self, run_id: str, skipped: dict[str, str]) -> int | None:
        """Put up a run's tombstone; its number, or None where it is to stay after all."""
        with self._pace.step(is_work=False):
            row = self._connection.execute(
                "SELECT pk, status, process, heartbeat_us, trashed_us, EXISTS (SELECT 1 FROM "
                f"removed WHERE run_id = id) FROM run WHERE id = ?{self._connection.for_update}",
                (run_id,),
            ).fetchone()
            if row is None or row[4] is None:
                skipped[run_id] = "another process restored or deleted it first"
                return None
            run_pk, status, process, heartbeat_us, _, begun = row
            identity = msgspec.json.decode(process, type=ProcessIdentity)
            alive = status == "running" and not find_lost_reason(status, identity, heartbeat_us)
            if alive and not begun:
                skipped[run_id] = "it is running again"
                return None
            self._connection.execute(
                "INSERT INTO removed (run_id, removed_us) VALUES (?, ?)"
                " ON CONFLICT (run_id) DO NOTHING",
                (run_id, time.time_ns() // 1000),
            )
            return int(run_pk)

    def _delete_run(self, run_pk: int) -> None:
        """Delete the rows of a run and, when none is left, the run."""
        gone = False
        while not gone:
            for writer_pk in self._list("SELECT pk FROM writer WHERE run_pk = ?", run_pk):
                self._delete_bodies_of_writer(writer_pk)
            for generation_pk in self._list("SELECT pk FROM generation WHERE run_pk = ?", run_pk):
                self._delete_bodies("output", "pk", "generation_pk", generation_pk)
            for table, key in _RUN_TABLES.items():
                self._delete_small(table, key, run_pk)
            gone = self._delete_head(run_pk)

    def _delete_head(self, run_pk: int) -> bool:
        """Delete a run of which nothing else is left; False where something has come meanwhile."""
        execute = self._connection.execute
        parts = [f"SELECT 1 FROM {table} WHERE writer_pk = writer.pk" for table in _WRITER_TABLES]
        filled = " OR ".join(f"EXISTS ({part})" for part in parts)
        with self._pace.step():
            # Who writes it waits, and then finds that there is no such run.
            execute(f"SELECT pk FROM run WHERE pk = ?{self._connection.for_update}", (run_pk,))
            if execute(
                f"SELECT 1 FROM writer WHERE run_pk = ? AND ({filled})", (run_pk,)
            ).fetchone():
                return False
            self._delete_writers("run_pk = ?", run_pk)
            execute(
                "DELETE FROM output WHERE generation_pk IN"
                " (SELECT pk FROM generation WHERE run_pk = ?)",
                (run_pk,),
            )
            for table in ("generation", *_RUN_TABLES):
                execute(f"DELETE FROM {table} WHERE run_pk = ?", (run_pk,))
            if not self._spare:
                execute("DELETE FROM run WHERE pk = ?", (run_pk,))
                return True
            execute(
                # What comes late for it must not find it by its id.
                "UPDATE run SET id = 'removed ' || pk, run_path = '', name = NULL, notes = NULL,"
                " git_commit = NULL, tags = '[]', config = NULL, environment = NULL,"
                " parent_run_id = NULL, lineage_root_run_id = NULL WHERE pk = ?",
                (run_pk,),
            )
            execute(f"DELETE FROM run WHERE pk = ? {self._spare.format('run')}", (run_pk,))
            return True

    def _delete_writers(self, which: str, *arguments: Any) -> None:
        """Delete writers that have no rows, in the open transaction."""
        execute = self._connection.execute
        execute(
            f"DELETE FROM hidden WHERE writer_pk IN (SELECT pk FROM writer WHERE {which})",
            arguments,
        )
        execute(f"DELETE FROM writer WHERE {which} {self._spare.format('writer')}", arguments)

    def _delete_bodies_of_writer(self, writer_pk: int) -> None:
        for table, key in _WRITER_TABLES.items():
            self._delete_bodies(table, key, "writer_pk", writer_pk)

    def _delete_bodies(self, table: str, key: str, column: str, value: int) -> None:
        """Delete the rows of one writer or generation, some at a time."""
        query = f"SELECT {key}, length(body) FROM {table} WHERE {column} = ? LIMIT {_STEP_ROWS}"
        while self._connection.execute(query, (value,)).fetchone():
            with self._pace.step() as step_bytes:
                taken, size_bytes = [], 0
                for number, length in self._connection.execute(query, (value,)).fetchall():
                    taken.append((value, number))
                    size_bytes += length
                    if size_bytes >= step_bytes:
                        break
                self._connection.executemany(
                    f"DELETE FROM {table} WHERE {column} = ? AND {key} = ?", taken
                )
            self._report(size_bytes)

    def _delete_small(self, table: str, key: str, run_pk: int) -> None:
        """Delete a run's rows of numbers and short texts, where they are many."""
        found = f"SELECT {key} FROM {table} WHERE run_pk = ? LIMIT {_STEP_ROWS}"
        while len(self._list(found, run_pk)) == _STEP_ROWS:
            with self._pace.step():
                self._connection.execute(
                    f"DELETE FROM {table} WHERE run_pk = ? AND {key} IN ({found})",
                    (run_pk, run_pk),
                )

    def _sweep_orphans(self) -> None:
        """Delete rows whose run or writer is gone: what came in while they were removed."""
        for writer_pk in self._list(f"SELECT pk FROM writer WHERE {_GONE}"):
            self._delete_bodies_of_writer(writer_pk)
        for table, key in _WRITER_TABLES.items():
            for writer_pk in self._list(
                f"SELECT DISTINCT writer_pk FROM {table}"
                " WHERE writer_pk NOT IN (SELECT pk FROM writer)"
            ):
                self._delete_bodies(table, key, "writer_pk", writer_pk)
        for generation_pk in self._list(f"SELECT pk FROM generation WHERE {_GONE}"):
            self._delete_bodies("output", "pk", "generation_pk", generation_pk)
        for table, key in _RUN_TABLES.items():
            for run_pk in self._list(f"SELECT DISTINCT run_pk FROM {table} WHERE {_GONE}"):
                self._delete_small(table, key, run_pk)
        execute = self._connection.execute
        with self._pace.step(is_work=False):
            self._delete_writers(_GONE)
            execute("DELETE FROM hidden WHERE writer_pk NOT IN (SELECT pk FROM writer)")
            for table in ("generation", *_RUN_TABLES):
                execute(f"DELETE FROM {table} WHERE {_GONE}")
            execute(
                "DELETE FROM run WHERE trashed_us NOTNULL AND run_path = ''"
                " AND pk < (SELECT MAX(pk) FROM run)"
            )
        self._pace.finish()

    def _find_files(self, run_id: str) -> list[Path]:
        """What a run has on disk."""
        if self._layout is None:
            return []
        paths = [trash_path(self._layout, run_id), self._layout.run_path(run_id)]
        paths += self._elsewhere.get(run_id, [])
        return [path for path in paths if os.path.lexists(path)]

    def _find_leftovers(self) -> list[Path]:
        """Files of runs that are removed already, and of stores that were never finished."""
        if self._layout is None:
            return []
        gone = set(
            self._list("SELECT run_id FROM removed WHERE run_id NOT IN (SELECT id FROM run)")
        )
        root = self._layout.root
        found = [
            path
            for folder in (root / "trash", root / "runs")
            for path in list_paths(folder)
            if path.name in gone and not is_written(path)
        ]
        for run_id, paths in self._elsewhere.items():
            if run_id in gone:
                found += [path for path in paths if not is_written(path)]
        oldest_s = time.time() - _SCRATCH_AGE_S
        for path in (
            *list_paths(root.parent, f"{root.name}-new-"),
            *list_paths(root, f"{self._layout.db_path.name}.new"),
            *list_paths(root, f"{self._layout.marker.name}.new"),
        ):
            if _find_age_time(path) < oldest_s:
                found.append(path)
        for run_path in list_paths(root / "runs"):
            # Payloads that a killed process had begun.
            partial = list_paths(run_path / ARTIFACT_STORAGE_LAYOUT["partial"])
            found += [path for path in partial if _find_age_time(path) < oldest_s]
        return found

    def _delete_files(self, path: Path) -> int:
        """Delete a file or a folder with all that is in it; how many bytes it had."""
        size_bytes = measure_tree(path)
        for folder, manifest in find_journals(path):
            with suppress(OSError):
                box = find_black_box(folder, manifest)
                if box is not None:
                    # It lies in shared memory, and would stay until the machine is restarted.
                    remove_black_box(box)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        self._report(size_bytes)
        return size_bytes

    def _list(self, query: str, *arguments: Any) -> list[Any]:
        return [row[0] for row in self._connection.execute(query, arguments).fetchall()]

    def _report(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        if self._on_progress is not None:
            total_bytes = max(self._done_bytes, self._total_bytes)
            self._on_progress("removing runs", self._done_bytes, total_bytes)


def _find_age_time(path: Path) -> float:
    """When anything in a folder changed last."""
    try:
        return max(p.lstat().st_mtime for p in (path, *list_paths(path)))
    except OSError:
        return time.time()
