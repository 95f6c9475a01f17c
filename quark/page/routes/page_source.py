"""The source of the page: one opened backend, and how each thing is read from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from quark.page.recent import Recent
from quark_core.backends.contract import (
    SupportsArtifacts,
    SupportsChanges,
    SupportsGenerations,
    SupportsGrid,
    SupportsRead,
    SupportsSearch,
    SupportsSeries,
)
from quark_core.backends.registry import default_registry
from quark_core.backends.run_summary import StoredRun
from quark_core.config.arguments import check_run_id, resolve_storage_dir
from quark_core.errors import RunNotFoundError, SchemaValidationError, SessionStoreError
from quark_core.runs.backend_choice import choose_primary, make_takeover, open_reader
from quark_core.runs.run_reader import ForeignStore, RunReader, describe_context, open_foreign_store

if TYPE_CHECKING:
    from quark_core.backends.run_summary import RunSummary
    from quark_core.delivery.takeover import Takeover
    from quark_core.records.columns import Columns
    from quark_core.records.query import Query
    from quark_core.records.sweeps import StoredSweep, StoredTrial

Answer = TypeVar("Answer")

_SUMMARIES_KEPT_S = 2.0
_ENDED_KEPT_S = 60.0
_MOST_SUMMARIES = 256


@runtime_checkable
class SweepReader(Protocol):
    """What is read of a backend that coordinates; see `SupportsCoordination`."""

    def list_sweeps(self, project: str | None = None) -> list[StoredSweep]:
        """The sweeps there are, newest first."""

    def load_sweep(self, sweep_id: str) -> StoredSweep:
        """One sweep."""

    def list_trials(
        self, sweep_id: str, *, start: int = 0, limit: int | None = None
    ) -> list[StoredTrial]:
        """Trials of a sweep from a number on, in their order."""


@dataclass(frozen=True, slots=True)
class Reopening:
    """How another process opens the same source.

    Attributes:
        opener: A function of one text that returns a `PageSource`, as `module:name`.
        argument: The text.
    """

    opener: str
    argument: str


@dataclass(frozen=True, slots=True)
class _Kept:
    until_s: float
    value: Any


class PageSource:
    """One backend, opened for reading; every method may be called from any thread.

    Args:
        reader: The backend.
        place: Where it is, for people.
        backend: Its name.
        storage_dir: The storage root that it was opened for.
        specification: Name or URI by which it was asked for; None for the root's own store.
        open_run: Opens one of its runs for reading.
        reopening: How another process opens it; None where root and specification say it.
        takeover: Looks after what processes that are gone have left for it.
        opens_later: Whether there is no store yet, and the root's is opened once it is there.

    Attributes:
        is_awaited: Whether there is still no store.
        reader, place, backend, storage_dir, specification, reopening: As given.
    """

    def __init__(
        self,
        reader: SupportsRead,
        *,
        place: str,
        backend: str,
        storage_dir: Path,
        specification: str | None = None,
        open_run: Callable[[str], RunReader] | None = None,
        reopening: Reopening | None = None,
        takeover: Takeover | None = None,
        opens_later: bool = False,
    ) -> None:
        self.reader = reader
        self.is_awaited = opens_later
        self.place = place
        self.backend = backend
        self.storage_dir = storage_dir
        self.specification = specification
        self.reopening = reopening
        self._open_run = open_run
        self._takeover = takeover
        self._lock = threading.Lock()
        self._kept = Recent[tuple[str, str], _Kept](_MOST_SUMMARIES)

    @property
    def is_foreign(self) -> bool:
        """Whether it was asked for by name, in place of the storage root's own store."""
        return self._open_run is not None

    def describe_preparing(self) -> str | None:
        """A sentence while something is done that makes reading slow, or None."""
        describe = getattr(self.reader, "describe_upkeep", None)
        return None if describe is None else describe()

    @property
    def capabilities(self) -> Mapping[str, bool]:
        """What the backend does by itself."""
        reader: object = self.reader
        return {
            "series": isinstance(reader, SupportsSeries),
            "search": isinstance(reader, SupportsSearch),
            "changes": isinstance(reader, SupportsChanges),
            "grid": isinstance(reader, SupportsGrid),
            "outputs": isinstance(reader, SupportsGenerations),
            "artifacts": isinstance(reader, SupportsArtifacts),
            "sweeps": isinstance(reader, SweepReader),
        }

    def catch_up(self) -> None:
        """See that what processes which are gone have left is there; called before an answer."""
        if self.is_awaited:
            self._open_awaited()
        if self._takeover is not None:
            self._takeover.look()

    def _open_awaited(self) -> None:
        with self._lock:
            if not self.is_awaited or _has_no_store(self.storage_dir):
                return
            try:
                found = _open_own(self.storage_dir)
            except SessionStoreError:
                return  # it is being made
            self.reader, self.place, self.backend = found.reader, found.place, found.backend
            self._takeover = found._takeover
            self.is_awaited = False

    def load_run(self, run_id: str) -> StoredRun:
        """One run.

        Raises:
            RunNotFoundError: There is none.
        """
        return self.reader.load_run(check_known_form(run_id))

    def summarize(self, run_id: str) -> RunSummary:
        """One run with its metrics summed up; a little old where every point is read for it."""
        from quark_core.runs.run_search import summarize_run

        check_known_form(run_id)
        if isinstance(self.reader, SupportsSearch):
            # A summary is also there of what lies in the trash.
            self.reader.load_run(run_id)
            summary = summarize_run(self.reader, run_id)
            self._put(("summary", run_id), summary, _SUMMARIES_KEPT_S)
            return summary
        return self._keep(
            ("summary", run_id),
            # What has ended stays as it is, but for what is mirrored late.
            lambda found: _SUMMARIES_KEPT_S if found.state == "running" else _ENDED_KEPT_S,
            lambda: summarize_run(self.reader, run_id),
        )

    def recall(self, run_id: str) -> RunSummary:
        """One run as `summarize` has it, or had it a moment ago: for what a page asks next."""
        found = self._find(("summary", run_id))
        return self.summarize(run_id) if found is None else found.value

    def open_run(self, run_id: str) -> RunReader:
        """One run, opened for reading only, as analyzers want it.

        Raises:
            RunNotFoundError: There is none.
        """
        check_known_form(run_id)
        if self._open_run is not None:
            return self._open_run(run_id)
        stored = self.reader.load_run(run_id)
        context = describe_context(stored, self.reader, self.storage_dir, self.place)
        return RunReader(context, self.reader)

    def forget(self) -> None:
        """Read everything anew: something was changed."""
        with self._lock:
            self._kept.clear()

    def close(self) -> None:
        """Give up the backend's files and connections; reads under way may fail."""
        close = getattr(self.reader, "close", None)
        if close is not None:
            close()

    def _keep(
        self,
        key: tuple[str, str],
        measure_s: Callable[[Answer], float],
        read: Callable[[], Answer],
    ) -> Answer:
        """What was read a moment ago, or what is read now and kept for so long."""
        found = self._find(key)
        if found is not None:
            known: Answer = found.value
            return known
        value = read()
        self._put(key, value, measure_s(value))
        return value

    def _find(self, key: tuple[str, str]) -> _Kept | None:
        with self._lock:
            found = self._kept.get(key)
        return found if found is not None and time.monotonic() < found.until_s else None

    def _put(self, key: tuple[str, str], value: Any, kept_s: float) -> None:
        with self._lock:
            self._kept[key] = _Kept(time.monotonic() + kept_s, value)


