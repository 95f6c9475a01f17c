"""The part of the conformance kit for backends that may be a run's primary."""

from __future__ import annotations

import dataclasses

import pytest

from quark_core.backend import BackendConfig, BackendDefinition, Capability, SupportsRead
from quark_core.errors import BackendRejected
from quark_core.testing.batches import BatchMaker
from quark_core.testing.kit import BackendKit, Observe, Opener

__all__ = ["PrimaryConformance"]


class PrimaryConformance(BackendKit):
    """Standard tests of backends that declare PRIMARY."""

    def test_one_attempt_is_started_once(
        self, definition: BackendDefinition, open_backend: Opener, maker: BatchMaker
    ) -> None:
        """Of two processes that resume a run at the same moment, one is refused."""
        self._need(definition, Capability.PRIMARY)
        backend = open_backend()
        backend.write(maker.start())
        with pytest.raises(BackendRejected):
            backend.write(BatchMaker(self.RUN_ID, writer_id="other").start())

    def test_batches_of_a_run_that_was_never_started_are_rejected(
        self, definition: BackendDefinition, open_backend: Opener
    ) -> None:
        """A primary knows every run that it holds records of."""
        self._need(definition, Capability.PRIMARY)
        with pytest.raises(BackendRejected):
            open_backend().write(BatchMaker("absent").metrics(("m", 0, 0.0)))

    def test_opening_for_reading_changes_nothing(
        self,
        definition: BackendDefinition,
        config: BackendConfig,
        open_backend: Opener,
        maker: BatchMaker,
        observe: Observe,
    ) -> None:
        """What is opened read-only reads, and refuses to write."""
        self._need(definition, Capability.PRIMARY)
        backend = open_backend()
        backend.write(maker.start())
        reader = definition.open(dataclasses.replace(config, read_only=True))
        assert isinstance(reader, SupportsRead)
        assert reader.load_run(self.RUN_ID).run.id == self.RUN_ID
        with pytest.raises(Exception, match=r"(?i)read"):
            reader.write(maker.metrics(("m", 0, 0.0)))
        assert observe() == []
