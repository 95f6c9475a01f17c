"""A search by Optuna: what becomes of its trials and ours, whoever dies on the way."""

import itertools
import math
import subprocess
import sys
import uuid

import pytest

pytest.importorskip("optuna")

import optuna
from optuna.trial import TrialState

import quark
from quark.sweeps import optuna_samplers
from quark.sweeps.definition import SweepDefinition
from quark.sweeps.optuna_samplers import describe_objects
from quark.sweeps.optuna_search import OptunaSearch
from quark.sweeps.search_algorithms import open_search
from quark_backends.embedded.plugin import quark_register_backends
from quark_core.backends.contract import BackendConfig
from quark_core.backends.coordination import NewTrial
from quark_core.backends.registry import BackendRegistry
from quark_core.errors import SchemaValidationError
from quark_core.hookspecs import hookimpl
from quark_core.records.sweeps import TrialResult
from quark_core.system.process import current_process

SPACE = {
    "lr": {"type": "uniform", "low": 1e-4, "high": 1.0, "log": True},
    "layers": {"type": "integers", "low": 1, "high": 8},
    "optimizer": ["adam", "sgd"],
    "epochs": 3,
}


class Bench:
    """A sweep in a store, whose workers are played one call at a time."""

    def __init__(self, store, name, **changes):
        given = {
            "space": SPACE, "metric": "acc", "mode": "max", "search": "tpe", "trials": 10,
            **changes,
        }  # fmt: skip
        self.store = store
        self.given = given.pop("given", None)
        self.definition = SweepDefinition.build(given)
        self.id = store.open_sweep("p", name, self.definition.to_dict(), max_failures=2).id

    def open(self, patience_s=10.0):
        """The search of one more worker."""
        methods = optuna_samplers.choose_methods(self.definition, self.given)
        return OptunaSearch(self.definition, self.id, self.store, methods, patience_s=patience_s)

    def list(self):
        return self.store.list_trials(self.id)

    def add(self, proposed):
        for proposal in proposed:
            self.store.add_trials(self.id, proposal.trials, key=proposal.key)

    def claim(self):
        return self.store.claim_trial(
            self.id, request_id=uuid.uuid4().hex, worker=current_process(), lease_s=60.0
        )

    def next(self, search):
        """The next trial, as a worker gets it; None where there will be none."""
        trial = self.claim()
        if trial is None:
            proposed = search.propose(self.list())
            if proposed is None:
                return None
            self.add(proposed)
            trial = self.claim()
        return trial

    def settle(self, trial, state="completed", values=None, **more):
        result = TrialResult(state=state, values=values, **more)
        return self.store.settle_trial(self.id, trial.number, trial.token, result, lease_s=60.0)

    def study(self):
        """What Optuna knows, read anew."""
        search = self.open()
        search.propose(self.list())
        return search._open()[0]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    config = BackendConfig(storage_dir=tmp_path_factory.mktemp("store"), run_id="run")
    backend = quark_register_backends()[0].open(config)
    yield backend
    backend.close()


@pytest.fixture
def make(store, request):
    # A name of the test's own: Hyperband chooses brackets by the id that comes from it.
    names = (f"{request.node.name} {count}" for count in itertools.count())
    return lambda **changes: Bench(store, next(names), **changes)


def score(parameters):
    return -((math.log10(parameters["lr"]) + 2) ** 2) - (parameters["layers"] - 5) ** 2 / 10


def work(bench, search):
    """All trials, one after the other; their parameters."""
    seen = []
    while (trial := bench.next(search)) is not None:
        seen.append(trial.parameters)
        bench.settle(trial, values=(score(trial.parameters),))
    return seen


@pytest.mark.sampled
@pytest.mark.parametrize("search", ["tpe", "cmaes", "tpe(startup=2)", "cmaes(population=4)"])
def test_a_search_knows_what_all_trials_came_to(make, search):
    bench = make(search=search)
    seen = work(bench, bench.open())
    assert len(seen) == 10
    assert list(seen[0]) == list(SPACE)
    for parameters in seen:
        assert 1e-4 <= parameters["lr"] <= 1
        assert parameters["layers"] in range(1, 9)
        assert parameters["optimizer"] in ("adam", "sgd")
        assert parameters["epochs"] == 3
    trials = bench.study().get_trials()
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 10
    assert [trial.value for trial in trials] == [score(parameters) for parameters in seen]
    for trial, parameters in zip(trials, seen, strict=True):
        assert {**trial.params, "epochs": 3} == parameters


