import numpy as np
import pytest
from phase_curves import TRAIN, VALIDATION, find, make_families, name_steps, names

CALM = [
    "exponential", "power", "step_decay", "warm_restarts", "noisy", "reinforcement", "flat",
    "thousands", "negative_elbo", "tiny", "late_learner", "bad_batch", "rate_gone", "gap",
    "loud_gap",
]  # fmt: skip
LEARNING = [name for name in CALM if name not in ("reinforcement", "flat")]
# Where the noise hides the bend, more points move it.
SETTLED = ["flat", "rises", "jumps", "overfits", *(n for n in LEARNING if n != "noisy")]
SIZES = [150, 1500]
SEEDS = range(3)


@pytest.mark.sampled
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("family", CALM)
def test_a_healthy_run_neither_diverges_nor_overfits(family, count):
    for seed in SEEDS:
        found = names(find(make_families(count, seed)[family]))
        assert "divergence" not in found
        assert "overfitting_onset" not in found


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("family", LEARNING)
def test_learning_is_found_at_any_scale_and_noise(family, count):
    for seed in SEEDS:
        assert "rapid_learning" in names(find(make_families(count, seed)[family]))


@pytest.mark.parametrize("family", ["reinforcement", "flat"])
def test_what_never_learns_stagnates_after_its_first_points(family):
    for seed in SEEDS:
        found = names(find(make_families(400, seed)[family]))
        assert found[0] == "initialization_adaptation"
        assert "stagnation" in found
        assert "rapid_learning" not in found


@pytest.mark.parametrize("count", SIZES)
def test_a_rate_that_goes_to_nothing_leaves_stagnation(count):
    for seed in SEEDS:
        phases = find(make_families(count, seed)["rate_gone"])
        assert names(phases)[-1] == "stagnation"
        assert 0.55 * count <= phases[-1].step_start <= 0.95 * count


@pytest.mark.parametrize("count", [400, 3000])
def test_a_curve_that_levels_off_stabilizes_before_it_stagnates(count):
    found = [names(find(make_families(count, seed)["exponential"])) for seed in SEEDS]
    assert all(item[:3] == list(ORDER) for item in found)
    assert any(item[-1] == "stagnation" for item in found)


ORDER = ("initialization_adaptation", "rapid_learning", "stabilization")


def test_learning_that_comes_late_is_not_where_the_run_stood_still():
    for seed in SEEDS:
        at = name_steps(find(make_families(1000, seed)["late_learner"]), 1000)
        assert (at[150:400] == "stagnation").mean() > 0.9
        assert at[600] == "rapid_learning"
        assert at[-1] != "rapid_learning"


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize(("family", "onset"), [("rises", 0.8), ("jumps", 0.5)])
def test_divergence_begins_where_the_loss_leaves_its_best(family, onset, count):
    for seed in SEEDS:
        phases = find(make_families(count, seed)[family])
        assert names(phases)[-1] == "divergence"
        assert abs(phases[-1].step_start / count - onset) < 0.06
        assert phases[-1].evidence[0].observed_value >= phases[-1].evidence[0].threshold_value


@pytest.mark.parametrize("count", SIZES)
def test_overfitting_begins_at_the_lowest_validation_loss(count):
    for seed in SEEDS:
        phases = find(make_families(count, seed)["overfits"])
        assert names(phases)[-1] == "overfitting_onset"
        # The noise-free minimum lies at 0.29 of the run, in a flat valley.
        assert 0.2 <= phases[-1].step_start / count <= 0.45
        assert phases[-1].evidence[0].source == VALIDATION


def test_a_run_that_breaks_down_did_not_overfit_before():
    steps = np.arange(400)
    loss = 0.3 + 2 * np.exp(-steps / 40)
    loss[200:] *= np.exp(0.05 * (steps[200:] - 200))
    found = names(find({TRAIN: loss, VALIDATION: (steps[::10], 1.1 * loss[::10])}))
    assert found[-1] == "divergence"
    assert "overfitting_onset" not in found


def test_a_harder_training_loss_is_no_divergence_while_validation_improves():
    steps = np.arange(400)
    noise = np.exp(0.05 * np.random.default_rng(0).normal(size=400))
    train = np.where(steps < 200, 0.2, 0.9) * noise + 2 * np.exp(-steps / 30)
    validation = 0.3 + 2 * np.exp(-steps / 120)
    assert "divergence" in names(find({TRAIN: train}))
    assert "divergence" not in names(
        find({TRAIN: train, VALIDATION: (steps[::10], validation[::10])})
    )


@pytest.mark.sampled
@pytest.mark.parametrize("count", [400, 3000])
@pytest.mark.parametrize("family", SETTLED)
def test_what_is_long_past_keeps_its_name_when_the_run_goes_on(family, count):
    """With three tenths more, the first seven tenths keep theirs but for their newest part."""
    old = round(0.7 * count)
    settled = round(0.8 * old)
    moved = []
    for seed in range(4):
        before = name_steps(find(make_families(old, seed, count)[family]), old)
        after = name_steps(find(make_families(count, seed)[family]), count)
        moved.append(float((before[:settled] != after[:settled]).mean()))
    assert np.median(moved) <= 0.055
    assert np.mean(moved) <= 0.08


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_the_unit_of_a_loss_changes_nothing(scale):
    curve = make_families(400, 1)["exponential"][TRAIN]
    assert [(p.phase_name, p.step_start) for p in find({TRAIN: scale * curve})] == [
        (p.phase_name, p.step_start) for p in find({TRAIN: curve})
    ]
