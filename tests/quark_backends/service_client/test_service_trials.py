"""Many workers share the trials of a service: replies are lost, servers die, clocks are apart."""

import collections
import random
import threading
import time
import uuid

import httpx
import msgspec
import pytest
from chaos_proxy import LOST, ChaosProxy, losing
from held_ports import hold_port
from service_fixtures import ingest, serving, serving_process

from quark_backends.service.client.backend import ServiceBackend
from quark_backends.service.protocol import NEXT_PAGE
from quark_core.backends.contract import BackendConfig
from quark_core.backends.coordination import (
    AppendedEntries,
    NewTrial,
)
from quark_core.errors import (
    SessionStoreError,
    StoreUnauthorizedError,
    StoreUnavailableError,
)
from quark_core.records.base import now_us
from quark_core.records.sweeps import TrialResult
from quark_core.system.process import ProcessIdentity, current_process
from quark_core.testing.fakes import BatchMaker

ELSEWHERE = ProcessIdentity("elsewhere", 1, "1")
DONE = TrialResult(state="completed", values=(0.5,))


@pytest.fixture
def open_store(tmp_path, monkeypatch):
    """Opens the service as a worker does; all are closed at the end."""
    opened = []

    def open_it(url, key, *, timeout_s=60, **config):
        monkeypatch.setenv("QUARK_USER_KEY", key)
        made = ServiceBackend(
            BackendConfig(
                storage_dir=tmp_path / "runs", location=f"{url}?timeout={timeout_s}", **config
            )
        )
        opened.append(made)
        return made

    yield open_it
    for each in opened:
        each.close()


@pytest.fixture
def store(service, open_store):
    return open_store(service.url, service.key)


def make_sweep(store, trials, **settings):
    sweep = store.open_sweep("vision", "lr", {"metric": "loss"}, max_failures=3, **settings)
    if trials:
        store.add_trials(
            sweep.id, [NewTrial(parameters={"lr": n / 8}) for n in range(trials)], key="all"
        )
    return sweep.id


def claim(store, sweep_id, **changes):
    wanted = {"request_id": uuid.uuid4().hex, "worker": current_process(), "lease_s": 600.0}
    return store.claim_trial(sweep_id, **{**wanted, **changes})


def test_trials_and_entries_of_many_pages_come_in_their_order(store, monkeypatch):
    monkeypatch.setattr("quark_backends.service.server.call_routes.PAGE_BYTES", 20_000)
    sweep_id = make_sweep(store, 0)
    new = [NewTrial(parameters={"n": n, "text": "x" * 900}) for n in range(250)]
    assert [t.number for t in store.add_trials(sweep_id, new, key="k")] == list(range(250))
    for start, limit in ((0, None), (0, 33), (17, 100), (249, None), (250, None), (0, 0)):
        found = store.list_trials(sweep_id, start=start, limit=limit)
        expected = range(250)[start:] if limit is None else range(250)[start : start + limit]
        assert [trial.number for trial in found] == list(expected)
    texts = [f"{n}{'y' * 900}" for n in range(250)]
    assert store.append_entries("l", texts, request_id="r") == AppendedEntries(first=0, count=250)
    read = []
    while part := store.read_entries("l", len(read), limit=40):
        assert len(part) <= 40
        read += part
    assert read == texts


def run_all(work, items):
    """Run a function on a thread for each item; what one of them raises is raised here."""
    errors = []

    def guard(item):
        try:
            work(item)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guard, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("lost", LOST)
def test_what_was_done_and_not_answered_is_answered_and_not_done_again(
    service, proxied, open_store, lost
):
    store = open_store(proxied.url, service.key)
    with losing(proxied, 2, lost):
        sweep_id = make_sweep(store, 0)
    new = [NewTrial(parameters={"n": n}) for n in range(4)]
    with losing(proxied, 2, lost):
        added = store.add_trials(sweep_id, new, key="k")
    assert [trial.number for trial in added] == [0, 1, 2, 3]
    with losing(proxied, 2, lost):
        trial = claim(store, sweep_id)
    assert (trial.number, trial.token) == (0, 1)
    with losing(proxied, 2, lost):
        failed = store.settle_trial(
            sweep_id, 0, 1, TrialResult(state="waiting", reason="no memory"), lease_s=1.0
        )
    assert (failed.state, failed.failures) == ("waiting", 1)
    with losing(proxied, 2, lost):
        place = store.append_entries("l", ["a", "b"], request_id="r")
    assert place == AppendedEntries(first=0, count=2)
    with losing(proxied, 2, lost):
        assert store.update_sweep(sweep_id, "cancelled", by="ann@lab").state == "cancelled"
    assert store.read_entries("l", 0) == ["a", "b"]
    assert len(store.list_trials(sweep_id)) == 4


