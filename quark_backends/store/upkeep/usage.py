"""Disk usage of runs, in the database and in files as `du` counts it."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from quark_backends.store.databases.connection import SqliteConnection, StoreConnection
from quark_backends.store.databases.layout import StoreLayout, name_folder
from quark_backends.store.reading.table_rows import run_not_found
from quark_core.backends.edits import RunUsage, StoreUsage
from quark_core.config import settings
from quark_core.delivery.journal_folder import (
    JournalFolder,
    Manifest,
    find_damaged,
    find_folders,
)
from quark_core.records import MetricRecord, format_time
from quark_core.system.process import ProcessIdentity, find_lost_reason

_BLOCK_BYTES = 512
# What a row of numbers alone takes, give or take a few bytes.
_ROW_BYTES = 80
_RUNS_AT_ONCE = 500

# `length` of a column takes no more of it from the disk than its row's head.
_POINTS = f"CAST(SUM(CASE WHEN kind = '{MetricRecord.KIND}' THEN count ELSE 0 END) AS BIGINT)"
_BY_WRITER = f"""
SELECT writer_pk, SUM(length(body) + length(digest)), {_POINTS}
FROM batch {{where}} GROUP BY writer_pk
UNION ALL
SELECT writer_pk, SUM(length(body) + coalesce(length(rollup), 0)), {_POINTS}
FROM chunk {{where}} GROUP BY writer_pk
UNION ALL
SELECT writer_pk, SUM(length(body)), 0 FROM frame {{where}} GROUP BY writer_pk
UNION ALL
SELECT writer_pk, SUM(length(body)), 0 FROM damaged {{where}} GROUP BY writer_pk
"""
_BY_RUN = f"""
SELECT run_pk, SUM(length(key) + coalesce(length(text), 0) + 8) FROM run_config {{where}}
GROUP BY run_pk
UNION ALL
SELECT run_pk, SUM(length(tag)) FROM run_tag {{where}} GROUP BY run_pk
UNION ALL
SELECT run_pk, SUM(length(path)) FROM run_group_member {{where}} GROUP BY run_pk
UNION ALL
SELECT run_pk, SUM(length(key) + coalesce(length(text), 0) + 8) FROM run_field {{where}}
GROUP BY run_pk
UNION ALL
SELECT run_pk, SUM(length(key) + length(digest) + coalesce(length(sketch), 0) + 40)
FROM run_fingerprint {{where}} GROUP BY run_pk
UNION ALL
SELECT run_pk, COUNT(*) * {_ROW_BYTES} FROM run_metric {{where}} GROUP BY run_pk
UNION ALL
SELECT run_pk, COUNT(*) * {_ROW_BYTES} FROM writer {{where}} GROUP BY run_pk
UNION ALL
SELECT run_pk, SUM(length(body)) FROM output JOIN generation ON generation.pk = generation_pk
{{where}} GROUP BY run_pk
"""
# A removed run without a path is a number that must not be given out again, no more.
_RUNS = """
SELECT run.pk, run.id, run.name, project.name, status, process, heartbeat_us, run.created_us,
    trashed_us, length(process) + length(run.tags) + coalesce(length(config), 0)
    + coalesce(length(environment), 0) + coalesce(length(notes), 0)
    + coalesce(length(group_paths), 0) + coalesce(length(run.fields), 0)
