"""A server answers for its own names only: a page whose name means this machine gets nothing."""

import socket

import pytest
from service_fixtures import error_of, serving, serving_process

from quark_backends.service.server.middleware import HostCheck


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("hosts")) as running:
        yield running


ROUTES = ("/v1/workspace", "/healthz", "/readyz", "/metrics", "/docs", "/openapi.json")


@pytest.mark.parametrize("path", ROUTES)
def test_a_name_that_was_made_to_mean_this_machine_is_refused(server, path):
    with server.client() as client:
        for host in ("evil.example", f"evil.example:{server.port}", "localhost.evil.example", ""):
            reply = client.get(path, headers={"Host": host})
            assert reply.status_code == 421, (host, reply.text)
            assert error_of(reply)["code"] == "misdirected"
            assert "--allowed-host" in error_of(reply)["message"]
        assert client.get(path).status_code in (200, 404)


def test_this_machines_names_for_itself_are_let_in(server):
    with server.client() as client:
        own = "localhost LOCALHOST:7411 localhost. 127.0.0.1 127.0.0.1:1 127.1.2.3 [::1] [::1]:7411"
        for host in own.split():
            assert client.get("/v1/workspace", headers={"Host": host}).status_code == 200, host


def test_a_request_without_a_host_is_refused(server):
    with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert connection.makefile("rb").readline().split()[1] == b"421"


def test_names_that_were_given_are_let_in_too(tmp_path):
    names = ("quark.example.com", "10.1.2.3", "fd00::7")
    with serving(tmp_path, allowed_hosts=names) as server, server.client() as client:
        let_in = "quark.example.com Quark.Example.COM:443 10.1.2.3:80 [fd00::7]:1 [FD00:0:0::7]"
        for host in (*let_in.split(), "localhost"):
            assert client.get("/v1/workspace", headers={"Host": host}).status_code == 200, host
        for host in ("example.com", "a.quark.example.com", "10.1.2.4", "[fd00::8]"):
            assert client.get("/v1/workspace", headers={"Host": host}).status_code == 421, host


def test_any_name_is_let_in_where_that_is_asked_for(tmp_path):
    with serving(tmp_path, allowed_hosts=("*",)) as server, server.client() as client:
        assert client.get("/v1/workspace", headers={"Host": "any.example"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "reached_at", "is_allowed"),
    [
        ("10.0.0.5:7411", "10.0.0.5", True),
        ("10.0.0.5", "::ffff:10.0.0.5", True),
        ("[2001:db8::1]:7411", "2001:db8::1", True),
        ("10.0.0.6", "10.0.0.5", False),
        (f"{socket.gethostname()}:7411", "10.0.0.5", True),
        (f"{socket.gethostname()}.evil.example", "10.0.0.5", False),
        ("evil.example", "10.0.0.5", False),
        ("10.0.0.5.evil.example", "10.0.0.5", False),
        ("10.0.0.5", None, False),
    ],
)
@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])
def test_a_server_on_all_addresses_answers_for_the_one_that_it_was_reached_at(
    bound, host, reached_at, is_allowed
):
    assert HostCheck(bound, ()).allows(host, reached_at) is is_allowed


def test_what_a_server_is_bound_to_is_let_in():
    assert HostCheck("quark.internal", ()).allows("quark.internal:7411", "10.0.0.5")
    assert HostCheck("10.0.0.5", ()).allows("10.0.0.5", None)
    assert HostCheck("0.0.0.0", ()).allows("0.0.0.0:7411", "127.0.0.1")
    assert not HostCheck("127.0.0.1", ()).allows("0.0.0.0:7411", "127.0.0.1")
    assert not HostCheck("127.0.0.1", ()).allows(f"{socket.gethostname()}.lan", "127.0.0.1")


@pytest.mark.long
def test_the_option_of_the_command(tmp_path):
    options = ("--allowed-host", "a.example", "--allowed-host", "b.example")
    with serving_process(tmp_path, *options) as server, server.client() as client:
        for host, status in (("a.example", 200), ("b.example", 200), ("c.example", 421)):
            assert client.get("/v1/workspace", headers={"Host": host}).status_code == status
