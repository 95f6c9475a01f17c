"""Files at a place that may be anybody's: pipes are not waited for, bombs are not unfolded."""

from __future__ import annotations

import shutil
import sqlite3
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from quark.importing.neutral_run import ForeignRun, ImportFailure, find_place
from quark_core.config import settings

DOCUMENT_BYTES = 64 * 2**20
"""A document, or a line of a file of lines, has so many bytes at most."""

# A question to a database is answered within so many steps of SQLite's, looked at now and then.
_PROGRESS_STEPS = 100_000
_ANSWER_STEPS = 20_000


def find_files(root: Path, pattern: str) -> list[Path]:
    """The regular files below a folder whose names fit, sorted; or the file that is given."""
    if root.is_dir():
        return sorted(path for path in root.rglob(pattern) if path.is_file())
    return [root] if root.is_file() else []


def read_document(path: Path) -> bytes | None:
    """A small file beside others; None where it is no regular one that can be read, or too large.

    A named pipe is none.
    """
    try:
        if not path.is_file() or path.stat().st_size > DOCUMENT_BYTES:
            return None
        return path.read_bytes()
    except OSError:
        return None


def open_archive(path: Path) -> zipfile.ZipFile:
    """A zip archive.

    Raises:
        ImportFailure: It is none.
    """
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise ImportFailure(f"{path} cannot be read: {error}") from error


def read_entry(archive: zipfile.ZipFile, name: str) -> bytes:
    """A document of an archive.

    Raises:
        ImportFailure: It is too large.
        KeyError: There is none.
    """
    with archive.open(name) as file:
        # What the archive says of its size may be a lie.
        data = file.read(DOCUMENT_BYTES + 1)
    if len(data) > DOCUMENT_BYTES:
        raise ImportFailure(_tell(archive, name))
    return data


def read_entry_lines(archive: zipfile.ZipFile, name: str) -> Iterator[bytes]:
    """The lines of a file of an archive.

    Raises:
        ImportFailure: One of them is too long.
        KeyError: There is no such file.
    """
    with archive.open(name) as file:
        while line := file.readline(DOCUMENT_BYTES + 1):
            if len(line) > DOCUMENT_BYTES:
                raise ImportFailure(_tell(archive, name))
            yield line


def unpack_entry(archive: zipfile.ZipFile, name: str, target: Path) -> str | None:
    """Put a payload of an archive at a place of ours; returns why it cannot be, or None."""
    try:
        entry = archive.getinfo(name)
        if entry.file_size > settings.artifact_limit_bytes():
            return f"it has {entry.file_size} bytes, more than allowed"
        with archive.open(entry) as source, target.open("wb") as file:
            # No more is read than the archive says, which was looked at above.
            shutil.copyfileobj(cast("BinaryIO", source), file)
    except KeyError:
        return f"its file is missing from the archive: {name}"
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        return f"its file cannot be unpacked: {error}"
    return None


def _tell(archive: zipfile.ZipFile, name: str) -> str:
    return f"{archive.filename}: {name} has more than {DOCUMENT_BYTES} bytes in one piece"


class Archive(ForeignRun):
    """A run in a zip archive of its own.

    Args:
        path: The archive.
        project: The run's project; by default the tool's.
    """

    def __init__(self, path: Path, project: str | None) -> None:
        self.key = str(path)
        self._path = path
        self._project = project

    @classmethod
    def find_runs(cls, place: str | Path, *, project: str | None = None) -> Iterator[Self]:
        """The runs of the archives in a folder, or of one.

        Args:
            place: The folder or the archive.
            project: Their project; by default the tool's.

        Raises:
            ImportFailure: There is no such place.
        """
        for path in find_files(find_place(place), "*.zip"):
            yield cls(path, project)

    def mark(self) -> str | None:
        """See `ForeignRun`."""
        return str(self._path.stat().st_size)


class Database:
    """A SQLite database, opened for each question: its tool may be writing it.

    Args:
        path: The file.
        tool: Whose it must be.
        tables: Tables that are read; one that is there must hold its rows: a view may have no end.

    Raises:
        ImportFailure: It is none of the tool's.
    """

    def __init__(self, path: Path, tool: str, tables: Iterable[str]) -> None:
        self.path = path
        for table in tables:
            if self.has(table) and not self._is_plain(table):
                raise ImportFailure(f"{path} is not a database of {tool}: {table} is not a table")

    def ask(self, question: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of a question.

        Raises:
            ImportFailure: It cannot be read, or works without end.
        """
        turns = iter(range(_ANSWER_STEPS))
        try:
            address = f"{self.path.as_uri()}?mode=ro"
            with closing(sqlite3.connect(address, uri=True, timeout=10)) as connection:
                connection.execute("PRAGMA trusted_schema = OFF")
                connection.set_progress_handler(lambda: next(turns, None) is None, _PROGRESS_STEPS)
                return connection.execute(question, values).fetchall()
        except (sqlite3.Error, UnicodeError) as error:
            raise ImportFailure(f"{self.path} cannot be read: {error}") from error

    def has(self, table: str) -> bool:
        """Whether there is such a table."""
        return bool(self.ask("SELECT 1 FROM sqlite_master WHERE name = ?", table))

    def _is_plain(self, table: str) -> bool:
        plain = (
            "SELECT 1 FROM sqlite_master WHERE name = ? AND type = 'table'"
            " AND sql LIKE 'create table%' AND sql NOT LIKE '% as (%'"
        )
        return bool(self.ask(plain, table))
