"""The exam of the analyzers in short: runs are made, kept and scored, and figures add up."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if None in map(find_spec, ("torch", "sklearn")):
    pytest.skip("needs torch and sklearn", allow_module_level=True)

ROOT = Path(__file__).parents[2]
SHORT = ("fifth/stagnant_layers/group_rate_zero", "fifth/healthy/scaled_lags")


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_scenarios_are_made_kept_and_scored(tmp_path):
    out = tmp_path / "runs"
    make = ("benchmarks.diagnosis", "make", "--out", out, "--family", "fifth", "--only", *SHORT)
    run(*make)
    truths = sorted(out.rglob("truth.json"))
    assert len(truths) == 2
    before = [path.stat().st_mtime_ns for path in truths]
    assert "0 runs to make" in run(*make)
    assert [path.stat().st_mtime_ns for path in truths] == before
    assert any(json.loads(path.read_text())["truth"]["culprits"] for path in truths)

    target = tmp_path / "figures.json"
    assert "stagnant_layers" in run("benchmarks.diagnosis", "score", out, "--json", target)
    figures = json.loads(target.read_text())
    assert (figures["runs"], figures["unclear"], figures["errors"]) == (2, 0, [])
    assert (figures["faults"], figures["healthy"]) == (1, 1)
    assert figures["rules"]["stagnant_layers"]["faults"] == 1


def test_the_exam_passes_its_own_tests():
    run("pytest", "-q", "-p", "no:cacheprovider", "benchmarks/diagnosis/test_scoring.py")
