"""What a report and a decision cost a trial that Optuna may stop: our log against its RDB storage.

    python benchmarks/sweep_storage.py [--workers N] [--trials N] [--step-ms MS] [--service]
        [--skip-rdb] [--json FILE]

Workers are processes that share one study. Each runs trials of up to 27 steps, reports at each of
them and asks whether to stop, by Hyperband and by asynchronous halving (ASHA). The same code of
Optuna's runs on each base; only the storage differs:

- `quark`: its JournalStorage over the ordered entries of an embedded store (SQLite, durable);
- `quark, rungs`: as a sweep does it, with claims: reports go out at rungs alone, and ASHA is ours;
- `quark, service` and `service, rungs`: the same over `quark serve`, with --service;
- `optuna rdb`: its RDBStorage on SQLite, with its defaults.

Figures of a shared machine move; the ratios in one run hold. Afterwards the trials of each base
are looked at: numbers without gaps, each ended once, no report lost. Nothing here fails on a slow
machine: it prints.
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import os
import queue
import random
import statistics
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import optuna
from figures import make_parser, parse, write
from optuna.trial import TrialState
from serving.servers import Service
from serving.work import open_backend

from quark.sweeps.definition import SweepDefinition
from quark.sweeps.optuna_search import EntryJournal
from quark.sweeps.search_algorithms import open_search
from quark_core.backends.contract import BackendConfig
from quark_core.backends.registry import default_registry
from quark_core.records.sweeps import StoredTrial, TrialResult
from quark_core.system.process import current_process

STEPS = 27
STUDY = "bench"
SPACE = {
    "lr": {"type": "uniform", "low": 1e-5, "high": 1e-1, "log": True},
    "layers": {"type": "integers", "low": 1, "high": 4},
    "optimizer": ["adam", "sgd", "lion"],
}


def define(search: str, trials: int) -> SweepDefinition:
    return SweepDefinition.build({
        "search": search, "metric": "score", "mode": "max", "space": SPACE,
        "budget": STEPS, "trials": trials,
    })  # fmt: skip


def make_pruner(name: str) -> optuna.pruners.BasePruner:
    if name == "hyperband":
        return optuna.pruners.HyperbandPruner(
            min_resource=1, max_resource=STEPS, reduction_factor=3
        )
    return optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)


def score(params: dict[str, Any], step: int) -> float:
    best = -((math.log10(params["lr"]) + 3) ** 2) - (params["layers"] - 3) ** 2 / 10
    return best - 3 / (step + 1) - (params["optimizer"] == "sgd") / 5


@contextmanager
def open_store(where: str) -> Iterator[Any]:
    """A store that coordinates: a folder's, or that of the service at a URL."""
    if not where.startswith("http"):
        backend: Any = (
            default_registry()
            .find("embedded")
            .open(BackendConfig(storage_dir=Path(where), run_id="bench"))
        )
    else:
        backend = open_backend(Path(tempfile.gettempdir()), "bench")
    try:
        yield backend
    finally:
        backend.close()


def run_study(storage: optuna.storages.BaseStorage, pruner: str, worker: Worker) -> None:
    """Trials by Optuna alone, over whatever storage."""
    study = optuna.load_study(
        study_name=STUDY,
        storage=storage,
        sampler=optuna.samplers.TPESampler(seed=worker.seed),
        pruner=make_pruner(pruner),
    )

    def objective(trial: optuna.Trial) -> float:
        params = {
            "lr": trial.suggest_float("lr", 1e-5, 1e-1, log=True),
            "layers": trial.suggest_int("layers", 1, 4),
            "optimizer": trial.suggest_categorical("optimizer", ["adam", "sgd", "lion"]),
        }
        for step in range(1, STEPS + 1):
            worker.train()
            began = time.perf_counter()
            trial.report(score(params, step), step)
            stops = trial.should_prune()
            worker.taken.append(time.perf_counter() - began)
            if stops:
                raise optuna.TrialPruned
        return score(params, STEPS)

    study.optimize(objective, n_trials=worker.trials)


