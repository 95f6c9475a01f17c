"""Who may ask the page's server, and what every answer carries; each threat of the design."""

import re
import time

import pytest
from starlette.testclient import TestClient

from quark.page.auth import Guard, Sessions
from quark.page.server import PageServer, bind_socket, check_base
from quark_core.errors import SchemaValidationError

COOKIE = "quark_page_7410"


@pytest.mark.parametrize(
    "path", ["/api/about", "/api/runs", "/artifacts/r/" + "0" * 64, "/", "/run/x"]
)
def test_nothing_but_static_files_without_the_cookie(plain, path):
    assert plain.bare.get(path).status_code == 401
    assert plain.bare.get(path, headers={"cookie": f"{COOKIE}=wrong"}).status_code == 401
    assert plain.bare.get(path, headers={"cookie": "quark_page_7411=x"}).status_code == 401


def test_who_is_locked_out_is_told_what_to_do(plain):
    page = plain.bare.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "the address that the terminal shows" in page.text.lower()
    assert "script" not in page.text
    error = plain.bare.get("/api/runs").json()["error"]
    assert error == {"status": 401, "message": "open the address that the terminal shows"}


def test_a_token_is_traded_once_for_a_cookie(plain):
    token = plain.sessions.make_token()
    answer = plain.bare.get("/run/r?x=time&token=" + token)
    assert answer.status_code == 303
    assert answer.headers["location"] == "./r?x=time"
    (cookie,) = answer.headers.get_list("set-cookie")
    name, _, rest = cookie.partition("=")
    assert name == COOKIE
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(rest.split("; "))
    # The client keeps the cookie; the token is worth nothing any more.
    assert plain.bare.get("/").status_code == 200
    plain.bare.cookies.clear()
    assert plain.bare.get("/?token=" + token).status_code == 401
    assert plain.bare.get("/?token=").status_code == 401
    assert plain.bare.get("/api/runs?token=" + plain.sessions.make_token()).status_code == 401


def test_a_token_leads_back_to_where_it_was_given(plain):
    for path, location in (("/", "./"), ("/run/a%20b/layers", "./layers")):
        answer = plain.bare.get(f"{path}?token={plain.sessions.make_token()}")
        assert answer.headers["location"] == location


def test_a_redirect_never_leads_elsewhere(plain):
    for path in (
        "//evil.example/x",
        "/run//evil.example",
        "/run/%2F%2Fevil.example",
        "/run/x%0d%0aa:b",
    ):
        answer = plain.bare.get(f"http://127.0.0.1:7410{path}?token={plain.sessions.make_token()}")
        assert answer.headers.get("location", "./").startswith("./")


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example:7410", "localhost.evil:7410", "", "[::1].x", "0"],
)
def test_dns_rebinding_is_refused_before_all_else(plain, host):
    for path in ("/", "/api/runs", f"/static/x/y.js?token={plain.sessions.make_token()}"):
        assert plain.http.get(path, headers={"host": host}).status_code == 421


@pytest.mark.parametrize(
    "host", ["localhost:7410", "127.0.0.1", "[::1]:7410", "LOCALHOST", "localhost:9999"]
)
def test_the_loopback_is_known_by_its_names_and_behind_any_forwarded_port(plain, host):
    headers = {"host": host, "cookie": f"{COOKIE}={plain.http.cookies[COOKIE]}"}
    assert plain.bare.get("/api/about", headers=headers).status_code == 200


def test_a_proxy_s_name_is_let_in_where_it_was_named(plain_store, look):
    client = look(plain_store[0], hosts=["Hub.example"])
    headers = {"host": "hub.example:443"}
    assert client.bare.get("/static/x/y.js", headers=headers).status_code == 404
    assert client.bare.get("/api/about", headers=headers).status_code == 401


