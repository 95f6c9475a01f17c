"""Whether verdicts are right: simulated runs of which the truth is known.

    python benchmarks/verdicts.py [SCENARIO ...] [--comparisons N] [--quick] [--json FILE]

Each cell is a scenario with so many seeds a side. In the first half of its comparisons nothing
differs between the sides but what the scenario says, and every *better* or *worse* is false. In
the second half the primary ends worse by two deviations between seeds. Beside it stands
Welch's t test (SciPy's) on the last value of each run. The comparisons are those of
`compare_metrics`, which `quark compare`, `quark why`, the page, the report and MCP ask.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quark.analysis.comparison.metrics import Pairing, compare_metrics
from quark.analysis.comparison.results import MetricDiff
from quark.analysis.config import ComparisonEngineConfig
from quark.analysis.curves import Curve
from quark.analysis.run_data import RunData
from quark_core.records.columns import Columns

Floats = NDArray[np.float64]
Generator = np.random.Generator

LEVEL = 3.27
FALL = 0.5
DEVIATION = 0.001
SHIFT = 2.0
SEEDS = (1, 2, 3, 5, 8)
COMPARISONS = 1_000


def fall_linearly(part: Floats) -> Floats:
    """From 1 to 0, as a loss does under a rate that falls linearly."""
    return 1.0 - part


def fall_by_cosine(part: Floats) -> Floats:
    """The same under a cosine schedule."""
    return 0.5 * (1.0 + np.cos(math.pi * part))


def fall_early(part: Floats) -> Floats:
    """From 1 to 0, most of it at once."""
    return np.asarray((1.0 - part) ** 4, dtype=np.float64)


def fall_late(part: Floats) -> Floats:
    """From 1 to 0, most of it at the end."""
    return np.asarray(1.0 - part**4, dtype=np.float64)


def draw_normally(generator: Generator, count: int) -> Floats:
    """Seeds as most are."""
    return generator.normal(size=count)


def draw_heavy_tails(generator: Generator, count: int) -> Floats:
    """Seeds of which some are far off: Student's t with two degrees of freedom."""
    return generator.standard_t(2.0, size=count)


def draw_skewed(generator: Generator, count: int) -> Floats:
    """Seeds that are far off on one side alone."""
    return generator.exponential(size=count) - 1.0


@dataclass(frozen=True)
class Shape:
    """How the runs of one side look.

    Attributes:
        steps: The last step of the schedule.
        every: Steps between two points; the last point is the last of them.
        fall: How the curve falls over its own schedule.
        deviation: Between seeds, as a multiple of the usual one.
        noise: Of single points, likewise.
    """

    steps: int = 200
    every: int = 5
    fall: Callable[[Floats], Floats] = fall_linearly
    deviation: float = 1.0
    noise: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """Two sides of which the truth is known.

    Attributes:
        name: What is special about it.
        primary, reference: The sides; their ends have one mean.
        draw: How seeds are drawn.
        diverged: What the first seed of the primary ends in instead, or None.
        samples: Of how many validation samples the metric is a share, or 0 where it is a loss.
        is_plain: Whether lengths are equal and seeds normal, so that Welch's power is owed.
        seeds: Seeds of either side; by default as many as of the other.
    """

    name: str
    primary: Shape = Shape()
    reference: Shape = Shape()
    draw: Callable[[Generator, int], Floats] = draw_normally
    diverged: float | None = None
    samples: int = 0
    is_plain: bool = False
    seeds: tuple[tuple[int, int], ...] = tuple((count, count) for count in SEEDS)


