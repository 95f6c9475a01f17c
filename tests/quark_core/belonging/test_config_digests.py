"""When two configurations are one, and when two have one shape."""

import pytest

from quark_core.records.runs import digest_config, digest_structure

BASE = {"lr": 0.1, "model": {"width": 64, "name": "net"}, "sizes": [1, 2], "seed": 3}


def test_digests_are_the_same_on_every_machine():
    """Golden: what has changed here has changed for every store that is there."""
    assert digest_config(BASE) == "3ca10e6b081533968c1946b946d3635c"
    assert digest_structure(BASE) == "c7615ba88f8fe830f3b0f8d5fab79228"


@pytest.mark.parametrize(
    "same",
    [
        {"seed": 3, "sizes": [1, 2], "model": {"name": "net", "width": 64}, "lr": 0.1},
        {**BASE, "seed": 4},
        {**BASE, "model": {"width": 64.0, "name": "net"}},
        {**BASE, "quark_objective": "val/loss", "quark_objective_mode": "min"},
        {"lr": 0.1, "model": {"width": 64, "name": "net"}, "sizes": [1, 2]},
        {**BASE, "data": {"seed": 9}, "shuffle_seed": 1},
    ],
)
def test_order_seeds_and_objective_are_no_difference(same):
    assert digest_config(same) == digest_config(BASE)
    assert digest_structure(same) == digest_structure(BASE)


@pytest.mark.parametrize(
    "other",
    [
        {**BASE, "lr": 0.2},
        {**BASE, "lr": "0.1"},
        {**BASE, "sizes": [2, 1]},
        {**BASE, "model": {"width": 64}},
        {**BASE, "new": None},
    ],
)
def test_another_value_is_another_configuration(other):
    assert digest_config(other) != digest_config(BASE)


def test_structure_is_keys_and_types_and_no_values():
    shape = digest_structure(BASE)
    assert digest_structure({**BASE, "lr": 7, "sizes": [1, 2, 3, 4]}) == shape
    assert digest_structure({**BASE, "lr": "a"}) != shape
    assert digest_structure({**BASE, "lr": True}) != shape
    assert digest_structure({**BASE, "lr": None}) != shape
    assert digest_structure({**BASE, "sizes": ["a"]}) != shape
    assert digest_structure({**BASE, "more": 1}) != shape


def test_where_an_object_lay_in_memory_is_no_value():
    values = [{"loss": f"<Loss object at 0x7f{i:04x}>"} for i in range(2)]
    assert digest_config(values[0]) == digest_config(values[1])


def test_lists_in_lists_are_told_apart_as_ever():
    """Golden, as of a configuration without any: lists of five lists are what they were."""
    nested = {"x": [[1, [2.5, "a"]], [{"b": [None]}, [True]], []]}
    assert digest_structure(nested) == "991bd891aaae741c98565ac68e16899c"


@pytest.mark.parametrize("inner", [[1], [1, "a"], {"a": 1}])
def test_lists_nested_ever_deeper_cost_no_more(inner):
    """Each list named each type within it twice: of 60 of them the digest was never finished."""
    found = []
    for _ in range(60):
        inner = [inner, "text"]
        found.append(digest_structure({"x": inner}))
    assert len(set(found[:3])) == 3
    assert len(set(found[10:])) == 1
