"""The metric that a run is to be judged by, and how it is kept with the run.

It stands in the run's configuration, as two plain texts: so every backend that
gives a configuration back gives the objective back too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from quark_core.config import settings
from quark_core.config.arguments import check_label
from quark_core.errors import SchemaValidationError
from quark_core.records import ConfigSnapshot
from quark_core.records.checks import check_choice
from quark_core.records.json_object import JsonObject

ObjectiveMode = Literal["min", "max"]

OBJECTIVE_KEY = "quark_objective"
MODE_KEY = "quark_objective_mode"


@dataclass(frozen=True, slots=True)
class Objective:
    """A metric that somebody has named.

    Attributes:
        metric: Its name, as it is logged.
        mode: Whether it is better when lower or higher; None where the name must say.
    """

    metric: str
    mode: ObjectiveMode | None = None


def check_objective(metric: object, mode: object = None) -> Objective | None:
    """The objective that two arguments name, or None where they name none.

    Raises:
        SchemaValidationError: One of them is bad, or there is only `mode`.
    """
    if isinstance(mode, str) and mode in ("online", "offline", "disabled", "dryrun"):
        raise SchemaValidationError(
            f"mode must be 'min' or 'max', got {mode!r}: it is the direction of objective=; "
            "each run is kept on this machine first"
        )
    if mode is not None:
        check_choice(mode, "mode", get_args(ObjectiveMode))
    if metric is None:
        if mode is not None:
            raise SchemaValidationError(
                f"mode={mode!r} needs objective=, the metric that is to get better"
            )
        return None
    name = check_label(metric, "objective")
    return Objective(name, mode)  # type: ignore[arg-type]


def parse_objective(text: str, argument: str) -> Objective:
    """The objective in a text such as `val/loss` or `val/score:max`.

    Raises:
        SchemaValidationError: It names no metric; the message begins with `argument`.
    """
    name, _, mode = text.rpartition(":")
    if mode not in get_args(ObjectiveMode):
        name, mode = text, ""
    try:
        found = check_objective(name.strip(), mode or None)
    except SchemaValidationError as error:
        raise SchemaValidationError(f"{argument}: {error}") from None
    assert found is not None
    return found


def choose_objective(metric: object, mode: object) -> Objective | None:
    """Read the objective from arguments or, without them, from QUARK_OBJECTIVE; None without both.

    Raises:
        SchemaValidationError: A bad one.
    """
    given = settings.objective()
    if metric is None and mode is None and given:
        return parse_objective(given, settings.OBJECTIVE)
    return check_objective(metric, mode)


def keep_objective(snapshot: ConfigSnapshot, objective: Objective | None) -> ConfigSnapshot:
    """Return the configuration with the objective written into it."""
    if objective is None:
        return snapshot
    values = {**snapshot.values, OBJECTIVE_KEY: objective.metric}
    values.pop(MODE_KEY, None)
    if objective.mode is not None:
        values[MODE_KEY] = objective.mode
    return msgspec.structs.replace(snapshot, values=JsonObject(values))


def read_objective(values: Mapping[str, Any] | None) -> Objective | None:
    """The objective that a configuration names, or None; whatever else stands there names none."""
    metric, mode = (values or {}).get(OBJECTIVE_KEY), (values or {}).get(MODE_KEY)
    if not isinstance(metric, str) or not metric:
        return None
    return Objective(metric, mode if mode in get_args(ObjectiveMode) else None)
