"""Real trainings through the backend, found as an installed user would find it."""

import json
import time

import pytest

import quark


def train(tmp_path, backend, steps=50):
    with quark.start_run(project="p", storage_dir=tmp_path, backends=backend) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(steps):
            metrics.log("train/loss", 1 / (step + 1), step=step)
    assert session.report_delivery().complete
    return session.run_id


@pytest.mark.parametrize("where", ["jsonl", "jsonl:out", "jsonl+file://{}"])
def test_a_training_is_read_back_from_each_place(tmp_path, where):
    backend = where.format(tmp_path / "files")
    run_id = train(tmp_path, backend)
    run = quark.open_run(run_id, tmp_path, backend=backend)
    assert run.status == "completed"
    records = quark.MetricsLogger(run).read(metric_key="train/loss")
    assert [record.value for record in records] == [1 / (step + 1) for step in range(50)]


def test_the_lines_are_plain_json(tmp_path):
    run_id = train(tmp_path, "jsonl:out", steps=3)
    lines = [
        json.loads(line)
        for path in sorted((tmp_path / "out" / run_id).rglob("*-metric.jsonl"))
        for line in path.read_text().splitlines()
    ]
    values = [line["value"] for line in lines if line.get("metric_key") == "train/loss"]
    assert values == [1.0, 0.5, 1 / 3]


def test_a_file_that_was_cut_short_is_written_again(tmp_path):
    run_id = train(tmp_path, "jsonl:out", steps=3)
    (path,) = (tmp_path / "out" / run_id).rglob("*-metric.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    run = quark.open_run(run_id, tmp_path, backend="jsonl:out")
    assert quark.MetricsLogger(run).read() == ()


def test_a_url_that_nothing_reaches_costs_only_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.5")
    with quark.start_run(
        project="p", storage_dir=tmp_path, backends="jsonl+nosuch://place"
    ) as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
        until = time.monotonic() + 60
        while not any(lane.errors for lane in session.report_delivery().lanes):
            assert time.monotonic() < until
            time.sleep(0.02)
    lanes = {lane.backend: lane for lane in session.report_delivery().lanes}
    assert lanes["embedded"].complete
    assert lanes["jsonl"].delivered == 0
    assert any("nosuch" in reason for reason in lanes["jsonl"].errors)
