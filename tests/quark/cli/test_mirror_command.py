"""`quark mirror status|verify|replay` with the real CSV mirror, MLflow and odd backends."""

import json
import shutil

import pytest
from calls import read_json

import quark
from quark_core.backends.contract import BackendDefinition, Capability
from quark_core.backends.registry import default_registry
from quark_core.errors import InvalidRunStateError
from quark_core.testing.fakes import ScriptedBackend, define_scripted

STEPS = 300


@pytest.fixture
def add_backend(monkeypatch):
    registry = default_registry()

    def add(name, backend, **fields):
        definition = define_scripted(name, backend, **fields)
        monkeypatch.setitem(registry._definitions, name, definition)
        return backend

    return add


@pytest.fixture
def log(start, tmp_path):
    """A run of two metrics with some events and an artifact, and a resumed attempt."""

    def make(backends=None, run_id="run-a"):
        with start(tmp_path, run_id, backends=backends, config={"lr": 0.1}) as session:
            metrics = quark.MetricsLogger(session)
            for step in range(STEPS):
                metrics.log("train/loss", 1 / (step + 1), step=step)
            quark.EventLogger(session).log("begun")
            quark.ArtifactStore(session).store("notes", "note", {"a": 1}, step=0)
        with quark.resume_run(
            run_id=run_id, storage_dir=tmp_path, backends=backends, reopen=True
        ) as session:
            metrics = quark.MetricsLogger(session)
            for step in range(STEPS):
                metrics.log("val/acc", float(step), step=step)
                metrics.log("odd", float("nan"), step=step)
        return run_id

    return make


@pytest.mark.long
def test_status_counts_each_backend(invoke, log, tmp_path):
    run_id = log("csv,csv:out")
    result = invoke("mirror", "status", run_id, "-d", tmp_path, "--json")
    assert result.exit_code == 0
    states = read_json(result)
    assert [state["specification"] for state in states] == ["embedded", "csv", "csv:out"]
    for state in states:
        assert (state["state"], state["writers"], state["waiting"]) == ("delivered", 2, 0)
        assert (state["quarantined"], state["unknown"]) == ({}, 0)
        assert state["batches"] > 4
    assert len({state["batches"] for state in states}) == 1
    table = invoke("mirror", "status", run_id, "-d", tmp_path, columns=80).stdout
    assert max(map(len, table.splitlines())) <= 80
    assert "csv:out" in table
    assert "embedded (primary)" in table


@pytest.mark.long
def test_a_run_without_mirrors_has_nothing_to_say(invoke, log, tmp_path):
    run_id = log()
    result = invoke("mirror", "status", run_id, "-d", tmp_path)
    assert (result.exit_code, result.stdout) == (
        0,
        f"Run run-a of the store {tmp_path} has no mirrors and no waiting records.\n",
    )
    assert invoke("mirror", "verify", run_id, "-d", tmp_path).exit_code == 1
    assert not (tmp_path / ".quark" / "runs" / run_id / "delivered.jsonl").exists()


@pytest.mark.long
def test_status_tells_what_waits_is_refused_and_unknown(
    invoke, log, tmp_path, add_backend, monkeypatch
):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "3")
    add_backend("down", ScriptedBackend(always="unavailable"))
    add_backend("picky", ScriptedBackend(always="rejected"))
    run_id = log("down,picky")
    result = invoke("mirror", "status", run_id, "-d", tmp_path, "--json")
    assert result.exit_code == 3
    states = {state["specification"]: state for state in read_json(result)}
    assert states["down"]["state"] == "waiting"
    assert states["down"]["waiting"] > 3 * STEPS
    assert list(states["picky"]["quarantined"]) == ["planted refusal"]
    assert states["picky"]["quarantined"]["planted refusal"] == states["down"]["waiting"]
    shown = invoke("mirror", "status", run_id, "-d", tmp_path).stdout
    assert "planted refusal" in shown
    add_backend("down", ScriptedBackend())
    invoke("sync", tmp_path)
    states = read_json(invoke("mirror", "status", run_id, "-d", tmp_path, "--json"))
    assert [state["waiting"] for state in states] == [0, 0, 0]


@pytest.mark.long
def test_verify_says_that_a_whole_mirror_is_equal(invoke, log, tmp_path):
    run_id = log("csv")
    result = invoke("mirror", "verify", run_id, "-d", tmp_path)
    assert result.exit_code == 0, result.stdout
    assert "csv: equal" in result.stdout


