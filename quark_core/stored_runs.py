"""Looks up runs in a store, and says which may be continued."""

from __future__ import annotations

from quark_core.backend import StoredRun, SupportsPrimary
from quark_core.errors import InvalidRunStateError, RunNotFoundError, SessionStoreError
from quark_core.open_run import open_runs
from quark_core.records import RunRecord

__all__ = ["check_resumable", "find_parent", "load_run"]

_LISTED = 5


def check_resumable(stored: StoredRun, *, reopen: bool) -> None:
    """Refuse to continue a run that is alive, or completed and not to be reopened.

    Raises:
        InvalidRunStateError: It is one of these.
    """
    run_id = stored.run.id
    if stored.state == "running":
        here = open_runs.find(run_id) is not None
        where = "in this process; end it first" if here else "in another process"
        raise InvalidRunStateError(f"run_id {run_id} is alive {where}, so it cannot be resumed")
    if stored.state == "completed" and not reopen:
        raise InvalidRunStateError(
            f"run_id {run_id} is completed, so it cannot be resumed "
            "(reopen=True allows a final evaluation)"
        )


def find_parent(primary: SupportsPrimary | None, parent_run_id: str | None) -> RunRecord | None:
    """The run that another one descends from; None where nobody can be asked.

    Raises:
        RunNotFoundError: The store has no such run.
    """
    if parent_run_id is None:
        return None
    if primary is None:
        return None
    try:
        return primary.load_run(parent_run_id).run
    except RunNotFoundError as error:
        reason = str(error).removeprefix(f"run_id {parent_run_id}: ")
        raise RunNotFoundError(f"parent_run_id {parent_run_id}: {reason}") from error


def load_run(reader: SupportsPrimary, run_id: str) -> StoredRun:
    """A run of a store; an unknown one is refused with those that may be meant."""
    try:
        return reader.load_run(run_id)
    except RunNotFoundError as error:
        raise RunNotFoundError(f"{error}{_describe_near_runs(reader, run_id)}") from None


def _describe_near_runs(reader: SupportsPrimary, given: str) -> str:
    """Which runs a text that is no run's id may have meant: a beginning, or a name."""
    try:
        runs = [stored.run for stored in reader.list_runs()]
    except SessionStoreError:
        return ""
    begin = [run.id for run in runs if run.id and run.id.startswith(given)]
    named = [run.id for run in runs if run.id and run.name == given]
    if not begin and not named:
        return ""
    found = begin or named
    listed = ", ".join(found[:_LISTED]) + (", …" if len(found) > _LISTED else "")
    what = "begins so" if begin else "has that name, which is no id"
    if len(found) > 1:
        what = "begin so" if begin else "have that name, which is no id"
    return f"; {listed} {what}"
