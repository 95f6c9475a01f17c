"""What runs take up in a store, and what becomes of it when they are removed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

CollectionProgress = Callable[[str, int, int], None]
"""Told of what is being done, how many bytes of it are done, and of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedRecords:
    """Records that could not be read and were set aside, with the bytes that were there.

    Attributes:
        run_id, writer_id: Whose they are.
        kind: Their kind.
        records: How many.
        reason: What is wrong with them.
        found_at: When they were set aside.
    """

    run_id: str
    writer_id: str
    kind: str
    records: int
    reason: str
    found_at: str

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUsage:
    """What one run takes up.

    Attributes:
        run_id: The run.
        name: Its name, or None.
        project: Name of its project.
        state: Its status, or "lost".
        created_at: When it began.
        trashed_at: When it was put into the trash, or None.
        points: Metric points that are kept, hidden ones included.
        database_bytes: Bytes of its records and texts in the database, without
            the indexes and page ends that all runs share.
        files: Bytes on disk by what they are: the name of the subfolder of the
            run's folder, or "other" for what lies in none.
    """

    run_id: str
    name: str | None
    project: str
    state: str
    created_at: str
    trashed_at: str | None
    points: int
    database_bytes: int
    files: Mapping[str, int] = field(default_factory=dict)

    @property
    def file_bytes(self) -> int:
        """Bytes on disk of all its files."""
        return sum(self.files.values())

    @property
    def total_bytes(self) -> int:
        """Database and files."""
        return self.database_bytes + self.file_bytes

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {
            "run_id": self.run_id,
            "name": self.name,
            "project": self.project,
            "state": self.state,
            "created_at": self.created_at,
            "trashed_at": self.trashed_at,
            "points": self.points,
            "database_bytes": self.database_bytes,
            "file_bytes": self.file_bytes,
            "files": dict(self.files),
            "total_bytes": self.total_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """What a store takes up, all of it told apart.

    `total_bytes` is `database_file_bytes` + the files of all runs + `shared_bytes`;
    `database_file_bytes` is the data of all runs + `free_bytes` + `overhead_bytes`.

    Attributes:
        store_root: Root of the store.
        runs: Its runs, those in the trash too, the largest first.
        database_file_bytes: The database's files on disk.
        free_bytes: Pages in the database that hold nothing.
        shared_bytes: Files of the store that belong to no run.
        elsewhere_bytes: Journals under QUARK_JOURNAL_DIR; they count among
            their runs' files, and not in `total_bytes`.
        total_bytes: All that lies under the root, as `du` counts it.
    """

    store_root: str
    runs: tuple[RunUsage, ...]
    database_file_bytes: int
    free_bytes: int
    shared_bytes: int
    elsewhere_bytes: int
    total_bytes: int

    @property
    def overhead_bytes(self) -> int:
        """What the database's files hold beyond the data of runs: indexes, page ends, its log."""
        data_bytes = sum(run.database_bytes for run in self.runs)
        return self.database_file_bytes - self.free_bytes - data_bytes

    @property
    def trash(self) -> tuple[RunUsage, ...]:
        """The runs in the trash."""
        return tuple(run for run in self.runs if run.trashed_at is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What `collect_trash` did, or, of a dry run, would do.

    Attributes:
        runs: What was removed for good, with what it took up.
        skipped: Runs that stay in the trash for now: id -> why.
        leftovers: Other things that were removed: path -> bytes.
        before_bytes: Size of the store on disk before.
        after_bytes: And after; a training beside may have added to it meanwhile.
        notes: What could not be done now, and what to do about it.
    """

    runs: tuple[RunUsage, ...]
    skipped: Mapping[str, str]
    leftovers: Mapping[str, int]
    before_bytes: int
    after_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def freed_bytes(self) -> int:
        """By how much the store became smaller on disk."""
        return max(0, self.before_bytes - self.after_bytes)

    def to_dict(self) -> dict[str, Any]:
        """A new dict of JSON-like values."""
        return {
            "removed": [run.to_dict() for run in self.runs],
            "skipped": dict(self.skipped),
            "leftovers": dict(self.leftovers),
            "before_bytes": self.before_bytes,
            "after_bytes": self.after_bytes,
            "freed_bytes": self.freed_bytes,
            "notes": list(self.notes),
        }


@runtime_checkable
class SupportsRemoval(Protocol):
    """What a backend has that declares `Capability.REMOVAL`.

    May be called from any thread and beside processes that write. Removing a
    run never touches another one. Every method raises `SessionStoreError`
    where the store cannot be read or written.
    """

    def measure_store(self) -> StoreUsage:
        """What the store and each of its runs take up."""

    def measure_runs(self, run_ids: Sequence[str]) -> list[RunUsage]:
        """What these runs take up, in this order; `RunNotFoundError` for an unknown one."""

    def list_trash(self) -> list[RunUsage]:
        """The runs in the trash, the newest there first."""

    def list_damaged(self) -> list[DamagedRecords]:
        """What could not be read and was set aside, the newest first."""

    def trash_runs(self, run_ids: Sequence[str]) -> None:
        """Put runs into the trash, all or none, which hides them from every reader.

        Raises:
            RunNotFoundError: There is no such run.
            InvalidRunStateError: One of them is alive.
        """

    def restore_runs(self, run_ids: Sequence[str]) -> None:
        """Take runs out of the trash again, all or none.

        Raises:
            RunNotFoundError: There is no such run in the trash, or no more.
        """

    def collect_trash(
        self,
        *,
        older_than_s: float = 0.0,
        run_ids: Sequence[str] | None = None,
        dry_run: bool = False,
        on_progress: CollectionProgress | None = None,
    ) -> Collection:
        """Remove for good what has been in the trash for so long, and give its space back.

        May be broken off at any moment, also by a kill; the next call goes on, also with
        runs of which a call that was broken off has removed a part.

        Args:
            older_than_s: Only what has been in the trash for so long.
            run_ids: Only these runs, such as those that somebody has agreed to; all by default.
            dry_run: Only say what would go.
            on_progress: Told of what is being done.
        """
