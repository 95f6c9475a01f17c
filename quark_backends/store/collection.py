"""Removes trashed runs for good, in steps that keep no training waiting.

For each run: its tombstone (`removed`), then its rows, then its files. Rows go
in transactions of some milliseconds, with a pause after each that is as long.
Every step leaves a whole store, so whatever ends this, the next call goes on
from there.

The highest number of `run` and of `writer` is kept, in a row without content,
until there is a higher one: SQLite would give it out again, and a process that
still has it in mind would take one run's rows for another's.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from quark_backends.store.free_space import StepPace, give_space_back
from quark_backends.store.layout import StoreLayout
from quark_backends.store.run_files import (
    find_journals,
    find_journals_elsewhere,
    is_written,
    list_paths,
    trash_path,
)
from quark_backends.store.sizes import list_trash, measure_tree
from quark_core.artifacts.layout import ARTIFACT_STORAGE_LAYOUT
from quark_core.keeping import Collection, CollectionProgress, RunUsage
from quark_core.liveness import find_lost_reason
from quark_core.process import ProcessIdentity
from quark_core.records import parse_time

__all__ = ["TrashCollector"]

_STEP_ROWS = 1000
_SCRATCH_AGE_S = 3600.0

# Tables of rows with a body, which hang on a writer.
_WRITER_TABLES = ("batch", "chunk", "frame", "damaged")
# Tables of small rows, which hang on a run, with what tells the rows of one run apart.
_RUN_TABLES = {"run_metric": "name_pk", "run_config": "key", "run_tag": "tag", "attempt": "number"}
_GONE = "run_pk NOT IN (SELECT pk FROM run WHERE trashed_us IS NULL OR run_path != '')"


class TrashCollector:
    """One collection over one connection, which is in no transaction.

    Args:
        connection: For writing; for reading where there is only a plan to make.
        layout: Where the store lies.
        on_progress: See `SupportsRemoval`.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        layout: StoreLayout,
        on_progress: CollectionProgress | None = None,
    ) -> None:
        self._connection = connection
        self._layout = layout
        self._pace = StepPace(connection)
        self._on_progress = on_progress
        self._elsewhere = find_journals_elsewhere(layout)
        self._done_bytes = self._total_bytes = 0

    def plan(self, older_than_s: float) -> Collection:
        """What `collect` would do."""
        chosen, skipped = self._choose(older_than_s)
        store_bytes = measure_tree(self._layout.root)
        return Collection(
            runs=tuple(chosen),
            skipped=skipped,
            leftovers={str(path): measure_tree(path) for path in self._find_leftovers()},
            before_bytes=store_bytes,
            after_bytes=store_bytes,
        )

    def collect(self, older_than_s: float) -> Collection:
        """Remove, for good, what has been in the trash for so long, and give the space back."""
        before_bytes = measure_tree(self._layout.root)
        # A commit that a power loss takes back is only done again, so none waits for the disk.
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.execute("PRAGMA secure_delete=FAST")
        chosen, skipped = self._choose(older_than_s)
        self._total_bytes = sum(usage.total_bytes for usage in chosen)
        removed = []
        for usage in chosen:
            run_pk = self._bury(usage.run_id, skipped)
            if run_pk is not None:
                self._delete_run(run_pk)
                for path in self._find_files(usage.run_id):
                    self._delete_files(path)
                removed.append(usage)
        leftovers = {str(path): self._delete_files(path) for path in self._find_leftovers()}
        with suppress(OSError):
            (self._layout.root / "trash").rmdir()
        self._sweep_orphans()
        notes = give_space_back(self._connection, self._layout, self._pace, self._on_progress)
        return Collection(
            runs=tuple(removed),
            skipped=skipped,
            leftovers=leftovers,
            before_bytes=before_bytes,
            after_bytes=measure_tree(self._layout.root),
            notes=notes,
        )

    def _choose(self, older_than_s: float) -> tuple[list[RunUsage], dict[str, str]]:
        """The runs to remove, and those that cannot be removed now, with the reason."""
        newest_us = time.time_ns() // 1000 - int(older_than_s * 1e6)
        begun = set(self._list("SELECT run_id FROM removed"))
        chosen, skipped = [], {}
        for usage in list_trash(self._connection, self._layout):
            if usage.run_id not in begun:
                if usage.trashed_at is None or parse_time(usage.trashed_at) > newest_us:
                    continue
                if usage.state == "running":
                    skipped[usage.run_id] = "it is alive again"
                    continue
                if any(is_written(path) for path in self._find_files(usage.run_id)):
                    skipped[usage.run_id] = "a process still writes its journal"
                    continue
            chosen.append(usage)
        return chosen, skipped

    def _bury(self, run_id: str, skipped: dict[str, str]) -> int | None:
        """Put up a run's tombstone; its number, or None where it is to stay after all."""
        with self._pace.step():
            row = self._connection.execute(
                "SELECT pk, status, process, heartbeat_us, trashed_us,"
                " EXISTS (SELECT 1 FROM removed WHERE run_id = id) FROM run WHERE id = ?",
                (run_id,),
            ).fetchone()
            if row is None or row[4] is None:
                skipped[run_id] = "another process was first to restore or to remove it"
                return None
            run_pk, status, process, heartbeat_us, _, begun = row
            identity = msgspec.json.decode(process, type=ProcessIdentity)
            alive = status == "running" and not find_lost_reason(status, identity, heartbeat_us)
            if alive and not begun:
                skipped[run_id] = "it is alive again"
                return None
            self._connection.execute(
                "INSERT OR IGNORE INTO removed (run_id, removed_us) VALUES (?, ?)",
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
                self._delete_bodies("output", "generation_pk", generation_pk)
            for table, key in _RUN_TABLES.items():
                self._delete_small(table, key, run_pk)
            gone = self._delete_head(run_pk)

    def _delete_head(self, run_pk: int) -> bool:
        """Delete a run of which nothing else is left; False where something has come meanwhile."""
        execute = self._connection.execute
        parts = [f"SELECT 1 FROM {table} WHERE writer_pk = writer.pk" for table in _WRITER_TABLES]
        filled = " OR ".join(f"EXISTS ({part})" for part in parts)
        with self._pace.step():
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
            execute(
                # What comes late for it must not find it by its id.
                "UPDATE run SET id = 'removed ' || pk, run_path = '', name = NULL, notes = NULL,"
                " git_commit = NULL, tags = '[]', config = NULL, environment = NULL,"
                " parent_run_id = NULL, lineage_root_run_id = NULL WHERE pk = ?",
                (run_pk,),
            )
            execute("DELETE FROM run WHERE pk = ? AND pk < (SELECT MAX(pk) FROM run)", (run_pk,))
            return True

    def _delete_writers(self, which: str, *arguments: Any) -> None:
        """Delete writers that have no rows, in the open transaction."""
        execute = self._connection.execute
        execute(
            f"DELETE FROM hidden WHERE writer_pk IN (SELECT pk FROM writer WHERE {which})",
            arguments,
        )
        execute(
            f"DELETE FROM writer WHERE {which} AND pk < (SELECT MAX(pk) FROM writer)", arguments
        )

    def _delete_bodies_of_writer(self, writer_pk: int) -> None:
        for table in _WRITER_TABLES:
            self._delete_bodies(table, "writer_pk", writer_pk)

    def _delete_bodies(self, table: str, column: str, value: int) -> None:
        """Delete the rows of one writer or generation, some at a time."""
        query = f"SELECT rowid, length(body) FROM {table} WHERE {column} = ? LIMIT {_STEP_ROWS}"
        while self._connection.execute(query, (value,)).fetchone():
            with self._pace.step() as step_bytes:
                taken, size_bytes = [], 0
                for rowid, length in self._connection.execute(query, (value,)).fetchall():
                    taken.append((rowid,))
                    size_bytes += length
                    if size_bytes >= step_bytes:
                        break
                self._connection.executemany(f"DELETE FROM {table} WHERE rowid = ?", taken)
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
        for table in _WRITER_TABLES:
            for writer_pk in self._list(
                f"SELECT DISTINCT writer_pk FROM {table}"
                " WHERE writer_pk NOT IN (SELECT pk FROM writer)"
            ):
                self._delete_bodies(table, "writer_pk", writer_pk)
        for generation_pk in self._list(f"SELECT pk FROM generation WHERE {_GONE}"):
            self._delete_bodies("output", "generation_pk", generation_pk)
        for table, key in _RUN_TABLES.items():
            for run_pk in self._list(f"SELECT DISTINCT run_pk FROM {table} WHERE {_GONE}"):
                self._delete_small(table, key, run_pk)
        execute = self._connection.execute
        with self._pace.step():
            self._delete_writers(_GONE)
            execute("DELETE FROM hidden WHERE writer_pk NOT IN (SELECT pk FROM writer)")
            for table in ("generation", *_RUN_TABLES):
                execute(f"DELETE FROM {table} WHERE {_GONE}")
            execute(
                "DELETE FROM run WHERE trashed_us NOTNULL AND run_path = ''"
                " AND pk < (SELECT MAX(pk) FROM run)"
            )

    def _find_files(self, run_id: str) -> list[Path]:
        """What a run has on disk."""
        paths = [trash_path(self._layout, run_id), self._layout.run_path(run_id)]
        paths += self._elsewhere.get(run_id, [])
        return [path for path in paths if os.path.lexists(path)]

    def _find_leftovers(self) -> list[Path]:
        """Files of runs that are removed already, and of stores that were never finished."""
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
        for _, manifest in find_journals(path):
            if manifest.black_box is not None:
                # It lies in shared memory, and would stay there until the machine is restarted.
                Path(manifest.black_box).unlink(missing_ok=True)
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
