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
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, NoReturn, ParamSpec, TypeVar
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
from quark_backends.store.store_contract import StoreReads
from quark_backends.store.upkeep.trash import JournalTrash
from quark_backends.store.writing.summaries import rebuild_forks
from quark_core.backends.contract import BackendConfig, Batch, Generation, RunLocation
from quark_core.backends.coordination import (
    SupportsCoordination,
    refuse_coordination,
    unknown_sweep,
)
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
    from quark_core.backends.run_summary import RunSummary
    from quark_core.records.columns import Columns
    from quark_core.records.query import Query
    from quark_core.records.sweeps import StoredSweep, StoredTrial

P = ParamSpec("P")
T = TypeVar("T")


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


def _refused(
    method: Callable[Concatenate[SupportsCoordination, P], T],
) -> Callable[Concatenate[KeepsNoSweeps, P], T]:
    """A method that refuses to do what another one does."""

    @wraps(method)
    def refuse(self: KeepsNoSweeps, /, *_args: P.args, **_kwargs: P.kwargs) -> NoReturn:
        raise refuse_coordination(self._name_store())

    return refuse


class KeepsNoSweeps(ABC):
    """Has the methods of `SupportsCoordination`; those that would change something refuse it."""

    @abstractmethod
    def _name_store(self) -> str:
        """What messages call the store."""

    open_sweep = _refused(SupportsCoordination.open_sweep)
    update_sweep = _refused(SupportsCoordination.update_sweep)
    add_trials = _refused(SupportsCoordination.add_trials)
    claim_trial = _refused(SupportsCoordination.claim_trial)
    settle_trial = _refused(SupportsCoordination.settle_trial)
    append_entries = _refused(SupportsCoordination.append_entries)
    compare_and_set = _refused(SupportsCoordination.compare_and_set)
    compare_and_set_group = _refused(SupportsCoordination.compare_and_set_group)

    def read_entries(self, log: str, start: int, *, limit: int = 0) -> list[str]:
        """None: there are no logs."""
        del log, start, limit
        return []

    def list_sweeps(self, project: str | None = None) -> list[StoredSweep]:
        """None: there are no sweeps."""
        del project
        return []

    def load_sweep(self, sweep_id: str) -> StoredSweep:
        """There is none."""
        raise unknown_sweep(sweep_id)

    def list_trials(
        self, sweep_id: str, *, start: int = 0, limit: int | None = None
    ) -> list[StoredTrial]:
        """There are none."""
        del start, limit
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


def _with_outputs(
    method: Callable[Concatenate[StoreReader, P], T],
) -> Callable[Concatenate[JournalBackend, P], T]:
    """A method that asks a reader the same once the outputs of analyzers are played."""

    @wraps(method)
    def ask(self: JournalBackend, /, *args: P.args, **kwargs: P.kwargs) -> T:
        run_id = str(args[0] if args else kwargs["run_id"])

        def read() -> T:
            self._play_outputs(run_id)
            return method(self._reader, *args, **kwargs)

        return self._read(run_id, read)

    return ask


class JournalBackend(SupportsTrash, KeepsPayloads, KeepsNoSweeps, StoreReads):
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
                    f"no Quark store in '{config.storage_dir}' (no .quark folder). The first "
                    "run that you log there creates one"
                )
        else:
            ensure_marker(config.storage_dir)
        self._layout = StoreLayout(config.storage_dir)
        self._trash = JournalTrash(self._layout)
        self._unindexed_bytes = 0
        # Of whoever is at the player's database, by the reader too.
        self._lock = threading.RLock()
        self._player = JournalPlayer(config.storage_dir, self._lock)
        self._connection: SqliteConnection | None = None
        self._generations: set[Path] = set()
        # How far the journals had come when the figures of forks were made.
        self._forks_look: tuple[int, int] | None = None
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
                "the store %s was deleted when a run had it open. Quark creates it again, "
                "without the records that were journaled there before",
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

    def iterate(self, run_id: str, kind: str, query: Query, *, rows: int) -> Iterator[Columns]:
        """See `SupportsSeries`; here all of it is in memory anyway."""
        found = self.read(run_id, kind, query)
        for start in range(0, found.count, rows):
            yield found.take(slice(start, start + rows))

    def summarize(self, run_id: str) -> RunSummary:
        """See `SupportsSearch`."""
        if self.load_run(run_id).run.fork_step is not None:
            return super().summarize(run_id)
        return self._place_summary(self._read(run_id, lambda: self._reader.summarize(run_id)))

    def _ask(self, run_id: str | None, read: Callable[[StoreReader], T]) -> T:
        return self._read(run_id, lambda: read(self._reader))

    def _search(self, ask: Callable[[StoreReader], T]) -> T:
        """Ask of the journals of all runs, of which a fork's may have been played first."""

        def search() -> T:
            self._settle_forks()
            return ask(self._reader)

        return self._read(None, search)

    def _settle_forks(self) -> None:
        connection = self._connect()
        look = connection.execute("SELECT count(*), coalesce(sum(head), 0) FROM writer").fetchone()
        if look != self._forks_look:
            rebuild_forks(connection)
            self._forks_look = look

    def write_generation(self, generation: Generation) -> int:
        """See `SupportsGenerations`."""
        self.load_run(generation.run_id)
        return GenerationFiles(self._layout.run_path(generation.run_id)).write(generation)

    read_heads = _with_outputs(StoreReader.read_heads)
    read_changes = _with_outputs(StoreReader.read_changes)
    read_outputs = _with_outputs(StoreReader.read_outputs)

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
        return f"the store {self._storage_dir}, which consists of journals only,"

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
            self._generations.clear()
            self._forks_look = None

    def _connect(self) -> SqliteConnection:
        return self._player.connection
