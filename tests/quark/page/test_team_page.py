"""The page of a team over HTTP: who gets in, for how long, what they see and may change."""

import hashlib
import threading

import httpx
import pytest
from click.testing import CliRunner
from hostile_folders import make_artifact
from service_fixtures import ingest, serving_process
from sqlalchemy import create_engine, text
from team_server import Person, add_run, find_id, serving_team

from quark.cli import team_page
from quark.cli.main import cli
from quark_core.records.base import now_us
from quark_core.testing.fakes import BatchMaker

WAYS_IN = ["/", "/compare", "/sweeps", "/sweep/s0", "/run/r", "/run/r/layers"]


@pytest.fixture
def server(tmp_path):
    with serving_team(tmp_path, allow_edit=True) as running:
        yield running


@pytest.fixture
def person(server):
    """Somebody who is logged in to the workspace `default`, with a key that may all but admin."""
    with Person(server) as someone:
        someone.key = server.make_key("default", "read", "write", name="anna")
        someone.log_in(someone.key)
        yield someone


def check_locked(person):
    """Nothing is told to them."""
    for path in ("/api/runs", "/api/session", "/api/about", "/artifacts/r/" + "0" * 64):
        assert person.get(path).status_code == 401
    for path in WAYS_IN:
        answer = person.get(path)
        assert (answer.status_code, answer.text) == (303, "")
        assert "/login?next=" in answer.headers["location"]
    assert person.post("/api/runs/r/edit", {"name": "x"}).status_code == 401
    assert person.get("/api/sweeps").status_code == 401
    assert person.post("/api/sweeps/s0/state", {"state": "paused"}).status_code == 401


def test_who_is_not_logged_in_gets_a_form_and_nothing_else(server):
    with Person(server) as stranger:
        check_locked(stranger)
        assert stranger.get("/nowhere").status_code == 404
        assert stranger.get("/v1/workspace").status_code == 401
        # The service's own addresses stay what they are.
        assert stranger.get("/v1/nowhere").json()["error"]["code"] == "not_found"
        assert stranger.get("/healthz").status_code == 200
        form = stranger.get("/login")
        assert "<script" not in form.text
        for answer in (form, stranger.get("/api/runs"), stranger.get("/")):
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["referrer-policy"] in ("no-referrer", "same-origin")


def test_a_key_is_traded_for_a_cookie_that_no_script_reads(server, person):
    add_run(server, "default", "mine")
    assert person.list_runs() == ["mine"]
    assert person.get("/").status_code == 200
    session = person.get("/api/session").json()
    assert (session["mode"], session["workspace"], session["name"]) == ("team", "default", "anna")
    assert session["may_edit"] is True
    answer = person.log_in(person.key)
    cookie = answer.headers.get_list("set-cookie")[0]
    assert "HttpOnly; SameSite=Strict; Path=/; Max-Age=43" in cookie
    assert "Secure" not in cookie
    # Neither key nor cookie stand in any address or answer.
    assert person.key not in answer.text + str(answer.url) + str(answer.headers)
    assert person.cookie[1] not in person.get("/api/session").text


def test_behind_tls_the_cookie_is_for_tls_and_this_host_only(server):
    key = server.make_key("default", "read")
    origin = server.url.replace("http://", "https://")
    with Person(server) as someone:
        answer = someone.send_form(key, origin=origin)
        cookie = answer.headers.get_list("set-cookie")[0]
        assert cookie.startswith("__Host-quark_team_")
        assert cookie.endswith("; Secure")
        name, value = cookie.partition(";")[0].split("=", 1)
        ask = {"cookie": f"{name}={value}"}
        assert httpx.get(f"{server.url}/api/runs", headers=ask).status_code == 200
        # What another host of the domain may set is no session, whatever it holds.
        ask = {"cookie": f"{name.removeprefix('__Host-')}={value}"}
        assert httpx.get(f"{server.url}/api/runs", headers=ask).status_code == 401


def test_keys_that_let_nobody_in_all_look_the_same(server):
    good = server.make_key("default", "read")
    revoked = server.make_key("default", "read")
    server.revoke(revoked)
    expired = server.make_key("default", "read", expires_us=now_us() - 1)
    said = set()
    with Person(server) as someone:
        for key in (f"{good}x", "qk_0000000000000000_x", "nonsense", "", revoked, expired):
            answer = someone.send_form(key)
            assert answer.status_code == 401
            said.add(answer.text.partition('role="alert"')[2].partition("</p>")[0])
            assert not any("team" in name for name in someone.http.cookies)
    assert len(said) == 1
    with Person(server) as trainer:
        answer = trainer.send_form(server.make_key("default", "ingest"))
        assert (answer.status_code, "does not have the scope &#x27;read&#x27;" in answer.text) == (
            403,
            True,
        )


