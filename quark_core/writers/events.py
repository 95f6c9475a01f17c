"""EventLogger: structured events and log lines.

Severities where none is given:

    debug     probe_completed
    warning   runtime_interruption, non_finite_metric, early_stopping,
              gradient_overflow, step_skipped, and every type that ends in
              `_warning`
    error     runtime_error, and every type that ends in `_error` or `_failed`
    critical  divergence, out_of_memory
    info      everything else, such as run_started, run_resumed, run_ended,
              epoch_started, epoch_completed, checkpoint_saved,
              checkpoint_loaded, evaluation_completed, metric_recovered
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from quark_core.errors import SchemaValidationError
from quark_core.json_object import JsonObject, normalize_object
from quark_core.names import check_text
from quark_core.open_run import OpenRun
from quark_core.query import Query, check_index
from quark_core.records import EventRecord
from quark_core.schema import (
    EVENT_SEVERITIES,
    LOG_IDENTIFIERS,
    RESERVED_LOG_KEYS,
    check_event_type,
)
from quark_core.times import check_timestamp
from quark_core.writers.base import BufferedWriter

__all__ = ["DEFAULT_SEVERITIES", "EventLogger", "default_severity", "emit_log"]

DEFAULT_SEVERITIES: Mapping[str, str] = {
    "probe_completed": "debug",
    "early_stopping": "warning",
    "gradient_overflow": "warning",
    "non_finite_metric": "warning",
    "runtime_interruption": "warning",
    "step_skipped": "warning",
    "runtime_error": "error",
    "divergence": "critical",
    "out_of_memory": "critical",
}
_SUFFIXES = (("_warning", "warning"), ("_error", "error"), ("_failed", "error"))


def default_severity(event_type: str) -> str:
    """Severity of an event type that was logged without one; see the module's table."""
    known = DEFAULT_SEVERITIES.get(event_type)
    if known is not None:
        return known
    return next((s for suffix, s in _SUFFIXES if event_type.endswith(suffix)), "info")


