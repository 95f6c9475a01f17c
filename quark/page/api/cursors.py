"""Up to where a page has read a run, as a text that it gives back."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from quark_core.backends.curves import check_cursor
from quark_core.errors import SchemaValidationError

if TYPE_CHECKING:
    from quark.page.api.run_analysis import Analysis
    from quark_core.backends.run_summary import RunSummary

_MOST_BYTES = 2**20


class PageCursor(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Up to where a page has read a run; equal moments give equal texts.

    Attributes:
        run_id: The run.
        place: What the backend goes on from; None where nothing was read yet, of a backend
            that only knows by reading.
        keys: The metrics that `place` speaks of; None for all.
        mark: Of what was known of the run beside its records; see `make_mark`.
    """

    run_id: str
    place: Mapping[str, int] | None
    keys: tuple[str, ...] | None = None
    mark: int = 0

    def encode(self) -> str:
        """The text."""
        place = None if self.place is None else dict(sorted(self.place.items()))
        sorted_cursor = msgspec.structs.replace(self, place=place)
        packed = zlib.compress(msgspec.msgpack.encode(sorted_cursor), 1)
        return base64.urlsafe_b64encode(packed).rstrip(b"=").decode()

    @classmethod
    def decode(cls, text: str, run_id: str) -> PageCursor:
        """The cursor of a text.

        Raises:
            SchemaValidationError: It is none of this run.
        """
        try:
            packed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            unpacker = zlib.decompressobj()
            data = unpacker.decompress(packed, _MOST_BYTES)
            found = msgspec.msgpack.decode(data, type=cls)
            if found.place is not None:
                check_cursor(found.place)
        except (binascii.Error, zlib.error, msgspec.DecodeError, ValueError) as error:
            raise SchemaValidationError(
                "cursor must be one that was given with the run or its curves"
            ) from error
        if found.run_id != run_id:
            raise SchemaValidationError("cursor must be one of this run")
        return found


def make_mark(summary: RunSummary, analysis: Analysis | None) -> int:
    """What changes with the run's state, the number of its metrics, and its analysis."""
    known = f"{summary.state}|{len(summary.metrics)}|{analysis.mark if analysis else ''}"
    return zlib.crc32(known.encode("utf-8", "replace"))