def test_keys_are_not_tried_without_end(server):
    good = server.make_key("default", "read")
    with Person(server) as someone:
        fields = someone.ask_for_form()
        statuses = [someone.send_form("wrong", fields).status_code]
        while statuses[-1] == 401:
            fields = someone.ask_for_form()
            statuses.append(someone.send_form("wrong", fields).status_code)
            assert len(statuses) < 20
        assert statuses[-1] == 429
        answer = someone.send_form(good)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1


def test_a_login_always_makes_a_session_of_its_own(server, person):
    before = person.cookie
    with Person(server) as attacker:
        # Whatever somebody had the browser keep lets nobody in.
        planted = "planted-by-somebody-0123456789abcdef"
        attacker.http.cookies.set(before[0], planted, domain="127.0.0.1")
        check_locked(attacker)
        attacker.log_in(server.make_key("default", "read"))
        assert "planted" not in str(list(attacker.http.cookies.items()))
    person.log_in(person.key)
    assert person.cookie[1] != before[1]
    # The one before is over: who knew it has nothing.
    ask = {"cookie": f"{before[0]}={before[1]}"}
    assert httpx.get(f"{server.url}/api/runs", headers=ask).status_code == 401


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["revoke", "delete over HTTP", "expire", "twelve hours", "log out"])
def test_a_session_ends_at_once(server, person, how):
    assert person.get("/api/runs").status_code == 200
    engine = create_engine(server.store_url)
    if how == "revoke":
        server.revoke(person.key)
    elif how == "delete over HTTP":
        with server.client("default", "admin") as admin:
            assert admin.delete(f"/v1/keys/{find_id(person.key)}").status_code == 200
    elif how == "log out":
        cookie = person.cookie
        answer = person.post("/logout")
        assert answer.status_code == 200
        assert not any("team" in name for name in person.http.cookies)
        person.http.cookies.set(*cookie, domain="127.0.0.1")
    else:
        table = "api_key" if how == "expire" else "page_session"
        with engine.begin() as connection:
            connection.execute(text(f"UPDATE {table} SET expires_us = {now_us()}"))
    check_locked(person)
    engine.dispose()


def test_a_session_lasts_no_longer_than_its_key(server):
    ends_us = now_us() + 3600 * 10**6
    with Person(server) as someone:
        answer = someone.log_in(server.make_key("default", "read", expires_us=ends_us))
        assert "Max-Age=3599" in answer.headers.get_list("set-cookie")[0]


def test_an_answer_that_takes_long_is_broken_off_when_its_key_is_revoked(
    server, person, monkeypatch
):
    monkeypatch.setattr(team_page, "_CHECK_EVERY_S", 0.0)
    payload = b"x" * (32 * 2**20)
    sha256 = hashlib.sha256(payload).hexdigest()
    maker = BatchMaker("r")
    with server.client("default", "admin") as client:
        assert ingest(client, maker.start()).status_code == 200
        assert client.put(f"/v1/runs/r/payloads/{sha256}", content=payload).status_code == 201
        artifact = make_artifact(maker, payload)
        assert ingest(client, artifact).status_code == 200
    with person.http.stream("GET", f"/artifacts/r/{sha256}") as answer:
        assert answer.status_code == 200
        parts = answer.iter_raw(4096)
        next(parts)
        server.revoke(person.key)
        with pytest.raises(httpx.RemoteProtocolError):
            list(parts)


def test_a_workspace_sees_its_own_runs_and_nobody_elses(server, person):
    payload = b"theirs"
    sha256 = hashlib.sha256(payload).hexdigest()
    add_run(server, "default", "mine")
    add_run(server, "other", "theirs", tags=["secret-tag"])
    with server.client("other", "ingest") as client:
        assert client.put(f"/v1/runs/theirs/payloads/{sha256}", content=payload).status_code == 201
    assert person.list_runs() == ["mine"]
    assert person.get("/api/names").json()["tags"] == []
    assert person.get("/api/about").json()["place"] == "workspace default"
    for path in ("", "/series?key=loss", "/analysis", "/events", "/artifacts", "/system"):
        assert person.get(f"/api/runs/theirs{path}").status_code == 404, path
    assert person.get(f"/artifacts/theirs/{sha256}").status_code == 404
    assert person.get("/api/compare?run=mine&run=theirs").status_code == 404
    assert person.post("/api/runs/theirs/edit", {"name": "mine now"}).status_code == 404
    assert person.post("/api/runs/theirs/stop").status_code == 404
    with Person(server) as other:
        other.log_in(server.make_key("other", "read"))
        assert other.list_runs() == ["theirs"]
        assert other.get("/api/runs/theirs").json()["run"]["name"] is None


