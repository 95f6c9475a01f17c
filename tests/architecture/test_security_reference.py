"""Every line of the threat model names a test that is there, or says that there is none."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
REFERENCE = TESTS.parent / "docs" / "contributing" / "security-tests.md"
FOR_USERS = TESTS.parent / "docs" / "about" / "security.md"
NAMED = re.compile(r"`([\w/]+/test_\w+\.py)`:?\s*\(?((?:\s*`test_\w+`,?)+)")


def find_tests(path):
    return set(re.findall(r"^def (test_\w+)\(", (TESTS / path).read_text(), re.M))


def list_items(text):
    """The items of all lists, each on one line."""
    return [re.sub(r"\s+", " ", item) for item in re.findall(r"(?<=^- ).+(?:\n  .+)*", text, re.M)]


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
    lines = list_items(REFERENCE.read_text())
    assert len(lines) > 30
    assert [ln for ln in lines if "/test_" not in ln and not ln.endswith("Not tested.")] == []
    # The page for users says who is trusted with what.
    model = FOR_USERS.read_text().split("## Trust model")[1].split("\n## ")[0]
    parties = ["You", "A run folder", "Users", "A server", "An installed plugin", "Viewers"]
    for party, line in zip(parties, list_items(model), strict=True):
        assert line.startswith(f"**{party}")