@pytest.mark.parametrize("lost", LOST)
def test_nobody_can_tell_of_a_comparison_whose_reply_is_lost_and_it_is_sent_once(
    service, proxied, open_store, lost
):
    store = open_store(proxied.url, service.key)
    with service.client(key=service.key) as client:
        assert ingest(client, BatchMaker("run0").start()).status_code == 200
    with losing(proxied, 1, lost), pytest.raises(StoreUnavailableError):
        store.compare_and_set("run0", "count", None, 1, by="ann@lab")
    assert store.load_run("run0").fields == {"count": 1}
    assert store.compare_and_set("run0", "count", None, 2, by="ann@lab") is False
    assert store.compare_and_set("run0", "count", 1, 2, by="ann@lab") is True


@pytest.mark.long
def test_a_busy_service_is_asked_again_for_as_long_as_a_call_may_take(
    service, proxied, open_store, monkeypatch
):
    proxied.retry_after = "1"
    store = open_store(proxied.url, service.key)
    sweep_id = make_sweep(store, 2)
    for mode in ("503", "429", "502", "refuse"):
        proxied.set_mode(mode)
        timer = threading.Timer(0.6, proxied.set_mode, ["pass"])
        timer.start()
        assert store.load_sweep(sweep_id).id == sweep_id
        timer.join()
    brief = open_store(proxied.url, service.key, timeout_s=1)
    for mode in ("503", "refuse", "hang", "garbage", "500"):
        proxied.set_mode(mode)
        with pytest.raises(SessionStoreError, match="the Quark server at"):
            claim(brief, sweep_id)
    proxied.set_mode("pass")
    assert claim(store, sweep_id).number == 0


def test_what_is_no_service_and_a_key_that_may_not_are_told(service, open_store):
    store = open_store(service.url, service.key)
    sweep_id = make_sweep(store, 1)
    with (
        ChaosProxy(mode="404") as other,
        pytest.raises(SessionStoreError, match="the Quark server at"),
    ):
        open_store(other.url, service.key, read_only=True).load_sweep(sweep_id)
    reader = open_store(service.url, service.make_key("default", "read", "write"), read_only=True)
    assert reader.load_sweep(sweep_id).id == sweep_id
    with pytest.raises(SessionStoreError, match="reading only"):
        claim(reader, sweep_id)
    worker = open_store(service.url, service.make_key("default", "ingest"))
    assert claim(worker, sweep_id).number == 0
    with pytest.raises(StoreUnauthorizedError, match="write"):
        worker.update_sweep(sweep_id, "paused", by="ann@lab")


def open_mocked(tmp_path, monkeypatch, status, body, headers=None):
    """The client over a service that answers everything with one reply."""

    def answer(_request):
        given = {"Quark-Protocol": "1", **(headers or {})}
        return httpx.Response(status, headers=given, json=body)

    monkeypatch.setenv("QUARK_USER_KEY", "qk_1_2")
    config = BackendConfig(
        storage_dir=tmp_path, location="http://127.0.0.1:1", run_id="r", run_path=tmp_path / "r"
    )
    return ServiceBackend(config, transport=httpx.MockTransport(answer))


TRIAL = {"sweep_id": "s", "number": 0, "parameters": {}, "origin": {}, "state": "running"}


@pytest.mark.parametrize(
    "trial",
    [
        {},
        [],
        "text",
        {**TRIAL, "state": "excellent"},
        {**TRIAL, "number": -1},
        {**TRIAL, "token": "1"},
        {**TRIAL, "parameters": [1]},
        {**TRIAL, "values": ["a"]},
        {**TRIAL, "worker": 3},
    ],
)
def test_what_is_no_trial_is_told_as_what_the_service_sent(tmp_path, monkeypatch, trial):
    store = open_mocked(tmp_path, monkeypatch, 200, trial)
    with pytest.raises(SessionStoreError, match="read"):
        claim(store, "s")
    listed = open_mocked(tmp_path, monkeypatch, 200, [trial])
    with pytest.raises(SessionStoreError, match="read"):
        listed.list_trials("s", limit=1)


