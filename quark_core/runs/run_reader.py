"""RunReader: one run, opened to be read, with no session, no stream and no writer.

Analyzers, comparisons, reports, commands and the page read runs by it. A run that this process
holds open is flushed before it is read; of any other, what processes that are gone have left on
this machine is delivered first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quark_core.backends.contract import Capability, SupportsPrimary, SupportsRead
from quark_core.backends.registry import check_capabilities, default_registry
from quark_core.backends.run_summary import StoredRun
from quark_core.config.arguments import check_run_id, resolve_storage_dir
from quark_core.config.redaction import redact_text
from quark_core.errors import BackendUnavailable, SchemaValidationError, SessionStoreError
from quark_core.ranks.launches import RankInfo
from quark_core.records.runs import RunContext
from quark_core.runs import backend_choice
from quark_core.runs.backend_choice import BackendChoice, choose_backend, choose_primary
from quark_core.runs.late_delivery import wait_for_late_delivery
from quark_core.runs.open_run import OpenRun, open_runs
from quark_core.runs.reading import PART_ROWS, check_rows, iterate, read_rows
from quark_core.runs.run_ids import find_run

if TYPE_CHECKING:
    from quark_core.delivery.takeover import Takeover
    from quark_core.records.columns import Columns
    from quark_core.records.query import Query


class RunReader:
    """One run, as it can be read. Every method may be called from any thread.

    Args:
        context: The run.
        reader: Where its records are read, or None if nothing of it is kept.
        stored: The run as its store had it when it was opened, or None.
        takeover: Delivers what processes that are gone have left of the run.
        held: The run as this process holds it, if a session of this process has it.

    Attributes:
        stored, takeover, held: As given.
    """

    def __init__(
        self,
        context: RunContext,
        reader: SupportsRead | None,
        *,
        stored: StoredRun | None = None,
        takeover: Takeover | None = None,
        held: OpenRun | None = None,
    ) -> None:
        self._context = context
        self._reader = reader
        self.stored = stored
        self.takeover = takeover
        self.held = held

    @classmethod
    def of(cls, run: OpenRun) -> RunReader:
        """Read a run that this process holds."""
        return cls(run.context, run.reader, held=run)

    @property
    def context(self) -> RunContext:
        """The run's context: its record, its project and where it is stored."""
        return self._context if self.held is None else self.held.context

    @property
    def reader(self) -> SupportsRead | None:
        """Where the run's records are read, or None if nothing of it is kept."""
        return self._reader if self.held is None else self.held.reader

    @property
    def run_id(self) -> str | None:
        """The run's id; None only on a rank that cannot know it."""
        return self.context.run_id

    def catch_up(self, verb: str = "read") -> None:
        """Bring to the store what was logged and is not there yet.

        Args:
            verb: What the caller does with the run, for the message of the error.

        Raises:
            SessionStoreError: The store does not answer in time, or this process was forked.
        """
        if self.held is not None:
            self.held.catch_up(verb)
        elif self.takeover is not None:
            self.takeover.look()

    def read(self, kind: str, query: Query) -> Columns:
        """Catch up, then read the rows that fit; see `quark_core.runs.reading.read_rows`."""
        if self.held is not None:
            return self.held.read(kind, query)
        self.catch_up()
        reader, run_id = self.reader, self.run_id
        if reader is None or run_id is None:
            from quark_core.records.columns import Columns

            return Columns.empty(kind)
        return read_rows(reader, run_id, kind, query)

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that holds the run."""
        return self.held is not None and self.held.forked

    def find_payload(self, sha256: str) -> Path | None:
        """The file of a payload that this process has stored and that is not delivered yet."""
        return None if self.held is None else self.held.find_payload(sha256)

    def close(self) -> None:
        """Close the store, unless a session of this process has it."""
        close = getattr(self._reader, "close", None)
        if self.held is None and close is not None:
            close()

    def __repr__(self) -> str:
        return f"RunReader({self.context.describe()})"


def iterate_run(
    run: OpenRun | RunReader, kind: str, query: Query, rows: int = PART_ROWS
) -> Iterator[Columns]:
    """Flush now, then return the rows that fit in parts; see `quark_core.runs.reading.iterate`."""
    size = check_rows(rows)
    run.catch_up()
    reader, run_id = run.reader, run.context.run_id
    if reader is None or run_id is None:
        return iter(())
    return iterate(reader, run_id, kind, query, size)


def open_run_reader(run_id: str, storage_dir: str | Path | None) -> RunReader:
    """Open a run of a storage root to read it; see `quark.open_run`.

    Raises:
        SchemaValidationError: A bad id.
        RunNotFoundError: The store has no such run.
        SessionStoreError: There is no store, or it cannot be read.
    """
    check_run_id(run_id)
    root = resolve_storage_dir(storage_dir)
    reader = backend_choice.open_reader(root, run_id=run_id)
    try:
        stored = find_run(reader, run_id)
    except BaseException:
        reader.close()
        raise
    return read_stored(stored, reader, root)


def read_stored(stored: StoredRun, reader: SupportsRead, storage_dir: Path) -> RunReader:
    """Read a run that was found in the store of a storage root, which `reader` has open."""
    takeover = backend_choice.make_takeover(storage_dir, reader, stored.run.id)
    context = describe_context(stored, reader, storage_dir)
    return RunReader(context, reader, stored=stored, takeover=takeover)


def describe_context(
    stored: StoredRun, reader: object, storage_dir: Path, place: str | None = None
) -> RunContext:
    """The context of a run that is read, as its store knows it.

    Args:
        stored: The run.
        reader: Where it is read, or None.
        storage_dir: The storage root.
        place: Where the reader is, if it cannot say itself.
    """
    store_root: str | Path
    if place is None or isinstance(reader, SupportsPrimary):
        primary = reader if isinstance(reader, SupportsPrimary) else None
        location = backend_choice.locate_run(primary, storage_dir, stored.run.id or "")
        store_root, db_path = location.store_root, location.db_path
    else:
        store_root, db_path = place, None
    return RunContext(
        storage_dir=storage_dir,
        store_root=store_root,
        db_path=db_path,
        project=stored.project,
        run=stored.run,
        read_only=True,
    )


def find_session_run(target: object) -> OpenRun | None:
    """The run of a session, or of a writer; None of anything else."""
    run = getattr(target, "open_run", None)
    return run if isinstance(run, OpenRun) else None


def read_run(target: object) -> RunReader:
    """Read the run behind a session, a context or a reader; nothing is written or joined.

    The context of a run that another process holds open is read through a store opened to read.

    Raises:
        SchemaValidationError: `target` is none of them.
        RunNotFoundError: The store has no such run.
        SessionStoreError: The store cannot be opened.
    """
    if isinstance(target, RunReader):
        return target
    if not isinstance(target, RunContext):
        run = find_session_run(target)
        if run is None:
            raise SchemaValidationError(
                f"session must be a TrainingSession or a RunContext, not {type(target).__name__}"
            )
        return RunReader.of(run)
    found = open_runs.find(target.run_id)
    if found is not None:
        return RunReader.of(found)
    if target.run_id is None or find_primary(target) is None:
        return RunReader(target, None)
    if target.read_only and target.backends:
        return open_foreign_store(target.storage_dir, target.backends[0]).open_run(target.run_id)
    reader = open_context_primary(target, read_only=True)
    reader.load_run(target.run_id)
    return RunReader(target, reader)


def find_primary(context: RunContext) -> BackendChoice | None:
    """The run's primary, as its context names it; the usual one for a context that only reads."""
    if not context.backends:
        if not context.read_only:
            return None
        return choose_primary(default_registry())
    # The run's first rank has all of its backends, whichever rank this process is.
    return backend_choice.plan_backends(list(context.backends), RankInfo()).primary


