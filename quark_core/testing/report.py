"""A pytest plugin that prints what each backend passed of the conformance kit.

    pytest -p quark_core.testing.report tests/conformance
    pytest -p quark_core.testing.report --conformance-json report.json tests/conformance
    pytest -p quark_core.testing.report --conformance-page CONFORMANCE.md tests/conformance

One table per class of tests; the same as JSON, or as a page in Markdown, where
a file is named.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

_PLUGIN = "quark-conformance-report"
_PROPERTY = "quark_conformance"
_ORDER = ("failed", "xpassed", "xfailed", "skipped", "passed")


@dataclass(slots=True)
class TestOutcome:
    """What became of one test.

    Attributes:
        test: Its name, with its parameters.
        outcome: passed, skipped, xfailed, xpassed or failed.
        reason: Why it was skipped or is expected to fail; the first line of its failure.
        group: The part of the kit that it belongs to.
    """

    __test__ = False

    test: str
    outcome: str
    reason: str = ""
    group: str = ""


@dataclass(slots=True)
class BackendReport:
    """What one backend passed.

    Attributes:
        backend: Name of the class of tests.
        title: What a page calls it.
        outcomes: One for each test, in the order in which they ran.
    """

    backend: str
    title: str = ""
    outcomes: dict[str, TestOutcome] = field(default_factory=dict)

    def count(self, outcome: str) -> int:
        """How many tests ended so."""
        return sum(each.outcome == outcome for each in self.outcomes.values())

    def list_lines(self) -> Iterable[str]:
        """The table, a line for each test and outcome; equal reasons follow each other."""
        totals = ", ".join(f"{self.count(word)} {word}" for word in _ORDER if self.count(word))
        yield f"{self.backend}: {totals}"
        width = max(len(name) for name in self.outcomes)
        for word in _ORDER:
            for each in self.outcomes.values():
                if each.outcome == word:
                    reason = f"  {each.reason}" if each.reason else ""
                    yield f"  {each.test:<{width}}  {word:<7}{reason}".rstrip()


class _Collector:
    def __init__(self, json_path: str | None, page_path: str | None) -> None:
        self.json_path = json_path
        self.page_path = page_path
        self.backends: dict[str, BackendReport] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        owner = getattr(item, "cls", None)
        if owner is not None and _is_conformance(owner):
            # Said in the report, which also travels from pytest-xdist's workers.
            said = [owner.__name__, item.name, _find_title(owner), _find_group(owner, item)]
            report.user_properties.append((_PROPERTY, said))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == _PROPERTY and isinstance(value, (list, tuple)):
                owner, test, title, group = map(str, value)
                backend = self.backends.setdefault(owner, BackendReport(owner, title))
                outcome = _judge(report, test)
                if outcome is not None:
                    outcome.group = group
                    backend.outcomes[test] = outcome
                return

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for backend in self.backends.values():
            terminalreporter.section(f"conformance of {backend.backend}")
            for line in backend.list_lines():
                terminalreporter.write_line(line)
        if self.json_path is not None:
            found = {
                name: [asdict(outcome) for outcome in backend.outcomes.values()]
                for name, backend in self.backends.items()
            }
            Path(self.json_path).write_text(json.dumps(found, indent=2), encoding="utf-8")
        if self.page_path is not None:
            write_page(Path(self.page_path), self.backends.values())


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --conformance-json and --conformance-page."""
    parser.addoption("--conformance-json", metavar="FILE", help="Write the results as JSON.")
    parser.addoption(
        "--conformance-page", metavar="FILE", help="Write the results as a Markdown page."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begin to collect."""
    collector = _Collector(
        config.getoption("--conformance-json"), config.getoption("--conformance-page")
    )
    config.pluginmanager.register(collector, _PLUGIN)


def _is_conformance(owner: type) -> bool:
    from quark_core.testing.kit import BackendKit

    return issubclass(owner, BackendKit)


def _find_title(owner: type) -> str:
    return getattr(owner, "TITLE", "") or owner.__name__.removeprefix("Test")


def _find_group(owner: type, item: pytest.Item) -> str:
    """The part of the kit that brings a test, such as `writing`; "own" for an author's."""
    name = item.name.split("[")[0]
    found = next((base for base in reversed(owner.__mro__) if name in vars(base)), owner)
    suffix = "Conformance"
    return found.__name__.removesuffix(suffix).lower() if found.__name__.endswith(suffix) else "own"


def _judge(report: pytest.TestReport, test: str) -> TestOutcome | None:
    """What a report says of its test; None for a part that went well and is not the test itself."""
    expected = getattr(report, "wasxfail", None)
    if report.skipped:
        if expected is not None:
            return TestOutcome(test, "xfailed", str(expected))
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return TestOutcome(test, "skipped", reason.removeprefix("Skipped: "))
    if report.failed:
        if "[XPASS(strict)]" in str(report.longrepr):
            return TestOutcome(
                test, "xpassed", str(report.longrepr).removeprefix("[XPASS(strict)] ")
            )
        crash = getattr(report.longrepr, "reprcrash", None)
        first = str(getattr(crash, "message", report.longrepr)).strip().partition("\n")[0]
        when = "" if report.when == "call" else f"in {report.when}: "
        return TestOutcome(test, "failed", f"{when}{first}"[:200])
    if report.when == "call":
        return TestOutcome(test, "passed")
    return None


MARK = "<!-- conformance: what follows is made by quark_core.testing.report -->"
"""Everything before this line of a page is its author's, and stays."""

# As in BackendConformance; tests of an author's own come last.
_GROUPS = (
    "writing",
    "once",
    "reading",
    "process",
    "primary",
    "store",
    "following",
    "belonging",
    "coordination",
    "workers",
    "artifact",
    "own",
)
_WORDS = {"passed": "", "xfailed": "expected", "xpassed": "not expected to pass"}
_PAGE_ORDER = ("passed", "skipped", "xfailed", "xpassed", "failed")


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
        said = (f"{found[word]} {_WORDS.get(word, word)}" for word in _PAGE_ORDER if found[word])
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
