"""Trials, logs and exchanges of a `RunStore` are the same over SQLite and over PostgreSQL."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from shared_runs import StoredRun, open_over_postgres, open_over_sqlite

from quark_core.backends.coordination import NewTrial, TrialWish
from quark_core.errors import SchemaValidationError
from quark_core.records.sweeps import TrialResult
from quark_core.system.process import current_process


@pytest.fixture(params=["sqlite", "postgres"])
def run_store(request, tmp_path):
    if request.param == "sqlite":
        opened = open_over_sqlite(tmp_path)
    else:
        opened = open_over_postgres(request.getfixturevalue("postgres_database"))
    with opened as store:
        yield store


@pytest.fixture
def sweep(run_store):
    made = run_store.open_sweep("p", "lr", {"metric": "loss"}, max_failures=2)
    added = [NewTrial(parameters={"lr": place / 10}) for place in range(60)]
    run_store.add_trials(made.id, added, key="first")
    return made


def claim(run_store, sweep, request, wish=None):
    return run_store.claim_trial(
        sweep.id, request_id=request, worker=current_process(), lease_s=60.0, wish=wish
    )


def test_many_threads_have_each_trial_once(run_store, sweep):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: claim(run_store, sweep, f"r{n}"), range(70)))
    given = [trial for trial in found if trial is not None]
    assert sorted((t.number, t.token) for t in given) == [(n, 1) for n in range(60)]
    assert run_store.load_sweep(sweep.id).counts == {"running": 60}


def test_one_request_at_the_same_moment_is_one_claim(run_store, sweep):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: claim(run_store, sweep, "same"), range(16)))
    # Over PostgreSQL several take one each at first, and it is not always the first that stays.
    (given,) = {(trial.number, trial.token) for trial in found}
    assert given in [(number, 1) for number in range(8)]
    assert run_store.load_sweep(sweep.id).counts == {"waiting": 59, "running": 1}


def test_of_many_who_add_at_once_the_first_does(run_store, sweep):
    def add(n):
        trials = [NewTrial(parameters={"from": n}) for _ in range(n + 1)]
        return run_store.add_trials(sweep.id, trials, key="rung-1")

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(add, range(8)))
    assert all(trials == found[0] for trials in found)
    assert [trial.number for trial in found[0]] == list(range(60, 60 + len(found[0])))


def test_a_wish_is_kept_to(run_store, sweep):
    wish = TrialWish(where="param.lr >= 1.0")
    assert [claim(run_store, sweep, f"a{n}", wish).number for n in range(2)] == [10, 11]
    assert claim(run_store, sweep, "b", TrialWish(number=10)) is None
    assert claim(run_store, sweep, "c", TrialWish(number=40)).number == 40


def test_entries_of_many_threads_have_numbers_without_gaps(run_store):
    def append(n):
        texts = [f"{n}.{place}" for place in range(5)]
        once = run_store.append_entries("log", texts, request_id=str(n))
        assert run_store.append_entries("log", texts, request_id=str(n)) == once
        return once.first, texts

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(append, range(20)))
    texts = run_store.read_entries("log", 0)
    assert len(texts) == 100
    assert all(texts[first : first + 5] == appended for first, appended in found)


def test_a_run_renews_and_settles_its_trial(run_store, sweep):
    run = StoredRun(run_store)
    given = claim(run_store, sweep, "r")
    told = {"sweep_id": sweep.id, "number": given.number, "token": given.token}
    writer = run.start(trial=told)
    assert run_store.load_run(run.run_id).trial == given.claim
    writer.lifecycle("heartbeat", {})
    renewed = run_store.list_trials(sweep.id, limit=1)[0]
    assert renewed.run_id == run.run_id
    assert renewed.lease_until > given.lease_until
    result = {"state": "completed", "values": [0.5], "step": 7}
    writer.lifecycle("status", {"status": "completed", "trial": result})
    settled = run_store.list_trials(sweep.id, limit=1)[0]
    assert (settled.state, settled.values, settled.step) == ("completed", (0.5,), 7)
    late = run_store.settle_trial(
        sweep.id, given.number, given.token, TrialResult(state="failed"), lease_s=60.0
    )
    assert late == settled


def test_one_of_many_exchanges_succeeds(run_store):
    run = StoredRun(run_store)
    run.start()

    def take(worker):
        return run_store.compare_and_set(run.run_id, "by", None, worker, by="me")

    def take_group(worker):
        return run_store.compare_and_set_group("project", "a/b", "by", None, worker, by="me")

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(take, range(8))) == [False] * 7 + [True]
        assert sorted(pool.map(take_group, range(8))) == [False] * 7 + [True]


def test_an_unknown_sweep_is_refused(run_store):
    for ask in (
        lambda: run_store.load_sweep("s0"),
        lambda: run_store.list_trials("s0"),
        lambda: run_store.update_sweep("s0", "paused", by="me"),
        lambda: run_store.settle_trial("s0", 0, 1, None, lease_s=1.0),
    ):
        with pytest.raises(SchemaValidationError, match="does not exist in this store"):
            ask()
