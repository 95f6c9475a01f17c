"""A stream that is opened by the first record that comes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from quark_core.artifacts.payload_folder import PayloadFolder
from quark_core.delivery.origin import Origin
from quark_core.delivery.stream import RunStream

__all__ = ["StandInStream"]


class StandInStream(RunStream):
    """Stands in for a stream that may never be needed; it costs nothing until then.

    Args:
        origin: What all records will have in common.
        open_stream: Called by the first record; by the time it returns,
            `succeed` has been called, or the record is not kept.
    """

    def __init__(self, origin: Origin, open_stream: Callable[[], None]) -> None:
        super().__init__(origin)
        self._open_stream = open_stream
        self._successor: RunStream | None = None
        for channel in self._channels.values():
            channel.append = partial(self._hand_on, channel.kind)

    @property
    def active(self) -> bool:
        """Whether what comes here is kept: by the stream that it opens."""
        return True

    @property
    def payloads(self) -> PayloadFolder | None:
        """Where the real stream's payloads go, which is opened for this."""
        if self._successor is None:
            self._open_stream()
        return None if self._successor is None else self._successor.payloads

    def succeed(self, stream: RunStream) -> None:
        """Pass on to the real stream what still comes here."""
        for kind, channel in self._channels.items():
            # What was numbered here keeps its number, so the next one must be another.
            stream.channel(kind).continue_sequence(channel)
        self._successor = stream

    def _hand_on(self, kind: str, item: Any) -> None:
        if self._successor is None:
            self._open_stream()
        if self._successor is not None:
            self._successor.channel(kind).append(item)
