"""What is recorded of every run without being asked for: the machine, and the console."""

from __future__ import annotations

import logging
import math
from typing import Literal

from quark_core.config import settings
from quark_core.errors import SchemaValidationError
from quark_core.records.checks import check_choice
from quark_core.runs.open_run import OpenRun
from quark_core.writers.console import CaptureMode, ConsoleCapture
from quark_core.writers.system_metrics import SystemMetrics

_log = logging.getLogger("quark")

AUTOMATIC: Literal["auto"] = "auto"

CaptureChoice = Literal["auto", "sys", "fd"] | None

_LEAST_INTERVAL_S = 0.1


class Observers:
    """The machine and the console of one run; whatever of them fails costs a warning.

    Args:
        interval_s: Seconds between readings of the machine; 0 for none.
        capture: How the console is captured, if at all.
    """

    def __init__(self, interval_s: float, capture: CaptureMode | None) -> None:
        self._interval_s = interval_s
        self._capture = capture
        self._parts: list[SystemMetrics | ConsoleCapture] = []

    def start(self, run: OpenRun) -> None:
        """Begin to record, where this process keeps records."""
        if not run.stream.active or run.is_over or run.forked:
            return
        if self._capture is not None:
            self._begin(ConsoleCapture(run, self._capture))
        if self._interval_s > 0:
            self._begin(SystemMetrics(run, self._interval_s))

    def stop(self) -> None:
        """Record what there is so far, and no more."""
        while self._parts:
            part = self._parts.pop()
            try:
                part.stop()
            except Exception:  # noqa: BLE001 - the run must end all the same
                _log.exception("%s could not finish", type(part).__name__)

    def _begin(self, part: SystemMetrics | ConsoleCapture) -> None:
        try:
            part.start()
        except Exception as error:  # noqa: BLE001 - training must begin all the same
            _log.warning("%s is off: %s: %s", type(part).__name__, type(error).__name__, error)
            return
        self._parts.append(part)


def choose_observers(system_metrics: object, capture: object) -> Observers:
    """What a run's arguments and the environment ask for.

    Raises:
        SchemaValidationError: One of them is bad; the message names it.
    """
    return Observers(_choose_interval_s(system_metrics), _choose_mode(capture))


def _choose_interval_s(given: object) -> float:
    if given is None:
        return settings.system_metrics_interval_s()
    if given is True:
        return settings.SYSTEM_METRICS_S
    if given is False:
        return 0.0
    if not isinstance(given, (int, float)) or not math.isfinite(given) or given < 0:
        raise SchemaValidationError(
            f"system_metrics must be True, False or a number of seconds, got {given!r:.60}"
        )
    return max(_LEAST_INTERVAL_S, float(given)) if given else 0.0


def _choose_mode(given: object) -> CaptureMode | None:
    if given is None:
        return None
    mode = check_choice(given, "capture", (AUTOMATIC, "sys", "fd", "none"))
    mode = settings.capture_mode() if mode == AUTOMATIC else mode
    return None if mode == "none" else mode  # type: ignore[return-value]
