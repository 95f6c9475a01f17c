"""What `stop_broken=True` saves in a sweep with bad corners, and what it stops wrongly.

    python benchmarks/sweep_diagnosis.py [--trials 200] [--seeds 0,1,2] [--live] [--json FILE]

Each trial is a real small training on handwritten digits (`benchmarks/sweep_trainings.py`). All
of them are trained to the end, so that it is known what each would have become. Then they are
held before the judge one after the other, as one worker would run them, with a look each 20
steps: what it stops, how many steps that saves, and whether what it stopped would have learned.
With --live the same sweep runs twice by `quark.sweep`, without and with `stop_broken`, each step
20 ms longer so that a trial takes some 15 s, and the clock says what was saved.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sweep_trainings import CHANCE, STEPS, Course, draw_parameters, record, train
from quark.analysis.analysis_context import Case
from quark.analysis.config import AnalyzerEngineConfig
from quark.analysis.curves import Curve
from quark.analysis.early_stopping import (
    Peer,
    StopDecision,
    decide_stop,
    make_peer,
)
from quark.analysis.run_data import RunData
from quark_core.records.columns import Columns

_EVERY = 20  # steps from look to look
_LOOKS = 2  # in a row that find the same, as the watch has it
_LEARNED = 2.0 * CHANCE  # an accuracy that no guesses have
_LIVE_STEP_S = 0.02
_CONFIG = AnalyzerEngineConfig(objective="val/acc", objective_mode="max")


@dataclass
class Tally:
    """What a judge did to the trials of one sweep.

    Attributes:
        stopped: (trial, step, why) of what was stopped.
        learning: Those of them that would have learned anything, with the accuracy that they
            would have reached.
        good: Those of them that would have been in the better half of all that learn.
        spent, whole: Steps that were trained, and that there are without a stop.
        bad: Trials that learn nothing to the end.
    """

    stopped: list[tuple[int, int, StopDecision]] = field(default_factory=list)
    learning: list[tuple[int, int, float]] = field(default_factory=list)
    good: list[tuple[int, int, float]] = field(default_factory=list)
    spent: int = 0
    whole: int = 0
    bad: int = 0


def replay(courses: Sequence[Course]) -> Tally:
    """Hold a sweep's trials before the judge, one after the other."""
    tally = Tally()
    median = statistics.median(each.last for each in courses if each.last >= _LEARNED)
    peers: list[Peer] = []
    for number, course in enumerate(courses):
        is_bad = course.last < _LEARNED
        tally.bad += is_bad
        tally.whole += STEPS
        found = _watch(course, peers)
        if found is None:
            tally.spent += STEPS
            peer = make_peer(_make_case(course, STEPS))
            peers += [] if peer is None else [peer]
            continue
        step, why = found
        tally.spent += step
        tally.stopped.append((number, step, why))
        if not is_bad:
            tally.learning.append((number, step, course.last))
            if course.last >= median:
                tally.good.append((number, step, course.last))
    return tally


def _watch(course: Course, peers: Sequence[Peer]) -> tuple[int, StopDecision] | None:
    looks = 0
    for step in range(_EVERY, STEPS, _EVERY):
        why = decide_stop(_make_case(course, step), lambda: peers)
        looks = 0 if why is None else looks + 1
        if why is not None and looks >= _LOOKS:
            return step, why
    return None


def _make_case(course: Course, until: int) -> Case:
    curves = {
        key: _make_curve(key, points, until)
        for key, points in (("train/loss", course.loss), ("val/acc", course.accuracy))
    }
    data = RunData(
        lambda kind, _: Columns.empty(kind), "run", ended=False, find_curves=lambda: _Known(curves)
    )
    return Case(data, _CONFIG)


def _make_curve(key: str, points: Sequence[tuple[int, float]], until: int) -> Curve:
    taken = [point for point in points if point[0] < until]
    steps = np.array([step for step, _ in taken], dtype=np.int64)
    values = np.array([value for _, value in taken], dtype=np.float64)
    return Curve(key, steps, values, np.full(len(steps), -1))


class _Known:
    """Curves that are there already."""

    newest_us = 0

    def __init__(self, curves: Mapping[str, Curve]) -> None:
        self._curves = curves

    def load(self) -> Mapping[str, Curve]:
        return {key: curve for key, curve in self._curves.items() if len(curve)}


def describe(tally: Tally, trials: int) -> dict[str, Any]:
    """The figures of one sweep."""
    return {
        "trials": trials,
        "learn nothing": tally.bad,
        "stopped": len(tally.stopped),
        "of these by": dict(Counter(why.breakage for _, _, why in tally.stopped)),
        "good ones stopped": len(tally.good),
        "of all that learn anything": len(tally.learning),
        "steps saved": round(1.0 - tally.spent / tally.whole, 3),
        "of the steps of what learns nothing": round(
            (tally.whole - tally.spent) / max(1, tally.bad * STEPS), 3
        ),
    }


def run_live(seed: int, trials: int, *, stop_broken: bool) -> dict[str, Any]:
    """Run a sweep by `quark.sweep`; how long it took, and what became of its trials."""
    import quark

    with tempfile.TemporaryDirectory(prefix="quark-sweep-") as root:
        begun = time.perf_counter()
        sweep = quark.sweep(
            "bad-corners",
            project="bench",
            space={
                "lr": quark.uniform(10**-4.5, 10**1.5, log=True),
                "frozen": [0] * 24 + [1],
                "optimizer": ["sgd", "momentum", "adam"],
                "layers": [1, 1, 2, 3, 5, 8],
                "width": [16, 32, 64],
                "activation": ["relu", "tanh", "sigmoid"],
                "init": ["good", "good", "good", "zero", "small", "huge"],
                "warmup": [0, 0, 0, 100, 300],
                "seed": quark.integers(0, 10**6),
            },
            metric="val/acc",
            mode="max",
            search="random",
            trials=trials,
            stop_broken=stop_broken,
            seed=seed,
            storage_dir=root,
        )
        for trial in sweep:
            _train_live(trial)
        taken_s = time.perf_counter() - begun
        known = sweep.trials()
        sweep.close()
    best = max((each.values[0] for each in known if each.values), default=None)
    return {
        "stop_broken": stop_broken,
        "seconds": round(taken_s, 1),
        "best": best,
        "states": dict(Counter(each.state for each in known)),
    }


def _train_live(trial: Any) -> None:
    import quark

    parameters = {**trial}
    parameters["lr"] *= 1 - parameters.pop("frozen")
    with trial.start_run(system_metrics=False, capture=None) as session:
        metrics = quark.MetricsLogger(session)

        def log(metric: str, value: float, step: int) -> None:
            metrics.log(metric, value, step=step)
            if metric == "train/loss":
                # As long as a step of a small network takes on a real data set.
                time.sleep(_LIVE_STEP_S)

        train(parameters, log)


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    told = []
    for seed in map(int, arguments.seeds.split(",")):
        rows = [draw_parameters(seed, number) for number in range(arguments.trials)]
        if arguments.live:
            found: Any = [run_live(seed, arguments.trials, stop_broken=on) for on in (False, True)]
        else:
            courses = [record(row) for row in rows]
            tally = replay(courses)
            found = describe(tally, arguments.trials)
            found["learn well"] = sum(course.last > 5 * CHANCE for course in courses)
            for number, step, accuracy in tally.learning:
                said = f"trial {number} at step {step}: {accuracy:.3f} {rows[number]}"
                print(f"  would have learned: {said}")
        print(json.dumps({"seed": seed, "found": found}, indent=1))
        told.append({"seed": seed, "found": found})
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