@pytest.mark.parametrize("site", ["cross-site", "same-site", "nonsense"])
def test_pages_of_others_may_not_ask(plain, site):
    for path in ("/api/runs", f"/artifacts/{plain.run_id}/{'0' * 64}"):
        assert plain.http.get(path, headers={"sec-fetch-site": site}).status_code == 403
    assert plain.http.get("/", headers={"sec-fetch-site": site}).status_code == 200


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_our_own_page_and_the_address_bar_may(plain, site):
    assert plain.http.get("/api/runs", headers={"sec-fetch-site": site}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_no_other_method_is_answered(plain, method):
    for path in ("/api/runs", "/", "/static/x/y"):
        assert plain.http.request(method, path).status_code == 405


def test_every_answer_carries_the_policies(plain):
    answers = [
        plain.http.get("/"),
        plain.http.get("/run/x"),
        plain.http.get("/api/runs"),
        plain.http.get("/nothing"),
        plain.bare.get("/"),
        plain.http.get("/", headers={"host": "evil.example"}),
        plain.http.get(_find_static(plain)),
    ]
    for answer in answers:
        headers = answer.headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert policy["trusted-types"] == "'none'"
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers
    assert answers[0].headers["cache-control"] == "no-store"
    assert "immutable" in answers[-1].headers["cache-control"]


def _find_static(client):
    return "/" + re.search(r"static/[0-9a-f]+/[\w./-]+", client.http.get("/").text)[0]


@pytest.mark.parametrize(
    "path",
    [
        "../app.py",
        "..%2fapp.py",
        "%2e%2e/app.py",
        "%2e%2e%2fapp.py",
        "..%5capp.py",
        "/etc/passwd",
        "%00",
        "pages/../../app.py",
        "index.html/..",
    ],
)
def test_static_files_come_from_a_table(plain, path):
    version = _find_static(plain).split("/")[2]
    assert plain.http.get(f"/static/{version}/{path}").status_code == 404


def test_static_files_are_served_under_the_hash_of_all_of_them(plain):
    path = _find_static(plain)
    assert plain.bare.get(path).status_code == 200
    old = re.sub(r"/static/\w+/", "/static/0123456789abcdef/", path)
    assert plain.bare.get(old).status_code == 404


def test_under_a_path_that_a_proxy_keeps(plain_store, look):
    client = look(plain_store[0], base="/quark")
    assert client.json("/api/runs")["count"] == 1
    assert client.http.get("/api/runs").status_code == 404
    assert client.http.get("/quark").status_code == 303
    assert client.http.get("/quarkx/api/runs").status_code == 404
    path = re.search(r"\./(static/[0-9a-f]+/[\w./-]+)", client.http.get("/quark/").text)[1]
    assert client.http.get(f"/quark/{path}").status_code == 200
    answer = client.bare.get(f"/quark/?token={client.sessions.make_token()}")
    assert "Path=/quark/" in answer.headers["set-cookie"]


def test_addresses_in_the_page_are_relative_to_how_deep_it_lies(plain):
    for path, root in (("/", "./"), ("/run/x", "../"), ("/run/x/layers", "../../")):
        text = plain.http.get(path).text
        assert f"{root}static/" in text
        assert "{{" not in text
        assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text)


@pytest.mark.parametrize("base", ["a b", "/../x", "/a//b", 'x"', "/x?y", "/x#y", "/ü"])
def test_a_base_is_a_plain_path(base):
    with pytest.raises(SchemaValidationError, match="base"):
        check_base(base)


def test_a_base_is_taken_with_and_without_slashes():
    assert [check_base(text) for text in ("", "/", "quark", "/quark/", "/a/b-c")] == [
        "",
        "",
        "/quark",
        "/quark",
        "/a/b-c",
    ]


def test_a_server_that_is_started_again_knows_the_cookies_of_its_place(tmp_path, monkeypatch):
    kept = tmp_path / "pages" / "place.json"
    first = Sessions(kept=kept)
    cookie = first.trade(first.make_token())
    assert cookie not in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0
    assert Sessions(kept=kept).find(cookie) == first.find(cookie)
    assert Sessions(kept=tmp_path / "pages" / "other.json").find(cookie) is None
    assert Sessions().find(cookie) is None
    token = first.make_token()
    assert Sessions(kept=kept).trade(token) is None
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 8 * 86400)
    assert Sessions(kept=kept).find(cookie) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"zz": 1}', '{"00": null}', '{"00": "x"}', "3"])
def test_a_file_of_cookies_that_says_nothing_lets_nobody_in(tmp_path, text):
    kept = tmp_path / "place.json"
    kept.write_text(text)
    sessions = Sessions(kept=kept)
    assert sessions.find("") is None
    cookie = sessions.trade(sessions.make_token())
    assert Sessions(kept=kept).find(cookie) is not None


def test_tokens_and_cookies_are_bounded_and_kept_as_hashes():
    sessions = Sessions()
    first = sessions.make_token()
    cookies = [sessions.trade(sessions.make_token()) for _ in range(70)]
    assert sessions.find(cookies[0]) is None
    assert sessions.find(cookies[-1]) is not None
    assert sessions.trade(first) is not None
    for _ in range(70):
        sessions.make_token()
    assert cookies[-1] not in repr(vars(sessions))


def test_a_cookie_header_that_is_none_is_refused(plain):
    for text in ("=;=;", COOKIE, f"{COOKIE}=\x80", ";" * 100, f"{COOKIE}=a; {COOKIE}=b"):
        header = {"cookie": text.encode("latin-1")}
        assert plain.bare.get("/api/runs", headers=header).status_code == 401


def test_the_cookie_s_name_has_the_port(plain):
    bound = bind_socket("127.0.0.1", 0)
    port = bound.getsockname()[1]
    server = PageServer(plain.source, bound)
    assert server.url == f"http://127.0.0.1:{port}/"
    assert server.make_link().startswith(f"{server.url}?token=")
    guard = server._server.config.app
    assert isinstance(guard, Guard)
    client = TestClient(guard, base_url=server.url, follow_redirects=False)
    token = server.sessions.make_token()
    assert client.get(f"/?token={token}").headers["set-cookie"].startswith(f"quark_page_{port}=")
    bound.close()
