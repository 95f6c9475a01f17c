"""`quark.read_sources`: the sources of a run by its id, or of a session."""

from __future__ import annotations

from pathlib import Path

from quark.provenance import sources
from quark.provenance.sources import SourceSnapshot
from quark_core.errors import ArtifactNotFoundError, SchemaValidationError
from quark_core.records.query import check_index
from quark_core.sessions.session import TrainingSession, open_run


def read_sources(
    run: str | TrainingSession,
    storage_dir: str | Path | None = None,
    *,
    backend: str | None = None,
    attempt: int | None = None,
) -> SourceSnapshot:
    """Read the source snapshot of a run.

    Args:
        run: A run ID or unique prefix, or a session. For an open run, the files stored so far are
            returned.
        storage_dir: Folder of the `.quark` store. Defaults to the working directory, or the nearest
            parent that has a store.
        backend: Name or URI of a backend to read from instead of the store.
        attempt: Number of the attempt. Defaults to the newest.

    Returns:
        Mapping of paths, relative to the project's root, to files.

    Raises:
        ArtifactNotFoundError: The run has no source snapshot, for example because of
            QUARK_SOURCES=off.
        RunNotFoundError: The run does not exist.
        SchemaValidationError: An argument is invalid. The message names it.
        SessionStoreError: The store does not exist, or cannot be read.
    """
    if not isinstance(run, str | TrainingSession):
        raise SchemaValidationError(f"run must be a run ID or a session, not {type(run).__name__}")
    is_id = isinstance(run, str)
    opened = (open_run(run, storage_dir, backend=backend) if is_id else run).open_run  # type: ignore[arg-type, union-attr]
    if opened.reader is None or opened.context.run_id is None:
        raise ArtifactNotFoundError("the run stores nothing, so it has no source snapshot")
    if opened.stream.active:
        opened.flush()
    return sources.read_sources(
        opened.reader, opened.context.run_id, attempt=check_index(attempt, "attempt")
    )
