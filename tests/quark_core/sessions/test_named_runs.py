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
    assert str(caught.value).startswith(f"run_id {run_id}: this store has no such run")
    return str(caught.value)


@pytest.mark.long
def test_the_run_that_begins_so_is_named(log_runs):
    root = log_runs(dfbe8d2a00="one", dfbe8d2b00=None, other=None)
    assert find_mistake("dfbe8d2a", root).endswith("; dfbe8d2a00 begins so")
    assert find_mistake("dfbe8d2", root).endswith("; dfbe8d2b00, dfbe8d2a00 begin so")
    assert find_mistake("absent", root).endswith("this store has no such run")


@pytest.mark.long
def test_a_name_is_no_id(log_runs):
    root = log_runs(first="resnet50", second="vit", third="vit")
    assert find_mistake("resnet50", root).endswith("; first has that name, which is no id")
    assert find_mistake("vit", root).endswith("; third, second have that name, which is no id")
    # A beginning of a name is none of either.
    assert find_mistake("resnet", root).endswith("this store has no such run")


@pytest.mark.long
def test_many_runs_are_not_all_listed(log_runs):
    root = log_runs(**{f"run-{index}": None for index in range(7)})
    assert find_mistake("run", root).endswith("; run-6, run-5, run-4, run-3, run-2, … begin so")
