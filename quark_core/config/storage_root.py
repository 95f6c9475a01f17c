"""Finds the storage root of a working directory: its own, or the next one above it, like git.

What lies above may be somebody else's, and is then no choice of this user's: the way up
ends at the home directory and at the root of the file system (neither is a project, so
that a store which lies there by chance takes no runs), at a border of a file system, and at
a folder that belongs to another user or that everybody may write. A store that another
user owns is told and left alone; `storage_dir` takes it all the same.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

_STORE, _MARKER = ".quark", "store.json"

_log = logging.getLogger("quark")
_told: set[Path] = set()


def find_storage_root(directory: Path) -> Path:
    """The folder whose store a working directory uses, where nobody says which.

    It is the directory itself where it has a store, or anything called `.quark`; else the
    next folder above it that has a store of this user's; else the directory itself.
    Opens no store, and costs a few looks at folders.
    """
    if _exists(directory / _STORE):
        return directory
    user = os.geteuid() if hasattr(os, "geteuid") else None
    home = _find_home()
    try:
        here = directory.stat()
    except OSError:
        return directory
    folder, device = directory, here.st_dev
    if folder in (home, Path(folder.anchor)) or not _is_own(here, user):
        return directory
    while True:
        folder = folder.parent
        if folder in (home, Path(folder.anchor)):
            return directory
        try:
            status = folder.stat()
        except OSError:
            return directory
        if status.st_dev != device:
            return directory
        found = _look_at_store(folder)
        if not all(_is_own(each, user) for each in found):
            _tell_of_stranger(folder)
            return directory
        if not _is_own(status, user):
            return directory
        if found:
            return folder


def _look_at_store(folder: Path) -> tuple[os.stat_result, ...]:
    """The states of a store's folder, of what that leads to, and of its mark; none of no store."""
    store = folder / _STORE
    try:
        marker = os.lstat(store / _MARKER)
        found = os.lstat(store), os.stat(store), marker
    except OSError:
        return ()
    return found if stat.S_ISREG(marker.st_mode) else ()


def _is_own(status: os.stat_result, user: int | None) -> bool:
    if user is None:
        return True
    # The mode of a link is nobody's; what it leads to counts.
    open_to_all = status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode)
    return status.st_uid == user and not open_to_all


def _exists(path: Path) -> bool:
    try:
        os.lstat(path)
    except OSError:
        return False
    return True


def _find_home() -> Path | None:
    try:
        return Path.home().resolve()
    except (OSError, RuntimeError):
        return None


def _tell_of_stranger(folder: Path) -> None:
    if folder in _told:
        return
    _told.add(folder)
    _log.warning(
        "%s has a Quark store that belongs to another user, or that everybody may write, and so "
        "it is not used from the folders below it. Where you trust it: storage_dir=%r, or "
        "--storage-dir of the command",
        folder,
        str(folder),
    )
