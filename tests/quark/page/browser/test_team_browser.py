"""A team's page in a real browser: logins that end, edits, stops, and what strangers try."""

from types import SimpleNamespace

import pytest
from strangers import Stranger
from team_server import add_run, find_id, serving_team

import quark
from quark.page.routes.page_source import open_source
from quark.page.server import PageServer
from quark_core.runs.open_run import StopLookout

# Each way to change something by the browser of somebody who is logged in.
FORGE = """async place => {
    const body = JSON.stringify({name: "forged"});
    const json = {"content-type": "application/json"};
    const tries = [
        {body}, {body, mode: "no-cors"}, {body, headers: json},
        {body, headers: {...json, "quark-csrf": "0".repeat(64)}},
    ];
    let reached = 0;
    for (const each of tries) {
        await fetch(place, {method: "POST", credentials: "include", ...each})
            .then(answer => reached += answer.type !== "opaque" && answer.ok).catch(() => null);
    }
    const form = document.body.appendChild(document.createElement("form"));
    const target = `hole${document.forms.length}`;
    Object.assign(form, {method: "post", action: place, enctype: "text/plain", target});
    const frame = document.createElement("iframe");
    frame.name = target;
    document.body.append(frame);
    const field = form.appendChild(document.createElement("input"));
    Object.assign(field, {name: '{"name": "forged", "x', value: '": 1}'});
    const done = new Promise(give => frame.onload = give);
    form.submit();
    await done;
    return reached;
}"""


@pytest.fixture
def team(tmp_path, monkeypatch):
    """A server with a run that goes on, as what `visit` wants."""
    with serving_team(tmp_path / "server", allow_edit=True) as server:
        add_run(server, "default", "ended", tags=["old"])
        server.page = SimpleNamespace(url=f"{server.url}/")
        server.key = server.make_key("default", "read", "write", name="anna")
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key("default"))
        yield server


@pytest.fixture
def enter(team, visit):
    """Logs in as people do, and comes to a page."""

    def begin(path="", key=None, **options):
        visitor = visit(team, may_be_lost=True, **options)
        visitor.context.clear_cookies()
        visitor.go(path)
        log_in(visitor, key or team.key)
        return visitor

    return begin


def log_in(visitor, key):
    visitor.page.fill("#key", key)
    visitor.page.click("main button")
    visitor.wait("document.querySelector('main h1') && !document.querySelector('#key')")


def load_run(team, run_id):
    with team.client("default", "read") as client:
        return client.get(f"/v1/runs/{run_id}").json()


@pytest.mark.long
def test_a_login_leads_to_where_the_link_led_and_ends_with_the_key(team, enter):
    visitor = enter("run/ended?x=time")
    assert visitor.page.url == f"{team.url}/run/ended?x=time"
    visitor.wait_for_text("anna")
    assert visitor.evaluate("[document.cookie, localStorage.length]") == ["", 0]
    team.revoke(team.key)
    # Nobody clicks: the page itself finds out, and what it had is gone.
    visitor.wait_for_text("Your session has ended")
    assert visitor.evaluate("document.querySelectorAll('header, .tag, canvas, #panel').length") == 0
    visitor.page.click("main a")
    log_in(visitor, team.make_key("default", "read", name="ben"))
    visitor.wait_for_text("ben")
    assert visitor.page.url == f"{team.url}/run/ended?x=time"


@pytest.mark.long
def test_a_run_is_edited_archived_and_restored_on_its_page(team, enter):
    visitor = enter("run/ended")
    page = visitor.page
    page.get_by_role("button", name="Edit…").click()
    page.fill("#edit-name", "a better name")
    page.fill("#edit-notes", "<b>seen</b>")
    page.fill("#edit-tag", "keep")
    page.press("#edit-tag", "Enter")
    page.get_by_role("button", name="Remove the tag old").click()
    page.get_by_role("button", name="Save").click()
    visitor.wait("document.querySelector('h1').innerText === 'a better name'")
    run = load_run(team, "ended")["run"]
    assert (run["name"], run["notes"], run["tags"]) == ("a better name", "<b>seen</b>", ["keep"])
    page.get_by_role("button", name="Archive").click()
    visitor.wait_for_text("lists leave it out")
    page.get_by_role("link", name="quark").click()
    visitor.wait_for_text("There are no runs yet")
    page.get_by_role("button", name="Archived").click()
    page.get_by_role("link", name="a better name").click()
    page.get_by_role("button", name="Restore").click()
    visitor.wait("!document.querySelector('#archive-note')")
    assert load_run(team, "ended")["run"]["archived_at"] is None


