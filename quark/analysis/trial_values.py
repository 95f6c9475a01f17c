"""By what the trials of a sweep are judged: its metrics, and which trials may be compared."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from quark_core.config.objective import ObjectiveMode, infer_mode
from quark_core.records.runs import digest_config
from quark_core.records.sweeps import StoredSweep, StoredTrial


def list_objectives(definition: Mapping[str, Any]) -> list[tuple[str, ObjectiveMode]]:
    """The metrics of a sweep, each with its mode; what was defined wrongly is guessed or let go."""
    metrics, modes = definition.get("metric"), definition.get("mode")
    names = metrics if isinstance(metrics, (list, tuple)) else [metrics]
    words = modes if isinstance(modes, (list, tuple)) else [modes] * len(names)
    found: list[tuple[str, ObjectiveMode]] = []
    for place, name in enumerate(names):
        if not isinstance(name, str):
            continue
        word = words[place] if place < len(words) else None
        guess: ObjectiveMode = infer_mode(name) or "min"
        found.append((name, word if word in ("min", "max") else guess))
    return found


def pick_comparable(
    sweep: StoredSweep, trials: Iterable[StoredTrial], *, least: int = 1
) -> list[StoredTrial]:
    """Completed trials that keep all constraints and had the same budget: the largest.

    What was pruned, or had a smaller budget, has another value only because it stopped earlier.

    Args:
        sweep: The sweep.
        trials: Its trials.
        least: How many configurations there must be; where so many had no budget, the largest
            that so many had, or else that which most had. Of a halving the last rung has one.
    """
    levels: dict[float, list[StoredTrial]] = defaultdict(list)
    is_constrained = bool(sweep.definition.get("constraints"))
    for trial in trials:
        broken = trial.constraints or ()
        # Of what was never measured nobody knows whether it is kept.
        keeps_all = all(value <= 0.0 for value in broken) and (bool(broken) or not is_constrained)
        if trial.state == "completed" and trial.values and keeps_all:
            levels[_find_level(trial)].append(trial)
    # What was added by hand has no budget, and so the whole.
    free = levels.pop(math.inf, [])
    ordered = [levels[level] for level in sorted(levels, reverse=True)] or [[]]
    ordered[0] = sorted([*free, *ordered[0]], key=lambda trial: trial.number)
    for members in ordered:
        if len({digest_config(trial.parameters) for trial in members}) >= least:
            return members
    return max(ordered, key=len)


def find_best_trial(sweep: StoredSweep, trials: Iterable[StoredTrial]) -> StoredTrial | None:
    """The trial that has the best value of the first metric, of equal ones the first; or None."""
    objectives = list_objectives(sweep.definition)
    if not objectives:
        return None
    sign = 1.0 if objectives[0][1] == "max" else -1.0
    known = [
        (sign * trial.values[0], -trial.number, trial)
        for trial in pick_comparable(sweep, trials)
        if trial.values and trial.values[0] is not None and math.isfinite(trial.values[0])
    ]
    return max(known, key=lambda each: each[:2])[2] if known else None


def _find_level(trial: StoredTrial) -> float:
    for name in ("budget", "rung"):
        value = trial.origin.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return math.inf