def test_runs_are_edited_by_who_may_write_and_each_edit_says_who(server, person):
    add_run(server, "default", "r", tags=["old"])
    edit = {"name": "named", "notes": "n", "add_tags": ["new"], "remove_tags": ["old"]}
    run = person.post("/api/runs/r/edit", edit).json()["run"]
    assert (run["name"], run["notes"], run["tags"]) == ("named", "n", ["new"])
    with Person(server) as second:
        second.log_in(server.make_key("default", "admin", name="ben"))
        # The last one wins, and both are told.
        assert second.post("/api/runs/r/edit", {"name": "mine"}).json()["run"]["name"] == "mine"
        events = second.get("/api/runs/r/events").json()["events"]
        said = [row["payload"]["by"] for row in events if row["type"] == "run_edited"]
        assert [text.partition(" ")[0] for text in said] == ["anna", "ben"]
        assert said[0] == f"anna (key {find_id(person.key)})"
    with Person(server) as viewer:
        viewer.log_in(server.make_key("default", "read", "ingest"))
        assert viewer.get("/api/session").json()["may_edit"] is False
        for path in ("edit", "stop"):
            answer = viewer.post(f"/api/runs/r/{path}", {"name": "x"})
            assert (answer.status_code, "scope 'write'" in answer.text) == (403, True)
    assert person.get("/api/runs/r").json()["run"]["name"] == "mine"


def test_an_archived_run_is_left_out_until_it_is_asked_for(server, person):
    add_run(server, "default", "kept")
    add_run(server, "default", "filed")
    assert person.post("/api/runs/filed/edit", {"archived": True}).status_code == 200
    assert person.list_runs() == ["kept"]
    assert person.list_runs(where="archived != null") == ["filed"]
    assert person.list_runs(where="archived == null") == ["kept"]
    assert person.get("/api/runs/filed").json()["run"]["archived_at"] is not None
    assert person.post("/api/runs/filed/edit", {"archived": False}).status_code == 200
    assert sorted(person.list_runs()) == ["filed", "kept"]


def test_a_run_is_asked_to_stop_and_says_by_whom(server, person):
    add_run(server, "default", "r", ended=False)
    stop = person.post("/api/runs/r/stop", {"reason": "enough"}).json()["run"]["stop"]
    assert stop["by"] == f"anna (key {find_id(person.key)})"
    assert (stop["reason"], stop["seen_at"]) == ("enough", None)
    assert person.get("/api/runs/r").json()["run"]["stop"] == stop
    add_run(server, "default", "ended")
    assert person.post("/api/runs/ended/stop").status_code == 409


def test_without_the_word_for_it_nobody_changes_anything(tmp_path):
    with serving_team(tmp_path) as server, Person(server) as someone:
        add_run(server, "default", "r")
        someone.log_in(server.make_key("default", "admin"))
        assert someone.get("/api/session").json()["may_edit"] is False
        answer = someone.post("/api/runs/r/edit", {"name": "x"})
        assert (answer.status_code, "--allow-edit" in answer.text) == (403, True)
        assert someone.get("/api/runs/r").json()["run"]["name"] is None


FORGERIES = [
    {"quark-csrf": None},
    {"quark-csrf": "0" * 64},
    {"origin": None},
    {"origin": "null"},
    {"origin": "http://evil.example"},
    {"origin": "http://127.0.0.1:9"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "none"},
]


@pytest.mark.sampled
@pytest.mark.parametrize("forged", FORGERIES, ids=str)
def test_requests_that_others_have_the_browser_make_change_nothing(server, person, forged):
    add_run(server, "default", "r", ended=False)
    for path in ("/api/runs/r/edit", "/api/runs/r/stop", "/logout"):
        assert person.post(path, {"name": "x"}, **forged).status_code == 403
    run = person.get("/api/runs/r").json()["run"]
    assert (run["name"], run["stop"]) == (None, None)
    assert person.get("/api/runs/r/edit").status_code in (404, 405)


def test_another_ones_token_is_no_token(server, person):
    add_run(server, "default", "r")
    with Person(server) as other:
        other.log_in(server.make_key("default", "write", "read"))
        forged = {"quark-csrf": other.csrf}
        assert person.post("/api/runs/r/edit", {"name": "x"}, **forged).status_code == 403


