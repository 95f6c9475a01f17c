"""`quark analyze` says by what it judges, and fails where it could judge nothing."""

import json

import numpy as np
import pytest
from diagnosed_runs import overfit, succeed


def fall(count=200):
    return 0.1 + 2.0 * np.exp(-5.0 * np.arange(count) / count)


@pytest.fixture
def store(tmp_path, log_run):
    log_run(tmp_path, "odd-1", values={"energy": fall(), "lr": [0.1] * 200})
    log_run(tmp_path, "named-1", values={"energy": fall()}, objective="energy", mode="min")
    log_run(tmp_path, "good-1", values=succeed())
    log_run(tmp_path, "over-1", values=overfit())
    return tmp_path


@pytest.mark.long
def test_what_is_not_known_says_why_and_what_to_do(invoke, store):
    text = " ".join(invoke("analyze", "odd-1", "-d", store).stdout.split())
    assert "overall - ──────────────────── not known" in text
    assert (
        "Health is not known: no loss was recognised among energy, lr; name it with objective=."
    ) in text


@pytest.mark.long
def test_the_answer_names_what_it_was_judged_by(invoke, store):
    text = " ".join(invoke("analyze", "good-1", "-d", store).stdout.split())
    assert "Judged by train/loss (lower is better; recognized by its name):" in text
    text = " ".join(invoke("analyze", "named-1", "-d", store).stdout.split())
    assert "Judged by energy (lower is better; the objective):" in text


@pytest.mark.long
def test_an_objective_may_be_named_at_the_command_line(invoke, store):
    done = invoke("analyze", "odd-1", "-d", store, "--objective", "energy", "--json")
    found = json.loads(done.stdout)
    assert found["health_scores"][0]["known"] is True
    assert found["phases"]
    text = " ".join(
        invoke("analyze", "odd-1", "-d", store, "--objective", "energy:max").stdout.split()
    )
    assert "Judged by energy (higher is better; the objective)" in text
    assert "energy did not get better" in text


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("run", "options", "status"),
    [
        ("odd-1", [], 3),
        ("odd-1", ["--allow-unknown"], 0),
        ("odd-1", ["--objective", "energy"], 0),
        ("odd-1", ["--rule", "vanishing_gradients"], 3),
        ("odd-1", ["--rule", "vanishing_gradients", "--allow-unknown"], 0),
        ("good-1", [], 0),
        ("good-1", ["--rule", "plateau"], 0),
        ("over-1", [], 3),
        ("over-1", ["--allow-unknown"], 3),
    ],
)
def test_a_check_fails_where_nothing_could_be_judged(invoke, store, run, options, status):
    done = invoke("analyze", run, "-d", store, "--no-store", "--fail-on", "warning", *options)
    assert done.exit_code == status
    unknown = status == 3 and run != "over-1"
    assert ("quark: --fail-on warning: not known: " in done.stderr) is unknown


@pytest.mark.long
def test_allowing_the_unknown_needs_a_check(invoke, store):
    assert invoke("analyze", "odd-1", "-d", store, "--allow-unknown").exit_code == 2


@pytest.mark.long
def test_the_last_loss_of_runs_is_of_the_metric_that_they_are_judged_by(invoke, tmp_path, log_run):
    log_run(tmp_path, "a", values={"Loss/train": [1.0, 0.5], "loss_scale": [2.0, 4.0]})
    log_run(tmp_path, "b", values={"energy": [1.0, 0.25], "loss": [3.0, 2.0]}, objective="energy")
    log_run(tmp_path, "c", values={"energy": [1.0, 0.25]})
    runs = json.loads(invoke("runs", "-d", tmp_path, "--json").stdout)
    found = {run["id"]: (run["loss_metric"], run["last_loss"]) for run in runs}
    assert found == {"a": ("Loss/train", 0.5), "b": ("energy", 0.25), "c": (None, None)}
    table = invoke("runs", "-d", tmp_path).stdout
    assert "last value" in table
    assert "energy 0.25" in table
    assert "last loss" not in table


def test_the_last_column_of_runs_says_what_it_shows(invoke, tmp_path, log_run):
    values = {"val/acc": [0.5, 0.9], "train/loss": [2.0, 1.5]}
    log_run(tmp_path, "a", values=values, objective="val/acc")
    assert "last val/acc" in invoke("runs", "-d", tmp_path).stdout
    log_run(tmp_path, "b", values={"val/loss": [2.0, 1.5]}, objective="val/loss")
    assert "val/acc 0.9" in invoke("runs", "-d", tmp_path).stdout
    log_run(tmp_path / "losses", "c", values=values, objective="val/lost")
    table = invoke("runs", "-d", tmp_path / "losses").stdout
    assert "last loss" in table
    assert "1.5" in table
