"""Figures with the goals that they are held against, and how they are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number.

    Attributes:
        name: What was measured, with its unit.
        value: The number.
        at_least: The goal, where more is better.
        at_most: The goal, where less is better.
    """

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def goal(self) -> str:
        """The goal and whether it is met; empty where there is none."""
        if self.at_least is not None:
            return f"goal >= {self.at_least:g}: {_judge(self.value >= self.at_least)}"
        if self.at_most is not None:
            return f"goal <= {self.at_most:g}: {_judge(self.value <= self.at_most)}"
        return ""


def print_figures(title: str, figures: list[Figure]) -> dict[str, float]:
    """Print a table; returns the figures by name."""
    width = max(len(figure.name) for figure in figures)
    print(f"\n{title}\n")
    for figure in figures:
        digits = 0 if abs(figure.value) >= 10_000 else 2 if abs(figure.value) >= 0.1 else 4
        print(f"{figure.name:<{width}}  {figure.value:>14,.{digits}f}   {figure.goal}".rstrip())
    return {figure.name: figure.value for figure in figures}


def time_call(call: Callable[[], object], times: int) -> float:
    """Median time of a call in seconds."""
    return time_side_by_side({"": call}, times)[""]


def time_side_by_side(calls: Mapping[str, Callable[[], object]], times: int) -> dict[str, float]:
    """Median time of each call in seconds.

    They are measured in turns, so that what disturbs one disturbs all, each
    after a call that is not measured, so that none pays for what another one
    left in the caches.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(times):
        for name, call in calls.items():
            call()
            begin = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - begin)
    return {name: median(found) for name, found in taken.items()}


def _judge(good: bool) -> str:
    return "met" if good else "missed"
