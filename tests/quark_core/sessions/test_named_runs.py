"""Arguments that name runs and tags are named when they are wrong."""

import pytest

import quark


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
        (iter(["a", "b", "\ud800"]), r"^tags\[2\] holds half of a surrogate pair"),
        ("abc", "^tags must be an iterable of str, not one str"),
    ],
)
def test_a_bad_tag_is_named_by_its_place(tmp_path, tags, message):
    with pytest.raises(quark.SchemaValidationError, match=message):
        quark.start_run(project="p", storage_dir=tmp_path, tags=tags)


def test_an_absent_parent_is_named_as_the_parent(tmp_path):
    with pytest.raises(quark.RunNotFoundError, match=r"^parent_run_id nope: .*no such run"):
        quark.start_run(project="p", storage_dir=tmp_path, parent_run_id="nope")


def find_mistake(run_id, root):
    with pytest.raises(quark.RunNotFoundError) as caught:
        quark.open_run(run_id, storage_dir=root)
    assert str(caught.value).startswith(f"run_id {run_id}: the store {root} has no such run")
    return str(caught.value)


def test_the_beginning_of_an_id_is_enough_where_one_run_begins_so(log_runs):
    root = log_runs(dfbe8d2a00="one", dfbe8d2b00=None, other=None)
    assert quark.open_run("dfbe8d2a", root).id == "dfbe8d2a00"
    assert quark.open_run("othe", root).id == "other"
    with pytest.raises(quark.RunNotFoundError) as caught:
        quark.open_run("dfbe8d2", root)
    assert str(caught.value) == (
        "run_id 'dfbe8d2' fits 2 runs: dfbe8d2b00, dfbe8d2a00 \"one\"; give more of it"
    )
    assert find_mistake("absent", root).endswith("has no such run")
    assert find_mistake("dfb", root).endswith("; of the beginning of an id 4 characters are needed")
    assert find_mistake("zz", root).endswith("; of the beginning of an id 4 characters are needed")
    assert find_mistake("dfbe8d2x", root).endswith('; near it: dfbe8d2b00, dfbe8d2a00 "one"')


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
    assert find_mistake("resnet50", root).endswith("; first has that name, which is no id")
    assert find_mistake("vit", root).endswith("; third, second have that name, which is no id")
    assert find_mistake("resnet", root).endswith('; near it: first "resnet50"')


@pytest.mark.long
def test_many_runs_are_not_all_listed(log_runs):
    root = log_runs(**{f"run-{index}": None for index in range(7)})
    with pytest.raises(quark.RunNotFoundError) as caught:
        quark.open_run("run-", storage_dir=root)
    assert "fits 7 runs: run-6, run-5, run-4, run-3, run-2 and 2 more; " in str(caught.value)
