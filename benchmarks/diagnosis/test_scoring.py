"""Tests of the exam itself: draws, truths and the figures that are made of judged runs."""

import json
import math

import pytest

from benchmarks.diagnosis.families import FAMILIES, find_scenario, list_scenarios
from benchmarks.diagnosis.scenario import RULES, Draw, Truth
from benchmarks.diagnosis.scoring import score_rows

NAME = "fifth/stagnant_layers/group_rate_zero"


def make_row(kind, *, expected=(), tolerated=(), alarms=(), phases=(), **truth):
    made = Truth(kind=kind, expected=expected, tolerated=tolerated, **truth)
    return {
        "scenario": "a/b",
        "seed": 0,
        "every": 5,
        "truth": made.to_dict(),
        "alarms": [
            {"rule": rule, "severity": "warning", "step": step, "culprit": culprit, "title": ""}
            for rule, step, culprit in alarms
        ],
        "phases": list(phases),
        "folder": "x",
        "error": None,
        "analysis_s": 0.1,
        "status": "watch",
        "known": False,
    }


def test_scenarios_are_found_by_family_and_by_name():
    scenarios = list_scenarios()
    assert {scenario.kind for scenario in scenarios} == {"fault", "healthy"}
    assert {scenario.name.split("/")[0] for scenario in scenarios} == {*FAMILIES}
    fifth = list_scenarios("fifth")
    assert fifth == tuple(each for each in scenarios if each.name.startswith("fifth/"))
    assert find_scenario(NAME).name == NAME
    with pytest.raises(KeyError):
        find_scenario("fifth/none")


def test_a_draw_is_of_its_name_and_seed():
    one, same, other = Draw("a", 1), Draw("a", 1), Draw("a", 2)
    assert one.torch_seed == same.torch_seed != other.torch_seed
    assert one.uniform(0, 1) == same.uniform(0, 1)
    assert one.again().severity == one.severity
    assert one.stream("x").uniform() == same.stream("x").uniform() != one.stream("y").uniform()


def test_a_truth_comes_back_from_json_and_refuses_what_there_is_not():
    truth = Truth(kind="fault", expected=("plateau",), culprits=("fc",), onset_step=3)
    assert Truth.from_dict(json.loads(json.dumps(truth.to_dict()))) == truth
    with pytest.raises(ValueError, match="no rules"):
        Truth(kind="fault", expected=("plateaus",))
    with pytest.raises(ValueError, match="healthy run has no expected"):
        Truth(kind="healthy", expected=("plateau",))


def test_figures_add_up():
    fault = {"expected": ("plateau",), "onset_step": 10, "culprits": ("fc0",)}
    rows = [
        make_row("fault", **fault, alarms=[("plateau", 20, "fc0.weight")], phases=["stagnation"]),
        make_row("fault", **fault, alarms=[("divergence", 5, None)]),
        make_row("healthy", alarms=[("plateau", 1, None)], phases_forbidden=("divergence",)),
        make_row("healthy", tolerated=("plateau",), alarms=[("plateau", 1, None)]),
        make_row("healthy", phases=["divergence"], phases_forbidden=("divergence",)),
        make_row("unclear", alarms=[("loss_spike", 1, None)]),
    ]
    figures = score_rows(rows)
    assert (figures["faults"], figures["healthy"], figures["unclear"]) == (2, 3, 1)
    plateau = figures["rules"]["plateau"]
    assert (plateau["faults"], plateau["recall"], plateau["precision"]) == (2, 0.5, 0.5)
    assert (plateau["delay_probes"], plateau["culprits"], plateau["foreign"]) == (2.0, 1.0, 1)
    assert figures["rules"]["divergence"]["precision"] == 0.0
    assert figures["rules"]["loss_spike"]["foreign"] == 0
    assert figures["specificity"] == pytest.approx(2 / 3)
    assert figures["score"] == pytest.approx(100 * math.sqrt(0.5 * 2 / 3))
    assert [miss["rule"] for miss in figures["misses"]] == ["plateau"]
    assert len(figures["false_alarms"]) == 2
    assert figures["phases"]["healthy_with_forbidden"] == 1
    assert [entry["what"] for entry in figures["phase_mistakes"]] == ["forbidden"]
    assert {*figures["rules"]} == {*RULES}
    # One of which nothing is known is not called healthy, whatever its status.
    rows[1]["status"], rows[4]["status"] = "healthy", "healthy"
    rows[1]["known"] = rows[4]["known"] = True
    rows[0]["status"] = "healthy"
    figures = score_rows(rows)
    assert [cited["folder"] for cited in figures["broken_called_healthy"]] == [rows[1]["folder"]]
    assert figures["healthy_not_called_so"] == pytest.approx(2 / 3)


def test_no_runs_give_no_figures():
    figures = score_rows([])
    assert figures["score"] is figures["specificity"] is figures["macro_recall"] is None