@pytest.mark.parametrize("search", ["tpe", "cmaes"])
def test_one_worker_alone_draws_the_same_each_time(make, search):
    first, second = make(search=search, trials=8, seed=3), make(search=search, trials=8, seed=3)
    other = make(search=search, trials=8, seed=4)
    seen = work(first, first.open())
    assert work(second, second.open()) == seen
    assert work(other, other.open()) != seen


def test_what_follows_is_the_same_whoever_asks(make):
    bench, mixed = make(search="cmaes", trials=30), make(search="cmaes", trials=30)
    seen = work(bench, bench.open())
    for parameters in seen:  # a worker of its own for each trial
        trial = mixed.next(mixed.open())
        assert trial.parameters == parameters
        mixed.settle(trial, values=(score(parameters),))
    assert max(map(score, seen[20:])) > max(map(score, seen[:5]))


def test_workers_that_begin_together_do_not_draw_the_same(make):
    bench = make()
    searches = [bench.open() for _ in range(4)]
    for search in searches:
        bench.add(search.propose(bench.list()))
    drawn = [trial.parameters["lr"] for trial in bench.list()]
    assert len(set(drawn)) == 4


def test_a_trial_that_failed_keeps_its_trial_in_optuna_until_it_is_broken(make):
    bench = make(trials=2)
    search = bench.open()
    for attempt in (1, 2):
        trial = bench.next(search)
        assert (trial.number, trial.token) == (0, attempt)
        known = search._open()[0].get_trials()
        assert [each.state for each in known] == [TrialState.RUNNING]
        bench.settle(trial, state="waiting", reason="no memory")
    assert bench.list()[0].state == "broken"
    trial = bench.next(search)
    assert trial.number == 1
    bench.settle(trial, values=(1.0,))
    states = [each.state for each in bench.study().get_trials()]
    assert states == [TrialState.FAIL, TrialState.COMPLETE]


def test_all_ways_to_end_are_told(make):
    bench = make(trials=5)
    search = bench.open()
    ends = [
        ("completed", (2.0,), TrialState.COMPLETE),
        ("pruned", (1.0,), TrialState.PRUNED),
        ("failed", None, TrialState.FAIL),
        ("pruned", None, TrialState.PRUNED),
        ("completed", (3.0,), TrialState.COMPLETE),
    ]
    for state, values, _ in ends:
        bench.settle(bench.next(search), state=state, values=values, step=7)
    trials = bench.study().get_trials()
    assert [trial.state for trial in trials] == [told for _, _, told in ends]
    assert [trial.value for trial in trials] == [2.0, 1.0, None, None, 3.0]
    assert trials[1].intermediate_values == {7: 1.0}


def test_values_that_come_late_are_waited_for(make):
    bench = make(trials=3)
    search = bench.open()
    trial = bench.next(search)
    bench.settle(trial)  # its figures are on their way
    assert search.propose(bench.list())
    assert search._open()[0].get_trials()[0].state == TrialState.RUNNING
    hasty = bench.open(patience_s=0.0)
    hasty.propose(bench.list())
    assert hasty._open()[0].get_trials()[0].state == TrialState.FAIL


def test_a_trial_whose_worker_died_before_it_was_added_is_added_by_another(make):
    bench = make(trials=2)
    (lost,) = bench.open().propose(bench.list())  # and dies
    other = bench.open()
    bench.settle(bench.next(other), values=(1.0,))
    assert other.propose(bench.list()) == []  # the worker may only be slow
    (adopted,) = bench.open(patience_s=0.0).propose(bench.list())
    assert adopted == lost
    bench.add([adopted])
    bench.add([lost])  # it was only slow
    assert len(bench.list()) == 2
    bench.settle(bench.claim(), values=(2.0,))
    assert other.propose(bench.list()) is None
    assert [trial.value for trial in bench.study().get_trials()] == [2.0, 1.0]


