"""Opens a run out of any backend that reads: a mirror, or another tool's store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from quark_core.backends.checks import check_capabilities
from quark_core.backends.contract import Capability, SupportsPrimary, SupportsRead
from quark_core.backends.registry import default_registry
from quark_core.config.arguments import check_run_id, resolve_storage_dir
from quark_core.config.redaction import redact_text
from quark_core.delivery.segments import Origin
from quark_core.delivery.stream import RunStream
from quark_core.errors import BackendUnavailable, SchemaValidationError, SessionStoreError
from quark_core.records.runs import RunContext
from quark_core.runs.backend_choice import choose_backend
from quark_core.runs.open_run import OpenRun
from quark_core.runs.run_ids import find_run

__all__ = ["ForeignStore", "find_backend", "open_foreign_run", "open_foreign_store"]


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

    def open_run(self, run_id: str) -> OpenRun:
        """Open one of its runs for reading only.

        Args:
            run_id: The run, as the backend knows it.

        Raises:
            RunNotFoundError: It has no such run.
            SessionStoreError: It cannot be read.
        """
        stored = find_run(self.reader, run_id)
        run_id = stored.run.id or run_id
        reader: object = self.reader
        location = reader.locate(run_id) if isinstance(reader, SupportsPrimary) else None
        context = RunContext(
            storage_dir=self.storage_dir,
            store_root=self.place if location is None else location.store_root,
            db_path=None if location is None else location.db_path,
            project=stored.project,
            run=stored.run,
            backends=(self.place,),
            read_only=True,
        )
        run = OpenRun(
            context,
            RunStream(Origin(run_id)),
            self.reader,
            refusal=f"the run was opened from {self.name} for reading only",
        )
        run.config = stored.config
        return run


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
        raise SchemaValidationError(f"backend must be a backend's name or URI, got {backend!r:.60}")
    choice = choose_backend(backend.strip(), default_registry())
    definition = choice.definition
    if Capability.READ not in definition.capabilities:
        raise SchemaValidationError(
            f"backend: {definition.name} takes records but cannot be read back"
        )
    config = replace(choice.configure(root), read_only=True)
    try:
        reader: object = check_capabilities(definition, definition.open(config))
    except BackendUnavailable as error:
        raise SessionStoreError(f"backend: {error}") from error
    assert isinstance(reader, SupportsRead)
    return ForeignStore(reader, definition.name, redact_text(choice.specification), root)


def open_foreign_run(run_id: str, storage_dir: str | Path | None, backend: str) -> OpenRun:
    """Open a run of a backend for reading only; see `quark.open_run`.

    Args:
        run_id: The run, as that backend knows it.
        storage_dir: The storage root, where the backend's place depends on it.
        backend: Name or URI of the backend.

    Raises:
        UnknownBackendError: Nothing installed answers to the name.
        SchemaValidationError: A bad id, or the backend cannot be read back.
        RunNotFoundError: It has no such run.
        SessionStoreError: It cannot be opened or read.
    """
    check_run_id(run_id)
    return open_foreign_store(storage_dir, backend).open_run(run_id)


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
