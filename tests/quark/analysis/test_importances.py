"""Which parameters matter, of truths that are made up; by Optuna too, where it is there."""

import math
from importlib.util import find_spec

import numpy as np
import pytest

from quark.analysis.sweep_analysis import measure_importances
from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import JsonObject
from quark_core.records.sweeps import StoredSweep, StoredTrial

AT = "2026-05-07T09:30:00.000000Z"
BY_OPTUNA = pytest.mark.skipif(find_spec("optuna") is None, reason="needs the extra sweep")
METHODS = ["ranks", pytest.param("ped_anova", marks=[BY_OPTUNA, pytest.mark.long])]


def make_sweep(**definition):
    known = {"metric": "val/loss", "mode": "min", **definition}
    return StoredSweep("s1", "p", "s", JsonObject(known), "running", JsonObject(), AT, AT)


def make_trials(rows):
    return [
        StoredTrial(
            "s1", number, JsonObject(parameters), JsonObject(), "completed", values=(value,)
        )
        for number, (parameters, value) in enumerate(rows)
    ]


def draw(count, measure, seed=5):
    """Trials of a learning rate, an optimizer and a parameter that does nothing."""
    generator = np.random.default_rng(seed)
    rows = []
    for at in range(count):
        parameters = {
            "lr": float(10 ** generator.uniform(-5, -1)),
            "optimizer": ["adam", "sgd", "lion"][generator.integers(3)],
            "idle": float(generator.uniform()),
            "seed": at,
            "same": 3,
        }
        rows.append((parameters, float(measure(parameters, generator))))
    return make_trials(rows)


def measure_bowl(parameters, generator):
    bowl = (math.log10(parameters["lr"]) + 3.0) ** 2
    return bowl + 0.3 * (parameters["optimizer"] == "sgd") + 0.1 * generator.standard_normal()


@pytest.mark.parametrize("method", METHODS)
def test_what_matters_stands_before_what_does_nothing(method):
    space = {"lr": {"type": "uniform", "low": 1e-5, "high": 0.1, "log": True}}
    (found,) = measure_importances(make_sweep(space=space), draw(200, measure_bowl), method)
    assert found.method == method
    assert list(found.shares) == sorted(found.shares, key=lambda name: -found.shares[name])
    assert set(found.shares) == {"lr", "optimizer", "idle"}
    assert next(iter(found.shares)) == "lr"
    assert found.shares["lr"] > 0.6
    assert found.shares["idle"] < 0.15
    assert found.count == 200


def test_what_does_nothing_is_below_chance_and_what_is_seen_adds_up():
    (found,) = measure_importances(make_sweep(), draw(200, measure_bowl), "ranks")
    assert found.shares["idle"] <= found.chance < found.shares["lr"]
    assert found.explained == pytest.approx(sum(found.shares.values()), abs=0.05)
    assert 0.7 < found.explained <= 1.0


def test_of_noise_alone_nothing_matters():
    above = 0
    for seed in range(40):
        trials = draw(40, lambda _, generator: generator.standard_normal(), seed)
        (found,) = measure_importances(make_sweep(), trials, "ranks")
        above += sum(share > found.chance for share in found.shares.values())
        assert found.explained < 0.6
    # Of 120 parameters that do nothing, five in a hundred are above by chance.
    assert above <= 6 + 5 * math.sqrt(6)


def test_one_value_beyond_all_measure_changes_little():
    trials = draw(100, measure_bowl)
    (before,) = measure_importances(make_sweep(), trials, "ranks")
    wild = [*trials[:-1], *make_trials([(trials[-1].parameters, 1e300)])]
    (after,) = measure_importances(make_sweep(), wild, "ranks")
    assert after.shares["lr"] == pytest.approx(before.shares["lr"], abs=0.1)


@pytest.mark.parametrize(
    ("rows", "note"),
    [
        (
            [({"lr": at}, at) for at in range(9)],
            "9 completed trials have values, but 10 are required",
        ),
        ([({"lr": 1, "seed": at}, at) for at in range(20)], "no parameter differs between trials"),
        ([({"lr": at}, 1.0) for at in range(20)], "all values are the same"),
        (
            [({"lr": at}, math.nan) for at in range(20)],
            "0 completed trials have values, but 10 are required",
        ),
    ],
    ids=["few", "seeds alone", "one value", "not finite"],
)
def test_what_cannot_be_told_is_said(rows, note):
    (found,) = measure_importances(make_sweep(), make_trials(rows))
    assert (found.shares, found.note) == ({}, note)


@pytest.mark.parametrize("method", METHODS)
def test_parameters_of_any_kind_have_their_share(method):
    kinds = [None, True, "a", 1, [1, 2], {"b": 1}]
    rows = [
        ({"kind": kinds[at % 6], "only": at, **({"some": 1} if at % 2 else {})}, at % 6)
        for at in range(60)
    ]
    (found,) = measure_importances(make_sweep(), make_trials(rows), method)
    assert next(iter(found.shares)) == "kind"
    assert "some" not in found.shares


def test_each_metric_has_its_own():
    sweep = make_sweep(metric=["a", "b"], mode=["min", "max"])
    trials = [
        StoredTrial("s1", at, JsonObject({"x": at, "y": at % 7}), JsonObject(), "completed",
                    values=(float(at), float(at % 7)))
        for at in range(70)
    ]  # fmt: skip
    first, second = measure_importances(sweep, trials, "ranks")
    assert (first.metric, next(iter(first.shares))) == ("a", "x")
    assert (second.metric, next(iter(second.shares))) == ("b", "y")


def test_another_method_is_refused():
    with pytest.raises(SchemaValidationError, match="method must be 'ped_anova' or 'ranks'"):
        measure_importances(make_sweep(), [], "shap")


def test_without_optuna_ours_tells(monkeypatch):
    monkeypatch.setattr("quark.analysis.sweep_analysis.find_spec", lambda _: None)
    trials = draw(40, measure_bowl)
    (found,) = measure_importances(make_sweep(), trials)
    assert found.method == "ranks"
    with pytest.raises(SchemaValidationError, match="sweep"):
        measure_importances(make_sweep(), trials, "ped_anova")


def test_the_same_is_told_with_optuna_and_without():
    (found,) = measure_importances(make_sweep(), draw(40, measure_bowl))
    assert (found.method, found.chance is not None) == ("ranks", True)