def test_nobody_is_logged_in_by_a_form_of_others(server):
    """Else an attacker's session would take what its victim looks for."""
    key = server.make_key("default", "read")
    with Person(server) as victim:
        fields = victim.ask_for_form()
        assert victim.send_form(key, fields, origin="http://evil.example").status_code == 403
        assert victim.send_form(key, {**fields, "token": "0" * 64}).status_code == 403
        with Person(server) as attacker:
            assert victim.send_form(key, attacker.ask_for_form()).status_code == 403
        assert not any("team" in name for name in victim.http.cookies)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "place",
    ["//evil.example", "https://evil.example", "/\\evil.example", ".//evil.example", "./../x",
     "javascript:alert(1)", "./run/..//evil.example", "login", "./logout", '"><script>',
     "\r\nx: y"],
)  # fmt: skip
def test_a_login_leads_nowhere_else(server, place):
    with Person(server) as someone:
        fields = someone.ask_for_form()
        answer = someone.send_form(server.make_key("default", "read"), {**fields, "next": place})
        assert (answer.status_code, answer.headers["location"]) == (303, "./")


def test_a_link_to_a_run_opens_it_for_who_logs_in_to_its_workspace(server, person):
    add_run(server, "other", "theirs")
    link = "/run/theirs?x=time&in=other"
    answer = person.get(link)
    assert answer.status_code == 303
    form = person.get("/run/" + answer.headers["location"])
    assert "workspace other" in form.text
    form = "/run/" + answer.headers["location"]
    fields = person.ask_for_form(form)
    assert fields["in"] == "other"
    # A key of another workspace does not open it, nor does the link itself.
    assert person.send_form(person.key, fields).status_code == 403
    answer = person.send_form(server.make_key("other", "read"), person.ask_for_form(form))
    assert (answer.status_code, answer.headers["location"]) == (303, "." + link)
    assert person.get(link).status_code == 200
    assert person.list_runs() == ["theirs"]


def test_a_link_on_another_site_finds_the_cookie_at_the_second_try(server, person):
    person.http.cookies.clear()
    answer = person.http.get("/run/r", headers={"sec-fetch-site": "cross-site"})
    assert answer.status_code == 200
    assert 'http-equiv="refresh"' in answer.text
    assert person.http.get("/run/r", headers={"sec-fetch-site": "same-origin"}).status_code == 303


@pytest.mark.long
def test_many_log_in_at_once(server):
    keys = [server.make_key(f"team{number}", "read") for number in range(20)]
    for number in range(20):
        add_run(server, f"team{number}", f"run{number}")
    found = {}

    def visit(number):
        with Person(server) as someone:
            someone.log_in(keys[number])
            found[number] = someone.list_runs()

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # More workspaces than the server keeps pages of.
    assert found == {number: [f"run{number}"] for number in range(20)}


@pytest.mark.long
def test_two_processes_know_each_others_sessions(tmp_path):
    with serving_process(tmp_path, "--ui", "--workers", "2", "--migrate") as server:
        key = server.make_key("default", "read")
        add_run(server, "default", "r")
        cookie = None
        for _ in range(8):
            # A connection each time, so that either process is asked.
            with Person(server) as someone:
                if cookie is None:
                    someone.log_in(key)
                    cookie = someone.cookie
                someone.http.cookies.set(*cookie, domain="127.0.0.1")
                assert someone.list_runs() == ["r"]
        assert CliRunner().invoke(
            cli, ["keys", "revoke", "--store", server.store_url, find_id(key)]
        ).exit_code == 0  # fmt: skip
        for _ in range(8):
            with Person(server) as someone:
                someone.http.cookies.set(*cookie, domain="127.0.0.1")
                check_locked(someone)


def test_edits_are_of_the_page():
    result = CliRunner().invoke(cli, ["serve", "--allow-edit"])
    assert (result.exit_code, "--ui" in result.output) == (2, True)


@pytest.mark.long
def test_over_postgres_it_is_the_same(tmp_path, postgres_service_url):
    with serving_team(tmp_path, store_url=postgres_service_url, allow_edit=True) as server:
        add_run(server, "default", "r", ended=False)
        key = server.make_key("default", "read", "write")
        with Person(server) as someone:
            someone.log_in(key)
            assert someone.list_runs() == ["r"]
            assert someone.post("/api/runs/r/edit", {"name": "x"}).json()["run"]["name"] == "x"
            assert someone.post("/api/runs/r/stop").json()["run"]["stop"] is not None
            assert someone.get("/api/runs/r/series?key=loss").status_code == 200
            server.revoke(key)
            check_locked(someone)
