"""Which versions of a traced function the runs of a project had, and how they did."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
from wide_bounds import keep_sources_in_children

import quark

STEP = '''import quark
from lib import helper

@quark.trace("train_step")
def step(x):
    """Step."""
    {body}

with quark.start_run(project="p") as session:
    metrics = quark.MetricsLogger(session)
    metrics.log("val/acc", {value}, step=0)
'''


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Four runs: a comment, a change, and a change of what is called."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "pyproject.toml").write_text("")
    environment = {**os.environ, **keep_sources_in_children()}
    for body, helper, value in (
        ("return helper(x)", "return x", "0.5"),
        ("# The same.\n    return (helper(x))", "return x", "0.7"),
        ("return helper(x) + 1", "return x", "0.9"),
        ("return helper(x) + 1", "return x * 2", "float('nan')"),
    ):
        (folder / "train.py").write_text(STEP.format(body=body, value=value))
        (folder / "lib.py").write_text(
            f"def helper(x):\n    {helper}\n\ndef other():\n    {helper}\n"
        )
        subprocess.run([sys.executable, "train.py"], cwd=folder, env=environment, check=True)
    return folder


@pytest.mark.long
def test_versions_are_told_with_their_runs_and_figures(project):
    (statistics,) = quark.trace_statistics("p", metric="val/acc", storage_dir=project)
    first, second = statistics.versions
    assert statistics.name == "train_step"
    assert [len(version.runs) for version in statistics.versions] == [2, 2]
    assert math.isclose(first.mean, 0.6)
    assert (first.count, first.best) == (2, 0.7)
    assert (second.count, second.mean, second.best) == (1, 0.9, 0.9)
    assert first.first_seen < first.last_seen < second.first_seen
    assert (first.lines, second.lines) == (None, 1)
    assert (first.trace.level, first.reach_versions) == ("syntax", 1)
    assert second.reach_versions == 2  # helper changed between its two runs
    by_loss = quark.trace_statistics("p", metric="val/acc", mode="min", storage_dir=project)
    assert by_loss[0].versions[0].best == 0.5


def test_one_function_is_asked_for_by_name(project):
    assert quark.trace_statistics("p", "train_step", storage_dir=project)
    with pytest.raises(quark.SchemaValidationError, match="no_such"):
        quark.trace_statistics("p", "no_such", storage_dir=project)
    assert quark.trace_statistics("nobody", storage_dir=project) == ()


def test_runs_of_one_version_are_the_nearest_by_trace(project):
    (statistics,) = quark.trace_statistics("p", storage_dir=project)
    one, two = statistics.versions[0].runs
    found = quark.find_similar_runs(one, by="trace", storage_dir=project)
    assert [(each.run.run_id, each.distance) for each in found] == [(two, 0.0)]


def test_the_command_says_it(project):
    def call(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "quark", "traces", "p", *arguments],
            cwd=project,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "160"},
        ).stdout

    shown = call("train_step", "--metric", "val/acc", "--diff")
    assert "train_step: 2 versions" in shown
    assert "its callees had 2 versions" in shown
    assert "+    return helper(x) + 1" in shown
    answer = json.loads(call("--json", "-m", "val/acc"))
    versions = answer["traces"][0]["versions"]
    assert [version["metric"]["count"] for version in versions] == [2, 1]
    assert versions[1]["called"] == []
