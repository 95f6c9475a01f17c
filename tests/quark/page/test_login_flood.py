"""Logins that are begun and never ended take no place from anybody else."""

import socket
import time

import httpx
from team_server import serving_team

FLOOD = 60
PLACES = 20


def begin_login(server):
    """A connection that has sent the head of a login, and sends nothing more."""
    connection = socket.create_connection(("127.0.0.1", server.port), 60)
    head = [
        "POST /login HTTP/1.1",
        f"Host: 127.0.0.1:{server.port}",
        "Content-Type: application/x-www-form-urlencoded",
        "Content-Length: 100",
    ]
    connection.sendall("\r\n".join([*head, "", "key="]).encode())
    return connection


def test_logins_that_never_end_keep_nobody_out(tmp_path):
    """600 of them had the 512 places, and 98 % of all other requests were refused."""
    with serving_team(tmp_path, limits={"concurrent_requests": PLACES}) as server:
        key = server.make_key("default", "read")
        flood = [begin_login(server) for _ in range(FLOOD)]
        try:
            deadline = time.monotonic() + 60
            # The last of them is answered at once: of one address only some may be arriving.
            while not flood[-1].recv(1) and time.monotonic() < deadline:
                time.sleep(0.01)
            with server.client(key=key) as client:
                assert {client.get("/v1/workspace").status_code for _ in range(100)} == {200}
                assert "quark_requests_in_flight 1\n" in client.get("/metrics").text
            # Whoever comes from elsewhere gets as far as the form's own checks.
            other = httpx.HTTPTransport(local_address="127.0.0.2")
            with httpx.Client(base_url=server.url, transport=other) as client:
                answer = client.post("/login", data={"key": key})
                assert answer.status_code == 403
                assert "Log in" in answer.text
        finally:
            for connection in flood:
                connection.close()


def test_a_body_that_comes_in_pieces_is_whole_for_the_page(tmp_path):
    with serving_team(tmp_path) as server:
        with begin_login(server) as connection:
            for _ in range(4):
                time.sleep(0.05)
                connection.sendall(b"x" * 24)
            assert connection.makefile("rb").readline().split()[1] == b"403"
        # What is longer than any login is refused as one, and not waited for.
        answer = httpx.post(f"{server.url}/login", data={"key": "x" * 20_000}, timeout=60)
        assert answer.status_code == 400
