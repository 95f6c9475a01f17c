"""Sweeps as their page is shown, put into a store by what workers call."""

import math
import random
from contextlib import contextmanager

from quark.sweeps.sweep_store import StoreLink
from quark_core.backends.coordination import NewTrial
from quark_core.records.sweeps import TrialResult
from quark_core.system.process import ProcessIdentity

SPACE = {
    "lr": {"type": "uniform", "low": 1e-5, "high": 0.1, "log": True},
    "layers": {"type": "integers", "low": 1, "high": 4},
    "optimizer": {"type": "choices", "values": ["adam", "sgd"]},
}


@contextmanager
def open_store(storage_dir):
    """The store, as a worker has it."""
    link = StoreLink(storage_dir)
    try:
        yield link.store
    finally:
        link.close()


def make_worker(number, host="node-1"):
    return ProcessIdentity(f"{host}|boot|pid:[1]", 1000 + number, "1")


def settle_all(store, sweep_id, results):
    """Have a worker claim trial after trial, and tell these results of them."""
    for number, result in enumerate(results):
        claimed = store.claim_trial(
            sweep_id, request_id=f"r{number}", worker=make_worker(0), lease_s=60.0
        )
        store.settle_trial(sweep_id, number, claimed.token, result, lease_s=60.0)


def draw_trials(count, seed=1):
    generator = random.Random(seed)
    return [
        NewTrial(
            parameters={
                "lr": 10 ** generator.uniform(-5, -1),
                "layers": generator.randint(1, 4),
                "optimizer": generator.choice(["adam", "sgd"]),
            }
        )
        for _ in range(count)
    ]


def score(parameters, generator):
    bowl = (math.log10(parameters["lr"]) + 3.0) ** 2
    return 0.95 - 0.03 * bowl + 0.002 * generator.gauss(0.0, 1.0)


def fill_sweep(storage_dir, name="lr-search", *, trials=40, live=3, project="p", **definition):
    """A sweep of which most trials have ended, some run and the last two wait; returns its id."""
    generator = random.Random(name)
    said = {"space": SPACE, "metric": "val/acc", "mode": "max", "search": "random",
            "trials": trials + 10, "max_failures": 3, "lease_s": 60.0, **definition}  # fmt: skip
    with open_store(storage_dir) as store:
        sweep = store.open_sweep(project, name, said, max_failures=3)
        store.add_trials(sweep.id, draw_trials(trials), key="first")
        for number in range(trials - 2):
            worker = make_worker(number % 4)
            trial = store.claim_trial(
                sweep.id, request_id=f"{name} {number}", worker=worker, lease_s=60.0
            )
            if number >= trials - 2 - live:
                continue
            result = TrialResult(
                state="completed", values=(score(trial.parameters, generator),), step=100
            )
            if number % 10 == 3:
                result = TrialResult(state="failed", reason="the training diverges")
            elif number % 10 == 7:
                result = TrialResult(state="pruned", values=(0.5,), step=33)
            store.settle_trial(sweep.id, number, trial.token, result, lease_s=60.0)
    return sweep.id
