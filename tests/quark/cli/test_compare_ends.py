"""Runs of different lengths through the commands: own ends, one verdict, and a gate that holds."""

import json
import re

import numpy as np
import pytest

import quark
from quark.page.report import show_comparison, tell_comparison, write_comparison


def log_side(root, name, steps, ends, every=125):
    """Runs with a loss that falls over their own steps, and where each ends; their ids."""
    ids = []
    for number, end in enumerate(ends):
        with (
            quark.start_run(
                project="speed", name=f"{name}-{number}", storage_dir=root,
                config={"recipe": name}, objective="val/loss", mode="min",
            ) as session,
            quark.MetricsLogger(session) as metrics,
        ):  # fmt: skip
            for step in [*range(0, steps, every), steps]:
                metrics.log("val/loss", end + 1.26 * (1 - step / steps), step=step)
        ids.append(session.run_id)
    return ",".join(ids)


def spread(mean, deviation, count):
    drawn = np.random.default_rng(count).normal(size=count)
    return (mean + deviation * (drawn - drawn.mean()) / drawn.std(ddof=1)).tolist()


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """The ends of three recipes of a public speed-run."""
    root = tmp_path_factory.mktemp("record")
    sides = [
        log_side(root, "first", 3250, spread(3.2771, 0.0009, 8)),
        log_side(root, "second", 3225, spread(3.2785, 0.0010, 16)),
        log_side(root, "third", 3175, spread(3.2770, 0.0003, 4)),
    ]
    return root, *sides


@pytest.mark.long
def test_a_recipe_that_ends_sooner_and_worse_is_worse(invoke, record):
    root, first, second, _ = record
    done = invoke("compare", first, second, "-d", root, "--fail-on-worse", columns=200)
    assert done.exit_code == 3
    assert re.search(r"val/loss +WORSE +\+0\.0014 \(95 % interval ", done.stdout)
    assert "second-0 and 15 more end at step 3225, first-0 and 7 more at step 3250" in done.stdout
    assert "at the last common step, 3225: " in done.stdout
    why = invoke("why", first, second, "-d", root, "--fail-on-worse", columns=200)
    assert why.exit_code == 3
    assert why.stdout.startswith("val/loss  3.2771 -> 3.2785  worse")
    assert "step 3225" in why.stdout
    (diff,) = json.loads(invoke("compare", first, second, "-d", root, "--json").stdout)[
        "metric_diffs"
    ]
    assert (diff["verdict"], diff["method"]) == ("worse", "welch")
    assert 0 < diff["interval_low"] < 0.0014 < diff["interval_high"]
    assert diff["at_last_common_step"]["difference"] < -0.02


@pytest.mark.long
def test_a_recipe_that_ends_sooner_at_the_same_value_is_not_better(invoke, record):
    root, first, _, third = record
    done = invoke("compare", first, third, "-d", root, "--fail-on-worse", columns=200)
    assert done.exit_code == 0
    assert "BETTER" not in done.stdout
    assert "equivalent" in done.stdout
    why = invoke("why", first, third, "-d", root, columns=200).stdout.splitlines()
    assert "no change beyond seed noise" in why[0]


@pytest.mark.long
def test_every_place_says_the_same_of_a_shorter_side(record):
    root, first, second, _ = record
    sides = [[quark.open_run(run, root) for run in side.split(",")] for side in (second, first)]
    result = quark.ComparisonEngine.compare_runs(*sides)
    for text in (tell_comparison(result), write_comparison(result), show_comparison(result)):
        plain = text.replace("\\", "")
        assert "worse" in plain
        assert "end at step 3225" in plain
        assert "3.28" in plain


@pytest.mark.long
def test_one_run_a_side_is_inconclusive_and_the_gate_asks_for_evidence(invoke, tmp_path):
    log_side(tmp_path, "bad", 20, [50.0], every=1)
    log_side(tmp_path, "good", 1000, [1.0], every=10)
    log_side(tmp_path, "near", 1000, [1.004], every=10)
    gate = ("-d", tmp_path, "--fail-on-worse")
    done = invoke("compare", "good-0", "bad-0", *gate)
    assert done.exit_code == 3
    assert "val/loss  inconclusive" in done.stdout
    assert "quark: --fail-on-worse: val/loss 1 -> 50 may be worse" in done.output
    assert "the seed noise is unknown; use three or more runs a side" in done.output
    assert "bad-0 ends at step 20, good-0 at step 1000" in done.stdout
    short = invoke("compare", "bad-0", "good-0", *gate)
    assert short.exit_code == 3
    assert "OLD ends at step 20, before half of the 1,000 steps of NEW." in short.stderr
    assert invoke("compare", "good-0", "near-0", *gate).exit_code == 0
    assert invoke("why", "good-0", "bad-0", *gate).exit_code == 3
    assert invoke("why", "good-0", "near-0", *gate).exit_code == 0
