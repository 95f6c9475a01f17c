"""What two runs' sources differ in, file by file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quark_core.provenance.kept_sources import KeptSource

__all__ = ["SourceDiff", "diff_sources"]

_MOST_LINES = 20_000


@dataclass(frozen=True, slots=True)
class SourceDiff:
    """One file that is not the same on both sides.

    Attributes:
        path: Its path, on the side that has it.
        kind: `added` to the second side, `removed` from the first, `changed`, or `moved`.
        before, after: The file on either side, or None.
        lines: A unified diff without ends of lines; nothing where a text is not kept.
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
    return tuple(difflib.unified_diff(old, new, names[0], names[1], lineterm=""))
