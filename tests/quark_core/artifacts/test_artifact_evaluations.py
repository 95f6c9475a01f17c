"""Confusion matrices, curves and histograms have the numbers that scikit-learn has."""

import numpy as np
import pytest

from quark_core.errors import SchemaValidationError

CHANCE = np.random.default_rng(1)
# Many scores are equal, as those of a small model are.
TRUTH = CHANCE.integers(0, 2, 500)
SCORES = np.round(CHANCE.random(500) * 0.7 + TRUTH * 0.3, 2)


def test_a_matrix_counts_as_scikit_learn_does(artifacts):
    metrics = pytest.importorskip("sklearn.metrics")
    truth, told = CHANCE.integers(0, 4, 300), CHANCE.integers(0, 4, 300)
    record = artifacts.log_confusion_matrix("c", truth, told)
    found = artifacts.load(record)
    assert found["matrix"] == metrics.confusion_matrix(truth, told).tolist()
    assert found["labels"] == ["0", "1", "2", "3"]
    assert record.metadata["accuracy"] == metrics.accuracy_score(truth, told)


@pytest.mark.parametrize(
    ("truth", "told", "labels", "names", "matrix"),
    [
        ([0, 1], [1, 1], ["cat", "dog"], ["cat", "dog"], [[0, 1], [0, 1]]),
        (["b", "a"], ["b", "b"], None, ["a", "b"], [[0, 1], [0, 1]]),
        (["b", "a"], ["b", "b"], ["b", "a"], ["b", "a"], [[1, 0], [1, 0]]),
        ([5, 7], [5, 5], {5: "five", 7: "seven"}, ["five", "seven"], [[1, 0], [1, 0]]),
        ([0.0, 1.0], [True, False], [0, 1], ["0", "1"], [[0, 1], [1, 0]]),
        ([0], [0], ["a", "b", "c"], ["a", "b", "c"], [[1, 0, 0], [0, 0, 0], [0, 0, 0]]),
        (["x", 1], ["x", 1], None, ["1", "x"], [[1, 0], [0, 1]]),
    ],
)
def test_classes_may_be_numbers_texts_or_have_names(artifacts, truth, told, labels, names, matrix):
    found = artifacts.load(artifacts.log_confusion_matrix("c", truth, told, labels=labels))
    assert found == {"labels": names, "matrix": matrix}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({}, "y_true and y_pred, or matrix"),
        ({"y_true": [0]}, "y_true and y_pred"),
        ({"y_true": [0], "y_pred": [0, 1]}, "y_true has 1"),
        ({"y_true": [], "y_pred": []}, "empty"),
        ({"y_true": [[0.1, 0.9]], "y_pred": [1]}, "argmax"),
        ({"y_true": [0, 9], "y_pred": [0, 0], "labels": {0: "a"}}, "lacks the class 9"),
        ({"matrix": [[1, 2]]}, "square"),
        ({"matrix": [[1, 2], [3, 4]], "labels": ["a"]}, "labels has 1"),
        ({"matrix": [["a"]]}, "numbers"),
        ({"y_true": range(1500), "y_pred": range(1500)}, "1500 classes"),
    ],
)
def test_what_is_no_matrix_is_refused(artifacts, arguments, word):
    with pytest.raises(SchemaValidationError, match=word):
        artifacts.log_confusion_matrix("c", **arguments)


def test_areas_and_points_are_those_of_scikit_learn(artifacts):
    metrics = pytest.importorskip("sklearn.metrics")
    roc = artifacts.log_roc_curve("r", TRUTH, SCORES)
    assert roc.metadata["auc"]["1"] == pytest.approx(metrics.roc_auc_score(TRUTH, SCORES))
    (curve,) = artifacts.load(roc)["curves"]
    wanted = metrics.roc_curve(TRUTH, SCORES, drop_intermediate=False)
    assert np.allclose(curve["x"], wanted[0])
    assert np.allclose(curve["y"], wanted[1])
    assert np.allclose(curve["thresholds"][1:], wanted[2][1:])
    pr = artifacts.log_pr_curve("p", TRUTH, SCORES)
    area = metrics.average_precision_score(TRUTH, SCORES)
    assert pr.metadata["average_precision"]["1"] == pytest.approx(area)
    (curve,) = artifacts.load(pr)["curves"]
    precision, recall, _ = metrics.precision_recall_curve(TRUTH, SCORES)
    assert np.allclose(curve["x"], recall[::-1])
    assert np.allclose(curve["y"], precision[::-1])