@pytest.mark.long
def test_verify_names_the_metric_that_lacks_points(invoke, log, tmp_path):
    run_id = log("csv:out")
    path = tmp_path / "out" / run_id / "metrics_long.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if ",val/acc," not in line or ",7.0," in line))
    result = invoke("mirror", "verify", run_id, "-d", tmp_path, "--json")
    assert result.exit_code == 3
    (found,) = read_json(result)
    assert found["metrics"] == {"val/acc": [STEPS, 1]}
    assert found["equal"] is False
    shown = invoke("mirror", "verify", run_id, "-d", tmp_path, columns=80).stdout
    assert "val/acc" in shown
    assert str(1 - STEPS) in shown


@pytest.mark.long
def test_verify_cannot_compare_what_cannot_be_read(invoke, log, tmp_path, add_backend):
    add_backend("mute", ScriptedBackend())
    run_id = log("mute")
    result = invoke("mirror", "verify", run_id, "-d", tmp_path)
    assert result.exit_code == 1
    assert "mute: not compared: this backend cannot be read" in result.stdout


@pytest.mark.long
def test_verify_with_a_place_that_has_nothing_of_the_run_differs(invoke, log, tmp_path):
    run_id = log()
    result = invoke("mirror", "verify", run_id, "-d", tmp_path, "--with", "csv:none", "--json")
    assert result.exit_code == 3
    (found,) = read_json(result)
    assert found["metrics"]["train/loss"] == [STEPS, 0]
    assert found["not_kept"] == []


@pytest.mark.long
def test_replay_fills_a_mirror_that_was_added_later(invoke, log, tmp_path):
    run_id = log()
    result = invoke("mirror", "replay", run_id, "-d", tmp_path, "--to", "csv:out", "--json")
    assert result.exit_code == 0, result.stdout
    (done,) = read_json(result)
    assert done["sent"] > 3 * STEPS
    assert (done["present"], done["refused"], done["unseen"]) == (0, {}, 0)
    assert invoke("mirror", "verify", run_id, "-d", tmp_path).exit_code == 0
    mirrored = quark.open_run(run_id, tmp_path, backend="csv:out")
    assert (mirrored.status, mirrored.context.run.attempt) == ("completed", 1)
    assert [r.value for r in quark.MetricsLogger(mirrored).read(metric_key="val/acc")] == [
        float(step) for step in range(STEPS)
    ]


@pytest.mark.long
def test_replay_again_stores_nothing_twice(invoke, log, tmp_path):
    run_id = log("csv:out")
    before = (tmp_path / "out" / run_id / "metrics_long.csv").read_text()
    for _ in range(2):
        result = invoke("mirror", "replay", run_id, "-d", tmp_path, "--json")
        assert result.exit_code == 0, result.stdout
        (done,) = read_json(result)
        assert done["present"] >= 3 * STEPS
        assert (done["refused"], done["unseen"]) == ({}, 0)
    assert (tmp_path / "out" / run_id / "metrics_long.csv").read_text() == before
    assert invoke("mirror", "verify", run_id, "-d", tmp_path).exit_code == 0


@pytest.mark.long
def test_replay_restores_a_mirror_that_was_deleted(invoke, log, tmp_path):
    run_id = log("csv:out")
    shutil.rmtree(tmp_path / "out")
    assert invoke("mirror", "verify", run_id, "-d", tmp_path).exit_code == 3
    assert invoke("mirror", "replay", run_id, "-d", tmp_path).exit_code == 0
    assert invoke("mirror", "verify", run_id, "-d", tmp_path).exit_code == 0


@pytest.mark.long
def test_replay_says_what_a_mirror_wrongly_believes_to_have(invoke, log, tmp_path):
    run_id = log("csv:out")
    path = tmp_path / "out" / run_id / "metrics_long.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5] + lines[9:]))
    result = invoke("mirror", "replay", run_id, "-d", tmp_path, "--json")
    assert result.exit_code == 1
    assert read_json(result)[0]["unseen"] == 4


@pytest.mark.long
def test_replay_takes_a_compacted_run_too(invoke, log, start, tmp_path):
    run_id = log()
    with start(tmp_path, "run-b") as session:
        metrics = quark.MetricsLogger(session)
        for step in range(3000):
            metrics.log("m", float(step), step=step)
    for one in (run_id, session.run_id):
        assert invoke("mirror", "replay", one, "-d", tmp_path, "--to", "csv:out").exit_code == 0
        result = invoke("mirror", "verify", one, "-d", tmp_path, "--with", "csv:out")
        assert result.exit_code == 0, result.stdout


