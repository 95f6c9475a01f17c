"""A training that logs to a service through a proxy, and the count of what arrived."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from durability.outage import TrainingLoop, make_compute
from durability.points import Points, count_extra, environment

import quark
from quark_core.records.query import Query
from serving.servers import Service
from serving.tally import Tally
from serving.work import open_backend

_CAUGHT_UP_S = 90.0
_PAGE_BATCHES = 200


def open_proxy(service: Service) -> Any:
    """The tests' chaos proxy in front of a service; a context manager."""
    tests = Path(__file__).resolve().parents[2] / "tests"
    sys.path += [str(tests / "quark_backends" / "service_client"), str(tests / "quark_core")]
    from chaos_proxy import ChaosProxy

    return ChaosProxy(upstream=("127.0.0.1", service.port))


class Training:
    """A loop of small steps whose points are counted at the end.

    Attributes:
        loop: The loop itself.
    """

    def __init__(self, folder: Path, service: Service) -> None:
        self._service = service
        self._folder = folder
        self.session = quark.start_run(project="bench", storage_dir=folder)
        self.loop = TrainingLoop(self.session, quark.MetricsLogger(self.session), make_compute())

    def run(self, seconds: float, phase: str = "before") -> None:
        """Train for a while."""
        self.loop.train(phase, seconds)

    def catch_up(self, phase: str = "catching up") -> float:
        """Train on until the service is no longer behind; returns how long that took."""
        began = time.monotonic()
        while time.monotonic() - began < _CAUGHT_UP_S:
            # A lane that waits for its next try is told that it may try now.
            for lane in self.session.open_run.stream._lanes:
                lane.nudge()
            if self.loop.train(phase, 1.0, self.loop.is_caught_up) < 1.0:
                break
        return time.monotonic() - began

    def finish(self, row: int, fault: str, times: int, note: str = "") -> Tally:
        """End the run and count, over a connection of its own to the service itself."""
        with environment(QUARK_EXIT_TIMEOUT_SECONDS="60"):
            self.session.end_run()
        run_id = str(self.session.run_id)
        expected = {
            (f"train/metric{index}", step) for index in range(5) for step in range(self.loop.steps)
        }
        with environment(**self._service.environment):
            backend = open_backend(self._folder / "elsewhere", run_id)
            points = _read_points(backend, run_id)
            numbers = _read_numbers(backend, run_id)
            backend.close()
        exceptions = f"{self.loop.exceptions} exceptions" if self.loop.exceptions else ""
        missing = len(expected - points.keys())
        report = self.session.report_delivery()
        # What the service refuses for good is kept on this machine, which is no loss.
        aside = sum(sum(lane.quarantined.values()) for lane in report.lanes)
        kept = f"{missing:,} points in quarantine" if 0 < missing <= aside else ""
        return Tally(
            row=row,
            fault=fault,
            times=times,
            batches=max(numbers) + 1,
            acknowledged=len(numbers),
            points=len(expected),
            lost=0 if kept else missing,
            doubled=count_extra(points),
            note="; ".join(part for part in (note, kept, exceptions) if part),
        )


@contextlib.contextmanager
def train(service: Service, url: str | None = None) -> Iterator[Training]:
    """A training that logs to a service, which it reaches at a URL of its own."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = {**service.environment, "QUARK_PERSISTENCE_URL": url or service.url}
        stack.enter_context(environment(**settings, QUARK_PERSISTENCE_TIMEOUT_SECONDS="5"))
        os.environ.pop("QUARK_BACKENDS", None)
        yield Training(folder, service)


def _read_points(backend: Any, run_id: str) -> Points:
    columns = backend.read(run_id, "metric", Query())
    return Counter(zip(columns["metric_key"].tolist(), columns["step"].tolist(), strict=True))


def _read_numbers(backend: Any, run_id: str) -> set[int]:
    """Numbers of the batches that the service has from the run's writer."""
    (writer_id,) = set(backend.read(run_id, "lifecycle", Query())["writer_id"].tolist())
    numbers: set[int] = set()
    while True:
        found = backend.read_batches(run_id, writer_id, max(numbers, default=-1) + 1, _PAGE_BATCHES)
        if not found:
            return numbers
        numbers.update(batch.number for batch in found)
