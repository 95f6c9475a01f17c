"""Small files of this user alone, in `quark` of XDG_CONFIG_HOME or `~/.config`."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_MAX_BYTES = 64 * 1024


def find_private_folder(name: str) -> Path | None:
    """Where files of one purpose are; None where there is no home directory."""
    given = os.environ.get("XDG_CONFIG_HOME", "")
    # As the specification has it; one that counts from the working directory may be anybody's.
    if not os.path.isabs(given):
        given = os.path.expanduser("~/.config")
    return Path(given) / "quark" / name if os.path.isabs(given) else None


def write_private(path: Path, content: bytes) -> None:
    """Write a file whole, or leave the old one.

    Raises:
        OSError: It cannot be written.
    """
    scratch = path.with_name(f".{path.stem}-{os.urandom(4).hex()}")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)
    os.replace(scratch, path)


def read_private(path: Path) -> bytes | None:
    """What a file holds; None where there is none, or where another user can have put it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        own = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
        return os.read(descriptor, _MAX_BYTES) if own and stat.S_ISREG(status.st_mode) else None
    except OSError:
        return None
    finally:
        os.close(descriptor)
