"""What the page's server says of batches, ranks and the machine."""

import math

import numpy as np
import pytest
from machine_runs import SILENT_FROM, SLOWER, STEPS, log_machine


@pytest.fixture(scope="module")
def machine_store(tmp_path_factory):
    root = tmp_path_factory.mktemp("machine")
    log_machine(root)
    return root


@pytest.fixture
def client(machine_store, look):
    return look(machine_store)


@pytest.mark.long
def test_hard_batches_come_with_their_samples_and_classes_with_their_losses(client):
    said = client.json("/api/runs/machine/batches")
    summary = said["summary"]
    hardest = summary["hard_batches"][0]
    assert (hardest["step"], hardest["loss"], hardest["sample_ids"]) == (30, 50.0, [0, 130])
    assert hardest["sample_count"] == 2
    assert summary["batch_count"] == 40
    assert summary["exposure"]["class_counts"] == {"a": 40, "b": 40}
    assert said["class_losses"] == {"a": 1.0, "b": pytest.approx((19 * 2.0 + 50.0) / 20)}
    assert summary["exposure"]["most_seen_samples"][0]["count"] == 4


def test_silent_ranks_come_first_and_then_the_slowest(client):
    head, columns = client.pack("/api/runs/machine/system")
    assert [(rank["rank"], rank["is_silent"]) for rank in head["ranks"]] == [
        ("1", True), ("2", False), ("0", False),
    ]  # fmt: skip
    assert head["ranks"][0]["last_step"] == SILENT_FROM - 1
    assert head["ranks"][1]["ratio"] == pytest.approx(SLOWER)
    assert (head["exact"], head["steps"]) == (True, [0, STEPS - 1])
    cells = columns["cells"].reshape(3, -1)
    names = [row["name"] for row in head["rows"]]
    assert names == ["rank 0", "rank 1", "rank 2"]
    np.testing.assert_allclose(cells[2], 150.0)
    assert np.isnan(cells[1][SILENT_FROM:]).all()
    np.testing.assert_allclose(columns["base"], 100.0)


def test_only_figures_that_are_there_are_offered_and_a_window_cuts_them(client):
    head, _ = client.pack("/api/runs/machine/system", field="cpu_usage_percent", low=10, high=19)
    assert [each["field"] for each in head["fields"]] == [
        "step_time_ms", "data_time_ms", "compute_time_ms", "cpu_usage_percent",
    ]  # fmt: skip
    assert head["steps"] == [10, 19]
    assert all(math.isclose(rank["median"], 50.0) for rank in head["ranks"])


def test_what_is_not_there_and_what_is_wrong_is_said(client, plain):
    empty, columns = plain.pack(f"/api/runs/{plain.run_id}/system")
    assert (empty["rows"], empty["fields"], empty["steps"]) == ([], [], None)
    assert len(columns["cells"]) == 0
    none = plain.json(f"/api/runs/{plain.run_id}/batches")
    assert (none["summary"]["batch_count"], none["class_losses"]) == (0, {})
    assert "field" in client.refused(400, "/api/runs/machine/system", field="nothing")
    assert "low" in client.refused(400, "/api/runs/machine/system", low=3, high=2)
    client.refused(404, "/api/runs/none-such/system")
    client.refused(404, "/api/runs/none-such/batches")
