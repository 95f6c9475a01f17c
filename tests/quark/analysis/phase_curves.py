"""Made-up trainings: what they are is known, so what is found can be judged."""

import numpy as np

from quark.analysis.config import PhaseAnalyzerConfig
from quark.analysis.curves import Curve
from quark.analysis.phases import analyze_phases
from quark.analysis.run_data import RunData
from quark_core.records import MetricRecord
from quark_core.records.columns import Columns

TRAIN, VALIDATION = "train/loss", "val/loss"


def record(key, value, step=None, epoch=None, number=0):
    namespace, _, name = key.rpartition("/")
    return MetricRecord(
        "r", "w", 0, 0, number, 0, key, namespace or None, name, float(value), step, epoch
    )


def read_run(curves, *, over="step", ended=True):
    """Run data out of metric key -> values, or (steps, values)."""
    records = []
    for key, given in curves.items():
        steps, values = given if isinstance(given, tuple) else (range(len(given)), given)
        for step, value in zip(steps, values, strict=True):
            records.append(record(key, value, number=len(records), **{over: int(step)}))
    columns = Columns.from_records("metric", records)
    return RunData(
        lambda kind, query: columns if kind == "metric" else Columns.empty(kind), "r", ended=ended
    )


def make_run(curves):
    """The same for many points: the curves are put in their place without records."""
    data = RunData(lambda kind, query: Columns.empty(kind), "r")
    made = {}
    for key, given in curves.items():
        steps, values = given if isinstance(given, tuple) else (np.arange(len(given)), given)
        steps = np.asarray(steps, dtype=np.int64)
        none = np.full(len(steps), -1)
        made[key] = Curve(key, steps, np.asarray(values, dtype=np.float64), none)
    data.__dict__["metrics"] = made
    return data


def find(curves, **thresholds):
    config = PhaseAnalyzerConfig()
    if thresholds:
        config = PhaseAnalyzerConfig(thresholds=type(config.thresholds)(**thresholds))
    return analyze_phases(make_run(curves), config).phases


def names(phases):
    return [phase.phase_name for phase in phases]


def name_steps(phases, count):
    out = np.full(count, "", dtype=object)
    for phase in phases:
        out[phase.step_start : phase.step_end + 1] = phase.phase_name
    return out


def make_families(count, seed, full=None):
    """The first `count` points of trainings of `full` points, by name."""
    full = full or count
    rng = np.random.default_rng(seed)
    steps = np.arange(count)
    part = steps / full

    def noise(size):
        return size * rng.normal(size=full)[:count]

    def fall(start, end, time):
        return end + (start - end) * np.exp(-part / time)

    def rate(*levels):
        return np.choose((part * len(levels)).astype(int), levels)

    cycle = (part * 4) % 1
    out = {
        "exponential": fall(2.3, 0.3, 0.1) * np.exp(noise(0.1)),
        "power": (1.5 + 9 * (1 + 100 * part) ** -0.6) * np.exp(noise(0.03)),
        "step_decay": rate(1.0, 0.5, 0.3) * fall(3.0, 1.0, 0.04) * np.exp(noise(0.05)),
        "warm_restarts": fall(2.0, 0.4, 0.15)
        * (1 + 0.5 * np.exp(-cycle / 0.15) * (part > 0.2))
        * np.exp(noise(0.05)),
        "noisy": fall(2.3, 0.5, 0.15) * np.exp(noise(0.3)),
        "reinforcement": noise(1.0) + 0.2 * np.sin(part * 9),
        "flat": 2.3 + noise(0.02),
        "thousands": fall(8500, 500, 0.1) * np.exp(noise(0.15)),
        "negative_elbo": fall(20, -80, 0.1) + noise(3.0),
        "tiny": 1e-5 * fall(2.3, 0.3, 0.1) * np.exp(noise(0.1)),
        "late_learner": (2.3 - 2.0 / (1 + np.exp((0.6 - part) / 0.03))) * np.exp(noise(0.03)),
        "bad_batch": fall(2.3, 0.3, 0.1)
        * np.exp(noise(0.1))
        * np.where((steps >= full // 2) & (steps < full // 2 + 2), 30.0, 1.0),
        "rate_gone": np.where(part < 0.5, 2.3 * np.exp(-3 * part), 2.3 * np.exp(-1.5))
        * np.exp(noise(0.08)),
        "rises": fall(2.3, 0.3, 0.1) * np.exp(noise(0.1) + np.clip(15 * (part - 0.8), 0, None)),
        "jumps": np.where(part < 0.5, fall(2.3, 0.3, 0.1), 2.2) * np.exp(noise(0.1)),
    }
    curves = {name: {TRAIN: values} for name, values in out.items()}
    probes = steps[:: max(1, full // 40)]
    when = probes / full
    train = fall(2.0, 0.02, 0.12) * np.exp(noise(0.2))
    valley = 0.6 + 1.7 * np.exp(-when / 0.1)
    for name, rise, size in (("overfits", 0.9, 0.03), ("gap", 0.0, 0.03), ("loud_gap", 0.0, 0.12)):
        wave = np.exp(size * rng.normal(size=full)[: len(probes)])
        values = (valley + rise * np.clip(when - 0.3, 0, None)) * wave
        curves[name] = {TRAIN: train, VALIDATION: (probes, values)}
    return curves