class _NoStore:
    """Stands for the store of a folder in which nothing has been trained yet."""

    def read(self, run_id: str, kind: str, query: Query) -> Columns:  # noqa: ARG002
        """See `SupportsRead`."""
        raise RunNotFoundError(f"the run {run_id!r:.80} does not exist")

    def load_run(self, run_id: str) -> StoredRun:
        """See `SupportsRead`."""
        raise RunNotFoundError(f"the run {run_id!r:.80} does not exist")

    def list_runs(self, **_: object) -> list[StoredRun]:
        """See `SupportsRead`."""
        return []


def _has_no_store(root: Path) -> bool:
    """Whether runs of a folder that is there would be kept in it, and none was yet."""
    is_local = "://" not in choose_primary(default_registry()).specification
    return is_local and root.is_dir() and not (root / ".quark").exists()


def _open_own(root: Path) -> PageSource:
    """The root's own store."""
    reader = open_reader(root)
    place = str(reader.locate("unknown").store_root)
    return PageSource(
        reader,
        place=place,
        backend=_name_backend(reader, place),
        storage_dir=root,
        takeover=make_takeover(root, reader),
    )


def open_source(
    storage_dir: Path | None, backend: str | None = None, *, awaits_store: bool = False
) -> PageSource:
    """Open what is to be looked at, for reading only.

    Args:
        storage_dir: The storage root; None is the working directory.
        backend: Name or URI of a backend to read in place of the root's store.
        awaits_store: Whether a folder without a store is one without runs, until a run is begun
            there.

    Raises:
        SessionStoreError: There is nothing, or it cannot be read.
        SchemaValidationError: The backend cannot be read back.
    """
    root = resolve_storage_dir(storage_dir)
    if backend is None and awaits_store and _has_no_store(root):
        name = "embedded"
        return PageSource(
            _NoStore(), place=str(root), backend=name, storage_dir=root, opens_later=True
        )
    if backend is None:
        return _open_own(root)
    store: ForeignStore = open_foreign_store(root, backend)
    return PageSource(
        store.reader,
        place=store.place,
        backend=store.name,
        storage_dir=root,
        specification=backend,
        open_run=store.open_run,
    )


def _name_backend(reader: object, place: str) -> str:
    return "service" if "://" in place else str(getattr(reader, "backend_name", "embedded"))


def check_known_form(run_id: str) -> str:
    """An id that a run can have.

    Raises:
        RunNotFoundError: No run can have it.
    """
    try:
        return check_run_id(run_id)
    except SchemaValidationError:
        raise RunNotFoundError(f"the run {run_id!r:.80} does not exist") from None
