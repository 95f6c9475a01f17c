"""Ends several things, whatever each of them raises."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack


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
