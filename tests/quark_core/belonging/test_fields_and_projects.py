"""Groups, fields, versions and late settings of a run, in each kind of store."""

from __future__ import annotations

import argparse
import sys
import threading

import pytest

import quark
from quark.projects import find_inherited
from quark_core.config.arguments import check_fields, check_group_path, check_groups, is_below
from quark_core.errors import InvalidRunStateError, SchemaValidationError, SessionStoreError
from quark_core.runs.backend_choice import open_reader

KEY = "sk-1234567890abcdef1234567890abcdef"


def load(session, root):
    return quark.open_run(session.id, root)


def test_a_run_is_in_the_groups_that_it_was_started_in(root):
    with quark.start_run(project="p", group=["paper/fig3", "idea 4573"], storage_dir=root) as one:
        assert one.groups == ("idea 4573", "paper/fig3")
    assert load(one, root).groups == ("idea 4573", "paper/fig3")
    assert load(one, root).context.run.groups == ("idea 4573", "paper/fig3")


def test_a_run_is_put_into_groups_and_taken_out_while_it_trains(root):
    with quark.start_run(project="p", group="a", storage_dir=root) as session:
        session.add_to_group("paper/fig3")
        session.add_to_group(["b", "c"])
        session.remove_from_group("a")
        session.remove_from_group("never there")
        assert session.groups == ("b", "c", "paper/fig3")
        assert session.reload().run.groups == ("b", "c", "paper/fig3")
    assert load(session, root).groups == ("b", "c", "paper/fig3")
    with pytest.raises(InvalidRunStateError, match="add_to_group"):
        session.add_to_group("late")


def test_a_resumed_run_stays_in_its_groups_and_keeps_its_fields(root):
    with quark.start_run(project="p", group="a", storage_dir=root) as session:
        session.annotate(gpu="V100")
    with quark.resume_run(run_id=session.id, reopen=True, storage_dir=root) as resumed:
        assert resumed.groups == ("a",)
        assert resumed.fields == {"gpu": "V100"}
        resumed.annotate(accuracy=0.98)
    assert load(session, root).fields == {"accuracy": 0.98, "gpu": "V100"}


def test_fields_keep_their_types_and_the_last_value_counts(root):
    with quark.start_run(project="p", storage_dir=root) as session:
        session.annotate(gpu="T4", nodes=2, amp=True, share=0.5, nothing=None)
        session.annotate({"final/accuracy": 0.98, "shape": [3, {"a": 1}]}, gpu="V100")
        session.annotate()
    fields = load(session, root).fields
    assert fields == {
        "gpu": "V100", "nodes": 2, "amp": True, "share": 0.5, "nothing": None,
        "final/accuracy": 0.98, "shape": [3, {"a": 1}],
    }  # fmt: skip
    assert type(fields["nodes"]) is int
    assert type(fields["amp"]) is bool


def test_a_stage_of_ones_own_is_a_field_that_searches_know(root):
    """What Track has a custom status for; whether a run is done stays one of four words."""
    with quark.start_run(project="p", storage_dir=root) as session:
        session.annotate(stage="warm-up")
        session.flush("stored")
        where = "field.stage == 'warm-up' and status == 'running'"
        (found,) = quark.search_runs(where=where, storage_dir=root)
        assert found.run_id == session.run_id
        session.annotate(stage="tuning")
    assert len(quark.search_runs(where="field.stage == 'warm-up'", storage_dir=root)) == 0
    assert load(session, root).fields == {"stage": "tuning"}


def test_what_a_session_gives_of_its_fields_changes_nothing(root):
    with quark.start_run(project="p", storage_dir=root) as session:
        session.annotate(shape=[1])
        session.fields["shape"].append(2)
        assert session.fields == {"shape": [1]}


def test_secrets_in_fields_do_not_reach_the_store(root):
    with quark.start_run(project="p", storage_dir=root) as session:
        session.annotate(api_key=KEY, note=f"token {KEY}")
        assert KEY not in str(session.fields)
    assert KEY not in str(load(session, root).fields)


