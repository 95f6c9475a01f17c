"""Runs are edited from elsewhere: by id, while they train and after their end."""

import subprocess
import sys

import pytest

import quark
from quark_core.errors import RunNotFoundError, SchemaValidationError, SessionStoreError

EDITOR = """
import sys, quark
storage_dir, run_id, who = sys.argv[1:]
for number in range(5):
    quark.edit_run(
        run_id, name=f"{who}{number}", add_tags=[f"{who}{number}"], storage_dir=storage_dir
    )
"""


@pytest.fixture(params=["database", "journal"])
def storage_dir(request, tmp_path, monkeypatch):
    """A storage root whose store is a database, or the journal."""
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "0" if request.param == "database" else "1")
    return tmp_path / "runs"


def list_edits(run_id, storage_dir):
    events = quark.EventLogger(quark.open_run(run_id, storage_dir)).read()
    return [event.payload for event in events if event.event_type == "run_edited"]


def test_a_run_is_edited_while_it_trains_and_after_its_end(storage_dir):
    with quark.start_run(project="p", storage_dir=storage_dir, name="a", tags=["x"]) as session:
        run = quark.edit_run(session, name="b", add_tags=["y"], remove_tags=["x"])
        assert (run.name, run.tags, run.status) == ("b", ("y",), "running")
        assert session.reload().run.name == "b"
        session.add_tag("z")
    run = quark.edit_run(session.run_id, notes="n", archived=True, storage_dir=storage_dir)
    assert (run.name, run.notes, run.tags, run.status) == ("b", "n", ("y", "z"), "completed")
    assert run.archived_at is not None
    first, second = list_edits(session.run_id, storage_dir)
    assert first["changes"] == {
        "name": {"before": "a", "after": "b"},
        "tags": {"before": ["x"], "after": ["y"], "added": ["y"], "removed": ["x"]},
    }
    assert second["changes"] == {
        "notes": {"before": None, "after": "n"},
        "archived": {"before": False, "after": True},
    }
    assert "@" in first["by"]
    assert "name 'a' becomes 'b'" in first["message"]


def test_archived_runs_are_found_where_that_is_asked_for(storage_dir):
    for name in ("kept", "filed"):
        with quark.start_run(project="p", storage_dir=storage_dir, name=name) as session:
            pass
    quark.edit_run(session.run_id, archived=True, storage_dir=storage_dir)

    def search(**options):
        found = quark.search_runs(storage_dir=storage_dir, **options)
        return [each.stored.run.name for each in found]

    assert search() == ["kept"]
    assert search(archived=True) == ["filed", "kept"]
    # Who asks when runs were archived means those too.
    assert search(where="archived != null") == ["filed"]
    assert search(where="archived == null or archived > '2020'") == ["filed", "kept"]
    assert search(where="archived < '2020'") == []
    assert search(order_by="archived") == ["kept"]
    assert quark.open_run(session.run_id, storage_dir).context.run.name == "filed"
    quark.edit_run(session.run_id, archived=False, storage_dir=storage_dir)
    assert search() == ["filed", "kept"]


def test_an_edited_run_stays_so_when_it_is_resumed(storage_dir):
    with quark.start_run(project="p", storage_dir=storage_dir, name="a") as session:
        pass
    quark.edit_run(session.run_id, name="b", archived=True, storage_dir=storage_dir)
    with quark.resume_run(run_id=session.run_id, storage_dir=storage_dir, reopen=True) as resumed:
        assert resumed.context.run.name == "b"
    run = quark.open_run(session.run_id, storage_dir).context.run
    assert (run.name, run.attempt, run.archived_at is None) == ("b", 1, False)


def test_edits_of_journals_come_into_a_database(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    with quark.start_run(project="p", storage_dir=tmp_path, name="a") as session:
        pass
    for name in ("b", "c"):
        quark.edit_run(session.run_id, name=name, storage_dir=tmp_path)
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "0")
    subprocess.run([sys.executable, "-m", "quark", "sync", tmp_path], check=True)
    assert quark.open_run(session.run_id, tmp_path).context.run.name == "c"
    names = [edit["changes"]["name"] for edit in list_edits(session.run_id, tmp_path)]
    assert names == [{"before": "a", "after": "b"}, {"before": "b", "after": "c"}]


def test_of_two_editors_at_once_the_last_wins_and_both_are_in_the_events(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, name="a") as session:
        editors = [
            subprocess.Popen([sys.executable, "-c", EDITOR, tmp_path, session.run_id, who])
            for who in ("left", "right")
        ]
        assert [editor.wait() for editor in editors] == [0, 0]
    run = quark.open_run(session.run_id, tmp_path).context.run
    edits = list_edits(session.run_id, tmp_path)
    names = [edit["changes"]["name"] for edit in edits]
    everything = {f"{who}{number}" for who in ("left", "right") for number in range(5)}
    assert {name["after"] for name in names} == {*run.tags} == everything
    # Each has seen the one before it: from the first name a chain leads to the last.
    follows = {name["before"]: name["after"] for name in names}
    chain, name = [], "a"
    while name in follows:
        name = follows[name]
        chain.append(name)
    assert len(chain) == 10
    assert chain[-1] == run.name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "must change something"),
        ({"name": 3}, "name must be a str"),
        ({"name": "n" * 300}, "name"),
        ({"add_tags": "one"}, "iterable of str"),
        ({"add_tags": ["a"], "remove_tags": ["a"]}, "'a' cannot be both added and removed"),
        ({"archived": "yes"}, "archived must be True or False"),
    ],
)
def test_bad_edits_are_refused(tmp_path, arguments, words):
    with quark.start_run(project="p", storage_dir=tmp_path, name="a") as session:
        pass
    with pytest.raises(SchemaValidationError, match=words):
        quark.edit_run(session.run_id, storage_dir=tmp_path, **arguments)
    assert list_edits(session.run_id, tmp_path) == []


def test_what_is_not_there_is_not_edited(tmp_path):
    with pytest.raises(SessionStoreError, match="no Quark store"):
        quark.edit_run("absent", name="b", storage_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    with quark.start_run(project="p", storage_dir=tmp_path):
        pass
    with pytest.raises(RunNotFoundError):
        quark.edit_run("absent", name="b", storage_dir=tmp_path)


def test_secrets_stay_out_of_edits(tmp_path):
    token = "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
    with quark.start_run(project="p", storage_dir=tmp_path, name="a") as session:
        run = quark.edit_run(session, notes=f"used {token}", add_tags=[token])
    assert token not in str(run.to_dict())
    assert token not in str(list_edits(session.run_id, tmp_path))
