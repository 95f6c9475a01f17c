"""Steps that the data, the machine or a leak make slow, and clocks that look odd and are well."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.diagnosis import zoo
from benchmarks.diagnosis.clocks import StepClock, draw_clock
from benchmarks.diagnosis.measuring import doubt
from benchmarks.diagnosis.oracles import judge_healthy, soften
from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw, Scenario, Truth
from benchmarks.diagnosis.training import Problem, train

Times = tuple[float, float, float]


class _TroubledClock(StepClock):
    """A healthy clock to whose parts a fault adds, and which notes what it added.

    Attributes:
        trouble: Given step, data and compute time, returns data and compute time.
    """

    def __init__(
        self, base: StepClock, trouble: Callable[[int, float, float], tuple[float, float]]
    ):
        super().__init__(
            base.rng,
            compute_ms=base.compute_ms,
            data_ms=base.data_ms,
            noise=base.noise,
            tail=base.tail,
            first_ms=base.first_ms,
            probe_ms=base.probe_ms,
        )
        self.trouble = trouble
        self.useful_ms = 0.0
        self.added: list[float] = []

    def take(self, step: int, *, probed: bool = False) -> Times:
        whole, data, compute = StepClock.take(self, step, probed=probed)
        slow_data, slow_compute = self.trouble(step, data, compute)
        extra = slow_data - data + slow_compute - compute
        self.useful_ms += whole
        self.added.append(extra)
        return whole + extra, slow_data, slow_compute


def _choose_problem(draw: Draw) -> Problem:
    made = draw.choice(zoo.make_table, zoo.make_spirals, zoo.make_digits_mlp, zoo.make_friedman)(
        draw
    )
    made.steps = 10 * draw.integer(24, 40)
    made.val_every = 20
    return made


def _shake(draw: Draw, base: StepClock, onset: int, _steps: int) -> _TroubledClock:
    """From the onset on, others on the machine make every step's time a matter of chance."""
    spread = 0.6 + 0.5 * draw.severity

    def trouble(step: int, data: float, compute: float) -> tuple[float, float]:
        if step >= onset:
            compute *= 1.0 + float(np.exp(base.rng.normal(0.0, spread)))
        return data, compute

    return _TroubledClock(base, trouble)


def _judge_slow(
    make: Callable[[Draw, StepClock, int, int], _TroubledClock], recorder: Recorder, draw: Draw
) -> Truth:
    problem = _choose_problem(draw)
    onset = draw.onset_step(problem.steps, 0.2, 0.5)
    clock = make(draw, draw_clock(draw.stream("clock")), onset, problem.steps)
    problem.start = {"timing": clock}
    trace = train(problem, recorder, draw)
    lost = sum(clock.added)
    share = lost / (lost + clock.useful_ms)
    told = f"{share:.0%} of the whole time lost after step {onset}"
    if share < 0.2:
        return doubt(told)
    first = next(i for i, extra in enumerate(clock.added) if extra > clock.compute_ms * 0.5)
    truth = Truth(
        kind="fault",
        expected=("runtime_bottleneck_risk",),
        onset_step=first,
        phases_forbidden=("divergence", "overfitting_onset"),
        reason=told,
    )
    return soften(truth, trace)


def _sleep_in_loader(recorder: Recorder, draw: Draw) -> Truth:
    """Real time: a loader that sleeps, beside a small network."""
    problem = draw.choice(zoo.make_digits_mlp, zoo.make_spirals)(draw)
    problem.steps, problem.start = 160, {"timing": "manual"}
    onset = draw.onset_step(problem.steps, 0.2, 0.4)
    wait_s = 0.004 + 0.008 * draw.severity
    begun = [0.0, 0.0]
    waits: list[float] = []
    works: list[float] = []

    def fetch(step: int) -> None:
        begun[0] = time.perf_counter()
        if step >= onset:
            time.sleep(wait_s)
        begun[1] = time.perf_counter()

    def note(step: int) -> None:
        end = time.perf_counter()
        waits.append(1000.0 * (begun[1] - begun[0]))
        works.append(1000.0 * (end - begun[1]))
        recorder.time(step, step_ms=waits[-1] + works[-1], data_ms=waits[-1], compute_ms=works[-1])

    problem.before, problem.after = fetch, note
    trace = train(problem, recorder, draw)
    share = sum(waits) / (sum(waits) + sum(works))
    told = f"{share:.0%} of the time asleep in the loader, from step {onset} on"
    if share < 0.35:
        return doubt(told)
    truth = Truth(
        kind="fault", expected=("runtime_bottleneck_risk",), onset_step=onset, reason=told
    )
    return soften(truth, trace)


def _odd_clock(kind: str, recorder: Recorder, draw: Draw) -> Truth:
    problem = _choose_problem(draw)
    clock = draw_clock(draw.stream("clock"))
    if kind == "heavy":
        compute = draw.uniform(300.0, 1500.0)
        clock = replace(clock, compute_ms=compute, data_ms=0.05 * compute, probe_ms=0.0)
    elif kind == "compile":
        clock = replace(clock, first_ms=clock.compute_ms * draw.log_uniform(50.0, 500.0))
    elif kind == "periodic":
        period = draw.choice(20, 25, 40, 50)
        longer = clock.compute_ms * draw.uniform(3.0, 20.0)
        clock = replace(clock, period=period, period_ms=longer)
    elif kind == "noisy":
        clock = replace(clock, noise=draw.uniform(0.08, 0.14), tail=draw.uniform(0.01, 0.03))
    else:
        clock = replace(clock, data_ms=draw.uniform(0.15, 0.28) * clock.compute_ms)
    problem.start = {"timing": clock}
    trace = train(problem, recorder, draw)
    told = f"clock {kind}: {clock.compute_ms:.0f} ms, noise {clock.noise:.2f}"
    return judge_healthy(trace, gain=0.15, reason=told)


def _true_clock(recorder: Recorder, draw: Draw) -> Truth:
    """The times that the steps really took here."""
    problem = draw.choice(zoo.make_shapes_cnn, zoo.make_waves, zoo.make_residual)(draw)
    problem.start = {"timing": "real"}
    return judge_healthy(train(problem, recorder, draw), reason="measured times")


def _fault(name: str, train_one: Callable[[Recorder, Draw], Truth]) -> Scenario:
    return Scenario(name=f"first/runtime/{name}", kind="fault", train=train_one)


def _healthy(name: str, train_one: Callable[[Recorder, Draw], Truth]) -> Scenario:
    return Scenario(name=f"first/healthy/clock_{name}", kind="healthy", train=train_one)


SCENARIOS = (
    _fault("shaken", partial(_judge_slow, _shake)),
    _fault("sleeping_loader", _sleep_in_loader),
    *(_healthy(kind, partial(_odd_clock, kind)) for kind in ("heavy", "compile", "periodic")),
    *(_healthy(kind, partial(_odd_clock, kind)) for kind in ("noisy", "some_data")),
    _healthy("measured", _true_clock),
)