def test_a_bad_field_or_group_is_refused_by_name_and_changes_nothing(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        with pytest.raises(SchemaValidationError, match="fields\\['gpu'\\]"):
            session.annotate(gpu=object(), fine=1)
        with pytest.raises(SchemaValidationError, match="group"):
            session.add_to_group("a//b")
        assert (session.fields, session.groups) == ({}, ())
    with pytest.raises(SchemaValidationError, match=r"group\[0\]"):
        quark.start_run(project="p", group=["/a"], storage_dir=tmp_path)


def test_a_run_that_has_ended_is_annotated_no_more(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        pass
    with pytest.raises(InvalidRunStateError, match="annotate"):
        session.annotate(gpu="V100")
    with pytest.raises(InvalidRunStateError):
        load(session, tmp_path).annotate(gpu="V100")


def test_fields_of_many_threads_are_all_kept(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        threads = [
            threading.Thread(target=lambda n=n: session.annotate({f"f{n}": n})) for n in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert session.fields == {f"f{n}": n for n in range(16)}
    assert load(session, tmp_path).fields == {f"f{n}": n for n in range(16)}


def test_a_version_is_a_text_or_what_a_function_says(root):
    for version in ("a8c3", lambda: "a8c3"):
        with quark.start_run(project="p", version=version, storage_dir=root) as session:
            pass
        assert load(session, root).fields == {"version": "a8c3"}


def test_a_version_that_cannot_be_found_costs_a_warning_and_no_run(tmp_path, caplog):
    def fail():
        raise OSError("no git here")

    with quark.start_run(project="p", version=fail, storage_dir=tmp_path) as session:
        assert session.fields == {}
    assert "no git here" in caplog.text
    with pytest.raises(SchemaValidationError, match="version"):
        quark.start_run(project="p", version=3, storage_dir=tmp_path)


def test_a_late_setting_is_kept_as_if_the_run_was_started_with_it(root):
    with quark.start_run(project="p", config={"lr": 0.1}, storage_dir=root) as session:
        session.update_config({"batch_size": 32}, lr=0.2)
        assert session.config == {"lr": 0.2, "batch_size": 32}
    assert load(session, root).config == {"lr": 0.2, "batch_size": 32}


def test_what_update_config_takes_is_what_start_run_takes(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        session.update_config(argparse.Namespace(lr=0.1, path=tmp_path))
        assert session.config == {"lr": 0.1, "path": str(tmp_path)}
        with pytest.raises(SchemaValidationError, match="ArgumentParser"):
            session.update_config([1])


def test_settings_are_shown_where_that_is_asked_for(tmp_path, capsys):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        session.update_config({"model": {"width": 64}, "lr": 0.1, "api_key": KEY}, show=True)
        session.update_config(name="\x1b[31mred")
    shown = capsys.readouterr().out
    assert "model.width  64\nlr           0.1\n" in shown
    assert KEY not in shown
    assert "\x1b" not in shown


def make_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--password", default=None)
    return parser


def test_an_argument_parser_is_a_configuration_of_what_the_command_line_says(root, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.5", "--launcher-option", "x"])
    with quark.start_run(project="p", config=make_parser(), storage_dir=root) as session:
        assert session.config == {"lr": 0.5, "batch_size": 32, "password": None}
    assert load(session, root).config["lr"] == 0.5


def test_a_parser_ends_the_program_for_a_bad_value_as_ever(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "fast"])
    with pytest.raises(SystemExit):
        quark.start_run(project="p", config=make_parser(), storage_dir=tmp_path)
    assert "invalid float value" in capsys.readouterr().err
    assert not (tmp_path / ".quark").exists()


def test_secrets_of_a_parser_are_redacted(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--password", "hunter2-hunter2"])
    with quark.start_run(project="p", config=make_parser(), storage_dir=tmp_path) as session:
        assert "hunter2" not in str(dict(session.config))


def test_groups_and_fields_are_edited_while_a_run_trains_and_after_its_end(root):
    with quark.start_run(project="p", group="a", storage_dir=root) as session:
        session.annotate(gpu="T4", gone=1)
        session.flush()  # what comes last to the store counts
        run = quark.edit_run(
            session, add_groups="paper/fig3", fields={"gpu": "V100"}, storage_dir=root
        )
        assert run.groups == ("a", "paper/fig3")
        session.annotate(late=1)
        session.reload()
        assert session.groups == ("a", "paper/fig3")
        assert session.fields == {"gone": 1, "gpu": "V100", "late": 1}
    quark.edit_run(
        session.id, remove_groups=["a"], remove_fields=["gone"], fields={"accuracy": 0.98},
        storage_dir=root,
    )  # fmt: skip
    opened = load(session, root)
    assert opened.groups == ("paper/fig3",)
    assert opened.fields == {"accuracy": 0.98, "gpu": "V100", "late": 1}
    edits = quark.EventLogger(opened).read(event_type="run_edited")
    assert len(edits) == 2
    assert edits[0].payload["changes"]["groups"]["added"] == ["paper/fig3"]


def test_an_edit_that_cannot_be_made_is_refused_by_name(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        pass
    for arguments, name in (
        ({"add_groups": "a//b"}, "add_groups"),
        ({"fields": {"": 1}}, "fields"),
        ({"fields": {"a": 1}, "remove_fields": ["a"]}, "field 'a'"),
        ({"add_groups": "a", "remove_groups": "a"}, "group 'a'"),
    ):
        with pytest.raises(SchemaValidationError, match=name):
            quark.edit_run(session.id, storage_dir=tmp_path, **arguments)


@pytest.mark.parametrize(
    "path", ["", " ", "/", "/paper", "paper/", "paper//fig3", "paper/ fig3", "a\nb", "a\x1b[31mb",
             "x" * 251, "/".join("abcdefghijklmnopqrst"), None, 3, b"paper"],
)  # fmt: skip
def test_a_path_that_no_group_can_have_is_refused_by_name(path):
    with pytest.raises(SchemaValidationError, match="group"):
        check_group_path(path)


def test_one_path_or_several_are_groups_sorted_and_each_once():
    assert check_groups("paper/fig3") == ("paper/fig3",)
    assert check_groups(["b", "a/x", "b"]) == ("a/x", "b")
    assert check_groups(None) == ()
    with pytest.raises(SchemaValidationError, match=r"group\[1\]"):
        check_groups(["a", "b/"])
    with pytest.raises(SchemaValidationError, match="group must be a str or an iterable"):
        check_groups(3)


def test_a_path_is_below_itself_and_not_below_a_name_that_begins_alike():
    assert is_below("paper", "paper")
    assert is_below("paper/fig3", "paper")
    assert not is_below("paper2/fig3", "paper")


def test_fields_keep_their_types():
    kept = check_fields(
        {"gpu": "V100", "count": 8, "share": 0.5, "amp": True, "note": None, "sizes": [1, {"a": 2}]}
    )
    assert kept == {
        "gpu": "V100", "count": 8, "share": 0.5, "amp": True, "note": None, "sizes": [1, {"a": 2}],
    }  # fmt: skip
    assert type(kept["amp"]) is bool
    assert type(kept["count"]) is int


def test_secrets_in_fields_are_redacted():
    kept = check_fields({"api_key": "sk-0123456789abcdef0123456789abcdef", "gpu": "V100"})
    assert "0123456789abcdef" not in str(kept)
    assert kept["gpu"] == "V100"


@pytest.mark.parametrize(
    "fields", [[("a", 1)], {"": 1}, {"a\nb": 1}, {" a": 1}, {3: 1}, {"a": object()},
               {"a": "x" * 20_000}, dict.fromkeys(map(str, range(1001)), 1)],
)  # fmt: skip
def test_fields_that_cannot_be_kept_are_refused_by_name(fields):
    with pytest.raises(SchemaValidationError, match="fields"):
        check_fields(fields)


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
    with pytest.raises(SchemaValidationError, match="does not exist in this store"):
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
