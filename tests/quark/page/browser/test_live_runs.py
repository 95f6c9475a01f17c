"""A run that goes on is followed: by its cursor, with each point once, through whatever happens."""

import pytest
from browser_runs import make_exploding

import quark

READ_POINTS = """() => {
    const line = window.quark?.charts.find("train/loss")?.lines[0];
    return line ? [line.points, line.xs.length, new Set(line.xs).size] : [0, 0, 0];
}"""


@pytest.fixture
def live(tmp_path, monkeypatch):
    """A run that goes on, and what logs its loss up to a step."""
    monkeypatch.setenv("QUARK_RUN_ID", "live")
    session = quark.start_run(project="digits", storage_dir=tmp_path, name="live one")
    metrics = quark.MetricsLogger(session)
    values = make_exploding(300)
    logged = []

    def log_to(count):
        steps = range(len(logged), count)
        logged.extend(metrics.log("train/loss", values[step], step=step) for step in steps)
        metrics.flush()

    log_to.session = session
    yield log_to
    if session.status == "running":
        session.end_run("completed")


def wait_for_points(visitor, count):
    visitor.wait(f"count => ({READ_POINTS})()[0] >= count", count)
    assert visitor.evaluate(READ_POINTS) == [count] * 3


@pytest.mark.long
def test_a_live_run_grows_and_no_point_is_there_twice(visit, serve, live, tmp_path):
    live(40)
    visitor = visit(serve(tmp_path), "run/live")
    wait_for_points(visitor, 40)
    live(41)
    wait_for_points(visitor, 41)
    live(120)
    wait_for_points(visitor, 120)
    assert visitor.wait("document.querySelector('.state').innerText.includes('running')")
    visitor.wait_for_text("step 119")


@pytest.mark.sampled
@pytest.mark.parametrize("answer", ["late", "failed"])
def test_what_is_found_as_a_run_ends_is_shown_however_the_answer_comes(
    visit, serve, live, tmp_path, answer
):
    live(40)
    # With one that is stored the page computes none, and asks for none before there is news.
    quark.AnalyzerEngine(live.session).analyze()
    live.session.flush()
    visitor = visit(serve(tmp_path), "run/live", may_be_lost=True)
    visitor.wait_until_looked_at()
    held = []

    def hold(route):
        held.append(route)
        if len(held) > 1:
            route.continue_()
        elif answer == "failed":
            route.fulfill(status=503, json={"error": {"status": 503, "message": "busy"}})

    # All of it is news of one look, wherever a look would have come between.
    visitor.context.set_offline(True)
    live(300)
    quark.AnalyzerEngine(live.session).analyze()
    live.session.end_run("completed")
    visitor.page.route("**/api/runs/live/analysis*", hold)
    visitor.context.set_offline(False)
    visitor.wait("document.querySelector('.state').innerText.includes('completed')")
    assert not visitor.evaluate("document.querySelector('.finding')")
    visitor.wait_for_request("/analysis")
    if answer == "late":
        # Longer than it takes the page to draw the end.
        visitor.page.wait_for_timeout(200)
        held[0].continue_()
    visitor.wait("document.querySelector('.finding')")


def test_a_live_run_stands_first_in_the_list_with_how_it_stands(visit, serve, live, tmp_path):
    live(30)
    visitor = visit(serve(tmp_path), "")
    visitor.wait("document.querySelector('.live li[data-run=live] .health')")
    visitor.wait("document.querySelector('.live-step').innerText.includes('29')")
    live(60)
    visitor.wait("document.querySelector('.live-step').innerText.includes('59')")


@pytest.mark.long
def test_a_connection_that_is_lost_is_said_and_taken_up_again(visit, serve, live, tmp_path):
    live(40)
    visitor = visit(serve(tmp_path), "run/live", may_be_lost=True)
    wait_for_points(visitor, 40)
    visitor.context.set_offline(True)
    visitor.wait_for_text("The server does not answer")
    live(80)
    visitor.context.set_offline(False)
    wait_for_points(visitor, 80)
    visitor.wait("!document.body.innerText.includes('The server does not answer')")


def test_a_server_that_is_ended_and_begun_anew_wants_a_sign_in_and_goes_on(
    visit, serve, live, tmp_path
):
    live(40)
    server = serve(tmp_path)
    visitor = visit(server, "run/live?log=1", may_be_lost=True)
    wait_for_points(visitor, 40)
    server.stop()
    visitor.wait_for_text("The server does not answer")
    live(60)
    server.start()
    visitor.wait_for_text("Sign in to open this page")
    visitor.sign_in()
    wait_for_points(visitor, 60)
    assert visitor.evaluate("window.quark.charts.find('train/loss').y.isLog")


def test_a_page_that_nobody_looks_at_asks_for_nothing(visit, serve, live, tmp_path):
    live(40)
    visitor = visit(serve(tmp_path), "run/live")
    wait_for_points(visitor, 40)
    visitor.evaluate(
        """() => {
        Object.defineProperty(document, "hidden", {configurable: true, get: () => window.isAway});
        window.isAway = true;
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    )
    other = visit(visitor.server, "run/live")
    # What was under way when the page was left goes to its end.
    visitor.wait_until_quiet()
    before = len(visitor.requests)
    live(80)
    wait_for_points(other, 80)
    live(90)
    wait_for_points(other, 90)
    assert visitor.requests[before:] == []
    visitor.evaluate(
        "() => { window.isAway = false; document.dispatchEvent(new Event('visibilitychange')); }"
    )
    wait_for_points(visitor, 90)
