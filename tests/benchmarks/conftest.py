"""What the tests of the benchmark programs share: they are run from the root of the project."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def measure(tmp_path):
    """Runs a program in its short form; its figures."""

    def measure(*arguments, short="--quick"):
        target = tmp_path / "figures.json"
        done = subprocess.run(
            [sys.executable, *arguments, short, "--json", str(target)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(target.read_text())

    return measure
