"""How long the MLflow client waits while the mirror calls it; the user's own calls keep theirs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["bounded"]

# MLflow's own retries take minutes; the lane waits and tries again itself.
_BOUNDS: Mapping[str, str] = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}

_lock = threading.Lock()
_callers = 0
_set: list[str] = []


@contextmanager
def bounded() -> Iterator[None]:
    """Within it a call to MLflow ends in about half a minute, whatever the server does.

    MLflow reads these bounds from the environment at each request and takes
    them in no other way. What the user has set stays; what is set here is
    taken back when the last caller has left.
    """
    global _callers
    with _lock:
        _callers += 1
        if _callers == 1:
            _set[:] = [name for name in _BOUNDS if name not in os.environ]
            os.environ.update({name: _BOUNDS[name] for name in _set})
    try:
        yield
    finally:
        with _lock:
            _callers -= 1
            if _callers == 0:
                for name in _set:
                    # What somebody else has set meanwhile is theirs.
                    if os.environ.get(name) == _BOUNDS[name]:
                        del os.environ[name]


def _forget_callers() -> None:
    """A forked child has none of the threads that were calling, but has their environment."""
    global _lock, _callers
    _lock = threading.Lock()
    if _callers:
        _callers = 0
        for name in _set:
            if os.environ.get(name) == _BOUNDS[name]:
                del os.environ[name]


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_callers)
