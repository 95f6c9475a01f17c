"""What may be said of two sides, computed in their turn among the analyses."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quark.page.api.run_analysis import ComparedPair
from quark.page.api.sides import read_sides
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.records.names import decode_name

if TYPE_CHECKING:
    from quark.page.api.analyses import AnalysisDesk
    from quark.page.api.parameters import Parameters
    from quark.page.api.run_analysis import RunAnalyzer
    from quark.page.api.sides import Side
    from quark.page.api.source import PageSource

_log = logging.getLogger("quark")

_MOST_KEPT = 32
_MOST_WAITING = 16
_MOST_LAYERS = 60
_DIRECTIONS = ("at_least", "at_most")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is compared, as it was when it was asked for: how far each run was."""

    pair: ComparedPair
    of: tuple[tuple[str, str | None], ...]


class ComparisonDesk:
    """Has sides compared, and keeps what was found; every method may be called from any thread.

    Nothing is stored with the runs. Of a run that goes on it is computed anew when it is asked
    for and the run has gone on.

    Args:
        source: What is looked at.
        desk: Whose analyzer compares.
    """

    def __init__(self, source: PageSource, desk: AnalysisDesk) -> None:
        self._source = source
        self._desk = desk
        self._lock = threading.Lock()
        self._found: OrderedDict[_Asked, dict[str, Any]] = OrderedDict()
        self._waiting: set[_Asked] = set()

    def tell(self, parameters: Parameters) -> dict[str, Any]:
        """What `ComparisonEngine` says of the first side against the second, or that it computes.

        Raises:
            SchemaValidationError: A bad parameter, or not two sides.
            RunNotFoundError: There is no such run.
        """
        return self._tell(parameters, lambda sides: _pair(sides, target=_read_target(parameters)))

    def explain(self, parameters: Parameters) -> dict[str, Any]:
        """Why the first side is not as the second is, or that it computes; `metric=KEY` names one.

        Raises:
            SchemaValidationError: A bad parameter, or not two sides.
            RunNotFoundError: There is no such run.
        """
        metric = parameters.get_text("metric")
        return self._tell(parameters, lambda sides: _pair(sides, explains=True, metric=metric))

    def _tell(
        self, parameters: Parameters, make_pair: Callable[[Sequence[Side]], ComparedPair]
    ) -> dict[str, Any]:
        sides = read_sides(self._source, parameters)
        if len(sides) != 2:
            raise SchemaValidationError(f"side must name two sides, got {len(sides)}")
        asked = _Asked(make_pair(sides), _mark(sides))
        with self._lock:
            found = self._found.get(asked)
            if found is not None:
                self._found.move_to_end(asked)
                return found
            is_new = asked not in self._waiting and len(self._waiting) < _MOST_WAITING
            if is_new:
                self._waiting.add(asked)
        if is_new:
            self._desk.submit(lambda analyzer: self._compare(asked, analyzer))
        return {"state": "computing", "result": None, "note": None}

    def _compare(self, asked: _Asked, analyzer: RunAnalyzer) -> None:
        """On the thread of the analyses."""
        try:
            result = analyzer.compare(asked.pair)
            if not asked.pair.explains:
                result = _bound(result)
            found = {"state": "computed", "result": result, "note": None}
        except QuarkError as error:
            found = {"state": "failed", "result": None, "note": str(error)}
        except Exception as error:  # noqa: BLE001 - a plugin's rule may raise anything
            _log.exception("runs %s cannot be compared", ", ".join(asked.pair.primary))
            note = f"{type(error).__name__}: {error}"
            found = {"state": "failed", "result": None, "note": note}
        with self._lock:
            self._found[asked] = found
            while len(self._found) > _MOST_KEPT:
                self._found.popitem(last=False)
            self._waiting.discard(asked)


def _pair(sides: Sequence[Side], **options: Any) -> ComparedPair:
    return ComparedPair(sides[0].ids, sides[1].ids, **options)


def _read_target(parameters: Parameters) -> tuple[str, str, float] | None:
    """`target=KEY` with `direction=at_least|at_most` and `value=NUMBER`."""
    key = parameters.get_text("target")
    if key is None:
        return None
    direction = parameters.get_word("direction", "at_most", _DIRECTIONS)
    text = parameters.get_text("value") or ""
    try:
        value = float(text)
    except ValueError:
        raise SchemaValidationError(f"value must be a number, got {text!r:.40}") from None
    return key, direction, value


def _mark(sides: Sequence[Side]) -> tuple[tuple[str, str | None], ...]:
    return tuple((run.state, run.last_metric_at) for side in sides for run in side.runs)


def _bound(result: dict[str, Any]) -> dict[str, Any]:
    """A result with names decoded, and of thousands of layers only those that differ most."""
    for diff in result["metric_diffs"]:
        diff["name"] = decode_name(diff["metric_key"])
    for name in ("layer_summary_diffs", "parameter_diffs"):
        diffs: list[Mapping[str, Any]] = list(result[name])
        result[f"{name}_count"] = len(diffs)
        # What is not finite came as a text.
        diffs.sort(key=lambda diff: (not diff["notable"], -abs(float(diff["log_ratio"] or 0.0))))
        result[name] = diffs[:_MOST_LAYERS]
    return result
