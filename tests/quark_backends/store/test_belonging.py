"""Projects and groups are described, and their runs inherit."""

import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import quark
from quark_core.backends.edits import (
    BelongingEdit,
    RunEdit,
    StoredGroup,
    StoredProject,
    check_belonging_edit,
    check_edit,
    inherit,
    list_groups_by_reading,
)
from quark_core.backends.registry import default_registry
from quark_core.errors import SchemaValidationError
from quark_core.runs.backend_choice import choose_primary, open_primary, open_reader


@contextmanager
def open_editor(root):
    choice = choose_primary(default_registry())
    primary = open_primary(choice, replace(choice.configure(root), removes=True))
    yield primary
    primary.close()


def start(root, groups, fields=None, **arguments):
    session = quark.start_run(project="p", storage_dir=root, **arguments)
    session.open_run.emit_lifecycle("group", {"add": groups, "remove": []})
    if fields:
        session.open_run.emit_lifecycle("fields", {"set": fields, "remove": []})
    session.end_run()
    return session.run_id


def test_groups_are_those_of_runs_and_those_above_them(tmp_path):
    start(tmp_path, ["paper/fig3/a", "idea"])
    newest = start(tmp_path, ["paper/fig3", "paper/fig4"])
    reader = open_reader(tmp_path)
    found = {group.path: group for group in reader.list_groups()}
    assert {path: group.runs for path, group in found.items()} == {
        "idea": 1,
        "paper": 2,
        "paper/fig3": 2,
        "paper/fig3/a": 1,
        "paper/fig4": 1,
    }
    assert found["paper"].newest_at == reader.load_run(newest).run.created_at
    assert list_groups_by_reading(reader) == reader.list_groups()
    assert reader.list_groups("other") == []


def test_what_is_said_of_a_group_stays_without_runs(tmp_path):
    start(tmp_path, ["a"])
    with open_editor(tmp_path) as store:
        edit = BelongingEdit(description="Later.", set_fields={"n": [1, {"x": None}]})
        made = store.update_group("p", "plans/next", edit, by="me")
        assert (made.description, made.fields, made.runs) == ("Later.", {"n": [1, {"x": None}]}, 0)
        paths = [group.path for group in store.list_groups("p")]
        assert paths == ["a", "plans/next"]
        gone = BelongingEdit(description="", remove_fields=("n",))
        assert store.update_group("p", "plans/next", gone, by="me").description is None
        assert [group.path for group in store.list_groups("p")] == ["a"]


def test_a_project_is_described(tmp_path):
    start(tmp_path, ["a"])
    with open_editor(tmp_path) as store:
        store.update_project(
            "p", BelongingEdit(description="D", add_tags=("x", "y"), set_fields={"k": 1}), by="me"
        )
        found = store.update_project("p", BelongingEdit(remove_tags=("x",)), by="me")
        assert (found.description, found.tags, found.fields, found.runs) == (
            "D",
            ("y",),
            {"k": 1},
            1,
        )
        assert store.load_project("p") == found
        with pytest.raises(SchemaValidationError, match="does not exist in this store"):
            store.update_project("other", BelongingEdit(description="D"), by="me")
    # A later run leaves it as it is.
    start(tmp_path, ["a"])
    assert open_reader(tmp_path).load_project("p").description == "D"


