"""Metric diffs and verdicts, over runs in memory."""

import json
import math

import numpy as np
import pytest
from comparison_runs import compare, decay, make_run

from quark_core.analysis.comparison.config import ComparisonEngineConfig, MetricTargetSpec
from quark_core.analysis.comparison.metrics import Pairing
from quark_core.errors import SchemaValidationError


def losses(seeds, **options):
    return [make_run({"val/loss": decay(seed, **options)}, f"r{seed}") for seed in seeds]


def one(primary, reference, config=None):
    (diff,) = compare([make_run({"val/loss": primary})], [make_run({"val/loss": reference})],
                      config).values()  # fmt: skip
    json.dumps(diff.to_dict(), allow_nan=False)
    return diff


def test_figures_over_the_common_range():
    falling = (range(0, 101, 10), [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
    other = (range(40, 201, 20), [5, 4, 3, 2, 9, 9, 9, 9, 9])
    diff = one(falling, other)
    assert (diff.unit, diff.common_start, diff.common_end) == ("step", 40, 100)
    assert (diff.last.primary, diff.last.reference, diff.last.difference) == (0, 2, -2)
    assert diff.last.relative_difference == -1.0
    assert (diff.best.primary, diff.best.reference) == (0, 2)
    assert diff.tail_start == 70  # the sparser curve's last half
    assert diff.tail_median.primary == 1.5
    assert diff.tail_median.reference == 2.5
    assert diff.area.primary == pytest.approx(3.0)
    assert diff.area.reference == pytest.approx(3.5)
    assert diff.headline
    assert diff.primary_noise is not None


def test_two_groups_that_differ():
    diff = compare(losses(range(5), level=0.2), losses(range(10, 15), level=0.3))["val/loss"]
    assert (diff.verdict, diff.method) == ("better", "welch")
    assert diff.adjusted_p_value == pytest.approx(diff.p_value)  # the only metric
    assert diff.permutation_p_value == pytest.approx(2 / 252)
    assert diff.effect_size < -2
    assert diff.interval_low < -0.1 < diff.interval_high < 0
    assert diff.interval_level == 0.95
    assert diff.probability_of_improvement == 1.0
    assert diff.iqm_interval_low <= diff.primary_iqm - diff.reference_iqm <= diff.iqm_interval_high
    assert diff.last.primary_deviation > 0
    back = compare(losses(range(10, 15), level=0.3), losses(range(5), level=0.2))["val/loss"]
    assert back.verdict == "worse"
    assert back.p_value == pytest.approx(diff.p_value)


def test_two_groups_that_do_not():
    options = {"level": 0.3, "spread": 0.06}
    diff = compare(losses(range(5), **options), losses(range(20, 25), **options))["val/loss"]
    assert diff.verdict == "inconclusive"
    assert diff.p_value > 0.05
    assert "p = " in diff.reason


def test_equivalent_groups():
    options = {"level": 0.3, "spread": 0.001, "noise": 0.001}
    diff = compare(losses(range(5), **options), losses(range(20, 25), **options))["val/loss"]
    assert diff.verdict == "equivalent"
    assert -diff.tolerance < diff.interval_low < diff.interval_high < diff.tolerance
    narrow = ComparisonEngineConfig(tolerances={"val/loss": 1e-9})
    diff = compare(
        losses(range(5), **options), losses(range(20, 25), **options), narrow
    )["val/loss"]  # fmt: skip
    assert diff.verdict == "inconclusive"


def test_pairs_tell_apart_what_groups_cannot():
    primary = [make_run({"val/loss": decay(seed, spread=0.1) - 0.02}) for seed in range(6)]
    reference = [make_run({"val/loss": decay(seed, spread=0.1)}) for seed in (3, 1, 0, 2, 5, 4)]
    alone = compare(primary, reference)["val/loss"]
    assert (alone.method, alone.verdict) == ("welch", "inconclusive")
    pairing = Pairing((2, 1, 3, 0, 5, 4))
    diff = compare(primary, reference, pairing=pairing)["val/loss"]
    assert (diff.method, diff.verdict) == ("paired", "better")
    assert diff.interval_low == pytest.approx(-0.02, abs=1e-6)


def test_one_run_against_a_group():
    group = losses(range(6), spread=0.01)
    diff = compare(losses([99], level=0.9), group)["val/loss"]
    assert (diff.method, diff.verdict) == ("prediction", "worse")
    assert "one run held against" in diff.reason
    assert compare(losses([98], spread=0.01), group)["val/loss"].verdict == "inconclusive"


def test_single_runs_are_inconclusive_unless_far_apart():
    near = one(decay(1), decay(2) * 1.5)
    assert near.verdict == "inconclusive"
    assert "single seed" in near.reason
    assert near.p_value is None
    far = one(decay(1) / 10, decay(2))
    assert (far.verdict, far.method) == ("better", "single_seed")
    late = one(np.append(decay(1, points=180), np.full(60, 0.02)), decay(2, points=240))
    assert late.verdict == "inconclusive"
    assert "as a whole" in late.reason


def test_a_known_deviation_tells_single_runs_apart():
    config = ComparisonEngineConfig(seed_deviations={"val/loss": 0.005})
    diff = one(decay(1, level=0.25, spread=0.0), decay(2, spread=0.0), config)
    assert (diff.method, diff.verdict) == ("known_deviation", "better")
    assert diff.interval_high < 0
    loose = ComparisonEngineConfig(seed_deviations={"val/loss": 0.05})
    assert one(decay(1, level=0.25), decay(2), loose).verdict == "inconclusive"


def test_rates_are_compared_by_their_odds():
    def at(level):
        return make_run({"val/accuracy": np.linspace(level - 0.05, level, 30)})

    assert compare([at(0.92)], [at(0.88)])["val/accuracy"].verdict == "inconclusive"
    found = compare([at(0.99)], [at(0.80)])["val/accuracy"]
    assert found.verdict == "better"
    assert "odds" in found.reason
    assert found.tolerance == 0.01


def test_a_few_samples_right_or_wrong_are_chance():
    def at(level):
        return make_run({"val/accuracy": [level] * 30})

    for one, two in ((1.0, 0.985), (0.0, 0.01), (1.0, 0.99)):
        assert compare([at(one)], [at(two)])["val/accuracy"].verdict == "inconclusive"


def test_values_of_either_sign():
    def returns(level):
        return make_run({"episode/return": level + 10 * np.sin(np.arange(100) / 5)})

    assert compare([returns(0)], [returns(2)])["episode/return"].verdict == "inconclusive"
    assert compare([returns(100)], [returns(-100)])["episode/return"].verdict == "better"


def test_unknown_direction_gives_the_difference_and_no_verdict():
    diff = compare([make_run({"x": [1, 2, 3]})], [make_run({"x": [2, 3, 4]})])["x"]
    assert (diff.verdict, diff.direction, diff.best) == (None, "none", None)
    assert diff.tail_median.difference == -1
    config = ComparisonEngineConfig(directions={"x": "lower"})
    diff = compare([make_run({"x": [1] * 9})], [make_run({"x": [9] * 9})], config)["x"]
    assert diff.verdict == "better"


def test_many_metrics_are_corrected_together():
    generator = np.random.default_rng(5)

    def make(seed, better):
        curves = {f"m{i}/loss": decay(seed * 50 + i, spread=0.05) for i in range(20)}
        curves["val/loss"] = decay(seed, level=0.2 if better else 0.3)
        return make_run({key: curves[key] for key in generator.permutation(list(curves))})

    found = compare([make(i, True) for i in range(5)], [make(i, False) for i in range(7, 12)])
    assert next(iter(found)) == "val/loss"
    assert found["val/loss"].verdict == "better"
    assert found["val/loss"].adjusted_p_value == pytest.approx(found["val/loss"].p_value / 0.8)
    others = [diff for diff in found.values() if not diff.headline]
    assert all(diff.adjusted_p_value >= diff.p_value for diff in others)
    assert {diff.verdict for diff in others} <= {"inconclusive", "equivalent"}


def test_the_headline():
    curves = {"train/loss": decay(), "val/loss": decay(), "val/accuracy": 1 - decay() / 3}
    pair = [make_run(curves)], [make_run(curves)]

    def headline(**options):
        found = compare(*pair, ComparisonEngineConfig(**options))
        return [key for key, diff in found.items() if diff.headline]

    assert headline() == ["val/loss"]
    assert headline(headline_metric="train/loss") == ["train/loss"]
    target = MetricTargetSpec("val/accuracy", 0.8, "at_least")
    assert headline(metric_targets=(target,)) == ["val/accuracy"]


def test_the_objective_of_a_run_is_the_headline():
    curves = {"val/loss": decay(), "energy": decay() / 2}
    pair = [make_run(curves)], [make_run({"val/loss": decay(), "energy": decay()})]
    pair[0][0].config = {"quark_objective": "energy", "quark_objective_mode": "max"}
    found = compare(*pair, ComparisonEngineConfig())
    assert [key for key, diff in found.items() if diff.headline] == ["energy"]
    assert (found["energy"].direction, found["val/loss"].direction) == ("higher", "lower")
    pair[0][0].config = {"quark_objective": "never/logged"}
    found = compare(*pair, ComparisonEngineConfig())
    assert [key for key, diff in found.items() if diff.headline] == ["val/loss"]


def test_the_same_run_and_the_same_values():
    run = losses([3])
    diff = compare(run, run, pairing=Pairing(None, same_runs=True))["val/loss"]
    assert (diff.verdict, diff.method) == ("equivalent", "identical")
    twin = one(decay(4), decay(4))
    assert (twin.verdict, twin.method) == ("equivalent", "identical")


def test_groups_whose_runs_are_all_alike():
    diff = compare(losses([1, 1]), losses([1, 1, 1]))["val/loss"]
    assert (diff.verdict, diff.method) == ("equivalent", "identical")


def test_copies_of_one_run_are_no_seeds():
    diff = compare(losses([1, 1, 1]), losses([2, 2, 2], level=0.5))["val/loss"]
    assert diff.verdict == "inconclusive"
    assert "count as one" in diff.reason


def test_metrics_of_one_side():
    found = compare([make_run({"a/loss": [1, 2]})], [make_run({"b/loss": [1, 2]})])
    assert found["a/loss"].presence == "primary_only"
    assert found["a/loss"].last.primary == 2
    assert found["a/loss"].last.difference is None
    assert found["b/loss"].presence == "reference_only"
    assert {diff.verdict for diff in found.values()} == {None}
    assert "only the primary" in found["a/loss"].reason
    assert compare([make_run({})], [make_run({})]) == {}


def test_one_point():
    diff = one([0.5], [0.7])
    assert diff.verdict == "inconclusive"
    assert diff.area is None
    assert diff.last.difference == pytest.approx(-0.2)


def test_disjoint_ranges():
    diff = one((range(10), [1.0] * 10), (range(50, 60), [2.0] * 10))
    assert diff.verdict == "inconclusive"
    assert diff.common_start is None
    assert diff.reason == "no common steps: the primary has 0 to 9, the reference 50 to 59"
    assert diff.last.primary is None


def test_no_points_within_the_common_range():
    diff = one(([0, 100], [1.0, 1.0]), (range(40, 60), [2.0] * 20))
    assert diff.verdict == "inconclusive"
    assert "within the common range" in diff.reason


def test_epochs():
    diff = one({0: 1.0, 1: 0.8, 2: 0.6, 3: 0.5}, {0: 1.1, 1: 0.9, 2: 0.7})
    assert (diff.unit, diff.common_start, diff.common_end) == ("epoch", 0, 2)
    assert diff.last.difference == pytest.approx(-0.1)
    mixed = one({0: 1.0, 1: 0.8}, [1.0, 0.9, 0.8])
    assert "over epochs only" in mixed.reason
    assert mixed.verdict == "inconclusive"


def test_values_that_are_not_finite():
    broken = decay(1)
    broken[20:] = math.nan
    diff = one(broken, decay(2))
    assert (diff.verdict, diff.method) == ("worse", "divergence")
    assert (diff.primary_non_finite_count, diff.reference_non_finite_count) == (40, 0)
    assert one(decay(2), broken).verdict == "better"
    assert one(broken, broken * math.inf).verdict == "inconclusive"
    holes = decay(3)
    holes[::7] = math.inf
    diff = one(holes, decay(4))
    assert diff.method == "single_seed"
    assert diff.primary_non_finite_count == 9


def test_groups_some_of_which_diverge():
    good = losses(range(6))
    bad = []
    for seed in range(10, 16):
        curve = decay(seed)
        if seed != 10:
            curve[30:] = math.nan
        bad.append(make_run({"val/loss": curve}))
    diff = compare(bad, good)["val/loss"]
    assert diff.verdict == "worse"
    assert "5 of the primary's and 0 of the reference's runs end" in diff.reason
    json.dumps(diff.to_dict(), allow_nan=False)


def test_a_group_that_diverges_as_a_whole():
    curve = decay(1)
    curve[30:] = math.nan
    diff = compare([make_run({"val/loss": curve})] * 4, losses(range(4)))["val/loss"]
    assert (diff.verdict, diff.method) == ("worse", "welch")
    assert "count as one" not in diff.reason


@pytest.mark.parametrize("scale", [1e308, 1e-308, 1e200, 0.0])
def test_huge_and_tiny_values(scale):
    diff = one(decay(1) / 3 * scale, decay(2) / 3 * scale)
    assert diff.verdict in ("inconclusive", "equivalent")
    signs = np.where(np.arange(60) % 2, 1.0, -1.0)
    one(signs * scale, -signs * scale)
    groups = [
        [make_run({"val/loss": decay(s) / 3 * scale}) for s in seeds]
        for seeds in ((1, 2, 3), (4, 5, 6))
    ]
    json.dumps(compare(*groups)["val/loss"].to_dict(), allow_nan=False)


def test_several_points_of_one_step():
    diff = one(([0, 0, 1, 1], [1, 3, 5, 7]), ([0, 1], [2, 6]))
    assert (diff.last.primary, diff.last.reference) == (6, 6)
    assert diff.area.difference == 0


def test_runs_that_lack_the_metric_are_left_out():
    primary = [*losses(range(3)), make_run({"other": [1, 2]})]
    diff = compare(primary, losses(range(5, 9)))["val/loss"]
    assert (diff.primary_run_count, diff.reference_run_count) == (3, 4)


def test_the_same_input_gives_the_same_output():
    def make():
        return compare(losses(range(9)), losses(range(20, 29)))["val/loss"].to_dict()

    assert make() == make()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"metric_targets": "val/loss"}, "metric_targets"),
        ({"error_rate": 0}, "error_rate"),
        ({"tail_fraction": 1.5}, "tail_fraction"),
        ({"single_seed_factor": 1}, "single_seed_factor"),
        ({"persistence": 0}, "persistence"),
        ({"pairing": "always"}, "pairing"),
        ({"directions": {"a": "up"}}, "directions"),
        ({"directions": [("a", "lower")]}, "directions"),
        ({"tolerances": {"a": math.nan}}, "tolerances"),
        ({"tolerances": None}, "tolerances"),
        ({"seed_deviations": {"a": -1.0}}, "seed_deviations"),
        ({"relative_tolerance": -1}, "relative_tolerance"),
        ({"relative_tolerance": "a"}, "relative_tolerance"),
    ],
)
def test_bad_options_are_refused_by_name(options, name):
    with pytest.raises(SchemaValidationError, match=name):
        ComparisonEngineConfig(**options)


