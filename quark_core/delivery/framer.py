"""Makes numbered batches out of what waits in a writer's channels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from quark_core.backends.contract import Batch
from quark_core.delivery.batch_log import BatchLog
from quark_core.delivery.channel import FRAME_BYTES, Channel, encode_frame_body
from quark_core.delivery.segments import Origin

_log = logging.getLogger("quark")

# A loop that logs without a pause must not make the thread spin.
_SHORTEST_TICK_S = 0.005


class Framer:
    """Numbers a writer's batches; belongs to the delivery thread, counts may be asked anywhere.

    Args:
        origin: What all records have in common.
        channels: Where records come from, by kind, in the order of a tick.
        log: Where batches go.
    """

    def __init__(self, origin: Origin, channels: Mapping[str, Channel], log: BatchLog) -> None:
        self._origin = origin
        self._channels = tuple(channels.values())
        self._log = log
        self._draining = 0
        self._framed_bytes = 0
        self._unpersisted_bytes = 0
        self.unencodable = 0
        """Records that could not be encoded; a bug, counted."""

    def drain(self) -> bool:
        """Put what is in the channels now into the log; whether there was room for all of it."""
        drained = True
        for channel in self._channels:
            if channel.items:
                drained = self._drain(channel) and drained
        self._persist()
        return drained

    def count_pending(self) -> int:
        """Records that are accepted and that no reader of the log sees yet."""
        waiting = sum(channel.count_records() for channel in self._channels)
        return self._draining + self._log.count_unpublished() + waiting

    def choose_wait(self, tick_s: float, elapsed_s: float) -> float:
        """How long to wait for the next tick, so that about `FRAME_BYTES` come in meanwhile.

        The threads that log must not be made to look at a size or to wake
        anybody, so it is reckoned from what came since the last call.

        Args:
            tick_s: The longest wait.
            elapsed_s: Time since the last call.
        """
        framed, self._framed_bytes = self._framed_bytes, 0
        if framed <= FRAME_BYTES:
            return tick_s
        return min(tick_s, max(_SHORTEST_TICK_S, elapsed_s * FRAME_BYTES / framed))

    def _drain(self, channel: Channel) -> bool:
        # What comes while this goes on waits for the next tick, so that a tick ends.
        remaining = len(channel.items)
        while remaining > 0 and not self._log.is_full:
            items, records = channel.take_frame()
            if not items:
                return True
            remaining -= len(items)
            self._draining = records
            try:
                batch = self._make_batch(channel.kind, items)
            except Exception:  # noqa: BLE001
                # Records are validated before they come here, so this is a bug of ours or
                # memory that ran out; it must cost this frame only, and be seen.
                _log.exception("%d %s records could not be encoded", records, channel.kind)
                self.unencodable += records
                self._draining = 0
                continue
            self._log.account(channel.kind, items)
            self._log.add(batch)
            for listener in channel.listeners:
                listener(batch)
            self._draining = 0
            self._framed_bytes += len(batch.body)
            # Several small frames are one write.
            self._unpersisted_bytes += len(batch.body)
            if self._unpersisted_bytes >= FRAME_BYTES:
                self._persist()
        return remaining <= 0

    def _persist(self) -> None:
        self._unpersisted_bytes = 0
        self._log.persist()

    def _make_batch(self, kind: str, items: list[Any]) -> Batch:
        count, body = encode_frame_body(kind, items)
        origin = self._origin
        return Batch(
            origin.run_id or "",
            origin.writer_id,
            origin.attempt,
            origin.rank,
            self._log.end,
            kind,
            count,
            body,
        )