def test_two_who_update_one_project_at_once_lose_nothing(tmp_path):
    start(tmp_path, [])
    with open_editor(tmp_path) as store:
        threads = [
            threading.Thread(
                target=store.update_project,
                args=("p", BelongingEdit(add_tags=(f"tag{number}",))),
                kwargs={"by": "me"},
            )
            for number in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.load_project("p").tags == tuple(f"tag{number}" for number in range(8))


def test_the_nearest_field_counts_and_tags_add_up(tmp_path):
    run = start(tmp_path, ["paper/fig3", "idea"], {"own": 1, "all": "run"}, tags=["mine"])
    stored = open_reader(tmp_path).load_run(run)

    def group(path, project="p", **fields):
        return StoredGroup(project=project, path=path, fields=fields, tags=(path,))

    found = inherit(
        stored,
        StoredProject(project="p", fields={"all": "p", "top": "p", "deep": "p"}, tags=("team",)),
        [
            group("paper", deep="paper", top="paper"),
            group("paper/fig3", deep="fig3", all="fig3"),
            group("idea", top="idea"),
            group("pap", top="never"),
            group("paper", project="q", top="never"),
        ],
    )
    assert found.fields == {"own": 1, "all": "run", "deep": "fig3", "top": "idea"}
    assert found.tags == ("idea", "mine", "paper", "paper/fig3", "team")


def test_a_run_is_grouped_and_annotated_after_its_end(tmp_path):
    run = start(tmp_path, ["a", "b"], {"x": 1, "y": 2})
    with open_editor(tmp_path) as store:
        edit = check_edit(
            RunEdit(
                add_groups=("c/d",),
                remove_groups=("b",),
                set_fields={"x": {"deep": "api_key=sk-abcdefghijklmnopqrstuvwx1234"}, "z": None},
                remove_fields=("y",),
            )
        )
        after = store.edit_run(run, edit, by="me")
    assert after.run.groups == ("a", "c/d")
    assert set(after.fields) == {"x", "z"}
    assert "abcdefghijkl" not in str(after.to_dict())
    (event,) = [
        event
        for event in quark.EventLogger(quark.open_run(run, tmp_path)).read()
        if event.event_type == "run_edited"
    ]
    assert "group 'c/d' added, group 'b' removed" in event.payload["message"]
    assert event.payload["changes"]["fields"]["before"] == {"x": 1, "y": 2}
    found = quark.search_runs(where="'c' in groups and field.x.deep != null", storage_dir=tmp_path)
    assert [each.run_id for each in found] == [run]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (RunEdit(add_groups=("a",), remove_groups=("a",)), "group 'a' cannot be both added and"),
        (RunEdit(set_fields={"a": 1}, remove_fields=("a",)), "field 'a' cannot be both added and"),
        (RunEdit(add_groups=("a//b",)), "must be a path"),
        (RunEdit(add_groups=("\x1b[2J",)), "an invisible character"),
        (RunEdit(set_fields={"a": "x" * 20_000}), "bytes of JSON"),
    ],
)
def test_bad_edits_are_refused(edit, message):
    with pytest.raises(SchemaValidationError, match=message):
        check_edit(edit)


def test_bad_updates_are_refused():
    with pytest.raises(SchemaValidationError, match="must change something"):
        check_belonging_edit(BelongingEdit())
    with pytest.raises(SchemaValidationError, match="tag 'a'"):
        check_belonging_edit(BelongingEdit(add_tags=("a",), remove_tags=("a",)))


def test_what_a_run_belongs_to_goes_with_it(tmp_path):
    gone, kept = start(tmp_path, ["g/a"], {"gpu": 1}), start(tmp_path, ["g/b"], {"gpu": 2})
    with open_editor(tmp_path) as store:
        store.trash_runs([gone])
        assert [group.path for group in store.list_groups()] == ["g", "g/b"]
        store.collect_trash()
    found = quark.search_runs(where="'g' in groups and field.gpu > 0", storage_dir=tmp_path)
    assert [run.run_id for run in found] == [kept]
    with closing(sqlite3.connect(tmp_path / ".quark" / "quark.db")) as database:
        for table in ("run_field", "run_group_member"):
            assert database.execute(f"SELECT count(*) FROM {table}").fetchone() == (1,)


_ADDING = """
import sys
sys.path.insert(0, {here!r})
from test_belonging import RunEdit, open_editor
from pathlib import Path
with open_editor(Path({root!r})) as store:
    for number in range(1000):
        store.edit_run({run!r}, RunEdit(add_groups=(f"{name}/{{number}}",)), by="me")
        print(number, flush=True)
"""


@pytest.mark.long
def test_two_processes_change_groups_and_are_killed(tmp_path):
    run = start(tmp_path, ["own"])
    here = str(Path(__file__).parent)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _ADDING.format(here=here, root=str(tmp_path), run=run, name=n)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in ("a", "b")
    ]
    told = []
    for process in processes:
        while process.stdout.readline() != "9\n":
            assert process.poll() is None
    for name, process in zip(("a", "b"), processes, strict=True):
        process.kill()
        rest = process.communicate()[0].split()
        told += [f"{name}/{number}" for number in (*range(10), *map(int, rest))]
    stored = open_reader(tmp_path).load_run(run)
    assert {"own", *told} <= {*stored.run.groups}
    # One more of each may be stored that it could not tell of any more.
    assert len(stored.run.groups) <= len(told) + 1 + 2
    found = quark.search_runs(where=f"group == '{told[-1]}'", storage_dir=tmp_path)
    assert [each.run_id for each in found] == [run]
