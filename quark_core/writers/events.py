"""EventLogger: structured events and log lines.

Severities where none is given, by the type, or by its last word (`error`,
`loader_error`, `loader/error`):

    debug     probe_completed, or the word debug
    warning   runtime_interruption, non_finite_metric, early_stopping,
              gradient_overflow, step_skipped, or the words warning, warn
    error     runtime_error, or the words error, failed, failure, exception
    critical  divergence, out_of_memory, or the words critical, fatal, oom
    info      everything else, such as run_started, run_resumed, run_ended,
              epoch_started, epoch_completed, checkpoint_saved,
              checkpoint_loaded, evaluation_completed, metric_recovered
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Unpack

from quark_core.errors import SchemaValidationError
from quark_core.records import EventRecord
from quark_core.records.json_object import JsonObject, normalize_object
from quark_core.records.names import check_text
from quark_core.records.query import Query, ReadBounds, check_index, spell_out
from quark_core.records.schema import (
    EVENT_SEVERITIES,
    LOG_IDENTIFIERS,
    RESERVED_LOG_KEYS,
    check_event_type,
)
from quark_core.records.times import check_timestamp
from quark_core.runs.open_run import OpenRun
from quark_core.writers.base import BufferedWriter

__all__ = ["DEFAULT_SEVERITIES", "EventLogger", "LogLines", "default_severity", "make_log_payload"]

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
_WORDS = {
    "debug": "debug",
    **dict.fromkeys(("warning", "warn"), "warning"),
    **dict.fromkeys(("error", "failed", "failure", "exception"), "error"),
    **dict.fromkeys(("critical", "fatal", "oom"), "critical"),
}
_LAST_WORD = re.compile(r"[a-z0-9]*$")


def default_severity(event_type: str) -> str:
    """Severity of an event type that was logged without one; see the module's table."""
    known = DEFAULT_SEVERITIES.get(event_type)
    if known is not None:
        return known
    word = _LAST_WORD.search(event_type)
    return "info" if word is None else _WORDS.get(word.group(), "info")


class LogLines:
    """Lines of text as events of a run: what a session and an event logger have in common."""

    _run: OpenRun

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
        """Write a log line into the run and return its record.

        A logger returns at once; a session waits a moment for the journal.

        Args:
            message: The text.
            identifier: Info, Warning or Error; sets the event's severity.
            step: Step counter; by default what `session.step` has set, or None.
            epoch: Epoch counter, or None.
            status: Free status text, or None.
            payload: JSON values; may not hold `message` or `identifier`.
            timestamp: ISO 8601 text; now by default.
            event_type: Type of the event.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
            InvalidRunStateError: The logger is closed or the run has ended.
        """
        self._check_open("add_log")
        if not isinstance(message, str):
            raise SchemaValidationError(f"message must be a str, not {type(message).__name__}")
        identifier = "Info" if identifier is None else identifier
        severity = LOG_IDENTIFIERS.get(identifier) if isinstance(identifier, str) else None
        if severity is None:
            raise SchemaValidationError(
                f"identifier must be one of {', '.join(LOG_IDENTIFIERS)}, got {_name(identifier)}"
            )
        body = make_log_payload(message, identifier, payload)
        event_type = check_event_type(event_type)
        record = _emit(self._run, event_type, severity, step, epoch, status, body, timestamp)
        self._keep_log(record)
        return record

    def _check_open(self, call: str) -> None:
        raise NotImplementedError

    def _keep_log(self, record: EventRecord) -> None:
        raise NotImplementedError


class EventLogger(BufferedWriter[EventRecord], LogLines):
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
            step: Step counter; by default what `session.step` has set, or None.
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

    def _keep_log(self, record: EventRecord) -> None:
        self._remember(record, 1)

    @spell_out(ReadBounds, before="limit")
    def read(
        self,
        *,
        event_type: str | None = None,
        event_types: Iterable[str] | None = None,
        severity: str | None = None,
        limit: int | None = None,
        **bounds: Unpack[ReadBounds],
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
            **bounds,
            limit=limit,
        )
        return self._run.read(self.KIND, query).to_records()  # type: ignore[return-value]


def make_log_payload(
    message: str, identifier: str, payload: Mapping[str, Any] | None
) -> JsonObject | None:
    """The payload of a log line's event.

    Raises:
        SchemaValidationError: No JSON values, or a key that is reserved.
    """
    extra: Mapping[str, Any] = normalize_object(payload, "payload") or {}
    for key in RESERVED_LOG_KEYS:
        if key in extra:
            raise SchemaValidationError(f"payload must not hold the reserved key {key!r}")
    return normalize_object({"message": message, "identifier": identifier, **extra}, "payload")


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
        step=run.step if step is None else check_index(step, "step"),
        epoch=check_index(epoch, "epoch"),
        status=status,
        payload=payload,
        time_us=None if timestamp is None else check_timestamp(timestamp),
    )


def _name(value: object) -> str:
    """A bad argument for a message; its repr may be of any length, or raise."""
    return repr(value)[:60] if type(value) is str else f"a {type(value).__name__}"
