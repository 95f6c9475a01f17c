"""Every test that the reference of faults names is there."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
REFERENCE = TESTS.parent / "docs" / "contributing" / "fault-tests.md"
SHORT = {
    "MF": "quark_backends/mlflow/test_mlflow_",
    "WB": "quark_backends/wandb/test_wandb_",
    "TB": "quark_backends/tensorboard/test_tensorboard_",
}


def test_the_tests_of_the_faults_exist():
    text = REFERENCE.read_text()
    text = re.sub(r"`(MF|WB|TB)(\w+\.py)`", lambda m: f"`{SHORT[m[1]]}{m[2]}`", text)
    files = set(re.findall(r"`([\w/]+/test_\w+\.py)`", text))
    assert len(files) > 40
    assert {name for name in files if not (TESTS / name).is_file()} == set()
    there = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.M)
    }
    for path in (TESTS.parent / "quark_core" / "testing").rglob("*.py"):
        there |= set(re.findall(r"def (test_\w+)\(", path.read_text()))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 40
    assert named - there == set()
