"""The MLflow mirror fed batch by batch: replays, refusals, deletions."""

import dataclasses
import json
import logging
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from quark_backends.mlflow import client as library_module
from quark_backends.mlflow.run import MirroredRun
from quark_core.backends.contract import BackendConfig
from quark_core.errors import BackendRejected, BackendUnavailable
from quark_core.records.codec import encode_records
from quark_core.records.query import Query
from quark_core.testing.fakes import FIRST_TIME_US, BatchMaker


@pytest.fixture
def maker():
    return BatchMaker("run0")


def reopen(definition, config, folder):
    """The mirror as another machine would open it: nothing is remembered."""
    return definition.open(
        BackendConfig(
            storage_dir=config.storage_dir,
            run_path=folder,
            run_id=config.run_id,
            project=config.project,
            location=config.location,
        )
    )


@pytest.mark.long
def test_the_same_batches_twice_are_there_once(
    backend, definition, config, maker, find_runs, history, tmp_path
):
    values = [("m", step, step / 7) for step in range(2500)]
    values += [("n", 0, float("nan")), ("n", 0, float("inf")), ("n", 1, -0.0), ("n", 1, 0.0)]
    values += [("same", 5, 1.0)] * 3
    batches = [maker.start(tags=["t"]), maker.metrics(*values), maker.metrics(("m", 0, 9.0))]
    for batch in batches:
        backend.write(batch)
        backend.write(batch)
    # Past the mirror's own memory: now only the store can tell.
    other = reopen(definition, config, tmp_path / "elsewhere")
    for batch in batches:
        other.write(batch)
        other.write(batch)
    (run,) = find_runs()
    assert len(history(run.info.run_id, "m")) == 2501
    assert len(history(run.info.run_id, "n")) == 4
    assert len(history(run.info.run_id, "same")) == 3
    assert run.data.params == {"lr": "0.1"}
    assert run.data.tags["t"] == "true"


@pytest.mark.long
def test_a_crash_between_making_the_run_and_noting_it_makes_no_second_one(
    definition, config, maker, find_runs, monkeypatch
):
    first = definition.open(config)
    monkeypatch.setattr(first._writing._state, "save_run", fail)
    with pytest.raises(BackendUnavailable):
        first.write(maker.start())
    assert len(find_runs()) == 1
    again = definition.open(config)
    again.write(BatchMaker("run0").start())
    assert len(find_runs()) == 1


def fail(*_):
    raise OSError("planted")


@pytest.mark.long
def test_one_bad_record_alone_is_put_aside(backend, config, maker, find_runs, history, caplog):
    good = maker.metrics(*[("m", step, float(step)) for step in range(100)])
    records = good.to_records()
    records[37] = msgspec.structs.replace(records[37], time_us=-5_000_000)
    backend.write(maker.start())
    with caplog.at_level(logging.WARNING, "quark"):
        backend.write(maker.batch(records))
    (run,) = find_runs()
    assert [step for step, *_ in history(run.info.run_id, "m")] == [
        step for step in range(100) if step != 37
    ]
    path = config.run_path / "quarantine" / "mlflow" / "refused-records.jsonl"
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert line["kind"] == "metric"
    assert line["record"]["step"] == 37
    assert "imestamp" in line["reason"]
    assert "refused-records.jsonl" in caplog.text


@pytest.mark.long
def test_a_batch_that_is_bad_as_a_whole_is_rejected(backend, config, maker):
    backend.write(maker.start())
    records = [
        msgspec.structs.replace(record, time_us=-1_000_000)
        for record in maker.metrics(("m", 0, 0.0), ("m", 1, 1.0)).to_records()
    ]
    with pytest.raises(BackendRejected, match="imestamp"):
        backend.write(maker.batch(records))
    assert not (config.run_path / "quarantine").exists()


@pytest.mark.long
def test_a_changed_param_is_said_and_the_others_are_sent(backend, maker, find_runs, caplog):
    backend.write(maker.start())
    changed = {"values": {"lr": 0.2, "momentum": 0.9}, "notes": []}
    with caplog.at_level(logging.WARNING, "quark"):
        backend.write(maker.lifecycle(("config", changed)))
    (run,) = find_runs()
    assert run.data.params == {"lr": "0.1", "momentum": "0.9"}
    assert run.data.tags["quark.param_drift"] == '["lr"]'
    assert "first value" in caplog.text


@pytest.mark.long
def test_more_params_than_one_request_takes(backend, maker, find_runs):
    backend.write(maker.start())
    values = {f"p{index}": "é" * 3000 for index in range(250)}
    backend.write(maker.lifecycle(("config", {"values": values, "notes": []})))
    (run,) = find_runs()
    assert len(run.data.params) == 251


