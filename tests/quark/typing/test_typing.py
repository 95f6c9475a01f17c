"""mypy sees in the public API what its users rely on."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.long
@pytest.mark.timeout(900)  # where mypy has kept nothing, and much else is done
def test_the_public_api_is_typed():
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "tests/quark/typing/public_api.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
