"""Whatever the other side does, a call ends in time, in bounded memory, with a message."""

import time
import tracemalloc

import msgspec
import pytest
from chaos_proxy import MODES, ChaosProxy

from quark_backends.service.client.backend import ServiceBackend
from quark_core.backends.contract import BackendConfig
from quark_core.errors import (
    BackendRejected,
    BackendUnavailable,
    SessionStoreError,
    StoreUnavailableError,
)
from quark_core.records.query import Query
from quark_core.testing.fakes import BatchMaker

KEY = "qk_abcd_0123456789abcdef0123456789"
TIMEOUT_S = 0.6
# Who answers may take its time on a busy machine.
ANSWER_S = 20.0
SILENT = ("hang", "drip", "drip_body", "endless", "never_reads")


@pytest.fixture
def proxy():
    with ChaosProxy() as made:
        yield made


@pytest.fixture
def patience(request, monkeypatch):
    """Calls wait 0.6 s for a server that never answers, and long for one that does."""
    mode = getattr(request.node, "callspec", None) and request.node.callspec.params.get("mode")
    timeout_s = TIMEOUT_S if mode in SILENT else ANSWER_S
    monkeypatch.setenv("QUARK_PERSISTENCE_TIMEOUT_SECONDS", str(timeout_s))


@pytest.fixture
def backend(proxy, patience, tmp_path, monkeypatch):
    """A backend as a lane opens it, which asks nothing yet."""
    monkeypatch.setenv("QUARK_USER_KEY", KEY)
    opened = ServiceBackend(
        BackendConfig(storage_dir=tmp_path, run_path=tmp_path, run_id="run0", location=proxy.url)
    )
    yield opened
    opened.close()


def fail(call, *errors):
    """The error of a call, which must come in bounded time and memory."""
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(errors) as caught:
            call()
        took_s = time.monotonic() - started
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A busy machine is not what is tested.
    assert took_s < 30 + ANSWER_S
    assert KEY not in str(caught.value) + repr(caught.value)
    assert caught.value.__cause__ is None or KEY not in repr(caught.value.__cause__)
    return caught.value, peak_bytes


@pytest.mark.sampled
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("413",)])
def test_a_write_waits_for_a_better_time(proxy, backend, mode):
    proxy.set_mode(mode)
    batch = BatchMaker("run0").start()
    error, peak_bytes = fail(lambda: backend.write(batch), BackendUnavailable)
    assert proxy.url in str(error)
    assert error.backend == "service"
    assert peak_bytes < (160 if mode == "endless" else 30) * 2**20
    if mode != "refuse":
        assert proxy.counts["connections"] >= 1


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
def test_a_read_says_what_is_wrong(proxy, backend, mode):
    proxy.set_mode(mode)
    error, peak_bytes = fail(lambda: backend.load_run("run0"), SessionStoreError)
    # What the service refuses for good is no outage.
    assert type(error) is (SessionStoreError if mode == "413" else StoreUnavailableError)
    assert proxy.url in str(error)
    assert peak_bytes < 160 * 2**20
    error, _ = fail(lambda: backend.read("run0", "metric", Query()), SessionStoreError)
    error, _ = fail(lambda: backend.open_payload("run0", "0" * 64), SessionStoreError)
    error, _ = fail(
        lambda: list(backend.iterate("run0", "metric", Query(), rows=10)), SessionStoreError
    )


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
def test_a_start_says_what_to_set(proxy, patience, tmp_path, monkeypatch, mode):
    monkeypatch.setenv("QUARK_USER_KEY", KEY)
    proxy.set_mode(mode)
    config = BackendConfig(storage_dir=tmp_path, location=proxy.url)
    error, _ = fail(lambda: ServiceBackend(config), SessionStoreError)
    assert proxy.url in str(error)


MESSAGES = {
    "refuse": "cannot be reached: .*refused.*QUARK_PERSISTENCE_URL",
    "hang": "does not answer within 0.6 s",
    "drip": "does not answer within 0.6 s",
    "drip_body": "does not answer within 0.6 s",
    "half_close": "closed the connection without an answer",
    "close": "closed the connection without an answer",
    "garbage": "its reply is not HTTP",
    "redirect": "redirect to https://other/x .302.*Set QUARK_PERSISTENCE_URL to the final URL",
    "gzip_bomb": "compressed",
    "endless": "longer than 67108864 bytes|does not answer within",
    "500": "it answers 500: 500 Trouble — 500 Trouble nginx on the way",
    "404": "not an answer of a Quark server. Check the host and the path",
    "429": "asks to retry later",
}


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MESSAGES)
def test_messages(proxy, backend, mode):
    proxy.set_mode(mode)
    with pytest.raises(SessionStoreError, match=MESSAGES[mode]):
        backend.load_run("run0")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("7", 7.0),
        ("100000", 600.0),
        ("-3", None),
        ("nonsense", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", None),
        ("Wed, 21 Oct 2225 07:28:00 GMT", 600.0),
        (None, None),
    ],
)
def test_when_to_come_again(proxy, backend, given, expected):
    proxy.retry_after = given
    proxy.set_mode("429")
    with pytest.raises(BackendUnavailable) as caught:
        backend.write(BatchMaker("run0").start())
    assert caught.value.retry_after_s == expected


def test_what_is_too_large_goes_in_smaller_requests(proxy, backend):
    proxy.set_mode("413")
    maker = BatchMaker("run0")
    group = [maker.start(), *[maker.metrics(("m", i, 1.0)) for i in range(7)]]
    with pytest.raises(BackendRejected, match=r"a batch of 2 records .* is larger"):
        backend.write_group(group)
    # Eight, then by bytes: each batch as it is.
    tries = proxy.counts["413"]
    assert 3 <= tries <= 4
    with pytest.raises(BackendRejected):
        backend.write_group(group)
    assert proxy.counts["413"] == tries + 1


@pytest.mark.parametrize("mode", ["never_reads"])
def test_a_server_that_does_not_read_gets_less_at_a_time(proxy, backend, mode):
    proxy.set_mode(mode)
    maker = BatchMaker("run0")
    body = bytes(range(256)) * 4096
    group = [msgspec.structs.replace(maker.metrics(("m", i, 1.0)), body=body) for i in range(6)]
    sent = []
    post = backend._sender._post
    backend._sender._post = lambda batches: (sent.append(len(batches)), post(batches))
    for _ in range(3):
        with pytest.raises(BackendUnavailable):
            backend.write_group(group)
    assert sent == [6, 3, 1]
