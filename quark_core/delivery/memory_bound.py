"""Keeps what waits in the channels within a bound, and tells what went."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping

from quark_core.delivery.channel import Channel

__all__ = ["DROP_ORDER", "MemoryBound", "choose_capacity"]

_log = logging.getLogger("quark")

_LEAST_CAPACITY_BYTES = 64 * 1024 * 1024
_MOST_CAPACITY_BYTES = 1024 * 1024 * 1024

DROP_ORDER = (
    "parameter_distribution",
    "layer",
    "parameter",
    "telemetry",
    "batch",
    "artifact",
    "metric",
    "event",
    "lifecycle",
)
"""Which kinds go first where memory runs out: what sums up the network before what users say."""


class MemoryBound:
    """Lets the oldest records of the lowest kinds go where the channels weigh too much.

    Args:
        channels: The channels, by kind.
        capacity_bytes: What they may weigh together, about.
        on_gap: Told of the records, by kind, that went.
    """

    def __init__(
        self,
        channels: Mapping[str, Channel],
        capacity_bytes: int,
        on_gap: Callable[[Mapping[str, int]], None] | None,
    ) -> None:
        self._channels = channels
        self._capacity_bytes = capacity_bytes
        self._on_gap = on_gap
        self._told: dict[str, int] = dict.fromkeys(channels, 0)

    def bound(self, *, may_tell: bool) -> None:
        """Drop what is too much, and tell of it once there is room to tell."""
        self._drop_excess()
        if not may_tell or self._on_gap is None:
            return
        gaps = {
            kind: channel.lost - self._told[kind]
            for kind, channel in self._channels.items()
            if channel.lost > self._told[kind]
        }
        if gaps:
            for kind, count in gaps.items():
                self._told[kind] += count
            _log.warning(
                "records came faster than they could be taken away, and the %d MB for them are "
                "full; these are gone: %s. A loop that logs without a pause should call "
                "session.flush('journaled') now and then",
                self._capacity_bytes // 1_000_000,
                gaps,
            )
            self._on_gap(gaps)

    def _drop_excess(self) -> None:
        weights = {kind: channel.weigh() for kind, channel in self._channels.items()}
        excess = sum(weights.values()) - self._capacity_bytes
        for kind in DROP_ORDER:
            channel = self._channels.get(kind)
            if channel is None:
                continue
            waiting = len(channel.items)
            if excess > 0 and waiting:
                each = weights[kind] / waiting
                dropped = min(waiting, math.ceil(excess / each))
                channel.drop_oldest(dropped)
                excess -= int(dropped * each)
            channel.count_overflow()


def choose_capacity() -> int:
    """Bytes that may wait for delivery: a sixteenth of the memory, from 64 MiB to 1 GiB."""
    try:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return _LEAST_CAPACITY_BYTES
    return max(_LEAST_CAPACITY_BYTES, min(_MOST_CAPACITY_BYTES, memory_bytes // 16))
