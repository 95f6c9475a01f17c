"""Payloads that a mirror keeps beside its files, without taking their room twice."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from quark_core.artifacts.contract import Payload
from quark_core.artifacts.layout import object_path
from quark_core.artifacts.payload_folder import PayloadFolder
from quark_core.errors import BackendRejected

__all__ = ["keep_payload"]


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
    if path.is_file() and path.stat().st_size == payload.size_bytes:
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
