"""The first contact of a fresh machine with a mirror: it is whole when the run has ended."""

import subprocess
import sys

import pytest

TRAIN = """
import sys, quark
session = quark.start_run(project="first", storage_dir=sys.argv[1], backends=[sys.argv[2]])
metrics = quark.MetricsLogger(session)
for step in range(400):
    metrics.log("loss", 1.0 / (step + 1), step=step)
session.end_run()
for lane in session.report_delivery().lanes:
    print(lane.backend, lane.submitted, lane.delivered)
"""


def train(tmp_path, specification, monkeypatch):
    monkeypatch.delenv("QUARK_HELPER_PROCESSES", raising=False)
    monkeypatch.delenv("QUARK_EXIT_TIMEOUT_SECONDS", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, str(tmp_path / "root"), specification],
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    return {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}, done.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_first_mlflow_run_of_a_new_store_is_whole_at_its_end(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    lanes, said = train(tmp_path, f"mlflow+sqlite:///{tmp_path}/new.db", monkeypatch)
    assert lanes["mlflow"][0] == lanes["mlflow"][1] != "0", said


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_first_offline_run_of_w_and_b_is_whole_at_its_end(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    lanes, said = train(tmp_path, "wandb:?mode=offline", monkeypatch)
    assert lanes["wandb"][0] == lanes["wandb"][1] != "0", said
