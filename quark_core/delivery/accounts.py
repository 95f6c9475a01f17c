"""What has become of a stream's records, in a form that another process can read after a kill."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from quark_core.backends.contract import Batch
from quark_core.delivery.metric_rows import MetricRow, count_items

# Beyond this many, the oldest gap is only counted: nothing of it can turn up any more.
_MOST_SPANS = 64


class Spans:
    """Sequence numbers that are accounted for, as ranges.

    Attributes:
        ranges: Sorted and apart from each other, each `[first, after the last]`.
        forgotten: Numbers of gaps that were closed because there were too many.
    """

    __slots__ = ("forgotten", "ranges")

    def __init__(self, ranges: Iterable[Iterable[int]] = (), forgotten: int = 0) -> None:
        self.ranges = [list(numbers) for numbers in ranges]
        self.forgotten = forgotten

    def add(self, start: int, stop: int) -> None:
        """Account for the numbers from `start` up to before `stop`."""
        ranges = self.ranges
        if ranges and ranges[-1][1] == start:
            ranges[-1][1] = stop
            return
        place = bisect_right(ranges, start, key=_find_start)
        if place and ranges[place - 1][1] >= start:
            place -= 1
            start = ranges[place][0]
            stop = max(stop, ranges[place][1])
        after = place
        while after < len(ranges) and ranges[after][0] <= stop:
            stop = max(stop, ranges[after][1])
            after += 1
        ranges[place:after] = [[start, stop]]
        if len(ranges) > _MOST_SPANS:
            self.forgotten += ranges[1][0] - ranges[0][1]
            ranges[:2] = [[ranges[0][0], ranges[1][1]]]

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self.ranges, number, key=_find_start)
        return place > 0 and number < self.ranges[place - 1][1]

    def covers(self, start: int, stop: int) -> bool:
        """Whether all numbers from `start` up to before `stop` are accounted for."""
        place = bisect_right(self.ranges, start, key=_find_start)
        return place > 0 and stop <= self.ranges[place - 1][1]

    @property
    def stop(self) -> int:
        """The number after the highest."""
        return self.ranges[-1][1] if self.ranges else 0

    def count_missing(self) -> int:
        """How many numbers below the highest are not accounted for, the forgotten ones too."""
        missing = self.forgotten
        end = 0
        for start, stop in self.ranges:
            missing += start - end
            end = stop
        return missing


class StreamAccounts:
    """The next batch's number, and which records of a stream are in a batch already.

    Belongs to the delivery thread, which saves it to shared memory before a
    lane sees a batch.

    Attributes:
        next_number: Number of the batch that is made next.
        spans: By kind, the sequence numbers of records that are in a batch.
        told: By kind, how many records went and were told as gone.
        exposed: Records of batches that lanes may have and that neither the
            journal nor shared memory had room for; 0 but where both fail.
    """

    __slots__ = ("exposed", "next_number", "spans", "told")

    def __init__(self) -> None:
        self.next_number = 0
        self.spans: dict[str, Spans] = {}
        self.told: dict[str, int] = {}
        self.exposed = 0

    def add(self, kind: str, spans: Iterable[tuple[int, int]]) -> None:
        """Account for records that are in a batch now."""
        known = self.spans.get(kind)
        if known is None:
            known = self.spans[kind] = Spans()
        for start, stop in spans:
            known.add(start, stop)

    def add_batch(self, batch: Batch) -> None:
        """Account for a batch as it was journaled."""
        self.next_number = max(self.next_number, batch.number + 1)
        sequences = batch.decoded.to_list("sequence")
        self.add(batch.kind, list_spans((number, number + 1) for number in sequences))

    def tell(self, gaps: Mapping[str, int]) -> None:
        """Note that records are gone and that the run itself tells of it."""
        for kind, count in gaps.items():
            self.told[kind] = self.told.get(kind, 0) + count

    def knows(self, kind: str, sequence: int) -> bool:
        """Whether a record is in a batch already."""
        spans = self.spans.get(kind)
        return spans is not None and sequence in spans

    def covers(self, kind: str, start: int, stop: int) -> bool:
        """Whether all records of a range are in batches already."""
        spans = self.spans.get(kind)
        return spans is not None and spans.covers(start, stop)

    def copy(self) -> StreamAccounts:
        """Accounts of their own that say the same."""
        return StreamAccounts.decode(self.encode())

    def count_untold(self) -> int:
        """How many records went below the highest numbers that nobody has told of."""
        return sum(
            max(0, spans.count_missing() - self.told.get(kind, 0))
            for kind, spans in self.spans.items()
        )

    def encode(self) -> bytes:
        """As bytes; `decode` reads them."""
        spans = {kind: (known.ranges, known.forgotten) for kind, known in self.spans.items()}
        return msgspec.msgpack.encode((self.next_number, spans, self.told, self.exposed))

    @classmethod
    def decode(cls, data: bytes) -> StreamAccounts:
        """What `encode` has written.

        Raises:
            msgspec.DecodeError: It is something else.
        """
        form: Any = tuple[int, dict[str, tuple[list[list[int]], int]], dict[str, int], int]
        accounts = cls()
        accounts.next_number, spans, accounts.told, accounts.exposed = msgspec.msgpack.decode(
            data, type=form
        )
        accounts.spans = {kind: Spans(ranges, count) for kind, (ranges, count) in spans.items()}
        return accounts


def list_spans(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of numbers, with those joined that follow each other."""
    spans: list[tuple[int, int]] = []
    first = after = -1
    for start, stop in pairs:
        if start == after:
            after = stop
            continue
        if after >= 0:
            spans.append((first, after))
        first, after = start, stop
    if after >= 0:
        spans.append((first, after))
    return spans


def list_item_spans(items: list[Any]) -> list[tuple[int, int]]:
    """The sequence numbers of a channel's items, which may be rows."""
    return list_spans(map(_find_span, items))


def _find_span(item: Any) -> tuple[int, int]:
    if type(item) is tuple:
        row: MetricRow = item
        return row[0], row[0] + count_items(row)
    return item.sequence, item.sequence + 1


def _find_start(numbers: list[int]) -> int:
    return numbers[0]
