from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from phase_curves import (
    TRAIN,
    VALIDATION,
    find,
    make_families,
    make_run,
    name_steps,
    names,
    read_run,
)
from tiers import count_examples

from quark.analysis.config import PhaseAnalyzerConfig
from quark.analysis.phases import analyze_phases
from quark_core.records.schema import validate_record

anything = st.floats(allow_nan=True, allow_infinity=True)
usual = st.floats(min_value=-10, max_value=10)


def check_cover(phases, first, last):
    """The phases lie side by side from the first step to the last."""
    assert phases[0].step_start == first
    assert phases[-1].step_end == last
    for before, after in pairwise(phases):
        assert after.step_start == before.step_end + 1
        assert after.phase_name != before.phase_name
    for phase in phases:
        assert phase.step_start <= phase.step_end
        assert validate_record(phase) == phase
        assert phase.evidence
        assert phase.summary


@pytest.mark.long
@settings(max_examples=count_examples(150))
@example([(0, 0.0), (0, 8.988465674311579e307), (0, 8.98846567431158e307)])
@given(st.lists(st.tuples(st.integers(0, 500), anything | usual), min_size=1, max_size=120))
def test_any_points_give_phases_side_by_side_or_a_reason(points):
    steps, values = zip(*points, strict=True)
    data = read_run({TRAIN: (steps, values)})
    result = analyze_phases(data)
    if result.phases:
        check_cover(result.phases, min(steps), max(steps))
    else:
        # Means of two of the largest numbers are none any more.
        assert not (np.abs(values) < 1e300).any()
        assert TRAIN in result.notes[0]
    again = analyze_phases(data)
    assert [(p.phase_name, p.step_start, p.evidence) for p in again.phases] == [
        (p.phase_name, p.step_start, p.evidence) for p in result.phases
    ]


@settings(max_examples=count_examples(60))
@example([0.0], [0.0, 1.0, 5e-324])
@given(
    st.lists(anything | usual, min_size=1, max_size=90),
    st.lists(anything | usual, min_size=1, max_size=30),
)
def test_any_two_curves_give_phases_that_cover_both(train, validation):
    steps = 3 * np.arange(len(validation)) + 2
    result = analyze_phases(make_run({TRAIN: train, VALIDATION: (steps, validation)}))
    if result.phases:
        check_cover(result.phases, 0, max(len(train) - 1, int(steps[-1])))


@settings(max_examples=count_examples(60))
@given(st.lists(st.floats(1e-3, 1e3), min_size=5, max_size=150), st.integers(-12, 12))
def test_a_power_of_two_as_unit_changes_nothing(values, power):
    found = find({TRAIN: np.array(values)})
    scaled = find({TRAIN: np.array(values) * 2.0**power})
    assert [(p.phase_name, p.step_start) for p in found] == [
        (p.phase_name, p.step_start) for p in scaled
    ]


@pytest.mark.parametrize("value", [0.0, 2.3, -4.0, 1e308, -1e308, 5e-324])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 50, 500])
def test_a_constant_never_learns(value, count):
    found = names(find({TRAIN: np.full(count, value)}))
    assert found[0] == "initialization_adaptation"
    assert found == ["initialization_adaptation", "stagnation"][: len(found)]
    assert (len(found) == 2) == (count >= 50)


def test_a_run_without_a_curve_says_what_it_has():
    for curves, told in (({}, "none"), ({"lr": [0.1]}, "metrics are lr")):
        result = analyze_phases(read_run(curves))
        assert result.phases == ()
        assert told in result.notes[0]


def test_one_value_that_is_no_number_says_nothing():
    result = analyze_phases(read_run({TRAIN: [float("nan")]}))
    assert result.phases == ()
    assert "no finite value" in result.notes[0]


def test_losses_that_are_no_numbers_from_the_start_are_divergence():
    (phase,) = find({TRAIN: np.full(20, np.nan)})
    assert (phase.phase_name, phase.step_start, phase.step_end) == ("divergence", 0, 19)
    assert "20 values" in phase.summary


