"""The part of a backend's contract that is about the payloads of artifacts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

from quark_core.backend import Backend

__all__ = ["Payload", "SupportsArtifacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A payload on its way to a backend.

    Attributes:
        run_id: The run.
        sha256: Its SHA-256, in hexadecimal.
        size_bytes: Its length.
        path: A file that holds it, to be read and left as it is.
    """

    run_id: str
    sha256: str
    size_bytes: int
    path: Path


@runtime_checkable
class SupportsArtifacts(Backend, Protocol):
    """What a backend has that declares `Capability.ARTIFACTS`."""

    def put_payload(self, payload: Payload) -> None:
        """Keep a payload; return when it is as safe as a batch.

        Called by the lane before `write` of the batch whose records name it,
        perhaps again for one that is kept already. Raises as `write` does.
        """

    def open_payload(self, run_id: str, sha256: str) -> BinaryIO:
        """A payload, open for reading; from any thread.

        Raises:
            ArtifactNotFoundError: It is not kept here.
            SessionStoreError: The store cannot be read.
        """

    def payload_directory(self, run_id: str) -> Path | None:
        """The run's own directory, where payloads may be put in place.

        None where they have to be sent. In place means: as
        `quark_core.artifacts` lays them out under that directory.
        """