class EventLogger(BufferedWriter[EventRecord]):
    """Logs structured events. Every method may be called from any thread."""

    KIND: ClassVar[str] = EventRecord.KIND

    def log(
        self,
        event_type: str,
        *,
        severity: str | None = None,
        step: int | None = None,
        epoch: int | None = None,
        status: str | None = None,
        payload: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> EventRecord:
        """Log one event; returns at once.

        Args:
            event_type: A lowercase letter, then lowercase letters, digits,
                `_`, `.`, `/` or `-`.
            severity: debug, info, warning, error or critical; by default what
                the table in this module says.
            step: Step counter, or None.
            epoch: Epoch counter, or None.
            status: Free status text, or None.
            payload: JSON values, taken as they are now.
            timestamp: ISO 8601 text; now by default.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
            InvalidRunStateError: The logger is closed or the run has ended.
        """
        self._check_open("log")
        event_type = check_event_type(event_type)
        if severity is None:
            severity = default_severity(event_type)
        elif not isinstance(severity, str) or severity not in EVENT_SEVERITIES:
            raise SchemaValidationError(
                f"severity must be one of {', '.join(EVENT_SEVERITIES)}, got {_name(severity)}"
            )
        record = _emit(
            self._run,
            event_type,
            str(severity),
            step,
            epoch,
            status,
            normalize_object(payload, "payload"),
            timestamp,
        )
        self._remember(record, 1)
        return record

    def add_log(
        self,
        message: str,
        *,
        identifier: str | None = "Info",
        step: int | None = None,
        epoch: int | None = None,
        status: str | None = None,
        payload: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
        event_type: str = "user_log",
    ) -> EventRecord:
        """Log one line of text; arguments as in `TrainingSession.add_log`, returns at once.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
            InvalidRunStateError: The logger is closed or the run has ended.
        """
        self._check_open("add_log")
        record = emit_log(
            self._run,
            message,
            identifier=identifier,
            step=step,
            epoch=epoch,
            status=status,
            payload=payload,
            timestamp=timestamp,
            event_type=event_type,
        )
        self._remember(record, 1)
        return record

    def read(
        self,
        *,
        event_type: str | None = None,
        event_types: Iterable[str] | None = None,
        severity: str | None = None,
        step: int | None = None,
        step_min: int | None = None,
        step_max: int | None = None,
        epoch: int | None = None,
        epoch_min: int | None = None,
        epoch_max: int | None = None,
        limit: int | None = None,
    ) -> tuple[EventRecord, ...]:
        """Flush, then return the run's events that fit, in persistence order.

        Args:
            event_type: Only this type.
            event_types: Only these types.
            severity: Only this severity.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.
            limit: The newest N.

        Raises:
            SchemaValidationError: A bound is no non-negative integer.
            SessionStoreError: The store cannot be read.
        """
        if severity is not None and severity not in EVENT_SEVERITIES:
            raise SchemaValidationError(
                f"severity must be one of {', '.join(EVENT_SEVERITIES)}, got {_name(severity)}"
            )
        if isinstance(event_types, str):
            raise SchemaValidationError("event_types must be an iterable of str, not one str")
        query = Query.build(
            equals={"event_type": event_type, "severity": severity},
            any_of={"event_type": None if event_types is None else tuple(event_types)},
            step=step,
            step_min=step_min,
            step_max=step_max,
            epoch=epoch,
            epoch_min=epoch_min,
            epoch_max=epoch_max,
            limit=limit,
        )
        return self._run.read(self.KIND, query).to_records()  # type: ignore[return-value]


def emit_log(
    run: OpenRun,
    message: str,
    *,
    identifier: str | None = "Info",
    step: int | None = None,
    epoch: int | None = None,
    status: str | None = None,
    payload: Mapping[str, Any] | None = None,
    timestamp: str | None = None,
    event_type: str = "user_log",
    always: bool = False,
) -> EventRecord:
    """Check a log line and put it into the run's stream.

    Args:
        run: The run.
        always: Also where the run is strict and has failed.
        message, identifier, step, epoch, status, payload, timestamp, event_type:
            As in `TrainingSession.add_log`.
    """
    if run.refusal is not None and not always:
        run.refuse("add_log")
    if not isinstance(message, str):
        raise SchemaValidationError(f"message must be a str, not {type(message).__name__}")
    identifier = "Info" if identifier is None else identifier
    severity = LOG_IDENTIFIERS.get(identifier) if isinstance(identifier, str) else None
    if severity is None:
        raise SchemaValidationError(
            f"identifier must be one of {', '.join(LOG_IDENTIFIERS)}, got {_name(identifier)}"
        )
    extra: Mapping[str, Any] = normalize_object(payload, "payload") or {}
    for key in RESERVED_LOG_KEYS:
        if key in extra:
            raise SchemaValidationError(f"payload must not hold the reserved key {key!r}")
    body = normalize_object({"message": message, "identifier": identifier, **extra}, "payload")
    event_type = check_event_type(event_type)
    return _emit(run, event_type, severity, step, epoch, status, body, timestamp)


def _emit(
    run: OpenRun,
    event_type: str,
    severity: str,
    step: int | None,
    epoch: int | None,
    status: str | None,
    payload: JsonObject | None,
    timestamp: str | None,
) -> EventRecord:
    if status is not None:
        status = check_text(status, "status")
    return run.emit_event(
        event_type,
        severity,
        step=check_index(step, "step"),
        epoch=check_index(epoch, "epoch"),
        status=status,
        payload=payload,
        time_us=None if timestamp is None else check_timestamp(timestamp),
    )


def _name(value: object) -> str:
    """A bad argument for a message; its repr may be of any length, or raise."""
    return repr(value)[:60] if type(value) is str else f"a {type(value).__name__}"
