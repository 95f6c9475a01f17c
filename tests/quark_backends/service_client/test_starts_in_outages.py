"""Starts and restarts while the service is away: in time, told, and settled when it is back."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from chaos_proxy import ChaosProxy
from held_ports import hold_port

import quark
from quark_core.delivery.delivery_worker import RetryPolicy
from quark_core.runs import recovery

PROGRAM = Path(__file__).with_name("training_program.py")
FIRST_S, RESTART_S = 5.0, 2.0
# Of trainings that end in an outage.
BRIEF_END = {"QUARK_EXIT_TIMEOUT_SECONDS": "0.5"}


class Training:
    """A training in a process of its own."""

    def __init__(self, folder, call, variables, patience_s, arguments):
        given = [
            f"{name}={value if name == 'resolver' else json.dumps(value)}"
            for name, value in arguments.items()
        ]
        given += [] if patience_s is None else [f"patience_s={patience_s}"]
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), call, *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "TESTS_BOUNDS": "",  # `patience_s` says how long it waits
                "QUARK_EXIT_TIMEOUT_SECONDS": "20",
                **variables,
            },
        )
        self.begun = self._read()

    def _read(self):
        return json.loads(self.process.stdout.readline())

    def do(self, *words):
        self.process.stdin.write(f"{' '.join(map(str, words))}\n")
        self.process.stdin.flush()
        said = self._read()
        if words[0] == "end":
            # What it is at yet, nobody else can deliver.
            self.process.wait(250)
        return said

    def kill(self):
        self.process.kill()
        self.close()

    def close(self):
        self.process.stdin.close()
        self.process.wait(250)
        self.process.stdout.close()


@pytest.fixture
def train():
    """Begins trainings; those that are left are killed.

    A start waits long for a service that answers, as it may have to on a busy machine. Without
    `patience_s`, as long as is promised: where that is tested, or no service will ever answer.
    """
    with ExitStack() as stack:

        def begin(folder, call="start", variables=None, *, patience_s=15.0, **arguments):
            training = Training(folder, call, variables or {}, patience_s, arguments)
            stack.callback(training.kill)
            return training

        yield begin


def launch(restart, place="a", rank=0, size=1):
    """The variables of torchrun on one node."""
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_ERROR_FILE": f"/nowhere/{place}/attempt_{restart}/{rank}/error.json",
        "GROUP_WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": str(size),
        "WORLD_SIZE": str(size),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29613",
    }


@contextmanager
def silent_listener(*, is_full=False):
    """A port that takes connections and says nothing; or, full, drops who comes."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0 if is_full else 64)
        place = listener.getsockname()
        for _ in range(4 if is_full else 0):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(place)
        yield place[1]


@contextmanager
def bad_network(kind):
    """The URL of a service that cannot be reached in some way."""
    if kind == "refuse":
        place, port = hold_port()
        with place:
            yield f"http://127.0.0.1:{port}"
    elif kind in ("tls", "black_hole"):
        with silent_listener(is_full=kind == "black_hole") as port:
            yield f"{'https' if kind == 'tls' else 'http'}://127.0.0.1:{port}"
    elif kind == "resolver":
        yield "http://quark.invalid:7411"
    else:
        with ChaosProxy(mode=kind) as proxy:
            yield proxy.url


KINDS = ["refuse", "hang", "drip", "drip_body", "tls", "black_hole", "resolver", "503"]


def steps_of(run_id, folder, **filters):
    opened = quark.open_run(run_id, folder)
    columns = quark.MetricsLogger(opened).columns(metric_key="m", all_attempts=True, **filters)
    return sorted(zip(columns["attempt"].tolist(), columns["step"].tolist(), strict=True))


def deliver(folder):
    """Deliver what waits; the states of all lanes."""
    return {result.state for result in recovery.sync(folder)}


def events_of(run_id, folder, event_type):
    opened = quark.open_run(run_id, folder)
    return quark.EventLogger(opened).read(event_type=event_type)


@pytest.fixture
def fast_lanes(monkeypatch):
    for name, value in {"first_s": 0.05, "cap_s": 0.2, "paused_s": 0.2, "rest_s": 0.2}.items():
        monkeypatch.setitem(RetryPolicy.__init__.__kwdefaults__, name, value)


