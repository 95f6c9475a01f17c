"""What may be said of two sides: computed on a thread of its own, one pair after the other."""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from quark.page.api.sides import read_sides
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.records.names import decode_name

if TYPE_CHECKING:
    from quark.page.api.parameters import Parameters
    from quark.page.api.sides import Side
    from quark.page.api.source import PageSource

__all__ = ["ComparisonDesk"]

_log = logging.getLogger("quark")

_MOST_KEPT = 32
_MOST_WAITING = 16
_MOST_LAYERS = 60
_DIRECTIONS = ("at_least", "at_most")


@dataclass(frozen=True, slots=True)
class _Pair:
    """What is compared, as it was when it was asked for.

    Attributes:
        primary, reference: The ids of each side.
        target: A metric, `at_least` or `at_most`, and a value, or None.
        of: How far each run was.
    """

    primary: tuple[str, ...]
    reference: tuple[str, ...]
    target: tuple[str, str, float] | None
    of: tuple[tuple[str, str | None], ...]


class ComparisonDesk:
    """Compares sides for the page, and keeps what it found; any thread may call it.

    Nothing is stored with the runs. Of a run that goes on it is computed anew when it is asked
    for and the run has gone on.

    Args:
        source: What is looked at.
    """

    def __init__(self, source: PageSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._found: OrderedDict[_Pair, dict[str, Any]] = OrderedDict()
        self._waiting: set[_Pair] = set()
        self._queue: queue.SimpleQueue[_Pair | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def tell(self, parameters: Parameters) -> dict[str, Any]:
        """What `ComparisonEngine` says of the first side against the second, or that it computes.

        Raises:
            SchemaValidationError: A bad parameter, or not two sides.
            RunNotFoundError: There is no such run.
        """
        sides = read_sides(self._source, parameters)
        if len(sides) != 2:
            raise SchemaValidationError(f"side must name two sides, got {len(sides)}")
        pair = _Pair(sides[0].ids, sides[1].ids, _read_target(parameters), _mark(sides))
        with self._lock:
            found = self._found.get(pair)
            if found is not None:
                self._found.move_to_end(pair)
                return found
            if pair not in self._waiting and len(self._waiting) < _MOST_WAITING:
                self._waiting.add(pair)
                self._start()
                self._queue.put(pair)
        return {"state": "computing", "result": None, "note": None}

    def close(self, timeout_s: float = 0.0) -> None:
        """Compute no more; what is under way is waited for so long, or ends with the process."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._queue.put(None)
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _start(self) -> None:
        """Have the thread; the lock is held."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(
                target=self._run, name="quark-page-comparison", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        """The thread."""
        while (pair := self._queue.get()) is not None and not self._closed:
            state: Literal["computed", "failed"] = "failed"
            result, note = None, None
            try:
                result, state = self._compare(pair), "computed"
            except QuarkError as error:
                note = str(error)
            except Exception as error:  # noqa: BLE001 - a plugin's rule may raise anything
                _log.exception("runs %s cannot be compared", ", ".join(pair.primary))
                note = f"{type(error).__name__}: {error}"
            with self._lock:
                self._found[pair] = {"state": state, "result": result, "note": note}
                while len(self._found) > _MOST_KEPT:
                    self._found.popitem(last=False)
                self._waiting.discard(pair)

    def _compare(self, pair: _Pair) -> dict[str, Any]:
        from quark_core.analysis.comparison.config import ComparisonEngineConfig, MetricTargetSpec
        from quark_core.analysis.comparison.engine import ComparisonEngine
        from quark_core.sessions.session import TrainingSession

        targets: tuple[MetricTargetSpec, ...] = ()
        if pair.target is not None:
            key, direction, value = pair.target
            is_least = direction == "at_least"
            targets = (MetricTargetSpec(key, value, "at_least" if is_least else "at_most"),)
        primary, reference = (
            [TrainingSession(self._source.open_run(run_id)) for run_id in ids]
            for ids in (pair.primary, pair.reference)
        )
        result = ComparisonEngine.compare_runs(
            primary, reference, config=ComparisonEngineConfig(metric_targets=targets)
        )
        return _bound(result.to_dict())


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
        diffs.sort(key=lambda diff: (not diff["notable"], -abs(diff["log_ratio"] or 0.0)))
        result[name] = diffs[:_MOST_LAYERS]
    return result