FROM run JOIN project ON project.id = project_id
WHERE (trashed_us IS NULL OR run_path != '')
"""


def measure_store(connection: SqliteConnection, layout: StoreLayout) -> StoreUsage:
    """What the store and each of its runs take up, the largest run first.

    Args:
        connection: For reading, in no transaction.
        layout: Where the store lies.
    """
    connection.execute("BEGIN")
    try:
        found = _measure_in_database(connection, None)
        (free_pages,) = connection.execute("PRAGMA freelist_count").fetchone()
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    finally:
        connection.execute("ROLLBACK")
    walk = _DiskWalk()
    files: dict[str, Counter[str]] = {run_id: Counter() for run_id in found}
    name = layout.db_path.name
    database_names = {name, f"{name}-wal", f"{name}-shm", f"{name}-journal"}
    database_file_bytes, shared_bytes = 0, walk.measure_one(layout.root)
    for path in list_paths(layout.root):
        if path.name in database_names:
            database_file_bytes += walk.measure(path)
        elif path.name not in ("runs", "trash"):
            shared_bytes += walk.measure(path)
        else:
            shared_bytes += walk.measure_one(path)
            for folder in list_paths(path):
                if folder.name in files:
                    files[folder.name] += walk.measure_parts(folder)
                else:
                    shared_bytes += walk.measure(folder)
    inside_bytes = sum(parts.total() for parts in files.values())
    elsewhere_bytes = 0
    for run_id, journals in find_journals_elsewhere(layout).items():
        if run_id in files:
            journal_bytes = sum(walk.measure(journal) for journal in journals)
            files[run_id]["journal"] += journal_bytes
            elsewhere_bytes += journal_bytes
    usages = [_with_files(usage, files[run_id]) for run_id, usage in found.items()]
    return StoreUsage(
        store_root=str(layout.root),
        runs=tuple(sorted(usages, key=lambda usage: (-usage.total_bytes, usage.run_id))),
        database_file_bytes=database_file_bytes,
        free_bytes=free_pages * page_bytes,
        shared_bytes=shared_bytes,
        elsewhere_bytes=elsewhere_bytes,
        total_bytes=database_file_bytes + inside_bytes + shared_bytes,
    )


def measure_shared_store(connection: StoreConnection, name: str) -> StoreUsage:
    """What a store without files and each of its runs take up, the largest run first.

    Args:
        connection: To PostgreSQL, in no transaction.
        name: What the store is called.
    """
    connection.begin_read()
    try:
        found = _measure_in_database(connection, None)
        table_bytes = measure_schema(connection)
    finally:
        connection.rollback()
    return StoreUsage(
        store_root=name,
        runs=tuple(sorted(found.values(), key=lambda usage: (-usage.total_bytes, usage.run_id))),
        database_file_bytes=table_bytes,
        free_bytes=0,
        shared_bytes=0,
        elsewhere_bytes=0,
        total_bytes=table_bytes,
    )


def measure_schema(connection: StoreConnection) -> int:
    """Bytes on disk of the tables and indexes of a store in PostgreSQL."""
    (size_bytes,) = connection.execute(
        "SELECT CAST(coalesce(sum(pg_total_relation_size(pg_class.oid)), 0) AS BIGINT)"
        " FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace"
        " WHERE nspname = current_schema() AND relkind = 'r'"
    ).fetchone()
    return int(size_bytes)


def measure_runs(
    connection: StoreConnection, layout: StoreLayout | None, run_ids: Sequence[str]
) -> list[RunUsage]:
    """What these runs take up, in this order.

    Args:
        connection: For reading.
        layout: Where the store lies; None for one without files.
        run_ids: The runs.

    Raises:
        RunNotFoundError: The store has no such run.
    """
    usages = measure_present(connection, layout, run_ids)
    if missing := set(run_ids).difference(usage.run_id for usage in usages):
        raise run_not_found(min(missing))
    return usages


def measure_present(
    connection: StoreConnection, layout: StoreLayout | None, run_ids: Sequence[str]
) -> list[RunUsage]:
    """As `measure_runs`, without those that are not there."""
    found: dict[str, RunUsage] = {}
    for start in range(0, len(run_ids), _RUNS_AT_ONCE):
        found |= _measure_in_database(connection, run_ids[start : start + _RUNS_AT_ONCE])
    present = [run_id for run_id in run_ids if run_id in found]
    if layout is None:
        return [found[run_id] for run_id in present]
    elsewhere = find_journals_elsewhere(layout)
    usages = []
    for run_id in present:
        walk = _DiskWalk()
        parts = walk.measure_parts(layout.run_path(run_id))
        parts += walk.measure_parts(trash_path(layout, run_id))
        for journal in elsewhere.get(run_id, []):
            parts["journal"] += walk.measure(journal)
        usages.append(_with_files(found[run_id], parts))
    return usages


def list_trash(connection: StoreConnection, layout: StoreLayout | None) -> list[RunUsage]:
    """The runs in the trash, the newest there first; see `measure_runs`."""
    # Somebody else may remove one of them for good meanwhile.
    return measure_present(connection, layout, find_trashed(connection))


def find_trashed(connection: StoreConnection) -> list[str]:
    """Ids of the runs in the trash, the newest there first."""
    rows = connection.execute(
        "SELECT id FROM run WHERE trashed_us IS NOT NULL AND run_path != ''"
        " ORDER BY trashed_us DESC, pk DESC"
    )
    return [row[0] for row in rows.fetchall()]


def measure_tree(path: Path) -> int:
    """Bytes on disk of a file or a folder, as `du` counts them; 0 where there is none."""
    return _DiskWalk().measure(path)


def _measure_in_database(
    connection: StoreConnection, run_ids: Sequence[str] | None
) -> dict[str, RunUsage]:
    """Runs by id, all of them for None, as far as the database knows them."""
    marks = "" if run_ids is None else ", ".join("?" * len(run_ids))
    query = _RUNS if run_ids is None else f"{_RUNS} AND run.id IN ({marks})"
    rows = connection.execute(query, run_ids or ()).fetchall()
    if not rows:
        return {}
    in_runs = in_writers = ""
    if run_ids is not None:
        # Numbers out of the database, so they may stand in the text.
        in_runs = f"WHERE run_pk IN ({', '.join(str(row[0]) for row in rows)})"
        in_writers = f"WHERE writer_pk IN (SELECT pk FROM writer {in_runs})"
    run_of = dict(connection.execute(f"SELECT pk, run_pk FROM writer {in_runs}").fetchall())
    data_bytes: Counter[int] = Counter()
    points: Counter[int] = Counter()
    for writer_pk, size_bytes, count in connection.execute(_BY_WRITER.format(where=in_writers)):
        if writer_pk in run_of:
            data_bytes[run_of[writer_pk]] += size_bytes
            points[run_of[writer_pk]] += count
    for run_pk, size_bytes in connection.execute(_BY_RUN.format(where=in_runs)):
        data_bytes[run_pk] += size_bytes
    found = {}
    for pk, run_id, name, project, status, process, beat_us, created_us, trashed_us, texts in rows:
        identity = msgspec.json.decode(process, type=ProcessIdentity)
        found[run_id] = RunUsage(
            run_id=run_id,
            name=name,
            project=project,
            state="lost" if find_lost_reason(status, identity, beat_us) else status,
            created_at=format_time(created_us),
            trashed_at=None if trashed_us is None else format_time(trashed_us),
            points=points[pk],
            database_bytes=data_bytes[pk] + texts,
        )
    return found


def _with_files(usage: RunUsage, parts: Mapping[str, int]) -> RunUsage:
    return replace(usage, files=dict(sorted(parts.items())))


class _DiskWalk:
    """Counts what lies on disk; what has several names is counted under the first."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()

    def measure(self, path: Path) -> int:
        """A file, or a folder with all that is in it."""
        size_bytes, waiting = 0, [path]
        while waiting:
            path = waiting.pop()
            own_bytes, is_folder = self._look_at(path)
            size_bytes += own_bytes
            if is_folder:
                waiting += list_paths(path)
        return size_bytes

    def measure_parts(self, folder: Path) -> Counter[str]:
        """A run's folder, by the subfolders in it."""
        own_bytes, is_folder = self._look_at(folder)
        parts = Counter({"other": own_bytes} if own_bytes else {})
        for path in list_paths(folder) if is_folder else ():
            name = path.name if path.is_dir() and not path.is_symlink() else "other"
            parts[name] += self.measure(path)
        return parts

    def measure_one(self, path: Path) -> int:
        """A file, or a folder without what is in it."""
        return self._look_at(path)[0]

    def _look_at(self, path: Path) -> tuple[int, bool]:
        """Bytes on disk, and whether there may be more in it; 0 where it has gone meanwhile."""
        try:
            status = os.lstat(path)
        except OSError:
            return 0, False
        is_folder = stat.S_ISDIR(status.st_mode)
        if status.st_nlink > 1 and not is_folder:
            identity = (status.st_dev, status.st_ino)
            if identity in self._seen:
                return 0, False
            self._seen.add(identity)
        blocks = getattr(status, "st_blocks", None)  # Windows has none
        return status.st_size if blocks is None else int(blocks) * _BLOCK_BYTES, is_folder


