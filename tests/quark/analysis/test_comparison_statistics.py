"""Tests of few runs: worked examples, exact counts, levels."""

import itertools
import math

import numpy as np
import pytest

from quark.analysis.comparison.significance import (
    adjust_by_holm,
    bootstrap_iqm,
    compare_means,
    count_deciding_runs,
    count_effective_points,
    estimate_effect,
    estimate_median_error,
    go_together,
    permute_pairs,
    permute_sides,
    probability_of_improvement,
    rank_values,
    take_iqm,
)


def array(*values):
    return np.array(values, dtype=float)


def test_welch_by_hand():
    one, two = array(27.5, 21.0, 19.0, 23.6, 17.0, 17.9), array(27.1, 22.0, 20.8, 23.4, 23.4, 23.5)
    test = compare_means(one, two)
    a, b = one.var(ddof=1) / 6, two.var(ddof=1) / 6
    assert test.method == "welch"
    assert test.t == pytest.approx((one.mean() - two.mean()) / math.sqrt(a + b))
    assert test.df == pytest.approx((a + b) ** 2 / (a * a / 5 + b * b / 5))
    assert test.df == pytest.approx(7.7, abs=0.4)
    assert 0.05 < test.p_value < 0.3
    low, high = test.interval(0.95)
    assert low < test.difference < high
    assert low < 0 < high


def test_paired_and_prediction():
    one, two = array(1.0, 2.0, 3.5, 4.0), array(0.5, 1.7, 3.0, 3.4)
    paired = compare_means(one, two, paired=True)
    assert (paired.method, paired.df) == ("paired", 3)
    assert paired.p_value < 0.01 < compare_means(one, two).p_value
    single = compare_means(array(9.0), array(1.0, 1.2, 0.8, 1.1))
    assert (single.method, single.df) == ("prediction", 3)
    assert single.p_value < 0.01
    assert compare_means(array(1.0), array(2.0)) is None
    assert compare_means(array(1.0), array(2.0), paired=True) is None


def test_no_spread():
    assert compare_means(array(1, 1), array(1, 1)).p_value == 1.0
    assert compare_means(array(1, 1), array(2, 2)).p_value == 0.0


def test_holm():
    assert adjust_by_holm([0.01, 0.04, 0.03], [1, 1, 1]) == pytest.approx([0.03, 0.06, 0.06])
    assert adjust_by_holm([0.9], [1.0]) == [0.9]
    assert adjust_by_holm([], []) == []
    assert adjust_by_holm([0.5, 0.6], [1, 1]) == [1.0, 1.0]
    # A weight of four fifths leaves the headline at a rate of 4 %.
    assert adjust_by_holm([0.04, 0.9, 0.9], [0.8, 0.1, 0.1])[0] == pytest.approx(0.05)
    # Once it is rejected, the others share the whole rate.
    assert adjust_by_holm([0.001, 0.02, 0.9], [0.8, 0.1, 0.1])[1] == pytest.approx(0.04)


def test_permutations_are_counted_exactly():
    assert permute_sides(array(1, 2, 3), array(10, 11, 12)) == pytest.approx(2 / 20)
    assert permute_sides(array(1, 2), array(1, 2)) == 1.0
    assert permute_pairs(array(1, 2, 3, 4, 5)) == pytest.approx(2 / 32)
    everyone = array(0.3, 1.9, 0.7, 2.2, 0.1, 1.4)
    observed = abs(everyone[:3].mean() - everyone[3:].mean())
    far = 0
    for chosen in itertools.combinations(range(6), 3):
        rest = [i for i in range(6) if i not in chosen]
        far += abs(everyone[list(chosen)].mean() - everyone[rest].mean()) >= observed - 1e-12
    assert permute_sides(everyone[:3], everyone[3:]) == pytest.approx(far / 20)


