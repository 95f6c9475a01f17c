"""Files at a place that may be anybody's: pipes are not waited for, bombs are not unfolded."""

from __future__ import annotations

import shutil
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from quark.importing.neutral_run import ImportFailure
from quark_core.config import settings

DOCUMENT_BYTES = 64 * 2**20
"""A document, or a line of a file of lines, has so many bytes at most."""


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
            return f"it has {entry.file_size} bytes, which is too much"
        with archive.open(entry) as source, target.open("wb") as file:
            # No more is read than the archive says, which was looked at above.
            shutil.copyfileobj(cast("BinaryIO", source), file)
    except KeyError:
        return f"its file is not in the archive: {name}"
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        return f"its file cannot be unpacked: {error}"
    return None


def _tell(archive: zipfile.ZipFile, name: str) -> str:
    return f"{archive.filename}: {name} has more than {DOCUMENT_BYTES} bytes in one piece"
