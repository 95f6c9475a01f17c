"""docs/extend/conformance.md says what the classes of the kit's tests say."""

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

from quark_core.backends.registry import default_registry
from quark_core.testing.conformance import BackendConformance
from quark_core.testing.report import MARK, BackendReport, TestOutcome, format_page, write_page

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extend" / "conformance.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "third_party_backend"
MODULES = [
    *(
        ROOT / "tests" / "conformance" / f"test_{name}.py"
        for name in ("embedded", "journal_store", "service", "csv")
    ),
    *sorted((ROOT / "tests" / "quark_backends").glob("*/test_*_conformance.py")),
    EXAMPLE / "tests" / "test_jsonl_conformance.py",
]


def read_rows(text):
    """Cells of every row of the tables in a text, without heads."""
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [row for row in rows if set(row[0]) != {"-"}]


def read_sections():
    """Title -> text of a backend's section."""
    _, *sections = PAGE.partition(MARK)[2].split("\n## ")
    return {title: text for title, _, text in (one.partition("\n") for one in sections)}


@pytest.fixture(scope="module")
def classes():
    """Title -> class of every backend that the kit runs over."""
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    pytest.importorskip("fsspec")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE / "src"))
        for path in MODULES:
            patch.syspath_prepend(str(path.parent))
            spec = importlib.util.spec_from_file_location(f"page_{path.stem}", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            for each in vars(module).values():
                own = getattr(each, "__module__", None) == module.__name__
                if own and getattr(each, "TITLE", ""):
                    found[each.TITLE] = each
    return found


def count_tests():
    """Group -> how many tests the kit has in it."""
    counts = Counter()
    for base in BackendConformance.__mro__[1:]:
        for name, test in vars(base).items():
            if name.startswith("test_"):
                marks = getattr(test, "pytestmark", [])
                sizes = [len(list(m.args[1])) for m in marks if m.name == "parametrize"]
                counts[base.__name__.removesuffix("Conformance").lower()] += sum(sizes) or 1
    return counts


def test_every_backend_has_its_row_and_section(classes):
    head, *rows = read_rows(PAGE.partition(MARK)[2].partition("\n## ")[0])
    assert head[0] == "backend"
    assert {row[0] for row in rows} == set(classes) == set(read_sections())


def test_the_rows_add_up_to_the_whole_kit(classes):
    head, *rows = read_rows(PAGE.partition(MARK)[2].partition("\n## ")[0])
    whole = count_tests()
    for title, *cells in rows:
        for group, cell in zip(head[1:], cells, strict=True):
            if group == "own":
                continue  # an author's, beside the kit
            assert set(re.findall("[a-z]+", cell)) <= {"skipped", "expected"}, (title, group)
            assert sum(map(int, re.findall(r"\d+", cell))) == whole[group], (title, group)


def test_expected_failures_are_those_of_the_classes(classes):
    sections = read_sections()
    for title, owner in classes.items():
        rows = [row for row in read_rows(sections[title]) if row[0] != "expected to fail"]
        said = {test.strip("`"): reason.replace("\\|", "|") for test, reason in rows}
        for test, reason in said.items():
            expected = owner.EXPECTED_FAILURES
            assert reason == (expected.get(test) or expected.get(test.split("[")[0])), title
        named = {test for full in said for test in (full, full.split("[")[0])}
        assert set(owner.EXPECTED_FAILURES) <= named, title


def test_what_is_skipped_is_not_declared():
    found = re.findall(r"skipped: (\w+) does not declare (\w+)", PAGE)
    assert {"csv", "mlflow", "tensorboard", "wandb"} <= {name for name, _ in found}
    for name, capability in found:
        if name in default_registry().names:
            assert capability not in default_registry().find(name).capabilities, name


def make_report():
    report = BackendReport("TestMine", "My store")
    for name, outcome, reason, group in (
        ("test_a", "passed", "", "writing"),
        ("test_b[x|y]", "xfailed", "it has no | in it", "writing"),
        ("test_c", "skipped", "mine does not declare groups", "once"),
        ("test_d", "skipped", "mine does not declare groups", "once"),
        ("test_e", "failed", "assert 1 == 2", "own"),
    ):
        report.outcomes[name] = TestOutcome(name, outcome, reason, group)
    return report


EXPECTED = """\
| backend | writing | once | own |
| --- | --- | --- | --- |
| My store | 1, 1 expected | 2 skipped | 1 failed |

## My store

- 2 skipped: mine does not declare groups

| expected to fail | because |
| --- | --- |
| `test_b[x\\|y]` | it has no \\| in it |
"""


def test_a_page_counts_and_gives_reasons():
    assert format_page([make_report()]) == EXPECTED


def test_what_stands_before_the_mark_stays(tmp_path):
    page = tmp_path / "CONFORMANCE.md"
    write_page(page, [make_report()])
    assert page.read_text() == EXPECTED
    page.write_text(f"# Mine\n\n{MARK}\nold\n")
    for _ in range(2):
        write_page(page, [make_report()])
        assert page.read_text() == f"# Mine\n\n{MARK}\n\n{EXPECTED}"