class Worker:
    """What one process does and measures."""

    def __init__(self, number: int, workers: int, trials: int, step_s: float) -> None:
        self.seed = number
        self.trials = trials // workers
        self.all_trials = trials
        self.taken: list[float] = []
        self._step_s = step_s
        self._random = random.Random(number)

    def train(self) -> None:
        """A step of training, which nobody measures."""
        if self._step_s:
            time.sleep(self._step_s * self._random.uniform(0.5, 1.5))


def work_on_entries(where: str, pruner: str, worker: Worker) -> None:
    with open_store(where) as store:
        storage = optuna.storages.JournalStorage(EntryJournal(store, f"{STUDY}/optuna"))
        run_study(storage, pruner, worker)


def work_on_rdb(where: str, pruner: str, worker: Worker) -> None:
    storage = optuna.storages.RDBStorage(where)
    run_study(storage, pruner, worker)
    storage.engine.dispose()


def work_on_rungs(where: str, pruner: str, worker: Worker) -> None:
    """As a sweep does it: proposals, claims, and reports at rungs alone."""
    definition = define(pruner, worker.all_trials)
    with open_store(where) as store:
        sweep = store.open_sweep("bench", "bench", definition.to_dict(), max_failures=3)
        search = open_search(definition, sweep.id, store)
        while (trial := claim(store, sweep.id)) or (trial := propose(store, sweep.id, search)):
            rungs = set(search.list_rungs(trial) or ())
            state = "completed"
            for step in range(1, STEPS + 1):
                worker.train()
                began = time.perf_counter()
                told = (score(trial.parameters, step),)
                stops = step in rungs and search.report(trial, told, step)
                worker.taken.append(time.perf_counter() - began)
                if stops:
                    state = "pruned"
                    break
            values = (score(trial.parameters, STEPS),) if state == "completed" else None
            result = TrialResult(state=state, values=values, step=step)
            store.settle_trial(sweep.id, trial.number, trial.token, result, lease_s=60.0)
        search.propose(store.list_trials(sweep.id))  # which tells Optuna of what has ended


def claim(store: Any, sweep_id: str) -> StoredTrial | None:
    return store.claim_trial(
        sweep_id, request_id=uuid.uuid4().hex, worker=current_process(), lease_s=60.0
    )


def propose(store: Any, sweep_id: str, search: Any) -> StoredTrial | None:
    while True:
        proposals = search.propose(store.list_trials(sweep_id))
        if proposals is None:
            return None
        for key, trials in proposals:
            store.add_trials(sweep_id, trials, key=key)
        trial = claim(store, sweep_id)
        if trial is not None:
            return trial
        time.sleep(0.01)


WORK: dict[str, Callable[[str, str, Worker], None]] = {
    "quark": work_on_entries,
    "quark, rungs": work_on_rungs,
    "quark, service": work_on_entries,
    "service, rungs": work_on_rungs,
    "optuna rdb": work_on_rdb,
}


def start_worker(
    base: str, where: str, pruner: str, number: int, arguments: argparse.Namespace,
    start: Any, results: Any,
) -> None:  # fmt: skip
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.disable(logging.WARNING)
    worker = Worker(number, arguments.workers, arguments.trials, arguments.step_ms / 1000)
    start.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        WORK[base](where, pruner, worker)
    results.put(worker.taken)


def prepare(base: str, where: str) -> None:
    """An empty study, so that no worker measures how it is made."""
    directions = [optuna.study.StudyDirection.MAXIMIZE]
    if base == "optuna rdb":
        storage = optuna.storages.RDBStorage(where)
        storage.create_new_study(directions, STUDY)
        storage.engine.dispose()
        return
    with open_store(where) as store:
        journal = EntryJournal(store, f"{STUDY}/optuna")
        optuna.storages.JournalStorage(journal).create_new_study(directions, STUDY)


def look_at(base: str, where: str) -> dict[str, int]:
    """What is there when all is over."""
    if base == "optuna rdb":
        storage: Any = optuna.storages.RDBStorage(where)
        found = describe_study(storage)
        storage.engine.dispose()
        return found
    with open_store(where) as store:
        if base.endswith("rungs"):
            return describe_trials(store)
        return describe_study(
            optuna.storages.JournalStorage(EntryJournal(store, f"{STUDY}/optuna"))
        )


