"""What a sweep searches."""

import math

import pytest

import quark
from quark.sweeps.space import read_space
from quark_core.errors import SchemaValidationError

SPACE = {
    "lr": quark.uniform(1e-5, 1e-1, log=True),
    "dropout": quark.uniform(0.0, 0.5, step=0.1),
    "width": quark.uniform(-1, 1),
    "layers": quark.integers(1, 4),
    "hidden": quark.integers(16, 1024, log=True),
    "heads": quark.integers(2, 16, step=2),
    "optimizer": ["adam", "sgd", None],
    "epochs": 10,
}


def test_a_draw_lies_in_the_space_and_reaches_all_of_it():
    space = read_space(SPACE)
    drawn = [space.draw(7, place) for place in range(2_000)]
    assert all(1e-5 <= d["lr"] <= 1e-1 for d in drawn)
    # As many in each of the four orders of magnitude.
    powers = [math.floor(math.log10(d["lr"])) for d in drawn]
    counts = [powers.count(power) for power in range(-5, -1)]
    assert all(400 < count < 600 for count in counts)
    assert {round(d["dropout"], 9) for d in drawn} == {0.0, 0.1, 0.2, 0.3, 0.4, 0.5}
    assert min(d["width"] for d in drawn) < -0.98
    assert max(d["width"] for d in drawn) > 0.98
    assert {d["layers"] for d in drawn} == {1, 2, 3, 4}
    assert {16, 17}.intersection(d["hidden"] for d in drawn)
    assert max(d["hidden"] for d in drawn) > 1_000
    assert {d["heads"] for d in drawn} == {2, 4, 6, 8, 10, 12, 14, 16}
    assert {d["optimizer"] for d in drawn} == {"adam", "sgd", None}
    assert {d["epochs"] for d in drawn} == {10}


def test_a_draw_is_the_same_in_every_process_and_with_every_neighbour():
    # Figures as they were drawn first: another one would be another search by the same seed.
    drawn = read_space(SPACE).draw(0, 3)
    assert drawn["lr"] == pytest.approx(1.8321916406602746e-05, rel=1e-12)
    assert (drawn["layers"], drawn["optimizer"]) == (3, "sgd")
    alone = read_space({"lr": SPACE["lr"]})
    assert alone.draw(0, 3)["lr"] == drawn["lr"]
    assert alone.draw(1, 3)["lr"] != drawn["lr"]
    assert alone.draw(0, 4)["lr"] != drawn["lr"]


def test_a_space_is_kept_as_a_definition_and_read_back():
    space = read_space(SPACE)
    again = read_space(space.to_dict())
    assert again.ranges == space.ranges
    assert space.to_dict()["lr"] == {"type": "uniform", "low": 1e-5, "high": 1e-1, "log": True}
    assert space.to_dict()["layers"] == {"type": "integers", "low": 1, "high": 4}
    assert space.to_dict()["epochs"] == {"type": "choices", "values": [10]}


def test_a_grid_has_each_combination_once():
    space = read_space(
        {"a": [1, 2], "b": quark.integers(1, 3), "c": quark.uniform(1, 100, log=True, count=3)}
    )
    grid = list(space.iterate_grid())
    assert len(grid) == space.count_grid() == 2 * 3 * 3
    assert len({tuple(each.items()) for each in grid}) == len(grid)
    assert [each["c"] for each in grid[:3]] == [1, pytest.approx(10), 100]
    assert [each["a"] for each in grid] == [1] * 9 + [2] * 9


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "space must be a mapping"),
        ("lr", "space must be a mapping"),
        ({"lr": []}, r"space\['lr'\] must contain 1 to"),
        ({"lr": {"type": "normal"}}, r"space\['lr'\] must be quark.uniform"),
        (
            {"lr": {"type": "uniform", "low": 1, "high": 0}},
            r"space\['lr'\]: low must be below high",
        ),
        (
            {"lr": {"type": "uniform", "low": 0, "high": 1, "size": 1}},
            "options that uniform does not support",
        ),
        ({"lr": {"type": "uniform"}}, "options that uniform does not support|low"),
        ({"": [1]}, "space name"),
    ],
)
def test_a_space_that_is_none_is_refused_by_its_name(given, message):
    with pytest.raises(SchemaValidationError, match=message):
        read_space(given)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: quark.uniform(1, 1), "low must be below high"),
        (lambda: quark.uniform(0, 1, log=True), "low must be above 0"),
        (lambda: quark.uniform(0, float("nan")), "high must be a finite number"),
        (lambda: quark.uniform("0", 1), "low must be a finite number"),
        (lambda: quark.uniform(1, 2, log=True, step=0.1), "step and log"),
        (lambda: quark.uniform(1, 2, step=0), "step must be more than 0"),
        (lambda: quark.uniform(1, 2, count=0), "count must be"),
        (lambda: quark.integers(1.5, 2), "low must be a whole number"),
        (lambda: quark.integers(1, True), "high must be a whole number"),
        (lambda: quark.integers(0, 4, log=True), "low must be above 0"),
        (lambda: quark.integers(1, 4, step=0), "step must be at least 1"),
    ],
)
def test_a_range_that_is_none_is_refused(make, message):
    with pytest.raises(SchemaValidationError, match=message):
        make()


def test_a_grid_without_end_says_how_to_give_it_one():
    with pytest.raises(SchemaValidationError, match=r"space\['lr'\] is continuous.*count=5"):
        read_space({"lr": quark.uniform(0, 1)}).count_grid()
    with pytest.raises(SchemaValidationError, match="a grid may have 1,000,000"):
        read_space({"a": quark.integers(1, 5000), "b": quark.integers(1, 5000)}).count_grid()
