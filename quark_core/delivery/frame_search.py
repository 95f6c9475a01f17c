"""Takes data apart into whole frames and what is damaged, in time linear in the bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

# What merely looks like frames is checked up to so many times the length of it all.
_CHECKED_SHARE = 16
_CHECKED_BYTES = 1024 * 1024


class Span(NamedTuple):
    """A whole frame, or what is none up to the next whole one.

    Attributes:
        start, end: Where it lies.
        is_frame: Whether it is a whole frame.
        is_last: Whether no whole frame was found behind a damaged place.
    """

    start: int
    end: int
    is_frame: bool
    is_last: bool = False


class FrameSearch:
    """Finds whole frames in bytes of which some are damaged.

    A place is looked at only where the head of a frame may be, by a pattern,
    and its checksum is made only where the length that it claims fits. Data
    that was made to look like frames at every byte is given up on after a
    bounded amount of work.

    Args:
        data: All of it.
        head: What is the same in every head of a frame.
        head_offset: Where in a frame that lies.
        claim_end: Where the frame at a place ends by its own word; None where
            that is not in the data.
        is_whole: Whether a frame's checksum is right that begins and ends there,
            whatever it says of its length.
    """

    def __init__(
        self,
        data: bytes,
        *,
        head: re.Pattern[bytes],
        head_offset: int,
        claim_end: Callable[[int], int | None],
        is_whole: Callable[[int, int], bool],
    ) -> None:
        self._data = data
        self._head = head
        self._head_offset = head_offset
        self._claim_end = claim_end
        self._is_whole = is_whole
        self._left_bytes = _CHECKED_SHARE * len(data) + _CHECKED_BYTES

    @property
    def is_exhausted(self) -> bool:
        """Whether so much looks like frames and is none that no more is searched."""
        return self._left_bytes < 0

    def split(
        self,
        position: int,
        is_next: Callable[[int], bool] = lambda _: False,
        *,
        in_doubt: bool = False,
    ) -> Iterator[Span]:
        """Take the data apart from a place on.

        Args:
            position: Where the first frame begins.
            is_next: As in `find_next`; asked when all before it was taken.
            in_doubt: Whether what begins at the place is known to be no frame.
        """
        while position < len(self._data):
            end = None if in_doubt else self.read_end(position)
            if end is not None:
                yield Span(position, end, True)
            else:
                found = self.find_next(position, is_next)
                end = len(self._data) if found is None else found
                is_frame = not in_doubt and self._is_whole(position, end)
                yield Span(position, end, is_frame, is_last=found is None)
            position, in_doubt = end, False

    def read_end(self, position: int) -> int | None:
        """Where the frame at a place ends; None where there is no whole one."""
        claimed = self._claim_end(position)
        if claimed is None or self.is_exhausted:
            return None
        if self._is_whole(position, claimed):
            return claimed
        self._left_bytes -= claimed - position
        return None

    def find_next(self, position: int, is_next: Callable[[int], bool]) -> int | None:
        """Where the first whole frame behind a damaged one begins; None where there is none.

        Args:
            position: Where the damaged one begins.
            is_next: Whether a whole frame is the very next after the damaged
                one, so that nothing between the two is looked for.
        """
        after = self._claim_end(position)
        if after is not None and self.read_end(after) is not None:
            if is_next(after):
                return after
            # It will be checked again when the search comes there.
            self._left_bytes -= (self._claim_end(after) or after) - after
        for match in self._head.finditer(self._data, position + 1 + self._head_offset):
            if self.is_exhausted:
                return None
            start = match.start() - self._head_offset
            if self.read_end(start) is not None:
                return start
        return None
