"""TLS between client and service: certificates that are trusted, unknown, expired or for others."""

import asyncio
import datetime
import functools
import os
import socket
import ssl
import threading
import time

import pytest
import trustme
from held_ports import hold_port
from service_fixtures import serving

import quark
from quark_core.errors import SessionStoreError

YESTERDAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)


class TlsFront:
    """Ends TLS on a free port of 127.0.0.1 and passes on what comes; its certificate may change."""

    def __init__(self, upstream, context):
        self.context = context
        self._upstream = upstream
        self._open = set()
        self._generation = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._place, self.port = hold_port()
        self._server = None
        self.present(context)

    @property
    def url(self):
        return f"https://localhost:{self.port}"

    def present(self, context):
        """Show another certificate from now on; connections that are open are cut."""
        self._call(self._listen(context))

    def close(self):
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()
        self._place.close()

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _listen(self, context):
        await self._stop()
        self._server = await asyncio.start_server(
            functools.partial(self._serve, self._generation),
            "127.0.0.1",
            self.port,
            ssl=context,
            reuse_address=True,
        )

    async def _stop(self):
        if self._server is not None:
            self._server.close()
            self._server = None
        self._generation += 1
        for writer in list(self._open):
            writer.transport.abort()
        # A task cancelled while it accepts would leave its socket open: each ends by itself.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, generation, reader, writer):
        self._open.add(writer)
        up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        self._open.add(up_writer)
        if generation != self._generation:  # accepted for the certificate before this one
            for each in (writer, up_writer):
                each.transport.abort()

        async def pump(source, target):
            while data := await source.read(65536):
                target.write(data)
                await target.drain()

        tasks = [
            asyncio.ensure_future(pump(reader, up_writer)),
            asyncio.ensure_future(pump(up_reader, writer)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for each in (writer, up_writer):
                self._open.discard(each)
                each.close()


def make_context(authority, name="localhost", **more):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(name, **more).configure_cert(context)
    return context


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def front(tmp_path, authority, monkeypatch):
    """A service behind TLS, whose authority the client trusts."""
    with serving(tmp_path / "server") as server:
        trusted = tmp_path / "authority.pem"
        authority.cert_pem.write_to_path(str(trusted))
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key("default", "admin"))
        port = int(server.url.rpartition(":")[2])
        front = TlsFront(("127.0.0.1", port), make_context(authority))
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", front.url)
        monkeypatch.setenv("QUARK_PERSISTENCE_TIMEOUT_SECONDS", "60")
        yield front
        front.close()


def start(folder):
    return quark.TrainingSession.start_run(project="tls", storage_dir=folder)


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.long
def test_an_own_authority_is_found_by_the_environment(tmp_path, front):
    with start(tmp_path / "a") as session, quark.MetricsLogger(session) as metrics:
        metrics.log("loss", 0.5, step=1)
        assert [record.value for record in metrics.read(metric_key="loss")] == [0.5]


def test_an_unknown_authority_is_refused_and_named(tmp_path, front, monkeypatch):
    front.present(make_context(trustme.CA()))
    with pytest.raises(SessionStoreError, match="certificate"):
        start(tmp_path / "a")


def test_a_certificate_for_another_host_is_refused(tmp_path, front, authority):
    front.present(make_context(authority, "other.example.com"))
    with pytest.raises(SessionStoreError, match="certificate"):
        start(tmp_path / "a")


def test_an_expired_certificate_is_refused_and_named(tmp_path, front, authority):
    front.present(make_context(authority, not_after=YESTERDAY))
    with pytest.raises(SessionStoreError, match="expired"):
        start(tmp_path / "a")


@pytest.mark.long
def test_a_certificate_that_expires_in_the_middle_costs_no_record(tmp_path, front, authority):
    with start(tmp_path / "a") as session, quark.MetricsLogger(session) as metrics:
        metrics.log("loss", 0.0, step=0)
        metrics.flush()
        front.present(make_context(authority, not_after=YESTERDAY))
        for step in range(1, 200):
            metrics.log("loss", float(step), step=step)
        lane = session.open_run.stream._lanes[0]
        wait_for(lambda: (lane.nudge(), "expired" in str(lane.last_error))[1])
        front.present(make_context(authority))
        wait_for(lambda: (lane.nudge(), session.report_delivery().lanes[0].waiting == 0)[1])
        assert [record.step for record in metrics.read(metric_key="loss")] == list(range(200))


def test_a_name_that_is_gone_is_named_within_the_timeout(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", "https://quark.invalid")
    monkeypatch.setenv("QUARK_USER_KEY", "qk_none_none")
    began = time.monotonic()
    with pytest.raises(SessionStoreError, match=r"quark\.invalid"):
        start(tmp_path)
    assert time.monotonic() - began < 30


@pytest.mark.long
def test_a_name_that_goes_in_the_middle_costs_no_record(tmp_path, front, monkeypatch):
    real = socket.getaddrinfo

    def fail(host, *arguments, **more):
        if host == "localhost":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *arguments, **more)

    with start(tmp_path / "a") as session, quark.MetricsLogger(session) as metrics:
        metrics.log("loss", 0.0, step=0)
        metrics.flush()
        monkeypatch.setattr(socket, "getaddrinfo", fail)
        front.present(front.context)  # cuts what is open, so that the name is looked up again
        for step in range(1, 100):
            metrics.log("loss", float(step), step=step)
        lane = session.open_run.stream._lanes[0]
        wait_for(lambda: (lane.nudge(), "localhost" in str(lane.last_error))[1])
        monkeypatch.setattr(socket, "getaddrinfo", real)
        wait_for(lambda: (lane.nudge(), session.report_delivery().lanes[0].waiting == 0)[1])
        assert [record.step for record in metrics.read(metric_key="loss")] == list(range(100))


def test_a_proxy_of_the_environment_that_is_dead_is_named(request, tmp_path, monkeypatch):
    place, dead = hold_port()
    request.addfinalizer(place.close)
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, f"http://user:hidden-word@127.0.0.1:{dead}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", "https://quark.example.com")
    monkeypatch.setenv("QUARK_USER_KEY", "qk_none_none")
    with pytest.raises(SessionStoreError) as caught:
        start(tmp_path)
    assert "proxy" in str(caught.value)
    assert "hidden-word" not in str(caught.value)
    assert os.environ["HTTPS_PROXY"].count("hidden-word") == 1