def test_pages_that_never_end_are_not_followed_for_ever(tmp_path, monkeypatch):
    store = open_mocked(tmp_path, monkeypatch, 200, [TRIAL], {NEXT_PAGE: "1"})
    with pytest.raises(SessionStoreError, match="its list of pages does not end"):
        store.list_trials("s")


@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_server_that_dies_in_the_middle_gives_no_trial_twice_and_loses_none(
    request, tmp_path, open_store, workers
):
    place, port = hold_port()
    request.addfinalizer(place.close)
    with serving(tmp_path / "server") as databases:
        key = databases.make_key("default", "ingest")
    url = f"http://127.0.0.1:{port}"
    given, done = collections.defaultdict(list), collections.Counter()
    finished = threading.Event()
    kills = 0

    def work(worker):
        store = stores[worker]
        while (trial := claim(store, sweep_id)) is not None:
            given[trial.number, trial.token].append(worker)
            time.sleep(random.uniform(0.0, 0.02))
            result = TrialResult(state="completed", values=(float(worker),))
            settled = store.settle_trial(sweep_id, trial.number, trial.token, result, lease_s=600.0)
            assert (settled.token, settled.values) == (trial.token, (float(worker),))
            done[trial.number] += 1

    def kill_and_start():
        nonlocal kills
        for part in (50, 100, 150):
            with serving_process(tmp_path / "server", "--workers", workers, port=port) as server:
                while sum(done.values()) < part and not finished.is_set():
                    time.sleep(0.002)
                server.kill()
                kills += 1
        with serving_process(tmp_path / "server", "--workers", workers, port=port):
            finished.wait(300)

    with serving_process(tmp_path / "server", port=port):
        stores = [open_store(url, key, timeout_s=120) for _ in range(8)]
        sweep_id = make_sweep(stores[0], 200)
    keeper = threading.Thread(target=kill_and_start)
    keeper.start()
    try:
        run_all(work, range(8))
        trials = stores[0].list_trials(sweep_id)
    finally:
        finished.set()
        keeper.join(300)
    assert kills == 3
    # The same request was sent again to the next server, and was given the same trial.
    assert {key: len(who) for key, who in given.items()} == {(n, 1): 1 for n in range(200)}
    assert done == dict.fromkeys(range(200), 1)
    assert [(t.state, t.values) for t in trials] == [
        ("completed", (float(given[n, 1][0]),)) for n in range(200)
    ]


def begin_run(store, trial, run_id, *, clock_us):
    """Store the start of a run that has a trial, of a machine with a clock of its own."""
    maker = BatchMaker(run_id, writer_id=f"w-{run_id}", started_us=clock_us)
    start = {
        "project": {"id": "p-vision", "name": "vision", "root_path": "/nowhere"},
        "run": {
            **dict.fromkeys(("name", "notes", "parent_run_id", "git_commit")),
            "lineage_root_run_id": run_id,
            "run_path": f"/nowhere/{run_id}",
            "strict_mode": False,
            "tags": [],
        },
        "process": msgspec.to_builtins(ELSEWHERE),
        "trial": trial.claim.to_dict(),
    }
    store.write(maker.lifecycle(("start", start), ("config", {"values": {}, "notes": []})))
    return maker


@pytest.mark.parametrize("ahead_s", [-7200, 7200])
def test_a_run_that_says_nothing_for_a_minute_loses_its_trial(store, monkeypatch, ahead_s):
    """Its process cannot be asked from here, so its silence decides, by the service's clock."""
    monkeypatch.setattr("quark_core.system.process.LOST_AFTER_S", 0.5)
    sweep_id = make_sweep(store, 1)
    trial = claim(store, sweep_id, worker=ELSEWHERE, lease_s=600.0)
    begin_run(store, trial, "run0", clock_us=now_us() + ahead_s * 1_000_000)
    deadline = time.monotonic() + 60
    while (found := claim(store, sweep_id, worker=ELSEWHERE)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (found.token, found.losses, found.state) == (2, 1, "running")
    assert store.load_run("run0").superseded is True
