"""The part of the conformance kit for backends that keep the payloads of artifacts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quark_core.artifacts.contract import Payload, SupportsArtifacts
from quark_core.backend import Backend, BackendDefinition, Capability
from quark_core.errors import ArtifactNotFoundError
from quark_core.testing.batches import BatchMaker

__all__ = ["ArtifactConformance"]

Opener = Callable[[], Backend]
_RUN = "run0"


class ArtifactConformance:
    """Standard tests of payloads."""

    def test_a_payload_comes_back_as_it_was(
        self, definition: BackendDefinition, open_backend: Opener, tmp_path: Path
    ) -> None:
        """Whatever bytes it has, given once or twice, and after the backend was closed."""
        backend = _open(definition, open_backend)
        backend.write(BatchMaker(_RUN).start())
        contents = [b"", b"\x00", bytes(range(256)) * 5000]
        for content in (*contents, contents[1]):
            backend.put_payload(_make_payload(tmp_path, content))
        backend.close()
        again = _open(definition, open_backend)
        for content in contents:
            with again.open_payload(_RUN, hashlib.sha256(content).hexdigest()) as file:
                assert file.read() == content

    def test_a_payload_is_taken_when_it_is_put(
        self, definition: BackendDefinition, open_backend: Opener, tmp_path: Path
    ) -> None:
        """The file that it came from may go, and the payload's source is left as it is."""
        backend = _open(definition, open_backend)
        backend.write(BatchMaker(_RUN).start())
        payload = _make_payload(tmp_path, b"kept")
        backend.put_payload(payload)
        assert payload.path.read_bytes() == b"kept"
        payload.path.unlink()
        with backend.open_payload(_RUN, payload.sha256) as file:
            assert file.read() == b"kept"

    def test_a_payload_that_is_not_there_says_so(
        self, definition: BackendDefinition, open_backend: Opener
    ) -> None:
        """By ArtifactNotFoundError."""
        backend = _open(definition, open_backend)
        backend.write(BatchMaker(_RUN).start())
        with pytest.raises(ArtifactNotFoundError):
            backend.open_payload(_RUN, "0" * 64)


def _make_payload(directory: Path, content: bytes) -> Payload:
    sha256 = hashlib.sha256(content).hexdigest()
    path = directory / f"source-{sha256[:8]}"
    path.write_bytes(content)
    return Payload(run_id=_RUN, sha256=sha256, size_bytes=len(content), path=path)


def _open(definition: BackendDefinition, open_backend: Opener) -> Any:
    if Capability.ARTIFACTS not in definition.capabilities:
        pytest.skip(f"{definition.name} does not declare {Capability.ARTIFACTS}")
    backend = open_backend()
    assert isinstance(backend, SupportsArtifacts)
    return backend
