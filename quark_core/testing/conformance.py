"""The conformance kit: a backend that passes it may be trusted with a run.

Subclass `BackendConformance` in a test module and override two fixtures, and
a third where the backend keeps metrics:

    class TestMine(BackendConformance):
        @pytest.fixture
        def definition(self): return quark_register_backends()[0]

        @pytest.fixture
        def config(self, tmp_path): return BackendConfig(storage_dir=tmp_path, run_id="run0")

        @pytest.fixture
        def observe(self, config): ...

`config` opens an EMPTY store; `observe` returns a function that reads the
store WITHOUT the backend and returns its metrics as (key, step, value). Tests
are skipped only for capabilities that the definition does not declare. A
standard test that is overridden without `xfail(reason=…)` fails the class.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import msgspec
import pytest

from quark_core.backend import (
    API_VERSION,
    Backend,
    BackendConfig,
    BackendDefinition,
    Capability,
    SupportsGroups,
    SupportsRead,
)
from quark_core.capability_check import check_capabilities
from quark_core.errors import BackendRejected, RunNotFoundError
from quark_core.json_object import JsonObject
from quark_core.query import Query
from quark_core.testing.artifact_conformance import ArtifactConformance
from quark_core.testing.batches import FIRST_TIME_US, BatchMaker
from quark_core.testing.store_conformance import StoreConformance

__all__ = ["BackendConformance", "Observation"]

Observation = list[tuple[str, int | None, float]]
Opener = Callable[[], Backend]


class BackendConformance(StoreConformance, ArtifactConformance):
    """Standard tests of a backend; see the module for how to use it."""

    RUN_ID: ClassVar[str] = "run0"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if not name.startswith("test_") or not hasattr(BackendConformance, name):
                continue
            marks = getattr(value, "pytestmark", [])
            if not any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks):
                raise TypeError(
                    f"{cls.__name__} overrides the standard test {name}; "
                    "mark it xfail(reason=...) if the backend cannot pass it"
                )

    # What an author overrides.

    @pytest.fixture
    def definition(self) -> BackendDefinition:
        """The backend's definition."""
        pytest.fail("override the fixture `definition`")

    @pytest.fixture
    def config(self) -> BackendConfig:
        """What opens an empty store, for the run `RUN_ID`."""
        pytest.fail("override the fixture `config`")

    @pytest.fixture
    def observe(self) -> Callable[[], Observation]:
        """Reads the store without the backend: every metric as (key, step, value), in order."""
        pytest.fail("override the fixture `observe`")

    # What the tests use.

    @pytest.fixture
    def open_backend(
        self, definition: BackendDefinition, config: BackendConfig
    ) -> Iterator[Opener]:
        """Opens the backend, as often as wanted; what is left open is closed afterwards."""
        opened: list[Backend] = []

        def open_it() -> Backend:
            backend = check_capabilities(definition, definition.open(config))
            opened.append(backend)
            return backend

        yield open_it
        for backend in opened:
            backend.close()

    @pytest.fixture
    def maker(self) -> BatchMaker:
        """The first writer of the run."""
        return BatchMaker(self.RUN_ID)

    def _need(self, definition: BackendDefinition, capability: Capability) -> None:
        if capability not in definition.capabilities:
            pytest.skip(f"{definition.name} does not declare {capability}")

    # The declaration.

    def test_definition_is_complete(self, definition: BackendDefinition) -> None:
        """It has a usable name, a summary, and speaks this version of the contract."""
        assert re.fullmatch(r"[a-z][a-z0-9_.-]*", definition.name)
        assert definition.summary.strip()
        assert definition.api_version == API_VERSION

    def test_capabilities_are_true(self, open_backend: Opener) -> None:
        """What is opened has what is declared, and nothing that is not."""
        assert isinstance(open_backend(), Backend)

    # Writing.

    def test_a_written_batch_is_in_the_store(
        self, open_backend: Opener, maker: BatchMaker, observe: Callable[[], Observation]
    ) -> None:
        """After write() returns, the store itself has the records."""
        backend = open_backend()
        backend.write(maker.start())
        backend.write(maker.metrics(("train/loss", 0, 0.5), ("train/loss", 1, 0.25)))
        assert observe() == [("train/loss", 0, 0.5), ("train/loss", 1, 0.25)]

    def test_values_are_kept_exactly(
        self, open_backend: Opener, maker: BatchMaker, observe: Callable[[], Observation]
    ) -> None:
        """Every float64 comes back bit by bit; NaN and the infinities as what they are."""
        values = [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, 1 / 3]
        backend = open_backend()
        backend.write(maker.start())
        backend.write(maker.metrics(*[("m", step, value) for step, value in enumerate(values)]))
        found = [value for _, _, value in observe()]
        assert [_bits(value) for value in found] == [_bits(value) for value in values]

    def test_steps_may_repeat_and_go_backwards(
        self, open_backend: Opener, maker: BatchMaker, observe: Callable[[], Observation]
    ) -> None:
        """Nothing is merged by step, and no order of steps is asked for."""
        rows: Observation = [("m", 5, 1.0), ("m", 3, 2.0), ("m", 5, 1.0), ("m", None, 4.0)]
        backend = open_backend()
        backend.write(maker.start())
        backend.write(maker.metrics(*rows))
        assert observe() == rows

    def test_a_gap_in_the_numbers_is_accepted(
        self, open_backend: Opener, maker: BatchMaker, observe: Callable[[], Observation]
    ) -> None:
        """A batch that was quarantined or dropped does not stop those after it."""
        backend = open_backend()
        backend.write(maker.start())
        maker.metrics(("m", 0, 0.0))
        backend.write(maker.metrics(("m", 1, 1.0)))
        assert observe() == [("m", 1, 1.0)]

    def test_what_was_written_survives_closing(
        self, open_backend: Opener, maker: BatchMaker, observe: Callable[[], Observation]
    ) -> None:
        """close() loses nothing, and the next opening goes on where it was."""
        backend = open_backend()
        backend.write(maker.start())
        backend.write(maker.metrics(("m", 0, 0.0)))
        backend.close()
        open_backend().write(maker.metrics(("m", 1, 1.0)))
        assert observe() == [("m", 0, 0.0), ("m", 1, 1.0)]

    def test_malformed_bytes_are_rejected(
        self, open_backend: Opener, maker: BatchMaker, observe: Callable[[], Observation]
    ) -> None:
        """A body that cannot be read is refused for good where it is read, and stops nothing."""
        backend = open_backend()
        backend.write(maker.start())
        good = maker.metrics(("m", 0, 0.0))
        torn = msgspec.structs.replace(maker.lifecycle(("heartbeat", {})), body=good.body[:9])
        with pytest.raises(BackendRejected):
            backend.write(torn)
        backend.write(good)
        assert observe() == [("m", 0, 0.0)]

    # Exactly once.

    def test_a_batch_delivered_twice_is_there_once(
        self,
        definition: BackendDefinition,
        open_backend: Opener,
        maker: BatchMaker,
        observe: Callable[[], Observation],
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
        observe: Callable[[], Observation],
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
        observe: Callable[[], Observation],
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
        observe: Callable[[], Observation],
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

    # Reading back.

    def test_records_are_read_as_they_were_written(
        self, definition: BackendDefinition, open_backend: Opener, maker: BatchMaker
    ) -> None:
        """Every field of metrics and events comes back."""
        reader = self._open_reader(definition, open_backend)
        metadata = JsonObject({"split": 'a,b\n"c"', "k": [1, 2.5, None]})
        reader.write(maker.start())
        metrics = maker.metrics(
            ("a/b", 3, 0.1),
            ("c", None, 2.0),
            description="Grüße,\n两行",
            metadata=metadata,
        )
        events = maker.events("saved", "loaded", payload=metadata, status="ok")
        for batch in (metrics, events):
            reader.write(batch)
        for batch in (metrics, events):
            found = reader.read(self.RUN_ID, batch.kind, Query()).to_records()
            assert list(found) == batch.to_records()

    @pytest.mark.parametrize(
        "query",
        [
            Query(equals={"metric_key": "a/x"}),
            Query(equals={"namespace": "a", "metric_name": "y"}),
            Query(equals={"metric_key": "absent"}),
            Query(any_of={"metric_key": ("a/x", "b")}),
            Query(step=3),
            Query(step_min=2, step_max=5),
            Query(epoch_min=0),
            Query(limit=3),
            Query(equals={"metric_key": "a/x"}, step_min=1, limit=2),
            Query(limit=0),
            Query(include_non_finite=False),
        ],
        ids=str,
    )
    def test_filters(
        self,
        definition: BackendDefinition,
        open_backend: Opener,
        maker: BatchMaker,
        query: Query,
    ) -> None:
        """Each filter keeps what it says, in persistence order."""
        reader = self._open_reader(definition, open_backend)
        reader.write(maker.start())
        batches = [
            maker.metrics(*[("a/x", step, float(step)) for step in range(4)]),
            maker.metrics(("a/y", 3, math.nan), ("b", None, 1.0)),
            maker.metrics(*[("a/x", step, float(step)) for step in range(4, 7)], ("b", 2, 1.5)),
        ]
        for batch in batches:
            reader.write(batch)
        expected = [r for batch in batches for r in batch.to_records() if _fits(query, r)]
        expected = expected[-query.limit :] if query.limit else expected
        expected = [] if query.limit == 0 else expected
        found = reader.read(self.RUN_ID, "metric", query).to_records()
        assert [r.id for r in found] == [r.id for r in expected]

    def test_persistence_order(
        self, definition: BackendDefinition, open_backend: Opener, maker: BatchMaker
    ) -> None:
        """Attempt, rank, start of the writer, sequence: whatever arrived first."""
        reader = self._open_reader(definition, open_backend)
        later = {"attempt": 1, "started_us": FIRST_TIME_US + 10**6}
        resumed = BatchMaker(self.RUN_ID, writer_id="resumed", **later)
        other = BatchMaker(self.RUN_ID, rank=1, writer_id="rank1")
        second = BatchMaker(self.RUN_ID, writer_id="second", started_us=FIRST_TIME_US + 10**5)
        swapped = maker.metrics(("m", 0, 0.0), ("m", 1, 1.0)).to_records()
        batches = [
            maker.start(),
            resumed.start(),
            resumed.metrics(("m", 5, 5.0)),
            other.metrics(("m", 4, 4.0)),
            second.metrics(("m", 3, 3.0)),
            maker.batch(swapped[::-1]),
            maker.metrics(("m", 2, 2.0)),
        ]
        for batch in batches:
            reader.write(batch)
        found = reader.read(self.RUN_ID, "metric", Query())
        assert found["value"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert found["attempt"].tolist() == [0, 0, 0, 0, 0, 1]
        assert found["rank"].tolist() == [0, 0, 0, 0, 1, 0]

    def test_lifecycle_is_applied(
        self, definition: BackendDefinition, open_backend: Opener, maker: BatchMaker
    ) -> None:
        """Project, tags, config and status of a run come back; a late status changes nothing."""
        reader = self._open_reader(definition, open_backend)
        reader.write(maker.start(project="vision", tags=["b", "a"]))
        reader.write(maker.lifecycle(("tag", {"tag": "c"})))
        running = reader.load_run(self.RUN_ID)
        assert (running.run.status, running.project.name) == ("running", "vision")
        assert running.run.tags == ("a", "b", "c")
        assert running.config is not None
        assert running.config.values == {"lr": 0.1}
        resumed = BatchMaker(
            self.RUN_ID, attempt=1, writer_id="resumed", started_us=FIRST_TIME_US + 10**6
        )
        reader.write(resumed.start())
        reader.write(maker.lifecycle(("status", {"status": "failed"})))
        assert reader.load_run(self.RUN_ID).run.status == "running"
        reader.write(resumed.lifecycle(("status", {"status": "completed"})))
        ended = reader.load_run(self.RUN_ID)
        assert (ended.run.status, ended.state) == ("completed", "completed")
        assert ended.run.resume_count == 1
        assert ended.run.ended_at is not None
        assert [stored.run.id for stored in reader.list_runs()] == [self.RUN_ID]
        assert reader.list_runs(project="other") == []

    def test_unknown_runs_are_said_to_be_unknown(
        self, definition: BackendDefinition, open_backend: Opener, maker: BatchMaker
    ) -> None:
        """Reading a run that is not there is no empty answer."""
        reader = self._open_reader(definition, open_backend)
        reader.write(maker.start())
        with pytest.raises(RunNotFoundError):
            reader.load_run("absent")
        with pytest.raises(RunNotFoundError):
            reader.read("absent", "metric", Query())

    def test_reading_while_writing(
        self, definition: BackendDefinition, open_backend: Opener, maker: BatchMaker
    ) -> None:
        """A reader in another thread sees a growing, gap-free beginning."""
        reader = self._open_reader(definition, open_backend)
        reader.write(maker.start())
        done = threading.Event()
        wrong: list[object] = []

        def look() -> None:
            seen = 0
            while not done.is_set():
                values = reader.read(self.RUN_ID, "metric", Query())["value"].tolist()
                if len(values) < seen or values != [float(i) for i in range(len(values))]:
                    wrong.append(values)
                seen = len(values)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            for step in range(50):
                reader.write(maker.metrics(("m", step, float(step))))
        finally:
            done.set()
            thread.join()
        assert wrong == []
        assert reader.read(self.RUN_ID, "metric", Query()).count == 50

    # Being a primary.

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
        observe: Callable[[], Observation],
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

    def _open_reader(self, definition: BackendDefinition, open_backend: Opener) -> Any:
        self._need(definition, Capability.READ)
        backend = open_backend()
        assert isinstance(backend, SupportsRead)
        return backend


def _bits(value: float) -> object:
    return "nan" if math.isnan(value) else struct.pack("<d", value)


def _fits(query: Query, record: Any) -> bool:
    """The plain reading of a query, one record at a time."""
    for name, value in query.equals.items():
        if getattr(record, name) != value:
            return False
    for name, values in query.any_of.items():
        if getattr(record, name) not in values:
            return False
    for name in ("step", "epoch"):
        value = getattr(record, name)
        exact = getattr(query, name)
        low, high = getattr(query, f"{name}_min"), getattr(query, f"{name}_max")
        if (exact, low, high) == (None, None, None):
            continue
        if value is None or (exact is not None and value != exact):
            return False
        if (low is not None and value < low) or (high is not None and value > high):
            return False
    return query.include_non_finite or math.isfinite(record.value)
