"""Where a command reads runs from: the store of a storage root, or a backend in its place."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from quark.cli.store_access import describe_analysis, describe_unstored, find_run, open_store
from quark_core.runs.run_ids import name_store

if TYPE_CHECKING:
    from quark_core.backends.contract import StoredRun, SupportsRead
    from quark_core.runs.run_reader import RunReader

_MOST_PROJECTS = 10

F = TypeVar("F", bound=Callable[..., Any])


def backend_option(command: F) -> F:
    """Add --backend to a command."""
    return click.option(
        "-b",
        "--backend",
        metavar="URI",
        default=None,
        help="Read from here in place of the store: mlflow+http://HOST:PORT, csv:DIR …",
    )(command)


class RunSource:
    """What a command reads from; opened at once.

    Args:
        storage_dir: The storage root, or None for the working directory.
        backend: Name or URI of a backend to read from in place of the root's store.

    Raises:
        SessionStoreError: There is nothing, or it cannot be read.
        SchemaValidationError: The backend cannot be read back.
    """

    def __init__(self, storage_dir: Path | None, backend: str | None = None) -> None:
        self._storage_dir = storage_dir
        self._backend = backend
        self._place: str | None = None
        if backend is None:
            self.reader: SupportsRead = open_store(storage_dir)
            return
        from quark_core.runs.run_reader import open_foreign_store

        self._foreign = open_foreign_store(storage_dir, backend)
        self.reader = self._foreign.reader
        self._place = self._foreign.place

    @property
    def arguments(self) -> str:
        """The option that asks for the same backend again, with a space before it, or nothing."""
        return "" if self._backend is None else f" --backend {shlex.quote(self._foreign.place)}"

    @property
    def store(self) -> str:
        """The store in words, for messages that say where something was looked for."""
        return name_store(self.reader, self._place)

    def check_project(self, project: str | None, argument: str) -> None:
        """Refuse a project that has no run here; for where nothing was found.

        Raises:
            click.UsageError: There is none of the name; the message lists those there are.
        """
        if project is None or self.reader.list_runs(project=project, limit=1):
            return
        from quark_core.runs.run_ids import find_labels
        from quark_core.search.resolution import suggest_names

        known = sorted({label.project for label in find_labels(self.reader, "")})
        if not known:
            return
        shown = suggest_names(project, known) or known[:_MOST_PROJECTS]
        more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
        raise click.UsageError(
            f"{argument}: there is no project {project!r} in {self.store}; there are "
            f"{', '.join(map(repr, shown))}{more}"
        )

    def find(self, run: str) -> StoredRun:
        """The run whose id or name, or the beginning of one, is given.

        Raises:
            RunNotFoundError: No run, or more than one, fits.
        """
        return find_run(self.reader, run, self._place)

    def open(self, run: str) -> RunReader:
        """The run whose id or name, or the beginning of one, is given, to be read.

        Raises:
            RunNotFoundError: No run, or more than one, fits.
        """
        return self.read(self.find(run))

    def open_side(self, text: str) -> list[RunReader]:
        """The runs of one side, given by comma, each once.

        Raises:
            click.UsageError: There is nothing between two commas.
            RunNotFoundError: No run, or more than one, fits.
        """
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise click.UsageError(f"RUN {text!r}: between two commas there must be a run")
        found = [self.find(part) for part in parts]
        return [self.read(one) for one in {one.run.id: one for one in found}.values()]

    def read(self, stored: StoredRun) -> RunReader:
        """A run that was found here, to be read."""
        from quark_core.config.arguments import resolve_storage_dir
        from quark_core.runs.run_reader import read_stored

        if self._backend is not None:
            return self._foreign.read(stored)
        return read_stored(stored, self.reader, resolve_storage_dir(self._storage_dir))

    def describe_state(self, run_id: str) -> list[str]:
        """Lines on what is stored of a run's analysis, and on what is not stored of it yet."""
        return [
            line
            for line in (
                self.describe_analysis(run_id),
                self.describe_unstored(run_id) or self._describe_mirrors(run_id),
            )
            if line
        ]

    def describe_analysis(self, run_id: str) -> str | None:
        """A line on the alerts that are stored of a run, or None."""
        return None if self._backend is not None else describe_analysis(self.reader, run_id)

    def describe_unstored(self, run_id: str) -> str | None:
        """A line that says that a run is not whole in its store, or None."""
        if self._backend is not None:
            return None  # what waits for another place is in the run's own journal
        return describe_unstored(self.reader, self._storage_dir, run_id)

    def _describe_mirrors(self, run_id: str) -> str | None:
        """A line that says what a run's mirrors lack that nobody delivers now, or None."""
        if self._backend is not None:
            return None
        from quark.mirrors.survey import survey_mirrors
        from quark_core.config.arguments import resolve_storage_dir

        root = resolve_storage_dir(self._storage_dir)
        states = survey_mirrors(root, root / ".quark" / "runs" / run_id, run_id)
        lacking = [
            f"{state.backend} lacks {state.waiting} records"
            for state in states
            if state.state == "waiting" and not state.primary
        ]
        if not lacking:
            return None
        return f"{', '.join(lacking)} of this run: quark sync {shlex.quote(str(root))}"
