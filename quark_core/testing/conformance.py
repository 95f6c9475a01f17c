"""The conformance kit: a backend that passes it may be trusted with a run.

Subclass `BackendConformance` in a test module and override three fixtures:

    class TestMine(BackendConformance):
        @pytest.fixture
        def definition(self): return quark_register_backends()[0]

        @pytest.fixture
        def config(self, tmp_path): return BackendConfig(storage_dir=tmp_path, run_id="run0")

        @pytest.fixture
        def observe(self, config): ...

`config` opens an EMPTY store; `observe` returns a function that reads the
store WITHOUT the backend and returns the metrics of the run as (key, step,
value). Two more fixtures let more be tested: `outage` makes the store
unreachable for a while, `old_stores` gives stores of earlier versions.

Tests are skipped only for capabilities that the definition does not declare,
and for these two fixtures. What the backend cannot pass is named, with the
reason, in `EXPECTED_FAILURES`; a standard test that is overridden without
`xfail(reason=…)` fails the class. The plugin `quark_core.testing.report`
prints what was passed:

    pytest -p quark_core.testing.report tests/test_mine.py
"""

from __future__ import annotations

import contextlib
import math
import re
import struct
import threading
from typing import Any

import msgspec
import pytest

from quark_core.backends.contract import (
    API_VERSION,
    Backend,
    BackendDefinition,
    Capability,
)
from quark_core.errors import BackendContractError, BackendRejected, BackendUnavailable
from quark_core.records import RECORD_TYPES
from quark_core.records.names import MAX_NAME_LENGTH
from quark_core.records.query import Query
from quark_core.testing.coordination_conformance import CoordinationConformance
from quark_core.testing.fakes import FIRST_TIME_US, BatchMaker
from quark_core.testing.kit import (
    BackendKit,
    Observation,
    Observe,
    Opener,
    Outage,
    bound_time,
    needs,
)
from quark_core.testing.process_conformance import ProcessConformance
from quark_core.testing.reading_conformance import (
    ArtifactConformance,
    FollowingConformance,
    ReadingConformance,
)
from quark_core.testing.store_conformance import (
    BelongingConformance,
    PrimaryConformance,
    StoreConformance,
)
from quark_core.testing.workers_conformance import WorkersConformance

ODD_KEYS = (
    *("a", "9", "0.5", "A.b-c_d", "loss", "Loss", "LOSS", "a/b/c/d/e", "con", "x.", "null", "nan"),
    *("step", "key", "value", "rank", "True", "-".join("ab"), "val/mean_x40_1", "x5f_step"),
    "k" * MAX_NAME_LENGTH,
    "/".join("ab" * 60)[:MAX_NAME_LENGTH],
)


