"""`quark mirror status|verify|replay` count and send what analyzers found; with the CSV mirror."""

import numpy as np
import pytest
from calls import read_json

import quark
from quark.analysis import outputs
from quark.analysis.engine import AnalyzerEngine
from quark.mirrors import compare_counts, count_records
from quark_core.records.query import Query

STEPS = 200


@pytest.fixture
def log(start, tmp_path):
    def make(backends=None, run_id="run-a"):
        with start(tmp_path, run_id, backends=backends) as session:
            metrics = quark.MetricsLogger(session)
            for step in range(STEPS):
                value = 1 / (step + 1) if step < STEPS / 2 else float("nan")
                metrics.log("train/loss", value, step=step)
        return run_id

    return make


def count_rows(tmp_path, run_id, name):
    return len((tmp_path / "out" / run_id / f"{name}.csv").read_text().splitlines()) - 1


@pytest.mark.long
def test_replay_sends_the_stored_generations_to_a_mirror_that_was_added_later(
    invoke, log, tmp_path
):
    run_id = log()
    for _ in range(2):  # the first one is replaced, and readers see it no more
        assert invoke("analyze", run_id, "-d", tmp_path).exit_code == 0
    call = ("mirror", "replay", run_id, "-d", tmp_path, "--to", "csv:out", "--json")
    assert invoke(*call).exit_code == 0
    assert count_rows(tmp_path, run_id, "health_scores") == 5
    assert invoke("mirror", "verify", run_id, "-d", tmp_path).exit_code == 0
    (again,) = read_json(invoke(*call))
    assert (again["sent"], again["refused"]) == (0, {})
    assert count_rows(tmp_path, run_id, "health_scores") == 5
    mirrored = quark.open_run(run_id, tmp_path, backend="csv:out")
    writers = mirrored.open_run.read("health_score", Query(all_attempts=True))["writer_id"]
    assert set(writers.tolist()) == {"analyzer.2"}
    # From now on it is a mirror of the run.
    assert invoke("analyze", run_id, "-d", tmp_path).exit_code == 0
    assert count_rows(tmp_path, run_id, "health_scores") == 10
    assert invoke("mirror", "verify", run_id, "-d", tmp_path).exit_code == 0
    (state,) = read_json(invoke("mirror", "status", run_id, "-d", tmp_path, "--json"))
    assert (state["specification"], state["outputs"]["health_score"]) == ("csv:out", [5, 5])


@pytest.mark.long
def test_verify_counts_alerts_scores_and_phases(invoke, log, tmp_path):
    run_id = log("csv:out")
    assert invoke("analyze", run_id, "-d", tmp_path).exit_code == 0
    result = invoke("mirror", "verify", run_id, "-d", tmp_path, "--json")
    (found,) = read_json(result)
    assert (result.exit_code, found["equal"], found["not_kept"]) == (0, True, [])
    before = found["compared"]
    path = tmp_path / "out" / run_id / "health_scores.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]))
    result = invoke("mirror", "verify", run_id, "-d", tmp_path, "--json")
    (found,) = read_json(result)
    assert (result.exit_code, found["kinds"]) == (3, {"health_score": [5, 2]})
    assert found["compared"] == before


@pytest.mark.long
def test_a_mirror_that_never_got_them_lacks_them(invoke, log, tmp_path, monkeypatch):
    run_id = log("csv:out")
    with monkeypatch.context() as patch:
        patch.setattr(outputs, "journal_outputs", lambda *_, **__: None)
        assert invoke("analyze", run_id, "-d", tmp_path).exit_code == 0
    status = invoke("mirror", "status", run_id, "-d", tmp_path, columns=80)
    assert status.exit_code == 3
    shown = " ".join(status.stdout.split())
    assert "never sent" in shown
    assert max(map(len, status.stdout.splitlines())) <= 80
    result = invoke("mirror", "verify", run_id, "-d", tmp_path, "--json")
    (found,) = read_json(result)
    assert (result.exit_code, found["not_kept"]) == (3, [])
    assert set(found["kinds"]) == {"alert", "health_score", "phase"}
    assert invoke("mirror", "replay", run_id, "-d", tmp_path).exit_code == 0
    assert invoke("mirror", "verify", run_id, "-d", tmp_path).exit_code == 0
    assert invoke("mirror", "status", run_id, "-d", tmp_path).exit_code == 0


class Forgetful:
    """A mirror that keeps no scores, whatever it is sent."""

    def __init__(self, reader):
        self._reader = reader

    def read(self, run_id, kind, query):
        found = self._reader.read(run_id, kind, query)
        return found.take(np.zeros(found.count, bool)) if kind == "health_score" else found


def test_a_kind_that_was_sent_and_is_not_there_is_one_that_it_does_not_keep(log, tmp_path):
    run_id = log("csv:out")
    session = quark.open_run(run_id, tmp_path)
    AnalyzerEngine(session).analyze(store=True)
    primary = count_records(session.open_run.reader, run_id)
    assert primary.outputs["health_score"] == {"analyzer.1": 5}
    mirror = Forgetful(quark.open_run(run_id, tmp_path, backend="csv:out").open_run.reader)
    told = compare_counts(primary, mirror, run_id, "odd", {"analyzer.1"})
    assert (told.equal, told.not_kept) == (True, ("health_score",))
    untold = compare_counts(primary, mirror, run_id, "odd")
    assert (untold.equal, untold.kinds) == (False, {"health_score": (5, 0)})


@pytest.mark.long
def test_analyze_says_in_one_line_that_a_mirror_waits(invoke, quark_command, log, tmp_path):
    run_id = log("csv:out")
    (tmp_path / "out").rename(tmp_path / "elsewhere-out")
    (tmp_path / "out").write_text("a file where the mirror's folder was")
    done = quark_command("analyze", run_id, "-d", tmp_path)
    assert done.returncode == 0
    (line,) = done.stderr.strip().splitlines()
    assert f"quark sync {tmp_path}" in line
    (tmp_path / "out").unlink()
    (tmp_path / "elsewhere-out").rename(tmp_path / "out")
    assert invoke("sync", tmp_path).exit_code == 0
    assert invoke("mirror", "verify", run_id, "-d", tmp_path).exit_code == 0
