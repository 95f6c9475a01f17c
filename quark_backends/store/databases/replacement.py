"""Puts a whole copy in the place of a database whose files are not what they should be.

A new file is what everybody notices who has the old one open, in every process: each goes on at
the path and writes again what the new file lacks. So nothing has to be agreed upon.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from quark_backends.store.databases.layout import LOG_SUFFIX
from quark_backends.store.databases.log_owner import find_aside
from quark_backends.store.databases.open_files import FilesChanged, identify
from quark_core.system.process import importing

_log = logging.getLogger("quark")

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
    from quark_backends.store.databases.sqlite import changing

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
        raise FilesChanged(f"{why}, and no copy can take its place: {error}") from error
    _log.error(
        "%s. The store was made whole again%s; runs that are being written put back what it lacks.",
        why,
        f", and what was in its log is kept in {aside}" if aside.exists() else "",
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
        raise FilesChanged("Python's own program is not known (sys.executable is empty)")
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
        raise FilesChanged(f"no process can put a copy in its place: {error}") from error
    if identify(str(db_path)) == before:
        raise FilesChanged(done.stderr.strip().rpartition("\n")[2] or "no copy was made")
    _note_replaced(db_path)
    _log.error(
        "other code in this process has closed the files of the store %s. A copy has taken its "
        "place; what it lacks is put back from the journals.",
        db_path,
    )


def read_main_head(db_path: Path, run_id: str, writer_id: str) -> int | None:
    """Number of a writer's newest batch in a database's main file, whatever is in its log.

    Returns:
        -1 where it has no such writer; None where it cannot be read now, as while somebody
        brings the log into it.
    """
    from quark_backends.store.databases.sqlite import open_database

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
    from quark_backends.store.databases.sqlite import open_database

    db_path = Path(sys.argv[1])
    with closing(open_database(db_path, "mode=rw")) as connection:
        connection.begin_write()
        try:
            replace_database(db_path, f"the files of the store {db_path} were closed by other code")
        finally:
            connection.rollback()


if __name__ == "__main__":
    main()
