"""Times as people write them: a day, an hour or a second stands for all of it."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

_ISO = re.compile(
    r"(?P<year>\d{4})(?:-(?P<month>\d\d)(?:-(?P<day>\d\d)(?:[T ](?P<hour>\d\d)"
    r"(?::(?P<minute>\d\d)(?::(?P<second>\d\d)(?:[.,](?P<fraction>\d{1,6}))?)?)?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?)?)?)?",
    re.IGNORECASE | re.ASCII,
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LENGTHS = (
    ("second", timedelta(seconds=1)),
    ("minute", timedelta(minutes=1)),
    ("hour", timedelta(hours=1)),
    ("day", timedelta(days=1)),
)


class Period(NamedTuple):
    """From `start_us` to before `end_us`, in microseconds since the epoch, UTC."""

    start_us: int
    end_us: int


@lru_cache(maxsize=1024)
def parse_period(text: str) -> Period:
    """What an ISO 8601 text stands for: `2026-11-01` is a day, `2026-11` a month.

    Without an offset it is UTC. A moment is before a period, in it, or after it.

    Raises:
        ValueError: Not a year, month, day or time in ISO 8601.
    """
    found = _ISO.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"not ISO 8601: {text!r}")
    parts: dict[str, str | None] = found.groupdict()

    def read(name: str, default: int) -> int:
        return int(parts[name] or default)

    moment = datetime(
        read("year", 1),
        read("month", 1),
        read("day", 1),
        read("hour", 0),
        read("minute", 0),
        read("second", 0),
        int((parts["fraction"] or "").ljust(6, "0")),
        UTC,
    )
    start_us = (moment - _EPOCH) // _MICROSECOND - _find_offset(parts["zone"]) // _MICROSECOND
    return Period(start_us, start_us + _find_length(parts, moment) // _MICROSECOND)


def _find_offset(zone: str | None) -> timedelta:
    if zone is None or zone in "Zz":
        return timedelta(0)
    hours, minutes = int(zone[1:3]), int(zone[-2:])
    if hours > 23 or minutes > 59:
        raise ValueError(f"no such offset: {zone}")
    offset = timedelta(hours=hours, minutes=minutes)
    return -offset if zone[0] == "-" else offset


def _find_length(parts: dict[str, str | None], moment: datetime) -> timedelta:
    fraction = parts["fraction"]
    if fraction is not None:
        return timedelta(microseconds=10 ** (6 - len(fraction)))
    for name, length in _LENGTHS:
        if parts[name] is not None:
            return length
    months = 1 if parts["month"] is not None else 12
    following = moment.month - 1 + months
    year = moment.year + following // 12
    if year > 9999:
        return timedelta(days=31 if months == 1 else 365)
    return moment.replace(year=year, month=following % 12 + 1) - moment
