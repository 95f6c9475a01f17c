"""Opens a run out of any backend that reads: a mirror, or another tool's store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from quark_core.backends.checks import check_capabilities
from quark_core.backends.contract import Capability, StoredRun, SupportsRead
from quark_core.backends.registry import default_registry
from quark_core.config.arguments import resolve_storage_dir
from quark_core.config.redaction import redact_text
from quark_core.errors import BackendUnavailable, SchemaValidationError, SessionStoreError
from quark_core.runs.backend_choice import choose_backend
from quark_core.runs.late_delivery import wait_for_late_delivery
from quark_core.runs.run_ids import find_run
from quark_core.runs.run_reader import RunReader, describe_context


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
        raise SchemaValidationError(f"backend must be a backend's name or URI, got {backend!r:.60}")
    choice = choose_backend(backend.strip(), default_registry())
    definition = choice.definition
    if Capability.READ not in definition.capabilities:
        raise SchemaValidationError(
            f"backend: {definition.name} takes records but cannot be read back"
        )
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
