"""What is done again, what is left, and what is gone on with: `start_run(if_done=)`."""

import os
import shutil
import subprocess
import sys
import time

import pytest
from held_ports import hold_port
from set_for_tests import SET_FOR_TESTS
from wide_bounds import OTHERS, widen_in_children

import quark
from quark_core.errors import SchemaValidationError

CONFIG = {"lr": 0.1, "model": {"width": 64}, "seed": 1}


def start(root, if_done="skip", config=CONFIG, **arguments):
    return quark.start_run(
        project="p", config=config, if_done=if_done, storage_dir=root, **arguments
    )


def run(root, if_done="skip", config=CONFIG, fails=False, **arguments):
    session = start(root, if_done, config, **arguments)
    quark.MetricsLogger(session).log("loss", 0.5, step=1)
    session.end_run("failed" if fails else "completed")
    return session


def count_runs(root):
    return len(quark.search_runs(storage_dir=root, archived=True))


def test_what_has_completed_is_skipped_and_the_script_learns_by_which_run(root):
    first = run(root)
    assert first.already_done is None
    assert first.revision == 1
    with start(root) as second:
        assert second.already_done.run_id == first.id
        assert second.already_done.metrics["loss"].last == 0.5
        assert second.id == first.id
        assert second.config == CONFIG
    assert count_runs(root) == 1


def test_a_session_of_what_is_done_records_nothing_whatever_is_called(root):
    first = run(root)
    before = quark.open_run(first.id, root).reload()
    with start(root) as session:
        quark.MetricsLogger(session).log("loss", 9.0, step=2)
        quark.EventLogger(session).log("checkpoint_saved")
        quark.ArtifactStore(session).log_table("t", [{"a": 1}])
        session.add_log("hello")
        session.add_tag("late")
        session.annotate(gpu="V100")
        session.add_to_group("g")
        session.update_config(lr=3)
        quark.MetricsLogger(session.context).log("loss", 8.0, step=3)
        session.flush()
    opened = quark.open_run(first.id, root)
    assert opened.reload() == before
    assert [point.value for point in quark.MetricsLogger(opened).read()] == [0.5]
    assert opened.fields == first.fields
    assert quark.ArtifactStore(opened).read() == ()


def test_an_exception_in_a_session_of_what_is_done_leaves_the_earlier_run_alone(root):
    first = run(root)
    with pytest.raises(ZeroDivisionError), start(root):
        raise ZeroDivisionError
    assert quark.open_run(first.id, root).status == "completed"


@pytest.mark.parametrize(
    "other", [{**CONFIG, "seed": 2}, {**CONFIG, "lr": 0.2}, {"lr": 0.1, "seed": 1}, {}],
)  # fmt: skip
def test_another_seed_or_setting_is_not_done(tmp_path, other):
    run(tmp_path)
    assert run(tmp_path, config=other).already_done is None
    assert count_runs(tmp_path) == 2


def test_numbers_and_order_that_are_equal_are_the_same_configuration(tmp_path):
    run(tmp_path)
    with start(tmp_path, config={"seed": 1.0, "model": {"width": 64.0}, "lr": 0.1}) as session:
        assert session.already_done


def test_another_project_and_another_version_are_not_done(tmp_path):
    run(tmp_path, version="v1")
    with start(tmp_path, version="v1") as same:
        assert same.already_done
    assert run(tmp_path, version="v2").already_done is None
    with start(tmp_path) as any_version:
        assert any_version.already_done
    with quark.start_run(
        project="q", config=CONFIG, if_done="skip", storage_dir=tmp_path
    ) as elsewhere:
        assert elsewhere.already_done is None


def test_a_setting_that_is_changed_later_does_not_make_it_another_run(tmp_path):
    with start(tmp_path) as session:
        session.update_config(parameters=1_000_000)
    with start(tmp_path) as again:
        assert again.already_done
    with start(tmp_path, config={**CONFIG, "parameters": 1_000_000}) as other:
        assert other.already_done is None


