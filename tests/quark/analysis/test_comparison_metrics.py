"""Metric diffs and verdicts, over runs in memory."""

import json
import math
import re

import numpy as np
import pytest
from comparison_runs import compare, decay, make_run

from quark.analysis.comparison.metrics import Pairing
from quark.analysis.comparison.significance import may_be_worse
from quark.analysis.config import ComparisonEngineConfig, MetricTargetSpec
from quark_core.errors import SchemaValidationError


def losses(seeds, **options):
    return [make_run({"val/loss": decay(seed, **options)}, f"r{seed}") for seed in seeds]


def one(primary, reference, config=None):
    (diff,) = compare([make_run({"val/loss": primary})], [make_run({"val/loss": reference})],
                      config).values()  # fmt: skip
    json.dumps(diff.to_dict(), allow_nan=False)
    return diff


def test_each_run_has_its_own_end_and_what_all_cover_is_named():
    falling = (range(0, 101, 10), [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
    other = (range(40, 201, 20), [5, 4, 3, 2, 9, 9, 9, 9, 8])
    diff = one(falling, other)
    assert (diff.unit, diff.common_start, diff.common_end) == ("step", 40, 100)
    assert (diff.last.primary, diff.last.reference, diff.last.difference) == (0, 8, -8)
    assert diff.last.relative_difference == -1.0
    assert (diff.best.primary, diff.best.reference) == (0, 2)
    early = diff.at_last_common_step
    assert (early.primary, early.reference, early.difference) == (0, 2, -2)
    assert diff.tail_start == 60  # five points of the one that ends first
    assert diff.tail_median.primary == 2
    assert diff.tail_median.reference == 9
    assert diff.area.primary == pytest.approx(3.0)
    assert diff.area.reference == pytest.approx(3.5)
    assert diff.headline
    assert diff.primary_noise is not None
    same = one(falling, (range(0, 101, 10), [1] * 11))
    assert same.at_last_common_step is None


def falls(end, steps, every=5, seed=0, deviation=0.001):
    """A loss under a rate that falls to 0 over so many steps, and the end that a seed has."""
    at = np.arange(0, steps + 1, every)
    at = at if at[-1] == steps else np.append(at, steps)
    drawn = end + deviation * np.random.default_rng(seed).normal()
    return make_run({"val/loss": (at, drawn + 0.5 * (1 - at / steps))})


@pytest.mark.parametrize("steps", [(190, 200), (20, 1000), (199, 200), (3225, 3250)])
def test_schedules_of_different_lengths_are_told_apart_by_their_ends_alone(steps):
    def side(end, length, first):
        return [falls(end, length, seed=first + seed) for seed in range(8)]

    even = compare(side(3.27, steps[0], 0), side(3.27, steps[1], 50))["val/loss"]
    assert even.verdict in ("equivalent", "inconclusive")
    worse = compare(side(3.274, steps[0], 0), side(3.27, steps[1], 50))["val/loss"]
    assert worse.verdict == "worse"
    assert worse.interval_low > 0
    better = compare(side(3.266, steps[1], 0), side(3.27, steps[0], 50))["val/loss"]
    assert better.verdict == "better"
    assert worse.last.difference == pytest.approx(0.004, abs=0.0015)
    assert worse.at_last_common_step is not None


def spread(mean, deviation, count):
    """Values with exactly this mean and deviation."""
    drawn = np.random.default_rng(count).normal(size=count)
    return mean + deviation * (drawn - drawn.mean()) / drawn.std(ddof=1)


def record(end, steps):
    """A run of a public speed-run: a loss every 125 steps and at the end."""
    at = np.append(np.arange(0, steps, 125), steps)
    return make_run({"val/loss": (at, end + 1.26 * (1 - at / steps) ** 1.0)})


def test_a_public_speed_run():
    ends = {3250: (3.2771, 0.0009, 8), 3225: (3.2785, 0.0010, 16), 3175: (3.2770, 0.0003, 4)}
    sides = {steps: [record(end, steps) for end in spread(*given)] for steps, given in ends.items()}
    second = compare(sides[3225], sides[3250])["val/loss"]
    assert (second.verdict, second.method) == ("worse", "welch")
    assert second.last.difference == pytest.approx(0.0014)
    # Welch's test by hand.
    error = math.sqrt(0.0010**2 / 16 + 0.0009**2 / 8)
    assert (second.interval_low + second.interval_high) / 2 == pytest.approx(0.0014)
    assert second.interval_high - second.interval_low == pytest.approx(2 * 2.12 * error, rel=0.02)
    third = compare(sides[3175], sides[3250])["val/loss"]
    assert third.verdict in ("equivalent", "inconclusive")
    assert third.interval_low < 0 < third.interval_high
    # What was called better is the value at a step where one schedule alone has ended.
    assert second.at_last_common_step.difference < -0.03


def test_an_end_that_one_side_logged_no_more_is_no_difference():
    def side(every, first):
        at = np.arange(0, 1000, every)
        return [
            make_run({"val/loss": (at, 3 + 0.001 * r + 0.5 * (1 - at / 1000))})
            for r in np.random.default_rng(first).normal(size=5)
        ]

    diff = compare(side(50, 0), side(10, 1))["val/loss"]
    assert diff.verdict == "inconclusive"
    assert "log the last step" in diff.reason


def test_curves_that_cross_and_meet_at_the_end():
    at = np.arange(0, 201, 5)

    def side(power, first):
        return [
            make_run({"val/loss": (at, 3 + 0.001 * r + 0.5 * (1 - (at / 200) ** power))})
            for r in np.random.default_rng(first).normal(size=8)
        ]

    assert compare(side(0.3, 0), side(4, 1))["val/loss"].verdict in ("equivalent", "inconclusive")


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
    # Seeds that have nothing in common are not paired: that would cost half of what is known.
    apart = losses(range(20, 26), spread=0.1)
    assert compare(primary, apart, pairing=pairing)["val/loss"].method == "welch"


def test_one_run_against_a_group():
    group = losses(range(6), spread=0.01)
    diff = compare(losses([99], level=0.9), group)["val/loss"]
    assert (diff.method, diff.verdict) == ("prediction", "worse")
    assert "one run compared with" in diff.reason
    assert compare(losses([98], spread=0.01), group)["val/loss"].verdict == "inconclusive"


def test_single_runs_are_inconclusive_however_far_apart():
    for primary in (decay(1) * 1.5, decay(1) / 10, decay(1) * 1000):
        diff = one(primary, decay(2))
        assert (diff.verdict, diff.method) == ("inconclusive", "single_seed")
        assert "use three or more runs a side" in diff.reason
        assert (diff.p_value, diff.interval_low) == (None, None)
    assert may_be_worse(one(decay(1) * 1.5, decay(2)))
    assert not may_be_worse(one(decay(1) / 10, decay(2)))
    # Within the tolerance nobody is asked for evidence.
    assert not may_be_worse(one(decay(1) * 1.005, decay(1)))


def test_a_known_deviation_tells_single_runs_apart():
    config = ComparisonEngineConfig(seed_deviations={"val/loss": 0.005})
    diff = one(decay(1, level=0.25, spread=0.0), decay(2, spread=0.0), config)
    assert (diff.method, diff.verdict) == ("known_deviation", "better")
    assert diff.interval_high < 0
    loose = ComparisonEngineConfig(seed_deviations={"val/loss": 0.05})
    assert one(decay(1, level=0.25), decay(2), loose).verdict == "inconclusive"


def test_rates_have_a_tolerance_of_their_own():
    def at(level):
        return make_run({"val/accuracy": np.linspace(level - 0.05, level, 30)})

    found = compare([at(0.92)], [at(0.88)])["val/accuracy"]
    assert (found.verdict, found.tolerance) == ("inconclusive", 0.01)
    assert may_be_worse(compare([at(0.88)], [at(0.92)])["val/accuracy"])
    assert not may_be_worse(found)


def test_ties_of_a_share_of_few_samples_are_no_certainty():
    def side(levels):
        return [make_run({"val/accuracy": [0.5, 0.9, level]}) for level in levels]

    tied = compare(side([0.95] * 3), side([0.94] * 3))["val/accuracy"]
    assert tied.verdict == "inconclusive"
    # Runs whose curves differ are seeds, although they end at one value.
    curves = [[0.5 + 0.01 * k, 0.9, level] for k, level in enumerate([0.95] * 3)]
    other = [[0.53 + 0.01 * k, 0.9, level] for k, level in enumerate([0.94] * 3)]
    sides = [[make_run({"val/accuracy": curve}) for curve in side] for side in (curves, other)]
    diff = compare(*sides)["val/accuracy"]
    assert (diff.verdict, diff.method) == ("inconclusive", "welch")
    assert diff.interval_low < 0 < diff.interval_high
    far = [[make_run({"val/accuracy": [*c[:2], 0.2]}) for c in other]]
    assert compare(sides[0], *far)["val/accuracy"].verdict == "better"


def test_a_few_samples_right_or_wrong_are_chance():
    def at(level):
        return make_run({"val/accuracy": [level] * 30})

    for one, two in ((1.0, 0.985), (0.0, 0.01), (1.0, 0.99)):
        assert compare([at(one)], [at(two)])["val/accuracy"].verdict == "inconclusive"


def test_values_of_either_sign():
    def returns(level):
        return make_run({"episode/return": level + 10 * np.sin(np.arange(100) / 5)})

    def side(level):
        return [returns(level + seed) for seed in range(4)]

    assert compare(side(0), side(0.5))["episode/return"].verdict == "inconclusive"
    assert compare(side(100), side(-100))["episode/return"].verdict == "better"


def test_unknown_direction_gives_the_difference_and_no_verdict():
    diff = compare([make_run({"x": [1, 2, 3]})], [make_run({"x": [2, 3, 4]})])["x"]
    assert (diff.verdict, diff.direction, diff.best) == (None, "none", None)
    assert diff.tail_median.difference == -1
    config = ComparisonEngineConfig(directions={"x": "lower"})
    sides = [[make_run({"x": [2, level + seed]}) for seed in range(3)] for level in (1, 9)]
    assert compare(*sides, config)["x"].verdict == "better"


def test_many_metrics_are_corrected_together():
    generator = np.random.default_rng(5)

    def make(seed, better):
        curves = {f"m{i}/loss": decay(seed * 50 + i, spread=0.05) for i in range(20)}
        curves["val/loss"] = decay(seed, level=0.2 if better else 0.3)
        return make_run({key: curves[key] for key in generator.permutation(list(curves))})

    found = compare([make(i, True) for i in range(5)], [make(i, False) for i in range(7, 12)])
    assert next(iter(found)) == "val/loss"
    assert found["val/loss"].verdict == "better"
    # The headline has the whole error rate, so that its verdict is that of its interval.
    assert found["val/loss"].adjusted_p_value == found["val/loss"].p_value
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


def test_the_others_have_a_fifth_of_the_error_rate_where_the_headline_does_not_differ():
    def make(seed, end):
        generator = np.random.default_rng(seed)
        return make_run({
            "val/loss": 0.3 + 0.01 * generator.normal(size=4),
            "a/loss": [1, end + 0.01 * generator.normal()],
            "b/loss": [1, 0.5 + 0.01 * generator.normal()],
        })  # fmt: skip

    found = compare([make(s, 0.5) for s in range(6)], [make(s, 0.6) for s in range(9, 15)])
    assert found["val/loss"].verdict == "inconclusive"
    assert found["a/loss"].verdict == "better"
    assert found["a/loss"].adjusted_p_value == pytest.approx(2 * found["a/loss"].p_value / 0.2)


def test_disjoint_ranges():
    diff = one((range(10), [1.0] * 10), (range(50, 60), [2.0] * 10))
    assert diff.verdict == "inconclusive"
    assert diff.common_start is None
    assert (diff.last.primary, diff.last.reference) == (1.0, 2.0)
    assert (diff.at_last_common_step, diff.area) == (None, None)


def test_no_points_within_the_common_range():
    diff = one(([0, 100], [1.0, 1.0]), (range(40, 60), [2.0] * 20))
    assert diff.verdict == "inconclusive"
    assert (diff.last.primary, diff.last.reference) == (1.0, 2.0)
    assert diff.at_last_common_step.primary is None


def test_epochs():
    diff = one({0: 1.0, 1: 0.8, 2: 0.6, 3: 0.5}, {0: 1.1, 1: 0.9, 2: 0.7})
    assert (diff.unit, diff.common_start, diff.common_end) == ("epoch", 0, 2)
    assert diff.last.difference == pytest.approx(-0.2)
    assert diff.at_last_common_step.difference == pytest.approx(-0.1)
    mixed = one({0: 1.0, 1: 0.8}, [1.0, 0.9, 0.7])
    assert (mixed.common_start, mixed.verdict) == (None, "inconclusive")
    assert mixed.last.difference == pytest.approx(0.1)


def test_values_that_are_not_finite():
    broken = decay(1)
    broken[20:] = math.nan
    diff = one(broken, decay(2))
    assert (diff.verdict, diff.method) == ("inconclusive", "divergence")
    assert may_be_worse(diff)
    assert (diff.primary_non_finite_count, diff.reference_non_finite_count) == (40, 0)
    assert (diff.last.primary, diff.last.difference) == (None, None)
    assert not may_be_worse(one(decay(2), broken))
    late = decay(1)
    late[-3:] = math.nan
    assert one(late, decay(2)).method == "divergence"
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
    assert diff.method == "permutation"
    assert (diff.last.difference, diff.interval_low) == (None, None)
    assert "5 of the primary's and 0 of the reference's runs end" in diff.reason
    single = compare(bad[1:2] + good[:4], good[4:] + losses(range(30, 33)))["val/loss"]
    assert single.verdict == "inconclusive"
    json.dumps(diff.to_dict(), allow_nan=False)


def test_a_group_that_diverges_as_a_whole():
    def diverge(seed):
        curve = decay(seed)
        curve[30:] = math.nan
        return make_run({"val/loss": curve})

    diff = compare([diverge(seed) for seed in range(9, 13)], losses(range(4)))["val/loss"]
    assert (diff.verdict, diff.method) == ("worse", "permutation")
    # Three and three might be chance: one in ten.
    few = compare([diverge(seed) for seed in range(9, 12)], losses(range(3)))["val/loss"]
    assert few.verdict == "inconclusive"
    assert may_be_worse(few)


def test_what_would_decide_is_told_with_its_number():
    options = {"level": 0.3, "spread": 0.02}
    diff = compare(losses(range(5), **options), losses(range(20, 25), **options))["val/loss"]
    told = re.match(r"inconclusive with 5 runs; (\d+) would decide", diff.reason)
    count = int(told[1])
    # By the normal approximation of four cases in five.
    variance = diff.last.primary_deviation**2 + diff.last.reference_deviation**2
    assert count == pytest.approx(7.85 * variance / diff.tolerance**2, rel=0.1)
    unequal = compare(losses(range(3), **options), losses(range(20, 25), **options))["val/loss"]
    assert re.match(r"inconclusive with 3 and 5 runs; \d+ a side would decide", unequal.reason)


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
