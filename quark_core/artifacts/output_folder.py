"""Writes files below one folder, whatever their names say: anybody may have made these."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import xxhash

_REFUSED = re.compile(r'[<>:"/\\|?*]')
# What Windows takes for a device, whatever comes after a dot.
_DEVICES = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?", re.IGNORECASE)
_MAX_BYTES = 200
_DIRECTORY = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_HAS_DESCRIPTORS = {os.open, os.mkdir, os.stat, os.unlink, os.link} <= os.supports_dir_fd


def make_file_name(text: str) -> str:
    """A text as one file name on any system, which hides nothing and leads nowhere.

    Itself, wherever that will do; else with a few digits by which names stay apart.
    """
    kept = "".join(c if c.isprintable() else "_" for c in text)
    kept = _REFUSED.sub("_", kept).rstrip(". ")
    if kept.startswith((".", " ", "-", "~")) or not kept:
        kept = f"_{kept[1:]}"
    if _DEVICES.fullmatch(kept):
        kept = f"_{kept}"
    encoded = kept.encode("utf-8", "replace")
    if kept == text and len(encoded) <= _MAX_BYTES:
        return kept
    digest = xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))[:8]
    stem, dot, suffix = encoded[:_MAX_BYTES].decode("utf-8", "ignore").rpartition(".")
    return f"{stem}-{digest}.{suffix}" if dot and stem else f"{stem}{suffix}-{digest}"


class OutputFolder:
    """A folder that files are put into, under folders in it; no link in it is followed.

    Args:
        root: The folder; made with the first file. It may be reached by links: the user
            has named it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self, parts: Sequence[str]) -> IO[bytes] | None:
        """A file that is there, open for reading; None where there is none.

        Args:
            parts: Its folders and its name, each as `make_file_name` makes them.

        Raises:
            OSError: A link or something else that is no plain file is in the way.
        """
        try:
            with self._enter(parts[:-1], make=False) as folder:
                descriptor = _open_in(folder, parts[-1], os.O_RDONLY | _PLAIN)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, f"{self.root.joinpath(*parts)} is no plain file")
        return os.fdopen(descriptor, "rb")

    @contextmanager
    def write(self, parts: Sequence[str]) -> Iterator[IO[bytes]]:
        """A new file, which gets its name when it is whole.

        Raises:
            FileExistsError: There is one of that name; it is left alone.
            OSError: It cannot be written, or a link is in the way.
        """
        scratch = f".quark-{os.urandom(6).hex()}.part"
        with self._enter(parts[:-1], make=True) as folder:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN
            descriptor = _open_in(folder, scratch, flags)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    yield file
                _name(folder, scratch, parts[-1])
            finally:
                _unlink(folder, scratch)

    @contextmanager
    def _enter(self, names: Sequence[str], *, make: bool) -> Iterator[int | Path]:
        """A folder below the root, as a descriptor where the system has that for everything."""
        if make:
            self.root.mkdir(parents=True, exist_ok=True)
        if not _HAS_DESCRIPTORS:
            yield _walk(self.root, names, make=make)
            return
        descriptor = os.open(self.root, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            for name in names:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, dir_fd=descriptor)
                following = os.open(name, os.O_RDONLY | _DIRECTORY, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = following
            yield descriptor
        finally:
            os.close(descriptor)


def _walk(folder: Path, names: Sequence[str], *, make: bool) -> Path:
    for name in names:
        folder = folder / name
        if make:
            folder.mkdir(exist_ok=True)
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, f"{folder} is no folder")
    return folder


def _open_in(folder: int | Path, name: str, flags: int) -> int:
    if isinstance(folder, int):
        return os.open(name, flags, 0o666, dir_fd=folder)
    path = folder / name
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.ELOOP, f"{path} is no plain file")
    return os.open(path, flags, 0o666)


def _name(folder: int | Path, scratch: str, name: str) -> None:
    """Give a file its name; one that is there already stays."""
    if isinstance(folder, Path):
        if os.path.lexists(folder / name):
            raise FileExistsError(errno.EEXIST, f"{folder / name} exists")
        os.rename(folder / scratch, folder / name)
        return
    try:
        os.link(scratch, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:
        # A file system without links.
        if _exists(folder, name):
            raise FileExistsError(errno.EEXIST, f"{name} exists") from None
        os.rename(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _unlink(folder: int | Path, name: str) -> None:
    try:
        if isinstance(folder, Path):
            os.unlink(folder / name)
        else:
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
