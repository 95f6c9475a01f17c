"""A process that opens a backend and writes, for the kit's tests of kills and of two at once.

    python -m quark_core.testing.writing_process PLAN

The plan is a file that `WritingProcess` made. The process says when it has
opened the backend and begins to write when it is given a line. Each
acknowledged batch is said at once, as its number on a line of its own.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quark_core.backend import Backend, BackendConfig, BackendDefinition, Batch
from quark_core.capability_check import check_capabilities
from quark_core.errors import BackendUnavailable

__all__ = ["WritingProcess", "main", "write_as_lane"]

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
                [sys.executable, "-m", "quark_core.testing.writing_process", str(plan)],
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
    deadline = time.monotonic() + _PATIENCE_S
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
