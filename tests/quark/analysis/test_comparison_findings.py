"""Diffs of layers, parameters, alerts, health scores and phases."""

import numpy as np
import pytest

from quark.analysis.comparison.engine import (
    compare_alerts,
    compare_health_scores,
    compare_layers,
    compare_parameters,
    compare_phases,
)
from quark.analysis.curves import LayerHistory, ParameterHistory
from quark.analysis.run_data import RunData
from quark_core.records import AlertRecord, HealthScoreRecord, PhaseRecord
from quark_core.records.columns import Columns


def make_run(activations=(), parameters=()):
    run = RunData(lambda kind, _: Columns.empty(kind), "r")
    run.__dict__["activations"] = {item.name: item for item in activations}
    run.__dict__["gradients"] = {}
    run.__dict__["parameters"] = {item.name: item for item in parameters}
    return run


def layer(name, rms, *, dead=0.1, steps=range(0, 100, 10), seed=0, noise=0.05):
    steps = np.array(steps)
    moves = np.exp(noise * np.random.default_rng(seed).normal(size=len(steps)))
    figures = dict.fromkeys(("norm", "std", "saturation_ratio", "zero_ratio"), rms * moves)
    figures |= {"rms": rms * moves, "dead_unit_ratio": np.full(len(steps), float(dead))}
    return LayerHistory(name, "Linear", steps, figures)


def test_layers_by_log_ratio_of_medians():
    primary = make_run([layer("a", 1.0), layer("b", 8.0), layer("mine", 1.0)])
    reference = make_run([layer("b", 2.0, seed=1), layer("a", 1.1, seed=1), layer("yours", 1.0)])
    found = {diff.module_name: diff for diff in compare_layers([primary], [reference], 2.0)}
    assert list(found) == ["a", "b", "mine", "yours"]
    assert found["b"].log_ratio == pytest.approx(np.log(4), abs=0.1)
    assert found["b"].notable
    assert "rms" in found["b"].summary
    assert "times larger" in found["b"].summary
    assert (found["a"].notable, found["a"].summary) == (False, "no notable difference")
    assert found["mine"].presence == "primary_only"
    assert found["yours"].presence == "reference_only"
    assert found["yours"].log_ratio is None
    assert (found["a"].primary_probes, found["a"].common_start, found["a"].common_end) == (
        10,
        0,
        90,
    )


def test_a_layer_that_moves_much_by_itself_is_not_notable():
    primary = make_run([layer("a", 2.5, noise=3.0)])
    reference = make_run([layer("a", 1.0, noise=3.0, seed=1)])
    (diff,) = compare_layers([primary], [reference], 2.0)
    assert not diff.notable


def test_dead_units_and_zeros():
    (diff,) = compare_layers(
        [make_run([layer("a", 0.0, dead=1.0)])], [make_run([layer("a", 1.0, dead=0.2)])], 2.0
    )
    figures = {figure.name: figure for figure in diff.figures}
    assert figures["dead_unit_ratio"].difference == pytest.approx(0.8)
    assert figures["dead_unit_ratio"].notable
    assert (figures["rms"].log_ratio, figures["rms"].notable) == (None, True)
    assert "dead_unit_ratio 1 instead of 0.2" in diff.summary


def test_only_common_probes_count():
    (diff,) = compare_layers(
        [make_run([layer("a", 1.0, steps=range(0, 50, 10))])],
        [make_run([layer("a", 1.0, steps=range(30, 90, 10))])],
        2.0,
    )
    assert (diff.common_start, diff.common_end, diff.primary_probes) == (30, 40, 2)
    (diff,) = compare_layers(
        [make_run([layer("a", 1.0, steps=range(5))])],
        [make_run([layer("a", 1.0, steps=range(30, 90, 10))])],
        2.0,
    )
    assert (diff.presence, diff.common_start, diff.figures) == ("both", None, ())


def test_groups_of_runs():
    def group(level):
        return [make_run([layer("a", level, seed=seed)]) for seed in range(3)]

    (diff,) = compare_layers(group(4.0), group(1.0), 2.0)
    assert diff.notable
    assert diff.primary_probes == 30


def parameter(name, ratio):
    steps = np.arange(5)
    figures = {
        "update_to_parameter_ratio": np.full(5, ratio),
        "gradient_norm": np.full(5, np.nan),
        "update_norm": np.full(5, ratio),
        "value_norm": np.ones(5),
        "gradient_near_zero_ratio": np.zeros(5),
    }
    return ParameterHistory(name, "Linear", steps, figures)


