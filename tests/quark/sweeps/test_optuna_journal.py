"""Optuna's journal over a log of the store: what strangers wrote, lost replies, questions saved."""

import json
import pickle
import uuid

import pytest

pytest.importorskip("optuna")

import optuna
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.storages import JournalStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState
from tiers import count_examples

from quark.sweeps.optuna_search import EntryJournal
from quark_backends.embedded.plugin import quark_register_backends
from quark_core.backends.contract import BackendConfig
from quark_core.errors import SessionStoreError

LOG = "sweep/optuna"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    config = BackendConfig(storage_dir=tmp_path_factory.mktemp("store"), run_id="run")
    backend = quark_register_backends()[0].open(config)
    yield backend
    backend.close()


class Watched:
    """A store that counts what it is asked, and may lose a reply or answer in parts."""

    def __init__(self, store):
        self.store = store
        self.reads = 0
        self.appends = 0
        self.lost = 0
        self.most = None

    def append_entries(self, log, entries, *, request_id):
        self.appends += 1
        appended = self.store.append_entries(log, entries, request_id=request_id)
        if self.lost:
            self.lost -= 1
            raise SessionStoreError("the reply is lost")
        return appended

    def read_entries(self, log, start, *, limit):
        self.reads += 1
        return self.store.read_entries(log, start, limit=min(limit, self.most or limit))


@pytest.fixture
def watched(store):
    return Watched(store)


@pytest.fixture
def log():
    return f"{uuid.uuid4().hex}/optuna"


def begin(store, log, trials=2):
    storage = JournalStorage(EntryJournal(store, log))
    study_id = storage.create_new_study([StudyDirection.MINIMIZE], "s")
    for _ in range(trials):
        storage.create_new_trial(study_id)
    return storage, study_id


def test_what_was_appended_alone_is_not_asked_for(watched, log):
    storage, _ = begin(watched, log, trials=1)
    watched.reads = watched.appends = 0
    storage.set_trial_intermediate_value(0, 1, 0.5)
    assert (watched.appends, watched.reads) == (1, 0)
    assert storage.get_trial(0).intermediate_values == {1: 0.5}
    assert watched.reads == 1


def test_what_others_appended_before_is_seen(watched, log):
    storage, study_id = begin(watched, log, trials=1)
    other = JournalStorage(EntryJournal(watched, log))
    other.create_new_trial(study_id)
    assert storage.create_new_trial(study_id) == 2
    assert len(storage.get_all_trials(study_id)) == 3


def test_the_store_is_asked_once_while_it_is_held(watched, log):
    journal = EntryJournal(watched, log)
    storage = JournalStorage(journal)
    study_id = storage.create_new_study([StudyDirection.MINIMIZE], "s")
    other = JournalStorage(EntryJournal(watched, log))
    other.create_new_trial(study_id)
    watched.reads = 0
    with journal.holding():
        for _ in range(5):
            assert len(storage.get_all_trials(study_id)) == 1
        assert watched.reads == 1
        other.create_new_trial(study_id)
        assert len(storage.get_all_trials(study_id)) == 1
        storage.create_new_trial(study_id)  # stands behind what the other one has appended
        assert len(storage.get_all_trials(study_id)) == 3
    other.create_new_trial(study_id)
    assert len(storage.get_all_trials(study_id)) == 4


def test_a_lost_reply_counts_once(watched, log):
    storage, study_id = begin(watched, log, trials=0)
    watched.lost = 2
    assert storage.create_new_trial(study_id) == 0
    assert len(storage.get_all_trials(study_id)) == 1
    watched.lost = 3
    with pytest.raises(SessionStoreError, match="the reply is lost"):
        storage.create_new_trial(study_id)


def test_an_answer_in_parts_is_read_to_its_end(watched, log):
    storage, study_id = begin(watched, log, trials=0)
    for _ in range(3):
        trial_id = storage.create_new_trial(study_id)
        storage.set_trial_user_attr(trial_id, "long", "x" * 500_000)
    watched.most = 2
    again = JournalStorage(EntryJournal(watched, log))
    trials = again.get_all_trials(study_id)
    assert [len(trial.user_attrs["long"]) for trial in trials] == [500_000] * 3


def test_of_two_who_append_the_same_once_the_first_does(store, log):
    begin(store, log, trials=0)
    for value in ("first", "second"):
        journal = EntryJournal(store, log)
        storage = JournalStorage(journal)
        with journal.appending_once("the same"):
            storage.set_study_user_attr(0, "who", value)
    assert JournalStorage(EntryJournal(store, log)).get_study_user_attrs(0) == {"who": "first"}


