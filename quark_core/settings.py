"""Environment variables that Quark reads, each in one place."""

from __future__ import annotations

import os

from quark_core.errors import SchemaValidationError

__all__ = [
    "BACKENDS",
    "EXIT_TIMEOUT",
    "JOURNAL_DIR",
    "PERSISTENCE_TIMEOUT",
    "PERSISTENCE_URL",
    "REQUIRE_SERVICE",
    "RUN_ID",
    "SIGTERM_HANDLER",
    "check_timeouts",
    "exit_timeout_s",
    "persistence_timeout_s",
]

BACKENDS = "QUARK_BACKENDS"
EXIT_TIMEOUT = "QUARK_EXIT_TIMEOUT_SECONDS"
JOURNAL_DIR = "QUARK_JOURNAL_DIR"
PERSISTENCE_TIMEOUT = "QUARK_PERSISTENCE_TIMEOUT_SECONDS"
PERSISTENCE_URL = "QUARK_PERSISTENCE_URL"
REQUIRE_SERVICE = "QUARK_REQUIRE_SERVICE"
RUN_ID = "QUARK_RUN_ID"
SIGTERM_HANDLER = "QUARK_SIGTERM_HANDLER"


def persistence_timeout_s() -> float:
    """How long a flush, a read or a start waits for the primary; 15 s by default."""
    return _read_seconds(PERSISTENCE_TIMEOUT, 15.0)


def exit_timeout_s() -> float:
    """How long the end of a run waits for delivery; 10 s by default."""
    return _read_seconds(EXIT_TIMEOUT, 10.0)


def check_timeouts() -> None:
    """Refuse a bad timeout where a run begins, not hours later where it ends.

    Raises:
        SchemaValidationError: One of them is no number of seconds.
    """
    persistence_timeout_s()
    exit_timeout_s()


def _read_seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise SchemaValidationError(f"{name} must be a number of seconds, got {text!r}")
    return seconds
