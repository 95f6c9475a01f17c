"""A sweep of real trainings, undisturbed, and again under everything that ends a worker."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serving.servers import Service

import quark
from quark_core.records.sweeps import StoredTrial
from quark_core.testing.trial_workers import when_reached
from sweeping.digits import EPOCHS, save_digits
from sweeping.worker import PROJECT

_ROOT = Path(__file__).resolve().parents[2]
_LEASE_S = 4.0
_STOP_S = 1.5 * _LEASE_S
_PAUSE_S = 1.0
_AWAY_S = 0.5
_LIMIT_S = 3_000.0
_UNSETTLED = {"waiting", "running", "suspended"}


def run_campaigns(
    searches: dict[str, int], stores: list[str], *, workers: int, every_s: float
) -> list[dict[str, Any]]:
    """Each search on each store: once undisturbed, once disturbed.

    Args:
        searches: Search -> how many trials.
        stores: Of `embedded` and `service`.
        workers: How many work at a time.
        every_s: How long it is from one disturbance to the next.
    """
    rows = []
    for store in stores:
        for search, trials in searches.items():
            with _open_campaign(store, search, trials, workers) as undisturbed:
                expected = undisturbed.run(None)
                calm_s = undisturbed.took_s
            with _open_campaign(store, search, trials, workers) as disturbed:
                found = disturbed.run(every_s)
                row = disturbed.describe(expected, found)
            rows.append({**row, "undisturbed took s": round(calm_s, 1)})
    return rows


@contextlib.contextmanager
def _open_campaign(store: str, search: str, trials: int, workers: int) -> Iterator[_Campaign]:
    folder = Path(tempfile.mkdtemp(prefix="quark-bench-sweep-"))
    try:
        with contextlib.ExitStack() as stack:
            service = stack.enter_context(Service("SQLite")) if store == "service" else None
            environment = {} if service is None else service.environment
            os.environ.update(environment)
            stack.callback(lambda: [os.environ.pop(name) for name in environment])
            save_digits(folder / "digits.npz")
            campaign = _Campaign(folder, search, trials, workers, service)
            stack.callback(campaign.close)
            yield campaign
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Campaign:
    def __init__(
        self, folder: Path, search: str, trials: int, workers: int, service: Service | None
    ) -> None:
        self._folder = folder
        self._service = service
        self._count = workers
        self._chance = random.Random(trials)
        self._workers: list[subprocess.Popen[bytes]] = []
        self._stopped: dict[int, float] = {}
        self._struck: Counter[str] = Counter()
        self.took_s = 0.0
        self._search = search
        self._sweep = quark.sweep(
            "campaign",
            project=PROJECT,
            space={
                "lr": quark.uniform(1e-4, 3.0, log=True),
                "width": quark.integers(4, 64),
                "decay": quark.uniform(1e-6, 1e-2, log=True),
                "seed": quark.integers(0, 2**31),
            },
            metric="val/loss",
            mode="min",
            search=search,
            trials=trials,
            budget=EPOCHS,
            max_failures=1_000,
            seed=7,
            lease_s=_LEASE_S,
            storage_dir=folder,
        )

    def run(self, every_s: float | None) -> list[StoredTrial]:
        """Work until all trials are final, disturbed where it is said how often."""
        began = time.monotonic()
        while not self._is_over():
            if time.monotonic() - began > _LIMIT_S:
                raise RuntimeError(f"it does not end: {self._sweep.load()}")
            self._fill_up()
            until = time.monotonic() + (every_s or 0.5)
            while time.monotonic() < until:
                self._let_go()
                time.sleep(0.05)
            if every_s is not None:
                self._strike()
        self.took_s = time.monotonic() - began
        while self._stopped:
            self._let_go()
            time.sleep(0.05)
        # Those that were stopped come with late results, and change nothing.
        for worker in self._workers:
            worker.wait(120)
        return when_reached(self._sweep.trials)

    def describe(self, expected: list[StoredTrial], found: list[StoredTrial]) -> dict[str, Any]:
        """What came of it, beside what was expected."""
        runs = quark.search_runs(project=PROJECT, storage_dir=self._folder)
        store: Any = self._sweep.store
        superseded = [run for run in runs if store.load_run(run.run_id).superseded]
        best, wanted = _find_best(found), _find_best(expected)
        same = [
            one.values == other.values and dict(one.parameters) == dict(other.parameters)
            for one, other in zip(found, expected, strict=False)
        ]
        return {
            "store": "embedded store" if self._service is None else "service on SQLite",
            "search": self._search,
            "trials": len(found),
            **{what: self._struck[what] for what in _STRIKES},
            "runs": len(runs),
            "claims": sum(trial.token for trial in found),
            "failures told": sum(trial.failures for trial in found),
            "losses": sum(trial.losses for trial in found),
            "superseded runs": len(superseded),
            "completed": sum(trial.state == "completed" for trial in found),
            "with the undisturbed value, to the bit": sum(same),
            "best trial": best.number,
            "best value": best.values[0] if best.values else None,
            "undisturbed best trial": wanted.number,
            "lost": len(expected) - sum(same),
            "twice": len(found) - len(expected) if len(found) > len(expected) else 0,
            "same best": int((best.number, best.values) == (wanted.number, wanted.values)),
            "took s": round(self.took_s, 1),
        }

    def close(self) -> None:
        """End what is left."""
        for worker in self._workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
        self._sweep.close()

    def _is_over(self) -> bool:
        if not self._workers:
            return False
        return when_reached(lambda: self._sweep.is_over)

    def _fill_up(self) -> None:
        """As many workers as there shall be; those that have ended are replaced."""
        running = [worker for worker in self._workers if worker.poll() is None]
        for _ in range(self._count - len(running)):
            log = self._folder / "workers.log"
            with log.open("ab") as errors:
                self._workers.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "sweeping.worker", str(self._folder), "campaign"],
                        env={**os.environ, **_make_environment()},
                        stdout=errors,
                        stderr=errors,
                    )
                )

    def _strike(self) -> None:
        what = self._chance.choice([one for one in _STRIKES if self._service or one != "servers"])
        running = [
            worker
            for worker in self._workers
            if worker.poll() is None and worker.pid not in self._stopped
        ]
        if not running:
            return
        hit = self._chance.choice(running)
        if what in _SIGNALS:
            hit.send_signal(_SIGNALS[what])
        if what == "SIGSTOP":
            self._stopped[hit.pid] = time.monotonic() + _STOP_S
        elif what == "all at once":
            for worker in running:
                worker.kill()
            time.sleep(_AWAY_S)
        elif what == "pauses":
            self._sweep.pause()
            time.sleep(_PAUSE_S)
            self._sweep.resume()
        elif what == "raised":
            (self._folder / "raise").touch()
        elif what == "servers" and self._service is not None:
            self._service.kill()
            time.sleep(_AWAY_S)
            self._service.start()
        self._struck[what] += 1

    def _let_go(self) -> None:
        for pid, until in list(self._stopped.items()):
            if time.monotonic() >= until:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                del self._stopped[pid]


_SIGNALS = {
    "SIGKILL": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGINT": signal.SIGINT,
    "SIGSTOP": signal.SIGSTOP,
}
_STRIKES = (*_SIGNALS, "all at once", "pauses", "raised", "servers")


def _find_best(trials: list[StoredTrial]) -> StoredTrial:
    """The completed trial of the lowest loss, of those of the last rung."""
    completed = [trial for trial in trials if trial.state == "completed" and trial.values]
    last = max(trial.origin.get("rung", 0) for trial in completed)
    return min(
        (trial for trial in completed if trial.origin.get("rung", 0) == last),
        key=lambda trial: (trial.values, trial.number),
    )


def _make_environment() -> dict[str, str]:
    path = [str(_ROOT), str(_ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        # The order in which sums are made must not depend on how busy the machine is.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "QUARK_QUIET": "1",
        "QUARK_SOURCES": "off",
    }
