"""Payloads of artifacts in the directories of their runs."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from quark_backends.store.databases.layout import StoreLayout
from quark_core.artifacts.payload_folder import PayloadFolder
from quark_core.backends.contract import Payload
from quark_core.errors import BackendRejected, BackendUnavailable


class KeepsPayloads:
    """Implements `SupportsArtifacts` over the directories of runs."""

    _layout: StoreLayout

    def put_payload(self, payload: Payload) -> None:
        """See `SupportsArtifacts`."""
        folder = PayloadFolder(self._layout.run_path(payload.run_id))
        if folder.find(payload.sha256) is not None:
            return
        try:
            with payload.path.open("rb") as source:
                put = folder.put_file(source, payload.size_bytes)
        except OSError as error:
            raise BackendUnavailable(f"{payload.path}: {error}", backend="embedded") from error
        if put.failure is not None:
            raise BackendUnavailable(f"{folder.root}: {put.failure}", backend="embedded")
        if put.sha256 != payload.sha256:
            raise BackendRejected(
                f"{payload.path} no longer is what was stored: its SHA-256 has changed",
                backend="embedded",
            )

    def open_payload(self, run_id: str, sha256: str) -> BinaryIO:
        """See `SupportsArtifacts`."""
        return PayloadFolder(self._layout.run_path(run_id)).open(sha256)

    def payload_directory(self, run_id: str) -> Path | None:
        """See `SupportsArtifacts`."""
        return self._layout.run_path(run_id)
