"""Formats of durations, sizes and values for people, the same on each surface.

The page writes them in JavaScript: `quark/page/static/pages/texts.js`. The tests of both read one
table of cases, `tests/quark/formats.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400
_UNITS_OF_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_UNITS_OF_SIZE = ("B", "kB", "MB", "GB", "TB")


def format_duration(seconds: float) -> str:
    """How long something took: 4.2 s, 3 min 05 s, 2 h 07 min, 3 d 04 h."""
    if seconds < _MINUTE_S:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} min {whole % _MINUTE_S:02d} s"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S:02d} min"
    return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S:02d} h"


def format_span(seconds: float) -> str:
    """About how long, in one unit: 4.2 s, 90 s, 5 min, 2.5 h, 3 d."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    size, unit = (_HOUR_S, "h") if seconds < 2 * _DAY_S else (_DAY_S, "d")
    return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"


def format_age(moment: str) -> str:
    """How long ago a moment in ISO 8601 was: just now, 5 min ago, 3 h ago, or its date."""
    age_s = (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
    if age_s < _MINUTE_S:
        return "just now"
    if age_s < _HOUR_S:
        return f"{age_s // _MINUTE_S:.0f} min ago"
    return f"{age_s // _HOUR_S:.0f} h ago" if age_s < _DAY_S else moment[:10]


def format_seconds(seconds: float | None) -> str:
    """A measured time in the unit that suits it: 12.5 ms, 3.25 s."""
    if seconds is None:
        return "-"
    for size, unit in _UNITS_OF_TIME:
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds / size:.3g} {unit}"


def format_value(value: float | None) -> str:
    """A value of a metric in at most ten characters; an exponent where it is large or small."""
    if value is None:
        return "-"
    size = abs(value)
    if value == 0 or 1e-3 <= size < 1e6:
        return f"{value:.5g}" if size < 99_999.5 else f"{value:.0f}"
    mantissa, mark, exponent = f"{value:.3e}".partition("e")
    return f"{mantissa}e{int(exponent):+d}" if mark else mantissa


def format_bytes(size_bytes: float) -> str:
    """A size such as 512 B, 1.2 kB, 34.5 MB; kB are 1000 bytes."""
    value = float(size_bytes)
    for unit in _UNITS_OF_SIZE:
        # What would be shown as 1000.0 is one of the next unit.
        if abs(value) < 999.95 or unit == _UNITS_OF_SIZE[-1]:
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def format_count(number: int, noun: str) -> str:
    """`1 file`, `3 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def join_first(names: Sequence[object], most: int) -> str:
    """The first names, and how many there are besides: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
