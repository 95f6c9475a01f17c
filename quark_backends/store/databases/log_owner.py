"""Which database file a write-ahead log was written for.

SQLite plays a log into any file that lies beside it. If a program renames another file over the
database of a process that is killed next, pages of two databases are mixed. So each process that
writes notes both files, before the log has anything in it.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from quark_backends.store.databases.layout import LOG_SUFFIX, OWNER_SUFFIX
from quark_core.system.folders import read_plain_file

_log = logging.getLogger("quark")


def find_aside(log: Path) -> Path:
    """A free name for a log that is set aside."""
    return log.with_name(f"{log.name}.damaged-{time.time_ns() // 1000}")


def note_owner(db_path: Path) -> None:
    """Note which file the log at a path is written for; before anything is written to it."""
    found = _find_pair(db_path)
    if found is None or found == _read_note(db_path):
        return
    if has_strange_log(db_path):
        return  # of a file that was put there a moment ago: whoever writes next looks after it
    note = _find_note(db_path)
    scratch = note.with_name(f"{note.name}.new{os.getpid()}-{os.urandom(4).hex()}")
    # Without the note the log is believed, as SQLite does.
    with suppress(OSError):
        try:
            scratch.write_text("{} {}\n".format(*found))
            os.replace(scratch, note)
        finally:
            scratch.unlink(missing_ok=True)


def has_strange_log(db_path: Path) -> bool:
    """Whether the log beside a database is that of another file, which was there before it.

    If both are other files than before, the store was copied or moved as a whole.
    """
    log = db_path.with_name(f"{db_path.name}{LOG_SUFFIX}")
    try:
        if not log.stat().st_size:
            return False
    except OSError:
        return False
    known, found = _read_note(db_path), _find_pair(db_path)
    return known is not None and found is not None and known[1] == found[1] and known[0] != found[0]


def set_strange_log_aside(db_path: Path) -> None:
    """Set a log aside that is not the database's, or none at all; says so once.

    Raises:
        OSError: It cannot be renamed here.
    """
    for suffix in (LOG_SUFFIX, "-shm", OWNER_SUFFIX):
        path = db_path.with_name(f"{db_path.name}{suffix}")
        if os.path.lexists(path) and not path.is_file() and not path.is_symlink():
            aside = find_aside(path)
            os.rename(path, aside)
            _log.error("%s is not a file, and was renamed to %s", path, aside)
    if not has_strange_log(db_path) or not _is_store(db_path):
        return
    from quark_backends.store.databases.sqlite import changing

    log = db_path.with_name(f"{db_path.name}{LOG_SUFFIX}")
    aside = find_aside(log)
    with changing(db_path.parent):
        if not has_strange_log(db_path):
            return  # another process was first
        os.rename(log, aside)
        db_path.with_name(f"{db_path.name}-shm").unlink(missing_ok=True)
    _log.error(
        "another file was put in the place of %s while its write-ahead log was in use. The log "
        "belongs to the earlier file and is kept in %s. The store is read without it; the "
        "journals put back what they have.",
        db_path,
        aside,
    )


def _is_store(db_path: Path) -> bool:
    """Whether a file is a store by its head; any other may be there by mistake."""
    from quark_backends.store.databases.sqlite import APPLICATION_ID

    try:
        with db_path.open("rb") as file:
            head = file.read(72)
    except OSError:
        return False
    return len(head) == 72 and int.from_bytes(head[68:], "big") == APPLICATION_ID


def _find_note(db_path: Path) -> Path:
    return db_path.with_name(f"{db_path.name}{OWNER_SUFFIX}")


def _find_pair(db_path: Path) -> tuple[int, int] | None:
    """The inodes of a database and its log; those of a device may change when it is mounted."""
    try:
        database, log = os.stat(db_path), os.stat(f"{db_path}{LOG_SUFFIX}")
    except OSError:
        return None
    return (database.st_ino, log.st_ino) if database.st_ino and log.st_ino else None


def _read_note(db_path: Path) -> tuple[int, int] | None:
    try:
        first, second = read_plain_file(_find_note(db_path)).split()
        return int(first), int(second)
    except (OSError, ValueError):
        return None
