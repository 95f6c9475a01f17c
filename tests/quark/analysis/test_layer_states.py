"""For every state of a layer some rule speaks, or a named reason says why none does."""

import itertools

import numpy as np
import pytest
from run_builder import RunBuilder

from quark.analysis.engine import analyze_run

STEPS = list(range(0, 200, 10))
COUNT = len(STEPS)
FLAT = 2.3 + 0.02 * np.random.default_rng(5).standard_normal(200)
NAN = np.nan

VALUES = {"value_norm": 5.0, "value_mean": 0.1, "value_std": 0.5, "value_min": -1.0,
          "value_max": 1.0}  # fmt: skip

# State -> what it makes of the parameter's, the activation's and the gradient's figures.
STATES = {
    "no gradient": (
        {"gradient_norm": NAN, "update_norm": 0.0, "update_to_parameter_ratio": 0.0},
        {},
        None,
    ),
    "gradient exactly zero": ({"gradient_norm": 0.0}, {}, {"norm": 0.0}),
    "no update": ({"update_norm": 0.0, "update_to_parameter_ratio": 0.0, "still": True}, {}, {}),
    "all units dead": (
        {"gradient_norm": 0.0},
        {"dead_unit_ratio": 1.0, "zero_ratio": 1.0, "std": 0.0, "mean": 0.0, "norm": 0.0},
        {"norm": 0.0},
    ),
    "saturated": ({}, {"saturation_ratio": 0.99}, {}),
    "not in the optimizer": (
        {"in_optimizer": False, "update_norm": NAN, "update_to_parameter_ratio": NAN,
         "still": True},
        {},
        {},
    ),
    "nan": (
        {"non_finite_value_count": 10, "value_norm": NAN},
        {"nan_count": 10, "std": NAN, "mean": NAN, "norm": NAN},
        {"nan_count": 10, "norm": NAN},
    ),
}  # fmt: skip

UNTOUCHED = {"no gradient", "gradient exactly zero", "all units dead"}

OPPOSITES = [{"no gradient", "saturated"}, {"all units dead", "saturated"}]
"""What cannot be together: a layer whose units are all dead has none at the end of its range."""


def combine():
    names = list(STATES)
    for count in (1, 2):
        for chosen in itertools.combinations(names, count):
            if not any(pair <= set(chosen) for pair in OPPOSITES):
                yield chosen


def onset(values, sound, start):
    """Values from a probe on, and sound ones before it."""
    return np.where(np.arange(COUNT) < start, sound, values)


def build(chosen, start, kind="ReLU", loss=None):
    """A run of four layers of which the second is in these states from a probe on."""
    builder = RunBuilder().metric("train/loss", FLAT if loss is None else loss)
    for index in range(4):
        figures = {
            "value_norm": 5.0 + 1e-2 * np.arange(COUNT), "value_mean": 0.1 + 1e-4 *
            np.arange(COUNT), "value_std": 0.5, "value_min": -1.0, "value_max": 1.0,
            "gradient_norm": 0.1, "update_norm": 5e-3, "update_to_parameter_ratio": 1e-3,
            "learning_rate": 1e-2, "non_finite_value_count": 0.0,
        }  # fmt: skip
        seen = {"std": 1.0, "mean": 0.5, "norm": 10.0, "dead_unit_ratio": 0.0,
                "saturation_ratio": 0.0, "zero_ratio": 0.4, "nan_count": 0.0}  # fmt: skip
        back = {"norm": 0.1, "nan_count": 0.0}
        options = {}
        if index == 1:
            has_gradient = True
            for state in chosen:
                of_parameter, of_output, of_gradient = STATES[state]
                changed = dict(of_parameter)
                if changed.pop("still", False) or changed.get("gradient_norm") in (0.0, NAN):
                    changed = {**VALUES, **changed}
                if "gradient_norm" in changed and "update_norm" not in changed:
                    changed |= {"update_norm": 0.0, "update_to_parameter_ratio": 0.0}
                if "in_optimizer" in changed:
                    inside = changed.pop("in_optimizer")
                    options["in_optimizer"] = [row < start or inside for row in range(COUNT)]
                figures |= {k: onset(v, figures[k], start) for k, v in changed.items()}
                seen |= {k: onset(v, seen[k], start) for k, v in of_output.items()}
                if of_gradient is None:
                    has_gradient = False
                else:
                    back |= {k: onset(v, back[k], start) for k, v in of_gradient.items()}
        builder.parameter(f"layers.{index}.weight", steps=STEPS, **options, **figures)
        builder.layer(f"layers.{index}", kind, steps=STEPS, **seen)
        if index != 1 or has_gradient:
            builder.layer(f"layers.{index}", kind, "gradient", steps=STEPS, **back)
    return builder


NAMED = ("layers.1", "layers.1.weight")


def speakers(result):
    """The rules that warn of the layer in any way."""
    return {
        alert.rule_id
        for alert in result.alerts
        if alert.severity != "info"
        and (alert.culprit in NAMED or set(NAMED) & set((alert.metadata or {}).get("affected", ())))
    }


@pytest.mark.sampled
@pytest.mark.parametrize("start", [0, 6])
@pytest.mark.parametrize("kind", ["ReLU", "Linear"])
@pytest.mark.parametrize("chosen", list(combine()), ids=" + ".join)
def test_some_rule_speaks(chosen, kind, start):
    result = analyze_run(build(chosen, start, kind).build())
    if "not in the optimizer" in chosen and {*chosen} & UNTOUCHED and not speakers(result):
        # A body under no_grad that the optimizer was not given is meant to rest.
        assert "left out on purpose" in result.verdicts["stagnant_layers"].reason
        assert "layers.1" in result.verdicts["stagnant_layers"].reason
        return
    assert speakers(result), {
        rule_id: verdict.reason for rule_id, verdict in result.verdicts.items()
    }


@pytest.mark.parametrize("loss", [None, "finite"])
@pytest.mark.parametrize("state", STATES)
def test_some_rule_speaks_where_all_layers_are_so(state, loss):
    builder = RunBuilder().metric("train/loss", FLAT)
    if loss is not None:
        builder.metric("val/loss", FLAT[::10], steps=STEPS)
    build_all(builder, state)
    result = analyze_run(builder.build())
    told = {alert.rule_id for alert in result.alerts if alert.severity != "info"}
    assert told - {"plateau"}, {name: said.reason for name, said in result.verdicts.items()}


def build_all(builder, state):
    of_parameter, of_output, of_gradient = STATES[state]
    changed = dict(of_parameter)
    if changed.pop("still", False) or "gradient_norm" in changed:
        changed = {**VALUES, "update_norm": 0.0, "update_to_parameter_ratio": 0.0, **changed}
    for index in range(4):
        figures = {
            "value_norm": 5.0 + 1e-2 * np.arange(COUNT), "value_mean": 0.1, "value_std": 0.5,
            "gradient_norm": 0.1, "update_norm": 5e-3, "update_to_parameter_ratio": 1e-3,
            "learning_rate": 1e-2,
        }  # fmt: skip
        builder.parameter(f"layers.{index}.weight", steps=STEPS, **(figures | changed))
        seen = {"std": 1.0, "mean": 0.5, "norm": 10.0, "dead_unit_ratio": 0.0}
        builder.layer(f"layers.{index}", "Tanh", steps=STEPS, **(seen | of_output))
        if of_gradient is not None:
            back = {"norm": 0.1} | of_gradient
            builder.layer(f"layers.{index}", "Tanh", "gradient", steps=STEPS, **back)