def open_context_primary(context: RunContext, *, read_only: bool) -> SupportsPrimary:
    """Open the primary of a run whose context names one.

    Raises:
        SessionStoreError: The store cannot be opened.
    """
    choice = find_primary(context)
    assert choice is not None
    config = choice.configure(
        context.storage_dir, run_id=context.run_id, project=context.project_name
    )
    if read_only:
        config = replace(config, read_only=True)
    return backend_choice.open_primary(choice, config)


@dataclass(frozen=True, slots=True)
class ForeignStore:
    """A backend that was opened for reading only, in place of the primary store.

    Attributes:
        reader: What it is read by.
        name: Name of the backend.
        place: How it was asked for, without secrets.
        storage_dir: The storage root that it was opened for.
    """

    reader: SupportsRead
    name: str
    place: str
    storage_dir: Path

    def open_run(self, run_id: str) -> RunReader:
        """Open one of its runs to read it.

        Args:
            run_id: The run, as the backend knows it.

        Raises:
            RunNotFoundError: It has no such run.
            SessionStoreError: It cannot be read.
        """
        return self.read(find_run(self.reader, run_id))

    def read(self, stored: StoredRun) -> RunReader:
        """Read one of its runs that was found already."""
        context = describe_context(stored, self.reader, self.storage_dir, self.place)
        context = msgspec.structs.replace(context, backends=(self.place,))
        return RunReader(context, self.reader, stored=stored)


def open_foreign_store(storage_dir: str | Path | None, backend: str) -> ForeignStore:
    """Open a backend for reading only.

    Args:
        storage_dir: The storage root, where the backend's place depends on it.
        backend: Name or URI of the backend.

    Raises:
        UnknownBackendError: Nothing installed answers to the name.
        SchemaValidationError: The backend cannot be read back.
        SessionStoreError: It cannot be opened or read.
    """
    root = resolve_storage_dir(storage_dir)
    if not isinstance(backend, str) or not backend.strip():
        raise SchemaValidationError(f"backend must be a backend name or URI, got {backend!r:.60}")
    choice = choose_backend(backend.strip(), default_registry())
    definition = choice.definition
    if Capability.READ not in definition.capabilities:
        raise SchemaValidationError(f"backend: {definition.name} can be written to but not read")
    config = replace(choice.configure(root), read_only=True)
    wait_for_late_delivery(root)
    try:
        reader: object = check_capabilities(definition, definition.open(config))
    except BackendUnavailable as error:
        raise SessionStoreError(f"backend: {error}") from error
    assert isinstance(reader, SupportsRead)
    return ForeignStore(reader, definition.name, redact_text(choice.specification), root)


def find_backend(first: object, second: object) -> str | None:
    """The backend that `open_run(backend, run_id)` names first, or None where that is a run.

    A URI holds what no run id may. A mere name is taken for a backend where
    one of that name is installed, and a run id and no folder comes behind it.
    """
    if not isinstance(first, str):
        return None
    text = first.strip()
    if ":" in text or "+" in text:
        return text
    if not isinstance(second, str) or not second or Path(second).expanduser().is_dir():
        return None
    return text if text in default_registry().names else None
