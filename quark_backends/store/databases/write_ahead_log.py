"""The write-ahead log of SQLite: its owner, its merge, and a damaged database replaced.

SQLite does so by itself when the last of all connections is closed, unless
that one only reads: then `quark.db` alone lacks what was written last. So
whoever writes does it when they stop. Who still writes, in this process or in
another one, does it again later; what a killed process leaves is brought in by
the next writer to stop, or by `checkpoint_file`.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import weakref
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

from quark_backends.store.databases.connection import (
    Descriptors,
    FilesChanged,
    SqliteConnection,
    changing,
    identify,
)
from quark_backends.store.databases.layout import APPLICATION_ID, LOG_SUFFIX, OWNER_SUFFIX
from quark_core.system.folders import read_plain_file
from quark_core.system.process import importing

# Which database file a write-ahead log was written for.
#
# SQLite plays a log into any file that lies beside it. If a program renames another file over the
# database of a process that is killed next, pages of two databases are mixed. So each process that
# writes notes both files, before the log has anything in it.

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
            _log.error("%s is not a file; it was renamed to %s", path, aside)
    if not has_strange_log(db_path) or not _is_store(db_path):
        return
    log = db_path.with_name(f"{db_path.name}{LOG_SUFFIX}")
    aside = find_aside(log)
    with changing(db_path.parent):
        if not has_strange_log(db_path):
            return  # another process was first
        os.rename(log, aside)
        db_path.with_name(f"{db_path.name}-shm").unlink(missing_ok=True)
    _log.error(
        "another file replaced %s when its write-ahead log was in use. The log belongs to the "
        "earlier file and is kept in %s. The store is read without it, and the journals restore "
        "the records that they have.",
        db_path,
        aside,
    )


def _is_store(db_path: Path) -> bool:
    """Whether a file is a store by its head; any other may be there by mistake."""
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


_BUSY_TIMEOUT_S = 10.0
# How long whoever stops writing waits for those who read, and for the disk.
_PATIENCE_S = 1.0
_BUSY_MS = 100
_PAUSE_S = 0.02
# A larger log may take a disk longer than the end of a run should wait.
_LARGE_BYTES = 16 * 2**20


class _OpenWriters:
    """The connections of this process that write, by file, the oldest first."""

    def __init__(self) -> None:
        self.forget()
        # A fork's connections are its parent's, and so is a lock that a thread held meanwhile.
        if hasattr(os, "register_at_fork"):  # Windows has no fork
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Begin anew."""
        self._lock = threading.Lock()
        self._open: dict[str, list[weakref.ref[WritingConnection]]] = {}

    def add(self, connection: WritingConnection) -> None:
        """Take note of a connection that was opened."""
        with self._lock:
            self._open.setdefault(connection.path, []).append(weakref.ref(connection))

    def remove(self, connection: WritingConnection) -> bool:
        """Forget a connection that is being closed.

        Returns:
            Whether it is for this one to empty the log: an older one does so
            when it is closed, which is that of a run's lane.
        """
        with self._lock:
            found = [each for ref in self._open.pop(connection.path, []) if (each := ref())]
            left = [each for each in found if each is not connection]
            if left:
                self._open[connection.path] = [weakref.ref(each) for each in left]
            return found[:1] == [connection]


_writers = _OpenWriters()


