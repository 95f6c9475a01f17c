"""The part of the conformance kit for exactly-once: batches that come twice, groups, replay."""

from __future__ import annotations

import msgspec
import pytest

from quark_core.backend import BackendDefinition, Capability, SupportsGroups
from quark_core.errors import BackendRejected
from quark_core.testing.batches import BatchMaker
from quark_core.testing.kit import BackendKit, Observe, Opener
from quark_core.testing.samples import FIRST_TIME_US

__all__ = ["OnceConformance"]


class OnceConformance(BackendKit):
    """Standard tests of backends that declare IDEMPOTENT, GROUPS or REPLAY."""

    def test_a_batch_delivered_twice_is_there_once(
        self,
        definition: BackendDefinition,
        open_backend: Opener,
        maker: BatchMaker,
        observe: Observe,
    ) -> None:
        """The lane repeats a batch whose acknowledgement it has not seen."""
        self._need(definition, Capability.IDEMPOTENT)
        backend = open_backend()
        first, second = maker.start(), maker.metrics(("m", 0, 0.0), ("m", 0, 0.0))
        for batch in (first, first, second, second):
            backend.write(batch)
        assert observe() == [("m", 0, 0.0), ("m", 0, 0.0)]

    def test_a_reply_lost_by_a_crash_duplicates_nothing(
        self,
        definition: BackendDefinition,
        open_backend: Opener,
        maker: BatchMaker,
        observe: Observe,
    ) -> None:
        """The process dies between the store's commit and the lane's note of it."""
        self._need(definition, Capability.IDEMPOTENT)
        backend = open_backend()
        batches = [maker.start(), maker.metrics(("m", 0, 0.0)), maker.metrics(("m", 1, 1.0))]
        for batch in batches:
            backend.write(batch)
        again = open_backend()
        for batch in batches:
            again.write(batch)
        assert observe() == [("m", 0, 0.0), ("m", 1, 1.0)]

    def test_other_content_under_a_known_number_is_rejected(
        self,
        definition: BackendDefinition,
        open_backend: Opener,
        maker: BatchMaker,
        observe: Observe,
    ) -> None:
        """Two processes that share an identity by mistake are found out."""
        self._need(definition, Capability.IDEMPOTENT)
        backend = open_backend()
        backend.write(maker.start())
        batch = maker.metrics(("m", 0, 0.0))
        backend.write(batch)
        other = BatchMaker(self.RUN_ID).metrics(("m", 0, 9.0))
        with pytest.raises(BackendRejected):
            backend.write(msgspec.structs.replace(other, number=batch.number))
        assert observe() == [("m", 0, 0.0)]

    def test_a_group_is_stored_whole_or_not_at_all(
        self,
        definition: BackendDefinition,
        open_backend: Opener,
        maker: BatchMaker,
        observe: Observe,
    ) -> None:
        """A refused batch takes the others of its group back."""
        self._need(definition, Capability.GROUPS)
        backend = open_backend()
        assert isinstance(backend, SupportsGroups)
        backend.write_group([maker.start(), maker.metrics(("m", 0, 0.0))])
        good = maker.metrics(("m", 1, 1.0))
        torn = msgspec.structs.replace(maker.lifecycle(("heartbeat", {})), body=good.body[:9])
        with pytest.raises(BackendRejected):
            backend.write_group([good, torn])
        assert observe() == [("m", 0, 0.0)]
        backend.write(good)
        assert observe() == [("m", 0, 0.0), ("m", 1, 1.0)]

    def test_old_batches_that_come_late_are_there_once(
        self,
        definition: BackendDefinition,
        open_backend: Opener,
        maker: BatchMaker,
        observe: Observe,
    ) -> None:
        """A journal of the first attempt is delivered again when the second has begun."""
        self._need(definition, Capability.IDEMPOTENT)
        first = [maker.start(), maker.metrics(("m", 0, 0.0)), maker.metrics(("m", 1, 1.0))]
        resumed = BatchMaker(
            self.RUN_ID, attempt=1, writer_id="resumed", started_us=FIRST_TIME_US + 10**6
        )
        backend = open_backend()
        for batch in [*first, resumed.start(), resumed.metrics(("m", 2, 2.0))]:
            backend.write(batch)
        backend.close()
        again = open_backend()
        for batch in first:
            again.write(batch)
        again.write(maker.metrics(("late", 2, 3.0)))
        assert sorted(observe(), key=repr) == [
            ("late", 2, 3.0),
            ("m", 0, 0.0),
            ("m", 1, 1.0),
            ("m", 2, 2.0),
        ]

    def test_equal_values_are_no_duplicates(
        self,
        definition: BackendDefinition,
        open_backend: Opener,
        maker: BatchMaker,
        observe: Observe,
    ) -> None:
        """Identity decides, never content."""
        self._need(definition, Capability.IDEMPOTENT)
        backend = open_backend()
        backend.write(maker.start())
        for _ in range(3):
            backend.write(maker.metrics(("m", 0, 0.5), ("m", 0, 0.5)))
        assert observe() == [("m", 0, 0.5)] * 6

    def test_batches_are_given_back_as_they_came(
        self, definition: BackendDefinition, open_backend: Opener, maker: BatchMaker
    ) -> None:
        """From a number on, at most so many, byte by byte, and of that writer only."""
        backend = self._open_as(definition, open_backend, Capability.REPLAY)
        other = BatchMaker(self.RUN_ID, writer_id="other", started_us=FIRST_TIME_US + 10**6)
        batches = [maker.start(), *(maker.metrics(("m", step, 0.5)) for step in range(5))]
        for batch in batches:
            backend.write(batch)
        backend.write(other.metrics(("m", 0, 9.0)))
        found = backend.read_batches(self.RUN_ID, maker.writer_id, 0, 100)
        assert [each.number for each in found] == [each.number for each in batches]
        assert [each.to_records() for each in found] == [each.to_records() for each in batches]
        some = backend.read_batches(self.RUN_ID, maker.writer_id, 2, 3)
        assert [each.number for each in some] == [2, 3, 4]
        assert backend.read_batches(self.RUN_ID, maker.writer_id, 6, 3) == []
        assert backend.read_batches(self.RUN_ID, "absent", 0, 3) == []
