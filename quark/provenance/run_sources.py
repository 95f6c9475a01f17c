"""`quark.read_sources`: the sources of a run by its id, or of a session."""

from __future__ import annotations

from pathlib import Path

from quark.provenance import sources
from quark.provenance.sources import KeptSources
from quark_core.errors import ArtifactNotFoundError, SchemaValidationError
from quark_core.records.query import check_index
from quark_core.sessions.session import TrainingSession, open_run


def read_sources(
    run: str | TrainingSession,
    storage_dir: str | Path | None = None,
    *,
    backend: str | None = None,
    attempt: int | None = None,
) -> KeptSources:
    """The code that a run was made of, as it was when the run had it.

    Args:
        run: The run, by its id or the beginning of that; or a session. Of one that is open
            here, what its background thread has kept so far.
        storage_dir, backend: Where it is, as of `open_run`.
        attempt: Which attempt of a run that was resumed; the newest one by default.

    Returns:
        A mapping of paths, relative to the project's root, to files with `text`, `sha256`,
        `size_bytes` and `reason`, which says why there is no text.

    Raises:
        ArtifactNotFoundError: Nothing is known of its sources: it was run with
            QUARK_SOURCES=off, or by a version of Quark that kept none.
        RunNotFoundError: The store has no such run.
        SchemaValidationError: `run` is neither an id nor a session; as of `open_run`.
        SessionStoreError: There is no store, or it cannot be read.
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