class WritingConnection(SqliteConnection):
    """A connection that writes, and leaves a whole file behind as far as others let it.

    Attributes:
        path: The database file; empty where it is not to be touched by closing.
    """

    path = ""

    def note_open(self, path: Path) -> None:
        """Say that this writes a store of ours, in this file."""
        self.path = os.path.realpath(path)
        _writers.add(self)

    def begin_write(self) -> None:
        """See `StoreConnection`; nothing is written where the files are not what they were.

        Raises:
            FilesChanged: They are not; a damaged log has been put aside. A new connection sees
                what is there now.
        """
        descriptors = self.descriptors
        if descriptors is not None:
            descriptors.check()
        super().begin_write()
        damage = None if descriptors is None else descriptors.find_damage()
        if descriptors is None or damage is None:
            return

        why = f"another program changed the write-ahead log of {descriptors.path}: {damage}"
        try:
            replace_database(Path(descriptors.path), why)
        finally:
            self.rollback()
        raise FilesChanged(why)

    def commit(self) -> None:
        """See `StoreConnection`; looked at on both sides, since COMMIT is what writes.

        Raises:
            FilesChanged: Other code has closed the files: whether it was stored is not known.
        """
        descriptors = self.descriptors
        if descriptors is not None and self._is_writing:
            descriptors.check_open()
            super().commit()
            descriptors.check_open()
        else:
            super().commit()

    def close(self) -> None:
        """Empty the log, within a second or so, and close; never fails for the log."""
        if self.descriptors is not None:
            self.descriptors.mend_index()
        if self.path and _writers.remove(self) and self.is_sound:
            try:
                # What is left then is left to whoever writes or syncs next.
                if not empty_log(self) and measure_log(Path(self.path)) > _LARGE_BYTES:
                    # SQLite would go on with it, for as long as that takes.
                    self.interrupt()
            except (sqlite3.Error, OSError):
                pass  # such as one that was closed already; the data is safe where it is
        self.path = ""
        super().close()


def open_database(path: Path, parameters: str) -> SqliteConnection:
    """Open a database file as it is, whatever is in it, and read its head.

    Args:
        path: The file, which must exist.
        parameters: Of SQLite's URI, such as `mode=ro`.

    Raises:
        sqlite3.Error: It cannot be opened or read.
    """
    with Descriptors.opening:
        before = Descriptors.list_open()
        connection = sqlite3.connect(
            # The path goes into a URI: a "?" or "%" in it must not be read as syntax.
            f"file:{quote(str(path))}?{parameters}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=_BUSY_TIMEOUT_S,
            cached_statements=64,
            factory=WritingConnection if parameters.startswith("mode=rw") else SqliteConnection,
        )
        try:
            connection.execute("PRAGMA user_version").fetchone()
        except BaseException:
            connection.close()
            raise
        connection.descriptors = Descriptors(str(path), before)
    return connection


def find_log(db_path: Path) -> Path:
    """Where the write-ahead log of a database lies, if there is one."""
    return db_path.with_name(f"{db_path.name}{LOG_SUFFIX}")


def measure_log(db_path: Path) -> int:
    """Bytes that a database has in its log, and may lack in its file; 0 where the file is whole."""
    try:
        return find_log(db_path).stat().st_size
    except OSError:
        return 0


def empty_log(connection: sqlite3.Connection, *, limit_s: float = _PATIENCE_S) -> bool:
    """Bring what is in the log into the file, and cut the log to nothing; whether that is done.

    Whoever reads an older state, in any process, keeps it from being done; so
    does, for the moment, whoever writes. A log that is large is given up when
    the time is over, with nothing lost: what is in it stays in it.

    Args:
        connection: For writing, in no transaction.
        limit_s: How long a large log may take.
    """
    (before_ms,) = connection.execute("PRAGMA busy_timeout").fetchone()
    deadline = time.monotonic() + _PATIENCE_S
    timer = threading.Timer(limit_s, connection.interrupt) if _is_large(connection) else None
    try:
        if timer is not None:
            timer.daemon = True
            timer.start()
        connection.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
        while True:
            # The first blocks nobody, and leaves little for the second to do.
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if not busy:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
    except (sqlite3.OperationalError, RuntimeError):
        # Interrupted, busy, or no room for it; or no thread can be had any more.
        return False
    finally:
        if timer is not None and timer.ident is not None:
            timer.cancel()
            timer.join()  # it must not hit what the connection does next
        connection.execute(f"PRAGMA busy_timeout={before_ms}")


def _is_large(connection: sqlite3.Connection) -> bool:
    """Whether bringing the log in may take longer than anybody should wait unasked."""
    path = connection.execute("PRAGMA database_list").fetchone()[2]
    return measure_log(Path(path)) > _LARGE_BYTES


# Puts a whole copy in the place of a database whose files are not what they should be.
#
# A new file is what everybody notices who has the old one open, in every process: each goes on at
# the path and writes again what the new file lacks. So nothing has to be agreed upon.

