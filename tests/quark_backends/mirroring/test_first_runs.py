"""The end of a run with a mirror: a short one, after which the mirror gets what it lacks."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import quark
from quark_core.runs import recovery

# Its tables are read with calls that a newer SQLAlchemy advises against.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TRAIN = """
import sys, time, quark
session = quark.start_run(project="first", storage_dir=sys.argv[1], backends=[sys.argv[2]])
metrics = quark.MetricsLogger(session)
for step in range(400):
    metrics.log("loss", 1.0 / (step + 1), step=step)
began = time.monotonic()
session.end_run()
print(session.run_id, time.monotonic() - began)
"""
END_S = 2.0
# Starting a process, the journal and the store; on a busy machine.
MARGIN_S = 8.0


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains in a process; returns the run, how long its end took and what it said."""
    for name in ("QUARK_HELPER_PROCESSES", "QUARK_EXIT_TIMEOUT_SECONDS", "QUARK_QUIET"):
        monkeypatch.delenv(name, raising=False)

    def run(specification):
        command = [sys.executable, "-c", TRAIN, str(tmp_path), specification]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
        run_id, end_s = done.stdout.split()
        assert float(end_s) < END_S + MARGIN_S
        return run_id, float(end_s), done.stderr

    return run


def test_a_mirror_that_a_person_must_help_is_left_to_quark_sync(train, monkeypatch):
    """No process is begun that could deliver nothing, and the run says what to do."""
    for name in ("QUARK_PERSISTENCE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    before = set(list_late())
    _, _, said = train("mlflow")
    assert "To deliver waiting records, run: quark sync" in said
    assert set(list_late()) == before


def list_late():
    return [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"late_delivery" in read(path)
    ]


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def wait_until_delivered(tmp_path):
    deadline = time.monotonic() + 200
    while recovery.has_journals(tmp_path):
        assert time.monotonic() < deadline, recovery.survey(tmp_path)
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_new_mlflow_store_gets_all_of_a_run_that_has_not_waited_for_it(train, tmp_path):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    backend = f"mlflow+sqlite:///{tmp_path}/new.db"
    run_id, _, said = train(backend)
    assert "waiting" not in said  # nobody has to do anything
    # Whoever reads waits for what is on its way.
    metrics = quark.MetricsLogger(quark.open_run(run_id, tmp_path, backend=backend)).read()
    assert [one.step for one in metrics] == list(range(400))
    wait_until_delivered(tmp_path)
    (lasted,) = re.findall(r"completed after ([\d.]+) s", said)
    stored = quark.open_run(run_id, tmp_path).open_run.reader.load_run(run_id).run
    began, ended = (
        time.mktime(time.strptime(moment[:19], "%Y-%m-%dT%H:%M:%S"))
        + float(re.search(r"\.\d+", moment)[0])
        for moment in (stored.created_at, stored.ended_at)
    )
    assert float(lasted) == pytest.approx(ended - began, abs=0.051)


@pytest.mark.long
@pytest.mark.timeout(500)
def test_an_offline_run_of_w_and_b_gets_all_of_it(train, tmp_path):
    pytest.importorskip("wandb")
    run_id, _, said = train("wandb:?mode=offline")
    assert "waiting" not in said
    wait_until_delivered(tmp_path)
    place = tmp_path / ".quark" / "runs" / run_id / "mirrors" / "wandb"
    # The late process joins the folders after its last record.
    deadline = time.monotonic() + 100
    while len(folders := list(place.glob("*/wandb/offline-run-*"))) != 1:
        assert time.monotonic() < deadline, folders
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_server_that_cannot_be_reached_is_left_to_quark_sync(train, tmp_path):
    pytest.importorskip("mlflow")
    before = set(list_late())
    train("mlflow:http://127.0.0.1:9")
    (late,) = set(list_late()) - before
    waiting = {lane.backend: lane.waiting for lane in recovery.survey(tmp_path)}
    assert waiting["mlflow"] > 400
    subprocess.run(["kill", str(late)], check=True)


@pytest.mark.long
@pytest.mark.timeout(500)
def test_where_no_process_may_outlive_it_quark_sync_delivers(train, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    before = set(list_late())
    backend = "wandb:?mode=offline"
    run = train
    monkeypatch.setenv("QUARK_HELPER_PROCESSES", "0")
    _, _, said = run(backend)
    assert set(list_late()) <= before
    if recovery.has_journals(tmp_path):
        assert "To deliver waiting records, run: quark sync" in said
        assert {lane.state for lane in recovery.sync(tmp_path)} == {"delivered"}
    assert not recovery.has_journals(tmp_path)
