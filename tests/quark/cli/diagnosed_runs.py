"""Runs for the tests of `quark analyze` and `quark compare`."""

import numpy as np

STEPS = 240


def learn(seed=0, *, end=0.2, rate=25.0, steps=STEPS, noise=0.02):
    """A loss that falls from about 1 to `end`, as batches show it."""
    step = np.arange(steps)
    level = end + (1.0 - end) * np.exp(-step / rate)
    return (level + noise * np.random.default_rng(seed).standard_normal(steps)).tolist()


def overfit(seed=0):
    """Losses of a run whose validation gets worse from a third on, by metric key."""
    step = np.arange(STEPS)
    rise = np.maximum(0.0, step - STEPS / 3) / STEPS
    noise = 0.005 * np.random.default_rng(seed + 100).standard_normal(STEPS)
    validation = 0.3 + 0.7 * np.exp(-step / 15.0) + 1.5 * rise + noise
    return {"train/loss": learn(seed, end=0.01, noise=0.003), "val/loss": validation.tolist()}


def succeed(seed=0, **arguments):
    """Losses of a run in which nothing goes wrong, by metric key."""
    return {
        "train/loss": learn(seed, **arguments),
        "val/loss": learn(seed + 100, **arguments, noise=0.01),
    }