def test_a_trial_whose_worker_died_while_it_was_asked_for_is_completed(make):
    bench = make(trials=1)
    storage = bench.open()._open()[1]
    study_id = storage.get_study_id_from_name("seed-0")
    trial_id = storage.create_new_trial(study_id)
    lr = optuna.distributions.FloatDistribution(1e-4, 1.0, log=True)
    storage.set_trial_param(trial_id, "lr", 0.125, lr)
    (proposal,) = bench.open(patience_s=0.0).propose(bench.list())
    assert proposal.trials[0].parameters["lr"] == 0.125
    assert list(proposal.trials[0].parameters) == list(SPACE)


def test_of_two_who_complete_a_trial_the_first_decides(make):
    bench = make(trials=1)
    search = bench.open()
    (proposal,) = search.propose(bench.list())
    bench.add([proposal])
    # The other one wrote its own choice into the journal afterwards.
    layers = optuna.distributions.IntDistribution(1, 8)
    mine = proposal.trials[0].parameters["layers"]
    search._open()[1].set_trial_param(0, "layers", float(mine % 8 + 1), layers)
    bench.settle(bench.claim(), values=(1.0,))
    (told,) = bench.study().get_trials()
    assert told.params["layers"] == mine


def test_whoever_is_overtaken_while_it_asks_asks_again(make, monkeypatch):
    bench = make(trials=3)
    search, other = bench.open(), bench.open(patience_s=0.0)
    ask = optuna.study.Study.ask

    def overtaken(study, distributions):
        monkeypatch.undo()
        trial = ask(study)  # nothing is chosen yet
        bench.settle(bench.next(other), values=(1.0,))
        bench.add(other.propose(bench.list()))
        trial.suggest_float("lr", 1e-4, 1.0, log=True)
        return trial

    monkeypatch.setattr(optuna.study.Study, "ask", overtaken)
    assert search.propose(bench.list()) == []
    work(bench, search)
    assert len(bench.list()) == 3
    assert all(trial.is_final for trial in bench.list())


def test_a_sweep_has_no_more_trials_than_it_may(make, monkeypatch):
    bench = make(trials=1)
    one, other = bench.open(), bench.open()
    ask = optuna.study.Study.ask

    def beaten(study, distributions):
        monkeypatch.undo()
        bench.add(other.propose(bench.list()))
        return ask(study, distributions)

    monkeypatch.setattr(optuna.study.Study, "ask", beaten)
    assert one.propose(bench.list()) is None
    assert len(bench.list()) == 1
    bench.settle(bench.claim(), values=(1.0,))
    assert one.propose(bench.list()) is None
    # One more is asked for later, by a worker that may.
    bench.definition = SweepDefinition.build({**bench.definition.to_dict(), "trials": 2})
    assert bench.next(bench.open()).number == 1


def test_hyperband_stops_trials_at_its_rungs(make):
    bench = make(search="hyperband", budget=27, trials=12)
    search = bench.open()
    pruned = 0
    while (trial := bench.next(search)) is not None:
        assert search.list_rungs(trial) == (1, 3, 9)
        for rung in search.list_rungs(trial):
            if search.report(trial, (score(trial.parameters) - 1 / rung,), rung):
                bench.settle(trial, state="pruned", step=rung)
                pruned += 1
                break
        else:
            bench.settle(trial, values=(score(trial.parameters),), step=27)
    assert 2 <= pruned < 12
    trials = bench.study().get_trials()
    assert sum(trial.state == TrialState.PRUNED for trial in trials) == pruned
    assert all(set(trial.intermediate_values) <= {1, 3, 9} for trial in trials)


def test_a_figure_that_is_missing_ends_a_trial_and_a_report_that_comes_late_none(make):
    bench = make(search="hyperband", budget=27, trials=8)
    search = bench.open()
    stopped = []
    for _ in range(8):
        trial = bench.next(search)
        stopped.append(any(search.report(trial, (None,), rung) for rung in (1, 3, 9)))
        bench.settle(trial, state="pruned")
    # But for those whose first rung comes after the last report.
    assert stopped.count(True) >= 4
    assert search.propose(bench.list()) is None
    assert search.report(trial, (1.0,), 9) is False


