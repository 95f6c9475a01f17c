"""The part of the conformance kit for processes: killed, beside each other, and from before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quark_core.backend import BackendConfig, BackendDefinition, Batch, Capability
from quark_core.query import Query
from quark_core.testing.batches import BatchMaker
from quark_core.testing.kit import BackendKit, Observe, OldStore, Opener
from quark_core.testing.samples import FIRST_TIME_US
from quark_core.testing.writing_process import WritingProcess, write_as_lane

__all__ = ["ProcessConformance"]

_ROWS = 20
_NEVER_REACHED = 20_000
_ACKNOWLEDGED = (1, 4, 9)


class ProcessConformance(BackendKit):
    """Standard tests with other processes, and of stores of earlier versions."""

    def test_a_killed_process_loses_nothing_acknowledged(
        self,
        definition: BackendDefinition,
        config: BackendConfig,
        open_backend: Opener,
        maker: BatchMaker,
        observe: Observe,
        tmp_path: Path,
    ) -> None:
        """SIGKILL while it writes; the next process opens the store, and goes on.

        What was acknowledged is there. Where the backend is idempotent, the
        batches that were not are sent again, and everything is there once.
        """
        is_idempotent = Capability.IDEMPOTENT in definition.capabilities
        backend = open_backend()
        backend.write(maker.start())
        backend.close()
        kept: list[float] = []
        for turn, least in enumerate(_ACKNOWLEDGED):
            writer = BatchMaker(
                self.RUN_ID, writer_id=f"killed{turn}", started_us=FIRST_TIME_US + 10**6 * turn
            )
            batches = _Endless(writer, first_value=turn * 10**6)
            numbers: list[int] = []
            with WritingProcess(tmp_path / f"p{turn}", definition, config, batches.made) as other:
                other.begin()
                other.go()
                for number in other.acknowledged():
                    numbers.append(number)
                    if len(numbers) >= least:
                        break
                numbers += other.kill()
            assert len(numbers) >= least, "the process ended by itself"
            done = len(numbers)
            found = [value for _, _, value in observe()]
            acknowledged = kept + batches.values(done)
            assert found[: len(acknowledged)] == acknowledged
            assert set(found[len(acknowledged) :]) <= set(batches.values(done + 1))
            again = open_backend()
            if is_idempotent:
                for batch in batches.made[max(0, done - 2) : done + 2]:
                    write_as_lane(again, batch)
                kept += batches.values(done + 2)
                assert [value for _, _, value in observe()] == kept
            else:
                assert len(set(found)) == len(found)
                kept = found
            again.close()

    def test_two_processes_write_one_run(
        self,
        definition: BackendDefinition,
        config: BackendConfig,
        open_backend: Opener,
        maker: BatchMaker,
        observe: Observe,
        tmp_path: Path,
    ) -> None:
        """Each with a writer of its own, at once: everything of both is there, once."""
        backend = open_backend()
        backend.write(maker.start())
        backend.close()
        plans: list[list[Batch]] = []
        for index in range(2):
            writer = BatchMaker(
                self.RUN_ID, writer_id=f"w{index}", started_us=FIRST_TIME_US + 10**6 * (index + 1)
            )
            plans.append(_Endless(writer, first_value=index * 10**6, count=25).made)
        processes = [
            WritingProcess(tmp_path / f"p{index}", definition, config, plan)
            for index, plan in enumerate(plans)
        ]
        with processes[0], processes[1]:
            for process in processes:
                process.begin()
            for process in processes:
                process.go()
            for process, plan in zip(processes, plans, strict=True):
                assert process.finish() == [batch.number for batch in plan]
        values = [_values_of(plan) for plan in plans]
        found = [value for _, _, value in observe()]
        assert sorted(found) == sorted(values[0] + values[1])
        for each in values:
            own = set(each)
            assert [value for value in found if value in own] == each
        if Capability.READ in definition.capabilities:
            reader: Any = open_backend()
            read = reader.read(self.RUN_ID, "metric", Query())["value"].tolist()
            assert read == values[0] + values[1]

    def test_a_process_that_closed_it_can_end(
        self,
        definition: BackendDefinition,
        config: BackendConfig,
        maker: BatchMaker,
        observe: Observe,
        tmp_path: Path,
    ) -> None:
        """With exit status 0, and with everything in the store."""
        batches = [maker.start(), maker.metrics(("m", 0, 0.0)), maker.metrics(("m", 1, 1.0))]
        with WritingProcess(tmp_path / "process", definition, config, batches) as other:
            other.begin()
            other.go()
            assert other.finish() == [0, 1, 2]
        assert observe() == [("m", 0, 0.0), ("m", 1, 1.0)]

    def test_old_stores_are_read_and_written(
        self, definition: BackendDefinition, old_stores: Sequence[OldStore]
    ) -> None:
        """What an earlier version of the backend wrote is there, and goes on."""
        if not old_stores:
            pytest.skip("the fixture `old_stores` gives none")
        for old in old_stores:
            if definition.migrate is not None:
                definition.migrate(old.config, "2026-01-01T00:00:00+00:00")
            backend: Any = definition.open(old.config)
            try:
                resumed = BatchMaker(old.run_id, attempt=99, writer_id="later", started_us=2**51)
                backend.write(resumed.start())
                backend.write(resumed.metrics(("of/today", 1, 0.5)))
                if Capability.READ in definition.capabilities:
                    query = Query(all_attempts=True, include_non_finite=True)
                    found = backend.read(old.run_id, "metric", query)
                    rows = [(one.metric_key, one.step, one.value) for one in found.to_records()]
                    expected = [*old.metrics, ("of/today", 1, 0.5)]
                    # As text, since NaN is equal to nothing; in order within each key.
                    assert _sort_by_key(rows) == _sort_by_key(expected)
            finally:
                backend.close()


class _Endless:
    """More batches of one writer than a process writes before it is killed."""

    def __init__(self, writer: BatchMaker, *, first_value: int, count: int = 0) -> None:
        self.made = [
            writer.metrics(
                *[("m", 0, float(first_value + i)) for i in range(at, at + _ROWS)],
            )
            for at in range(0, (count * _ROWS) or _NEVER_REACHED, _ROWS)
        ]

    def values(self, batches: int) -> list[float]:
        """The values of the first so many batches."""
        return _values_of(self.made[:batches])


def _sort_by_key(rows: Iterable[tuple[Any, ...]]) -> list[str]:
    return [repr(row) for row in sorted(rows, key=lambda row: str(row[0]))]


def _values_of(batches: Sequence[Batch]) -> list[float]:
    return [value for batch in batches for value in batch.decoded.to_list("value")]