def trash_path(layout: StoreLayout, run_id: str) -> Path:
    """Where a run's own directory lies while the run is in the trash."""
    return layout.root / "trash" / name_folder(run_id)


def find_journals_elsewhere(layout: StoreLayout) -> dict[str, list[Path]]:
    """The journals of this store's runs that lie under QUARK_JOURNAL_DIR, by run."""
    found: dict[str, list[Path]] = {}
    if not os.environ.get(settings.JOURNAL_DIR, "").strip():
        return found
    for folder in find_folders(layout.root.parent):
        if layout.root not in folder.path.parents:
            manifest = folder.read_manifest()
            if manifest is not None:
                found.setdefault(manifest.run_id, []).append(folder.path)
    for folder, note in find_damaged(layout.root.parent):
        known = found.setdefault(note.run_id, [])
        if layout.root not in folder.path.parents and folder.path not in known:
            known.append(folder.path)
    return found


def find_journals(path: Path) -> Iterator[tuple[JournalFolder, Manifest]]:
    """The journals in a run's directory, or the one that a directory is."""
    for candidate in (path, *list_paths(path / "journal")):
        if candidate.is_dir():
            folder = JournalFolder(candidate)
            manifest = folder.read_manifest()
            if manifest is not None:
                yield folder, manifest


def is_written(path: Path) -> bool:
    """Whether a living process still writes a journal in a directory."""
    return any(folder.is_written(manifest) for folder, manifest in find_journals(path))


def list_paths(folder: Path, prefix: str = "") -> list[Path]:
    """What is in a directory, sorted; nothing where there is none."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [folder / name for name in names if name.startswith(prefix)]
