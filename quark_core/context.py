"""RunContext: what a run is and where it lies, as plain data that any process can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quark_core.records import ProjectRecord, Record, RunRecord

__all__ = ["RunContext"]


class RunContext(Record, frozen=True, gc=False):
    """A run's identity, state and place; picklable, without secrets.

    It is the handle for other processes: a writer made from it joins the
    run's open session where there is one in this process, and otherwise opens
    a stream of its own to the same backends.

    Attributes:
        storage_dir: The user's storage root.
        store_root: Root of the store; a URI where the primary is remote.
        db_path: Database file of the embedded store, else None.
        project: The project.
        run: The run as this process last knew it.
        backends: Specifications of all backends, the primary first.
        ranks: What the session was asked for by `ranks` or QUARK_RANKS, or None.
        read_only: Whether it only reads, as that of a run from `quark.open_run`.
    """

    storage_dir: Path
    store_root: Path | str
    db_path: Path | None
    project: ProjectRecord
    run: RunRecord
    backends: tuple[str, ...] = ()
    read_only: bool = False
    ranks: str | None = None

    @property
    def run_id(self) -> str | None:
        """The run's id; None only on a rank that cannot know it."""
        return self.run.id

    @property
    def run_path(self) -> Path | str:
        """The run's directory; a URI where the primary is remote."""
        return self.run.run_path if "://" in self.run.run_path else Path(self.run.run_path)

    @property
    def project_id(self) -> str:
        """Id of the project."""
        return self.project.id

    @property
    def project_name(self) -> str:
        """Name of the project."""
        return self.project.name

    @property
    def status(self) -> str:
        """The run's status as this process last knew it."""
        return self.run.status

    def to_dict(self) -> dict[str, Any]:
        """The whole context, project and run included, as JSON-like values."""
        # Written out: zero-argument super() does not work in every Struct subclass.
        return Record.to_dict(self)
