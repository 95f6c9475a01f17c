"""Every line of the threat model names a test that is there, or says that there is none."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
REFERENCE = DOCS / "contributing" / "security-tests.md"
FOR_USERS = DOCS / "about" / "security.md"
NAMED = re.compile(r"`([\w/]+/test_\w+\.py)`:?\s*\(?((?:\s*`test_\w+`,?)+)")


def find_tests(path):
    return set(re.findall(r"^def (test_\w+)\(", (TESTS / path).read_text(), re.M))


def list_items(text):
    """The items of all lists, each on one line."""
    found = re.findall(r"^- .+(?:\n  .+)*", text, re.M)
    return [re.sub(r"\s+", " ", item).removeprefix("- ") for item in found]


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
    _, model = FOR_USERS.read_text().split("## Trust model")
    parties = [line.split(" ")[:2] for line in list_items(model.split("\n## ")[0])]
    assert [" ".join(words).replace("**", "") for words in parties] == [
        "You are",
        "A run",
        "Users of",
        "A server",
        "An installed",
        "Viewers of",
    ]
