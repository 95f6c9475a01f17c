"""Runs that are changed on the page of a store on this disk."""

import json

import pytest
from page_client import log_plain_run

import quark

ME = "me@desk"


@pytest.fixture
def own(tmp_path, look):
    """A page that may change the runs of a store, which has one."""
    run_id = log_plain_run(tmp_path, steps=3, tags=["old"])
    client = look(tmp_path, by=ME)
    client.run_id, client.root = run_id, tmp_path
    return client


def edit(client, **changes):
    return client.post(f"/api/runs/{client.run_id}/edit", json.dumps(changes).encode())


def test_an_edit_is_seen_at_once_and_says_who(own):
    answer = edit(own, name="b", notes="n", add_tags=["new"], remove_tags=["old"])
    said = {"name": "b", "notes": "n", "tags": ["new"], "archived_at": None, "stop": None}
    assert answer.json() == {"run": said}
    run = own.json(f"/api/runs/{own.run_id}")["run"]
    assert {name: run[name] for name in said} == said
    events = quark.EventLogger(quark.open_run(own.run_id, own.root)).read()
    (edited,) = [event.payload for event in events if event.event_type == "run_edited"]
    assert edited["by"] == ME
    assert edited["changes"]["tags"]["before"] == ["old"]


def test_a_page_that_follows_a_run_hears_of_an_edit(own):
    cursor = own.json(f"/api/runs/{own.run_id}")["cursor"]
    assert edit(own, archived=True).status_code == 200
    head, _ = own.pack(f"/api/runs/{own.run_id}/changes", cursor=cursor)
    assert head["run"]["archived_at"] is not None


def test_a_training_is_asked_to_stop_once(tmp_path, look):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        client = look(tmp_path, by=ME)
        path = f"/api/runs/{session.run_id}/stop"
        stop = client.post(path, b'{"reason": "enough"}').json()["run"]["stop"]
        assert (stop["by"], stop["reason"]) == (ME, "enough")
        again = client.post(path, b'{"reason": "again"}').json()["run"]["stop"]
        assert again == stop
    assert client.post(path).status_code == 409


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b"{}", 400),
        (b'{"name": 1}', 400),
        (b'{"status": "completed"}', 400),
        (b'{"add_tags": ["a"], "remove_tags": ["a"]}', 400),
        (b'{"name": "' + b"x" * 2_000_000 + b'"}', 413),
    ],
    ids=["empty", "list", "nothing", "number", "unknown", "both", "large"],
)
def test_what_is_no_edit_changes_nothing(own, body, status):
    answer = own.post(f"/api/runs/{own.run_id}/edit", body)
    assert (answer.status_code, bool(answer.json()["error"]["message"])) == (status, True)
    assert own.json(f"/api/runs/{own.run_id}")["run"]["name"] is None
    assert own.post("/api/runs/absent/edit", b'{"name": "x"}').status_code == 404
    assert own.post("/api/runs/..%2fx/edit", b'{"name": "x"}').status_code == 404


@pytest.mark.sampled
@pytest.mark.parametrize(
    "forged",
    [{"quark-csrf": None}, {"quark-csrf": "x"}, {"origin": None}, {"origin": "http://127.0.0.1:9"},
     {"sec-fetch-site": "same-site"}],
    ids=str,
)  # fmt: skip
def test_pages_of_others_change_nothing(own, forged):
    answer = own.post(f"/api/runs/{own.run_id}/edit", b'{"name": "x"}', **forged)
    assert answer.status_code == 403
    assert own.json(f"/api/runs/{own.run_id}")["run"]["name"] is None
    assert own.bare.post(f"/api/runs/{own.run_id}/edit", content=b"{}").status_code == 401
    assert own.http.post("/", content=b"").status_code == 405


def test_without_the_word_for_it_the_server_stays_read_only(plain):
    assert plain.json("/api/session") == {
        "mode": "local",
        "may_edit": False,
        "csrf": plain.json("/api/session")["csrf"],
    }
    answer = plain.post(f"/api/runs/{plain.run_id}/edit", b'{"name": "x"}')
    assert (answer.status_code, "read-only" in answer.text) == (405, True)