def test_parameters():
    (diff,) = compare_parameters(
        [make_run(parameters=[parameter("a.weight", 1e-2)])],
        [make_run(parameters=[parameter("a.weight", 1e-3)])],
        2.0,
    )
    assert diff.log_ratio == pytest.approx(np.log(10))
    assert diff.notable
    assert {figure.name for figure in diff.figures} == {
        "update_to_parameter_ratio", "update_norm", "value_norm", "gradient_near_zero_ratio"
    }  # fmt: skip


def alert(rule, step, culprit="layer", severity="warning"):
    return AlertRecord(
        "r", "w", 0, 0, 0, 0, rule, "optimization", severity, rule, "", "", "",
        step=step, culprit=culprit,
    )  # fmt: skip


def test_alerts_by_rule_culprit_and_window():
    primary = [alert("spike", 100), alert("dead", 10, "module.a"), alert("plateau", 5)]
    reference = [
        alert("spike", 108, severity="error"),
        alert("spike", 500),
        alert("dead", 10, "a"),
        alert("dead", 10, "b"),
    ]
    diff = compare_alerts([primary], [reference], 20)
    assert [(item.primary.rule_id, item.primary.culprit) for item in diff.shared] == [
        ("dead", "a"),
        ("spike", "layer"),
    ]
    spike = diff.shared[1]
    assert (spike.step_difference, spike.severity_change) == (-8, "milder")
    assert [item.rule_id for item in diff.primary_only] == ["plateau"]
    assert [(item.rule_id, item.step) for item in diff.reference_only] == [
        ("dead", 10),
        ("spike", 500),
    ]
    assert (diff.primary_count, diff.reference_count) == (3, 4)


def test_each_alert_is_matched_once_and_the_closest_first():
    diff = compare_alerts([[alert("s", 10), alert("s", 14)]], [[alert("s", 13)]], 20)
    assert [item.primary.step for item in diff.shared] == [14]
    assert [item.step for item in diff.primary_only] == [10]


def test_alerts_of_groups_are_counted_by_run():
    primary = [[alert("s", 10)], [alert("s", 14, severity="critical")], []]
    diff = compare_alerts(primary, [[alert("t", None)], [alert("t", 3)]], 10)
    (sighting,) = diff.primary_only
    assert (sighting.run_count, sighting.step, sighting.severity) == (2, 12, "critical")
    assert diff.reference_only[0].run_count == 2


def test_no_alerts():
    diff = compare_alerts([[]], [[]], 1)
    assert (diff.primary_only, diff.reference_only, diff.shared) == ((), (), ())


def score(key, value):
    return HealthScoreRecord("r", "w", 0, 0, 0, 0, key, key, value, "healthy")


def test_health_scores():
    primary = [[score("runtime", 50.0), score("overall", 80.0)]]
    reference = [[score("overall", 90.0)], [score("overall", 70.0)], [score("overall", 60.0)]]
    overall, runtime = compare_health_scores(primary, reference)
    assert (overall.score_key, overall.primary, overall.reference) == ("overall", 80, 70)
    assert overall.difference == 10
    assert (runtime.reference, runtime.difference) == (None, None)


def phase(name, start, end):
    return PhaseRecord("r", "w", 0, 0, 0, 0, name, name.title(), "", step_start=start, step_end=end)


def test_phases_by_overlap_and_duration():
    primary = [phase("rapid", 0, 99), phase("stagnation", 100, 199), phase("rapid", 200, 299)]
    reference = [phase("rapid", 0, 49), phase("overfit", 50, 149), phase("rapid", 150, 299)]
    first, overfit, stagnation, second = compare_phases([primary], [reference])
    assert (first.presence, first.overlap, first.duration_difference) == ("both", 0.5, 50)
    assert (second.start_difference, second.overlap) == (50, pytest.approx(100 / 150))
    assert (stagnation.presence, stagnation.reference_start) == ("primary_only", None)
    assert (overfit.presence, overfit.overlap) == ("reference_only", None)
    assert overfit.display_name == "Overfit"


def test_phases_of_groups():
    primary = [[phase("rapid", 0, end)] for end in (90, 100, 120)]
    (diff,) = compare_phases(primary, [[phase("rapid", 0, 100)]])
    assert (diff.primary_end, diff.overlap) == (100, 1.0)
    assert (diff.primary_run_count, diff.reference_run_count) == (3, 1)


def test_phases_in_epochs_and_without_bounds():
    one = PhaseRecord("r", "w", 0, 0, 0, 0, "rapid", "Rapid", "", epoch_start=0, epoch_end=3)
    bare = PhaseRecord("r", "w", 0, 0, 0, 0, "rapid", "Rapid", "")
    first, second = compare_phases([[one, bare]], [[phase("rapid", 0, 3)]])
    assert {first.presence, second.presence} == {"primary_only", "reference_only"}
    assert {first.unit, second.unit} == {"epoch", "step"}
    assert compare_phases([[]], [[]]) == ()
