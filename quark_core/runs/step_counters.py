"""Steps as training code counts them: counters that wrap, and floats that are whole."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from quark_core.records import MetricRecord
from quark_core.records.query import check_index, find_whole

if TYPE_CHECKING:
    from quark_core.runs.open_run import OpenRun

_log = logging.getLogger("quark")

_WIDTH = re.compile(r"int(\d+)$")
_USUAL_BITS = 32


def read_step(run: OpenRun, value: object, argument: str = "step") -> int | None:
    """The step that a call gives; None stays None.

    A counter of fixed width that has wrapped counts on, which is said once; not in strict mode.

    Args:
        run: The run, whose newest step tells where a counter was.
        value: An integer of any library, or a float that is whole.
        argument: How errors name it.

    Raises:
        SchemaValidationError: Neither, negative without having wrapped, or beyond 64 bits.
    """
    if value is None:
        return None
    number = find_whole(value)
    if number is None:
        return check_index(value, argument)
    width = _WIDTH.search(str(getattr(value, "dtype", "")))
    bits = _USUAL_BITS if width is None else int(width[1])
    # A loop over a narrower counter may just begin anew.
    can_wrap = number < 0 or (width is not None and bits == _USUAL_BITS)
    if can_wrap and not run.strict:
        number = _unwrap(run, number, min(bits, _USUAL_BITS))
    return check_index(number, argument)


def find_newest_step(run: OpenRun) -> int | None:
    """The step that training has come to: the session's, or that of the newest metric."""
    if run.step is not None:
        return run.step
    channel = run.stream.channel(MetricRecord.KIND)
    try:
        item = channel.items[-1]
    except IndexError:
        item = channel.newest
    if item is None:
        return None
    step: int | None = item[2] if type(item) is tuple else item.step
    return step


def _unwrap(run: OpenRun, number: int, bits: int) -> int:
    """Where a counter is that has so many bits: the nearest to the run's newest step."""
    span, quarter = 1 << bits, 1 << (bits - 2)
    newest = find_newest_step(run) or 0
    if number < -2 * quarter or (number >= -quarter and newest < quarter):
        return number
    laps = max(int(number < 0), (newest - number + span // 2) // span)
    if laps and run.warns_first("wrapped_steps"):
        _log.warning(
            "run %s: the %d-bit step counter overflowed to %d. Quark continues it as %d. Use a "
            "64-bit counter to avoid this.",
            run.context.run_id,
            bits,
            number,
            number + laps * span,
        )
    return number + laps * span