_COSINE = Shape(fall=fall_by_cosine)
SCENARIOS = (
    Scenario("equal lengths, linear", is_plain=True),
    Scenario("equal lengths, cosine", _COSINE, _COSINE, is_plain=True),
    Scenario("190 against 200 steps, linear", Shape(190), Shape(200)),
    Scenario(
        "150 against 200 steps, cosine",
        Shape(150, fall=fall_by_cosine),
        Shape(200, fall=fall_by_cosine),
    ),
    Scenario("20 against 1000 steps", Shape(20), Shape(1000)),
    Scenario("two points a run", Shape(every=200), Shape(every=200), is_plain=True),
    Scenario("heavy-tailed seeds", draw=draw_heavy_tails),
    Scenario("skewed seeds", draw=draw_skewed),
    Scenario("logged every step and every 10", Shape(every=1), Shape(every=10), is_plain=True),
    Scenario("last step not logged", Shape(every=7), Shape(every=10)),
    Scenario("crossing curves", Shape(fall=fall_early), Shape(fall=fall_late), is_plain=True),
    Scenario("one seed ends in NaN", diverged=math.nan),
    Scenario("one seed ends in 1000", diverged=1000.0),
    Scenario("maximised accuracy", samples=1_000_000, is_plain=True),
    Scenario("accuracy over 1000 samples", samples=1000),
    Scenario("accuracy over 200 samples", samples=200),
    Scenario("noisy points", Shape(noise=3.0), Shape(noise=3.0), is_plain=True),
    Scenario("four times the spread", Shape(deviation=4.0)),
    Scenario("unequal counts", seeds=((1, 3), (1, 8), (2, 8), (3, 8), (8, 3))),
    Scenario(
        "unequal counts and spread", Shape(deviation=4.0), seeds=((2, 8), (3, 8), (5, 8), (8, 3))
    ),
)


@dataclass(frozen=True)
class Cell:
    """What one scenario gives with so many seeds.

    Attributes:
        scenario, primary, reference: Which, and the seeds of either side.
        comparisons: Of each half.
        false_calls: Share of *better* and *worse* where nothing differs.
        error: Its sampling error (one standard deviation at a share of 5 %).
        power: Share of *worse* where the primary is worse.
        wrong_calls: Share of *better* there.
        welch_false_calls, welch_power: Those of Welch's test on the runs' last values.
        contradictions: Verdicts that do not fit the interval beside them.
        is_plain: Whether Welch's power is owed.
    """

    scenario: str
    primary: int
    reference: int
    comparisons: int
    false_calls: float
    error: float
    power: float
    wrong_calls: float
    welch_false_calls: float
    welch_power: float
    contradictions: int
    is_plain: bool


def measure_cell(
    scenario: Scenario, counts: tuple[int, int], comparisons: int = COMPARISONS
) -> Cell:
    """Compare so many pairs of sides with no difference, and as many with one."""
    generator = np.random.default_rng([len(scenario.name), *map(ord, scenario.name), *counts])
    called: dict[float, list[str]] = {}
    welch: dict[float, Floats] = {}
    contradictions = 0
    for shift in (0.0, SHIFT):
        called[shift], ends = [], []
        for _ in range(comparisons):
            one, two = _draw_sides(scenario, counts, shift, generator)
            diff = _compare(one, two)
            called[shift].append(diff.verdict or "none")
            contradictions += _contradicts(diff)
            ends.append(([float(c.value[-1]) for c in one], [float(c.value[-1]) for c in two]))
        welch[shift] = _test_by_welch(ends)
    nothing, worse = called[0.0], called[SHIFT]
    return Cell(
        scenario.name,
        *counts,
        comparisons,
        sum(word in ("better", "worse") for word in nothing) / comparisons,
        math.sqrt(0.05 * 0.95 / comparisons),
        worse.count("worse") / comparisons,
        worse.count("better") / comparisons,
        float((welch[0.0] <= 0.05).mean()),
        float((welch[SHIFT] <= 0.05).mean()),
        contradictions,
        scenario.is_plain,
    )


