"""LoggingHandler: records of the standard library's `logging` become events of a run."""

from __future__ import annotations

import logging
import math
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from typing import Any

from quark_core.config.redaction import cut_text, redact_text
from quark_core.errors import (
    InvalidRunStateError,
    SchemaValidationError,
    SessionStoreError,
    StopRequested,
    TrainingHalted,
)
from quark_core.records.base import format_time
from quark_core.records.json_object import JsonObject, encode_json, normalize_json
from quark_core.records.query import check_step
from quark_core.writers.events import EventLogger

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
    """Sends log records to a run, as events of the type `log_record`.

        logging.getLogger().addHandler(quark.LoggingHandler(session, level=logging.INFO))

    Or by `logging.config.dictConfig`, with the session or an EventLogger as an
    object:

        "handlers": {"run": {"()": "quark.LoggingHandler", "events": session, "level": "INFO"}}

    The severity follows from the level: from 50 on critical, from 40 error,
    from 30 warning, from 20 info, below it debug. `step` and `epoch`, given as
    `extra={"step": 3}`, become those of the event. The time is that of the log
    record. The payload holds:

        level, logger   their names
        message         formatted with its arguments: by the handler's
                        formatter, where one was set that is not the default
                        one of `logging.basicConfig`
        exception       type, message and traceback, where there is one
        stack           where it was asked for
        file, line, function
        thread          its name, where it is not the main thread
        process         its name, where it is not the main process
        extra           fields of `extra=` that are JSON values
        notes           what could not be formatted, and what was left out

    Texts are redacted, and cut after 65,536 characters. A message that cannot
    be formatted is sent as its template.

    Logging never waits and never raises, from any thread, in forked children
    too: a record that comes after the run has ended, or its EventLogger was
    closed, is dropped, and so are all after it. Dropped as well are records of
    Quark's own loggers (`quark` and below) and threads, and what is logged
    while a record is made into an event.

    Args:
        events: An EventLogger; or a TrainingSession or a RunContext, for which
            the handler makes an EventLogger that `close()` closes.
        level: Records below it are left out.

    Raises:
        SchemaValidationError: `events` is none of these, or `level` no level.
    """

    def __init__(self, events: object, level: int | str = logging.NOTSET) -> None:
        try:
            super().__init__(level)
        except Exception:  # noqa: BLE001 - the repr of what is no level may raise anything
            raise SchemaValidationError(
                "level must be a level of logging such as logging.INFO or 'INFO', "
                f"got {_cut(_spell(level), 60)}"
            ) from None
        self._owned = not isinstance(events, EventLogger)
        self._events = _open_events(events)
        self._events.check_open("LoggingHandler")
        self._done = False

    def handle(self, record: logging.LogRecord) -> bool:
        """Send a record unless a filter refuses it; whether it passed.

        The handler's lock is not taken: an EventLogger needs none, and nobody
        who logs may wait for who is logging already.
        """
        if self._done or _is_own(record):
            return False
        # From Python 3.12 on a filter may give another record in place of this one.
        passed: object = self.filter(record)
        if passed:
            self.emit(passed if isinstance(passed, logging.LogRecord) else record)
        return bool(passed)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, whatever it holds; never waits and never raises."""
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
        """Take no more records, and close the EventLogger that the handler made; never raises."""
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
                "level": _spell(record.levelname),
                "logger": _spell(record.name),
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
                return _spell(self.formatter.format(bare))
            except Exception as error:  # noqa: BLE001 - a formatter may raise anything
                notes.append(f"the formatter failed: {_name_error(error)}")
        try:
            return _spell(record.getMessage())
        except Exception as error:  # noqa: BLE001 - the str of an argument may raise anything
            notes.append(f"the message could not be formatted: {_name_error(error)}")
            return _spell(record.msg)


def _is_own(record: logging.LogRecord) -> bool:
    """Whether Quark itself logs: what it sends would be delivered, and logged again."""
    name, thread = record.name, record.threadName
    if isinstance(name, str) and (name == _OWN_LOGGER or name.startswith(f"{_OWN_LOGGER}.")):
        return True
    # Where `logging.logThreads` is off, a record does not say its thread.
    return _spell(thread or threading.current_thread().name).startswith(_OWN_THREADS)


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
            "message": _cut(_spell(error)),
            "traceback": _cut_front(_format_traceback(error)),
        }
    elif record.exc_text:
        # So it comes out of a socket, or of a queue that takes no exceptions.
        out["exception"] = {"traceback": _cut_front(_spell(record.exc_text))}
    if record.stack_info:
        out["stack"] = _cut_front(_spell(record.stack_info))
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
        name: value if type(value) is int else _cut(_spell(value))
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
            _note(notes, f"left out: {_cut(_spell(error), _MAX_NOTE)}")
            continue
        size_bytes = len(encode_json(found))
        if size_bytes > room_bytes:
            _note(notes, f"left out: extra.{_cut(_spell(name), _MAX_NOTE)} is too large")
            continue
        room_bytes -= size_bytes
        out |= found
    return out


def _note(notes: list[str], text: str) -> None:
    if len(notes) < _MAX_NOTES:
        notes.append(text)


def _name_error(error: Exception) -> str:
    return _cut(f"{type(error).__name__}: {_spell(error)}", _MAX_NOTE)


def _spell(value: object) -> str:
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
