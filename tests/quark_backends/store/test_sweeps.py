"""Trials are claimed, renewed and settled by the records of their runs; fields are exchanged."""

import threading
import time

import msgspec
import pytest
from stores import Store

import quark
from quark_backends.store.writing import trials
from quark_backends.store.writing.trials import append_entries
from quark_core.backends.coordination import MOST_LOSSES, NewTrial
from quark_core.errors import SchemaValidationError
from quark_core.records.sweeps import TrialClaim, TrialResult
from quark_core.system.process import ProcessIdentity, current_process

GONE = ProcessIdentity(current_process().host, 2**22 + 1, "1")


@pytest.fixture
def sweep(store):
    made = trials.open_sweep(store.connection, "project", "lr", {"metric": "loss"}, 2)
    added = [NewTrial(parameters={"lr": 0.1 * (place + 1)}) for place in range(3)]
    trials.add_trials(store.connection, made.id, added, "first")
    return made


def claim(store, sweep, request="r", worker=None, lease_s=60.0):
    worker = current_process() if worker is None else worker
    return trials.claim_trial(store.connection, sweep.id, request, worker, lease_s, None)


def load(store, sweep, number):
    return store.reader.list_trials(sweep.id, start=number, limit=1)[0]


def begin(store, given):
    """Begin the next attempt of the store's run with a trial; returns its writer."""
    store.attempt += 1
    claimed = msgspec.to_builtins(given.claim)
    return store.begin(store.attempt, trial=claimed)


def test_a_start_that_names_a_claim_makes_the_run_that_of_the_trial(store, sweep):
    given = claim(store, sweep)
    begin(store, given)
    assert load(store, sweep, 0).run_id == store.run_id
    stored = store.reader.load_run(store.run_id)
    assert stored.trial == given.claim
    assert not stored.superseded


def test_a_heartbeat_renews_the_lease_and_that_of_an_older_token_does_not(store, sweep):
    given = claim(store, sweep, lease_s=0.05)
    writer = begin(store, given)
    time.sleep(0.06)
    writer.lifecycle("heartbeat", {})
    renewed = load(store, sweep, 0)
    assert renewed.lease_until > given.lease_until
    for request in ("a", "b"):  # the other two
        claim(store, sweep, request)
    time.sleep(0.06)
    taken = claim(store, sweep, "c")
    assert (taken.number, taken.token, taken.losses) == (0, 2, 1)
    assert store.reader.load_run(store.run_id).superseded
    writer.lifecycle("heartbeat", {})
    assert load(store, sweep, 0).lease_until == taken.lease_until
    writer.lifecycle("status", {"status": "completed", "trial": {"state": "completed"}})
    assert load(store, sweep, 0).state == "running"


@pytest.mark.parametrize(
    ("data", "state", "failures"),
    [
        ({"status": "completed"}, "completed", 0),
        ({"status": "failed"}, "waiting", 1),
        ({"status": "interrupted"}, "suspended", 0),
        ({"status": "failed", "trial": {"state": "failed", "reason": "bad"}}, "failed", 1),
        ({"status": "completed", "trial": {"state": "pruned", "values": [0.5]}}, "pruned", 0),
        ({"status": "completed", "trial": {"state": "nonsense"}}, "completed", 0),
    ],
)
def test_the_end_of_the_run_settles_the_trial(store, sweep, data, state, failures):
    writer = begin(store, claim(store, sweep))
    writer.lifecycle("status", data)
    found = load(store, sweep, 0)
    assert (found.state, found.failures) == (state, failures)
    assert (found.settled_at is not None) == found.is_final


def test_a_trial_that_fails_as_often_as_allowed_is_broken(store, sweep):
    for request, state in (("a", "waiting"), ("b", "broken")):
        begin(store, claim(store, sweep, request)).lifecycle("status", {"status": "failed"})
        assert load(store, sweep, 0).state == state
    assert load(store, sweep, 0).reason == "failed 2 times: its run failed"


def test_a_failure_that_is_told_twice_counts_once(store, sweep):
    given = claim(store, sweep)
    told = TrialResult(state="waiting", reason="out of memory")
    for _ in range(2):
        found = trials.settle_trial(store.connection, given.claim, told, 60.0)
    assert (found.state, found.failures, found.reason) == ("waiting", 1, "out of memory")


def test_a_trial_whose_worker_is_gone_is_given_to_the_next_until_too_many_are(store, sweep):
    for number in range(3):
        claim(store, sweep, f"first{number}", GONE)
    for loss in range(1, MOST_LOSSES):
        taken = claim(store, sweep, f"again{loss}", GONE)
        assert (taken.number, taken.token, taken.losses) == (0, loss + 1, loss)
    assert claim(store, sweep, "last").number == 1
    assert load(store, sweep, 0).state == "broken"


