"""Payloads that a mirror keeps beside its files, without taking their room twice."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from quark_core.artifacts.contract import Payload
from quark_core.artifacts.layout import object_path
from quark_core.artifacts.payload_folder import PayloadFolder

__all__ = ["keep_payload"]


def keep_payload(folder: Path, payload: Payload) -> None:
    """Keep a payload in a folder, as a link where the file system has them.

    Raises:
        OSError: It cannot be kept.
    """
    target = folder / object_path(payload.sha256)
    if target.is_file():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # Payloads are never written to again, so a link is as good as a copy.
    with contextlib.suppress(OSError):
        os.link(payload.path, target)
        return
    with payload.path.open("rb") as source:
        put = PayloadFolder(folder).put_file(source, payload.size_bytes)
    if put.failure is not None:
        raise OSError(put.failure)
