"""Edits of runs reach mirrors that have names and notes, and harm those that have not."""

import json

import pytest

import quark
from quark_core.runs import recovery


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["csv", "tensorboard"])
def test_a_mirror_that_has_no_place_for_an_edit_is_none_the_worse(tmp_path, backend):
    if backend == "tensorboard":
        pytest.importorskip("tensorboard")
    with quark.start_run(project="p", storage_dir=tmp_path, backends=backend) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
    quark.edit_run(session.run_id, name="after", add_tags=["best"], storage_dir=tmp_path)
    assert recovery.sync(tmp_path) == []
    assert not list(session.run_path.glob("journal/*"))
    assert not list(session.run_path.glob("quarantine/*/*"))


def test_without_mirrors_nothing_is_journaled(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
    quark.edit_run(session.run_id, name="after", storage_dir=tmp_path)
    assert recovery.sync(tmp_path) == []


def test_a_mirror_that_cannot_be_reached_gets_the_edit_later(tmp_path, monkeypatch, caplog):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv") as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "1")
    lines = (session.run_path / "delivered.jsonl").read_text().splitlines()
    line = json.loads(lines[-1])
    # As if it had been a server that nobody runs any more.
    line["lane"], line["specification"] = "mlflow", "mlflow+http://127.0.0.1:9"
    (session.run_path / "delivered.jsonl").write_text(json.dumps(line) + "\n")
    edited = quark.edit_run(session.run_id, name="after", storage_dir=tmp_path)
    assert edited.name == "after"
    assert [text for text in caplog.messages if "waits for the run's mirrors" in text]
    assert list((session.run_path / "journal").iterdir())