def test_constraints_are_told_and_a_trial_without_them_has_failed(make):
    bench = make(trials=3, constraints=["latency_ms <= 20", "memory >= 1"])
    search = bench.open(patience_s=0.0)
    bench.settle(bench.next(search), values=(1.0,), constraints=(5.0, -1.0))
    bench.settle(bench.next(search), values=(0.5,), constraints=(-3.0, -2.0))
    bench.settle(bench.next(search), values=(0.7,))
    assert search.propose(bench.list()) is None
    study = bench.study()
    assert [trial.constraints for trial in study.get_trials()] == [
        {"latency_ms <= 20": 5.0, "memory >= 1": -1.0},
        {"latency_ms <= 20": -3.0, "memory >= 1": -2.0},
        {},
    ]
    assert study.get_trials()[2].state == TrialState.FAIL
    assert [trial.number for trial in study.best_trials] == [1]


def test_several_metrics_are_told(make):
    bench = make(trials=3, metric=["acc", "loss"], mode=["max", "min"])
    search = bench.open()
    for place in range(3):
        trial = bench.next(search)
        assert search.list_rungs(trial) == ()
        bench.settle(trial, values=(float(place), 5.0 - place))
    study = bench.study()
    assert [trial.values for trial in study.get_trials()] == [[0.0, 5.0], [1.0, 4.0], [2.0, 3.0]]
    assert [trial.number for trial in study.best_trials] == [2]


def test_a_users_trial_is_told_once_and_takes_no_place(make):
    bench = make(trials=2)
    for lr in (0.1, 7.0):  # the second is not of the space
        parameters = {"lr": lr, "layers": 2, "optimizer": "sgd", "epochs": 3}
        new = NewTrial(parameters=parameters, origin={"source": "added"})
        bench.store.add_trials(bench.id, [new], key=str(lr))
        bench.settle(bench.claim(), values=(lr,))
    one, other = bench.open(), bench.open()
    one._open(), other._open()
    bench.add(one.propose(bench.list()))
    bench.add(other.propose(bench.list()))
    assert len(bench.list()) == 4
    known = bench.study().get_trials()
    assert [trial.value for trial in known if trial.user_attrs] == [0.1]
    assert sum(not trial.user_attrs for trial in known) == 2


def test_choices_of_any_kind_come_back_as_they_were_given(make):
    space = {"depths": [[1, 2], [3, 4]], "flag": [1, True, "1", None], "size": [8]}
    bench = make(space=space, trials=12)
    seen = work_any(bench)
    for parameters in seen:
        assert parameters["depths"] in ([1, 2], [3, 4])
        assert parameters["size"] == 8
    assert {repr(parameters["flag"]) for parameters in seen} <= {"1", "True", "'1'", "None"}
    assert len({repr(parameters["flag"]) for parameters in seen}) > 2
    assert len(bench.study().get_trials(states=(TrialState.COMPLETE,))) == 12


def work_any(bench):
    search, seen = bench.open(), []
    while (trial := bench.next(search)) is not None:
        seen.append(trial.parameters)
        bench.settle(trial, values=(float(trial.number),))
    return seen


def test_objects_of_optuna_are_taken_and_named_in_the_definition(make):
    given = (optuna.samplers.RandomSampler(seed=1), optuna.pruners.MedianPruner(n_startup_trials=1))
    name = describe_objects(given)
    assert name == "optuna:RandomSampler+MedianPruner"
    bench = make(search=name, given=given, trials=4)
    search = bench.open()
    stopped = []
    while (trial := bench.next(search)) is not None:
        assert search.list_rungs(trial) is None
        stopped.append(search.report(trial, (-float(trial.number),), 1))
        bench.settle(trial, values=(1.0,))
    assert stopped[0] is False
    assert stopped[-1] is True
    with pytest.raises(SchemaValidationError, match="Run it with the script that created them"):
        open_search(bench.definition, bench.id, bench.store, None)


def test_a_sampler_that_has_tried_all_ends_the_sweep_for_everyone(make):
    given = optuna.samplers.GridSampler({"lr": [0.1, 0.2], "optimizer": ["adam", "sgd"]}, seed=0)
    space = {"lr": SPACE["lr"], "optimizer": SPACE["optimizer"]}
    bench = make(search="optuna:GridSampler", given=given, space=space, trials=None)
    seen = work_any(bench)
    assert len(seen) == 4
    assert bench.open().propose(bench.list()) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"search": "hyperband"}, "budget is required"),
        ({"search": "hyperband", "budget": 9, "metric": ["a", "b"]}, "must be one metric"),
        ({"search": "hyperband(rate=0.9)", "budget": 9}, "rate must be more than 0"),
        ({"search": "hyperband(least=10)", "budget": 9}, "least must be 1 to 9"),
        ({"search": "cmaes", "metric": ["a", "b"]}, "must be one metric"),
        ({"search": "cmaes", "space": {"o": ["a", "b"]}}, "requires a number in space"),
        ({"search": "tpe(speed=3)"}, "tpe has no setting 'speed'"),
        ({"search": "bohb"}, "search must be one of grid, random, halving, asha, tpe"),
    ],
)
def test_what_cannot_be_is_refused_when_the_search_is_opened(make, changes, message):
    bench = make(**changes)
    with pytest.raises(SchemaValidationError, match=message):
        open_search(bench.definition, bench.id, bench.store)


