"""A run's life: starting, looking, resuming, ending, lineage, several at once."""

import dataclasses
import pickle
import subprocess
import sys
import threading

import pytest

import quark
from quark import InvalidRunStateError, RunNotFoundError, SessionStoreError
from quark_core.errors import SchemaValidationError
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
        pytest.raises(InvalidRunStateError, match="alive in this process"),
    ):
        quark.resume_run(run_id=session.run_id, storage_dir=tmp_path)


@pytest.mark.long
def test_a_run_that_is_alive_elsewhere_cannot_be_resumed(tmp_path):
    program = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "sys.stdin.read()")
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
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
    assert "is gone" in stored.lost_reason
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

    threads = [threading.Thread(target=resume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
