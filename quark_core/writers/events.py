"""EventLogger: structured events and log lines.

Severities where none is given, by the type, or by its last word (`error`,
`loader_error`, `loader/error`):

    debug     probe_completed, or the word debug
    warning   runtime_interruption, non_finite_metric, non_finite_loss,
              metric_refused, metric_sharded, early_stopping, gradient_overflow, step_skipped,
              or the words warning, warn
    error     runtime_error, or the words error, failed, failure, exception
    critical  divergence, out_of_memory, or the words critical, fatal, oom
    info      everything else, such as run_started, run_resumed, run_ended,
              epoch_started, epoch_completed, checkpoint_saved,
              checkpoint_loaded, evaluation_completed, metric_recovered

`alert_raised` is an alert of your own, with `title` and `message` in its payload: who is told of
a monitor's alerts (`notify=`) is told of it, and mirrors have it as an alert.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Unpack

from quark_core.backends.registry import default_registry
from quark_core.errors import SchemaValidationError
from quark_core.records import EventRecord
from quark_core.records.checks import check_choice, check_event_type
from quark_core.records.json_object import JsonObject, normalize_object
from quark_core.records.names import check_text
from quark_core.records.query import Query, ReadBounds, check_step, spell_out
from quark_core.records.raised_alerts import ALERT_RAISED, complete_alert
from quark_core.records.schema import EVENT_SEVERITIES, LOG_IDENTIFIERS, RESERVED_LOG_KEYS
from quark_core.records.times import check_timestamp
from quark_core.runs.open_run import OpenRun
from quark_core.runs.step_counters import read_step
from quark_core.writers.base import BufferedWriter

_log = logging.getLogger("quark")

DEFAULT_SEVERITIES: Mapping[str, str] = {
    "probe_completed": "debug",
    "early_stopping": "warning",
    "gradient_overflow": "warning",
    "metric_refused": "warning",
    "metric_sharded": "warning",
    "non_finite_loss": "warning",
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
            identifier: Info, Warning or Error; sets the event's severity. Of
                another word the severity is that of an event named so.
            step: Step counter; by default what `session.step` has set, or None.
            epoch: Epoch counter, or None.
            status: Free status text, or None.
            payload: JSON values; may not hold `message` or `identifier`.
            timestamp: ISO 8601 text; now by default.
            event_type: Type of the event.

        Raises:
            SchemaValidationError: A bad argument; the message names it. An
                unknown severity is one in strict mode alone.
            InvalidRunStateError: The logger is closed or the run has ended.
        """
        self._check_open("add_log")
        if not isinstance(message, str):
            raise SchemaValidationError(f"message must be a str, not {type(message).__name__}")
        identifier = "Info" if identifier is None else identifier
        word = _spell(identifier)
        severity = LOG_IDENTIFIERS.get(word) if isinstance(identifier, str) else None
        event_type = check_event_type(event_type)
        if severity is None:
            severity = _settle_severity(
                self._run, "identifier", identifier, LOG_IDENTIFIERS, event_type
            )
        body = make_log_payload(message, word, payload)
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
                the table in this module says, which also stands in for a word
                that it does not know.
            step: Step counter; by default what `session.step` has set, or None.
            epoch: Epoch counter, or None.
            status: Free status text, or None.
            payload: JSON values, taken as they are now.
            timestamp: ISO 8601 text; now by default.

        Raises:
            SchemaValidationError: A bad argument; the message names it. An
                unknown severity is one in strict mode alone.
            InvalidRunStateError: The logger is closed or the run has ended.
        """
        self._check_open("log")
        event_type = check_event_type(event_type)
        if severity is None:
            severity = default_severity(event_type)
        elif not isinstance(severity, str) or severity not in EVENT_SEVERITIES:
            severity = _settle_severity(
                self._run, "severity", severity, EVENT_SEVERITIES, event_type
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
        if severity is not None:
            check_choice(severity, "severity", EVENT_SEVERITIES)
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
    at = run.step if step is None else read_step(run, step)
    record = run.emit_event(
        event_type,
        severity,
        step=at,
        epoch=check_step(epoch, "epoch"),
        status=status,
        payload=complete_alert(payload, at) if event_type == ALERT_RAISED else payload,
        time_us=None if timestamp is None else check_timestamp(timestamp),
    )
    if event_type == ALERT_RAISED and severity != "debug":
        default_registry().notify("quark_finding_raised", run=run, event=record)
    return record


def _settle_severity(
    run: OpenRun, argument: str, given: object, known: Iterable[str], event_type: str
) -> str:
    """The severity of an event whose severity was given by an unknown word, which is said once.

    Raises:
        SchemaValidationError: The run is strict.
    """
    said = f"{argument} must be one of {', '.join(known)}, got {_name(given)}"
    if run.strict:
        raise SchemaValidationError(said)
    word = _spell(given).strip().lower() if isinstance(given, str) else ""
    severity = word if word in EVENT_SEVERITIES else _WORDS.get(word, default_severity(event_type))
    if run.warns_first("odd_severity"):
        _log.warning(
            "run %s: %s. Events with such a word are kept, this one as %s.",
            run.context.run_id,
            said,
            severity,
        )
    return severity


def _spell(value: object) -> str:
    """The text of an argument; a type of a program's own may spell itself wrongly, or raise."""
    if isinstance(value, str):
        return str.__str__(value)
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - foreign code may raise anything
        return _name(value)


def _name(value: object) -> str:
    """A bad argument for a message; its repr may be of any length, or raise."""
    return repr(value)[:60] if type(value) is str else f"a {type(value).__name__}"
