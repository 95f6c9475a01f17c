"""Runs the kit for classes that are planted: a sound one whole, and weak ones as far as asked."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CONFIG = """
    @pytest.fixture
    def config(self, tmp_path):
        weakness = type(self).__name__.removeprefix("Test")
        return BackendConfig(
            storage_dir=tmp_path, run_id=self.RUN_ID, options={"weakness": weakness}
        )
"""


def run_planted(folder, source, caught_by, limits, timeout_s):
    """What pytest prints, and by class and test what became of it.

    Args:
        folder: An empty one.
        source: A module with the class `Planted`, of which each weakness makes its own.
        caught_by: The tests that are run of each weakness.
        limits: What is said in a class of some weaknesses, as of `Sound` by default.
        timeout_s: For how long it may run.
    """
    module = folder / "test_planted.py"
    classes = (
        f"\n\nclass Test{name}(Planted):\n    {limits.get(name, limits['Sound'])}\n"
        for name in ("Sound", *caught_by)
    )
    module.write_text(source + CONFIG + "".join(classes))
    (folder / "pytest.ini").write_text("[pytest]\n")
    wanted = [f"{module}::TestSound"]
    for name, tests in caught_by.items():
        wanted += [f"{module}::Test{name}::test_{test}" for test in tests]
    report = folder / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "quark_core.testing.report", "--conformance-json", str(report)),
            *(f"--basetemp={folder / 'temporary'}", *wanted),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert report.is_file(), done.stdout + done.stderr
    found = {
        name.removeprefix("Test"): {
            one["test"].removeprefix("test_"): one["outcome"] for one in tests
        }
        for name, tests in json.loads(report.read_text()).items()
    }
    return done.stdout, found


def name_failing(caught_by, outcomes, weakness):
    """What the named tests of a weakness should have found, and what they found."""
    tests = caught_by[weakness]
    return dict.fromkeys(tests, "failed"), {test: outcomes[weakness][test] for test in tests}
