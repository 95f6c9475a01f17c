"""A project of small runs whose result is known by a law."""

import numpy as np

import quark

STEPS = 30


class Project:
    """Runs of one project, each with curves that are the same for the same configuration."""

    def __init__(self, root, name="vision"):
        self.root = root
        self.name = name

    def run(
        self,
        config=None,
        *,
        level=0.9,
        noise=0.003,
        status="completed",
        seed=0,
        steps=STEPS,
        **options,
    ):
        """One run; its accuracy rises to `level` and a deviation that the seed decides."""
        values = dict(config or {}, seed=seed) if config is not None else None
        rng = np.random.default_rng(seed)
        end = level + noise * rng.standard_normal()
        session = quark.start_run(
            project=self.name, storage_dir=self.root, config=values, **options
        )
        metrics = quark.MetricsLogger(session)
        for step in range(steps):
            wobble = noise / 5 * rng.standard_normal()
            metrics.log("val/acc", end * (1 - 0.7 ** (step + 1)) + wobble, step=step)
        session.end_run(status)
        return session.run_id

    def explain(self, a, b, **options):
        return quark.explain_change(a, b, storage_dir=self.root, **options)