class WritingConformance(BackendKit):
    """Standard tests of the declaration, of writing, of refusing and of closing."""

    # The declaration.

    def test_definition_is_complete(self, definition: BackendDefinition) -> None:
        """It has a usable name, a summary of one line, and speaks this version of the contract."""
        assert re.fullmatch(r"[a-z][a-z0-9_.-]*", definition.name)
        assert definition.summary.strip()
        assert "\n" not in definition.summary
        assert definition.api_version == API_VERSION
        assert all(isinstance(one, Capability) for one in definition.capabilities)
        assert definition.capabilities <= frozenset(Capability)

    def test_capabilities_are_true(
        self, definition: BackendDefinition, open_backend: Opener
    ) -> None:
        """What is opened has what is declared, and nothing that is not."""
        try:
            backend = open_backend()
        except BackendContractError as error:
            pytest.fail(str(error))
        assert isinstance(backend, Backend)
        if Capability.PRIMARY in definition.capabilities:
            assert {Capability.READ, Capability.IDEMPOTENT} <= definition.capabilities

    # Writing.

    def test_a_written_batch_is_in_the_store(
        self, backend: Any, maker: BatchMaker, observe: Observe
    ) -> None:
        """After write() returns, the store itself has the records."""
        for step in range(3):
            # Looked at after each: what waits for the next batch is not in the store.
            backend.write(maker.metrics(("train/loss", step, 0.5), ("train/acc", step, 0.25)))
            expected = [(k, s, v) for s in range(step + 1) for k, v in _PAIR]
            assert observe() == expected

    def test_values_are_kept_exactly(
        self, backend: Any, maker: BatchMaker, observe: Observe
    ) -> None:
        """Every float64 comes back bit by bit; NaN and the infinities as what they are."""
        values = [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, 1 / 3]
        backend.write(maker.metrics(*[("m", step, value) for step, value in enumerate(values)]))
        found = [value for _, _, value in observe()]
        assert [_bits(value) for value in found] == [_bits(value) for value in values]

    def test_finite_values_are_kept_exactly(
        self, backend: Any, maker: BatchMaker, observe: Observe
    ) -> None:
        """Whatever becomes of the others."""
        values = [0.1, 5e-324, -1.7976931348623157e308, 1 / 3, 16777217.0, 2.0**53 + 2, 1e-320]
        backend.write(maker.metrics(*[("m", step, value) for step, value in enumerate(values)]))
        assert [value for _, _, value in observe()] == values

    def test_steps_may_repeat_and_go_backwards(
        self, backend: Any, maker: BatchMaker, observe: Observe
    ) -> None:
        """Nothing is merged by step, and no order of steps is asked for."""
        rows: Observation = [("m", 5, 1.0), ("m", 3, 2.0), ("m", 5, 1.0), ("m", None, 4.0)]
        backend.write(maker.metrics(*rows))
        assert observe() == rows

    def test_steps_are_whole_to_the_last_bit(
        self, backend: Any, maker: BatchMaker, observe: Observe
    ) -> None:
        """Also beyond what a float holds."""
        steps = [0, 2**31, 2**53 + 1, 2**63 - 1]
        backend.write(maker.metrics(*[("m", step, 1.0) for step in steps]))
        assert [step for _, step, _ in observe()] == steps

    def test_odd_names_are_kept_apart(
        self, backend: Any, maker: BatchMaker, observe: Observe
    ) -> None:
        """Names that a file, a column or a reserved word could stumble over."""
        keys = list(dict.fromkeys(ODD_KEYS))
        backend.write(maker.metrics(*[(key, 1, float(i)) for i, key in enumerate(keys)]))
        assert observe() == [(key, 1, float(i)) for i, key in enumerate(keys)]

    def test_a_large_batch_is_kept_whole(
        self, backend: Any, maker: BatchMaker, observe: Observe
    ) -> None:
        """In its order, however many rows the store takes at a time."""
        rows: Observation = [(f"m{i % 7}", i, float(i)) for i in range(5_000)]
        backend.write(maker.metrics(*rows))
        assert observe() == rows

    @pytest.mark.parametrize("kind", sorted(RECORD_TYPES))
    def test_a_kind_is_taken(
        self, backend: Any, maker: BatchMaker, observe: Observe, kind: str
    ) -> None:
        """A backend may pass over what it does not show, and never stumbles over it."""
        backend.write(maker.samples(kind))
        backend.write(maker.metrics(("later", 7, 0.5)))
        assert ("later", 7, 0.5) in observe()

    @pytest.mark.parametrize("kind", sorted(set(RECORD_TYPES) - {"lifecycle"}))
    @needs(Capability.READ)
    def test_a_kind_is_read_back(self, backend: Any, maker: BatchMaker, kind: str) -> None:
        """Every field of it, where reading is declared."""
        batch = maker.samples(kind)
        backend.write(batch)
        assert list(backend.read(self.RUN_ID, kind, Query()).to_records()) == batch.to_records()

    def test_runs_are_kept_apart(
        self,
        definition: BackendDefinition,
        open_backend: Opener,
        maker: BatchMaker,
        observe: Observe,
    ) -> None:
        """Two runs at one place, each opened for itself, have nothing of each other."""
        mine, its = open_backend(), open_backend(run_id="run1")
        other = BatchMaker("run1", writer_id="writer1", started_us=FIRST_TIME_US + 10**6)
        for step in range(3):
            for backend, one, value in ((mine, maker, 1.0), (its, other, 2.0)):
                if step == 0:
                    backend.write(one.start())
                backend.write(one.metrics(("m", step, value)))
        assert observe() == [("m", step, 1.0) for step in range(3)]
        if Capability.READ in definition.capabilities:
            for run_id, value in ((self.RUN_ID, 1.0), ("run1", 2.0)):
                found = open_backend().read(run_id, "metric", Query())  # type: ignore[attr-defined]
                assert found["value"].tolist() == [value] * 3

    # Going on.

    def test_a_gap_in_the_numbers_is_accepted(
        self, backend: Any, maker: BatchMaker, observe: Observe
    ) -> None:
        """A batch that was quarantined or dropped does not stop those after it."""
        maker.metrics(("m", 0, 0.0))
        backend.write(maker.metrics(("m", 1, 1.0)))
        assert observe() == [("m", 1, 1.0)]

    def test_a_run_that_ended_goes_on(
        self, backend: Any, open_backend: Opener, maker: BatchMaker, observe: Observe
    ) -> None:
        """A new attempt after a status, and a late batch of the first one."""
        backend.write(maker.metrics(("m", 0, 0.0)))
        backend.write(maker.lifecycle(("status", {"status": "failed"})))
        backend.close()
        later = {"attempt": 1, "started_us": FIRST_TIME_US + 10**6}
        resumed = BatchMaker(self.RUN_ID, writer_id="resumed", **later)
        again = open_backend()
        again.write(resumed.start())
        again.write(resumed.metrics(("m", 1, 1.0)))
        again.write(maker.metrics(("late", 0, 3.0)))
        again.write(resumed.metrics(("m", 2, 2.0)))
        again.write(resumed.lifecycle(("status", {"status": "completed"})))
        assert sorted(observe(), key=repr) == [
            ("late", 0, 3.0),
            ("m", 0, 0.0),
            ("m", 1, 1.0),
            ("m", 2, 2.0),
        ]

    def test_another_writer_of_an_attempt_is_taken(
        self, backend: Any, maker: BatchMaker, observe: Observe
    ) -> None:
        """Ranks and forked processes number their batches each for itself."""
        rank = BatchMaker(self.RUN_ID, rank=1, writer_id="rank1")
        for step in range(3):
            backend.write(maker.metrics(("m", step, 1.0)))
            backend.write(rank.metrics(("m", step, 2.0)))
        expected = [("m", step, value) for step in range(3) for value in (1.0, 2.0)]
        assert sorted(observe(), key=repr) == sorted(expected, key=repr)

    # Refusing.

    def test_malformed_bytes_are_rejected(
        self, backend: Any, maker: BatchMaker, observe: Observe
    ) -> None:
        """A body that cannot be read is refused for good where it is read, and stops nothing."""
        good = maker.metrics(("m", 0, 0.0))
        torn = msgspec.structs.replace(maker.lifecycle(("heartbeat", {})), body=good.body[:9])
        with pytest.raises(BackendRejected):
            backend.write(torn)
        backend.write(good)
        assert observe() == [("m", 0, 0.0)]

    def test_a_kind_of_a_later_version_stops_nothing(
        self, backend: Any, maker: BatchMaker, observe: Observe
    ) -> None:
        """It is kept, passed over or rejected; nothing else is raised."""
        later = msgspec.structs.replace(maker.metrics(("m", 0, 0.0)), kind="hologram")
        with contextlib.suppress(BackendRejected):
            backend.write(later)
        backend.write(maker.metrics(("n", 1, 1.0)))
        assert ("n", 1, 1.0) in observe()

    def test_an_outage_is_said_to_be_one(
        self, open_backend: Opener, maker: BatchMaker, observe: Observe, outage: Outage | None
    ) -> None:
        """What may come right again is BackendUnavailable, and then does."""
        if outage is None:
            pytest.skip("the fixture `outage` is not given")
        backend = open_backend()
        backend.write(maker.start())
        backend.write(maker.metrics(("m", 0, 0.0)))
        waiting = maker.metrics(("m", 1, 1.0))
        with outage():
            for _ in range(2):
                with pytest.raises(BackendUnavailable) as raised:
                    backend.write(waiting)
                assert str(raised.value).strip()
        backend.write(waiting)
        assert observe() == [("m", 0, 0.0), ("m", 1, 1.0)]

    # Closing.

    def test_what_was_written_survives_closing(
        self, backend: Any, open_backend: Opener, maker: BatchMaker, observe: Observe
    ) -> None:
        """close() loses nothing, and the next opening goes on where it was."""
        backend.write(maker.metrics(("m", 0, 0.0)))
        backend.close()
        assert observe() == [("m", 0, 0.0)]
        again = open_backend()
        again.write(maker.metrics(("m", 1, 1.0)))
        again.close()
        assert observe() == [("m", 0, 0.0), ("m", 1, 1.0)]

    def test_opening_and_closing_changes_nothing(
        self, open_backend: Opener, maker: BatchMaker, observe: Observe
    ) -> None:
        """A lane may open its backend and be given nothing to write."""
        open_backend().close()
        backend = open_backend()
        backend.write(maker.start())
        backend.write(maker.metrics(("m", 0, 0.0)))
        backend.close()
        open_backend().close()
        assert observe() == [("m", 0, 0.0)]

    def test_close_ends_in_time(self, open_backend: Opener, maker: BatchMaker) -> None:
        """With nothing left to send, and it leaves no thread that keeps the process alive."""
        before = set(threading.enumerate())
        backend = open_backend()
        backend.write(maker.start())
        backend.write(maker.metrics(("m", 0, 0.0)))
        with bound_time(self.CLOSE_LIMIT_S, "close()"):
            backend.close()
        left = [one for one in set(threading.enumerate()) - before if not one.daemon]
        assert left == []