@pytest.mark.long
def test_a_backend_that_cannot_tell_duplicates_is_filled_once(invoke, log, tmp_path, add_backend):
    run_id = log()
    once = add_backend("once", ScriptedBackend(), idempotent=False)
    result = invoke("mirror", "replay", run_id, "-d", tmp_path, "--to", "once", "--json")
    assert result.exit_code == 0
    assert once.count_records >= read_json(result)[0]["sent"] > 3 * STEPS
    stored = len(once.stored)
    with pytest.raises(InvalidRunStateError, match="cannot detect duplicate batches"):
        invoke("mirror", "replay", run_id, "-d", tmp_path, "--to", "once")
    assert len(once.stored) == stored


@pytest.mark.long
def test_a_broken_off_replay_is_known_of(invoke, log, tmp_path, add_backend):
    run_id = log()
    add_backend("once", ScriptedBackend(["ok", "ok"], always="unavailable"), idempotent=False)
    with pytest.raises(quark.QuarkError, match="planted outage"):
        invoke("mirror", "replay", run_id, "-d", tmp_path, "--to", "once")
    states = read_json(invoke("mirror", "status", run_id, "-d", tmp_path, "--json"))
    assert [(s["specification"], s["state"]) for s in states] == [("once", "begun")]
    with pytest.raises(InvalidRunStateError, match="cannot detect duplicate batches"):
        invoke("mirror", "replay", run_id, "-d", tmp_path, "--to", "once")


@pytest.mark.long
def test_a_lane_that_cannot_tell_duplicates_is_not_sent_again(invoke, log, tmp_path, add_backend):
    once = add_backend("once", ScriptedBackend(), idempotent=False)
    run_id = log("once")
    stored = len(once.stored)
    with pytest.raises(InvalidRunStateError, match="quark sync"):
        invoke("mirror", "replay", run_id, "-d", tmp_path)
    assert len(once.stored) == stored


def test_a_run_that_is_being_written_is_left_alone(invoke, start, tmp_path):
    session = start(tmp_path, "live", backends="csv")
    quark.MetricsLogger(session).log("m", 1.0, step=0)
    try:
        with pytest.raises(InvalidRunStateError, match="is running"):
            invoke("mirror", "replay", "live", "-d", tmp_path, "--to", "csv:out")
        states = read_json(invoke("mirror", "status", "live", "-d", tmp_path, "--json"))
        assert {state["state"] for state in states} == {"delivering"}
    finally:
        session.end_run()


@pytest.mark.long
def test_replay_delivers_first_what_waits(invoke, log, tmp_path, add_backend, monkeypatch):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "3")
    add_backend("late", ScriptedBackend(always="unavailable"))
    run_id = log("late")
    late = add_backend("late", ScriptedBackend())
    assert invoke("mirror", "replay", run_id, "-d", tmp_path).exit_code == 0
    states = read_json(invoke("mirror", "status", run_id, "-d", tmp_path, "--json"))
    assert [state["waiting"] for state in states] == [0, 0]
    assert late.count_records > 3 * STEPS


@pytest.mark.long
def test_payloads_go_with_their_records(invoke, log, tmp_path, monkeypatch):
    class Takes(ScriptedBackend):
        payloads = {}

        def put_payload(self, payload):
            self.payloads[payload.sha256] = payload.path.read_bytes()

        def open_payload(self, run_id, sha256):
            raise NotImplementedError

        def payload_directory(self, run_id):
            return None

    taken = Takes()
    definition = BackendDefinition(
        name="takes",
        summary="takes payloads",
        open=lambda config: taken,
        capabilities=frozenset({Capability.ARTIFACTS, Capability.IDEMPOTENT}),
    )
    monkeypatch.setitem(default_registry()._definitions, "takes", definition)
    run_id = log()
    assert invoke("mirror", "replay", run_id, "-d", tmp_path, "--to", "takes").exit_code == 0
    (content,) = taken.payloads.values()
    assert json.loads(content) == {"a": 1}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # MLflow's own, of its libraries
def test_mlflow_is_filled_and_has_every_point(invoke, log, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("flask", reason="only the full MLflow has a SQLite store")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = mlflow.MlflowClient(tracking_uri=uri)
    client.search_experiments()
    run_id = log()
    place = f"mlflow+{uri}"
    for _ in range(2):
        result = invoke("mirror", "replay", run_id, "-d", tmp_path, "--to", place, "--json")
        assert result.exit_code == 0, result.stdout
    experiment = client.get_experiment_by_name("vision")
    (mirrored,) = client.search_runs([experiment.experiment_id])
    for key in ("train/loss", "val/acc", "odd"):
        assert len(client.get_metric_history(mirrored.info.run_id, key)) == STEPS
    assert mirrored.info.status == "FINISHED"
    states = read_json(invoke("mirror", "status", run_id, "-d", tmp_path, "--json"))
    assert [state["specification"] for state in states] == [place]
