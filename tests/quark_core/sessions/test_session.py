"""A run's life: starting, looking, resuming, ending, lineage, several at once."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
import threading
from argparse import ArgumentParser
from importlib.metadata import entry_points

import pytest
from kit.programs import run_threads, start_code

import quark
from quark import InvalidRunStateError, RunNotFoundError, SessionStoreError
from quark_core import hookspecs
from quark_core.backends import registry
from quark_core.backends.registry import default_registry
from quark_core.errors import BackendError, SchemaValidationError, UnknownBackendError
from quark_core.records.schema import CURRENT_SCHEMA_VERSION
from quark_core.runs.open_run import open_runs

KILLED = """
import os, signal, sys, quark
session = quark.start_run(project="killed", storage_dir=sys.argv[1])
metrics = quark.MetricsLogger(session)
metrics.log("m", 1.0, step=0)
metrics.flush()
print(session.run_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_a_run(storage_dir):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(storage_dir)], capture_output=True, text=True
    )
    return done.stdout.strip()


def test_a_started_run_is_in_the_store_at_once(tmp_path):
    session = quark.start_run(project="p", storage_dir=tmp_path, name="first", notes="why")
    other = quark.open_run(session.run_id, tmp_path)
    assert (other.status, other.project_name) == ("running", "p")
    assert (other.context.run.name, other.context.run.notes) == ("first", "why")
    assert other.open_run.reader.load_run(session.run_id).state == "running"
    session.end_run()


def test_local_and_stored_contexts_agree(tmp_path):
    session = quark.start_run(project="p", storage_dir=tmp_path, tags=["b", "a", "b"])
    local = session.context
    stored = session.reload()
    assert dataclasses.replace(local.run) == stored.run
    session.add_tag("c")
    assert session.context.run.tags == session.reload().run.tags == ("a", "b", "c")
    local = session.end_run("failed")
    assert local.run == session.reload().run


