"""The file operations that the journal needs, in one place so that a test can make each fail."""

from __future__ import annotations

import os
from pathlib import Path

from quark_core.system.folders import read_plain_file

# Windows has no fdatasync, and would translate line ends without O_BINARY.
_SYNC = getattr(os, "fdatasync", os.fsync)
_BINARY = getattr(os, "O_BINARY", 0)


def identify_file(descriptor: int) -> tuple[int, int]:
    """Which file a descriptor is of; a number that was closed may come to mean another.

    Raises:
        OSError: It is of none.
    """
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


class Files:
    """Plain appends and whole reads: no lock, no mmap, no O_APPEND, so that NFS and Lustre do."""

    def make_directory(self, path: Path) -> None:
        """Make a directory and its parents; one that exists is fine."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """Make a file that must not exist, open for writing; returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)

    def identify(self, descriptor: int) -> tuple[int, int]:
        """Which file a descriptor is of."""
        return identify_file(descriptor)

    def locate(self, descriptor: int) -> Path | None:
        """Where an open file lies by now; None where it was deleted, or no system tells."""
        try:
            if not os.fstat(descriptor).st_nlink:
                return None
            return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            return None

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        """Write at the descriptor's place; returns how many bytes were written."""
        return os.write(descriptor, data)

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        """Cut a file and put the descriptor's place at its end."""
        os.ftruncate(descriptor, size_bytes)
        os.lseek(descriptor, size_bytes, os.SEEK_SET)

    def sync(self, descriptor: int) -> None:
        """Bring a file's data to the disk."""
        _SYNC(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def read(self, path: Path) -> bytes:
        """All of a regular file."""
        return read_plain_file(path)

    def exists(self, path: Path) -> bool:
        """Whether a file is there."""
        return path.exists()

    def remove(self, path: Path) -> None:
        """Remove a file; one that is gone is fine."""
        path.unlink(missing_ok=True)

    def list_names(self, path: Path) -> list[str]:
        """Names in a directory, sorted; none where it does not exist."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []
