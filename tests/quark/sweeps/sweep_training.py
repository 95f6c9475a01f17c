"""What the tests of sweeps train."""

import quark

SPACE = {"lr": quark.uniform(1e-4, 1.0, log=True), "optimizer": ["adam", "sgd"]}


def train(trial, *, steps=3, metric="val/acc", config=None):
    """A training whose accuracy is its learning rate times the steps it has made."""
    with trial.start_run(config=config) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(steps):
            metrics.log(metric, trial["lr"] * (step + 1), step=step)
            if trial.should_stop():
                break
    return session