def test_a_context_is_plain_data(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        copy = pickle.loads(pickle.dumps(session.context))
    assert copy == dataclasses.replace(session.context, run=copy.run)
    assert copy.run_path == session.run_path
    assert copy.db_path == tmp_path / ".quark" / "quark.db"
    assert copy.backends == ("embedded",)


def test_ending_twice_is_an_error_and_leaving_after_the_end_is_not(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        session.end_run("interrupted")
        with pytest.raises(InvalidRunStateError, match="interrupted"):
            session.end_run()
    assert session.status == "interrupted"


def test_an_ended_run_takes_nothing_more_but_can_be_read(tmp_path):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)
    metrics.log("m", 1.0, step=0)
    session.end_run()
    for call in (
        lambda: metrics.log("m", 1.0, step=1),
        lambda: metrics.log_many({"m": 1.0}, step=1),
        lambda: events.log("late"),
        lambda: events.add_log("late"),
        lambda: session.add_log("late"),
        lambda: session.add_tag("late"),
    ):
        with pytest.raises(InvalidRunStateError, match="ended"):
            call()
    assert [record.value for record in metrics.read()] == [1.0]


def test_looking_at_a_run_changes_nothing(tmp_path):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    quark.MetricsLogger(session).log("m", 2.0, step=0)
    session.end_run("failed")
    before = session.reload()
    looked = quark.open_run(session.run_id, tmp_path)
    assert quark.MetricsLogger(looked).read()[0].value == 2.0
    for call in (
        looked.end_run,
        lambda: looked.add_tag("t"),
        lambda: looked.add_log("x"),
        lambda: quark.MetricsLogger(looked).log("m", 1.0, step=1),
    ):
        with pytest.raises(InvalidRunStateError, match="reading only"):
            call()
    with looked:
        pass
    assert session.reload() == before
    assert looked not in open_runs.sessions


def test_unknown_runs(tmp_path):
    with pytest.raises(SessionStoreError, match="no Quark store"):
        quark.open_run("absent", tmp_path)
    with pytest.raises(SessionStoreError, match="no Quark store"):
        quark.resume_run(run_id="absent", storage_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    with quark.start_run(project="p", storage_dir=tmp_path):
        pass
    for call in (
        lambda: quark.open_run("absent", tmp_path),
        lambda: quark.resume_run(run_id="absent", storage_dir=tmp_path),
        lambda: quark.start_run(project="p", storage_dir=tmp_path, parent_run_id="absent"),
    ):
        with pytest.raises(RunNotFoundError, match="absent"):
            call()


@pytest.mark.sampled
@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_broken_off_runs_can_be_resumed(tmp_path, status):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    quark.MetricsLogger(session).log("m", 1.0, step=0)
    session.end_run(status)
    with quark.resume_run(run_id=session.run_id, storage_dir=tmp_path) as resumed:
        metrics = quark.MetricsLogger(resumed)
        metrics.log("m", 2.0, step=1)
        assert [(r.attempt, r.value) for r in metrics.read()] == [(0, 1.0), (1, 2.0)]
        assert resumed.status == "running"
    assert resumed.reload().run.resume_count == 1


@pytest.mark.long
def test_a_completed_run_is_resumed_only_on_request(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        pass
    with pytest.raises(InvalidRunStateError, match="completed"):
        quark.resume_run(run_id=session.run_id, storage_dir=tmp_path)
    with quark.resume_run(run_id=session.run_id, storage_dir=tmp_path, reopen=True) as again:
        quark.MetricsLogger(again).log("test/accuracy", 0.9, epoch=0)
    assert again.status == "completed"


def test_a_live_run_cannot_be_resumed(tmp_path):
    with (
        quark.start_run(project="p", storage_dir=tmp_path) as session,
        pytest.raises(InvalidRunStateError, match="running in this process"),
    ):
        quark.resume_run(run_id=session.run_id, storage_dir=tmp_path)


@pytest.mark.long
def test_a_run_that_is_alive_elsewhere_cannot_be_resumed(tmp_path):
    program = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "sys.stdin.read()")
    child = start_code(program, tmp_path, stdin=subprocess.PIPE)
    run_id = child.stdout.readline().strip()
    with pytest.raises(InvalidRunStateError, match="another process"):
        quark.resume_run(run_id=run_id, storage_dir=tmp_path)
    child.communicate("")
    assert quark.open_run(run_id, tmp_path).status == "completed"


@pytest.mark.long
def test_a_killed_run_is_lost_and_can_be_resumed(tmp_path):
    run_id = kill_a_run(tmp_path)
    stored = quark.open_run(run_id, tmp_path).open_run.reader.load_run(run_id)
    assert (stored.run.status, stored.state) == ("running", "lost")
    assert "has ended" in stored.lost_reason
    with quark.resume_run(run_id=run_id, storage_dir=tmp_path) as resumed:
        assert [r.value for r in quark.MetricsLogger(resumed).read()] == [1.0]
    assert resumed.reload().status == "completed"


@pytest.mark.long
def test_of_two_that_resume_at_once_one_wins(tmp_path):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    session.end_run("interrupted")
    barrier = threading.Barrier(4)
    won, refused = [], []

    def resume():
        barrier.wait()
        try:
            won.append(quark.resume_run(run_id=session.run_id, storage_dir=tmp_path))
        except InvalidRunStateError as error:
            refused.append(error)

    run_threads(resume, 4)
    assert (len(won), len(refused)) == (1, 3)
    assert won[0].end_run().run.resume_count == 1


@pytest.mark.long
def test_lineage(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as root:
        pass
    with quark.start_run(project="p", storage_dir=tmp_path, parent_run_id=root.run_id) as child:
        pass
    with quark.start_run(project="p", storage_dir=tmp_path, parent_run_id=child.run_id) as leaf:
        pass
    runs = [session.reload().run for session in (root, child, leaf)]
    assert [run.parent_run_id for run in runs] == [None, root.run_id, child.run_id]
    assert {run.lineage_root_run_id for run in runs} == {root.run_id}


@pytest.mark.long
def test_top_level_functions_act_on_the_session_opened_last(tmp_path):
    first = quark.start_run(project="p", storage_dir=tmp_path)
    second = quark.start_run(project="p", storage_dir=tmp_path)
    quark.add_tag("latest")
    quark.add_tag(first, "named")
    quark.add_log("to the latest", identifier="Warning")
    quark.add_log(first, "to the first")
    assert (first.context.run.tags, second.context.run.tags) == (("named",), ("latest",))
    assert quark.end_run().run_id == second.run_id
    assert quark.end_run(status="failed").run_id == first.run_id
    for call in (quark.end_run, lambda: quark.add_tag("t"), lambda: quark.add_log("x")):
        with pytest.raises(InvalidRunStateError, match="no session"):
            call()
    with pytest.raises(SchemaValidationError, match="tag"):
        quark.add_tag(first)


@pytest.mark.long
def test_what_a_script_leaves_open_is_ended_at_exit(tmp_path):
    program = (
        "import quark, sys\n"
        "s = quark.start_run(project='p', storage_dir=sys.argv[1]); print(s.run_id, flush=True)\n"
        "quark.MetricsLogger(s).log('m', 1.0, step=0)\n"
    )
    for ending, status in (("", "completed"), ("raise ValueError('boom')", "failed")):
        done = subprocess.run(
            [sys.executable, "-c", program + ending, str(tmp_path)], capture_output=True, text=True
        )
        session = quark.open_run(done.stdout.strip(), tmp_path)
        assert session.status == status
        assert len(quark.MetricsLogger(session).read()) == 1
        errors = quark.EventLogger(session).read(event_type="runtime_error")
        assert [e.payload["message"] for e in errors] == (["ValueError: boom"] if ending else [])


def test_config_and_environment_are_kept(tmp_path, monkeypatch):
    # The end waits two seconds for what is late, which a busy machine does not find in time.
    monkeypatch.setattr("quark_core.runs.open_run._ENVIRONMENT_TIMEOUT_S", 60.0)
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "60")
    config = {"lr": 1e-3, "api_key": "sk-verysecretverysecret", "num_tokens": 128}
    with quark.start_run(project="p", storage_dir=tmp_path, config=config) as session:
        config["lr"] = 5.0
    stored = session.open_run.reader.load_run(session.run_id)
    assert stored.config.values == {"lr": 1e-3, "api_key": "[redacted]", "num_tokens": 128}
    environment = stored.environment.values
    assert environment["python"]["version"] == sys.version.split()[0]
    assert environment["process"]["pid"] > 0
    assert "numpy" in environment["packages"]
    assert isinstance(environment["gpus"], list)


def test_keeping_nothing(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="none") as session:
        metrics = quark.MetricsLogger(session)
        assert metrics.log("m", 1.0, step=0).value == 1.0
        assert metrics.flush() == metrics.read() == ()
    assert list(tmp_path.iterdir()) == []
    assert session.report_delivery().lanes == ()


@pytest.mark.sampled
@pytest.mark.parametrize("status", ["completed", "failed", "interrupted", None])
def test_the_context_of_an_opened_run_reads_it_and_refuses_to_write(tmp_path, status):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    with quark.MetricsLogger(session) as metrics:
        metrics.log("m", 1.0, step=0)
        metrics.flush()
    if status is not None:
        session.end_run(status)
    else:
        open_runs._sessions.remove(session)  # as in a process that does not have it open
    context = pickle.loads(pickle.dumps(quark.open_run(session.run_id, tmp_path).context))
    assert context.read_only
    reader = quark.MetricsLogger(context)
    assert [record.value for record in reader.read()] == [1.0]
    assert quark.series(context, "m").points == 1
    with pytest.raises(quark.InvalidRunStateError, match="reading only"):
        reader.log("m", 2.0, step=1)
    if status is None:
        open_runs.add(session)
        session.end_run()


def test_type_checkers_know_that_a_block_of_a_run_hides_no_exception():
    # Where it were `bool`, mypy would miss a `return` behind each `with` that returns.
    assert quark.TrainingSession.__exit__.__annotations__["return"] == "bool | None"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"project": ""}, "project"),
        ({"project": None}, "project"),
        ({"project": "x" * 251}, "project"),
        ({"config": [1, 2]}, "config"),
        ({"config": "lr=1"}, "config"),
        ({"tags": "baseline"}, "tags"),
        ({"tags": ["ok", 3]}, "tags"),
        ({"tags": [""]}, "tags"),
        ({"parent_run_id": "../x"}, "parent_run_id"),
        ({"storage_dir": 7}, "storage_dir"),
        ({"name": ""}, "name"),
        ({"notes": 3}, "notes"),
        ({"backends": 3}, "backends"),
        ({"backends": [3]}, "backends"),
    ],
    ids=str,
)
def test_bad_arguments_are_named_and_leave_nothing_behind(tmp_path, arguments, named):
    given = {"project": "p", "storage_dir": tmp_path, **arguments}
    with pytest.raises(SchemaValidationError, match=named):
        quark.start_run(**given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backends", ["nowhere", "csv,nowhere", ["nowhere:x"], "no where", ":x"])
def test_unknown_backends_list_what_is_installed(tmp_path, backends):
    expected = r"installed: 'csv', 'embedded', 'mlflow', 'service', 'tensorboard', 'wandb'\)"
    with pytest.raises(UnknownBackendError, match=expected) as caught:
        quark.start_run(project="p", storage_dir=tmp_path, backends=backends)
    assert isinstance(caught.value, (BackendError, ValueError))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["mlflow", "tensorboard:out", "wandb:team/project"])
