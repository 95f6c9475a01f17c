"""Each rule has a section in the rules reference and one that says how to fix its alerts."""

import re
from dataclasses import fields

import pytest
from blocks import DOCS, ROOT

from quark.analysis.config import AnalyzerThresholds
from quark.analysis.fixes import read_fixes
from quark.analysis.rules.registry import BUILTIN_RULES

FIXES = DOCS / "diagnose" / "fix-an-alert.md"
RULES = DOCS / "reference" / "rules.md"
INSTALLED = ROOT / "quark" / "analysis" / "fix-an-alert.md"
ALERTS = {rule.rule_id for rule in BUILTIN_RULES} | {"healthy_baseline", "broken_off"}
MOST_WORDS = 80

# What makes an alert of itself has no category of a rule.
CATEGORIES = {rule.rule_id: rule.category for rule in BUILTIN_RULES}


def list_sections(path):
    """Rule ID -> its section."""
    found = re.findall(r"^### (\w+)\n+(.*?)\n*(?=^##|\Z)", path.read_text("utf-8"), re.S | re.M)
    return dict(found)


def test_the_package_carries_the_page_as_it_is():
    copied = f"cp {FIXES.relative_to(ROOT)} {INSTALLED.relative_to(ROOT)}"
    assert INSTALLED.read_text("utf-8") == FIXES.read_text("utf-8"), copied


def test_each_alert_has_a_section_that_says_how_to_fix_it():
    assert {*read_fixes()} == ALERTS
    for rule_id, text in read_fixes().items():
        assert "First check: " in text, rule_id
        assert "In the code: " in text, rule_id
        assert len(text.split()) <= MOST_WORDS, rule_id


def test_the_sections_of_the_page_stand_under_the_category_of_their_rule():
    for part in re.split(r"^## ", FIXES.read_text("utf-8"), flags=re.M)[1:]:
        title = part.partition("\n")[0].lower()
        for rule_id in re.findall(r"^### (\w+)$", part, re.M):
            assert CATEGORIES.get(rule_id, "other alerts") == title, rule_id


@pytest.mark.parametrize("rule_id", sorted(ALERTS))
def test_each_rule_is_in_the_reference_with_its_category_and_its_fix(rule_id):
    section = list_sections(RULES)[rule_id]
    assert f"../diagnose/fix-an-alert.md#{rule_id})" in section
    if category := CATEGORIES.get(rule_id):
        assert section.startswith(f"{category.capitalize()}, "), section


def test_the_reference_has_the_default_of_each_threshold():
    text = RULES.read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)_\*_(\w+)` \|(.+)\|$", text, re.M)
    told = {
        f"{prefix}_{level}_{suffix}": float(value)
        for prefix, suffix, values in rows
        for level, value in zip(("warning", "error", "critical"), values.split("|"), strict=True)
    }
    told |= {name: float(value) for name, value in re.findall(r"`(\w+)` \(([\d.]+)\)", text)}
    assert told == {item.name: item.default for item in fields(AnalyzerThresholds)}
