"""Which autograd functions run around a call; activation checkpoints are such functions."""

from __future__ import annotations

import sys

_MAX_FRAMES = 400


def find_functions() -> tuple[object | None, object | None]:
    """The autograd functions around the caller.

    Returns:
        The outermost one whose forward runs, up to the nearest one whose
        backward runs; and that one.
    """
    inner: object | None = None
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_varnames[:1] == ("ctx",):
            function = frame.f_locals.get("ctx")
            if code.co_name == "backward":
                return inner, function
            inner = function
        if frame.f_back is None:
            break
        frame = frame.f_back
    return inner, None