def _draw_sides(
    scenario: Scenario, counts: tuple[int, int], shift: float, generator: Generator
) -> tuple[list[Curve], list[Curve]]:
    sides = []
    for shape, count, worse in zip(
        (scenario.primary, scenario.reference), counts, (shift, 0.0), strict=True
    ):
        steps = np.arange(0, shape.steps + 1, shape.every)
        fall = FALL * shape.fall(steps / shape.steps)
        ends = DEVIATION * (shape.deviation * scenario.draw(generator, count) + worse)
        curves = []
        for end in ends:
            noise = shape.noise * DEVIATION * generator.normal(size=len(steps))
            loss = LEVEL + end + fall + noise
            if scenario.samples:
                # As far from 0.9 as the loss is from its level; deviations as of so many samples.
                hits = np.round(scenario.samples * (0.9 + LEVEL - loss))
                values = np.clip(hits / scenario.samples, 0.0, 1.0)
            else:
                values = loss
            curves.append(_make_curve(steps, values, scenario))
        sides.append(curves)
    if scenario.diverged is not None:
        curve = sides[0][0]
        curve.value[len(curve) // 2 :] = scenario.diverged
    return sides[0], sides[1]


def _make_curve(steps: NDArray[np.int64], values: Floats, scenario: Scenario) -> Curve:
    key = "val/accuracy" if scenario.samples else "val/loss"
    return Curve(key, steps.astype(np.int64), values, np.full(len(steps), -1))


def _compare(one: Sequence[Curve], two: Sequence[Curve]) -> MetricDiff:
    runs = [[_make_run(curve) for curve in side] for side in (one, two)]
    # Seeds are matched, as they are where both sides were started with 0, 1, 2, ...
    pairing = Pairing(tuple(range(len(one))) if len(one) == len(two) > 1 else None)
    (diff,) = compare_metrics(*runs, pairing, ComparisonEngineConfig())
    return diff


def _make_run(curve: Curve) -> RunData:
    run = RunData(lambda kind, _: Columns.empty(kind), "in memory")
    run.__dict__["metrics"] = {curve.key: curve}
    return run


def _contradicts(diff: MetricDiff) -> bool:
    """Whether the verdict does not fit the interval beside it."""
    if diff.interval_low is None or diff.interval_high is None:
        return False
    holds = diff.interval_low <= 0.0 <= diff.interval_high
    return holds and diff.verdict in ("better", "worse")


def _test_by_welch(ends: Sequence[tuple[list[float], list[float]]]) -> Floats:
    """P-values of Welch's test on the last values, a row each; 1 where there is none."""
    from scipy.stats import ttest_ind

    one, two = (np.array([row[side] for row in ends]) for side in (0, 1))
    if min(one.shape[1], two.shape[1]) < 2:
        return np.ones(len(one))
    with warnings.catch_warnings():
        # Sides without any spread, or with values that are not finite, are told by a warning.
        warnings.simplefilter("ignore")
        p = np.asarray(ttest_ind(one, two, axis=1, equal_var=False).pvalue, dtype=np.float64)
    return np.where(np.isfinite(p), p, 1.0)


def _print_cells(cells: Sequence[Cell]) -> None:
    print("\n| scenario | seeds | false calls | Welch | power | Welch |")
    print("|---|---|---|---|---|---|")
    for cell in cells:
        seeds = f"{cell.primary}"
        if cell.primary != cell.reference:
            seeds += f" and {cell.reference}"
        print(
            f"| {cell.scenario} | {seeds} | {100 * cell.false_calls:.1f} ± {100 * cell.error:.1f} "
            f"| {100 * cell.welch_false_calls:.1f} | {100 * cell.power:.1f} "
            f"| {100 * cell.welch_power:.1f} |"
        )
    wrong = sum(cell.wrong_calls * cell.comparisons for cell in cells)
    print(f"\nworst cell: {100 * max(cell.false_calls for cell in cells):.1f} % false calls; "
          f"called better where worse is true: {wrong:.0f}; verdicts beside an interval that "
          f"does not fit: {sum(cell.contradictions for cell in cells)}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether verdicts are right.")
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="words of its name")
    parser.add_argument("--comparisons", type=int, default=COMPARISONS, help="of each half")
    parser.add_argument("--quick", action="store_true", help="one number of seeds a scenario")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    chosen = [
        scenario
        for scenario in SCENARIOS
        if not arguments.scenarios or any(word in scenario.name for word in arguments.scenarios)
    ]
    if not chosen:
        parser.error(f"no scenario of that name; there are {', '.join(s.name for s in SCENARIOS)}")
    cells = [
        measure_cell(scenario, counts, arguments.comparisons)
        for scenario in chosen
        for counts in (scenario.seeds[-2:-1] if arguments.quick else scenario.seeds)
    ]
    _print_cells(cells)
    print(f"(load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=2) + "\n")


if __name__ == "__main__":
    main()
