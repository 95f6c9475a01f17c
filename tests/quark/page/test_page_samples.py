"""Text samples on the page: found, sorted, paged, opened in full beside the curves."""

import pytest

import quark

HOSTILE = '<img src=x onerror="alert(1)">\x1b[2J'


@pytest.fixture
def sampled(tmp_path, look):
    session = quark.start_run(project="rl", storage_dir=tmp_path)
    with session, quark.MetricsLogger(session) as metrics:
        samples = quark.SampleLogger(session, "rollouts")
        for step in range(0, 200, 2):
            metrics.log("train/loss", 1 / (step + 1), step=step)
            samples.log(prompt=f"p{step}", completion="c" * 1000, reward=step / 200, step=step,
                        task="math" if step % 4 else "code")  # fmt: skip
        metrics.log("val/loss", 0.25, step=90)
        quark.SampleLogger(session, "hostile").log(prompt=HOSTILE, step=7, **{HOSTILE: HOSTILE})
    client = look(tmp_path)
    client.run_id = session.run_id
    return client


def test_rows_come_in_pages_sorted_and_filtered(sampled):
    path = f"/api/runs/{sampled.run_id}/samples"
    found = sampled.json(path, limit=3)
    assert (found["count"], found["total"]) == (101, 101)
    assert found["sets"] == ["hostile", "rollouts"]
    found = sampled.json(path, set="rollouts", limit=3, first=1, sort="reward", descending=1)
    assert [row["step"] for row in found["rows"]] == [196, 194, 192]
    assert found["rows"][0]["long"] == ["completion"]
    assert len(found["rows"][0]["completion"]) == 300
    found = sampled.json(path, where=["reward > 0.9", "task == code"], text="P18")
    assert [row["step"] for row in found["rows"]] == [188, 184]
    assert (found["count"], found["columns"]) == (2, ["task"])
    near = sampled.json(path, near=91, limit=2, set="rollouts")
    assert sorted(row["step"] for row in near["rows"]) == [90, 92]


def test_one_sample_is_whole_and_stands_beside_the_curves_at_its_step(sampled):
    path = f"/api/runs/{sampled.run_id}/sample"
    rows = sampled.json(f"/api/runs/{sampled.run_id}/samples", near=100, set="rollouts")["rows"]
    found = sampled.json(path, id=rows[0]["id"], step=rows[0]["step"])
    assert found["sample"]["completion"] == "c" * 1000
    values = {each["name"]: (each["value"], each["step"]) for each in found["values"]}
    assert values["train/loss"] == (1 / 101, 100)
    assert values["val/loss"] == (0.25, 90)
    assert sampled.json(f"/api/runs/{sampled.run_id}")["contents"]["sample"] == 1


def test_bad_parameters_are_named(sampled):
    path = f"/api/runs/{sampled.run_id}/samples"
    for name, value in (("where", "nonsense"), ("near", "-1"), ("limit", "0"), ("first", "x")):
        answer = sampled.http.get(path, params={name: value})
        assert answer.status_code == 400, name
        assert name in answer.text
    for wanted in ("x", "w-sample-1", "-sample-", "../sample-sample-0"):
        answer = sampled.http.get(
            f"/api/runs/{sampled.run_id}/sample", params={"id": wanted, "step": 7}
        )
        assert answer.status_code == 400
    assert sampled.http.get("/api/runs/nope/samples").status_code == 404