def describe_trials(store: Any) -> dict[str, int]:
    (sweep,) = store.list_sweeps()
    trials = store.list_trials(sweep.id)
    return {
        "trials": len(trials),
        "gaps": sum(trial.number != place for place, trial in enumerate(trials)),
        "ended": sum(trial.is_final and trial.token == 1 for trial in trials),
        "pruned": sum(trial.state == "pruned" for trial in trials),
        "reports": sum(trial.step or 0 for trial in trials),
    }


def describe_study(storage: optuna.storages.BaseStorage) -> dict[str, int]:
    trials = optuna.load_study(study_name=STUDY, storage=storage).get_trials()
    ended = [t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    return {
        "trials": len(trials),
        "gaps": sum(trial.number != place for place, trial in enumerate(trials)),
        "ended": len(ended),
        "pruned": sum(trial.state == TrialState.PRUNED for trial in trials),
        "reports": sum(len(trial.intermediate_values) for trial in trials),
    }


def collect(workers: list[Any], results: Any) -> Iterator[float]:
    """What all workers have measured.

    Raises:
        RuntimeError: One of them has failed.
    """
    waits = len(workers)
    while waits:
        try:
            yield from results.get(timeout=1)
            waits -= 1
        except queue.Empty:
            if any(process.exitcode for process in workers):
                raise RuntimeError("a worker has failed; see above") from None


def measure(
    base: str, where: str, pruner: str, arguments: argparse.Namespace
) -> dict[str, float | int | str]:
    prepare(base, where)
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    workers = [
        context.Process(
            target=start_worker, args=(base, where, pruner, number, arguments, start, results)
        )
        for number in range(arguments.workers)
    ]
    for process in workers:
        process.start()
    time.sleep(3.0)  # until all have imported what they need
    began = time.perf_counter()
    start.set()
    taken = sorted(1000 * taken_s for taken_s in collect(workers, results))
    wall_s = time.perf_counter() - began
    for process in workers:
        process.join()
    return {
        "search": pruner, "base": base, "p50_ms": statistics.median(taken),
        "p99_ms": taken[int(len(taken) * 0.99)], "worst_ms": taken[-1], "wall_s": wall_s,
        "steps": len(taken), **look_at(base, where),
    }  # fmt: skip


def measure_all(arguments: argparse.Namespace, service: Service | None) -> Iterator[dict[str, Any]]:
    bases = ["quark", "quark, rungs"]
    bases += [] if service is None else ["quark, service", "service, rungs"]
    bases += [] if arguments.skip_rdb else ["optuna rdb"]
    for pruner in ("hyperband", "asha"):
        for base in bases:
            with tempfile.TemporaryDirectory() as folder:
                if service is not None and "service" in base:
                    # A workspace for each, so that none finds what another has left.
                    os.environ["QUARK_USER_KEY"] = service.make_key(f"{pruner}_{bases.index(base)}")
                    yield measure(base, service.url, pruner, arguments)
                elif base == "optuna rdb":
                    yield measure(base, f"sqlite:///{folder}/optuna.db", pruner, arguments)
                else:
                    yield measure(base, folder, pruner, arguments)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--trials", type=int, default=120)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--service", action="store_true")
    parser.add_argument("--skip-rdb", action="store_true")
    arguments = parse(parser)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows = []
    print(f"{arguments.workers} workers, {arguments.trials} trials of up to {STEPS} reports")
    with ExitStack() as stack:
        service = stack.enter_context(Service("service")) if arguments.service else None
        if service is not None:
            os.environ.update(service.environment)
        for row in measure_all(arguments, service):
            rows.append(row)
            print(
                f"{row['search']:9}  {row['base']:14}  p50 {row['p50_ms']:8.3f} ms  "
                f"p99 {row['p99_ms']:8.2f} ms  worst {row['worst_ms']:8.1f} ms  "
                f"{row['wall_s']:6.1f} s  {row['trials']} trials ({row['gaps']} gaps, "
                f"{row['ended']} ended, {row['pruned']} pruned), {row['reports']} of "
                f"{row['steps']} steps",
                flush=True,
            )
    write(arguments, rows)


if __name__ == "__main__":
    main()
