"""The part of the conformance kit for backends that keep the payloads of artifacts."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from quark_core.artifacts.contract import Payload
from quark_core.backend import BackendDefinition, Capability
from quark_core.errors import ArtifactNotFoundError, BackendRejected, BackendUnavailable
from quark_core.query import Query
from quark_core.testing.batches import BatchMaker
from quark_core.testing.kit import RUN_ID, BackendKit, Opener
from quark_core.testing.samples import make_samples

__all__ = ["ArtifactConformance"]

_RUN = RUN_ID


class ArtifactConformance(BackendKit):
    """Standard tests of payloads."""

    def test_a_payload_comes_back_as_it_was(
        self, definition: BackendDefinition, open_backend: Opener, tmp_path: Path
    ) -> None:
        """Whatever bytes it has, given once or twice, and after the backend was closed."""
        backend = self._open_as(definition, open_backend, Capability.ARTIFACTS)
        backend.write(BatchMaker(_RUN).start())
        contents = [b"", b"\x00", bytes(range(256)) * 5000]
        for content in (*contents, contents[1]):
            backend.put_payload(_make_payload(tmp_path, content))
        backend.close()
        again = self._open_as(definition, open_backend, Capability.ARTIFACTS)
        for content in contents:
            with again.open_payload(_RUN, hashlib.sha256(content).hexdigest()) as file:
                assert file.read() == content

    def test_a_payload_is_taken_when_it_is_put(
        self, definition: BackendDefinition, open_backend: Opener, tmp_path: Path
    ) -> None:
        """The file that it came from may go, and the payload's source is left as it is."""
        backend = self._open_as(definition, open_backend, Capability.ARTIFACTS)
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
        backend = self._open_as(definition, open_backend, Capability.ARTIFACTS)
        backend.write(BatchMaker(_RUN).start())
        with pytest.raises(ArtifactNotFoundError):
            backend.open_payload(_RUN, "0" * 64)

    def test_a_record_and_its_payload_are_found_together(
        self, definition: BackendDefinition, open_backend: Opener, tmp_path: Path
    ) -> None:
        """As the lane brings them: the payload first, and both again after a lost reply."""
        backend = self._open_as(definition, open_backend, Capability.ARTIFACTS)
        maker = BatchMaker(_RUN)
        backend.write(maker.start())
        payload = _make_payload(tmp_path, b"weights" * 1000)
        (sample, _) = make_samples("artifact", _RUN)
        record = msgspec.structs.replace(
            sample, sha256=payload.sha256, size_bytes=payload.size_bytes
        )
        batch = maker.batch([record])
        for _ in range(2 if Capability.IDEMPOTENT in definition.capabilities else 1):
            backend.put_payload(payload)
            backend.write(batch)
        if Capability.READ in definition.capabilities:
            found = backend.read(_RUN, "artifact", Query()).to_records()
            assert list(found) == batch.to_records()
        with backend.open_payload(_RUN, payload.sha256) as file:
            assert file.read() == b"weights" * 1000

    def test_a_payload_that_is_cut_short_is_not_taken(
        self, definition: BackendDefinition, open_backend: Opener, tmp_path: Path
    ) -> None:
        """Bytes that are not what their hash says are refused, and never given out."""
        backend = self._open_as(definition, open_backend, Capability.ARTIFACTS)
        backend.write(BatchMaker(_RUN).start())
        payload = _make_payload(tmp_path, b"whole")
        payload.path.write_bytes(b"who")
        with pytest.raises((BackendRejected, BackendUnavailable)):
            backend.put_payload(payload)
        with pytest.raises(ArtifactNotFoundError):
            backend.open_payload(_RUN, payload.sha256)
        payload.path.write_bytes(b"whole")
        backend.put_payload(payload)
        with backend.open_payload(_RUN, payload.sha256) as file:
            assert file.read() == b"whole"


def _make_payload(directory: Path, content: bytes) -> Payload:
    sha256 = hashlib.sha256(content).hexdigest()
    path = directory / f"source-{sha256[:8]}"
    path.write_bytes(content)
    return Payload(run_id=_RUN, sha256=sha256, size_bytes=len(content), path=path)