def begin_in_time(begin, bound_s, tries=4):
    """What a start said of itself that was within its bound.

    A machine under load may delay any one; one that waits for its network is late every time.
    """
    taken_s = []
    for number in range(1, tries + 1):
        training = begin(number)
        taken_s.append(training.begun["took_s"])
        if taken_s[-1] < bound_s:
            return training
        training.kill()
    raise AssertionError(f"each of {tries} starts took longer than {bound_s} s: {taken_s}")


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_start_raises_in_time(kind, train, tmp_path):
    options = {"resolver": "hangs"} if kind == "resolver" else {}
    with bad_network(kind) as url:
        variables = {"QUARK_PERSISTENCE_URL": url, "QUARK_USER_KEY": "qk_a_b"}
        begun = begin_in_time(
            lambda _: train(tmp_path, "start", variables, patience_s=None, **options), FIRST_S
        )
    assert begun.begun["error"] == "StoreUnavailableError"
    assert "QUARK_OFFLINE=allow" in begun.begun["message"]
    assert not recovery.has_journals(tmp_path)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_begins_in_time_and_says_so(kind, train, service, tmp_path):
    first = train(tmp_path, variables=launch(0))
    first.do("log", 0, 5)
    first.kill()
    options = {"resolver": "hangs"} if kind == "resolver" else {}
    with bad_network(kind) as url:
        elsewhere = {"QUARK_PERSISTENCE_URL": url}
        again = begin_in_time(
            lambda restart: train(
                tmp_path, "start", {**launch(restart), **elsewhere}, patience_s=None, **options
            ),
            RESTART_S,
        )
        assert again.begun["error"] is None
        assert again.begun["run_id"] == first.begun["run_id"]
        assert again.begun["attempt"] >= 1
        assert "without its store" in again.begun["message"]
        again.do("log", 5, 10)
        again.kill()
    assert sum(lane.waiting for lane in recovery.survey(tmp_path)) > 5


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_begins_in_time(kind, train, tmp_path):
    options = {"resolver": "hangs"} if kind == "resolver" else {}
    with bad_network(kind) as url:
        variables = {"QUARK_PERSISTENCE_URL": url, "QUARK_USER_KEY": "qk_a_b"}
        allowed = {**variables, "QUARK_OFFLINE": "allow"}
        options["patience_s"] = None
        first = begin_in_time(lambda _: train(tmp_path, "start", allowed, **options), RESTART_S)
        first.do("log", 0, 5)
        first.kill()
        run_id = first.begun["run_id"]
        again = begin_in_time(
            lambda _: train(tmp_path, "resume", variables, run_id=run_id, **options), RESTART_S
        )
        again.kill()
        assert again.begun["error"] is None
        assert "without its store" in again.begun["message"]


