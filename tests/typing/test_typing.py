"""mypy sees in the public API what its users rely on."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_public_api_is_typed():
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "tests/typing/public_api.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
