"""What commands say and write of a fork."""

import json

import pytest

import quark


@pytest.fixture
def fork(tmp_path, log_run, start):
    log_run(tmp_path, "parent-run", values={"loss": [5.0, 4.0, 3.0, 2.0, 1.0]}, config={"lr": 0.1})
    with start(tmp_path, "child-run", fork_from=("parent-run", 2)) as session:
        metrics = quark.MetricsLogger(session)
        for step, value in ((3, 30.0), (4, 40.0)):
            metrics.log("loss", value, step=step)
        quark.EventLogger(session).log("checkpoint_saved", step=4)
    return tmp_path


def test_show_and_runs_say_where_it_was_forked(fork, invoke):
    shown = invoke("show", "child-run", "-d", fork).output
    assert "forked from" in shown
    assert "parent-run at step 2" in shown
    assert "forked from" not in invoke("show", "parent-run", "-d", fork).output
    listed = invoke("runs", "-d", fork, columns=250).output
    assert "parent-run at step 2" in listed
    told = json.loads(invoke("show", "child-run", "-d", fork, "--json").output)
    assert "parent-run" in json.dumps(told)


def test_the_figures_of_show_are_of_the_whole_curve(fork, invoke):
    shown = invoke("show", "child-run", "-d", fork).output
    line = next(line for line in shown.splitlines() if line.strip().startswith("loss"))
    assert line.split()[1:4] == ["5", "5", "40"]


def test_an_export_of_a_fork_has_the_parents_points_and_says_whose_they_are(fork, invoke, tmp_path):
    out = tmp_path / "out"
    done = invoke("export", "child-run", "-d", fork, "-o", out, "--format", "jsonl")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (out / "metric.jsonl").read_text().splitlines()]
    assert [(row["step"], row["value"]) for row in rows] == [
        (0, 5.0), (1, 4.0), (2, 3.0), (3, 30.0), (4, 40.0),
    ]  # fmt: skip
    assert [row["run_id"] for row in rows] == ["parent-run"] * 3 + ["child-run"] * 2
    assert [row["attempt"] for row in rows] == [-1] * 3 + [0] * 2
    events = [json.loads(line) for line in (out / "event.jsonl").read_text().splitlines()]
    assert {row["run_id"] for row in events} == {"child-run"}
    described = json.loads((out / "run.json").read_text())
    assert (described["run"]["parent_run_id"], described["run"]["fork_step"]) == ("parent-run", 2)


def test_an_export_of_a_fork_gives_each_point_back_once_under_the_run_that_logged_it(
    fork, invoke, tmp_path
):
    out, there = tmp_path / "out", tmp_path / "there"
    invoke("export", "child-run", "-d", fork, "-o", out, "--format", "csv")
    for _ in range(2):
        done = invoke("import", "csv", out / "metric.csv", "-d", there)
        assert done.exit_code == 0, done.output
    found = quark.search_runs(storage_dir=there)
    assert sorted(run.metrics["loss"].count for run in found) == [2, 3]


def test_follow_tells_of_the_whole_curve(fork, invoke):
    followed = invoke("follow", "child-run", "-d", fork, "--once", "--json", "--no-analyze")
    assert followed.exit_code == 0, followed.output
    (look,) = map(json.loads, followed.output.splitlines())
    assert look["run_id"] == "child-run"
    assert look["metrics"]["loss"]["count"] == 5


def test_a_comparison_of_fork_and_parent_is_of_whole_curves(fork, invoke):
    compared = invoke("compare", "parent-run", "child-run", "-d", fork)
    assert compared.exit_code == 0, compared.output
    assert "loss" in compared.output
