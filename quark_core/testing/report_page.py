"""The report as a page: a table of backends and groups of tests, and what each cannot do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quark_core.testing.report import BackendReport

__all__ = ["MARK", "format_page", "write_page"]

MARK = "<!-- conformance: what follows is made by quark_core.testing.report -->"
"""Everything before this line of a page is its author's, and stays."""

# As in BackendConformance; tests of an author's own come last.
_GROUPS = ("writing", "once", "reading", "process", "primary", "store", "artifact", "own")
_WORDS = {"passed": "", "xfailed": "expected", "xpassed": "not expected to pass"}
_ORDER = ("passed", "skipped", "xfailed", "xpassed", "failed")


def write_page(path: Path, backends: Iterable[BackendReport]) -> None:
    """Write a page, or replace what follows the mark in one that is there.

    Args:
        path: The page, a Markdown file.
        backends: What each backend passed; the page has them by their titles.

    Raises:
        OSError: The page cannot be read or written.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    kept, mark, _ = text.partition(MARK)
    head = f"{kept}{MARK}\n\n" if mark else ""
    path.write_text(head + format_page(backends), encoding="utf-8")


def format_page(backends: Iterable[BackendReport]) -> str:
    """A table of how many tests of each group passed, then a section for each backend."""
    reports = sorted(backends, key=lambda report: report.title)
    found = {one.group for report in reports for one in report.outcomes.values()}
    groups = [group for group in _GROUPS if group in found]
    rows = ([report.title, *_count(report, groups)] for report in reports)
    lines = _list_rows(["backend", *groups], rows)
    for report in reports:
        lines += ["", f"## {report.title}", "", *_describe(report)]
    return "\n".join(lines) + "\n"


def _count(report: BackendReport, groups: Sequence[str]) -> Iterable[str]:
    for group in groups:
        found = Counter(one.outcome for one in report.outcomes.values() if one.group == group)
        said = (f"{found[word]} {_WORDS.get(word, word)}" for word in _ORDER if found[word])
        yield ", ".join(map(str.strip, said))


def _describe(report: BackendReport) -> Iterable[str]:
    """Why tests were skipped, and which are expected to fail; what failed is only counted."""
    outcomes = sorted(report.outcomes.values(), key=lambda one: (one.reason, one.test))
    skipped = Counter(one.reason for one in outcomes if one.outcome == "skipped")
    expected = [one for one in outcomes if one.outcome == "xfailed"]
    if not skipped and not expected:
        yield "Everything passed."
    yield from (f"- {count} skipped: {reason}" for reason, count in skipped.items())
    if skipped and expected:
        yield ""
    if expected:
        rows = ([f"`{one.test}`", one.reason] for one in expected)
        yield from _list_rows(["expected to fail", "because"], rows)


def _list_rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        " | ".join(("", *(cell.replace("|", "\\|") for cell in row), "")).strip()
        for row in (head, ["---"] * len(head), *rows)
    ]
