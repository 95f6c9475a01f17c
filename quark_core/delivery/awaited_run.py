"""Holds a lane back until the run that another process begins is in the store.

A store refuses records of a run that was never started in it. Which rank's
records come first is chance, so those of a rank that joins a run wait, in
memory and in the journal like in any outage.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from quark_core.backend import Backend, SupportsRead
from quark_core.errors import BackendUnavailable, RunNotFoundError, SessionStoreError

__all__ = ["AWAIT_CAP_S", "check_run_is_there", "wait_for_run"]

AWAIT_CAP_S = 15.0
"""Bound of the wait between two tries of such a lane."""

_QUIET_S = 1.0
_POLL_S = 0.05


def wait_for_run(
    open_backend: Callable[[], Backend], run_id: str | None, opened: object
) -> Callable[[], Backend]:
    """Open a backend only once it has a run; for a lane, on its own thread.

    Args:
        open_backend: Opens it.
        run_id: The run.
        opened: The backend, where it was open before and outlives a failure.
    """

    def open_when_there() -> Backend:
        backend = open_backend()
        deadline = time.monotonic() + _QUIET_S
        poll_s = _POLL_S
        while True:
            try:
                check_run_is_there(backend, run_id, closes=False)
            except BackendUnavailable:
                if time.monotonic() < deadline:
                    time.sleep(poll_s)
                    poll_s *= 1.5
                    continue
                if opened is None:
                    backend.close()
                raise
            return backend

    return open_when_there


def check_run_is_there(backend: Backend, run_id: str | None, *, closes: bool = True) -> None:
    """See that a backend has a run.

    Args:
        backend: It; one that cannot be asked, or has no store but the journal, passes.
        run_id: The run.
        closes: Whether the backend is closed where it has not.

    Raises:
        BackendUnavailable: It has not, so far.
    """
    asked: object = backend
    if run_id is None or getattr(backend, "keeps_journal", False):
        return
    if not isinstance(asked, SupportsRead):
        return
    try:
        asked.load_run(run_id)
    except SessionStoreError as error:
        if closes:
            backend.close()
        if not isinstance(error, RunNotFoundError):
            raise BackendUnavailable(str(error)) from error
        raise BackendUnavailable(
            f"run {run_id} is not in the store yet; the rank that leads it begins it there"
        ) from None
