"""The part of the conformance kit for processes: killed, beside each other, and from before.

    python -m quark_core.testing.process_conformance PLAN

opens a backend and writes. The plan is a file that `WritingProcess` made. The
process says when it has opened the backend and begins to write when it is given
a line. Each acknowledged batch is said at once, as its number on a line of its
own.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quark_core.backends.contract import (
    Backend,
    BackendConfig,
    BackendDefinition,
    Batch,
    Capability,
)
from quark_core.backends.registry import check_capabilities
from quark_core.errors import BackendUnavailable
from quark_core.records.query import Query
from quark_core.testing.fakes import FIRST_TIME_US, BatchMaker
from quark_core.testing.kit import BackendKit, Observe, OldStore, Opener, stretch_s

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
        backend: Any,
        definition: BackendDefinition,
        config: BackendConfig,
        open_backend: Opener,
        observe: Observe,
        tmp_path: Path,
    ) -> None:
        """Each with a writer of its own, at once: everything of both is there, once."""
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


_PATIENCE_S = 45.0
_RETRY_S = 0.05


class WritingProcess:
    """Another process that writes batches, opened with the same configuration.

    Args:
        folder: Where its plan lies; one folder for each process.
        definition: The backend. Its `open` must be found by its name.
        config: What it is opened with.
        batches: What it writes.
    """

    def __init__(
        self,
        folder: Path,
        definition: BackendDefinition,
        config: BackendConfig,
        batches: Sequence[Batch],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._errors = folder / "errors.txt"
        plan = folder / "plan"
        try:
            opening = pickle.dumps((definition, config))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            pytest.fail(
                f"the kit opens the backend in other processes, so `definition.open` must be a "
                f"function of a module and the config plain data: {error}"
            )
        plan.write_bytes(msgspec.msgpack.encode([opening, list(batches)]))
        path = os.pathsep.join(place for place in sys.path if place)
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "quark_core.testing.process_conformance", str(plan)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": path},
            )

    def begin(self) -> None:
        """Wait until it has opened the backend; `go` then lets it write."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == b"opened\n":
                return
        self._process.wait()
        pytest.fail(f"another process could not open it: {self._errors.read_text()}")

    def go(self) -> None:
        """Let it write."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    def acknowledged(self) -> Iterator[int]:
        """Numbers of the acknowledged batches, as they come."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith(b"\n"):
                return
            if line.startswith(b"acknowledged "):
                yield int(line.split()[1])

    def kill(self) -> list[int]:
        """End it at once; returns what it had still acknowledged."""
        self._process.kill()
        rest = list(self.acknowledged())
        self._process.wait()
        return rest

    def finish(self) -> list[int]:
        """Wait for its end; what it acknowledged. Its failure is the test's."""
        numbers = list(self.acknowledged())
        code = self._process.wait()
        assert code == 0, f"another process could not write: {self._errors.read_text()}"
        return numbers

    def __enter__(self) -> WritingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()


def write_as_lane(backend: Backend, batch: Batch) -> None:
    """Write a batch as a lane does: again, after a while, for as long as it is unavailable.

    A backend may let one process at a time write a run, or wait until what a
    killed one has left is over.

    Raises:
        BackendUnavailable: It was for too long.
    """
    deadline = time.monotonic() + stretch_s(_PATIENCE_S)
    while True:
        try:
            backend.write(batch)
            return
        except BackendUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


def main() -> None:
    """Do what a plan says."""
    opening, raw = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes())
    # The plan is a file that the test itself has just written.
    loaded: Any = pickle.loads(opening)  # noqa: S301
    definition, config = loaded
    backend = check_capabilities(definition, definition.open(config))
    os.write(1, b"opened\n")
    sys.stdin.readline()
    for batch in msgspec.convert(raw, list[Batch]):
        write_as_lane(backend, batch)
        os.write(1, b"acknowledged %d\n" % batch.number)
    backend.close()


if __name__ == "__main__":
    main()