def test_a_run_that_was_started_without_if_done_counts_too(root):
    with quark.start_run(project="p", config=CONFIG, storage_dir=root) as first:
        assert first.revision is None
    with start(root) as second:
        assert second.already_done.run_id == first.id
    assert run(root, "again").revision == 2


def test_a_failed_run_is_done_anew_under_skip_and_gone_on_with_under_resume(root):
    first = run(root, fails=True)
    second = run(root, fails=True)
    assert second.id != first.id
    assert second.revision == 2
    third = run(root, "resume")
    assert third.id == second.id
    assert (third.context.run.attempt, third.revision) == (1, 2)
    with start(root, "resume") as fourth:
        assert fourth.already_done.run_id == second.id
    assert count_runs(root) == 2


def test_resume_begins_what_was_never_run(root):
    session = run(root, "resume")
    assert session.already_done is None
    assert session.revision == 1


def test_again_begins_the_next_revision(root):
    assert [run(root, "again").revision for _ in range(3)] == [1, 2, 3]
    assert quark.search_runs(storage_dir=root)[0].stored.fields["revision"] == 3


def test_an_archived_run_is_done_no_more(root):
    first = run(root)
    quark.edit_run(first.id, archived=True, storage_dir=root)
    assert run(root).already_done is None


def test_a_run_that_is_at_it_now_counts_as_done(root):
    with start(root) as first:
        with start(root) as second:
            assert second.already_done.run_id == first.id
            assert second.already_done.state == "running"
        with start(root, "resume") as third:
            assert third.already_done.run_id == first.id
    assert count_runs(root) == 1


def test_words_that_nobody_knows_are_refused(tmp_path):
    with pytest.raises(SchemaValidationError, match="if_done must be one of skip, resume, again"):
        start(tmp_path, "never")


def test_a_run_that_keeps_nothing_begins(tmp_path):
    with start(tmp_path, backends="none") as session:
        assert session.already_done is None


def test_where_the_store_is_out_of_reach_the_run_begins_and_says_so(tmp_path, monkeypatch, caplog):
    place, port = hold_port()
    with place:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("QUARK_USER_KEY", "qk_none")
        monkeypatch.setenv("QUARK_OFFLINE", "allow")
        monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.2")
        with start(tmp_path) as session:
            assert session.already_done is None
    assert "does not say whether this configuration was run before" in caplog.text


PROGRAM = """
import sys, time, quark
session = quark.start_run(
    project="p", config={"lr": 0.1, "seed": 1}, if_done=sys.argv[2], storage_dir=sys.argv[1],
    ranks=sys.argv[3] if sys.argv[3:] else None,
)
print(session.id, session.already_done is not None, session.context.run.attempt, flush=True)
quark.MetricsLogger(session).log("loss", 1.0, step=1)
sys.stdin.read()
session.end_run()
"""


def launch(root, *arguments, **variables):
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in SET_FOR_TESTS or not name.startswith("QUARK_")
    }
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(root), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # The leading rank says it as soon as it knows, which on a busy machine is late.
        env={
            **kept,
            **widen_in_children(OTHERS),
            "QUARK_LAUNCH_TIMEOUT_SECONDS": "60",
            **variables,
        },
    )


def finish(processes):
    lines = [process.stdout.readline().split() for process in processes]
    for process in processes:
        process.communicate("")
    assert [process.returncode for process in processes] == [0] * len(processes)
    return lines


@pytest.mark.long
def test_of_processes_that_start_at_once_one_does_it(tmp_path):
    lines = finish([launch(tmp_path, "skip") for _ in range(4)])
    assert len({run_id for run_id, _, _ in lines}) == 1
    assert sorted(done for _, done, _ in lines) == ["False", "True", "True", "True"]
    assert count_runs(tmp_path) == 1


