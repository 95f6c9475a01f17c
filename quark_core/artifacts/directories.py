"""A directory as a list of its files, and files that lie elsewhere as their addresses."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from quark_core.artifacts.payload_folder import CHUNK_BYTES
from quark_core.errors import SchemaValidationError
from quark_core.records.artifact_layout import is_sha256, split_path

MOST_FILES = 100_000
"""So many files a directory may have."""

_MOST_DEPTH = 64
_MOST_LINKS = 2_000
_MOST_TOLD = 100
_MOST_URI = 2_000
_HASHED_BYTES = 64 * 1024 * 1024
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{1,30}://", re.IGNORECASE)


@dataclass(slots=True)
class DirectoryScan:
    """What a directory holds.

    Attributes:
        root: The directory.
        files: Each regular file: its path below the root, with slashes, and where it lies.
        skipped: Path -> why it is left out; the first hundred.
        skipped_count: How many are.
        links: How many links to directories were followed.
    """

    root: Path
    files: list[tuple[str, Path]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    skipped_count: int = 0
    links: int = 0

    def follow(self) -> None:
        """Count a link to a directory: some that lead to each other make ways without an end.

        Raises:
            SchemaValidationError: There are too many.
        """
        self.links += 1
        if self.links > _MOST_LINKS:
            raise SchemaValidationError(
                f"path {self.root} has more than {_MOST_LINKS} links to directories: log the "
                "directories that they lead to"
            )

    def skip(self, relative: str, reason: str) -> None:
        """Note what is left out."""
        self.skipped_count += 1
        if len(self.skipped) < _MOST_TOLD:
            self.skipped[relative[:_MOST_URI].encode("utf-8", "replace").decode()] = reason


def scan_directory(path: object, exclude: tuple[str, ...]) -> DirectoryScan:
    """The files below a directory, in the order of their names.

    Links are followed, but not around: one that leads to a directory above itself is left out.

    Args:
        path: The directory.
        exclude: Patterns such as `*.tmp` or `.git/*`, of paths below it, or of names.

    Raises:
        SchemaValidationError: No directory that can be read, or one with too many files.
    """
    given: Any = path
    try:
        root = Path(os.fsdecode(os.fspath(given))).expanduser()
    except (TypeError, ValueError, RuntimeError):
        raise SchemaValidationError(f"path must be a path, not {type(path).__name__}") from None
    scan = DirectoryScan(root)
    try:
        if not root.is_dir():
            raise SchemaValidationError(f"path {root} is not a directory; log_file takes a file")
        os.scandir(root).close()
        above = (_identify(root),)
    except (OSError, ValueError) as error:
        if isinstance(error, SchemaValidationError):
            raise
        raise SchemaValidationError(f"path {root} cannot be read: {error}") from error
    for relative, place in _walk(scan, root, "", above):
        if any(fnmatch(relative, each) or fnmatch(place.name, each) for each in exclude):
            continue
        if len(scan.files) >= MOST_FILES:
            raise SchemaValidationError(
                f"path {root} has more than {MOST_FILES} files: make archives of them first, such "
                "as by shutil.make_archive"
            )
        scan.files.append((relative, place))
    return scan


def _walk(
    scan: DirectoryScan, folder: Path, prefix: str, above: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, Path]]:
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        scan.skip(prefix.rstrip("/"), error.strerror or str(error))
        return
    for entry in found:
        relative = f"{prefix}{entry.name}"
        if split_path(relative) is None:
            scan.skip(relative, "its name cannot be a path everywhere")
            continue
        place = Path(entry.path)
        try:
            mode = entry.stat().st_mode
            if stat.S_ISREG(mode):
                yield relative, place
            elif not stat.S_ISDIR(mode):
                scan.skip(relative, "it is no regular file")
            elif (identity := _identify(place)) in above:
                scan.skip(relative, "it is a link to a directory that it is in")
            elif len(above) >= _MOST_DEPTH:
                scan.skip(relative, f"it is nested deeper than {_MOST_DEPTH} directories")
            else:
                if entry.is_symlink():
                    scan.follow()
                yield from _walk(scan, place, f"{relative}/", (*above, identity))
        except OSError as error:
            scan.skip(relative, error.strerror or str(error))


def _identify(place: Path) -> tuple[int, int]:
    found = place.stat()
    return found.st_dev, found.st_ino


def describe_reference(
    uri: object, size_bytes: int | None, sha256: str | None, etag: str | None
) -> dict[str, Any]:
    """What is known of a file that lies elsewhere, as JSON.

    Of a file of this machine its size and time are looked up, and, up to 64 MB, its hash.

    Args:
        uri: Such as `s3://bucket/key`, or a path.
        size_bytes, sha256, etag: What is known besides.

    Raises:
        SchemaValidationError: No address, or a hash that is none.
    """
    given: Any = uri
    try:
        text = os.fsdecode(os.fspath(given))
    except TypeError:
        raise SchemaValidationError(
            f"uri must be an address or a path, not {type(uri).__name__}"
        ) from None
    if not text or len(text) > _MOST_URI or not text.isprintable():
        raise SchemaValidationError(
            f"uri must be an address or a path of at most {_MOST_URI} characters, got {text!r:.80}"
        )
    if sha256 is not None and not is_sha256(str(sha256)):
        raise SchemaValidationError(
            f"sha256 must be 64 lowercase hexadecimal digits, got {sha256!r:.80}"
        )
    if size_bytes is not None and (
        isinstance(size_bytes, bool) or not isinstance(size_bytes, int) or size_bytes < 0
    ):
        raise SchemaValidationError(f"size_bytes must be a non-negative integer: {size_bytes!r}")
    found: dict[str, Any] = {"uri": text, "size_bytes": size_bytes, "sha256": sha256, "etag": etag}
    scheme = _SCHEME.match(text)
    if scheme is None or scheme[0].lower() == "file://":
        found.update(_look(Path(text.removeprefix("file://")).expanduser(), size_bytes, sha256))
    return {name: value for name, value in found.items() if value is not None}


def _look(place: Path, size_bytes: int | None, sha256: str | None) -> dict[str, Any]:
    """What this machine says of a file of its own; nothing of one that is not there."""
    try:
        absolute = place.absolute()
        found = absolute.stat()
        told: dict[str, Any] = {"uri": absolute.as_uri(), "modified_at_s": found.st_mtime}
        if stat.S_ISREG(found.st_mode):
            told["size_bytes"] = found.st_size if size_bytes is None else size_bytes
            if sha256 is None and found.st_size <= _HASHED_BYTES:
                told["sha256"] = _hash(absolute)
        return told
    except (OSError, ValueError) as error:
        return {"missing": getattr(error, "strerror", None) or str(error)}


def _hash(place: Path) -> str:
    digest = hashlib.sha256()
    with place.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()
