"""The clock of records."""

from __future__ import annotations

from datetime import datetime
from time import time_ns

from quark_core.errors import SchemaValidationError
from quark_core.records.base import parse_time


def now_us() -> int:
    """Microseconds since the epoch, UTC."""
    return time_ns() // 1000


def check_timestamp(timestamp: object) -> int:
    """Microseconds of an ISO 8601 text or a datetime; without an offset it is UTC.

    Raises:
        SchemaValidationError: It is neither.
    """
    if isinstance(timestamp, datetime):
        timestamp = timestamp.isoformat()
    if not isinstance(timestamp, str):
        raise SchemaValidationError(
            f"timestamp must be an ISO 8601 str, not {type(timestamp).__name__}"
        )
    try:
        return parse_time(timestamp)
    except (ValueError, OverflowError):
        raise SchemaValidationError(
            f"timestamp must be ISO 8601 such as 2026-05-07T09:30:00Z, got {timestamp!r}"
        ) from None
