"""What `make test` leaves out is what is marked so, and `make long` runs it."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiers

TESTS = Path(__file__).parents[1]


def test_each_file_of_tests_has_a_name_of_its_own():
    # They are imported by their names alone, and the second of two would be an error.
    names = sorted(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, after in itertools.pairwise(names) if name == after] == []


OPTIONS = ("-p", "tiers", "--collect-only", "-qs")
SAMPLED = """
import pytest
import tiers

@pytest.mark.sampled
@pytest.mark.parametrize("case", ["first", "second", "third"])
def test_cases(case): pass

class TestOther:
    @pytest.mark.sampled
    @pytest.mark.parametrize("case", [1, 2])
    def test_cases(self, case): pass

@pytest.mark.long
def test_dear(): pass
"""
LONG = """
import pytest
import tiers
pytestmark = [pytest.mark.long, pytest.mark.timeout(60)]
print("imported", flush=True)

def test_anything(): pass
"""


@pytest.mark.parametrize(
    ("marks", "expected", "imports"),
    [
        ("not long", {"test_cases[first]", "TestOther::test_cases[1]"}, False),
        (
            "long",
            {"test_cases[second]", "test_cases[third]", "TestOther::test_cases[2]", "test_dear"}
            | {"test_anything"},
            True,
        ),
    ],
)
def test_each_test_is_in_its_tier(tmp_path, marks, expected, imports):
    (tmp_path / "test_sampled.py").write_text(SAMPLED)
    (tmp_path / "test_long.py").write_text(LONG)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, f"--rootdir={tmp_path}", "-m", marks, tmp_path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(TESTS), "PATH": ""},
    )
    found = {line.split("::", 1)[1] for line in done.stdout.splitlines() if "::" in line}
    assert found == expected, done.stdout + done.stderr
    assert ("imported" in done.stdout) is imports


@pytest.mark.long
def test_what_there_is_no_time_for_is_skipped_by_name(tmp_path):
    (tmp_path / "test_sampled.py").write_text(SAMPLED)
    counts = {}
    for end in (0, 4e9):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "tiers", "-q", "-rs", f"--rootdir={tmp_path}"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"PYTHONPATH": str(TESTS), "PATH": "", "TESTS_END_AT": str(end)},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        counts[end] = done.stdout
    assert "6 skipped" in counts[0]
    assert "no time is left for it in this run" in counts[0]
    assert "6 passed" in counts[4e9]


def test_a_folder_over_its_share_of_the_time_is_named():
    spent = {"quark/cli": 30.0, "quark/page": 60.0, "faults": 10.0}
    budgets = {"quark/cli": 25, "quark/page": 61, "others": 11}
    assert tiers.list_overruns(spent, budgets) == [
        "quark/cli takes 30.0 % of the time of all tests, and may take 25 %: make its tests "
        "quicker, or mark them long"
    ]


@pytest.mark.parametrize(("selection", "failed"), [((), True), (("test_short.py",), False)])
def test_a_whole_run_fails_by_a_folder_over_its_share(tmp_path, selection, failed):
    (tmp_path / "test_short.py").write_text("def test_something(): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tiers", "-m", "not long", *selection],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "tests takes 100.0 %" in done.stdout) == (int(failed), failed)
    assert "1 passed" in done.stdout


def test_a_test_counts_for_its_folder():
    places = ["tests/quark/cli/test_a.py::test", "tests/quark/page/browser/test_b.py::test[1]"]
    assert list(map(tiers.name_folder, places)) == ["quark/cli", "quark/page"]
    assert tiers.name_folder("tests/test_c.py::test") == ""