@pytest.mark.long
@pytest.mark.parametrize("ranks", ["zero", "all"])
def test_ranks_follow_what_the_leading_one_has_found(tmp_path, ranks):
    with quark.start_run(project="p", config={"lr": 0.1, "seed": 1}, storage_dir=tmp_path) as first:
        quark.MetricsLogger(first).log("loss", 0.5, step=1)
    lines = finish(launch_ranks(tmp_path, "skip", ranks))
    assert lines == [[first.id, "True", "0"]] * 2
    assert len(quark.MetricsLogger(quark.open_run(first.id, tmp_path)).read()) == 1


@pytest.mark.long
def test_ranks_go_on_with_the_run_that_the_leading_one_resumes(tmp_path):
    first = quark.start_run(project="p", config={"lr": 0.1, "seed": 1}, storage_dir=tmp_path)
    first.end_run("failed")
    lines = finish(launch_ranks(tmp_path, "resume", "all"))
    assert lines == [[first.id, "False", "1"]] * 2
    opened = quark.open_run(first.id, tmp_path)
    assert opened.status == "completed"
    assert sorted(point.rank for point in quark.MetricsLogger(opened).read()) == [0, 1]


def launch_ranks(root, if_done, ranks):
    port = str(20_000 + time.time_ns() // 1000 % 20_000)  # a key of the launch; nobody listens
    return [
        launch(
            root, if_done, ranks, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )
        for rank in (0, 1)
    ]  # fmt: skip


def test_what_is_done_is_skipped_whatever_id_the_scheduler_gives(tmp_path, monkeypatch):
    first = run(tmp_path)
    monkeypatch.setenv("QUARK_RUN_ID", "chosen-by-slurm")
    with start(tmp_path) as session:
        assert session.already_done.run_id == first.id
    with start(tmp_path, "again") as again:
        assert again.id == "chosen-by-slurm"


def test_what_is_done_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    first = run(tmp_path)
    monkeypatch.delenv("QUARK_QUIET")
    with start(tmp_path):
        pass
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert first.id[:8] in told
    assert "nothing is recorded here" in told


def test_nobody_waits_for_a_start_that_is_over(tmp_path):
    run(tmp_path)
    assert [*(tmp_path / ".quark" / "launches").glob("*.starting")] == []


def test_a_session_of_what_is_done_says_which_run(tmp_path):
    first = run(tmp_path)
    with start(tmp_path) as session:
        assert first.id[:8] in repr(session)
        assert session.status == "completed"
        assert session.stop_requested is None
        assert session.report_delivery().complete


def test_where_there_can_be_no_file_nobody_waits_and_the_run_begins(tmp_path, caplog):
    run(tmp_path, config={"other": 1})
    launches = tmp_path / ".quark" / "launches"
    shutil.rmtree(launches)
    launches.write_text("no folder")
    caplog.set_level("DEBUG", "quark")
    assert run(tmp_path).revision == 1
    assert "starts of one configuration are not kept apart" in caplog.text
    with start(tmp_path) as session:
        assert session.already_done


def test_a_start_waits_for_another_one_of_its_configuration_and_not_for_ever(tmp_path, monkeypatch):
    from quark_core.records import ConfigSnapshot
    from quark_core.records.json_object import JsonObject
    from quark_core.runs import primary_store

    monkeypatch.setattr(primary_store, "_HOLD_S", 0.2)
    run(tmp_path, config={"other": 1})
    config = ConfigSnapshot(JsonObject(CONFIG))
    with primary_store.hold_configuration(tmp_path, "p", config):
        assert run(tmp_path).revision == 1


def test_a_run_that_was_made_to_check_a_cause_is_no_repetition(root):
    first = run(root, fails=True)
    checked = run(root, if_done="again")
    quark.edit_run(checked.id, fields={"why_exchanged": "model.py: clip"}, storage_dir=root)
    with start(root, "resume") as session:
        assert session.already_done is None
        assert session.id == first.id