def test_who_may_only_look_sees_no_buttons(team, enter):
    visitor = enter("run/ended", team.make_key("default", "read", name="viewer"))
    visitor.wait_for_text("viewer")
    names = [each.inner_text() for each in visitor.page.get_by_role("button").all()]
    assert not {"Edit…", "Archive", "Stop…"} & set(names)


@pytest.mark.long
def test_a_sweep_is_paused_and_cancelled_by_who_may_and_by_nobody_else(team, enter, tmp_path):
    sweep = quark.sweep("lr", project="p", space={"lr": [0.1, 0.2]}, metric="acc", mode="max",
                        search="grid", storage_dir=tmp_path)  # fmt: skip
    first = sweep.claim()
    visitor = enter(f"sweep/{sweep.id}")
    page = visitor.page
    page.get_by_role("button", name="Pause").click()
    visitor.wait_for_text("The sweep is paused")
    assert sweep.state == "paused"
    assert sweep.claim() is None
    page.get_by_role("button", name="Resume").click()
    visitor.wait("!document.body.innerText.includes('The sweep is paused')")
    assert sweep.state == "running"
    page.get_by_role("button", name="Cancel…").click()
    assert sweep.state == "running"
    visitor.check_axe()
    page.get_by_role("button", name="Cancel the sweep").click()
    visitor.wait("document.querySelector('.title .state-cancelled')")
    assert sweep.state == "cancelled"
    visitor.wait("![...document.querySelectorAll('button')].some(one => one.innerText === 'Pause')")
    first.complete(0.5)
    other = quark.sweep("other", project="p", space={"lr": [0.1]}, metric="acc", mode="max",
                        search="grid", storage_dir=tmp_path)  # fmt: skip
    viewer = enter(f"sweep/{other.id}", team.make_key("default", "read", name="viewer"))
    viewer.wait_for_text("viewer")
    names = {each.inner_text() for each in viewer.page.get_by_role("button").all()}
    assert not {"Pause", "Resume", "Cancel…"} & names
    for each in (sweep, other):
        each.close()


def test_a_training_is_asked_to_stop_after_a_question_and_knows(team, enter, tmp_path, monkeypatch):
    # At a heartbeat of its own it would hear of the request before the page says that it has not.
    monkeypatch.setattr("quark_core.delivery.stream.HEARTBEAT_S", 3600.0)
    with quark.start_run(project="p", storage_dir=tmp_path, name="live") as session:
        visitor = enter(f"run/{session.run_id}")
        visitor.page.get_by_role("button", name="Stop…").click()
        assert load_run(team, session.run_id)["stop"] is None
        visitor.page.fill("#stop-reason", "it diverges")
        visitor.page.get_by_role("button", name="Ask it to stop").click()
        visitor.wait_for_text("it diverges")
        visitor.wait_for_text(f"anna (key {find_id(team.key)})")
        visitor.wait_for_text("has not confirmed it yet")
        lookout = StopLookout(session.open_run)
        lookout.look()
        if lookout._thread is not None:  # the session's own has not heard of it before
            lookout._thread.join()
        assert session.stop_requested.reason == "it diverges"
        session.flush("stored")
        # The open page says so by itself.
        visitor.wait_for_text("received it at")


def test_an_open_page_shows_what_somebody_else_edits(team, enter):
    visitor = enter("run/ended")
    visitor.wait_for_text("anna")
    with team.client("default", "write") as client:
        edit = {"run_id": "ended", "edit": {"name": "by ben"}, "by": "ben@desk"}
        assert client.post("/v1/call/edit_run", json=edit).is_success
    visitor.wait("document.querySelector('h1').innerText === 'by ben'")