def test_each_class_has_a_curve_and_points_may_be_given(artifacts):
    scores = CHANCE.random((100, 3))
    truth = CHANCE.choice(["a", "b", "c"], 100)
    record = artifacts.log_roc_curve("r", truth, scores, labels=["a", "b", "c"])
    assert list(record.metadata["auc"]) == ["a", "b", "c"]
    for points in (([0, 0.5, 1], [0, 1, 1]), {"fpr": [0, 0.5, 1], "tpr": [0, 1, 1]}):
        given = artifacts.log_roc_curve("r", points=points)
        assert given.metadata["auc"] == {"": 0.75}
    named = artifacts.log_pr_curve("p", points={"x": ([1, 0], [0.5, 1]), "y": ([0, 1], [1, 1])})
    assert named.metadata["average_precision"] == {"x": 0.5, "y": 1.0}


def test_what_has_no_area_says_so_and_what_is_not_finite_is_counted(artifacts):
    record = artifacts.log_roc_curve("r", [1, 1, 1], [0.1, np.nan, 0.3])
    (curve,) = artifacts.load(record)["curves"]
    assert (curve["area"], curve["left_out"], curve["positives"]) == (None, 1, 2)
    nothing = artifacts.log_pr_curve("p", [0, 0], [np.nan, np.nan])
    assert artifacts.load(nothing)["curves"][0]["area"] is None


def test_a_curve_of_many_points_is_thinned_and_its_area_is_not(artifacts):
    truth, scores = CHANCE.integers(0, 2, 50_000), CHANCE.random(50_000)
    record = artifacts.log_roc_curve("r", truth, scores)
    (curve,) = artifacts.load(record)["curves"]
    assert len(curve["x"]) == len(curve["thresholds"]) == 1000
    assert (curve["x"][0], curve["x"][-1], curve["y"][-1]) == (0, 1, 1)
    assert record.size_bytes < 200_000


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({}, "points"),
        ({"y_true": [0, 1]}, "points"),
        ({"y_true": [0], "y_score": [0.1, 0.2]}, "y_true"),
        ({"y_true": [], "y_score": []}, "y_true"),
        ({"y_true": [0, 1], "y_score": ["a", "b"]}, "y_score"),
        ({"y_true": ["x"], "y_score": [[1.0]], "labels": ["a"]}, "lacks the class"),
        ({"points": ([0, 1], [1])}, "points has 2"),
        ({"points": 3}, "points"),
        ({"points": "ab"}, "points"),
    ],
)
def test_what_is_no_curve_is_refused(artifacts, arguments, word):
    with pytest.raises(SchemaValidationError, match=word):
        artifacts.log_roc_curve("r", **arguments)


def test_a_histogram_of_values_is_that_of_numpy(artifacts):
    values = CHANCE.normal(size=(30, 40))
    record = artifacts.log_histogram("h", values, bins=20)
    counts, edges = np.histogram(values, bins=20)
    found = artifacts.load(record)
    assert found["counts"] == counts.tolist()
    assert np.allclose(found["bins"], edges)
    odd = artifacts.log_histogram("h", [np.nan, 1.0, np.inf, 1e308, -1e308])
    assert (odd.metadata["values"], odd.metadata["non_finite"]) == (5, 2)
    assert sum(artifacts.load(odd)["counts"]) == 3
    edges = artifacts.load(artifacts.log_histogram("h", [1, 2, 3], bins=[0, 2, 4]))
    assert edges == {"bins": [0, 2, 4], "counts": [1, 2]}
    assert sum(artifacts.load(artifacts.log_histogram("h", []))["counts"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [{}, {"values": [1], "counts": [1]}, {"values": ["a"]}, {"values": [1], "bins": 0},
     {"values": [1], "bins": [3, 1]}, {"values": [1], "bins": "auto!"}, {"counts": [1]}],
)  # fmt: skip
def test_what_is_no_histogram_is_refused(artifacts, arguments):
    with pytest.raises(SchemaValidationError):
        artifacts.log_histogram("h", **arguments)
