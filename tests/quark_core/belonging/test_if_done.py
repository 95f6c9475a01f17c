"""What is done again, what is left, and what is gone on with: `start_run(if_exists=)`."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time

import pytest
from held_ports import hold_port
from set_for_tests import SET_FOR_TESTS
from wide_bounds import OTHERS, keep_sources_in_children, widen_in_children

import quark
from quark.analysis import run_search
from quark.cli.rm import open_for_removal
from quark.provenance.tracing import LEVEL_BYTECODE, TRACE_MARK
from quark_core.errors import RunNotFoundError, SchemaValidationError
from quark_core.records.base import start_fields
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.records.runs import digest_config, digest_structure
from quark_core.runs.backend_choice import open_reader

CONFIG = {"lr": 0.1, "model": {"width": 64}, "seed": 1}


def start(root, if_exists="skip", config=CONFIG, **arguments):
    return quark.start_run(
        project="p", config=config, if_exists=if_exists, storage_dir=root, **arguments
    )


def run(root, if_exists="skip", config=CONFIG, fails=False, **arguments):
    session = start(root, if_exists, config, **arguments)
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
        project="q", config=CONFIG, if_exists="skip", storage_dir=tmp_path
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


@pytest.mark.sampled
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
    with pytest.raises(SchemaValidationError, match="one of 'skip', 'resume', 'again'"):
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
    assert "does not report if this config was run before" in caplog.text


PROGRAM = """
import sys, time, quark
session = quark.start_run(
    project="p", config={"lr": 0.1, "seed": 1}, if_exists=sys.argv[2], storage_dir=sys.argv[1],
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


def launch_ranks(root, if_exists, ranks):
    port = str(20_000 + time.time_ns() // 1000 % 20_000)  # a key of the launch; nobody listens
    return [
        launch(
            root, if_exists, ranks, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
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
    assert "this process records nothing" in told


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
    assert "concurrent starts of one config are not coordinated" in caplog.text
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
    checked = run(root, if_exists="again")
    quark.edit_run(checked.id, fields={"why_exchanged": "model.py: clip"}, storage_dir=root)
    with start(root, "resume") as session:
        assert session.already_done is None
        assert session.id == first.id


BASE = {"lr": 0.1, "model": {"width": 64, "name": "net"}, "sizes": [1, 2], "seed": 3}


def test_digests_are_the_same_on_every_machine():
    """Golden: what has changed here has changed for every store that is there."""
    assert digest_config(BASE) == "3ca10e6b081533968c1946b946d3635c"
    assert digest_structure(BASE) == "c7615ba88f8fe830f3b0f8d5fab79228"


@pytest.mark.parametrize(
    "same",
    [
        {"seed": 3, "sizes": [1, 2], "model": {"name": "net", "width": 64}, "lr": 0.1},
        {**BASE, "seed": 4},
        {**BASE, "model": {"width": 64.0, "name": "net"}},
        {**BASE, "quark_objective": "val/loss", "quark_objective_mode": "min"},
        {"lr": 0.1, "model": {"width": 64, "name": "net"}, "sizes": [1, 2]},
        {**BASE, "data": {"seed": 9}, "shuffle_seed": 1},
    ],
)
def test_order_seeds_and_objective_are_no_difference(same):
    assert digest_config(same) == digest_config(BASE)
    assert digest_structure(same) == digest_structure(BASE)


@pytest.mark.parametrize(
    "other",
    [
        {**BASE, "lr": 0.2},
        {**BASE, "lr": "0.1"},
        {**BASE, "sizes": [2, 1]},
        {**BASE, "model": {"width": 64}},
        {**BASE, "new": None},
    ],
)
def test_another_value_is_another_configuration(other):
    assert digest_config(other) != digest_config(BASE)


def test_structure_is_keys_and_types_and_no_values():
    shape = digest_structure(BASE)
    assert digest_structure({**BASE, "lr": 7, "sizes": [1, 2, 3, 4]}) == shape
    assert digest_structure({**BASE, "lr": "a"}) != shape
    assert digest_structure({**BASE, "lr": True}) != shape
    assert digest_structure({**BASE, "lr": None}) != shape
    assert digest_structure({**BASE, "sizes": ["a"]}) != shape
    assert digest_structure({**BASE, "more": 1}) != shape


def test_where_an_object_lay_in_memory_is_no_value():
    values = [{"loss": f"<Loss object at 0x7f{i:04x}>"} for i in range(2)]
    assert digest_config(values[0]) == digest_config(values[1])


def test_lists_in_lists_are_told_apart_as_ever():
    """Golden, as of a configuration without any: lists of five lists are what they were."""
    nested = {"x": [[1, [2.5, "a"]], [{"b": [None]}, [True]], []]}
    assert digest_structure(nested) == "991bd891aaae741c98565ac68e16899c"


@pytest.mark.parametrize("inner", [[1], [1, "a"], {"a": 1}])
def test_lists_nested_ever_deeper_cost_no_more(inner):
    """Each list named each type within it twice: of 60 of them the digest was never finished."""
    found = []
    for _ in range(60):
        inner = [inner, "text"]
        found.append(digest_structure({"x": inner}))
    assert len(set(found[:3])) == 3
    assert len(set(found[10:])) == 1


def make(root, config, values=(), project="p", **arguments):
    with quark.start_run(project=project, config=config, storage_dir=root, **arguments) as session:
        metrics = quark.MetricsLogger(session)
        for step, value in enumerate(values):
            metrics.log("val/acc", value, step=step)
            metrics.log("val/loss", 1 - value, step=step)
            metrics.log("strange", value, step=step)
    return session.id


def test_the_best_run_is_that_of_the_best_value_whenever_it_was(root):
    make(root, {"lr": 1}, [0.5, 0.6])
    best = make(root, {"lr": 2}, [0.9, 0.1])
    make(root, {"lr": 3}, [0.7, 0.8])
    assert quark.best_run("val/acc", storage_dir=root).run_id == best
    assert quark.best_run("val/loss", storage_dir=root).run_id == best
    assert quark.best_run("strange", mode="max", storage_dir=root).run_id == best
    assert quark.best_run("strange", mode="min", storage_dir=root).run_id == best


def test_the_best_run_is_looked_for_where_one_says(tmp_path):
    make(tmp_path, {"lr": 1}, [0.9])
    second = make(tmp_path, {"lr": 2}, [0.8], project="q")
    third = make(tmp_path, {"lr": 3}, [0.7])
    assert quark.best_run("val/acc", project="q", storage_dir=tmp_path).run_id == second
    assert quark.best_run("val/acc", where="config.lr == 3", storage_dir=tmp_path).run_id == third


def test_values_that_are_not_finite_are_never_the_best(tmp_path):
    make(tmp_path, {"lr": 1}, [math.nan, math.inf])
    good = make(tmp_path, {"lr": 2}, [0.1])
    assert quark.best_run("val/acc", storage_dir=tmp_path).run_id == good


def test_where_no_run_has_a_value_there_is_no_best(tmp_path):
    make(tmp_path, {"lr": 1}, [math.nan])
    assert quark.best_run("val/acc", storage_dir=tmp_path) is None
    assert quark.best_run("val/acc", project="other", storage_dir=tmp_path) is None


def test_a_metric_that_does_not_say_which_way_needs_a_mode(tmp_path):
    make(tmp_path, {"lr": 1}, [0.1])
    with pytest.raises(SchemaValidationError, match="mode is required: pass 'min' or 'max'"):
        quark.best_run("strange", storage_dir=tmp_path)
    with pytest.raises(SchemaValidationError, match="mode"):
        quark.best_run("val/acc", mode="best", storage_dir=tmp_path)
    with pytest.raises(SchemaValidationError, match="val/accuracy"):
        quark.best_run("val/accuracy", storage_dir=tmp_path)


def ids(found):
    return [(each.run.run_id, round(each.distance, 2)) for each in found]


def test_runs_of_one_configuration_come_first_then_those_with_fewer_equal_values(root):
    far = make(root, {"lr": 0.5, "width": 1, "name": "a", "seed": 1})
    near = make(root, {"lr": 0.1, "width": 1, "name": "a", "seed": 1})
    same = make(root, {"lr": 0.1, "width": 64, "name": "a", "seed": 1})
    own = make(root, {"lr": 0.1, "width": 64, "name": "a", "seed": 2})
    nothing = make(root, {"other": True})
    found = quark.find_similar_runs(own, by="config", storage_dir=root)
    assert ids(found) == [(same, 0.0), (near, 0.5), (far, 0.8)]
    assert nothing not in dict(ids(found))


def test_equal_numbers_are_alike_and_a_truth_value_is_no_number(root):
    huge = 10**400
    far = make(root, {"one": True, "other": "1", "huge": 5, "x": 1})
    near = make(root, {"one": 1, "other": 1.0, "huge": huge, "x": 2})
    own = make(root, {"one": 1.0, "other": 1, "huge": huge, "x": 1})
    found = quark.find_similar_runs(own, by="config", storage_dir=root)
    assert ids(found) == [(near, 0.4), (far, 0.86)]


# Runs that share anything: of the project, and of all.
_NEAR = {"config": (2, 3), "structure": (6, 7)}


@pytest.mark.parametrize("by", ["config", "structure"])
def test_stores_that_list_whole_runs_alone_find_the_same(tmp_path, monkeypatch, by):
    for lr in range(6):
        make(tmp_path, {"lr": lr // 2, "deep": {"size": [lr], "seed": lr}, "extra": "x" * lr})
    make(tmp_path, None)
    filed = make(tmp_path, {"lr": 1, "deep": {"size": [3]}})
    quark.edit_run(filed, archived=True, storage_dir=tmp_path)
    make(tmp_path, {"lr": 1, "deep": {"size": [3]}}, project="q")
    own = make(tmp_path, {"lr": 1, "deep": {"size": [3]}, "more": None})
    asked = [
        {"by": by, "limit": limit, "everywhere": everywhere, "storage_dir": tmp_path}
        for limit in (2, 100)
        for everywhere in (False, True)
    ]
    found = [quark.find_similar_runs(own, **each) for each in asked]
    monkeypatch.setattr(run_search, "SupportsConfigurations", ())
    assert found == [quark.find_similar_runs(own, **each) for each in asked]
    assert [len(each) for each in found] == [2, 2, *_NEAR[by]]


@pytest.mark.parametrize("journals_alone", ["0", "1"])
def test_configurations_are_listed_as_runs_are(tmp_path, monkeypatch, journals_alone):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", journals_alone)
    for number in range(5):
        make(tmp_path, {"n": {"m": number}} if number else None, project="pq"[number % 2])
    quark.edit_run(make(tmp_path, {"a": 1}), archived=True, storage_dir=tmp_path)
    trashed = make(tmp_path, {"a": 2})
    if journals_alone == "0":
        with open_for_removal(tmp_path) as removal:
            removal.trash_runs([trashed])
    reader = open_reader(tmp_path)
    try:
        for asked in ({}, {"project": "p"}, {"project": "p", "limit": 2}, {"project": "absent"}):
            runs = reader.list_runs(**asked)
            assert reader.list_configurations(**asked) == [
                (
                    run.run.id,
                    run.run.archived_at is not None,
                    {} if run.config is None else run.config.values,
                )
                for run in runs
            ]
        assert len(reader.list_configurations()) == 6 + int(journals_alone)
    finally:
        reader.close()


def test_structure_is_keys_and_types_whatever_the_values(root):
    same = make(root, {"lr": 7, "sizes": [1, 2, 3]})
    near = make(root, {"lr": "fast", "sizes": [1]})
    own = make(root, {"lr": 0.1, "sizes": [9]})
    found = quark.find_similar_runs(own, by="structure", storage_dir=root)
    assert ids(found) == [(same, 0.0), (near, 0.67)]


def test_runs_of_other_projects_are_similar_only_where_that_is_asked_for(tmp_path):
    other = make(tmp_path, {"lr": 1}, project="q")
    own = make(tmp_path, {"lr": 1})
    assert quark.find_similar_runs(own, storage_dir=tmp_path) == ()
    found = quark.find_similar_runs(own, everywhere=True, storage_dir=tmp_path)
    assert ids(found) == [(other, 0.0)]


def test_archived_runs_are_not_similar_to_any(tmp_path):
    filed = make(tmp_path, {"lr": 1})
    own = make(tmp_path, {"lr": 1})
    quark.edit_run(filed, archived=True, storage_dir=tmp_path)
    assert quark.find_similar_runs(own, by="config", storage_dir=tmp_path) == ()


def test_no_more_are_found_than_were_asked_for_the_newest_of_equal_ones(tmp_path):
    made = [make(tmp_path, {"lr": 1, "seed": seed}) for seed in range(5)]
    found = quark.find_similar_runs(made[2], by="config", limit=2, storage_dir=tmp_path)
    assert ids(found) == [(made[4], 0.0), (made[3], 0.0)]


def test_a_session_a_summary_and_the_beginning_of_an_id_name_a_run(tmp_path):
    other = make(tmp_path, {"lr": 1})
    with quark.start_run(project="p", config={"lr": 1}, storage_dir=tmp_path) as session:
        expected = [(other, 0.0)]
        assert ids(quark.find_similar_runs(session)) == expected
        assert ids(quark.find_similar_runs(session.context)) == expected
    summary = quark.search_runs(storage_dir=tmp_path)[0]
    assert ids(quark.find_similar_runs(summary, storage_dir=tmp_path)) == expected
    assert ids(quark.find_similar_runs(session.id[:6], storage_dir=tmp_path)) == expected
    with pytest.raises(RunNotFoundError):
        quark.find_similar_runs("0123456789abcdef", storage_dir=tmp_path)


def test_bad_arguments_of_similar_runs_are_named(tmp_path):
    own = make(tmp_path, {"lr": 1})
    with pytest.raises(SchemaValidationError, match="by must be one of 'structure', 'config'"):
        quark.find_similar_runs(own, by="name", storage_dir=tmp_path)
    with pytest.raises(SchemaValidationError, match="run must be a run ID"):
        quark.find_similar_runs(3, storage_dir=tmp_path)
    with pytest.raises(SchemaValidationError, match="limit"):
        quark.find_similar_runs(own, limit=-1, storage_dir=tmp_path)


def test_a_run_without_a_configuration_is_similar_to_nothing(tmp_path):
    make(tmp_path, None)
    own = make(tmp_path, None)
    assert quark.find_similar_runs(own, by="config", storage_dir=tmp_path) == ()
    assert quark.find_similar_runs(own, by="code", storage_dir=tmp_path) == ()
    assert quark.find_similar_runs(own, by="trace", storage_dir=tmp_path) == ()


def log_traces(root, traces):
    """A run with traced functions, as `quark.trace` leaves them: they are those of a process."""
    with quark.start_run(project="p", storage_dir=root) as session:
        session.write(
            FingerprintRecord(
                *start_fields(None), "code", name, digest, LEVEL_BYTECODE,
                metadata=JsonObject({TRACE_MARK: True, "module": "m", "qualname": name}),
            )
            for name, digest in traces.items()
        )  # fmt: skip
    return session.id


def test_runs_with_more_equal_traces_are_nearer(root):
    far = log_traces(root, {"step": "a" * 32, "loss": "0" * 32})
    same = log_traces(root, {"step": "a" * 32, "loss": "b" * 32})
    own = log_traces(root, {"step": "a" * 32, "loss": "b" * 32})
    log_traces(root, {"step": "c" * 32})
    found = quark.find_similar_runs(own, by="trace", storage_dir=root)
    assert ids(found) == [(same, 0.0), (far, 0.67)]


SCRIPT = """
import quark, helper
with quark.start_run(project="p", storage_dir="runs"):
    pass
"""


@pytest.mark.long
def test_runs_with_more_equal_source_files_are_nearer(tmp_path):
    (tmp_path / "pyproject.toml").write_text("")
    made = []
    for helper, train in (("A = 1", ""), ("A = 2", ""), ("A = 3", "# other"), ("A = 2", "")):
        (tmp_path / "helper.py").write_text(f"{helper}\n")
        (tmp_path / "train.py").write_text(SCRIPT + train)
        environment = {**os.environ, **keep_sources_in_children()}
        subprocess.run(
            [sys.executable, "train.py"], cwd=tmp_path, env=environment, check=True, timeout=120
        )
        made.append(quark.search_runs(storage_dir=tmp_path / "runs", limit=1)[0].run_id)
    found = quark.find_similar_runs(made[3], by="code", storage_dir=tmp_path / "runs")
    assert ids(found) == [(made[1], 0.0), (made[0], 0.67)]


def test_a_metric_that_no_run_has_is_named_before_its_direction_is_asked_for(root):
    make(root, {"lr": 1}, [0.5])
    with pytest.raises(quark.SchemaValidationError, match="zzz") as caught:
        quark.best_run("zzz", storage_dir=root)
    assert "mode" not in str(caught.value)
    with pytest.raises(quark.SchemaValidationError, match="mode is required"):
        quark.best_run("strange", storage_dir=root)
