"""How well a project's history names the guilty key, on simulated histories.

    python tests/kit/attribution_worlds.py [--worlds 60] [--runs 10 30 100 300]

Eight keys of two to four levels, four of them without an effect, one interaction of two that
have one; three keys differ between A and B. Noise is 0.1 or 0.3 of the largest effect; a history
is made by a person, who changes one or two keys at a time, or at random. Only changes count that
are at least twice the noise. The right answer is the key with the largest share of the change
(Shapley, in the world without noise). Nothing here fails: it prints.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quark.analysis.explanation.attribution import Candidates, measure_pairs, rank_causes, regress
from quark.analysis.explanation.differences import Difference
from quark.analysis.explanation.history import PastRun
from quark.analysis.explanation.results import FirstDivergence, NoiseFloor
from quark.analysis.explanation.run_attributes import RunTraits

KEYS = 8
CHANGED = 3
NOISES = (0.1, 0.3)
LEAST_CHANGE = 2.0  # times the noise
SEEDS = 6
UNKNOWN = FirstDivergence("unknown", None, "step", None, 0, None, None, "")

Levels = tuple[int, ...]


@dataclass(frozen=True)
class World:
    """A law that gives each configuration its result.

    Attributes:
        levels: Levels of each key.
        effects: Key -> effect of each level.
        both: Two keys that have an effect together, and that effect by level.
        noise: Deviation of a run.
        numeric: Which keys are numbers.
    """

    levels: Levels
    effects: tuple[np.ndarray[Any, Any], ...]
    both: tuple[int, int, np.ndarray[Any, Any]]
    noise: float
    numeric: tuple[bool, ...]

    def tell(self, config: Levels) -> float:
        """The result without noise."""
        first, second, table = self.both
        own = sum(float(effect[level]) for effect, level in zip(self.effects, config, strict=True))
        return own + float(table[config[first], config[second]])

    def name(self, key: int, level: int) -> object:
        """A level as a configuration spells it."""
        return 10.0 ** (level - 3) if self.numeric[key] else f"choice-{level}"


def make_world(rng: np.random.Generator) -> World:
    levels = tuple(int(each) for each in rng.integers(2, 5, KEYS))
    guilty = set(rng.permutation(KEYS)[: KEYS // 2].tolist())
    effects = tuple(
        rng.standard_normal(count) if key in guilty else np.zeros(count)
        for key, count in enumerate(levels)
    )
    first, second = sorted(guilty)[:2]
    table = 0.7 * rng.standard_normal((levels[first], levels[second]))
    largest = max(float(np.ptp(effect)) for effect in effects)
    noise = float(rng.choice(NOISES)) * largest
    numeric = tuple(bool(each) for each in rng.random(KEYS) < 0.5)
    return World(levels, effects, (first, second, table), noise, numeric)


def make_history(rng: np.random.Generator, world: World, runs: int) -> list[Levels]:
    """Configurations, by a person or at random."""
    if rng.random() < 0.5:
        return [tuple(int(rng.integers(0, n)) for n in world.levels) for _ in range(runs)]
    out, current = [], [int(rng.integers(0, n)) for n in world.levels]
    for _ in range(runs):
        out.append(tuple(current))
        for key in rng.permutation(KEYS)[: int(rng.integers(0, 3))].tolist():
            current[key] = int(rng.integers(0, world.levels[key]))
    return out


def describe(world: World, config: Levels) -> RunTraits:
    values = {("config", f"k{key}"): world.name(key, level) for key, level in enumerate(config)}
    return RunTraits(values, frozenset({"config"}))  # type: ignore[arg-type]


def share(world: World, a: Levels, b: Levels, keys: Sequence[int]) -> dict[int, float]:
    """What each changed key brought about, over all orders of changing them."""
    totals = dict.fromkeys(keys, 0.0)
    orders = list(itertools.permutations(keys))
    for order in orders:
        current = list(a)
        for key in order:
            before = world.tell(tuple(current))
            current[key] = b[key]
            totals[key] += (world.tell(tuple(current)) - before) / len(orders)
    return totals


@dataclass
class Count:
    """Right answers, answers and questions."""

    right: int = 0
    answered: int = 0
    asked: int = 0

    def note(self, answer: int | None, truth: int) -> None:
        """Count one answer, None for silence."""
        self.asked += 1
        self.answered += answer is not None
        self.right += answer == truth

    def __str__(self) -> str:
        if not self.answered:
            return f"silent in {self.asked}"
        share = 100 * self.right / self.answered
        return (
            f"{share:3.0f} % of {100 * self.answered / self.asked:3.0f} % answered ({self.asked})"
        )


def ask(rng: np.random.Generator, runs: int, counts: Mapping[str, Count]) -> bool:
    """One question; whether it was one."""
    world = make_world(rng)
    history = make_history(rng, world, runs)
    a = history[int(rng.integers(0, len(history)))]
    keys = sorted(rng.permutation(KEYS)[:CHANGED].tolist())
    seen = [sorted({config[key] for config in history} - {a[key]}) for key in keys]
    if not all(seen):
        return False
    b = list(a)
    for key, levels in zip(keys, seen, strict=True):
        b[key] = int(rng.choice(levels))
    ends = [world.tell(each) + world.noise * rng.standard_normal() for each in (a, tuple(b))]
    change = ends[1] - ends[0]
    if abs(world.tell(tuple(b)) - world.tell(a)) < LEAST_CHANGE * world.noise:
        return False
    shares = share(world, a, tuple(b), keys)
    truth = max(shares, key=lambda key: shares[key] * math.copysign(1.0, change))
    past = [
        PastRun(
            str(index),
            describe(world, config),
            world.tell(config) + world.noise * rng.standard_normal(),
            None,
            "completed",
            None,
            None,
        )
        for index, config in enumerate(history)
    ]
    answer(world, past, a, tuple(b), keys, change, truth, counts)
    return True


def answer(
    world: World,
    past: Sequence[PastRun],
    a: Levels,
    b: Levels,
    keys: Sequence[int],
    change: float,
    truth: int,
    counts: Mapping[str, Count],
) -> None:
    differences = [
        Difference("config", f"k{key}", world.name(key, a[key]), world.name(key, b[key]))
        for key in keys
    ]
    floor = NoiseFloor(world.noise, SEEDS, SEEDS + 1, None, "side")
    pairs = {
        each.key: effect
        for each in differences
        if (effect := measure_pairs(past, each, floor)) is not None
    }
    found = regress(past, differences, change)
    largest = None
    if found is not None:
        best = max(found.effects, key=lambda key: found.effects[key].difference / change)
        largest = int(best[1][1:])
        sure = found.effects[best].agreement or 0.0
        counts["ridge, where 80 % agree"].note(largest if sure >= 0.8 else None, truth)
    else:
        counts["ridge, where 80 % agree"].note(None, truth)
    counts["ridge, always"].note(largest, truth)
    verdict = "better" if change > 0 else "worse"
    causes = rank_causes(
        Candidates(verdict, change, floor, differences, (), pairs, found, UNKNOWN)  # type: ignore[arg-type]
    )
    first = int(causes[0].place[1:])
    counts["first cause"].note(first, truth)
    counts["probable"].note(first if causes[0].standing == "probable" else None, truth)
    for cause in causes:
        if cause.standing == "unlikely":
            counts["not unlikely"].note(int(cause.place[1:] != str(truth)), 1)


def make_counts() -> dict[str, Count]:
    names = ("ridge, always", "ridge, where 80 % agree", "first cause", "probable", "not unlikely")
    return {name: Count() for name in names}


def simulate(
    runs: int, worlds: int, seed: int = 0, tell: Callable[[int], None] | None = None
) -> dict[str, Count]:
    """Ask until as many questions are answered."""
    rng = np.random.default_rng([seed, runs])
    counts = make_counts()
    asked = 0
    while asked < worlds:
        asked += ask(rng, runs, counts)
        if tell is not None:
            tell(asked)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=60)
    parser.add_argument("--runs", type=int, nargs="+", default=[10, 30, 100, 300])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for runs in options.runs:
        begin = time.perf_counter()
        counts = simulate(runs, options.worlds, options.seed)
        taken = (time.perf_counter() - begin) / options.worlds
        print(f"{runs} runs ({1000 * taken:.0f} ms a question)")
        for name, count in counts.items():
            print(f"  {name:<24} {count}")


if __name__ == "__main__":
    main()
