"""A fork on the page: its curves, what comes to them, its layers, and whose beginning it has."""

import numpy as np
import pytest
from page_client import split_curves, wait_for_analysis

import quark
from quark_core.records.base import start_fields

LAYER = "encoder.linear"


def log(session, points, *, key="train/loss", layers=True):
    metrics = quark.MetricsLogger(session)
    for step, value in points:
        metrics.log(key, value, step=step)
        if layers:
            session.write(
                [
                    quark.LayerSummaryRecord(
                        *start_fields(None), LAYER, "Linear", "gradient", "backward", 0, 16,
                        step, norm=float(value),
                    )
                ]
            )  # fmt: skip
    session.open_run.flush()


@pytest.fixture
def forked(tmp_path, look):
    with quark.start_run(project="p", storage_dir=tmp_path) as parent:
        log(parent, [(step, 100.0 - step) for step in range(60)])
    child = quark.start_run(project="p", storage_dir=tmp_path, fork_from=(parent, 39))
    log(child, [(step, 1000.0 + step) for step in range(40, 50)])
    client = look(tmp_path)
    client.parent, client.child = parent, child
    yield client
    if child.status == "running":
        child.end_run()


EXPECTED = [100.0 - step for step in range(40)] + [1000.0 + step for step in range(40, 50)]


@pytest.mark.sampled
@pytest.mark.parametrize("x", ["step", "time"])
def test_curves_begin_with_the_parents(forked, x):
    _, curves = forked.curves(forked.child.run_id, "train/loss", x=x)
    before, after = curves["train/loss"]
    assert (before["attempt"], after["attempt"]) == (-1, 0)
    assert [*before["mean"], *after["mean"]] == EXPECTED
    _, curves = forked.curves(forked.child.run_id, "train/loss", low=30, high=44)
    assert [curve["points"] for curve in curves["train/loss"]] == [10, 5]


def test_the_run_says_where_it_was_forked(forked):
    run = forked.json(f"/api/runs/{forked.child.run_id}")["run"]
    assert (run["parent"], run["fork_step"]) == (forked.parent.run_id, 39)
    assert run["newest_step"] == 49
    assert forked.json(f"/api/runs/{forked.parent.run_id}")["run"]["fork_step"] is None


def test_what_comes_is_added_to_the_curves(forked):
    run_id = forked.child.run_id
    head, _ = forked.curves(run_id, "train/loss")
    log(forked.child, [(50, 7.0)])
    came = forked.pack(f"/api/runs/{run_id}/changes", cursor=head["cursor"], key="train/loss")
    assert came[0]["reset"] is False
    (curve,) = split_curves(*came)["train/loss"]
    assert curve["mean"].tolist() == [7.0]
    still = forked.get(f"/api/runs/{run_id}/changes", cursor=came[0]["cursor"], key="train/loss")
    assert still.status_code == 204


def test_layers_are_curves_too(forked):
    head, columns = forked.pack(
        f"/api/runs/{forked.child.run_id}/grid", kind="layer", field="norm", bins=1000
    )
    assert head["steps"] == [0, 49]
    assert np.allclose(columns["cells"], EXPECTED)
    assert [row["name"] for row in head["rows"]] == [LAYER]


def test_small_curves_and_tables_have_the_beginning(forked):
    head, columns = forked.pack("/api/sparks", key="train/loss", run=forked.child.run_id)
    assert head["curves"][0]["points"] == 50
    assert columns["0.step"][0] == 0
    rows = forked.json("/api/runs", column=["train/loss", "min(train/loss)"])["rows"]
    (row,) = [row for row in rows if row["id"] == forked.child.run_id]
    assert 61.0 in row["values"]


def test_the_analysis_is_of_the_whole_training(forked):
    forked.child.end_run()
    analysis = wait_for_analysis(forked, forked.child.run_id)
    assert analysis is not None
