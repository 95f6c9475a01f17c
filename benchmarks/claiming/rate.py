"""How many claims a second a store gives, and how long the worst one waits.

Beside it what the disk gives at that moment: the same by bare SQLite, two synced transactions of
one statement for each trial. Time of the processor, of workers and of servers, moves less than the
clock on a machine that others use, too.
"""

from __future__ import annotations

import multiprocessing
import time
import uuid
from typing import Any

from claiming.bare_file import measure_bare_file
from claiming.stores import ClaimedStore, open_store
from quark_core.backends.coordination import NewTrial
from quark_core.records.sweeps import TrialResult
from quark_core.system.process import current_process
from quark_core.testing.trial_workers import when_reached

_LEASE_S = 600.0


def measure_rates(stores: list[str], *, quick: bool) -> list[dict[str, Any]]:
    """Claim and settle trials as fast as it goes, by one process and by eight."""
    trials = 200 if quick else 2_000
    rows = [measure_bare_file(processes, trials) for processes in (1, 8)]
    for name in stores:
        with open_store(name) as store:
            rows += [_measure(store, processes, trials) for processes in (1, 8)]
    return rows


def _measure(store: ClaimedStore, processes: int, trials: int) -> dict[str, Any]:
    backend = store.open()
    sweep = backend.open_sweep("bench", f"rate-{processes}", {}, max_failures=3)
    backend.add_trials(sweep.id, [NewTrial(parameters={"n": n}) for n in range(trials)], key="all")
    context = multiprocessing.get_context("fork")
    ready, go, results = context.Barrier(processes + 1), context.Event(), context.SimpleQueue()
    workers = [
        context.Process(target=_work, args=(store, sweep.id, ready, go, results))
        for _ in range(processes)
    ]
    backend.close()
    for worker in workers:
        worker.start()
    ready.wait()
    before_s = store.measure_processor_s()
    began = time.perf_counter()
    go.set()
    told = [results.get() for _ in workers]
    took_s = max(ended for ended, *_ in told) - began
    servers_s = {
        name: after_s - before_s[name] for name, after_s in store.measure_processor_s().items()
    }
    for worker in workers:
        worker.join()
    claims_ms = sorted(ms for _, _, claims, _ in told for ms in claims)
    settles_ms = sorted(ms for *_, settles in told for ms in settles)
    used_s = {"workers": sum(used_s for _, used_s, *_ in told), **servers_s}
    backend = store.open()
    found = backend.list_trials(sweep.id)
    backend.close()
    return {
        "store": store.title,
        "processes": processes,
        "trials": trials,
        "claim and settle /s": round(trials / took_s),
        "claim p50 ms": _take(claims_ms, 0.5),
        "claim p99 ms": _take(claims_ms, 0.99),
        "claim worst ms": _take(claims_ms, 1.0),
        "settle p50 ms": _take(settles_ms, 0.5),
        "settle worst ms": _take(settles_ms, 1.0),
        **{
            f"processor ms a pair, {name}": round(1e3 * used / trials, 2)
            for name, used in used_s.items()
        },
        "finished once": sum(t.state == "completed" and t.token == 1 for t in found),
        "twice": len(claims_ms) - trials,
    }


def _work(store: ClaimedStore, sweep_id: str, ready: Any, go: Any, results: Any) -> None:
    backend = store.open()
    worker = current_process()
    claims_ms: list[float] = []
    settles_ms: list[float] = []
    backend.load_sweep(sweep_id)
    ready.wait()
    go.wait()
    used_s = time.process_time()
    while True:
        began = time.perf_counter()
        request_id = uuid.uuid4().hex
        trial = when_reached(
            lambda request_id=request_id: backend.claim_trial(
                sweep_id, request_id=request_id, worker=worker, lease_s=_LEASE_S
            )
        )
        if trial is None:
            break
        claimed = time.perf_counter()
        result = TrialResult(state="completed", values=(float(trial.number),))
        told = (sweep_id, trial.number, trial.token, result)
        when_reached(lambda told=told: backend.settle_trial(*told, lease_s=_LEASE_S))
        claims_ms.append(1e3 * (claimed - began))
        settles_ms.append(1e3 * (time.perf_counter() - claimed))
    ended = time.perf_counter()
    used_s = time.process_time() - used_s
    backend.close()
    results.put((ended, used_s, claims_ms, settles_ms))


def _take(ordered: list[float], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)
