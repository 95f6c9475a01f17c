"""What a sweep is, as it is kept."""

import pytest

import quark
from quark.sweeps.definition import SweepDefinition, find_difference, parse_search
from quark_core.errors import SchemaValidationError

GIVEN = {"space": {"lr": quark.uniform(0, 1)}, "metric": "val/acc", "mode": "max"}


def build(**changes):
    return SweepDefinition.build({**GIVEN, **changes})


def test_a_definition_is_read_back_as_it_was():
    made = build(
        search="halving(rate=0.3, least=3)", trials=20, budget=27, max_failures=2, stop=True,
        constraints=["latency_ms <= 20", "memory >= 0.5"], seed=7, lease_s=5,
    )  # fmt: skip
    kept = made.to_dict()
    assert SweepDefinition.build(kept).to_dict() == kept
    assert kept["search"] == "halving(rate=0.3, least=3)"
    assert kept["metric"] == "val/acc"
    assert kept["mode"] == "max"
    assert kept["constraints"] == ["latency_ms <= 20", "memory >= 0.5"]
    several = build(metric=["val/acc", "latency_ms"], mode=["max", "min"]).to_dict()
    assert several["metric"] == ["val/acc", "latency_ms"]
    assert several["mode"] == ["max", "min"]


def test_constraints_say_how_far_they_are_broken():
    slow, large = build(constraints=["latency_ms <= 20", "memory >= 0.5"]).constraints
    assert slow.measure(25) == 5
    assert slow.measure(19) == -1
    assert large.measure(0.25) == 0.25
    assert large.measure(1) == -0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric": None}, "metric is required"),
        ({"metric": []}, "metric must be a string or a list"),
        ({"metric": ["a", "a"]}, "metric contains the same metric twice"),
        ({"mode": None}, "mode of 'val/acc' must be 'min' or 'max'"),
        ({"mode": "best"}, "mode of 'val/acc' must be 'min' or 'max'"),
        (
            {"metric": ["a", "b"], "mode": ["min"]},
            "mode must be one string, or one for each of the 2",
        ),
        ({"trials": 0}, "trials must be a whole number of at least 1"),
        ({"trials": True}, "trials must be a whole number"),
        ({"budget": 1.5}, "budget must be a whole number"),
        ({"max_failures": 5_000}, "max_failures must be at most"),
        ({"constraints": ["latency < 20"]}, "constraints: each must be a string such as"),
        ({"constraints": ["latency <= nan"]}, "constraints: each must be a string such as"),
        ({"constraints": 5}, "constraints must be a list"),
        ({"stop": "yes"}, "stop must be True or False"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"lease_s": 0}, "lease_s must be 0.5 to 86400 seconds"),
        ({"lease_s": float("nan")}, "lease_s must be"),
        ({"search": "halving(rate"}, "search must be a string such as"),
        ({"search": "halving(0.3)"}, "'0.3' is not a setting"),
    ],
)
def test_a_bad_argument_is_refused_by_its_name(changes, message):
    with pytest.raises(SchemaValidationError, match=message):
        build(**changes)


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("random", "random", {}),
        (" halving( rate=0.3 , least=3 ) ", "halving", {"rate": 0.3, "least": 3}),
        ("tpe(multivariate=true, n=1e3)", "tpe", {"multivariate": True, "n": 1000.0}),
        ("optuna:TPESampler+HyperbandPruner", "optuna:TPESampler+HyperbandPruner", {}),
    ],
)
def test_a_search_is_a_name_with_settings(text, name, options):
    choice = parse_search(text)
    assert (choice.name, choice.options) == (name, options)
    assert parse_search(str(choice)) == choice


def test_workers_may_differ_in_their_lease_and_in_how_many_trials():
    assert find_difference(build(trials=5), build(trials=50, lease_s=1)) is None
    assert "trials is 5" in find_difference(
        build(search="halving", trials=5), build(search="halving", trials=6)
    )
    assert "trials is None" in find_difference(build(search="grid"), build(search="grid", trials=3))


def test_a_difference_is_named_by_its_place():
    other = build(space={"lr": quark.uniform(0, 2), "layers": [1, 2]})
    assert find_difference(build(), other).startswith("space['layers'] is None, not {")
    assert find_difference(build(), build(space={"lr": quark.uniform(0, 2)})).startswith(
        "space['lr'] is {'type': 'uniform', 'low': 0.0, 'high': 1.0}, not"
    )
    assert find_difference(build(), build(seed=1)) == "seed is 0, not 1"