def test_a_backend_of_an_extra_that_is_missing_says_what_to_install(tmp_path, monkeypatch, backend):
    # Each is declared where Quark is installed, whether or not the library that it needs is.
    name = backend.partition(":")[0]
    monkeypatch.delitem(default_registry()._definitions, name)
    with pytest.raises(UnknownBackendError, match=rf'pip install "quark-tracker\[{name}\]"'):
        quark.start_run(project="p", storage_dir=tmp_path, backends=backend)
    assert list(tmp_path.iterdir()) == []


def test_a_required_service_must_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_REQUIRE_SERVICE", "1")
    with pytest.raises(quark.SessionStoreError, match="QUARK_PERSISTENCE_URL"):
        quark.start_run(project="p", storage_dir=tmp_path)


def test_a_service_that_this_installation_cannot_reach_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", "https://quark.example.invalid")
    with pytest.raises(quark.SessionStoreError, match="QUARK_USER_KEY is not set"):
        quark.start_run(project="p", storage_dir=tmp_path)
    monkeypatch.setenv("QUARK_USER_KEY", "qk_a_b")
    with pytest.raises(quark.SessionStoreError, match="cannot be reached"):
        quark.start_run(project="p", storage_dir=tmp_path)
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", "quark.example.invalid:7411")
    with pytest.raises(quark.SessionStoreError, match="Use http:// or https://"):
        quark.start_run(project="p", storage_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["QUARK_EXIT_TIMEOUT_SECONDS", "QUARK_PERSISTENCE_TIMEOUT_SECONDS"]
)
@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_bad_timeouts_are_named(tmp_path, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(SchemaValidationError, match=name):
        quark.start_run(project="p", storage_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_status_is_named(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        for status in ("lost", "running", "done", None):
            with pytest.raises(SchemaValidationError, match="status"):
                session.end_run(status)
        assert session.status == "running"


@pytest.fixture
def log_runs(tmp_path, monkeypatch):
    """Ends a run for each id, with a name of its own where one is given."""

    def log(**names):
        for run_id, name in names.items():
            monkeypatch.setenv("QUARK_RUN_ID", run_id)
            quark.start_run(project="p", storage_dir=tmp_path, name=name).end_run()
        monkeypatch.delenv("QUARK_RUN_ID")
        return tmp_path

    return log


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (["a", 3], r"^tags\[1\] must be a str, not int"),
        (("", "b"), r"^tags\[0\] must not be empty"),
        (iter(["a", "b", "\ud800"]), r"^tags\[2\] contains half of a surrogate pair"),
        ("abc", "^tags must be an iterable of str, not a single str"),
    ],
)
def test_a_bad_tag_is_named_by_its_place(tmp_path, tags, message):
    with pytest.raises(quark.SchemaValidationError, match=message):
        quark.start_run(project="p", storage_dir=tmp_path, tags=tags)


def test_an_absent_parent_is_named_as_the_parent(tmp_path):
    with pytest.raises(quark.RunNotFoundError, match=r"^parent_run_id nope: .*no run with this ID"):
        quark.start_run(project="p", storage_dir=tmp_path, parent_run_id="nope")


def find_mistake(run_id, root):
    with pytest.raises(quark.RunNotFoundError) as caught:
        quark.open_run(run_id, storage_dir=root)
    assert str(caught.value).startswith(
        f"run_id {run_id}: the store {root} has no run with this ID"
    )
    return str(caught.value)


def test_the_beginning_of_an_id_is_enough_where_one_run_begins_so(log_runs):
    root = log_runs(dfbe8d2a00="one", dfbe8d2b00=None, other=None)
    assert quark.open_run("dfbe8d2a", root).id == "dfbe8d2a00"
    assert quark.open_run("othe", root).id == "other"
    with pytest.raises(quark.RunNotFoundError) as caught:
        quark.open_run("dfbe8d2", root)
    assert str(caught.value) == (
        "run_id 'dfbe8d2' matches 2 runs: dfbe8d2b00, dfbe8d2a00 \"one\". Type more characters"
    )
    assert find_mistake("absent", root).endswith("has no run with this ID")
    assert find_mistake("dfb", root).endswith(
        ". Pass the full ID or at least its first 4 characters"
    )
    assert find_mistake("zz", root).endswith(
        ". Pass the full ID or at least its first 4 characters"
    )
    assert find_mistake("dfbe8d2x", root).endswith('. Similar IDs: dfbe8d2b00, dfbe8d2a00 "one"')


def test_an_id_that_begins_another_one_means_itself(log_runs):
    root = log_runs(trial="one", trial2="two")
    assert quark.open_run("trial", root).name == "one"


def test_every_call_that_takes_an_id_takes_its_beginning(log_runs):
    root = log_runs(dfbe8d2a00="one", second="two")
    assert quark.edit_run("dfbe8", notes="seen", storage_dir=root).notes == "seen"
    with pytest.raises(quark.InvalidRunStateError, match="dfbe8d2a00"):
        quark.stop_run("dfbe8", storage_dir=root)
    with quark.resume_run(run_id="dfbe8", storage_dir=root, reopen=True) as session:
        assert session.id == "dfbe8d2a00"
        assert quark.ComparisonEngine(session).compare("seco").reference.run_id == "second"
        state = session.state_dict(step=3)
    with quark.resume_run(run_id="dfbe8", storage_dir=root, reopen=True, state=state) as session:
        assert session.id == "dfbe8d2a00"
    with quark.start_run(project="p", storage_dir=root, parent_run_id="dfbe8") as child:
        assert child.context.run.parent_run_id == "dfbe8d2a00"
        assert child.context.run.lineage_root_run_id == "dfbe8d2a00"


@pytest.mark.long
def test_a_name_is_no_id(log_runs):
    root = log_runs(first="resnet50", second="vit", third="vit")
    assert find_mistake("resnet50", root).endswith(
        ". first has that name, but a run ID is required"
    )
    assert find_mistake("vit", root).endswith(
        ". third, second have that name, but a run ID is required"
    )
    assert find_mistake("resnet", root).endswith('. Similar IDs: first "resnet50"')


@pytest.mark.long
def test_many_runs_are_not_all_listed(log_runs):
    root = log_runs(**{f"run-{index}": None for index in range(7)})
    with pytest.raises(quark.RunNotFoundError) as caught:
        quark.open_run("run-", storage_dir=root)
    assert str(caught.value).endswith(
        "matches 7 runs: run-6, run-5, run-4, run-3, run-2 and 2 more. Type more characters"
    )


def test_a_resumed_run_goes_on_where_its_checkpoint_is(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(10):
            metrics.log("loss", float(step), step=step)
            if step == 5:
                state = json.loads(json.dumps(session.state_dict(step=step)))
        session.end_run("interrupted")
    assert state == {
        "run_id": session.run_id,
        "attempt": 0,
        "step": 5,
        "schema_version": CURRENT_SCHEMA_VERSION,
    }
    with quark.resume_run(run_id=state["run_id"], storage_dir=tmp_path, state=state) as resumed:
        metrics = quark.MetricsLogger(resumed)
        metrics.log("loss", 60.0, step=6)
        assert [r.value for r in metrics.read()] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 60.0]


@pytest.mark.long
def test_a_state_without_a_step_hides_nothing(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=9)
        state = session.state_dict()
        session.end_run("failed")
    with quark.resume_run(run_id=session.run_id, storage_dir=tmp_path, state=state) as resumed:
        assert len(quark.MetricsLogger(resumed).read()) == 1


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ("abc", "^state must be the result of"),
        ({}, "^state must be the result of"),
        ({"run_id": "another"}, "^state is of run 'another', not of run_id"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(tmp_path, state, named):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        session.end_run("interrupted")
    with pytest.raises(SchemaValidationError, match=named):
        quark.resume_run(run_id=session.run_id, storage_dir=tmp_path, state=state)


def test_a_bad_step_is_refused(tmp_path):
    with (
        quark.start_run(project="p", storage_dir=tmp_path) as session,
        pytest.raises(SchemaValidationError, match=r"^step must"),
    ):
        session.state_dict(step=-1)


TRAINING = """
import sys
from importlib.abc import MetaPathFinder

ROOMS = ("analysis", "configuration", "notifications", "provenance", "sweeps")

class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(f"quark.{room}" for room in ROOMS)):
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
from argparse import ArgumentParser
import quark

parser = ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
with quark.start_run(project="p", config=parser, storage_dir=sys.argv.pop(1)) as session:
    quark.MetricsLogger(session).log("loss", 1.0, step=0)
    session.config.update(lr=0.2)
    quark.EventLogger(session).log("alert_raised", payload={"title": "a", "message": "b"})
    assert session.trial is None
print(session.status, dict(session.config))
"""


@pytest.mark.parametrize("absent", ["analysis", "configuration", "notifications", "sweeps"])
def test_a_program_trains_without_the_plugin(absent, tmp_path, monkeypatch):
    groups = (hookspecs.ENTRY_POINT_GROUP, hookspecs.PLUGIN_GROUP)
    points = [each for group in groups for each in entry_points(group=group)]
    monkeypatch.setattr(
        registry,
        "_default",
        registry.BackendRegistry.discover([each for each in points if each.name != absent]),
    )
    monkeypatch.setenv("QUARK_NOTIFY", "webhook+https://localhost:1/x")
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.5"])
    parser = ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=2)
    with quark.start_run(project="p", config=parser, storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
        session.config.update(epochs=3)
    assert session.trial is None
    with quark.open_run(session.run_id, storage_dir=tmp_path) as stored:
        assert (stored.status, stored.config) == ("completed", {"lr": 0.5, "epochs": 3})
        origins = {each.source for each in stored.open_run.config.origins}
    assert (origins == set()) == (absent == "configuration")


@pytest.mark.long
def test_a_program_trains_where_no_module_of_a_feature_can_be_imported(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAINING, tmp_path, "--lr", "0.5"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "completed {'lr': 0.2}\n", done.stderr