def test_nan_until_the_end_is_divergence_and_nan_between_is_not():
    curve = 0.3 + 2 * np.exp(-np.arange(200) / 20)
    some, all_of_them = curve.copy(), curve.copy()
    some[[5, 90, 91, 150]] = np.nan
    all_of_them[140:] = np.inf
    assert "divergence" not in names(find({TRAIN: some}))
    last = find({TRAIN: all_of_them})[-1]
    assert (last.phase_name, last.step_start, last.step_end) == ("divergence", 140, 199)


def test_several_points_of_one_step_count_as_one():
    curve = 0.3 + 2 * np.exp(-np.arange(200) / 20)
    once = find({TRAIN: curve})
    twice = find({TRAIN: (np.repeat(np.arange(200), 2), np.repeat(curve, 2))})
    assert [(p.phase_name, p.step_start) for p in once] == [
        (p.phase_name, p.step_start) for p in twice
    ]


def test_a_gap_in_the_steps_leaves_no_hole():
    curve = 0.3 + 2 * np.exp(-np.arange(200) / 20)
    steps = np.arange(200) + np.where(np.arange(200) >= 100, 10**12, 0)
    phases = find({TRAIN: (steps, curve)})
    check_cover(phases, 0, int(steps[-1]))
    assert names(phases)[1] == "rapid_learning"


def test_epochs_alone_give_bounds_in_epochs():
    data = read_run({TRAIN: 0.2 + 2 * np.exp(-np.arange(40) / 5)}, over="epoch")
    phases = analyze_phases(data).phases
    assert names(phases)[:2] == ["initialization_adaptation", "rapid_learning"]
    assert phases[0].epoch_start == 0
    assert phases[-1].epoch_end == 39
    assert all(phase.step_start is None and phase.step_end is None for phase in phases)
    assert "epochs" in phases[-1].summary


def test_curves_of_which_none_says_where_the_other_lies_are_not_mixed():
    steps = read_run({TRAIN: 0.2 + 2 * np.exp(-np.arange(100) / 9)})
    epochs = read_run({VALIDATION: np.ones(10)}, over="epoch")
    steps.__dict__["metrics"] = {**steps.metrics, **epochs.metrics}
    result = analyze_phases(steps)
    assert result.phases[-1].step_end == 99
    assert "left out" in result.notes[0]


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_accuracies_serve_where_there_is_no_loss(scale):
    steps = np.arange(300)
    probes = steps[::10]
    train = scale * (1 - 0.9 * np.exp(-steps / 40))
    turned = 0.8 - 0.7 * np.exp(-probes / 40) - 0.001 * np.clip(probes - 100, 0, None)
    learned = find({"train/accuracy": train})
    assert names(learned)[1] == "rapid_learning"
    assert "rose" in learned[1].summary
    both = find({"train/accuracy": train, "val/accuracy": (probes, scale * turned)})
    assert names(both)[-1] == "overfitting_onset"


def test_a_validation_loss_alone_that_turns_is_overfitting_and_one_that_explodes_diverges():
    probes = np.arange(40)
    turns = 0.5 + np.exp(-probes / 4) + 0.01 * np.clip(probes - 10, 0, None)
    explodes = 0.5 + np.exp(-probes / 4) + np.where(probes > 25, 8.0, 0.0)
    assert names(find({VALIDATION: turns}))[-1] == "overfitting_onset"
    assert names(find({VALIDATION: explodes}))[-1] == "divergence"


def test_keys_of_ones_own_are_taken_from_the_configuration():
    curve = 0.2 + 2 * np.exp(-np.arange(100) / 9)
    flat = np.full(100, 2.0)
    run = make_run({"objective/ce": curve, TRAIN: flat})
    config = PhaseAnalyzerConfig(train_loss_metric_keys=("objective/ce",))
    assert "rapid_learning" in names(analyze_phases(run, config).phases)
    assert "rapid_learning" not in names(analyze_phases(run).phases)


