"""Every test that the tracker's reference names is there."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
REFERENCE = TESTS.parent / "docs" / "reference" / "tracker.md"


def test_the_tests_in_the_table_exist():
    named = set(re.findall(r"`(test_\w+)`", REFERENCE.read_text()))
    there = set()
    for folder in ("tracker", "backends", "mlflow_mirror", "wandb_mirror"):
        for path in (TESTS / folder).glob("test_*.py"):
            there.update(re.findall(r"^def (test_\w+)\(", path.read_text(), re.M))
    assert named - there == set()
    assert len(named) > 40