@pytest.mark.long
def test_a_restarted_training_is_delivered_when_the_service_is_back(
    train, proxied, service, tmp_path
):
    first = train(tmp_path, variables=launch(0), config={"lr": 0.1}, tags=["a"], name="one")
    run_id = first.begun["run_id"]
    first.do("log", 0, 10)
    proxied.set_mode("refuse")
    first.do("log", 10, 20)
    first.kill()
    again = train(tmp_path, variables=launch(1), config={"lr": 0.2}, tags=["a"], name="one")
    assert again.begun["run_id"] == run_id
    again.do("log", 20, 30)
    again.do("fork", 30, 40)
    again.do("spawn", 40, 50)
    proxied.set_mode("pass")
    again.do("end", "completed")
    assert deliver(tmp_path) <= {"delivered"}
    assert steps_of(run_id, tmp_path) == [(step // 20 and 1, step) for step in range(50)]
    opened = quark.open_run(run_id, tmp_path)
    assert (opened.status, opened.context.run.attempt) == ("completed", 1)
    assert opened.context.run.name == "one"
    assert opened.open_run.reader.load_run(run_id).config.values["lr"] == 0.2
    (event,) = events_of(run_id, tmp_path, "started_offline")
    assert (event.severity, event.attempt) == ("warning", 1)
    assert "cannot be reached" in event.payload["reason"]
    assert [e.attempt for e in events_of(run_id, tmp_path, "run_resumed")] == [1]
    assert not recovery.count_quarantined(tmp_path)
    assert not events_of(run_id, tmp_path, "attempt_settled")


@pytest.mark.long
def test_a_restart_whose_start_is_not_acknowledged_is_no_second_one(
    train, service, tmp_path, count_rows
):
    first = train(tmp_path, variables=launch(0))
    run_id = first.begun["run_id"]
    first.do("log", 0, 5)
    first.do("flush")
    first.kill()
    path = tmp_path / "server" / "workspaces" / "default" / ".quark" / "quark.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        # The service reads and cannot write, until it is too late for the start.
        database.execute("BEGIN IMMEDIATE")
        patience_s = 4.0  # enough to be answered on a busy machine
        again = begin_in_time(
            lambda restart: train(tmp_path, variables=launch(restart), patience_s=patience_s),
            patience_s + RESTART_S,
        )
        database.rollback()
    attempt = again.begun["attempt"]
    assert (again.begun["error"], attempt > 0) == (None, True)
    assert "does not acknowledge" in again.begun["message"]
    again.do("log", 5, 10)
    again.do("flush")
    again.do("end", "completed")
    deliver(tmp_path)
    assert steps_of(run_id, tmp_path) == [(step // 5 and attempt, step) for step in range(10)]
    opened = quark.open_run(run_id, tmp_path)
    assert (opened.status, opened.context.run.attempt) == ("completed", attempt)
    assert not events_of(run_id, tmp_path, "attempt_settled")
    assert not recovery.count_quarantined(tmp_path)


@pytest.mark.long
def test_a_run_that_this_machine_knows_is_resumed_in_an_outage(train, proxied, tmp_path):
    first = train(tmp_path, config={"lr": 0.1}, notes="n")
    run_id = first.begun["run_id"]
    first.do("log", 0, 10)
    first.do("end", "interrupted")
    proxied.set_mode("hang")
    elsewhere = train(tmp_path / "elsewhere", "resume", run_id=run_id, patience_s=None)
    assert elsewhere.begun["error"] == "StoreUnavailableError"
    assert "cannot find the run" in elsewhere.begun["message"]
    again = train(tmp_path, "resume", run_id=run_id, from_step=5, patience_s=None)
    assert again.begun["attempt"] == 1
    twice = train(tmp_path, "resume", run_id=run_id, patience_s=None)
    assert twice.begun["error"] == "InvalidRunStateError"
    again.do("log", 5, 12)
    again.kill()
    third = train(tmp_path, "resume", run_id=run_id, patience_s=None)
    assert third.begun["attempt"] == 2
    third.do("log", 12, 20)
    proxied.set_mode("pass")
    third.do("end", "completed")
    deliver(tmp_path)
    assert steps_of(run_id, tmp_path) == [
        *((0, step) for step in range(10)),
        *((1, step) for step in range(5, 12)),
        *((2, step) for step in range(12, 20)),
    ]
    seen = quark.MetricsLogger(quark.open_run(run_id, tmp_path)).columns(metric_key="m")
    assert sorted(seen["step"].tolist()) == list(range(20))
    opened = quark.open_run(run_id, tmp_path)
    assert (opened.status, opened.context.run.attempt, opened.context.run.notes) == (
        "completed",
        2,
        "n",
    )
    assert not recovery.count_quarantined(tmp_path)
    completed = train(tmp_path, "resume", run_id=run_id).begun
    assert completed["error"] == "InvalidRunStateError"
    proxied.set_mode("refuse")
    completed = train(tmp_path, "resume", run_id=run_id).begun
    assert (completed["error"], "completed" in completed["message"]) == (
        "InvalidRunStateError",
        True,
    )


@pytest.mark.long
def test_of_two_machines_that_resume_in_an_outage_both_are_kept(train, proxied, tmp_path):
    one, two = tmp_path / "store" / "runs", tmp_path / "other" / "runs"
    first = train(one)
    run_id = first.begun["run_id"]
    first.do("log", 0, 10)
    first.do("end", "interrupted")
    # The other machine knows the run from the time when it led it, before the first did again.
    known = one / ".quark" / "known_runs"
    there = two / ".quark" / "known_runs"
    proxied.set_mode("pass")
    borrowed = train(two, "resume", run_id=run_id)
    borrowed.do("end", "interrupted")
    assert (there / f"{run_id}.json").exists()
    assert (known / f"{run_id}.json").exists()
    proxied.set_mode("refuse")
    here = train(one, "resume", BRIEF_END, run_id=run_id, from_step=5)
    away = train(two, "resume", BRIEF_END, run_id=run_id, from_step=5)
    assert (here.begun["attempt"], away.begun["attempt"]) == (1, 2)
    here.do("log", 5, 20)
    away.do("log", 5, 15)
    here.do("end", "completed")
    away.do("end", "failed")
    proxied.set_mode("pass")
    assert deliver(two) == {"delivered"}
    assert deliver(one) == {"delivered"}
    # The machine's attempt 1 had been begun by the other one, which had 2 by then.
    assert steps_of(run_id, one) == [
        *((0, step) for step in range(10)),
        *((2, step) for step in range(5, 15)),
        *((3, step) for step in range(5, 20)),
    ]
    opened = quark.open_run(run_id, one)
    assert (opened.status, opened.context.run.attempt) == ("completed", 3)
    (event,) = events_of(run_id, one, "attempt_settled")
    assert (event.severity, event.attempt) == ("warning", 3)
    assert (event.payload["asked_attempt"], event.payload["status_before"]) == (1, "failed")
    # Both did the same steps: the later attempt's are the curve, and all are kept, as above.
    seen = quark.MetricsLogger(opened).columns(metric_key="m")
    assert sorted(seen["step"].tolist()) == list(range(20))
    for folder in (one, two):
        assert not recovery.count_quarantined(folder)
        assert not recovery.has_journals(folder)


@pytest.mark.long
def test_a_live_process_is_told_that_its_attempt_was_settled(train, proxied, service, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    first = train(one)
    run_id = first.begun["run_id"]
    first.do("end", "interrupted")
    proxied.set_mode("refuse")
    here = train(one, "resume", run_id=run_id)
    here.do("log", 0, 5)
    # For the other machine, there is no outage.
    away = train(two, "resume", {"QUARK_PERSISTENCE_URL": service.url}, run_id=run_id)
    assert (here.begun["attempt"], away.begun["attempt"]) == (1, 1)
    away.do("log", 5, 10)
    proxied.set_mode("pass")
    here.do("flush")
    away.do("end", "completed")
    opened = quark.open_run(run_id, one)
    assert (opened.status, opened.context.run.attempt) == ("running", 2)
    told = here.do("end", "failed")["warnings"]
    assert sum("both are kept" in line for line in told) == 1
    assert steps_of(run_id, one) == [(1, 5), (1, 6), (1, 7), (1, 8), (1, 9)] + [
        (2, step) for step in range(5)
    ]
    assert quark.open_run(run_id, one).status == "failed"
    (event,) = events_of(run_id, one, "attempt_settled")
    assert event.payload["status_before"] == "running"


@pytest.mark.long
def test_first_starts_are_allowed_offline(train, proxied, tmp_path):
    proxied.set_mode("refuse")
    allow = {"QUARK_OFFLINE": "allow"}
    first = train(tmp_path, variables={**allow, **launch(0)}, tags=["t"], config={"lr": 1})
    run_id = first.begun["run_id"]
    first.do("log", 0, 10)
    first.do("fork", 10, 20)
    first.do("spawn", 20, 30)
    first.kill()
    again = train(tmp_path, variables={**launch(1), **BRIEF_END}, tags=["t"], config={"lr": 2})
    assert (again.begun["run_id"], again.begun["attempt"]) == (run_id, 1)
    again.do("log", 30, 40)
    again.do("end", "failed")
    proxied.set_mode("pass")
    # Whatever comes first: the later attempt's journal before the run's own beginning.
    folders = sorted((tmp_path / ".quark" / "runs" / run_id / "journal").iterdir())
    later = [path for path in folders if json.loads((path / "journal.json").read_text())["attempt"]]
    for path in later:
        folder = recovery.JournalFolder(path)
        recovery.sync_folder(folder, folder.read_manifest(), recovery.open_lane)
    assert deliver(tmp_path) == {"delivered"}
    assert steps_of(run_id, tmp_path) == [(step // 30, step) for step in range(40)]
    opened = quark.open_run(run_id, tmp_path)
    stored = opened.open_run.reader.load_run(run_id)
    assert (stored.run.status, stored.run.attempt, stored.run.tags) == ("failed", 1, ("t",))
    assert stored.config.values["lr"] == 2
    assert not recovery.count_quarantined(tmp_path)
    assert not events_of(run_id, tmp_path, "attempt_settled")
    assert len(events_of(run_id, tmp_path, "started_offline")) == 2


@pytest.mark.long
def test_a_run_begun_offline_is_resumed_before_the_service_has_it(train, proxied, tmp_path):
    proxied.set_mode("refuse")
    first = train(tmp_path, variables={"QUARK_OFFLINE": "allow"}, name="n")
    run_id = first.begun["run_id"]
    first.do("log", 0, 10)
    first.kill()
    proxied.set_mode("pass")
    again = train(tmp_path, "resume", run_id=run_id)
    assert (again.begun["error"], again.begun["attempt"]) == (None, 1)
    again.do("log", 10, 20)
    again.do("end", "completed")
    deliver(tmp_path)
    assert steps_of(run_id, tmp_path) == [(step // 10, step) for step in range(20)]
    assert quark.open_run(run_id, tmp_path).context.run.name == "n"


@pytest.mark.long
@pytest.mark.parametrize("strict", [False, True])
def test_who_requires_the_service_or_is_strict_is_refused(strict, train, proxied, tmp_path):
    first = train(tmp_path, variables=launch(0), strict_mode=strict)
    first.do("end", "interrupted")
    proxied.set_mode("hang")
    required = {} if strict else {"QUARK_REQUIRE_SERVICE": "1"}
    required["QUARK_OFFLINE"] = "allow"
    variables = {**launch(1), **required}
    begun = train(tmp_path, variables=variables, patience_s=None, strict_mode=strict).begun
    assert begun["error"] == "StoreUnavailableError"
    assert ("strict" if strict else "QUARK_REQUIRE_SERVICE") in begun["message"]
    run_id = first.begun["run_id"]
    begun = train(tmp_path, "resume", variables, patience_s=None, run_id=run_id).begun
    assert begun["error"] == "StoreUnavailableError"


@pytest.mark.long
def test_a_bad_setting_is_named(train, service, tmp_path):
    begun = train(tmp_path, variables={"QUARK_OFFLINE": "maybe"}).begun
    assert begun["error"] == "SchemaValidationError"
    assert "QUARK_OFFLINE" in begun["message"]


@pytest.mark.long
def test_a_key_that_is_refused_stops_first_starts_and_no_restart(
    train, service, tmp_path, monkeypatch
):
    place = tmp_path / "key"
    place.write_text(service.key)
    monkeypatch.delenv("QUARK_USER_KEY")
    monkeypatch.setenv("QUARK_USER_KEY_FILE", str(place))
    first = train(tmp_path, variables=launch(0))
    first.do("log", 0, 5)
    first.kill()
    service.revoke(service.key)
    begun = train(tmp_path / "new", variables={"QUARK_OFFLINE": "allow"}).begun
    assert begun["error"] == "StoreUnauthorizedError"
    again = train(tmp_path, variables={**launch(1), **BRIEF_END})
    assert (again.begun["error"], again.begun["attempt"]) == (None, 1)
    assert "QUARK_USER_KEY" in again.begun["message"]
    assert service.key not in again.begun["message"]
    again.do("log", 5, 10)
    again.do("end", "completed")
    place.write_text(service.make_key("default", "read", "ingest"))
    assert deliver(tmp_path) == {"delivered"}
    run_id = first.begun["run_id"]
    assert steps_of(run_id, tmp_path) == [(step // 5, step) for step in range(10)]


@pytest.mark.long
@pytest.mark.parametrize("gone", ["trashed", "removed"])
def test_what_the_service_refuses_is_kept_whole(gone, train, proxied, service, tmp_path, caplog):
    first = train(tmp_path, variables=launch(0))
    run_id = first.begun["run_id"]
    first.do("log", 0, 5)
    first.do("end", "interrupted")
    proxied.set_mode("refuse")
    again = train(tmp_path, variables={**launch(1), **BRIEF_END})
    again.do("log", 5, 10)
    again.do("end", "completed")
    put_away(tmp_path / "server", run_id, gone)
    proxied.set_mode("pass")
    deliver(tmp_path)
    kept = recovery.Quarantine(
        tmp_path / ".quark" / "runs" / run_id / "quarantine" / "service", "service"
    ).load()
    points = [item for item in kept if item.batch.kind == "metric"]
    assert sum(item.batch.count for item in points) == 5
    said = {item.reason for item in recovery.count_quarantined(tmp_path)}
    assert any(gone.removesuffix("ed") in reason for reason in said)
    assert all("its start was rejected" in item.reason for item in points)


def put_away(folder, run_id, gone):
    from quark_backends.embedded.backend import EmbeddedBackend
    from quark_core.backends.contract import BackendConfig

    store = EmbeddedBackend(BackendConfig(storage_dir=folder / "workspaces" / "default"))
    store.trash_runs([run_id])
    if gone == "removed":
        store.collect_trash()
    store.close()


@pytest.mark.long
def test_reading_in_such_a_run_waits_for_the_service_like_after_any_start(
    proxied, fast_lanes, tmp_path, monkeypatch
):
    monkeypatch.setenv("QUARK_OFFLINE", "allow")
    proxied.set_mode("refuse")
    session = quark.start_run(project="p", storage_dir=tmp_path)
    with session, quark.MetricsLogger(session) as metrics:
        metrics.log("m", 1.0, step=0)
        session.flush("durable")
        with pytest.raises(quark.SessionStoreError, match="did not acknowledge"):
            session.flush(timeout_s=0.2)
        monkeypatch.setenv("QUARK_PERSISTENCE_TIMEOUT_SECONDS", "0.2")
        with pytest.raises(quark.SessionStoreError, match="did not acknowledge"):
            metrics.read()
        assert session.run_path == f"{proxied.url}/v1/runs/{session.run_id}"
        monkeypatch.setenv("QUARK_PERSISTENCE_TIMEOUT_SECONDS", "30")
        proxied.set_mode("pass")
        assert [record.value for record in metrics.read()] == [1.0]
        assert session.reload().run.attempt == 0
    assert session.report_delivery().complete


@pytest.mark.long
def test_all_ranks_of_a_restarted_launch_begin(train, proxied, tmp_path):
    def ranks(restart, **arguments):
        places = [None, None]

        def begin(rank):
            variables = launch(restart, rank=rank, size=2)
            places[rank] = train(tmp_path, variables=variables, ranks="all", **arguments)

        threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return places

    first = ranks(0)
    run_id = first[0].begun["run_id"]
    for rank, training in enumerate(first):
        training.do("log", 100 * rank, 100 * rank + 5)
        training.kill()
    proxied.set_mode("hang")
    again = ranks(1, patience_s=None)
    assert [one.begun["attempt"] for one in again] == [1, 1]
    assert {one.begun["run_id"] for one in again} == {run_id}
    for rank, training in enumerate(again):
        training.do("log", 100 * rank + 5, 100 * rank + 10)
    proxied.set_mode("pass")
    again[1].do("end", "completed")
    again[0].do("end", "completed")
    deliver(tmp_path)
    assert steps_of(run_id, tmp_path) == sorted(
        (step % 100 // 5, step) for rank in range(2) for step in range(100 * rank, 100 * rank + 10)
    )
    assert quark.open_run(run_id, tmp_path).status == "completed"
    assert not recovery.count_quarantined(tmp_path)
