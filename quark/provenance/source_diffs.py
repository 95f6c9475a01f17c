"""What two runs' sources differ in, file by file."""

from __future__ import annotations

import difflib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from quark.provenance.kept_sources import KeptSource

_MOST_LINES = 20_000
_CONTEXT_LINES = 3
# How often two lines are held beside one another; a second's worth.
_MOST_LOOKS = 2_000_000
_POPULAR_FROM = 200

Change = tuple[str, int, int, int, int]


@dataclass(frozen=True, slots=True)
class SourceDiff:
    """One file that is not the same on both sides.

    Attributes:
        path: Its path, on the side that has it.
        kind: `added` to the second side, `removed` from the first, `changed`, or `moved`.
        before, after: The file on either side, or None.
        lines: A unified diff without ends of lines; nothing where a text is not kept. Where it
            would take too long to align them, the one text is removed and the other added.
    """

    path: str
    kind: Literal["added", "removed", "changed", "moved"]
    before: KeptSource | None
    after: KeptSource | None
    lines: tuple[str, ...] = ()


def diff_sources(
    before: Mapping[str, KeptSource], after: Mapping[str, KeptSource]
) -> tuple[SourceDiff, ...]:
    """The files that differ, by path; one that has another path and the same content has moved.

    Equality is that of the files as they were: a secret that was replaced makes no difference
    where there is none, and where the files differed in it alone the lines are equal.
    """
    gone = {path: file for path, file in before.items() if path not in after}
    new = {path: file for path, file in after.items() if path not in before}
    moved = {file.sha256: path for path, file in gone.items()}
    out = []
    for path, file in new.items():
        origin = moved.pop(file.sha256, None)
        old = None if origin is None else gone.pop(origin)
        kind: Literal["added", "moved"] = "added" if old is None else "moved"
        out.append(SourceDiff(path, kind, old, file, _diff(old, file)))
    out += [
        SourceDiff(path, "removed", file, None, _diff(file, None)) for path, file in gone.items()
    ]
    for path, file in before.items():
        other = after.get(path)
        if other is not None and other.sha256 != file.sha256:
            out.append(SourceDiff(path, "changed", file, other, _diff(file, other)))
    return tuple(sorted(out, key=lambda diff: diff.path))


def count_equal(before: Mapping[str, KeptSource], after: Mapping[str, KeptSource]) -> int:
    """How many files have the same path and the same content."""
    shared = ((file, after[path]) for path, file in before.items() if path in after)
    return sum(1 for file, other in shared if file.sha256 == other.sha256)


def _diff(before: KeptSource | None, after: KeptSource | None) -> tuple[str, ...]:
    texts = [None if file is None else file.text for file in (before, after)]
    if any(
        file is not None and text is None for file, text in zip((before, after), texts, strict=True)
    ):
        return ()
    old, new = ([] if text is None else text.splitlines() for text in texts)
    if max(len(old), len(new)) > _MOST_LINES:
        return ()
    names = ["/dev/null" if file is None else file.path for file in (before, after)]
    return tuple(_lay_out(old, new, names[0], names[1]))


def _lay_out(old: list[str], new: list[str], old_name: str, new_name: str) -> Iterator[str]:
    """A unified diff, as `difflib.unified_diff` lays it out, in a bounded time."""
    for number, group in enumerate(_group_changes(old, new)):
        if not number:
            yield f"--- {old_name}"
            yield f"+++ {new_name}"
        first, last = group[0], group[-1]
        yield f"@@ -{_tell_range(first[1], last[2])} +{_tell_range(first[3], last[4])} @@"
        for tag, low, high, new_low, new_high in group:
            if tag == "equal":
                yield from (f" {line}" for line in old[low:high])
                continue
            yield from (f"-{line}" for line in old[low:high])
            yield from (f"+{line}" for line in new[new_low:new_high])


def _group_changes(old: list[str], new: list[str]) -> list[list[Change]]:
    try:
        return list(_BoundedMatcher(old, new).get_grouped_opcodes(_CONTEXT_LINES))
    except _TooLongError:
        pass
    head = _count_shared(zip(old, new, strict=False))
    tail = _count_shared(zip(reversed(old[head:]), reversed(new[head:]), strict=False))
    before = (max(0, head - _CONTEXT_LINES), head)
    middle = (head, len(old) - tail, head, len(new) - tail)
    after = min(_CONTEXT_LINES, tail)
    return [
        [
            ("equal", *before, *before),
            ("replace", *middle),
            ("equal", middle[1], middle[1] + after, middle[3], middle[3] + after),
        ]
    ]


def _count_shared(pairs: Iterable[tuple[str, str]]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _tell_range(start: int, stop: int) -> str:
    length = stop - start
    if length == 1:
        return f"{start + 1}"
    return f"{start + 1 if length else start},{length}"


class _TooLongError(Exception):
    """To align two texts takes longer than anybody waits."""


class _BoundedMatcher(difflib.SequenceMatcher[str]):
    """Gives up on texts that it takes a power of their lengths to align."""

    def __init__(self, old: list[str], new: list[str]) -> None:
        super().__init__(None, old, new)
        self._old = old
        # Lines that are so many are not looked for, as `autojunk` has it.
        most = len(new) // 100 + 1 if len(new) >= _POPULAR_FROM else len(new)
        counted = Counter(new)
        self._counts = {line: count for line, count in counted.items() if count <= most}
        self._left_looks = _MOST_LOOKS

    def find_longest_match(
        self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None
    ) -> difflib.Match:
        self._left_looks -= sum(1 + self._counts.get(line, 0) for line in self._old[alo:ahi])
        if self._left_looks < 0:
            raise _TooLongError
        return super().find_longest_match(alo, ahi, blo, bhi)