def test_the_same_request_has_the_same_trial(store, sweep):
    first, again = claim(store, sweep, "r"), claim(store, sweep, "r")
    assert (first.number, first.token) == (again.number, again.token)
    assert claim(store, sweep, "s").number == 1


def test_a_cancelled_sweep_keeps_what_runs_and_cancels_the_rest(store, sweep):
    given = claim(store, sweep)
    found = trials.update_sweep(store.connection, sweep.id, "cancelled")
    assert found.counts == {"running": 1, "cancelled": 2}
    assert claim(store, sweep, "other") is None
    with pytest.raises(SchemaValidationError, match="cancelled, so it cannot become"):
        trials.update_sweep(store.connection, sweep.id, "running")
    told = TrialResult(state="suspended")
    assert trials.settle_trial(store.connection, given.claim, told, 60.0).state == "cancelled"


def test_a_claim_whose_sweep_is_unknown_costs_a_run_nothing(store):
    writer = begin(store, _Claimed(TrialClaim("sabsent", 3, 1)))
    writer.lifecycle("heartbeat", {})
    writer.lifecycle("status", {"status": "completed"})
    stored = store.reader.load_run(store.run_id)
    assert (stored.run.status, stored.superseded) == ("completed", False)


class _Claimed:
    def __init__(self, claim):
        self.claim = claim


def test_entries_are_appended_once_and_read_in_their_order(store):
    for request, texts in (("a", ["1", "2"]), ("b", ["3"]), ("a", ["1", "2"])):
        append_entries(store.connection, "log", texts, request)
    assert store.reader.read_entries("log", 0, limit=10) == ["1", "2", "3"]
    assert store.reader.read_entries("log", 1, limit=1) == ["2"]
    assert (
        store.reader.read_entries("log", 3, limit=10)
        == store.reader.read_entries("other", 0, limit=1)
        == []
    )


def test_much_text_is_read_in_parts(store):
    text = "x" * 900_000
    for request in range(4):
        append_entries(store.connection, "log", [text] * 5, str(request))
    assert len(store.reader.read_entries("log", 0, limit=100)) == 17
    assert len(store.reader.read_entries("log", 17, limit=100)) == 3


def test_of_many_at_once_one_is_told_that_it_has_set_a_field(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        pass
    found = []

    def take(worker):
        found.append(quark.open_run(session.run_id, tmp_path).compare_and_set("by", None, worker))

    threads = [threading.Thread(target=take, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [False, False, False, True]


def test_a_session_sets_a_field_that_has_a_value(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        session.annotate(phase=1)
        assert session.compare_and_set("phase", 1, 2)
        assert not session.compare_and_set("phase", 1, 3)
        assert not session.compare_and_set("phase", True, 3)
        assert session.fields["phase"] == 2
        assert session.compare_and_set("phase", 2.0, None)
        assert session.compare_and_set("phase", None, [1, {"a": None}])
    assert quark.open_run(session.run_id, tmp_path).fields["phase"] == [1, {"a": None}]


def test_fields_of_projects_and_groups_are_set_where_they_have_a_value(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path):
        pass
    project = quark.project("p", storage_dir=tmp_path)
    for described in (project, project.group("paper/fig3")):
        assert described.compare_and_set("best", None, 0.5)
        assert not described.compare_and_set("best", None, 0.6)
        assert described.compare_and_set("best", 0.5, 0.6)
        assert described.fields == {"best": 0.6}
    with pytest.raises(SchemaValidationError, match="does not exist in this store"):
        quark.project("absent", storage_dir=tmp_path).compare_and_set("a", None, 1)


def test_a_run_of_a_sweep_elsewhere_settles_nothing_of_one_of_the_same_name(store, sweep, tmp_path):
    other = Store(tmp_path / "elsewhere")
    theirs = trials.open_sweep(other.connection, "project", "lr", {"metric": "loss"}, 2)
    trials.add_trials(other.connection, theirs.id, [NewTrial(parameters={})], "first")
    foreign = claim(other, theirs)
    other.close()
    held = claim(store, sweep)
    assert (held.number, held.token) == (foreign.number, foreign.token)
    writer = begin(store, foreign)
    writer.lifecycle("status", {"status": "completed", "trial": {"state": "completed"}})
    kept = load(store, sweep, 0)
    assert (kept.state, kept.run_id) == ("running", None)
    assert store.reader.load_run(store.run_id).trial == foreign.claim