@pytest.mark.long
def test_max_params(definition, config, maker, find_runs):
    backend = definition.open(
        dataclasses.replace(config, options={"quark": "full", "max_params": "5"})
    )
    backend.write(maker.start())
    values = {f"p{index}": index for index in range(20)}
    backend.write(maker.lifecycle(("config", {"values": values, "notes": []})))
    (run,) = find_runs()
    assert len(run.data.params) == 5


@pytest.mark.long
def test_what_an_older_attempt_says_is_left_out(backend, maker, find_runs):
    backend.write(maker.start())
    newer = BatchMaker("run0", attempt=1, writer_id="writer1", started_us=FIRST_TIME_US + 10**6)
    backend.write(newer.start())
    backend.write(maker.lifecycle(("status", {"status": "failed"})))
    (run,) = find_runs()
    assert run.info.status == "RUNNING"
    assert run.data.tags["quark.attempt"] == "1"
    backend.write(newer.lifecycle(("status", {"status": "completed"})))
    assert find_runs()[0].info.status == "FINISHED"


@pytest.mark.long
def test_what_a_killed_process_left_comes_beside_the_next_attempt(
    definition, config, maker, find_runs
):
    """Two mirrors of one run are open at once, and neither knows of the other."""
    older, newer = definition.open(config), definition.open(config)
    later = BatchMaker("run0", attempt=1, writer_id="writer1", started_us=FIRST_TIME_US + 10**6)
    newer.write(later.start())
    older.write(maker.start())
    older.write(maker.metrics(("m", 0, 0.0)))
    newer.write(later.metrics(("m", 1, 1.0)))
    newer.write(later.lifecycle(("status", {"status": "completed"})))
    older.write(maker.metrics(("m", 2, 2.0)))
    older.close()
    newer.close()
    (run,) = find_runs()
    assert run.info.status == "FINISHED"
    assert (run.data.tags["quark.attempt"], run.data.tags["quark.status"]) == ("1", "completed")
    assert run.data.params == {"lr": "0.1"}
    assert newer.read("run0", "metric", Query())["value"].tolist() == [0.0, 2.0, 1.0]


