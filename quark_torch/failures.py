"""Failures of instrumentation: each is logged once, and none keeps the rest from ending."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from quark_core.api import OpenRun, cut_text, normalize_object


def do_each(*parts: Callable[[], object]) -> Exception | None:
    """Do every part in order, whatever the ones before it have raised.

    Returns:
        The first exception, or None.

    Raises:
        BaseException: What is no Exception, such as a KeyboardInterrupt; the
            parts after it are done all the same.
    """
    raised: list[Exception] = []

    def do(part: Callable[[], object]) -> None:
        try:
            part()
        except Exception as error:  # noqa: BLE001 - the caller decides, once all is done
            raised.append(error)

    with ExitStack() as stack:
        for part in reversed(parts):
            stack.callback(do, part)
    return raised[0] if raised else None


_log = logging.getLogger("quark.torch")

_MAX_NOTICES = 50
_MAX_TEXT = 400


class InstrumentationNotices:
    """Turns what is odd or went wrong into one event, and one line of the log, for each reason.

    Every payload has a component and a message.

    Args:
        run: The run.
        component: Who tells, such as `ParameterDiagnostics`.
    """

    def __init__(self, run: OpenRun, component: str) -> None:
        self._run = run
        self._component = component
        self._told: set[object] = set()
        self._lock = threading.Lock()

    def warn(
        self,
        event_type: str,
        message: str,
        *,
        key: object = None,
        step: int | None = None,
        severity: str = "warning",
        **payload: Any,
    ) -> None:
        """Tell of something odd, once for each type of event, or for each key."""
        self._tell((event_type, key), event_type, severity, message, step, payload)

    def fail(self, where: str, error: Exception, *, step: int | None = None) -> None:
        """Tell of an exception, once for each place and class of it; in strict mode raise it."""
        reason = cut_text(f"{type(error).__name__}: {error}", _MAX_TEXT)
        self._tell(
            (where, type(error)),
            "instrumentation_failed",
            "error",
            f"{self._component}: {where}; training continues: {reason}",
            step,
            {"where": where, "reason": reason},
        )
        if self._run.strict:
            raise error

    def _tell(
        self,
        key: object,
        event_type: str,
        severity: str,
        message: str,
        step: int | None,
        extra: dict[str, Any],
    ) -> None:
        with self._lock:
            if key in self._told or len(self._told) >= _MAX_NOTICES:
                return
            self._told.add(key)
        run = self._run
        level = logging.INFO if severity == "info" else logging.WARNING
        _log.log(level, "run %s: %s", run.context.run_id, message)
        if not run.is_over:
            payload = {
                "component": self._component,
                "message": cut_text(message, _MAX_TEXT),
                **extra,
            }
            run.emit_event(
                event_type, severity, step=step, payload=normalize_object(payload, "payload")
            )
