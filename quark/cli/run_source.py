"""Where a command reads runs from: the store of a storage root, or a backend in its place."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from quark.cli.store_access import describe_analysis, describe_unstored, find_run, open_store

if TYPE_CHECKING:
    from quark_core.backends.contract import StoredRun, SupportsRead
    from quark_core.sessions.session import TrainingSession

__all__ = ["RunSource", "backend_option"]

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
        if backend is None:
            self.reader: SupportsRead = open_store(storage_dir)
            return
        from quark_core.runs.foreign_runs import open_foreign_store

        self._foreign = open_foreign_store(storage_dir, backend)
        self.reader = self._foreign.reader

    @property
    def arguments(self) -> str:
        """The option that asks for the same backend again, with a space before it, or nothing."""
        return "" if self._backend is None else f" --backend {shlex.quote(self._foreign.place)}"

    def find(self, run: str) -> StoredRun:
        """The run whose id, the beginning of it, or whose name is given.

        Raises:
            RunNotFoundError: No run, or more than one, fits.
        """
        return find_run(self.reader, run)

    def open(self, run_id: str) -> TrainingSession:
        """A run for reading.

        Raises:
            RunNotFoundError: There is no such run.
        """
        from quark_core.config.arguments import resolve_storage_dir
        from quark_core.sessions.session import TrainingSession
        from quark_core.sessions.shortcuts import open_run

        if self._backend is None:
            return open_run(run_id, resolve_storage_dir(self._storage_dir))
        return TrainingSession(self._foreign.open_run(run_id))

    def describe_state(self, run_id: str) -> list[str]:
        """Lines on what is stored of a run's analysis, and on what is not stored of it yet."""
        return [
            line
            for line in (self.describe_analysis(run_id), self.describe_unstored(run_id))
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