_OUTSIDE_S = 120.0
# The files that this process has put in a database's place, and told of.
_replaced: set[tuple[int, int]] = set()


def was_replaced(db_path: Path) -> bool:
    """Whether this process has put in place, and told of, what is at a path."""
    return identify(str(db_path)) in _replaced


def _note_replaced(db_path: Path) -> None:
    identity = identify(str(db_path))
    if identity is not None:
        _replaced.add(identity)


def replace_database(db_path: Path, why: str, *, with_log: bool = True) -> None:
    """Put a copy in a database's place, and what is wrong with its log aside; tells it once.

    Whoever calls this has the database's write lock. A crash leaves the old files or the new one.

    Args:
        db_path: The database.
        why: A sentence for people: what happened to the store.
        with_log: Whether what is whole in the log is taken over.

    Raises:
        FilesChanged: There is no room, or the copy is damaged too; nothing was altered.
    """
    log = db_path.with_name(f"{db_path.name}{LOG_SUFFIX}")
    new = db_path.with_name(f"{db_path.name}.new{os.getpid()}-{os.urandom(4).hex()}")
    new_log = new.with_name(f"{new.name}{LOG_SUFFIX}")
    aside = find_aside(log)
    before = identify(str(db_path))
    try:
        with changing(db_path.parent):
            try:
                shutil.copyfile(db_path, new)
                if with_log and log.exists():
                    shutil.copyfile(log, new_log)
                _make_whole(new)
                if identify(str(db_path)) != before:
                    return  # another process was first
                if log.exists():
                    os.rename(log, aside)
                db_path.with_name(f"{db_path.name}-shm").unlink(missing_ok=True)
                os.replace(new, db_path)
                _note_replaced(db_path)
            finally:
                for path in (new, new_log, new.with_name(f"{new.name}-shm")):
                    path.unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        raise FilesChanged(f"{why}, and it cannot be replaced by a copy: {error}") from error
    _log.error(
        "%s. The store was repaired%s; running runs restore the missing records.",
        why,
        f", and its earlier log is kept in {aside}" if aside.exists() else "",
    )


def _make_whole(path: Path) -> None:
    """Bring a copy's log into it as far as its checksums go, and check and sync the copy."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def replace_from_outside(db_path: Path) -> None:
    """Have another process put a copy in a database's place.

    In this one every connection to the file would share descriptors that other code has closed.

    Raises:
        FilesChanged: It cannot.
    """
    if not sys.executable:
        raise FilesChanged("the Python interpreter is unknown (sys.executable is empty)")
    before = identify(str(db_path))
    paths = [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
    try:
        with importing():
            done = subprocess.run(
                [sys.executable, "-P", "-m", __name__, str(db_path)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_OUTSIDE_S,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
            )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise FilesChanged(f"no process can replace it by a copy: {error}") from error
    if identify(str(db_path)) == before:
        raise FilesChanged(done.stderr.strip().rpartition("\n")[2] or "no copy was created")
    _note_replaced(db_path)
    _log.error(
        "other code in this process has closed the files of the store %s. A copy has replaced "
        "it, and the journals restore the missing records.",
        db_path,
    )


def read_main_head(db_path: Path, run_id: str, writer_id: str) -> int | None:
    """Number of a writer's newest batch in a database's main file, whatever is in its log.

    Returns:
        -1 where it has no such writer; None where it cannot be read now, as while somebody
        brings the log into it.
    """
    try:
        with closing(open_database(db_path, "mode=ro&immutable=1")) as connection:
            row = connection.execute(
                "SELECT head FROM writer JOIN run ON run.pk = run_pk"
                " WHERE run.id = ? AND writer.id = ?",
                (run_id, writer_id),
            ).fetchone()
    except sqlite3.Error:
        return None
    return -1 if row is None else int(row[0])


def main() -> None:
    """Replace the database that is named on the command line."""
    db_path = Path(sys.argv[1])
    with closing(open_database(db_path, "mode=rw")) as connection:
        connection.begin_write()
        try:
            replace_database(db_path, f"the files of the store {db_path} were closed by other code")
        finally:
            connection.rollback()


if __name__ == "__main__":
    main()
