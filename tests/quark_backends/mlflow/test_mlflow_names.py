"""Names and params as MLflow takes them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quark_backends.mlflow.lifecycle import fit, flatten, is_same
from quark_backends.mlflow.points import NameMap, chunk, encode_name


@pytest.mark.parametrize(
    ("name", "encoded"),
    [
        ("train/loss", "train/loss"),
        ("val/AR@100", "val/AR_at_100"),
        ("top 5 %", "top 5 _pct_"),
        ("a//b/", "a/b"),
        ("/a", "a"),
        ("./a/..", "_x2e_/a/_x2e__x2e_"),
        ("...", "..."),
        ("a:b", "a_x3a_b"),
        ("a\nb", "a_x0a_b"),
        ("损失", "损失"),
        ("e\u0301", "é"),
        ("", "_"),
        ("///", "_"),
    ],
)
def test_names(name, encoded):
    assert encode_name(name) == encoded


@settings(deadline=None)  # the first call imports MLflow
@given(st.text(max_size=400))
def test_mlflow_takes_every_encoded_name(name):
    validation = pytest.importorskip("mlflow.utils.validation")
    encoded = encode_name(name)
    validation._validate_metric(encoded, 1.0, 0, 0)
    assert encode_name(encoded) == encoded


@given(st.lists(st.text(max_size=8), unique=True, max_size=30))
def test_distinct_keys_have_distinct_names(tmp_path_factory, keys):
    path = tmp_path_factory.mktemp("names") / "names.json"
    names = NameMap(path).find("metrics", [(key, key) for key in keys])
    assert len({names[key].casefold() for key in keys}) == len(keys)
    again = NameMap(path).find("metrics", [(key, key) for key in reversed(keys)])
    assert again == names


def test_names_that_only_a_forgiving_database_takes_for_one(tmp_path):
    names = NameMap(tmp_path / "n.json").find(
        "metrics", [(key, key) for key in ("loss", "Loss", "a@b", "a_at_b", "é", "e", "x", "x ")]
    )
    assert [names[key] for key in ("loss", "a@b", "é", "x")] == ["loss", "a_at_b", "é", "x"]
    for key in ("Loss", "a_at_b", "e", "x "):
        assert names[key].startswith(f"{key}_h_")


def test_long_names_differ(tmp_path):
    keys = ["x" * 249 + end for end in ("aa", "ab")]
    names = NameMap(tmp_path / "n.json").find("metrics", [(key, key) for key in keys])
    assert len(set(names.values())) == 2
    assert all(len(name) <= 250 for name in names.values())


def test_two_processes_share_the_names(tmp_path):
    path = tmp_path / "n.json"
    first, second = NameMap(path), NameMap(path)
    ours = dict(first.find("metrics", [("Loss", "Loss")]))
    theirs = second.find("metrics", [("loss", "loss")])
    assert theirs["Loss"] == ours["Loss"] == "Loss"
    assert theirs["loss"] != "loss"


def test_params_are_flat_text():
    values = {"a": {"b": {"c": 1}, "d": []}, "e": None, "f": 1.5, "g": "x", "h": {}}
    assert list(flatten(values)) == [
        (("a", "b", "c"), "1"),
        (("a", "d"), "[]"),
        (("e",), "None"),
        (("f",), "1.5"),
        (("g",), "x"),
        (("h",), "{}"),
    ]


def test_long_values_stay_different():
    first, second = "x" * 9000 + "a", "x" * 9000 + "b"
    assert fit(first, 6000) != fit(second, 6000)
    assert len(fit(first, 6000)) == 6000
    assert len(fit(first, 250)) == 250
    assert is_same(fit(first, 500), first)
    assert not is_same(fit(first, 500), second)
    assert fit("a\0b", 250) == "a\ufffdb"


@given(
    st.lists(st.integers(min_value=1, max_value=50)),
    st.integers(min_value=1, max_value=7),
    st.integers(min_value=1, max_value=100),
)
def test_chunks_keep_order_and_limits(sizes, max_count, max_bytes):
    parts = list(chunk(sizes, sizes, max_count, max_bytes))
    assert [size for part in parts for size in part] == sizes
    for part in parts:
        assert 0 < len(part) <= max_count
        assert sum(part) <= max_bytes or len(part) == 1
