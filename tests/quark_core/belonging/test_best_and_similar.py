"""The best run by a metric, and runs that are like another one."""

import math
import os
import subprocess
import sys

import pytest
from wide_bounds import keep_sources_in_children

import quark
from quark.analysis import run_search
from quark.cli.rm import open_for_removal
from quark.provenance.tracing import LEVEL_BYTECODE, TRACE_MARK
from quark_core.errors import RunNotFoundError, SchemaValidationError
from quark_core.records.base import start_fields
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.provenance import FingerprintRecord
from quark_core.runs.backend_choice import open_reader


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
    with pytest.raises(SchemaValidationError, match="mode must be 'min' or 'max'"):
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
    with pytest.raises(SchemaValidationError, match="by must be one of structure, config"):
        quark.find_similar_runs(own, by="name", storage_dir=tmp_path)
    with pytest.raises(SchemaValidationError, match="run must be an id"):
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
    with pytest.raises(quark.SchemaValidationError, match="mode must be"):
        quark.best_run("strange", storage_dir=root)
