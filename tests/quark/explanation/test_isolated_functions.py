"""`quark why A B --check N --yes` where several functions changed: runs isolate the guilty one."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from wide_bounds import keep_sources_in_children

import quark
from quark.cli.main import cli

TRAIN = """
import random, sys
import quark

def first(x):
    return x * 1.0

def second(x):
    return x + 0.0

def third(x):
    return x - 0.0

def fourth(x):
    return x

chance = random.Random(int(sys.argv[1]))
with quark.start_run(project="p", config={"lr": 0.1}, storage_dir=sys.argv[2]) as session:
    metrics = quark.MetricsLogger(session)
    for step in range(40):
        end = fourth(third(second(first(1.0))))
        loss = end / (step + 1) + end * 0.2 + 0.002 * chance.gauss(0, 1)
        metrics.log("val/loss", loss, step=step)
print(session.run_id)
"""


class Trials:
    """A script, its store and its seeds."""

    def __init__(self, root):
        self.root = root
        self.store = root / "store"
        self.seeds = [self.run(seed) for seed in range(4)]

    def run(self, seed, *edits):
        text = TRAIN
        for before, after in edits:
            assert before in text
            text = text.replace(before, after)
        (self.root / "train.py").write_text(text)
        done = subprocess.run(
            [sys.executable, "train.py", str(seed), str(self.store)],
            cwd=self.root,
            env={**os.environ, **keep_sources_in_children(), "QUARK_QUIET": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    def check(self, run):
        done = CliRunner().invoke(
            cli,
            ["why", self.seeds[0], run, "--check", "2", "--yes", "-d", str(self.store)],
            env={"COLUMNS": "200", "QUARK_SOURCES": "keep"},
            catch_exceptions=False,
        )
        assert done.exit_code == 0, done.output
        return done.output


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    return Trials(tmp_path_factory.mktemp("isolated"))


def rank(trials, run):
    found = quark.explain_change(trials.seeds[0], run, storage_dir=trials.store)
    return {cause.place: cause.standing for cause in found.causes}, found.notes


def test_of_two_changed_functions_the_guilty_one_is_isolated(trials):
    run = trials.run(0, ("x * 1.0", "x * 3.0"), ("x - 0.0", "x - 0.0001"))
    said = trials.check(run)
    standings, notes = rank(trials, run)
    assert standings == {"train.py: first": "probable", "train.py: third": "unlikely"}
    (note,) = [note for note in notes if note.startswith("By runs")]
    assert "train.py: first alone causes the change; train.py: third alone does not" in note
    assert note in " ".join(said.split())
    # Each was run with the other function as it was: none is evidence of both.
    checks = quark.search_runs(storage_dir=trials.store)
    names = sorted(each.stored.run.name for each in checks if each.stored.run.name)
    assert names == ["check: train.py: first"] * 2 + ["check: train.py: third"] * 2


@pytest.mark.long
def test_an_effect_of_two_functions_together_is_said_to_be_combined(trials):
    run = trials.run(
        0,
        ("    return x + 0.0", "    return -x"),
        ("    return x - 0.0", "    return max(x, 0.0) - 3.0 * min(x, 0.0)"),
        ("def fourth(x):\n    return x", "def fourth(x):\n    return abs(x)"),
    )
    trials.check(run)
    _, notes = rank(trials, run)
    (note,) = [note for note in notes if note.startswith("By runs")]
    assert "not isolated" in note
    assert "together, train.py: fourth, train.py: second, train.py: third: +" in note


@pytest.mark.long
def test_a_function_that_does_not_run_by_itself_is_said_not_to_be_checked(trials):
    run = trials.run(
        0,
        ("import random, sys", "import random, sys, math"),
        ("x * 1.0", "x * math.exp(1.1)"),
        ("x - 0.0", "x - 0.0001"),
    )
    said = trials.check(run)
    assert "exited with code 1: no evidence for train.py: first" in said
    standings, notes = rank(trials, run)
    (note,) = [note for note in notes if note.startswith("By runs")]
    assert "was not run alone" in note
    assert "not isolated" in note
    assert standings["train.py: first"] != "unlikely"
