"""Environment variables that Quark reads, each in one place."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from quark_core.errors import SchemaValidationError

ARTIFACT_MAX_BYTES = "QUARK_ARTIFACT_MAX_BYTES"
BACKENDS = "QUARK_BACKENDS"
BLACK_BOX = "QUARK_BLACK_BOX"
CAPTURE = "QUARK_CAPTURE"
EXIT_TIMEOUT = "QUARK_EXIT_TIMEOUT_SECONDS"
HELPERS = "QUARK_HELPER_PROCESSES"
JOURNAL_DIR = "QUARK_JOURNAL_DIR"
JOURNAL_MAX_BYTES = "QUARK_JOURNAL_MAX_BYTES"
JOURNAL_TIMEOUT = "QUARK_JOURNAL_TIMEOUT_SECONDS"
LAUNCH_TIMEOUT = "QUARK_LAUNCH_TIMEOUT_SECONDS"
NOTIFY = "QUARK_NOTIFY"
NOTIFY_ON = "QUARK_NOTIFY_ON"
NOTIFY_SECRET = "QUARK_NOTIFY_SECRET"  # noqa: S105 - the name of a variable
"""The variable with the secret that signs webhooks."""
NOTIFY_SECRET_FILE = "QUARK_NOTIFY_SECRET_FILE"  # noqa: S105 - likewise
"""The variable with the path of a file that holds this secret."""
OBJECTIVE = "QUARK_OBJECTIVE"
OFFLINE = "QUARK_OFFLINE"
PARAMETERS = "QUARK_PARAMETERS"
PERSISTENCE_TIMEOUT = "QUARK_PERSISTENCE_TIMEOUT_SECONDS"
PERSISTENCE_URL = "QUARK_PERSISTENCE_URL"
PROGRESS = "QUARK_PROGRESS"
QUIET = "QUARK_QUIET"
RANKS = "QUARK_RANKS"
REQUIRE_SERVICE = "QUARK_REQUIRE_SERVICE"
RUN_ID = "QUARK_RUN_ID"
SIGTERM_HANDLER = "QUARK_SIGTERM_HANDLER"
SOURCES = "QUARK_SOURCES"
STORE_NAME = "QUARK_STORE_NAME"
SWEEP_STORAGE_DIR = "QUARK_SWEEP_STORAGE_DIR"
SYSTEM_METRICS = "QUARK_SYSTEM_METRICS"
TRACKER_BACKENDS = "QUARK_TRACKER_BACKENDS"
TRIAL = "QUARK_TRIAL"
USER_KEY = "QUARK_USER_KEY"
USER_KEY_FILE = "QUARK_USER_KEY_FILE"
WRITERS_TIMEOUT = "QUARK_WRITERS_TIMEOUT_SECONDS"
_MIRROR_S = 2.0


def persistence_timeout_s() -> float:
    """How long a flush, a read or a start waits for the primary; 15 s by default.

    A start waits 5 s at most for one that lies across a network, whatever is set.
    """
    return _read_seconds(PERSISTENCE_TIMEOUT, 15.0)


def exit_timeout_s() -> float:
    """How long the end of a run waits for delivery that does not get on; 10 s by default."""
    return _read_seconds(EXIT_TIMEOUT, 10.0)


def mirror_timeout_s() -> float | None:
    """How long the end of a run waits for mirrors: 2 s; None where the exit timeout is set."""
    return None if _read(EXIT_TIMEOUT) else _MIRROR_S


def journal_timeout_s() -> float:
    """How long the end of a run waits for the journal, within the exit timeout; 2 s by default."""
    return _read_seconds(JOURNAL_TIMEOUT, 2.0)


def launch_timeout_s() -> float:
    """How long a rank that keeps records waits to learn which run its launch has; 10 s."""
    return _read_seconds(LAUNCH_TIMEOUT, 10.0)


def writers_timeout_s() -> float:
    """How long the end of a run waits for other processes that still have it open; 2 s."""
    return _read_seconds(WRITERS_TIMEOUT, 2.0)


def journal_capacity_bytes(place: Path) -> int:
    """How large a run's journal may grow: 10 GB or a tenth of the free space, or what is set."""
    given = _read_bytes(JOURNAL_MAX_BYTES)
    if given is not None:
        return given
    existing = next((p for p in (place, *place.parents) if p.exists()), Path("/"))
    try:
        return min(10 * 10**9, shutil.disk_usage(existing).free // 10)
    except OSError:
        return 10 * 10**9


def artifact_limit_bytes() -> int:
    """How large the payload of one artifact may be; 50 GB by default."""
    given = _read_bytes(ARTIFACT_MAX_BYTES)
    return 50 * 10**9 if given is None else given


def chosen_store() -> str:
    """The project store of QUARK_STORE_NAME, or "" if none is named.

    Raises:
        SchemaValidationError: The name that is set is longer than 200 characters,
            or has one that cannot be printed.
    """
    given = _read(STORE_NAME)
    if given and (len(given) > 200 or not given.isprintable()):
        raise SchemaValidationError(
            f"{STORE_NAME} must be printable text of at most 200 characters, got {given!r:.60}"
        )
    return given


def store_name(storage_dir: Path) -> str:
    """The label that a run gets of its project store: QUARK_STORE_NAME or its folder's name.

    Raises:
        SchemaValidationError: QUARK_STORE_NAME cannot be a name.
    """
    folder = "".join(c if c.isprintable() else "?" for c in storage_dir.name)
    return chosen_store() or folder[:200] or "root"


def objective() -> str:
    """The metric that runs are judged by, such as `val/loss` or `val/score:max`; "" for none."""
    return _read(OBJECTIVE)


def allows_offline() -> bool:
    """Whether new runs begin without a service that is out of reach; not by default.

    Raises:
        SchemaValidationError: QUARK_OFFLINE is neither empty nor "allow".
    """
    given = _read(OFFLINE).lower()
    if given not in ("", "allow"):
        raise SchemaValidationError(f"{OFFLINE} must be 'allow' or unset, got {given!r:.40}")
    return given == "allow"


def is_quiet() -> bool:
    """Whether runs say nothing when they begin and end; they do by default."""
    return _read(QUIET) not in ("", "0")


def shows_progress() -> bool:
    """Whether `metrics.progress` prints how far a loop has come; it does by default."""
    return _read(PROGRESS) != "0"


def requires_service() -> bool:
    """Whether no run may begin without a service that answers; not by default."""
    return _read(REQUIRE_SERVICE) not in ("", "0")


SOURCE_MODES = ("keep", "digest", "off")


def source_mode() -> str | None:
    """What of a program's sources a run keeps, as SOURCE_MODES has it; None where nobody says.

    Raises:
        SchemaValidationError: QUARK_SOURCES is something else.
    """
    return _read_word(SOURCES, SOURCE_MODES) or None


CAPTURE_MODES = ("sys", "fd", "none")
SYSTEM_METRICS_S = 10.0


def capture_mode() -> str:
    """How the console of a run is captured where nobody says: "sys", "fd" or "none"; "sys".

    Raises:
        SchemaValidationError: QUARK_CAPTURE is something else.
    """
    return _read_word(CAPTURE, CAPTURE_MODES) or "sys"


def system_metrics_interval_s() -> float:
    """Seconds between two readings of the machine where nobody says; 0 for none, 10 by default."""
    return _read_seconds(SYSTEM_METRICS, SYSTEM_METRICS_S)


def check_timeouts() -> None:
    """Refuse a bad timeout where a run begins, not hours later where it ends.

    Raises:
        SchemaValidationError: One of them is no number of seconds.
    """
    for read in (persistence_timeout_s, exit_timeout_s, journal_timeout_s, launch_timeout_s,
                 writers_timeout_s, artifact_limit_bytes):  # fmt: skip
        read()
    journal_capacity_bytes(Path())


def _read(name: str) -> str:
    return os.environ.get(name, "").strip()


def _read_word(name: str, words: tuple[str, ...]) -> str:
    given = _read(name).lower()
    if given and given not in words:
        raise SchemaValidationError(
            f"{name} must be one of {', '.join(map(repr, words))}, got {given!r:.40}"
        )
    return given


def _read_bytes(name: str) -> int | None:
    text = _read(name)
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise SchemaValidationError(f"{name} must be a number of bytes, got {text!r:.60}")
    return int(text)


def _read_seconds(name: str, default: float) -> float:
    text = _read(name)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise SchemaValidationError(f"{name} must be a number of seconds, got {text!r:.60}")
    return seconds


def uses_helpers() -> bool:
    """Whether mirrors may work in helper processes; False if QUARK_HELPER_PROCESSES is 0."""
    return _read(HELPERS) != "0"


_NAME = re.compile(
    "token|key|secret|password|credential|auth|username|profile|session|role|cert|netrc|sas",
    re.IGNORECASE,
)


def list_credentials() -> frozenset[tuple[str, str]]:
    """Names and values of the variables that may be credentials, as they are now.

    Those of a later moment differ where one has been refreshed since.
    """
    return frozenset((name, text) for name, text in os.environ.items() if _NAME.search(name))
