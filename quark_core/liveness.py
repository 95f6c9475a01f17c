"""Whether a run that says it is running still does."""

from __future__ import annotations

import time

from quark_core.process import ProcessIdentity, is_alive

__all__ = ["LOST_AFTER_S", "find_lost_reason"]

LOST_AFTER_S = 60.0
"""A run of another host is lost after this long without a heartbeat; they come every 10 s."""


def find_lost_reason(status: str, process: ProcessIdentity | None, heartbeat_us: int) -> str | None:
    """Why a run whose status says running is lost, or None where it is not.

    On this host the process is looked at; a pid of another host means
    nothing here, so there the age of the heartbeat decides.
    """
    if status != "running":
        return None
    age_s = time.time() - heartbeat_us / 1e6
    alive = None if process is None else is_alive(process)
    if alive:
        return None
    if alive is None:
        return None if age_s <= LOST_AFTER_S else f"no heartbeat from its host for {age_s:.0f} s"
    assert process is not None
    return f"process {process.pid} is gone; last heartbeat {max(0.0, age_s):.0f} s ago"
