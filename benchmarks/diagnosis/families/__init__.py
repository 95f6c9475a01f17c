"""Families of scenarios: modules with SCENARIOS, `third_`, `fifth_`, ... by as many authors."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from benchmarks.diagnosis.scenario import Scenario

FAMILIES = ("third", "fifth", "sixth", "seventh", "eighth")
"""In the order in which they were written."""


def list_scenarios(family: str = "all") -> tuple[Scenario, ...]:
    """All scenarios of a family (`third`, `fifth`, ...), or of all of them, by name.

    Raises:
        ValueError: Two scenarios have one name.
    """
    found: dict[str, Scenario] = {}
    for scenario in _walk(family):
        if scenario.name in found:
            raise ValueError(f"two scenarios are named {scenario.name!r}")
        found[scenario.name] = scenario
    return tuple(found[name] for name in sorted(found))


def find_scenario(name: str) -> Scenario:
    """The scenario of this name.

    Raises:
        KeyError: There is none.
    """
    for scenario in _walk(name.split("/", 1)[0]):
        if scenario.name == name:
            return scenario
    raise KeyError(name)


def _walk(family: str) -> Iterator[Scenario]:
    for info in pkgutil.iter_modules(__path__):
        if family == "all" or info.name.startswith(f"{family}_"):
            module = importlib.import_module(f"{__name__}.{info.name}")
            yield from getattr(module, "SCENARIOS", ())
