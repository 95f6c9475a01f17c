"""The embedded store where SQLite may not be used: the journal is the store.

On a network file system a run is kept in its journal, whose segments stay.
Reading plays them into a database in memory, with the tables of the real
one, so every reader works unchanged. `quark sync`, run where the folder lies
on a local disk, makes an ordinary store of it.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import quote

import msgspec

from quark_backends.embedded.journal_player import JournalPlayer
from quark_backends.embedded.segment_index import LEAST_BYTES
from quark_backends.removal import SupportsTrash
from quark_backends.store.databases.connection import SqliteConnection, StoreConnection
from quark_backends.store.databases.layout import KeepsPayloads, StoreLayout
from quark_backends.store.databases.sqlite import (
    ensure_marker,
    find_store,
    remake_store,
    store_gone,
)
from quark_backends.store.reading.reader import (
    Bodies,
    StoreReader,
    add_generation,
    encode_outputs,
    find_run,
)
from quark_backends.store.upkeep.trash import JournalTrash
from quark_backends.store.writing.summaries import rebuild_forks
from quark_core.backends.contract import BackendConfig, Batch, Generation, RunLocation
from quark_core.backends.edits import (
    EDIT_WRITER,
    BelongingEdit,
    RunEdit,
    StoredGroup,
    StoredProject,
    apply_stop,
    list_groups_by_reading,
    make_edit,
    make_stop,
    refuse_belonging,
    unknown_project,
)
from quark_core.backends.run_summary import StoredRun
from quark_core.delivery.journal import SEGMENT_BYTES, Journal, JournalReader
from quark_core.delivery.journal_folder import JournalFolder, LaneEntry, Manifest, find_folders
from quark_core.delivery.segments import Origin
from quark_core.errors import (
    BackendUnavailable,
    SchemaValidationError,
    SessionStoreError,
    StoreNotFoundError,
)
from quark_core.records import LifecycleRecord
from quark_core.records.runs import StopRequest
from quark_core.system.folders import describe_link, find_foreign_link
from quark_core.system.process import current_process

if TYPE_CHECKING:
    from quark_backends.store.reading.search import RunFinder
    from quark_core.backends.coordination import AppendedEntries, NewTrial, TrialWish
    from quark_core.backends.curves import Cursor, CurveQuery, CurveSet, RunChanges, RunHeads
    from quark_core.backends.grids import Grid, GridQuery
    from quark_core.backends.run_pages import (
        PageSearch,
        RunConfiguration,
        RunLabel,
        RunNames,
        RunPage,
    )
    from quark_core.backends.run_summary import RunSummary
    from quark_core.backends.series import Series
    from quark_core.records.columns import Columns
    from quark_core.records.query import Query, RunSearch
    from quark_core.records.sweeps import StoredSweep, StoredTrial, SweepState, TrialResult
    from quark_core.system.process import ProcessIdentity


def write_edit(
    storage_dir: Path, run_path: Path, stored: StoredRun, batches: Sequence[Batch]
) -> None:
    """Write the batches of an edit as a journal, which every reader plays with the others.

    Args:
        storage_dir: The storage root.
        run_path: The run's own directory.
        stored: The run.
        batches: Those of one writer.

    Raises:
        SessionStoreError: The folder cannot be written.
    """
    first = batches[0]
    # In the run's folder, whatever QUARK_JOURNAL_DIR says here: it is the run's readers' too.
    folder = JournalFolder(run_path / "journal" / first.writer_id)
    manifest = Manifest(
        run_id=first.run_id,
        writer_id=first.writer_id,
        attempt=first.attempt,
        rank=first.rank,
        project=stored.project.name,
        storage_dir=str(storage_dir),
        run_path=str(run_path),
        lanes=(LaneEntry("embedded", "embedded", primary=True),),
        process=current_process(),
    )
    link = find_foreign_link(run_path)
    if link is not None:
        raise SessionStoreError(describe_link(link))
    try:
        folder.write_manifest(manifest)
        origin = Origin(first.run_id, first.writer_id, first.attempt, first.rank)
        journal = Journal(folder.path, origin)
        journal.append(batches)
        journal.sync()
        journal.close()
    except OSError as error:
        raise SessionStoreError(f"{folder.path} cannot be written: {error}") from error
    folder.close()


def find_stop(storage_dir: Path, run_path: Path, run_id: str) -> StopRequest | None:
    """The request that stands for the newest attempt of a run, without playing its journals."""
    stops = []
    for path in sorted((run_path / "journal").glob(f"{EDIT_WRITER}*")):
        if (
            path.is_symlink()
            or JournalFolder(path, storage_dir=storage_dir).read_manifest() is None
        ):
            continue  # somebody else's doing
        for batch in JournalReader(path).read():
            if batch.kind == LifecycleRecord.KIND:
                stops += [
                    record
                    for record in batch.to_records()
                    if isinstance(record, LifecycleRecord) and record.action == "stop"
                ]
    if not stops:
        return None
    manifests = [folder.read_manifest() for folder in find_folders(storage_dir, run_id)]
    newest = max((each.attempt for each in manifests if each is not None), default=0)
    found: StopRequest | None = None
    for record in stops:
        if record.attempt == newest:
            found = apply_stop(found, record)
    return found


# What a store of journals alone says where sweeps are asked for: it has none, and can have none.
#
# Two processes on a network file system cannot agree on who has a trial; a journal belongs to
# one writer.

# ruff: noqa: ARG002 - they have the arguments of the contract


class KeepsNoSweeps(ABC):
    """Has the methods of `SupportsCoordination`; those that would change something refuse it."""

    @abstractmethod
    def _name_store(self) -> str:
        """What messages call the store."""

    def _refuse(self) -> NoReturn:
        from quark_core.backends.coordination import refuse_coordination

        raise refuse_coordination(self._name_store())

    def open_sweep(
        self, project: str, name: str, definition: Mapping[str, Any], *, max_failures: int
    ) -> StoredSweep:
        """Refused."""
        self._refuse()

    def update_sweep(self, sweep_id: str, state: SweepState, *, by: str) -> StoredSweep:
        """Refused."""
        self._refuse()

    def add_trials(
        self, sweep_id: str, trials: Sequence[NewTrial], *, key: str
    ) -> list[StoredTrial]:
        """Refused."""
        self._refuse()

    def claim_trial(
        self,
        sweep_id: str,
        *,
        request_id: str,
        worker: ProcessIdentity,
        lease_s: float,
        wish: TrialWish | None = None,
    ) -> StoredTrial | None:
        """Refused."""
        self._refuse()

    def settle_trial(
        self, sweep_id: str, number: int, token: int, result: TrialResult | None, *, lease_s: float
    ) -> StoredTrial:
        """Refused."""
        self._refuse()

    def append_entries(
        self, log: str, entries: Sequence[str], *, request_id: str
    ) -> AppendedEntries:
        """Refused."""
        self._refuse()

    def read_entries(self, log: str, start: int, *, limit: int = 0) -> list[str]:
        """None: there are no logs."""
        del log, start, limit
        return []

    def compare_and_set(self, run_id: str, field: str, expect: Any, value: Any, *, by: str) -> bool:
        """Refused."""
        self._refuse()

    def compare_and_set_group(
        self, project: str, path: str, field: str, expect: Any, value: Any, *, by: str
    ) -> bool:
        """Refused."""
        self._refuse()

    def list_sweeps(self, project: str | None = None) -> list[StoredSweep]:
        """None: there are no sweeps."""
        del project
        return []

    def load_sweep(self, sweep_id: str) -> StoredSweep:
        """There is none."""
        from quark_core.backends.coordination import unknown_sweep

        raise unknown_sweep(sweep_id)

    def list_trials(
        self, sweep_id: str, *, start: int = 0, limit: int | None = None
    ) -> list[StoredTrial]:
        """There are none."""
        from quark_core.backends.coordination import unknown_sweep

        raise unknown_sweep(sweep_id)


_FOLDER = "generations"
_SUFFIX = ".qg"


class _File(msgspec.Struct, frozen=True):
    analyzer: str
    number: int
    replaces: bool
    bodies: Bodies


class GenerationFiles:
    """The generations of one run, a file each, which is there as a whole or not at all.

    Args:
        run_path: The run's own directory.
    """

    def __init__(self, run_path: Path) -> None:
        self._folder = run_path / _FOLDER

    def write(self, generation: Generation) -> int:
        """Store a generation; returns its number, 1 for the first of its analyzer.

        Raises:
            SchemaValidationError: Records of another run, or under another kind's name.
            BackendUnavailable: The file cannot be written.
        """
        bodies = encode_outputs(generation)
        name = quote(generation.analyzer, safe="")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            number = 1 + sum(path.name.startswith(f"{name}.") for path in self._list())
            while True:
                file = _File(generation.analyzer, number, generation.replaces, bodies)
                scratch = self._folder / f"{name}.{number}.{os.getpid()}.part"
                scratch.write_bytes(msgspec.msgpack.encode(file))
                try:
                    # Unlike a rename, this fails where another process has the number.
                    os.link(scratch, self._folder / f"{name}.{number}{_SUFFIX}")
                except FileExistsError:
                    number += 1
                    continue
                finally:
                    scratch.unlink()
                return number
        except OSError as error:
            raise BackendUnavailable(f"{self._folder}: {error}", backend="embedded") from error

    def play(self, connection: StoreConnection, run_pk: int, known: set[Path]) -> None:
        """Add to a database the generations that are not among the known ones.

        Raises:
            BackendUnavailable: A file cannot be read.
        """
        for path in self._list():
            if path in known:
                continue
            try:
                file = msgspec.msgpack.decode(path.read_bytes(), type=_File)
            except (OSError, msgspec.DecodeError, SchemaValidationError) as error:
                raise BackendUnavailable(f"{path}: {error}", backend="embedded") from error
            add_generation(
                connection, run_pk, file.analyzer, file.number, file.replaces, file.bodies
            )
            known.add(path)

    def _list(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{_SUFFIX}"))


_log = logging.getLogger("quark")

T = TypeVar("T")


class JournalBackend(SupportsTrash, KeepsPayloads, KeepsNoSweeps):
    """Serves a storage root out of its journals.

    Raises:
        SessionStoreError: The root cannot be written, or holds a `.quark`
            folder that is not ours.
    """

    keeps_journal = True
    """Tells the stream that the journal's segments must stay."""

    def __init__(self, config: BackendConfig) -> None:
        self._storage_dir = config.storage_dir
        self._read_only = config.read_only
        if config.read_only:
            if find_store(config.storage_dir) is None:
                raise StoreNotFoundError(
                    f"storage_dir {config.storage_dir} holds no Quark store (no .quark folder); "
                    "the first run that is trained there makes one"
                )
        else:
            ensure_marker(config.storage_dir)
        self._layout = StoreLayout(config.storage_dir)
        self._trash = JournalTrash(self._layout)
        self._unindexed_bytes = 0
        # Of whoever is at the player's database, by the reader and the finder too.
        self._lock = threading.RLock()
        self._player = JournalPlayer(config.storage_dir, self._lock)
        self._connection: SqliteConnection | None = None
        self._generations: set[Path] = set()
        # How far the journals had come when the figures of forks were made.
        self._forks_look: tuple[int, int] | None = None
        self._finder: RunFinder | None = None
        self._look: tuple[int, int, int] | None = None
        self._reader = StoreReader(self._connect, lock=self._lock)

    def write(self, batch: Batch) -> None:
        """Nothing to do: what comes here is in the journal already."""
        self.write_group([batch])

    def write_group(self, batches: Sequence[Batch]) -> None:
        """Nothing to do, as in `write`, but to see that the folder is still known as a store."""
        if self._read_only and batches:
            raise BackendUnavailable("the store was opened for reading only", backend="embedded")
        if not self._layout.marker.exists():
            _log.error(
                "the store %s was deleted while a run has it open; it is made anew, and what "
                "was journaled there before is gone",
                self._layout.root,
            )
            try:
                remake_store(self._layout, with_database=False)
            except SessionStoreError as error:
                raise BackendUnavailable(str(error), backend="embedded") from error
        self._unindexed_bytes += sum(len(batch.body) for batch in batches)
        if self._unindexed_bytes >= SEGMENT_BYTES:
            self._have_indexed()

    def close(self) -> None:
        """Reading goes on; a helper makes the indexes that are lacking yet."""
        if self._unindexed_bytes >= LEAST_BYTES:
            self._have_indexed()

    def _have_indexed(self) -> None:
        """Have a process of its own look for what was sealed, where there is none that does."""
        from quark_backends.embedded.compaction_process import find_helper

        self._unindexed_bytes = 0
        find_helper(self._layout, start=True)

    def locate(self, run_id: str) -> RunLocation:
        """Where a run lies."""
        return RunLocation(
            store_root=self._layout.root,
            db_path=None,
            run_path=str(self._layout.run_path(run_id)),
        )

    def read(self, run_id: str, kind: str, query: Query) -> Columns:
        """See `SupportsRead`."""
        return self._read(run_id, lambda: self._reader.read(run_id, kind, query))

    def read_series(
        self,
        run_id: str,
        key: str,
        *,
        max_points: int | None,
        all_attempts: bool = False,
        rank: int | None = None,
    ) -> Series:
        """See `SupportsSeries`."""
        return self._read(
            run_id,
            lambda: self._reader.read_series(
                run_id, key, max_points=max_points, all_attempts=all_attempts, rank=rank
            ),
        )

    def iterate(self, run_id: str, kind: str, query: Query, *, rows: int) -> Iterator[Columns]:
        """See `SupportsSeries`; here all of it is in memory anyway."""
        found = self.read(run_id, kind, query)
        for start in range(0, found.count, rows):
            yield found.take(slice(start, start + rows))

    def read_series_many(self, run_id: str, query: CurveQuery) -> CurveSet:
        """See `SupportsChanges`."""
        return self._read(run_id, lambda: self._reader.read_series_many(run_id, query))

    def read_heads(self, run_id: str) -> RunHeads:
        """See `SupportsChanges`."""
        return self._read(run_id, lambda: self._read_heads(run_id))

    def _read_heads(self, run_id: str) -> RunHeads:
        self._play_outputs(run_id)
        return self._reader.read_heads(run_id)

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
        """See `SupportsChanges`."""

        def read() -> RunChanges:
            self._play_outputs(run_id)
            return self._reader.read_changes(
                run_id,
                cursor,
                kinds=kinds,
                keys=keys,
                all_attempts=all_attempts,
                max_rows=max_rows,
            )

        return self._read(run_id, read)

    def read_mark(self, run_id: str) -> str:
        """See `SupportsChanges`; here it is how far the run has come."""
        heads = self.read_heads(run_id)
        return f"{sorted(heads.cursor.items())}/{heads.outputs}"

    def read_batches(self, run_id: str, writer_id: str, start: int, limit: int) -> list[Batch]:
        """See `SupportsReplay`."""
        return self._read(
            run_id, lambda: self._reader.read_batches(run_id, writer_id, start, limit)
        )

    def read_grid(self, run_id: str, query: GridQuery) -> Grid:
        """See `SupportsGrid`."""
        return self._read(run_id, lambda: self._reader.read_grid(run_id, query))

    def search(self, search: RunSearch) -> list[RunSummary]:
        """See `SupportsSearch`."""
        found = self._search(lambda finder: finder.search(search))
        return [self._layout.place_summary(summary) for summary in found]

    def summarize(self, run_id: str) -> RunSummary:
        """See `SupportsSearch`."""
        if self.load_run(run_id).run.fork_step is None:
            found = self._read(run_id, lambda: self._find().summarize(run_id))
        else:
            found = self._search(lambda finder: finder.summarize(run_id))
        return self._layout.place_summary(found)

    def search_page(self, search: PageSearch) -> RunPage:
        """See `SupportsPages`."""
        return self._search(lambda finder: finder.search_page(search))

    def list_names(self, project: str | None, text: str, limit: int) -> RunNames:
        """See `SupportsPages`."""
        return self._search(lambda finder: finder.list_names(project, text, limit))

    def _search(self, ask: Callable[[RunFinder], T]) -> T:
        """Ask of the journals of all runs, of which a fork's may have been played first."""

        def search() -> T:
            self._settle_forks()
            return ask(self._find())

        return self._read(None, search)

    def _settle_forks(self) -> None:
        connection = self._connect()
        look = connection.execute("SELECT count(*), coalesce(sum(head), 0) FROM writer").fetchone()
        if look != self._forks_look:
            rebuild_forks(connection)
            self._forks_look = look

    def _find(self) -> RunFinder:
        if self._finder is None:
            # SQLAlchemy is loaded by who searches only.
            from quark_backends.store.reading.search import RunFinder

            self._finder = RunFinder(self._connect, lock=self._lock)
        return self._finder

    def write_generation(self, generation: Generation) -> int:
        """See `SupportsGenerations`."""
        self.load_run(generation.run_id)
        return GenerationFiles(self._layout.run_path(generation.run_id)).write(generation)

    def read_outputs(self, run_id: str, kind: str, analyzer: str | None = None) -> Columns:
        """See `SupportsGenerations`."""
        return self._read(run_id, lambda: self._read_outputs(run_id, kind, analyzer))

    def _read_outputs(self, run_id: str, kind: str, analyzer: str | None) -> Columns:
        self._play_outputs(run_id)
        return self._reader.read_outputs(run_id, kind, analyzer)

    def _play_outputs(self, run_id: str) -> None:
        run_pk = find_run(self._connect(), run_id)
        files = GenerationFiles(self._layout.run_path(run_id))
        files.play(self._connect(), run_pk, self._generations)

    def list_groups(self, project: str | None = None) -> list[StoredGroup]:
        """See `SupportsBelonging`."""
        return list_groups_by_reading(self, project)

    def load_project(self, project: str) -> StoredProject:
        """See `SupportsBelonging`."""
        runs = self.list_runs(project=project)
        if not runs:
            raise unknown_project(project)
        newest_at = max(stored.run.created_at for stored in runs)
        return StoredProject(project=project, runs=len(runs), newest_at=newest_at)

    def update_project(self, project: str, edit: BelongingEdit, *, by: str) -> StoredProject:
        """Refused: nothing is kept here but what runs say of themselves."""
        del project, edit, by
        raise refuse_belonging(self._name_store())

    def update_group(self, project: str, path: str, edit: BelongingEdit, *, by: str) -> StoredGroup:
        """Refused: nothing is kept here but what runs say of themselves."""
        del project, path, edit, by
        raise refuse_belonging(self._name_store())

    def _name_store(self) -> str:
        return f"the store {self._storage_dir}, which is journals alone,"

    def edit_run(self, run_id: str, edit: RunEdit, *, by: str) -> StoredRun:
        """See `SupportsEdits`; of two at this very moment neither may know of the other."""
        stored = self._load_for_edit(run_id)
        path = self._layout.run_path(run_id)
        write_edit(self._storage_dir, path, stored, make_edit(stored, edit, by=by))
        return self.load_run(run_id)

    def request_stop(self, run_id: str, *, by: str, reason: str | None = None) -> StopRequest:
        """See `SupportsEdits`."""
        stored = self._load_for_edit(run_id)
        planned = make_stop(stored, by=by, reason=reason)
        write_edit(self._storage_dir, self._layout.run_path(run_id), stored, planned.batches)
        return planned.request

    def find_stop(self, run_id: str) -> StopRequest | None:
        """See `SupportsEdits`."""
        return find_stop(self._storage_dir, self._layout.run_path(run_id), run_id)

    def _load_for_edit(self, run_id: str) -> StoredRun:
        if self._read_only:
            raise SessionStoreError(f"the store {self._layout.root} was opened for reading only")
        return self.load_run(run_id)

    def load_run(self, run_id: str) -> StoredRun:
        """See `SupportsRead`."""
        return self._layout.place(self._read(run_id, lambda: self._reader.load_run(run_id)))

    def list_runs(self, *, project: str | None = None, limit: int | None = None) -> list[StoredRun]:
        """See `SupportsRead`."""
        runs = self._read(None, lambda: self._reader.list_runs(project=project, limit=limit))
        return [self._layout.place(stored) for stored in runs]

    def list_configurations(
        self, *, project: str | None = None, limit: int | None = None
    ) -> list[RunConfiguration]:
        """See `SupportsConfigurations`."""
        return self._read(
            None, lambda: self._reader.list_configurations(project=project, limit=limit)
        )

    def list_labels(self, beginning: str, limit: int | None) -> list[RunLabel]:
        """See `SupportsLabels`."""
        return self._read(None, lambda: self._reader.list_labels(beginning, limit))

    def _read(self, run_id: str | None, read: Callable[[], T]) -> T:
        """Read of the journals of a run, or of all, as they are now."""
        with self._lock:
            if self._read_only:
                self._follow_marker()
            while True:
                try:
                    self._player.play(run_id)
                    self._follow()
                    return read()
                except Exception:
                    # What an index that is damaged has spoilt is read without it.
                    if not self._player.forget_failed():
                        raise

    def _follow_marker(self) -> None:
        """Forget what was played of a store in whose place there is another one, or none.

        Raises:
            StoreUnavailableError: There is none.
        """
        try:
            found = os.stat(self._layout.marker)
        except OSError as error:
            self._player.forget()
            raise store_gone(self._layout) from error
        look = found.st_dev, found.st_ino, found.st_mtime_ns
        if look != self._look and self._look is not None:
            self._player.forget()
        self._look = look

    def _follow(self) -> None:
        """See that what is read is what was played."""
        connection = self._player.connection
        if connection is not self._connection:
            self._connection = connection
            self._reader = StoreReader(self._connect, lock=self._lock)
            self._finder = None
            self._generations.clear()
            self._forks_look = None

    def _connect(self) -> SqliteConnection:
        return self._player.connection
