"""What is said of projects and groups, and what their runs inherit."""

import pytest

import quark
from quark.projects import find_inherited
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.runs.backend_choice import open_reader


def make(root, group=None, **arguments):
    with quark.start_run(project="digits", group=group, storage_dir=root, **arguments) as session:
        pass
    return session.id


def inherit(root, run_id):
    reader = open_reader(root)
    try:
        return find_inherited(reader, reader.load_run(run_id))
    finally:
        reader.close()


def test_a_project_is_described_with_fields_and_tags(kept):
    make(kept)
    project = quark.project("digits", storage_dir=kept)
    assert project.description is None
    returned = project.update(
        description="Handwritten digits.", fields={"team": "vision", "year": 2026}, tags=["paper"]
    )
    assert returned is project
    assert project.description == "Handwritten digits."
    assert project.fields == {"team": "vision", "year": 2026}
    assert project.tags == ("paper",)
    project.update(description="", remove_fields=["year"], tags=["b"], remove_tags=["paper"])
    assert (project.description, project.fields, project.tags) == (None, {"team": "vision"}, ("b",))


def test_runs_inherit_from_their_project_and_groups_when_they_are_read(kept):
    run_id = make(kept, "paper/fig3", tags=["own"])
    project = quark.project("digits", storage_dir=kept)
    project.update(fields={"team": "vision", "gpu": "T4"}, tags=["all"])
    project.group("paper").update(fields={"gpu": "V100"}, tags=["paper"])
    found = inherit(kept, run_id)
    assert found.fields == {"gpu": "V100", "team": "vision"}
    assert found.tags == ("all", "own", "paper")
    quark.edit_run(run_id, fields={"gpu": "A100"}, storage_dir=kept)
    assert inherit(kept, run_id).fields["gpu"] == "A100"
    later = make(kept)
    assert inherit(kept, later).tags == ("all",)
    assert quark.open_run(later, kept).context.run.tags == ()


def test_a_group_is_described_before_it_has_runs_and_keeps_it(kept):
    make(kept)
    group = quark.project("digits", storage_dir=kept).group("paper/fig3")
    assert group.description is None
    group.update(description="Noise against width.", fields={"figure": 3})
    assert group.description == "Noise against width."
    make(kept, "paper/fig3")
    make(kept, "paper/fig4")
    groups = quark.project("digits", storage_dir=kept).groups()
    assert [(each.path, each.runs) for each in groups] == [
        ("paper", 2), ("paper/fig3", 1), ("paper/fig4", 1),
    ]  # fmt: skip
    assert groups[1].description == "Noise against width."
    assert dict(groups[1].fields) == {"figure": 3}


def test_projects_and_groups_say_what_they_are():
    project = quark.project("digits")
    assert repr(project) == "RunProject('digits')"
    assert repr(project.group("paper/fig3")) == "RunGroup('paper/fig3' of project 'digits')"
    assert project.group("paper/fig3").path == "paper/fig3"
    assert project.name == "digits"


def test_bad_names_and_updates_are_refused(tmp_path):
    make(tmp_path)
    project = quark.project("digits", storage_dir=tmp_path)
    with pytest.raises(SchemaValidationError, match="name"):
        quark.project("")
    with pytest.raises(SchemaValidationError, match="path"):
        project.group("/paper")
    with pytest.raises(SchemaValidationError, match="must change something"):
        project.update()
    with pytest.raises(SchemaValidationError, match="no such project"):
        quark.project("other", storage_dir=tmp_path).update(description="x")
    with pytest.raises(SchemaValidationError, match="field 'a'"):
        project.update(fields={"a": 1}, remove_fields=["a"])


def test_where_there_is_no_store_none_is_made(tmp_path):
    with pytest.raises(SessionStoreError):
        quark.project("digits", storage_dir=tmp_path).update(description="x")
    assert list(tmp_path.iterdir()) == []


def test_a_store_of_journals_alone_says_that_it_keeps_nothing_of_the_kind(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    run_id = make(tmp_path, "paper")
    with pytest.raises(SessionStoreError, match="projects and groups"):
        quark.project("digits", storage_dir=tmp_path).update(description="x")
    assert inherit(tmp_path, run_id).fields == {}


def test_secrets_in_descriptions_are_redacted(tmp_path):
    make(tmp_path)
    key = "sk-1234567890abcdef1234567890abcdef"
    project = quark.project("digits", storage_dir=tmp_path)
    project.update(description=f"key {key}", fields={"api_key": key})
    assert key not in project.description
    assert key not in str(project.fields)