def test_logging_out_ends_it(team, enter):
    visitor = enter("")
    visitor.page.get_by_role("button", name="Log out").click()
    visitor.page.wait_for_selector("#key")
    visitor.go("run/ended")
    visitor.page.wait_for_selector("#key")


@pytest.fixture
def stranger():
    server = Stranger()
    yield server
    server.stop()


@pytest.mark.parametrize("site", ["127.0.0.1", pytest.param("evil.example")])
def test_pages_of_others_change_nothing_and_have_none_of_ours_in_a_frame(
    team, enter, stranger, site
):
    visitor = enter("run/ended", is_attacked=True)
    visitor.wait_for_text("anna")
    visitor.page.goto(stranger.name(site))
    reached = visitor.evaluate(FORGE, f"{team.url}/api/runs/ended/edit")
    reached += visitor.evaluate(FORGE, f"{team.url}/logout")
    assert reached == 0
    assert load_run(team, "ended")["run"]["name"] is None
    visitor.page.goto(stranger.name(site))
    places = [f"{team.url}/{path}" for path in ("", "run/ended", "login", "api/session")]
    visitor.evaluate(
        """places => Promise.all(places.map(place => new Promise(done => {
        const frame = document.createElement("iframe");
        frame.src = place;
        frame.onload = done;
        document.body.append(frame);
    })))""",
        places,
    )
    frames = visitor.page.main_frame.child_frames
    while not all(frame.url for frame in frames):
        # The driver hears of them a little later.
        visitor.page.wait_for_timeout(20)
    assert [frame.url for frame in frames] == ["chrome-error://chromewebdata/"] * len(places)
    # The session is none the worse for it.
    visitor.go("run/ended")
    visitor.wait("document.querySelector('.tag')")


def test_a_session_that_somebody_planted_is_not_gone_on_with(team, visit):
    visitor = visit(team, may_be_lost=True)
    visitor.context.clear_cookies()
    name = f"quark_team_{team.port}"
    planted = {"name": name, "value": "planted", "url": team.page.url}
    visitor.context.add_cookies([planted])
    visitor.go("")
    log_in(visitor, team.key)
    (cookie,) = [each for each in visitor.context.cookies() if each["name"] == name]
    assert cookie["value"] != "planted"
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"


def test_axe_finds_nothing_on_a_teams_page(team, visit):
    visitor = visit(team, may_be_lost=True, viewport={"width": 320, "height": 640})
    visitor.context.clear_cookies()
    visitor.go("run/ended")
    visitor.check_axe()
    assert visitor.evaluate("document.documentElement.scrollWidth") <= 320
    log_in(visitor, team.key)
    visitor.page.get_by_role("button", name="Archive").click()
    visitor.wait_for_text("lists leave it out")
    visitor.page.get_by_role("button", name="Edit…").click()
    visitor.check_axe()
    assert visitor.evaluate("document.documentElement.scrollWidth") <= 320


@pytest.mark.long
def test_what_is_served_to_oneself_is_edited_too(visit, tmp_path):
    import threading

    from quark.page.server import bind_socket

    with quark.start_run(project="p", storage_dir=tmp_path, name="mine") as session:
        pass
    source = open_source(tmp_path)
    page = PageServer(source, bind_socket("127.0.0.1", 0), allow_edit=True)
    thread = threading.Thread(target=page.run, daemon=True)
    thread.start()
    try:
        server = SimpleNamespace(page=page, port=int(page.url.split(":")[2].strip("/")))
        visitor = visit(server, f"run/{session.run_id}")
        visitor.page.get_by_role("button", name="Edit…").click()
        visitor.page.fill("#edit-name", "renamed")
        visitor.page.get_by_role("button", name="Save").click()
        visitor.wait("document.querySelector('h1').innerText === 'renamed'")
        visitor.go("")
        visitor.wait_for_text("renamed")
        visitor.page.goto("about:blank")
    finally:
        page.end()
        thread.join(60)
        source.close()
    (found,) = quark.search_runs(storage_dir=tmp_path)
    assert found.stored.run.name == "renamed"