@pytest.mark.long
def test_two_mirrors_that_begin_at_once_make_one_run(definition, config, find_runs):
    makers = [BatchMaker("run0", attempt=n, writer_id=f"writer{n}") for n in range(4)]
    barrier = threading.Barrier(len(makers))

    def begin(maker):
        backend = definition.open(config)
        batch = maker.start()
        barrier.wait()
        for _ in range(200):
            try:
                backend.write(batch)
                return
            except BackendUnavailable:
                time.sleep(0.05)

    threads = [threading.Thread(target=begin, args=(maker,)) for maker in makers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(find_runs()) == 1


@pytest.mark.long
def test_a_writer_that_only_joins_waits_for_the_start(
    backend, maker, find_runs, definition, config
):
    joined = BatchMaker("run0", writer_id="writer1")
    with pytest.raises(BackendUnavailable, match="not in MLflow yet"):
        backend.write(joined.metrics(("m", 0, 0.0)))
    other = definition.open(config)
    other.write(maker.start())
    backend.write(joined.metrics(("m", 0, 0.0)))
    assert len(find_runs()) == 1


@pytest.fixture
def open_child(definition, config):
    """Opens the mirror of a run that run0 is the parent of, and makes its batches."""

    def open_it(run_id):
        maker = BatchMaker(run_id)
        data = json.loads(json.dumps(maker.start().to_records()[0].data))
        data["run"]["parent_run_id"] = "run0"
        path = config.run_path / run_id
        opened = definition.open(dataclasses.replace(config, run_id=run_id, run_path=path))
        return opened, maker, BatchMaker(run_id).lifecycle(("start", data))

    return open_it


@pytest.fixture
def parents(find_runs):
    """Run -> the run that MLflow nests it under, by ids of ours."""

    def read():
        ids = {run.info.run_id: run.data.tags["quark.run_id"] for run in find_runs()}
        return {
            run.data.tags["quark.run_id"]: ids.get(run.data.tags.get("mlflow.parentRunId"))
            for run in find_runs()
        }

    return read


@pytest.mark.long
def test_a_parent_is_shown_as_such(definition, config, open_child, parents):
    definition.open(config).write(BatchMaker("run0").start())
    child, _, start = open_child("run1")
    child.write(start)
    assert parents() == {"run0": None, "run1": "run0"}


@pytest.mark.long
def test_a_parent_that_comes_after_its_children_takes_them(definition, config, open_child, parents):
    """Mirrors of several runs work at the same time, and any of them may be the first."""
    for run_id in ("run1", "run2"):
        child, _, start = open_child(run_id)
        child.write(start)
    assert parents() == {"run1": None, "run2": None}
    definition.open(config).write(BatchMaker("run0").start())
    assert parents() == {"run0": None, "run1": "run0", "run2": "run0"}


@pytest.mark.sampled
@pytest.mark.parametrize("moment", ["heartbeat", "status"])
def test_a_child_looks_again_for_a_parent_that_did_not_see_it(
    definition, config, open_child, parents, monkeypatch, moment
):
    """Each looks for the other before either is there."""
    monkeypatch.setattr(MirroredRun, "tell_children", lambda self: None)
    child, maker, start = open_child("run1")
    child.write(start)
    definition.open(config).write(BatchMaker("run0").start())
    assert parents() == {"run0": None, "run1": None}
    maker.start()
    data = {"status": "completed"} if moment == "status" else {}
    child.write(maker.lifecycle((moment, data)))
    assert parents() == {"run0": None, "run1": "run0"}


@pytest.mark.long
def test_children_follow_a_parent_that_was_deleted_and_made_anew(
    backend, client, find_runs, open_child, parents, maker
):
    backend.write(maker.start())
    (first,) = find_runs()
    child, _, start = open_child("run1")
    child.write(start)
    client.delete_run(first.info.run_id)
    backend.write(maker.metrics(("m", 0, 0.0)))
    (second,) = [
        run
        for run in find_runs()
        if run.data.tags["quark.run_id"] == "run0" and run.info.lifecycle_stage == "active"
    ]
    (nested,) = [run for run in find_runs() if run.data.tags["quark.run_id"] == "run1"]
    assert nested.data.tags["mlflow.parentRunId"] == second.info.run_id


# Deletions.


@pytest.mark.long
def test_a_deleted_experiment_gets_a_successor(backend, client, project, find_runs, maker, caplog):
    client.delete_experiment(client.create_experiment(project))
    with caplog.at_level(logging.WARNING, "quark"):
        backend.write(maker.start())
        backend.write(maker.metrics(("m", 0, 0.0)))
    (run,) = find_runs(f"{project}-2")
    assert set(run.data.metrics) == {"m"}
    assert sum("is deleted" in record.getMessage() for record in caplog.records) == 1
    assert client.get_experiment_by_name(project).lifecycle_stage == "deleted"


def test_a_deleted_experiment_is_restored_on_request(
    definition, config, client, project, find_runs, maker
):
    client.delete_experiment(client.create_experiment(project))
    backend = definition.open(
        dataclasses.replace(config, options={"quark": "full", "on_deleted": "restore"})
    )
    backend.write(maker.start())
    assert client.get_experiment_by_name(project).lifecycle_stage == "active"
    assert len(find_runs()) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("on_deleted", ["new", "restore"])
def test_an_experiment_deleted_while_its_run_runs(
    definition, config, client, project, find_runs, maker, on_deleted
):
    backend = definition.open(
        dataclasses.replace(config, options={"quark": "full", "on_deleted": on_deleted})
    )
    backend.write(maker.start(tags=["t"]))
    client.delete_experiment(client.get_experiment_by_name(project).experiment_id)
    backend.write(maker.lifecycle(("status", {"status": "completed"})))
    (run,) = find_runs(project if on_deleted == "restore" else f"{project}-2")
    assert run.info.lifecycle_stage == "active"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1"}
    assert run.data.tags["t"] == "true"
    assert run.data.tags["quark.status"] == "completed"
    stage = client.get_experiment_by_name(project).lifecycle_stage
    assert stage == ("active" if on_deleted == "restore" else "deleted")


@pytest.mark.sampled
@pytest.mark.parametrize("on_deleted", ["new", "restore"])
def test_a_run_deleted_while_it_runs(
    definition, config, client, find_runs, history, maker, on_deleted
):
    backend = definition.open(
        dataclasses.replace(config, options={"quark": "full", "on_deleted": on_deleted})
    )
    backend.write(maker.start(tags=["t"]))
    backend.write(maker.metrics(("m", 0, 0.0)))
    (first,) = find_runs()
    client.delete_run(first.info.run_id)
    backend.write(maker.metrics(*[("m", step, 1.0) for step in range(1, 50)]))
    runs = [run for run in find_runs() if run.info.lifecycle_stage == "active"]
    assert len(runs) == 1
    points = history(runs[0].info.run_id, "m")
    if on_deleted == "restore":
        assert runs[0].info.run_id == first.info.run_id
        assert len(points) == 50
    else:
        assert runs[0].info.run_id != first.info.run_id
        assert len(points) == 49
    assert runs[0].data.params == {"lr": "0.1"}
    assert runs[0].data.tags["t"] == "true"
    assert not (config.run_path / "quarantine").exists()


@pytest.mark.long
def test_an_experiment_that_another_process_makes_first(backend, client, project, maker, find_runs):
    server = backend._server
    create = server.create_experiment

    def lose_the_race(name):
        client.create_experiment(name)
        return create(name)

    server.create_experiment = lose_the_race
    backend.write(maker.start())
    assert len(find_runs()) == 1


# Opening.


def test_without_mlflow_the_error_says_what_to_install(config, definition, monkeypatch):
    def refuse(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name="mlflow")

    monkeypatch.setattr(library_module.importlib, "import_module", refuse)
    with pytest.raises(BackendUnavailable, match=r'pip install "quark-tracker\[mlflow\]"'):
        definition.open(config)


@pytest.mark.parametrize(
    "options", [{"colour": "red"}, {"on_deleted": "shrug"}, {"max_params": "many"}]
)
def test_bad_options_are_said(config, definition, options):
    with pytest.raises(BackendUnavailable, match=next(iter(options))):
        definition.open(dataclasses.replace(config, options=options))


def test_a_dead_server_is_unavailable_with_one_reason(config, definition, maker, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    backend = definition.open(dataclasses.replace(config, location="http://127.0.0.1:9"))
    reasons = set()
    batch = maker.start()
    for _ in range(3):
        with pytest.raises(BackendUnavailable) as caught:
            backend.write(batch)
        reasons.add(str(caught.value))
    assert len(reasons) == 1
    assert "cannot be reached" in reasons.pop()


def test_the_declaration_imports_no_mlflow():
    code = "import quark_backends.mlflow.plugin, sys; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.long
def test_a_claim_of_a_killed_process_keeps_nobody_waiting(definition, config, maker, find_runs):
    backend = definition.open(config)
    claim = backend._writing._state.folder / "making"
    code = (
        "import pathlib, sys, msgspec; from quark_core.system.process import current_process; "
        "pathlib.Path(sys.argv[1]).write_bytes(msgspec.json.encode(current_process()))"
    )
    claim.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-c", code, str(claim)], check=True)
    with pytest.raises(BackendUnavailable, match="is creating the MLflow run"):
        backend.write(maker.start())
    backend.write(BatchMaker("run0").start())
    assert len(find_runs()) == 1
    backend.close()


@pytest.mark.long
def test_small_batches_of_a_group_go_in_one_request(definition, config, maker, find_runs, history):
    backend = definition.open(config)
    asked = []
    server = backend._writing._server
    log_metrics = server.log_metrics
    server.log_metrics = lambda run_id, points: (
        asked.append(len(points)),
        log_metrics(run_id, points),
    )
    start = maker.start()
    batches = [maker.metrics(*[("m", step, 0.5)] * 3) for step in range(40)]
    large = maker.metrics(*[("n", step, 0.5) for step in range(1500)])
    backend.write_group([start, *batches, large])
    assert asked == [120, 1000, 500]
    # The same once more, cut otherwise: a killed process's successor has no memory of it.
    again = reopen(definition, config, config.storage_dir / "elsewhere")
    again.write_group([BatchMaker("run0").start(), *batches[:7]])
    again.write_group([*batches[7:], large])
    (run,) = find_runs()
    assert len(history(run.info.run_id, "m")) == 120
    assert len(history(run.info.run_id, "n")) == 1500


@pytest.mark.long
def test_a_group_with_a_bad_record_loses_that_one_only(backend, config, maker, find_runs, history):
    batches = [maker.start(), *(maker.metrics(("m", s, 0.5), ("m", s, 1.5)) for s in range(10))]
    records = batches[5].to_records()
    records[1] = msgspec.structs.replace(records[1], time_us=-5_000_000)
    bad = encode_records(records)
    batches[5] = msgspec.structs.replace(batches[5], body=bad)
    backend.write_group(batches)
    (run,) = find_runs()
    steps = [step for step, *_ in history(run.info.run_id, "m")]
    assert steps == sorted([*range(10), *set(range(10)) - {4}])
    path = config.run_path / "quarantine" / "mlflow" / "refused-records.jsonl"
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["record"]["step"] == 4