def test_configs_are_values():
    assert hash(ComparisonEngineConfig(tolerances={"a": 1.0})) == hash(
        ComparisonEngineConfig(tolerances={"a": 1.0})
    )


@pytest.mark.parametrize("size", [1e200, -1e200, 1e308, -1e308])
def test_figures_at_the_end_of_the_range(size):
    wild = make_run({"val/loss": [size if i % 2 else 5e-324 for i in range(40)]})
    calm = make_run({"val/loss": [1.0 + 0.01 * (i % 3) for i in range(40)]})
    for sides in (([wild], [calm]), ([calm], [wild]), ([wild], [wild])):
        diff = compare(*sides)["val/loss"]
        assert diff.verdict in ("better", "worse", "equivalent", "inconclusive")
        json.dumps(diff.to_dict(), allow_nan=False)


def test_a_list_of_targets_is_taken():
    target = MetricTargetSpec("val/loss", 0.5, "at_most")
    assert ComparisonEngineConfig(metric_targets=[target]).metric_targets == (target,)
    assert ComparisonEngineConfig().metric_targets == ()


@pytest.mark.parametrize(
    "arguments",
    [("", 1.0, "at_least"), ("a", math.inf, "at_least"), ("a", True, "at_most"), ("a", 1, "up")],
)
def test_bad_targets(arguments):
    with pytest.raises(SchemaValidationError):
        MetricTargetSpec(*arguments)
