"""How often a comparison says better or worse: where nothing differs, and where something does."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from comparing.training import CONFIGURATIONS, Curves, train
from quark.analysis.comparison.metrics import Pairing, compare_metrics
from quark.analysis.comparison.results import MetricDiff
from quark.analysis.config import ComparisonEngineConfig
from quark.analysis.curves import Curve
from quark.analysis.run_data import RunData
from quark_core.config.objective import infer_direction
from quark_core.records.columns import Columns

SEEDS = 14
GROUP = 5
DEVIATIONS = 2.0
_CALLED = ("better", "worse")


def measure_pairs(*, quick: bool = False) -> list[dict[str, Any]]:
    """All pairs of seeds of one configuration, trained, logged and compared by the engine."""
    import quark
    from quark.analysis.comparison.engine import ComparisonEngine

    rows = []
    seeds = 6 if quick else SEEDS
    names = list(CONFIGURATIONS)[: 1 if quick else None]
    print(f"\nAll pairs of {seeds} seeds of one configuration (nothing differs; goal: <= 5 %)")
    for name in names:
        configuration = CONFIGURATIONS[name]
        with tempfile.TemporaryDirectory() as folder:
            runs = []
            for seed in range(seeds):
                settings = {**configuration, "seed": seed}
                with (
                    quark.start_run(project=name, config=settings, storage_dir=folder) as session,
                    quark.MetricsLogger(session) as metrics,
                ):
                    for key, (steps, values) in train(configuration, seed).items():
                        for step, value in zip(steps.tolist(), values.tolist(), strict=True):
                            metrics.log(key, value, step=step)
                runs.append(quark.open_run(session.run_id, Path(folder)))
            verdicts: Counter[str] = Counter()
            called = 0
            for one, two in itertools.combinations(runs, 2):
                result = ComparisonEngine.compare_runs(one, two)
                found = [diff.verdict or "none" for diff in result.metric_diffs]
                verdicts.update(found)
                called += any(verdict in _CALLED for verdict in found)
        pairs = seeds * (seeds - 1) // 2
        row = {
            "configuration": name,
            "pairs": pairs,
            "pairs with any better or worse": called,
            "share": called / pairs,
            "verdicts": dict(sorted(verdicts.items())),
        }
        rows.append(row)
        print(f"  {name:16} {called} of {pairs} pairs ({100 * called / pairs:.1f} %)  {verdicts}")
    return rows


def measure_groups(*, quick: bool = False) -> list[dict[str, Any]]:
    """Five seeds against five others of the same configuration, as they are and shifted.

    The shift adds to, or multiplies, the whole curve of every metric, so that
    its last value (or its end, the median of its last quarter) moves by two
    standard deviations between seeds. 14 seeds are drawn from, and a larger
    population of the same configuration, which gives firmer shares.
    """
    rows = []
    names = list(CONFIGURATIONS)[: 1 if quick else None]
    for name in names:
        for seeds in (SEEDS,) if quick else (SEEDS, 150):
            curves = [train(CONFIGURATIONS[name], seed) for seed in range(seeds)]
            draws = 40 if quick else 400
            rows += _measure_group_rows(name, curves, draws)
    return rows


def _measure_group_rows(name: str, curves: Sequence[Curves], draws: int) -> list[dict[str, Any]]:
    print(f"\n{name}: {GROUP} + {GROUP} of {len(curves)} seeds, {draws} draws")
    deviations = measure_deviations(curves)
    plain = [make_run(run) for run in curves]
    rows = [_count(name, "none", "", draws, plain, plain)]
    for figure, way in itertools.product(("last", "end"), ("added", "multiplied")):
        shifted = [make_run(shift_curves(run, deviations[figure], way)) for run in curves]
        rows.append(_count(name, way, figure, draws, plain, shifted))
    for row in rows:
        row["seeds"] = len(curves)
        what = f"2 deviations of the {row['figure']} {row['shift']}" if row["figure"] else "nothing"
        by_metric = "  ".join(f"{key} {100 * value:.1f}" for key, value in row["found"].items())
        print(f"  {what:36} any {100 * row['any']:5.1f} %   {by_metric}")
    return rows


def _count(
    name: str,
    way: str,
    figure: str,
    draws: int,
    plain: Sequence[RunData],
    shifted: Sequence[RunData],
) -> dict[str, Any]:
    """Share of draws with a verdict: any of better and worse, or where shifted the true one."""
    generator = np.random.default_rng(7)
    config = ComparisonEngineConfig()
    found: Counter[str] = Counter()
    wrong = some = by_welch = 0
    for _ in range(draws):
        order = generator.permutation(len(plain))
        one = [plain[index] for index in order[:GROUP]]
        two = [shifted[index] for index in order[GROUP : 2 * GROUP]]
        diffs = compare_metrics(one, two, Pairing(), config)
        # The reference was made worse.
        true = _CALLED if not figure else ("better",)
        hits = [diff.metric_key for diff in diffs if diff.verdict in true]
        wrong += any(diff.verdict == "worse" for diff in diffs) if figure else 0
        found.update(hits)
        some += bool(hits)
        by_welch += _is_told_by_welch(diffs, one, two)
    keys = sorted(plain[0].metrics)
    return {
        "configuration": name,
        "shift": way,
        "figure": figure,
        "draws": draws,
        "any": some / draws,
        "welch": by_welch / draws,
        "wrong way": wrong / draws,
        "found": {key: found[key] / draws for key in keys},
    }


def _is_told_by_welch(
    diffs: Sequence[MetricDiff], one: Sequence[RunData], two: Sequence[RunData]
) -> bool:
    """Whether Welch's test (SciPy's) on the last values of the main metric calls a difference."""
    from scipy.stats import ttest_ind

    key = next(diff.metric_key for diff in diffs if diff.headline)
    ends = ([run.metrics[key].value[-1] for run in side] for side in (one, two))
    return bool(ttest_ind(*ends, equal_var=False).pvalue <= 0.05)


def measure_deviations(
    curves: Sequence[Curves],
) -> Mapping[str, Mapping[str, tuple[float, float]]]:
    """Figure -> metric -> standard deviation between seeds, and mean."""
    out: dict[str, dict[str, tuple[float, float]]] = {"last": {}, "end": {}}
    for key in curves[0]:
        values = np.array([run[key][1] for run in curves])
        tail = values[:, -max(1, values.shape[1] // 4) :]
        for figure, each in (("last", values[:, -1]), ("end", np.median(tail, axis=1))):
            out[figure][key] = float(each.std(ddof=1)), float(each.mean())
    return out


def shift_curves(run: Curves, deviations: Mapping[str, tuple[float, float]], way: str) -> Curves:
    """The run made worse, every metric by two deviations."""
    out = {}
    for key, (steps, values) in run.items():
        deviation, mean = deviations[key]
        sign = 1.0 if infer_direction(key) == "lower" else -1.0
        if way == "added":
            out[key] = steps, values + sign * DEVIATIONS * deviation
        else:
            out[key] = steps, values * (1.0 + sign * DEVIATIONS * deviation / mean)
    return out


def make_run(curves: Curves) -> RunData:
    """A run in memory."""
    run = RunData(lambda kind, _: Columns.empty(kind), "in memory")
    run.__dict__["metrics"] = {
        key: Curve(key, steps.astype(np.int64), values, np.full(len(steps), -1))
        for key, (steps, values) in curves.items()
    }
    return run
