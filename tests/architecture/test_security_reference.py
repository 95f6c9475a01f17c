"""Every line of the threat model names a test that is there, or says that there is none."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
REFERENCE = TESTS.parent / "docs" / "about" / "security.md"
NAMED = re.compile(r"`([\w/]+/test_\w+\.py)`:?\s*\(?((?:\s*`test_\w+`,?)+)")


def find_tests(path):
    return set(re.findall(r"^def (test_\w+)\(", (TESTS / path).read_text(), re.M))


def test_the_tests_of_the_threat_model_exist():
    text = REFERENCE.read_text()
    found = NAMED.findall(text)
    assert len(found) > 25
    for path, names in found:
        assert (TESTS / path).is_file(), path
        assert set(re.findall(r"test_\w+", names)) - find_tests(path) == set(), path
    # None stands there without its file.
    paired = {name for _, names in found for name in re.findall(r"test_\w+", names)}
    assert set(re.findall(r"`(test_\w+)`", text)) == paired


def test_every_line_has_a_test_or_says_that_it_has_none():
    rows = re.findall(r"^\| (?!who \| |what )(.+?) \|$", REFERENCE.read_text(), re.M)
    lines = [row for row in rows if row.count(" | ") == 2 and "|---|" not in f"|{row}|"]
    judged = [line for line in lines if "/test_" in line or line.endswith("not tested")]
    trusted = [line for line in lines if line not in judged]
    assert len(judged) > 30
    # The first table says who is trusted with what.
    assert [line.split(" ")[0] for line in trusted] == ["you:", "a", "the", "a", "an", "whoever"]
