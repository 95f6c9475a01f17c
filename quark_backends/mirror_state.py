"""State of mirrors on this machine: files that are replaced whole, and noted payloads.

A mirror notes how far each writer is acknowledged: the number of its newest
batch, and a hash of it. A batch that comes again is known by them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import threading
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from quark_core.api import (
    BackendRejected,
    Batch,
    Payload,
    PayloadFolder,
    is_plain_file,
    object_path,
)

_State = TypeVar("_State", bound=msgspec.Struct)


def load_state(path: Path, kind: type[_State], *, forgives: bool = True) -> _State:
    """What was last saved in a file, or a new state where there is no file.

    Args:
        path: The file.
        kind: Type of the state; all of its fields have defaults.
        forgives: Whether a file that holds something else counts as none. Where the
            mirror would then cut off what it wrote, it must not.

    Raises:
        OSError: The file cannot be read.
        msgspec.DecodeError: It holds something else, and that is not forgiven.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return kind()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not forgives:
            raise msgspec.DecodeError(f"{type(error).__name__}: {error}") from error
        return kind()


def save_state(path: Path, state: msgspec.Struct, *, is_synced: bool = False) -> None:
    """Replace what is saved in a file, as `replace_file` does."""
    replace_file(path, msgspec.json.encode(state), is_synced=is_synced)


def replace_file(path: Path, data: bytes, *, is_synced: bool = False) -> None:
    """Replace a file whole: a reader sees the old one or the new one.

    Args:
        path: The file; its folder is made where it is not there.
        data: Its content.
        is_synced: Whether a power cut leaves it too. It need not where the other
            side tells what of it is missing.

    Raises:
        OSError: It cannot be written; the old one is there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Mirrors of one run may be several, on threads of one process too.
    scratch = path.with_name(f"{path.name}.part{os.getpid()}-{threading.get_ident()}")
    with scratch.open("wb") as file:
        file.write(data)
        if is_synced:
            file.flush()
            os.fsync(file.fileno())
    os.replace(scratch, path)


def make_file_name(text: str, *, has_dots: bool = True) -> str:
    """A text as part of a file's name: ASCII letters, digits, `_`, `-` and, mostly, dots."""
    return re.sub(r"[^A-Za-z0-9._-]" if has_dots else r"[^A-Za-z0-9_-]", "_", text)


def digest_batch(batch: Batch) -> str:
    """A hash of a batch's body."""
    return xxhash.xxh3_64_hexdigest(batch.body)


def is_new(batch: Batch, number: int, digest: str, *, backend: str) -> bool:
    """Whether a batch comes after the newest one of its writer that is acknowledged.

    Args:
        batch: The batch.
        number: Number of the writer's newest acknowledged batch, -1 for none.
        digest: Hash of that one.
        backend: Name of the backend, for the error.

    Raises:
        BackendRejected: It has that number, and another content.
    """
    if batch.number == number and digest_batch(batch) != digest:
        raise BackendRejected(
            f"batch {batch.number} of writer {batch.writer_id} came again with other content",
            backend=backend,
        )
    return batch.number > number


def load_newest_note(folder: Path, file_name: str, key: str) -> tuple[Path | None, dict[str, Any]]:
    """The newest state that a kind of mirror has saved, for whoever only asks, and its folder.

    A run may be mirrored to several places, each with a folder of its own.

    Args:
        folder: The run's folder for the kind of mirror.
        file_name: What the files of such a state are called.
        key: What a state has once the run has begun; such states come first.
    """
    found: list[tuple[int, Path, dict[str, Any]]] = []
    try:
        for path in folder.glob(f"*/{file_name}"):
            state = json.loads(path.read_text("utf-8"))
            if isinstance(state, dict):
                found.append((path.stat().st_mtime_ns, path.parent, state))
    except (OSError, ValueError, RecursionError):
        # It is being replaced at this moment, or it was removed.
        return None, {}
    known = [item for item in found if item[2].get(key)] or found
    if not known:
        return None, {}
    _, place, state = max(known, key=lambda item: item[0])
    return place, state


def keep_payload(folder: Path, payload: Payload, *, backend: str) -> None:
    """Put a payload into a mirror's folder of a run.

    One that nobody may write to, as Quark's own are, is linked where the file
    system can, so that it takes no space of its own; another one is copied.

    Args:
        folder: What the payload's path, by its hash, is relative to.
        payload: The payload.
        backend: Name of the backend, for the error.

    Raises:
        OSError: It cannot be kept now.
        BackendRejected: It is not what its hash says.
    """
    path = folder / object_path(payload.sha256)
    if is_plain_file(path) and path.stat().st_size == payload.size_bytes:
        return
    found = payload.path.stat()
    if found.st_size == payload.size_bytes and not stat.S_IMODE(found.st_mode) & 0o222:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError, NotImplementedError):
            os.link(payload.path, path)
            return
    with payload.path.open("rb") as source:
        put = PayloadFolder(folder).put_file(source, payload.size_bytes)
    if put.failure is not None:
        raise OSError(f"payload {payload.sha256} cannot be kept: {put.failure}")
    if put.sha256 != payload.sha256:
        raise BackendRejected(
            f"payload {payload.sha256} is damaged: its content has the hash {put.sha256}",
            backend=backend,
        )
