"""A sweep and its trials as the page has them: rows, who holds what, rungs, the front."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from quark.analysis.metric_roles import list_objectives, pick_comparable
from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import encode_json
from quark_core.records.names import decode_name
from quark_core.runs.reading import encode_key
from quark_core.search.resolution import write_name

if TYPE_CHECKING:
    from quark_core.records.json_object import JsonObject
    from quark_core.records.sweeps import StoredSweep, StoredTrial

_MOST_WORKERS = 100
_MOST_RUNGS = 50
_MOST_FRONT = 500
_TEXT = 300

TRIAL_FIELDS = (
    "number",
    "state",
    "token",
    "failures",
    "losses",
    "run_id",
    "values",
    "constraints",
    "step",
    "reason",
    "claimed_at",
    "settled_at",
    "rung",
    "budget",
    "parent",
    "worker",
    "parameters",
)
"""What a row of a trial has, in this order."""


def describe_sweep(sweep: StoredSweep) -> dict[str, Any]:
    """A sweep as a row of the list."""
    counts = read_counts(sweep)
    definition = sweep.definition
    return {
        "id": sweep.id,
        "project": sweep.project,
        "name": sweep.name,
        "state": sweep.state,
        "is_done": sweep.is_done,
        "search": _show(definition.get("search")),
        "metrics": [_describe_metric(*each) for each in list_objectives(definition)],
        "counts": counts,
        "total": sum(counts.values()),
        "planned": _take_number(definition.get("trials")),
        "created_at": sweep.created_at,
        "updated_at": sweep.updated_at,
    }


def describe_definition(sweep: StoredSweep) -> dict[str, Any]:
    """What a sweep was opened with; what was defined wrongly is let go, as anybody may have."""
    definition = sweep.definition
    space = definition.get("space")
    constraints = definition.get("constraints")
    return {
        "budget": _take_number(definition.get("budget")),
        "max_failures": _take_number(definition.get("max_failures")),
        "lease_s": _take_number(definition.get("lease_s")),
        "seed": _take_number(definition.get("seed")),
        "stop": definition.get("stop") is True,
        "stop_broken": definition.get("stop_broken") is True,
        "constraints": [_show(each) for each in constraints[:50]]
        if isinstance(constraints, (list, tuple))
        else [],
        "space": {
            name: {
                "type": _show(each.get("type")),
                "low": _take_number(each.get("low")),
                "high": _take_number(each.get("high")),
                "log": each.get("log") is True,
            }
            for name, each in space.items()
            if isinstance(each, Mapping)
        }
        if isinstance(space, Mapping)
        else {},
    }


def describe_trial(trial: StoredTrial, names: Sequence[str]) -> tuple[Any, ...]:
    """A trial as a row of `TRIAL_FIELDS`, its parameters in the order of `names`."""
    origin = trial.origin
    return (
        trial.number,
        trial.state,
        trial.token,
        trial.failures,
        trial.losses,
        trial.run_id,
        None if trial.values is None else list(trial.values),
        None if trial.constraints is None else list(trial.constraints),
        trial.step,
        None if trial.reason is None else trial.reason[:_TEXT],
        trial.claimed_at,
        trial.settled_at,
        _take_number(origin.get("rung")),
        _take_number(origin.get("budget")),
        _take_number(origin.get("parent")),
        _name_worker(trial.worker),
        [_show(trial.parameters.get(name)) for name in names],
    )


def describe_live(trial: StoredTrial) -> dict[str, Any]:
    """Who holds a trial, and for how long."""
    return {
        "number": trial.number,
        "state": trial.state,
        "run_id": trial.run_id,
        "worker": _name_worker(trial.worker),
        "claimed_at": trial.claimed_at,
        "lease_until": trial.lease_until,
        "token": trial.token,
        "failures": trial.failures,
        "losses": trial.losses,
    }


def list_workers(trials: Sequence[StoredTrial]) -> list[dict[str, Any]]:
    """Who has trials now or had some, those who hold one first, then the newest."""
    found: dict[bytes, dict[str, Any]] = {}
    for trial in trials:
        name = _name_worker(trial.worker)
        if name is None or trial.worker is None:
            continue
        # Processes of one number may be of other boots, or of other containers.
        worker = found.setdefault(
            encode_json(trial.worker),
            {"worker": name, "holds": [], "ended": 0, "last_at": None, "lease_until": None},
        )
        if trial.state == "running":
            worker["holds"].append(trial.number)
            worker["lease_until"] = max(worker["lease_until"] or "", trial.lease_until or "")
        elif trial.is_final:
            worker["ended"] += 1
        worker["last_at"] = max(worker["last_at"] or "", trial.claimed_at or "")
    ordered = sorted(found.values(), key=lambda each: each["last_at"], reverse=True)
    ordered.sort(key=lambda each: not each["holds"])
    return ordered[:_MOST_WORKERS]


def list_rungs(sweep: StoredSweep, trials: Sequence[StoredTrial]) -> list[dict[str, Any]]:
    """How trials are spread over the rungs: by where they come from, else by where they ended."""
    objectives = list_objectives(sweep.definition)
    is_max = bool(objectives) and objectives[0][1] == "max"
    rungs: dict[tuple[float, float], list[StoredTrial]] = {}
    for trial in trials:
        rung = _take_number(trial.origin.get("rung"))
        if rung is not None:
            budget = _take_number(trial.origin.get("budget"))
            rungs.setdefault((rung, -1.0 if budget is None else budget), []).append(trial)
    if rungs:
        parents = Counter(_take_number(trial.origin.get("parent")) for trial in trials)
        return [
            {
                "rung": rung,
                "budget": None if budget < 0 else budget,
                "trials": len(members),
                "ended": sum(trial.is_final for trial in members),
                "went_on": sum(bool(parents[trial.number]) for trial in members),
                "stopped": sum(trial.state == "pruned" for trial in members),
                "best": _find_extreme(members, is_max=is_max),
            }
            for (rung, budget), members in sorted(rungs.items())[:_MOST_RUNGS]
        ]
    stopped = Counter(
        trial.step for trial in trials if trial.state == "pruned" and trial.step is not None
    )
    steps = sorted(stopped)[:_MOST_RUNGS]
    ended = [trial for trial in trials if trial.step is not None and trial.is_final]
    return [
        {
            "rung": place,
            "budget": step,
            "trials": sum(trial.step >= step for trial in ended if trial.step is not None),
            "ended": sum(trial.step == step for trial in ended),
            "went_on": sum(trial.step > step for trial in ended if trial.step is not None),
            "stopped": stopped[step],
            "best": None,
        }
        for place, step in enumerate(steps)
    ]


def _find_extreme(trials: Sequence[StoredTrial], *, is_max: bool) -> float | None:
    values = [
        trial.values[0]
        for trial in trials
        if trial.values and trial.values[0] is not None and math.isfinite(trial.values[0])
    ]
    return (max if is_max else min)(values, default=None)


def find_front(sweep: StoredSweep, trials: Sequence[StoredTrial]) -> list[int] | None:
    """Trials that none is better than in all metrics; None where there is one metric."""
    import numpy as np

    objectives = list_objectives(sweep.definition)
    if len(objectives) < 2:
        return None
    signs = np.array([1.0 if mode == "max" else -1.0 for _, mode in objectives])
    found = [
        (trial.number, trial.values)
        for trial in pick_comparable(sweep, trials)
        if trial.values is not None
        and len(trial.values) == len(signs)
        and all(value is not None and math.isfinite(value) for value in trial.values)
    ]
    if not found:
        return []
    table = np.array([values for _, values in found], dtype=np.float64) * signs
    order = np.lexsort([-table[:, column] for column in reversed(range(table.shape[1]))])
    front: list[int] = []
    for at in order:
        # Whoever is better in all comes before it, in this order.
        kept = table[front]
        if not ((kept >= table[at]).all(axis=1) & (kept > table[at]).any(axis=1)).any():
            front.append(int(at))
    return [found[at][0] for at in front[:_MOST_FRONT]]


def read_counts(sweep: StoredSweep) -> dict[str, int]:
    """How many trials there are in each state that has some."""
    return {
        str(state): count
        for state, count in sweep.counts.items()
        if isinstance(count, int) and not isinstance(count, bool) and count > 0
    }


def _name_worker(worker: JsonObject | None) -> str | None:
    """Host and process; the host is its name before whatever tells boots apart."""
    if not worker:
        return None
    host, pid = str(worker.get("host")).partition("|")[0], worker.get("pid")
    return clip(host if pid is None else f"{host} · {pid}")


def _take_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) else None


def _show(value: object) -> Any:
    """A value as a cell: numbers, truth values and null as they are, all else as a short text."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return clip(value)
    return clip(msgspec.json.encode(value).decode("utf-8", "replace"))


def clip(text: str) -> str:
    """A text of at most 300 characters."""
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}…"


def _describe_metric(name: str, mode: str) -> dict[str, Any]:
    """A metric: its key, what it is called, and as a search writes it."""
    try:
        key = encode_key(name, "metric")
    except SchemaValidationError:
        # Nothing was ever logged under what is no name.
        return {"key": "", "name": clip(name), "mode": mode, "written": ""}
    return {
        "key": key,
        "name": decode_name(key),
        "mode": mode,
        "written": write_name("metric", key),
    }
