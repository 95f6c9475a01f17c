"""EventLogger: structured events and log lines; LoggingHandler: records of `logging` as events.

Severities where none is given, by the type, or by its last word (`error`, `loader_error`,
`loader/error`):

    debug     probe_completed, or the word debug
    warning   runtime_interruption, non_finite_metric, non_finite_loss, metric_refused,
              metric_sharded, early_stopping, gradient_overflow, step_skipped, or the words
              warning, warn
    error     runtime_error, or the words error, failed, failure, exception
    critical  divergence, out_of_memory, or the words critical, fatal, oom
    info      everything else, such as run_started, run_resumed, run_ended, epoch_started,
              epoch_completed, checkpoint_saved, checkpoint_loaded, evaluation_completed,
              metric_recovered

`alert_raised` is an alert of your own, with `title` and `message` in its payload: who is told of
a monitor's alerts (`notify=`) is told of it, and mirrors have it as an alert.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import copy
from typing import Any, ClassVar, Unpack

from quark_core.backends.registry import default_registry
from quark_core.config.redaction import cut_text, redact_text
from quark_core.errors import (
    InvalidRunStateError,
    SchemaValidationError,
    SessionStoreError,
    StopRequested,
    TrainingHalted,
)
from quark_core.records import EventRecord
from quark_core.records.base import check_timestamp, format_time
from quark_core.records.checks import check_choice, check_event_type
from quark_core.records.json_object import JsonObject, encode_json, normalize_json, normalize_object
from quark_core.records.kinds.findings import ALERT_RAISED, complete_alert
from quark_core.records.names import check_text
from quark_core.records.query import Query, ReadBounds, check_step, spell_out
from quark_core.records.schema import EVENT_SEVERITIES, LOG_IDENTIFIERS, RESERVED_LOG_KEYS
from quark_core.runs.open_run import OpenRun
from quark_core.runs.step_counters import read_step
from quark_core.writers.buffered_writer import BufferedWriter

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
        """Log a message to the run, and return its record.

        A logger returns at once. A session waits briefly for the journal.

        Args:
            message: The message.
            identifier: `Info`, `Warning` or `Error`; sets the severity. Other words use the
                severity of an event of that name. Defaults to `Info`.
            step: Step. Defaults to the step set by `session.step`, or None.
            epoch: Epoch, or None.
            status: Free status text, or None.
            payload: JSON values, without the keys `message` and `identifier`.
            timestamp: Time as ISO 8601 text. Defaults to now.
            event_type: Type of the event. Defaults to `user_log`.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it. An unknown severity
                raises in strict mode only.
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
    """Writer and reader of structured events. Thread-safe.

    Args:
        session: A TrainingSession, or its RunContext.
    """

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
            event_type: Type: a lowercase letter, then lowercase letters, digits, `_`, `.`, `/` or
                `-`.
            severity: `debug`, `info`, `warning`, `error` or `critical`. Defaults to the severity of
                known event types, then to `info`. Unknown words use this default.
            step: Step. Defaults to the step set by `session.step`, or None.
            epoch: Epoch, or None.
            status: Free status text, or None.
            payload: JSON values; copied.
            timestamp: Time as ISO 8601 text. Defaults to now.

        Returns:
            The record of the event.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it. An unknown severity
                raises in strict mode only.
            InvalidRunStateError: The writer is closed or the run has ended.
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
        """Flush, then read the run's events in order of storage.

        Args:
            event_type, severity: Exact values to match.
            event_types: Types to include.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.
            limit: Maximum number of events; the newest are kept. Defaults to all.

        Raises:
            SchemaValidationError: A bound is not a non-negative integer.
            SessionStoreError: The store cannot be read.
        """
        if severity is not None:
            check_choice(severity, "severity", EVENT_SEVERITIES)
        if isinstance(event_types, str):
            raise SchemaValidationError("event_types must be an iterable of str, not a single str")
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
            raise SchemaValidationError(f"payload must not contain the reserved key {key!r}")
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
    said = f"{argument} must be one of {', '.join(map(repr, known))}, got {_name(given)}"
    if run.strict:
        raise SchemaValidationError(said)
    word = _spell(given).strip().lower() if isinstance(given, str) else ""
    severity = word if word in EVENT_SEVERITIES else _WORDS.get(word, default_severity(event_type))
    if run.warns_first("odd_severity"):
        _log.warning(
            "run %s: %s. Events with this value are stored; this one is stored as %s.",
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
    return repr(value)[:60] if type(value) is str else type(value).__name__


LOG_EVENT_TYPE = "log_record"
"""The type of the events that the handler makes."""

_MAX_CHARACTERS = 64 * 1024
# Longer than any secret that a cut could go through.
_MARGIN = 8 * 1024
_MAX_NOTES = 20
_MAX_NOTE = 500
_CUT = "…[cut]…"
_OWN_LOGGER = "quark"
_OWN_THREADS = "quark-"
# What a record has by itself; everything else came by `extra=`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"asctime", "message", "taskName"}
_COUNTERS = ("step", "epoch")
_MAX_TIME_S = 253_402_300_799  # the end of the year 9999

_emitting = threading.local()


class LoggingHandler(logging.Handler):
    """Handler that sends records of Python's `logging` to a run.

    Each record becomes a `log_record` event. With `logging.config.dictConfig`, use `{"()":
    "quark.LoggingHandler", "events": session}`.

    The severity follows from the level. `step` and `epoch` in `extra={"step": 3}` become those of
    the event. The payload has

    - `level` and `logger`: names
    - `message`: the message, formatted by the handler's formatter if one is set
    - `exception` and `stack`: if present
    - `file`, `line` and `function`
    - `thread` and `process`: if not the main ones
    - `extra`: fields that are JSON values
    - `notes`: problems in formatting, and omitted parts

    Texts are redacted and truncated to 65,536 characters. A message that cannot be formatted is
    sent as its template.

    Logging does not wait or raise, in any thread or forked child. Records after the end of the run,
    from Quark's own loggers, and from within the handler are dropped.

    Args:
        events: An EventLogger, or a TrainingSession or RunContext. In the latter case the handler
            creates an EventLogger and closes it in `close()`.
        level: Minimum level. Defaults to all.

    Raises:
        SchemaValidationError: `events` or `level` is invalid.

    Example:
        logging.getLogger().addHandler(quark.LoggingHandler(session, level=logging.INFO))
    """

    def __init__(self, events: object, level: int | str = logging.NOTSET) -> None:
        try:
            super().__init__(level)
        except Exception:  # noqa: BLE001 - the repr of what is no level may raise anything
            raise SchemaValidationError(
                "level must be a logging level such as logging.INFO or 'INFO', got "
                f"{_cut(_spell_safely(level), 60)}"
            ) from None
        self._owned = not isinstance(events, EventLogger)
        self._events = _open_events(events)
        self._events.check_open("LoggingHandler")
        self._done = False

    def handle(self, record: logging.LogRecord) -> bool:
        """Send a record unless a filter rejects it, and return whether it passed.

        Does not take the handler's lock, which an EventLogger does not need.
        """
        if self._done or _is_own(record):
            return False
        # From Python 3.12 on a filter may give another record in place of this one.
        passed: object = self.filter(record)
        if passed:
            self.emit(passed if isinstance(passed, logging.LogRecord) else record)
        return bool(passed)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record without waiting or raising."""
        if self._done or _is_own(record) or getattr(_emitting, "now", False):
            return
        try:
            _emitting.now = True
            self._send(record)
        except (StopRequested, TrainingHalted) as halt:
            # Who logs a text must not be stopped by it: the next call of a writer is.
            self._events.open_run.halt(halt)
        except (InvalidRunStateError, SessionStoreError):
            self._done = True
        except Exception:  # noqa: BLE001 - logging must not end a training
            with suppress(Exception):
                self.handleError(record)
        finally:
            _emitting.now = False

    def close(self) -> None:
        """Accept no more records, and close an EventLogger that the handler created."""
        self._done = True
        if self._owned:
            # The error of a strict run is raised by its session.
            with suppress(SessionStoreError):
                self._events.close()
            self._owned = False
        super().close()

    def _send(self, record: logging.LogRecord) -> None:
        notes: list[str] = []
        step, epoch = (_read_counter(record, name) for name in _COUNTERS)
        message = _cut(self._format_message(record, notes))
        fields = dict(vars(record))
        for name, found in zip(_COUNTERS, (step, epoch), strict=True):
            if found is not None:
                fields.pop(name, None)
        extra = _take_extra(fields, notes)
        payload = normalize_json(
            {
                "level": _spell_safely(record.levelname),
                "logger": _spell_safely(record.name),
                "message": message,
                **_describe_exception(record),
                **_describe_place(record),
            },
            "payload",
        )
        if extra:
            payload["extra"] = extra
        if notes:
            payload["notes"] = normalize_json(notes, "notes")
        self._events.log(
            LOG_EVENT_TYPE,
            severity=_find_severity(record.levelno),
            step=step,
            epoch=epoch,
            payload=JsonObject(payload),
            timestamp=_format_time(record.created),
        )

    def _format_message(self, record: logging.LogRecord, notes: list[str]) -> str:
        if self.formatter is not None and not _is_of_basic_config(self.formatter):
            try:
                # A formatter would append what the payload has in fields of its own.
                bare = copy(record)
                bare.exc_info = bare.exc_text = bare.stack_info = None
                return _spell_safely(self.formatter.format(bare))
            except Exception as error:  # noqa: BLE001 - a formatter may raise anything
                notes.append(f"the formatter failed: {_name_error(error)}")
        try:
            return _spell_safely(record.getMessage())
        except Exception as error:  # noqa: BLE001 - the str of an argument may raise anything
            notes.append(f"the message could not be formatted: {_name_error(error)}")
            return _spell_safely(record.msg)


def _is_own(record: logging.LogRecord) -> bool:
    """Whether Quark itself logs: what it sends would be delivered, and logged again."""
    name, thread = record.name, record.threadName
    if isinstance(name, str) and (name == _OWN_LOGGER or name.startswith(f"{_OWN_LOGGER}.")):
        return True
    # Where `logging.logThreads` is off, a record does not say its thread.
    return _spell_safely(thread or threading.current_thread().name).startswith(_OWN_THREADS)


def _open_events(events: object) -> EventLogger:
    if isinstance(events, EventLogger):
        return events
    try:
        return EventLogger(events)
    except SchemaValidationError:
        raise SchemaValidationError(
            "events must be an EventLogger, a TrainingSession or a RunContext, "
            f"not {type(events).__name__}"
        ) from None


def _is_of_basic_config(formatter: logging.Formatter) -> bool:
    """Whether it is what `logging.basicConfig` gives handlers that have none.

    It puts before the message what the payload has in fields of its own.
    """
    return getattr(formatter, "_fmt", None) == logging.BASIC_FORMAT


def _find_severity(level: object) -> str:
    if not isinstance(level, (int, float)):
        return "info"
    steps = ((50, "critical"), (40, "error"), (30, "warning"), (20, "info"))
    return next((severity for least, severity in steps if level >= least), "debug")


def _format_time(created: object) -> str | None:
    """The record's own time, or None, for now, where it has none."""
    if not isinstance(created, (int, float)) or not math.isfinite(created):
        return None
    return format_time(round(created * 1e6)) if 0 <= created <= _MAX_TIME_S else None


def _describe_exception(record: logging.LogRecord) -> dict[str, Any]:
    out: dict[str, Any] = {}
    info = record.exc_info
    error = info[1] if isinstance(info, tuple) and len(info) == 3 else None
    if isinstance(error, BaseException):
        out["exception"] = {
            "type": type(error).__name__,
            "message": _cut(_spell_safely(error)),
            "traceback": _cut_front(_format_traceback(error)),
        }
    elif record.exc_text:
        # So it comes out of a socket, or of a queue that takes no exceptions.
        out["exception"] = {"traceback": _cut_front(_spell_safely(record.exc_text))}
    if record.stack_info:
        out["stack"] = _cut_front(_spell_safely(record.stack_info))
    return out


def _format_traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as failure:  # noqa: BLE001 - exceptions of others may raise anything
        return f"<traceback that raised {type(failure).__name__}>"


def _describe_place(record: logging.LogRecord) -> dict[str, Any]:
    place = {
        "file": record.pathname,
        "line": record.lineno,
        "function": record.funcName,
        "thread": None if record.threadName == "MainThread" else record.threadName,
        "process": None if record.processName == "MainProcess" else record.processName,
        "task": getattr(record, "taskName", None),
    }
    return {
        name: value if type(value) is int else _cut(_spell_safely(value))
        for name, value in place.items()
        if value is not None
    }


def _read_counter(record: logging.LogRecord, name: str) -> int | None:
    """A step or an epoch that was given by `extra=`; None where it is none."""
    try:
        return check_step(getattr(record, name, None), name)
    except SchemaValidationError:
        return None


def _take_extra(fields: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """What was given by `extra=` and can be kept; a note says what cannot."""
    out: dict[str, Any] = {}
    room_bytes = _MAX_CHARACTERS
    for name, value in fields.items():
        if name in _STANDARD:
            continue
        try:
            found = normalize_json({name: value}, "extra")
        except SchemaValidationError as error:
            _note(notes, f"left out: {_cut(_spell_safely(error), _MAX_NOTE)}")
            continue
        size_bytes = len(encode_json(found))
        if size_bytes > room_bytes:
            _note(notes, f"omitted: extra.{_cut(_spell_safely(name), _MAX_NOTE)} is too large")
            continue
        room_bytes -= size_bytes
        out |= found
    return out


def _note(notes: list[str], text: str) -> None:
    if len(notes) < _MAX_NOTES:
        notes.append(text)


def _name_error(error: Exception) -> str:
    return _cut(f"{type(error).__name__}: {_spell_safely(error)}", _MAX_NOTE)


def _spell_safely(value: object) -> str:
    """The text of anything; never raises."""
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - a foreign object may raise anything
        return f"<{type(value).__name__} whose str raised {type(error).__name__}>"


def _cut(text: str, characters: int = _MAX_CHARACTERS) -> str:
    return text if len(text) <= characters else cut_text(text, characters) + _CUT


def _cut_front(text: str) -> str:
    """The end of a traceback says more than its beginning."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    return _CUT + redact_text(text[-_MAX_CHARACTERS - _MARGIN :])[-_MAX_CHARACTERS:]
