"""A stream that is opened by the first record that comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark_core.delivery.stream import RunStream

__all__ = ["DeferredAppend"]


class DeferredAppend:
    """Opens the real stream when the first record comes, and hands every record on to it.

    Args:
        kind: Kind of the records.
        open_stream: Puts the real stream in the stand-in's place.
        stand_in: The stream whose successor gets the records.
    """

    def __init__(self, kind: str, open_stream: Callable[[], None], stand_in: RunStream) -> None:
        self._kind = kind
        self._open_stream = open_stream
        self._stand_in = stand_in

    def __call__(self, item: Any) -> None:
        """Hand one record on."""
        if self._stand_in.successor is None:
            self._open_stream()
        if self._stand_in.successor is not None:
            self._stand_in.successor.channel(self._kind).append(item)