_PAIR = (("train/loss", 0.5), ("train/acc", 0.25))


def _bits(value: float) -> object:
    return "nan" if math.isnan(value) else struct.pack("<d", value)


class OnceConformance(BackendKit):
    """Standard tests of backends that declare IDEMPOTENT, GROUPS or REPLAY."""

    @needs(Capability.IDEMPOTENT)
    def test_a_batch_delivered_twice_is_there_once(
        self, opened: Any, maker: BatchMaker, observe: Observe
    ) -> None:
        """The lane repeats a batch whose acknowledgement it has not seen."""
        first, second = maker.start(), maker.metrics(("m", 0, 0.0), ("m", 0, 0.0))
        for batch in (first, first, second, second):
            opened.write(batch)
        assert observe() == [("m", 0, 0.0), ("m", 0, 0.0)]

    @needs(Capability.IDEMPOTENT)
    def test_a_reply_lost_by_a_crash_duplicates_nothing(
        self, opened: Any, open_backend: Opener, maker: BatchMaker, observe: Observe
    ) -> None:
        """The process dies between the store's commit and the lane's note of it."""
        batches = [maker.start(), maker.metrics(("m", 0, 0.0)), maker.metrics(("m", 1, 1.0))]
        for batch in batches:
            opened.write(batch)
        again = open_backend()
        for batch in batches:
            again.write(batch)
        assert observe() == [("m", 0, 0.0), ("m", 1, 1.0)]

    @needs(Capability.IDEMPOTENT)
    def test_other_content_under_a_known_number_is_rejected(
        self, backend: Any, maker: BatchMaker, observe: Observe
    ) -> None:
        """Two processes that share an identity by mistake are found out."""
        batch = maker.metrics(("m", 0, 0.0))
        backend.write(batch)
        other = BatchMaker(self.RUN_ID).metrics(("m", 0, 9.0))
        with pytest.raises(BackendRejected):
            backend.write(msgspec.structs.replace(other, number=batch.number))
        assert observe() == [("m", 0, 0.0)]

    @needs(Capability.GROUPS)
    def test_a_group_is_stored_whole_or_not_at_all(
        self, opened: Any, maker: BatchMaker, observe: Observe
    ) -> None:
        """A refused batch takes the others of its group back."""
        opened.write_group([maker.start(), maker.metrics(("m", 0, 0.0))])
        good = maker.metrics(("m", 1, 1.0))
        torn = msgspec.structs.replace(maker.lifecycle(("heartbeat", {})), body=good.body[:9])
        with pytest.raises(BackendRejected):
            opened.write_group([good, torn])
        assert observe() == [("m", 0, 0.0)]
        opened.write(good)
        assert observe() == [("m", 0, 0.0), ("m", 1, 1.0)]

    @needs(Capability.IDEMPOTENT)
    def test_old_batches_that_come_late_are_there_once(
        self, open_backend: Opener, maker: BatchMaker, observe: Observe
    ) -> None:
        """A journal of the first attempt is delivered again when the second has begun."""
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

    @needs(Capability.IDEMPOTENT)
    def test_equal_values_are_no_duplicates(
        self, backend: Any, maker: BatchMaker, observe: Observe
    ) -> None:
        """Identity decides, never content."""
        for _ in range(3):
            backend.write(maker.metrics(("m", 0, 0.5), ("m", 0, 0.5)))
        assert observe() == [("m", 0, 0.5)] * 6

    @needs(Capability.REPLAY)
    def test_batches_are_given_back_as_they_came(self, opened: Any, maker: BatchMaker) -> None:
        """From a number on, at most so many, byte by byte, and of that writer only."""
        other = BatchMaker(self.RUN_ID, writer_id="other", started_us=FIRST_TIME_US + 10**6)
        batches = [maker.start(), *(maker.metrics(("m", step, 0.5)) for step in range(5))]
        for batch in batches:
            opened.write(batch)
        opened.write(other.metrics(("m", 0, 9.0)))
        found = opened.read_batches(self.RUN_ID, maker.writer_id, 0, 100)
        assert [each.number for each in found] == [each.number for each in batches]
        assert [each.to_records() for each in found] == [each.to_records() for each in batches]
        some = opened.read_batches(self.RUN_ID, maker.writer_id, 2, 3)
        assert [each.number for each in some] == [2, 3, 4]
        assert opened.read_batches(self.RUN_ID, maker.writer_id, 6, 3) == []
        assert opened.read_batches(self.RUN_ID, "absent", 0, 3) == []


class BackendConformance(
    WritingConformance,
    OnceConformance,
    ReadingConformance,
    ProcessConformance,
    PrimaryConformance,
    StoreConformance,
    FollowingConformance,
    BelongingConformance,
    CoordinationConformance,
    WorkersConformance,
    ArtifactConformance,
):
    """Standard tests of a backend; see the module for how to use it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if not name.startswith("test_") or not hasattr(BackendConformance, name):
                continue
            marks = getattr(value, "pytestmark", [])
            if not any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks):
                raise TypeError(
                    f"{cls.__name__} overrides the standard test {name}; "
                    "name it in EXPECTED_FAILURES, with the reason, if the backend cannot pass it"
                )
        for name, reason in cls.EXPECTED_FAILURES.items():
            if not hasattr(BackendConformance, name.split("[")[0]):
                raise TypeError(f"{cls.__name__}.EXPECTED_FAILURES: the test {name} does not exist")
            if not reason.strip():
                raise TypeError(f"{cls.__name__}.EXPECTED_FAILURES: {name} requires a reason")
