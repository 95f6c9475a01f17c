"""What an object of a run is at a prompt: one short line that says which run it is of."""

import pickle
import subprocess

import pytest
from kit.programs import start_code

import quark


@pytest.fixture
def session(tmp_path):
    with quark.start_run(
        project="vision", name="digits", config={"lr": [0.1] * 500}, storage_dir=tmp_path
    ) as opened:
        yield opened


def test_every_object_of_a_run_says_which_run_it_is_of(session, tmp_path):
    known = f"{session.id} 'digits', project 'vision', running"
    writers = [
        quark.MetricsLogger(session),
        quark.EventLogger(session),
        quark.ArtifactStore(session),
        quark.SystemTelemetry(session),
        quark.DataDiagnostics(session),
    ]
    for each in (session, session.open_run, session.context, *writers):
        assert repr(each) == f"{type(each).__name__}({known})"
    writers[0].close()
    assert repr(writers[0]).endswith(", closed)")
    session.flush()
    (found,) = quark.search_runs(storage_dir=tmp_path)
    assert repr(found) == f"RunSummary({known}, 0 metrics)"
    assert repr(found.stored) == f"StoredRun({known})"
    assert len(repr(quark.search_runs(storage_dir=tmp_path))) < 100


def test_the_text_follows_the_state_of_the_run(tmp_path):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    session.end_run("failed")
    assert repr(session) == f"TrainingSession({session.id}, project 'p', failed)"
    opened = quark.open_run(session.id, tmp_path)
    assert repr(opened) == repr(session)
    assert repr(pickle.loads(pickle.dumps(session.context))).endswith(", project 'p', failed)")


def test_a_name_of_several_lines_stays_one_line(tmp_path):
    with quark.start_run(project="p", name="a\nb\x1b[1m", storage_dir=tmp_path) as session:
        assert "\n" not in repr(session)
        assert "\x1b" not in repr(session)


def test_a_run_that_another_process_has_says_which_one_and_what_to_do(tmp_path):
    script = (
        "import sys, quark\n"
        "session = quark.start_run(project='p', storage_dir=sys.argv[1])\n"
        "print(session.id, flush=True)\nsys.stdin.read()\n"
    )
    with start_code(script, tmp_path, stdin=subprocess.PIPE) as training:
        run_id = training.stdout.readline().strip()
        with pytest.raises(quark.InvalidRunStateError) as caught:
            quark.resume_run(run_id=run_id[:6], storage_dir=tmp_path)
        training.stdin.close()
    said = str(caught.value)
    assert f"run_id {run_id} is running in another process (pid {training.pid} on " in said
    assert ", since 20" in said
    for advice in (f"quark stop {run_id[:8]}", f"quark follow {run_id[:8]}", "quark.open_run("):
        assert advice in said