def test_a_journal_without_a_way_to_open_its_store_is_not_pickled(store, log):
    with pytest.raises(TypeError, match="pass reopen= to pickle it"):
        pickle.dumps(EntryJournal(store, log))


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('a stranger ran this')",))


def test_a_pickle_of_a_stranger_is_never_loaded(store, log):
    _, study_id = begin(store, log, trials=0)
    bomb = pickle.dumps(Bomb()).hex()
    distributions = {
        name: optuna.distributions.distribution_to_json(
            optuna.distributions.FloatDistribution(0, 1)
        )
        for name in "xy"
    }
    done = {
        "op_code": 4, "worker_id": "w", "study_id": study_id, "state": 1, "value": 1.0,
        "datetime_start": "2026-01-01", "datetime_complete": "2026-01-01", "values": None,
        "distributions": distributions, "params": {"x": 0.5, "y": 0.5},
    }  # fmt: skip
    planted = {"op_code": 9, "worker_id": "w", "trial_id": 0}
    entries = [
        done,
        {**planted, "system_attr": {"cma:optimizer:0": bomb}},
        {**done, "system_attrs": {"cma:optimizer:0": bomb}},
        done,
    ]
    store.append_entries(log, [json.dumps(entry) for entry in entries], request_id=log)
    storage = JournalStorage(EntryJournal(store, log))
    trials = storage.get_all_trials(study_id)
    assert [trial.system_attrs for trial in trials] == [{}, {}]
    sampler = optuna.samplers.CmaEsSampler(n_startup_trials=1)
    study = optuna.load_study(study_name="s", storage=storage, sampler=sampler)
    trial = study.ask()
    assert 0 <= trial.suggest_float("x", 0, 1) <= 1


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 6) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FLOAT = '{"name": "FloatDistribution", "attributes": {"low": 0, "high": 1}}'
CHOICE = '{"name": "CategoricalDistribution", "attributes": {"choices": ["a", "b"]}}'
FIELDS = {
    "worker_id": st.just("w"),
    "study_id": st.integers(0, 2),
    "trial_id": st.integers(0, 3),
    "study_name": st.sampled_from("st"),
    "directions": st.lists(st.integers(0, 2), max_size=2),
    "user_attr": st.dictionaries(st.sampled_from("ab"), ANY, max_size=2),
    "system_attr": st.dictionaries(st.sampled_from(["a", "cma:x"]), ANY, max_size=2),
    "param_name": st.sampled_from("xy"),
    "param_value_internal": st.floats() | st.integers(-1, 3),
    "distribution": st.sampled_from([FLOAT, CHOICE, "{}", "no"]),
    "state": st.integers(0, 4),
    "value": st.none() | st.floats(),
    "values": st.none() | st.lists(st.floats(), max_size=2),
    "datetime_start": st.sampled_from([None, "2026-01-01T00:00:00+00:00", "soon"]),
    "datetime_complete": st.sampled_from([None, "2026-01-01T00:00:00+00:00", "later"]),
    "distributions": st.dictionaries(st.sampled_from("xy"), st.sampled_from([FLOAT, CHOICE])),
    "params": st.dictionaries(st.sampled_from("xy"), st.floats() | st.integers(-1, 3)),
    "step": st.integers(),
    "intermediate_value": st.none() | st.floats(),
    "intermediate_values": st.dictionaries(st.sampled_from(["1", "x"]), st.floats()),
}


@st.composite
def entries(draw):
    """What looks like an operation: most fields are there, and some are anything at all."""
    entry = {"op_code": draw(st.integers(0, 11))}
    for name, values in FIELDS.items():
        if draw(st.integers(0, 9)):
            entry[name] = draw(values if draw(st.integers(0, 9)) else ANY)
    return json.dumps(entry)


@pytest.mark.long
@settings(max_examples=count_examples(300))
@given(st.lists(entries() | st.text(max_size=20), min_size=1, max_size=12))
def test_no_entry_of_a_stranger_ends_a_search(store, written):
    log = f"{uuid.uuid4().hex}/optuna"
    begin(store, log)
    kept = [text.replace("\0", "") for text in written]
    store.append_entries(log, kept, request_id=log)
    one, other = (JournalStorage(EntryJournal(store, log)) for _ in range(2))
    study_ids = [study._study_id for study in one.get_all_studies()]
    assert study_ids == [study._study_id for study in other.get_all_studies()]
    for study_id in study_ids:
        ours, theirs = one.get_all_trials(study_id), other.get_all_trials(study_id)
        assert [repr(trial) for trial in ours] == [repr(trial) for trial in theirs]
    if study_ids:
        number = one.create_new_trial(study_ids[-1])
        assert one.get_trial(number).state == TrialState.RUNNING