def test_a_validation_loss_shows_the_learning_that_noise_hides():
    rng = np.random.default_rng(0)
    steps = np.arange(60)
    train = np.exp(0.5 * rng.normal(size=60))
    validation = 0.8 + 0.6 * np.exp(-steps[::2] / 6)
    assert "rapid_learning" not in names(find({TRAIN: train}))
    phases = find({TRAIN: train, VALIDATION: (steps[::2], validation)})
    assert "rapid_learning" in names(phases)
    assert phases[1].evidence[0].source == VALIDATION


@pytest.mark.sampled
@pytest.mark.parametrize("count", [200_000, 1_000_000])
def test_many_points_are_a_few_hundred_blocks(count):
    from quark.analysis.phase_segmentation import reduce_curve

    steps = np.arange(count)
    noise = np.random.default_rng(0).normal(size=count)
    curve = (0.3 + 2 * np.exp(-steps / (count / 10))) * np.exp(0.2 * noise)
    run = make_run({TRAIN: curve})
    assert len(reduce_curve(run.metrics[TRAIN])) < 750
    phases = analyze_phases(run).phases
    check_cover(phases, 0, count - 1)
    assert names(phases)[1:3] == ["rapid_learning", "stabilization"]
    assert phases[0].step_end < 1000


@pytest.mark.sampled
@pytest.mark.parametrize("size", [0.05, 0.5])
@pytest.mark.parametrize("count", [30, 150, 1000])
def test_noise_alone_is_hardly_ever_taken_for_learning(count, size):
    noise = [np.random.default_rng(seed).normal(size=count) for seed in range(40)]
    found = [names(find({TRAIN: np.exp(size * item)})) for item in noise]
    assert sum("rapid_learning" in item for item in found) <= 1
    assert not any({"divergence", "overfitting_onset"} & {*item} for item in found)
    assert sum("stagnation" in item for item in found) >= 36


@pytest.mark.long
def test_thresholds_that_are_passed_must_hold():
    curve = make_families(400, 0)["exponential"]
    assert "rapid_learning" in names(find(curve))
    assert "rapid_learning" not in names(find(curve, rapid_learning_min_relative_change=0.99))
    assert "rapid_learning" in names(find(curve, rapid_learning_min_relative_change=0.5))

    flat = make_families(400, 0)["flat"]
    assert "stagnation" in names(find(flat))
    assert "stagnation" not in names(find(flat, stagnation_max_relative_change=0.0))

    rises = make_families(400, 0)["rises"]
    assert "divergence" not in names(find(rises, divergence_min_relative_regression=1e6))
    assert "divergence" not in names(find(rises, divergence_from_best_ratio=1e6))

    overfits = make_families(400, 0)["overfits"]
    for refused in (
        {"overfitting_min_validation_regression": 5.0},
        {"overfitting_min_gap": 50.0},
        {"overfitting_min_train_relative_change": 1.0},
    ):
        assert "overfitting_onset" not in names(find(overfits, **refused))
    kept = {"overfitting_min_gap": 0.1, "overfitting_min_train_relative_change": 0.1}
    assert "overfitting_onset" in names(find(overfits, **kept))


def test_the_first_points_are_initialization_as_asked():
    curve = make_families(400, 0)["exponential"]
    assert find(curve, initialization_points=30)[0].step_end >= 29
    assert find(curve, initialization_points=0)[0].phase_name == "rapid_learning"
    assert find(curve)[0].step_end >= 1


def test_what_is_said_holds_the_figures():
    phases = find(make_families(400, 0)["exponential"])
    at = name_steps(phases, 400)
    rapid = next(phase for phase in phases if phase.phase_name == "rapid_learning")
    assert rapid.display_name == "Rapid learning"
    assert f"steps {rapid.step_start} to {rapid.step_end}" in rapid.summary
    assert "train/loss fell from 2." in rapid.summary
    change, slope = rapid.evidence
    assert change.observed_value < -0.5
    assert change.threshold_value == 0.18
    assert slope.observed_value < -slope.threshold_value
    assert (change.step_start, change.step_end) == (rapid.step_start, rapid.step_end)
    assert rapid.metadata["points"] == (at == "rapid_learning").sum()
