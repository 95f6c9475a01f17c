"""The top-level functions: the session's methods, and the same on the session opened last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quark_core.config.redaction import redact_text
from quark_core.errors import InvalidRunStateError, SchemaValidationError
from quark_core.records import EventRecord, RunStatus
from quark_core.records.runs import RunContext
from quark_core.runs import opening
from quark_core.runs.open_run import open_runs
from quark_core.sessions.fingerprints import SampleIds
from quark_core.sessions.session import TrainingSession

start_run = TrainingSession.start_run
resume_run = TrainingSession.resume_run


def open_run(
    run_id: str, storage_dir: str | Path | None = None, *, backend: str | None = None
) -> TrainingSession:
    """Look at a run without touching it: no status change, no event.

    Every reader and analyzer works on what is returned; whatever would write
    raises InvalidRunStateError. A run that another tool keeps is opened by
    `open_run("mlflow+http://127.0.0.1:5000", run_id)`, or with `backend=`.

    Args:
        run_id: The run, by its id or the beginning of that (4 characters at least); or name or
            URI of a backend, with the run behind it.
        storage_dir: The storage root, by default the working directory or the
            nearest folder above it that has a store; or the run, behind a backend.
        backend: Name or URI of a backend to read from in place of the primary
            store, such as "csv:/data/mirror"; analyzers return their results
            there and store nothing.

    Raises:
        RunNotFoundError: The store has no such run.
        SchemaValidationError: The backend cannot be read back, is given twice,
            or has no run behind it.
        SessionStoreError: There is no store, or it cannot be read.
    """
    from quark_core.runs.foreign_runs import find_backend

    first = find_backend(run_id, storage_dir)
    if first is not None:
        shown = redact_text(first)
        if backend is not None:
            raise SchemaValidationError(
                f"backend is given twice: {shown!r} comes first, and backend= is "
                f"{redact_text(str(backend))!r}; leave one of them out"
            )
        if not isinstance(storage_dir, str):
            raise SchemaValidationError(
                f"run_id must come behind the backend: open_run({shown!r}, run_id), "
                f"got {storage_dir!r:.60}; a storage root goes with "
                "open_run(run_id, storage_dir, backend=…)"
            )
        return TrainingSession(opening.open_for_reading(storage_dir, None, first))
    if isinstance(storage_dir, str) and "://" in storage_dir:
        shown = redact_text(storage_dir)
        raise SchemaValidationError(
            f"storage_dir must be a folder, and {shown!r} is a URI: "
            f"open_run({shown!r}, run_id) reads from a backend"
        )
    return TrainingSession(opening.open_for_reading(run_id, storage_dir, backend))


def end_run(session: TrainingSession | None = None, status: RunStatus = "completed") -> RunContext:
    """End a session's run; without a session, that of the one opened last.

    Raises:
        InvalidRunStateError: No session is open, or this one has ended.
    """
    return _choose_session(session, "end_run").end_run(status)


def add_tag(session: TrainingSession | str | None = None, tag: str | None = None) -> RunContext:
    """Add a tag to a session's run: `add_tag(session, tag)`, or `add_tag(tag)` for the latest.

    Raises:
        SchemaValidationError: No tag, or a bad one.
        InvalidRunStateError: No session is open, or this one has ended.
    """
    chosen, text = _split_target(session, tag, "tag")
    return _choose_session(chosen, "add_tag").add_tag(text)


def add_log(
    session: TrainingSession | str | None = None, message: str | None = None, **arguments: Any
) -> EventRecord:
    """Write a log line: `add_log(session, message, …)`, or `add_log(message, …)` for the latest.

    Takes the keywords of `TrainingSession.add_log`.

    Raises:
        SchemaValidationError: No message, or a bad argument.
        InvalidRunStateError: No session is open, or this one has ended.
    """
    chosen, text = _split_target(session, message, "message")
    return _choose_session(chosen, "add_log").add_log(text, **arguments)


def watch_data(
    loader: Any,
    name: str = "train",
    *,
    sample_ids: SampleIds = None,
    session: TrainingSession | None = None,
) -> Any:
    """The same loader, whose samples are noted as they come: which ones, and in which order.

    What it yields is what the loader yields, and what the loader raises passes through; length
    and attributes are the loader's. Each pass through it becomes one fingerprint of the run, also
    one that was left early. Of each sample 4 kB, or 16 places of a larger one, are hashed, and
    batches 0 to 3 and those at powers of two as a whole, where the loop takes them. Batches with
    tensors on a device are only counted, since looking at them would wait for the device.

    Args:
        loader: A DataLoader, or anything to iterate over.
        name: Key of the fingerprints.
        sample_ids: A key of the batches, or a function of a batch, that gives one id for each
            sample; then ids are digested in place of contents.
        session: The run; by default that of the session opened last.

    Raises:
        SchemaValidationError: A bad argument.
        InvalidRunStateError: No session is open.
    """
    return _choose_session(session, "watch_data").watch_data(loader, name, sample_ids=sample_ids)


def _split_target(
    session: TrainingSession | str | None, text: str | None, argument: str
) -> tuple[TrainingSession | None, str]:
    """Tell `f(session, text)` from `f(text)`."""
    if text is None and not isinstance(session, TrainingSession):
        session, text = None, session
    if text is None:
        raise SchemaValidationError(f"{argument} must be given")
    return session, text  # type: ignore[return-value]


def _choose_session(session: TrainingSession | None, call: str) -> TrainingSession:
    if session is not None:
        if not isinstance(session, TrainingSession):
            raise SchemaValidationError(
                f"session must be a TrainingSession, not {type(session).__name__}"
            )
        return session
    sessions = [one for one in open_runs.sessions if isinstance(one, TrainingSession)]
    if not sessions:
        raise InvalidRunStateError(f"{call}: no session is open in this process")
    return sessions[-1]
