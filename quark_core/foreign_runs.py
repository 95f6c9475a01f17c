"""Opens a run out of any backend that reads: a mirror, or another tool's store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quark_core.backend import Capability, SupportsPrimary, SupportsRead
from quark_core.backend_choice import choose_backend
from quark_core.capability_check import check_capabilities
from quark_core.context import RunContext
from quark_core.delivery.origin import Origin
from quark_core.delivery.stream import RunStream
from quark_core.errors import BackendUnavailable, SchemaValidationError, SessionStoreError
from quark_core.open_run import OpenRun
from quark_core.redaction import redact_text
from quark_core.registry import default_registry
from quark_core.run_arguments import check_run_id, resolve_storage_dir

__all__ = ["open_foreign_run"]


def open_foreign_run(run_id: str, storage_dir: str | Path | None, backend: str) -> OpenRun:
    """Open a run of a backend for reading only; see `quark.open_run`.

    Args:
        run_id: The run, as that backend knows it.
        storage_dir: The storage root, where the backend's place depends on it.
        backend: Name or URI of the backend.

    Raises:
        UnknownBackendError: Nothing installed answers to the name.
        SchemaValidationError: The backend cannot be read back.
        RunNotFoundError: It has no such run.
        SessionStoreError: It cannot be opened or read.
    """
    check_run_id(run_id)
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
    stored = reader.load_run(run_id)
    place = redact_text(choice.specification)
    location = reader.locate(run_id) if isinstance(reader, SupportsPrimary) else None
    context = RunContext(
        storage_dir=root,
        store_root=place if location is None else location.store_root,
        db_path=None if location is None else location.db_path,
        project=stored.project,
        run=stored.run,
        backends=(place,),
        read_only=True,
    )
    return OpenRun(
        context,
        RunStream(Origin(run_id)),
        reader,
        refusal=f"the run was opened from {definition.name} for reading only",
    )
