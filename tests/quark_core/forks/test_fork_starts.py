"""What `start_run(fork_from=…)` takes, refuses, and says of the new run."""

import pytest

import quark


@pytest.fixture
def parent(tmp_path):
    with quark.start_run(
        project="p", storage_dir=tmp_path, config={"lr": 0.1, "layers": [1, 2]}
    ) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
    return session


@pytest.mark.parametrize("given", ["id", "beginning", "session", "context", "list"])
def test_the_run_may_be_given_by_id_session_or_context(tmp_path, parent, given):
    run_id = parent.run_id
    run = {"beginning": run_id[:6], "session": parent, "context": parent.context}.get(given, run_id)
    fork = [run, 0] if given == "list" else (run, 0)
    with quark.start_run(project="q", storage_dir=tmp_path, fork_from=fork) as child:
        record = child.reload().run
    assert (record.parent_run_id, record.fork_step) == (run_id, 0)
    assert record.lineage_root_run_id == run_id
    assert record.project_name == "q"


def test_a_fork_that_is_given_no_configuration_has_its_parents(tmp_path, parent):
    with quark.start_run(project="p", storage_dir=tmp_path, fork_from=(parent, 0)) as child:
        assert dict(child.config) == {"lr": 0.1, "layers": [1, 2]}
    with quark.start_run(
        project="p", storage_dir=tmp_path, fork_from=(parent, 0), objective="loss", mode="min"
    ) as child:
        assert dict(child.config)["lr"] == 0.1
        assert "loss" in str(dict(child.config))
    with quark.start_run(
        project="p", storage_dir=tmp_path, fork_from=(parent, 0), config={"lr": 0.2}
    ) as child:
        assert dict(child.config) == {"lr": 0.2}
    found = quark.search_runs(storage_dir=tmp_path, where="config.lr == 0.1")
    assert len(found) == 3


def test_a_step_beyond_the_parents_end_takes_all_of_it(tmp_path, parent):
    for step in (1, 2**62, 2**63 - 1):
        with quark.start_run(project="p", storage_dir=tmp_path, fork_from=(parent, step)) as child:
            assert len(quark.MetricsLogger(child).read()) == 1
        (found,) = [r for r in quark.search_runs(storage_dir=tmp_path) if r.run_id == child.run_id]
        assert found.metrics["loss"].count == 1


@pytest.mark.parametrize(
    ("fork", "message"),
    [
        ("abcd", r"fork_from must be a pair"),
        ("abcd?_step=12", r"fork_from must be a pair .*\('abcd', 12\) here"),
        (("abcd",), r"fork_from must be a pair"),
        (("abcd", 1, 2), r"fork_from must be a pair"),
        (("abcd", None), r"its step must not be None"),
        (("abcd", -1), r"fork_from\[1\] must not be negative"),
        (("abcd", 2**63), r"fork_from\[1\] must fit in 64 bits"),
        (("abcd", 1.5), r"fork_from\[1\] must be a non-negative integer"),
        (("abcd", True), r"fork_from\[1\] must be an integer, not bool"),
        (("../x", 1), r"fork_from\[0\] may hold"),
        ((None, 1), r"its run must be an id, a session"),
        ((7, 1), r"its run must be an id, a session"),
        (7, r"fork_from must be a pair"),
    ],
)
def test_what_is_no_fork_is_refused_by_name(tmp_path, fork, message):
    with pytest.raises(quark.SchemaValidationError, match=message):
        quark.start_run(project="p", storage_dir=tmp_path, fork_from=fork)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_not_there_cannot_be_forked(tmp_path, parent):
    with pytest.raises(quark.RunNotFoundError, match=r"^fork_from nope: .*no such run"):
        quark.start_run(project="p", storage_dir=tmp_path, fork_from=("nope", 1))
    assert len(quark.search_runs(storage_dir=tmp_path)) == 1


def test_the_parent_may_be_said_again_and_no_other_one(tmp_path, parent):
    fork = (parent, 0)
    with quark.start_run(
        project="p", storage_dir=tmp_path, fork_from=fork, parent_run_id=parent.run_id
    ) as child:
        assert child.context.run.parent_run_id == parent.run_id
    with pytest.raises(quark.SchemaValidationError, match=r"parent_run_id .* name two runs"):
        quark.start_run(
            project="p", storage_dir=tmp_path, fork_from=fork, parent_run_id=child.run_id
        )


def test_a_run_that_keeps_nothing_may_be_started_as_a_fork(tmp_path, parent):
    with quark.start_run(
        project="p", storage_dir=tmp_path, fork_from=(parent, 0), backends="none"
    ) as child:
        quark.MetricsLogger(child).log("loss", 1.0, step=1)
        assert quark.MetricsLogger(child).read() in ((), [])