def test_many_permutations_are_drawn_and_the_same_each_time():
    generator = np.random.default_rng(0)
    one, two = generator.normal(size=15), generator.normal(size=15)
    first = permute_sides(one, two)
    assert first == permute_sides(one, two)
    assert 0.0 < first <= 1.0
    assert first == pytest.approx(compare_means(one, two).p_value, abs=0.03)
    differences = generator.normal(size=20) + 2.0
    assert permute_pairs(differences) == permute_pairs(differences) <= 0.001


def test_effect_and_improvement():
    one, two = array(2, 3, 4), array(0, 1, 2)
    assert estimate_effect(one, two) == pytest.approx(2.0 * (1 - 3 / 15))
    assert estimate_effect(array(1), array(2)) is None
    assert estimate_effect(array(1, 1), array(2, 2)) is None
    assert probability_of_improvement(one, two, 1) == pytest.approx(8.5 / 9)
    assert probability_of_improvement(one, two, -1) == pytest.approx(0.5 / 9)


def test_interquartile_mean():
    assert take_iqm(array(0, 1, 2, 3, 1000)) == 2.0
    one, two = array(1, 1.1, 0.9, 1, 50), array(3, 3.1, 2.9, 3, -50)
    low, high = bootstrap_iqm(one, two, 0.8)
    assert (low, high) == bootstrap_iqm(one, two, 0.8)
    assert low < take_iqm(one) - take_iqm(two) < high


def test_correlated_points_count_less():
    generator = np.random.default_rng(1)
    white = generator.normal(size=4000)
    assert count_effective_points(white) > 3000
    slow = np.empty(4000)
    slow[0] = 0.0
    for index in range(1, 4000):
        slow[index] = 0.9 * slow[index - 1] + white[index]
    # (1 - 0.9) / (1 + 0.9) of them.
    assert 100 < count_effective_points(slow) < 420
    assert count_effective_points(np.zeros(50)) == 50
    assert count_effective_points(np.zeros(2)) == 2


def test_error_of_a_median():
    generator = np.random.default_rng(2)
    medians, errors = [], []
    for _ in range(300):
        values = generator.normal(size=200)
        medians.append(np.median(values))
        errors.append(estimate_median_error(values))
    assert np.mean(errors) == pytest.approx(np.std(medians), rel=0.2)
    # A trend is no noise.
    trend = np.linspace(5, 1, 200)
    assert estimate_median_error(trend) == pytest.approx(0, abs=1e-9)
    assert estimate_median_error(np.zeros(10)) == 0.0
    assert estimate_median_error(np.ones(3)) is None


def test_ranks_share_ties():
    assert rank_values(array(3, 1, 3, -math.inf)).tolist() == [3.5, 2.0, 3.5, 1.0]


def test_pairs_go_together_or_not():
    generator = np.random.default_rng(3)
    one, noise = generator.normal(size=6), generator.normal(size=6)
    assert go_together(one, one + 0.01 * noise)
    assert not go_together(one, noise)
    assert not go_together(one, -one)
    assert not go_together(one[:2], one[:2])
    assert not go_together(np.zeros(5), np.zeros(5))


def test_ties_have_the_variance_of_a_coin():
    test = compare_means(array(0.95, 0.95, 0.95), array(0.94, 0.94, 0.94), resolution=0.01)
    assert test.error == pytest.approx(0.005 * math.sqrt(2 / 3))
    assert test.p_value > 0.05


def test_so_many_runs_have_the_power():
    generator = np.random.default_rng(4)
    one, two = generator.normal(size=5), generator.normal(size=5)
    test = compare_means(one, two)
    for change in (0.5, 1.0, 2.0):
        count = count_deciding_runs(test, change, 0.95)
        drawn = generator.normal(size=(2, 4000, count)) * math.sqrt(test.variance / 2)
        drawn[0] += change
        found = sum(compare_means(*pair).p_value <= 0.05 for pair in drawn.swapaxes(0, 1))
        assert found / 4000 == pytest.approx(0.8, abs=0.06)
    assert count_deciding_runs(test, 0.0, 0.95) == 1000
