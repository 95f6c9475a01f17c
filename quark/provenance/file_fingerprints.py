"""Files and folders as digests, without reading more than a level asks for."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quark.provenance.array_forms import PLACE_BYTES, PLACES

_MOST_FILES = 1_000_000
_MOST_READ_FILES = 10_000
_MOST_NAMED = 16
_READ_BYTES = 1024 * 1024
_POINTER_BYTES = 4096
_WILD = re.compile(r"[*?\[]")
_LFS = re.compile(rb"version https://git-lfs[^\n]*\n(?:[^\n]*\n)*?oid (\w+:[0-9a-f]+)\n")
_DVC = re.compile(rb"^\s*-?\s*(?:md5|etag|checksum|hash_value):\s*([\w.\-]+)\s*$", re.MULTILINE)


@dataclass(slots=True)
class FileFingerprint:
    """What was found out about a file, or many.

    Attributes:
        digest: In hexadecimal.
        level: full, sample, partial (something could not be read, or changed meanwhile), or
            pointer (the hash that a `.dvc` file or Git LFS pointer holds).
        metadata: Counts, and the names of what could not be read.
    """

    digest: str
    level: str
    metadata: dict[str, Any] = field(default_factory=dict)


def fingerprint_path(
    path: str | os.PathLike[str], level: str, advance: Callable[[], None]
) -> FileFingerprint:
    """A file, all files below a folder, or those that a pattern names.

    Args:
        path: A file, folder or pattern. What is no regular file is never opened.
        level: full or sample.
        advance: Called as reading gets on; what it raises ends it.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be read.
    """
    text = os.fspath(path)
    if not os.path.lexists(text) and _WILD.search(text):
        found = sorted(glob.glob(text, recursive=True))
        if not found:
            raise FileNotFoundError(f"no file fits {text}")
        base = Path(_WILD.split(text)[0]).parent if _WILD.search(text) else Path()
        return _digest_many(_name_files(found, base), level, advance)
    if Path(text).is_dir():
        return _digest_many(_walk(text, advance), level, advance)
    pointer = _read_pointer(text)
    if pointer is not None:
        return pointer
    read = _digest_file(text, level)
    advance()
    metadata: dict[str, Any] = {"files": 1, "bytes": read.size_bytes}
    if read.has_changed:
        metadata["changed"] = [Path(text).name]
    return FileFingerprint(
        read.digest.hex(), "partial" if read.has_changed else read.level, metadata
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    digest: bytes
    level: str
    size_bytes: int
    has_changed: bool


def _digest_file(path: str, level: str) -> _Reading:
    """One file: its size, and all of it or 16 places of 64 kB."""
    import xxhash

    # A FIFO that nobody writes into would be waited for at its opening.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    number = os.open(path, flags | getattr(os, "O_CLOEXEC", 0))
    try:
        before = os.fstat(number)
        if not stat.S_ISREG(before.st_mode):
            raise OSError(f"it is no regular file: {path}")
        size = before.st_size
        hasher = xxhash.xxh3_128(size.to_bytes(8, "little"))
        is_sampled = level == "sample" and size > PLACES * PLACE_BYTES
        with os.fdopen(number, "rb", buffering=0, closefd=False) as file:
            read = 0
            if is_sampled:
                for place in range(PLACES):
                    file.seek((size - PLACE_BYTES) * place // (PLACES - 1))
                    piece = file.read(PLACE_BYTES)
                    hasher.update(piece)
                    read += len(piece)
            else:
                # A file that grows while it is read has no end.
                while read < size and (piece := file.read(min(_READ_BYTES, size - read))):
                    hasher.update(piece)
                    read += len(piece)
        after = os.fstat(number)
    finally:
        os.close(number)
    expected = PLACES * PLACE_BYTES if is_sampled else size
    changed = (after.st_size, after.st_mtime_ns) != (size, before.st_mtime_ns) or read != expected
    return _Reading(hasher.digest(), "sample" if is_sampled else "full", size, changed)


def _name_files(paths: list[str], base: Path) -> Iterator[tuple[str, str]]:
    for path in paths:
        if not Path(path).is_dir():
            yield Path(os.path.relpath(path, base)).as_posix(), path


def _walk(root: str, advance: Callable[[], None]) -> Iterator[tuple[str, str]]:
    """Name and path of each file below a folder; a link back to a folder above is not followed."""
    seen: set[tuple[int, int]] = set()
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        advance()
        try:
            about = os.stat(folder)
            if (about.st_dev, about.st_ino) in seen:
                continue
            seen.add((about.st_dev, about.st_ino))
            with os.scandir(folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            yield Path(os.path.relpath(folder, root)).as_posix() + "/", folder
            continue
        waiting.extend(entry.path for entry in reversed(found) if _is_folder(entry))
        for entry in found:
            if not _is_folder(entry):
                yield Path(os.path.relpath(entry.path, root)).as_posix(), entry.path


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _digest_many(
    files: Iterator[tuple[str, str]], level: str, advance: Callable[[], None]
) -> FileFingerprint:
    """Many files: names, sizes and digests, in the order of their names."""
    import xxhash

    listed: list[tuple[str, str]] = []
    for name, path in files:
        if len(listed) >= _MOST_FILES:
            break
        listed.append((name, path))
    listed.sort()
    is_bounded = level == "sample" and len(listed) > _MOST_READ_FILES
    chosen = range(len(listed))
    if is_bounded:
        last = len(listed) - 1
        chosen_places = {last * i // (_MOST_READ_FILES - 1) for i in range(_MOST_READ_FILES)}
    else:
        chosen_places = set(chosen)
    hasher = xxhash.xxh3_128()
    problems: dict[str, list[str]] = {"unreadable": [], "changed": [], "special": []}
    counts = dict.fromkeys(problems, 0)
    size_bytes, levels = 0, {"full"}
    for index, (name, path) in enumerate(listed):
        advance()
        said, size, trouble, found_level = _describe(path, level, is_read=index in chosen_places)
        size_bytes += size
        levels.add(found_level)
        encoded = name.encode("utf-8", "surrogateescape")
        hasher.update(len(encoded).to_bytes(8, "little") + encoded + said)
        if trouble is not None:
            counts[trouble] += 1
            if len(problems[trouble]) < _MOST_NAMED:
                problems[trouble].append(name.encode("utf-8", "replace").decode())
    metadata: dict[str, Any] = {"files": len(listed), "bytes": size_bytes}
    if is_bounded:
        metadata["read"] = len(chosen_places)
    if len(listed) >= _MOST_FILES:
        metadata["more"] = True
    for trouble, names in problems.items():
        if names:
            metadata[trouble] = names
            metadata[f"{trouble}_count"] = counts[trouble]
    found = "sample" if is_bounded or "sample" in levels else "full"
    if counts["unreadable"] or counts["changed"] or len(listed) >= _MOST_FILES:
        found = "partial"
    return FileFingerprint(hasher.hexdigest(), found, metadata)


def _describe(path: str, level: str, *, is_read: bool) -> tuple[bytes, int, str | None, str]:
    """What is digested of one file of many, its size, what is wrong with it, and the level."""
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            return b"special", 0, "special", "full"
        if not is_read:
            return b"size" + about.st_size.to_bytes(8, "little"), about.st_size, None, "sample"
        read = _digest_file(path, level)
    except OSError:
        return b"unreadable", 0, "unreadable", "full"
    trouble = "changed" if read.has_changed else None
    return b"file" + read.digest, read.size_bytes, trouble, read.level


def _read_pointer(path: str) -> FileFingerprint | None:
    """The hash that is in a `.dvc` file or in a pointer of Git LFS; None for any other file."""
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode) or about.st_size > _POINTER_BYTES:
        return None
    content = Path(path).read_bytes()
    if path.endswith(".dvc"):
        hashes = [found.decode() for found in _DVC.findall(content)]
        if hashes:
            digest = ",".join(hashes)
            return FileFingerprint(digest[:_POINTER_BYTES], "pointer", {"pointer": "dvc"})
    pointed = _LFS.match(content)
    if pointed is not None:
        return FileFingerprint(pointed.group(1).decode(), "pointer", {"pointer": "git-lfs"})
    return None
