"""Trials under kills, stops, lost replies and a server that dies: each is finished once."""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from claiming.stores import ClaimedStore, open_store
from quark_core.backends.coordination import NewTrial
from quark_core.testing.trial_workers import TrialWorkers, WorkerTask, value_of, when_reached

_WORKERS = 8
_LEASE_S = 3.0
_STOP_S = 1.5 * _LEASE_S
_LOSE_S = 0.5
_AWAY_S = 0.3


def run_campaigns(stores: list[str], *, quick: bool) -> list[dict[str, Any]]:
    """One campaign for each store."""
    rows = []
    for name in stores:
        with open_store(name, proxied=True) as store:
            rows.append(_Campaign(store, 160 if quick else 2_000).run(every_s=0.4))
    return rows


class _Campaign:
    def __init__(self, store: ClaimedStore, trials: int) -> None:
        self._store = store
        self._trials = trials
        self._chance = random.Random(trials)
        self._struck: Counter[str] = Counter()
        self._killed: set[str] = set()
        self._stopped: dict[str, float] = {}
        self._names = iter(f"w{index}" for index in range(1_000_000))

    def run(self, *, every_s: float) -> dict[str, Any]:
        """Break one thing after the other until all trials are final; what came of it."""
        backend = self._store.open()
        sweep = backend.open_sweep("bench", "campaign", {}, max_failures=3)
        new = [NewTrial(parameters={"n": n}) for n in range(self._trials)]
        backend.add_trials(sweep.id, new, key="all")
        began = time.monotonic()
        with (
            tempfile.TemporaryDirectory(prefix="quark-bench-workers-") as folder,
            TrialWorkers(Path(folder), self._store.definition, self._store.config) as workers,
        ):
            while not self._is_over(backend, sweep.id):
                for _ in range(_WORKERS - len(self._list_running(workers))):
                    self._start(workers, sweep.id)
                self._strike(workers)
                until = time.monotonic() + every_s
                while time.monotonic() < until:
                    self._let_go(workers)
                    time.sleep(0.05)
            took_s = time.monotonic() - began
            while self._stopped:
                self._let_go(workers)
                time.sleep(0.05)
            # Those that were stopped come with their late results, and find nothing to do.
            workers.wait(*self._killed, killed=True)
            workers.wait(*(name for name in workers.pids if name not in self._killed), killed=True)
            row = self._count(backend, sweep.id, workers)
        backend.close()
        return {**row, "took s": round(took_s, 1)}

    def _start(self, workers: TrialWorkers, sweep_id: str) -> None:
        name = next(self._names)
        workers.start(
            WorkerTask(
                name=name,
                what="trials",
                sweep_id=sweep_id,
                lease_s=_LEASE_S,
                work_s=0.05,
                clock_shift_s=self._chance.choice((0.0, 3600.0, -3600.0)),
                # Where no proxy can lose a reply, a call that comes twice is the same to the store.
                repeats=self._store.proxy is None and len(workers.pids) % 4 == 0,
            )
        )

    def _is_over(self, backend: Any, sweep_id: str) -> bool:
        counts = when_reached(lambda: backend.load_sweep(sweep_id)).counts
        return not {"waiting", "running", "suspended"} & counts.keys()

    def _strike(self, workers: TrialWorkers) -> None:
        strikes: list[Callable[[], object]] = [
            lambda: self._kill(workers),
            lambda: self._kill(workers),
            lambda: self._stop(workers),
        ]
        if self._store.has_server:
            strikes += [self._lose_replies, self._kill_server]
        self._chance.choice(strikes)()

    def _list_running(self, workers: TrialWorkers) -> list[str]:
        """Workers that have not ended and were not killed; those that are stopped count."""
        return [
            name for name in workers.pids if name not in self._killed and not workers.is_over(name)
        ]

    def _choose(self, workers: TrialWorkers) -> str | None:
        running = [name for name in self._list_running(workers) if name not in self._stopped]
        return self._chance.choice(running) if running else None

    def _kill(self, workers: TrialWorkers) -> None:
        name = self._choose(workers)
        if name is not None:
            workers.send(name, signal.SIGKILL)
            self._killed.add(name)
            self._struck["kills"] += 1

    def _stop(self, workers: TrialWorkers) -> None:
        name = self._choose(workers)
        if name is not None and len(self._stopped) < _WORKERS // 2:
            workers.send(name, signal.SIGSTOP)
            self._stopped[name] = time.monotonic() + _STOP_S
            self._struck["stops"] += 1

    def _let_go(self, workers: TrialWorkers) -> None:
        for name, until in list(self._stopped.items()):
            if time.monotonic() >= until:
                workers.send(name, signal.SIGCONT)
                del self._stopped[name]

    def _lose_replies(self) -> None:
        proxy = self._store.proxy
        before = proxy.counts["lose_reply"]
        proxy.set_mode("lose_reply")
        time.sleep(_LOSE_S)
        proxy.set_mode("pass")
        self._struck["lost replies"] += proxy.counts["lose_reply"] - before

    def _kill_server(self) -> None:
        self._store.kill_server(_AWAY_S)
        self._struck["deaths of the server"] += 1

    def _count(self, backend: Any, sweep_id: str, workers: TrialWorkers) -> dict[str, Any]:
        found = when_reached(lambda: backend.list_trials(sweep_id))
        notes = [note for told in workers.read().values() for note in told]
        claims = Counter((n.number, n.token) for n in notes if n.what == "claimed")
        settled = {(n.number, n.token) for n in notes if n.what == "settled"}
        counted = {(n.number, n.token) for n in notes if n.what == "counted"}
        again = sum(n.what == "again" for n in notes)
        once = [
            trial
            for trial in found
            if trial.state == "completed" and trial.values == (value_of(trial.number, trial.token),)
        ]
        ended_badly = sum(
            workers.find_status(n) != 0 for n in workers.pids if n not in self._killed
        )
        return {
            "store": self._store.title,
            "trials": self._trials,
            **{
                what: self._struck[what]
                for what in ("kills", "stops", "lost replies", "deaths of the server")
            },
            "calls made twice": again,
            "claims": len(claims),
            "given back and claimed again": sum(trial.token - 1 for trial in found),
            "late results refused": len(settled - counted),
            "finished once": len(once),
            "twice": len(counted) - len({number for number, _ in counted}),
            "claims given to two": sum(count - 1 for count in claims.values()),
            "lost": self._trials - len(once),
            "workers that gave up": ended_badly,
            "longest wait for a claim s": round(max(n.took_s for n in notes), 2),
        }