def test_a_sampler_that_reads_pickles_is_refused():
    with pytest.raises(SchemaValidationError, match='Use search="cmaes"'):
        describe_objects(optuna.samplers.CmaEsSampler())
    for wrong in (7, (), object(), (optuna.samplers.RandomSampler(),) * 2):
        with pytest.raises(SchemaValidationError, match="search must be a name, a sampler"):
            describe_objects(wrong)


class Plugin:
    seeds = []

    @staticmethod
    @hookimpl
    def quark_register_backends():
        return []

    @staticmethod
    @hookimpl
    def quark_register_samplers():
        def make(definition, seed):
            Plugin.seeds.append(seed)
            assert definition["metric"] == "acc"
            return optuna.samplers.RandomSampler(seed), optuna.pruners.MedianPruner()

        return {"mine": make, "wrong": lambda definition, seed: "no sampler", "no": 7}


def test_a_plugin_has_samplers_of_its_own(make, monkeypatch):
    registry = BackendRegistry()
    registry.register(Plugin, name="plugin")
    monkeypatch.setattr(optuna_samplers, "default_registry", lambda: registry)
    bench = make(search="mine", trials=3)
    assert len(work(bench, bench.open())) == 3
    assert len(set(Plugin.seeds)) >= 3
    for name, message in (("wrong", "of a plugin: search must be"), ("no", "one of .*mine, wrong")):
        with pytest.raises(SchemaValidationError, match=message):
            make(search=name).open()


def train_all(sweep):
    for trial in sweep:
        with trial.start_run() as session:
            metrics = quark.MetricsLogger(session)
            for step in range(1, 10):
                metrics.log("val/acc", trial["lr"] * step, step=step)


@pytest.mark.long
def test_one_seed_is_one_search_in_every_store(open_sweep, tmp_path):
    found = []
    for place in ("here", "there"):
        sweep = open_sweep(
            search="hyperband", budget=9, trials=12, stop=True, storage_dir=tmp_path / place
        )
        train_all(sweep)
        found.append([(t.parameters, t.state, t.values, t.step) for t in sweep.trials()])
    assert found[0] == found[1]


def test_a_sweep_by_optuna_runs_as_any_other(open_sweep):
    sweep = open_sweep(search="hyperband", budget=9, trials=6, stop=True)
    train_all(sweep)
    trials = sweep.trials()
    assert {trial.state for trial in trials} <= {"completed", "pruned"}
    assert [trial.number for trial in trials] == list(range(6))
    assert {"completed", "pruned"} <= {trial.state for trial in trials}
    assert sweep.best.values == (pytest.approx(9 * sweep.best.parameters["lr"]),)
    assert sweep.is_over


def test_nothing_of_optuna_is_imported_before_a_sweep_needs_it(tmp_path):
    script = f"""
import sys, quark
sweep = quark.sweep("s", project="p", space={{"x": quark.uniform(0, 1)}}, metric="m", mode="max",
                    search="random", trials=1, storage_dir={str(tmp_path)!r})
for trial in sweep:
    with trial.start_run():
        pass
assert "optuna" not in sys.modules and "cmaes" not in sys.modules
quark.sweep("t", project="p", space={{"x": quark.uniform(0, 1)}}, metric="m", mode="max",
            search="tpe", trials=1, storage_dir={str(tmp_path)!r})
assert "optuna" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_without_optuna_it_is_said_what_to_install(make, monkeypatch):
    bench = make()
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SchemaValidationError, match=r'pip install "quark-tracker\[sweep\]"'):
        open_search(bench.definition, bench.id, bench.store)
