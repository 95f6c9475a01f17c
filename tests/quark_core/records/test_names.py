"""Names: any text has an encoding within the rule, and that encoding leads back to it."""

import re
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import quark
from quark_core.backends.curves import CurveQuery
from quark_core.errors import SchemaValidationError
from quark_core.records.names import (
    MAX_NAME_LENGTH,
    check_key,
    check_name,
    decode_name,
    encode_name,
    is_plain_name,
    join_name,
    split_name,
)
from quark_core.runs.following import read_series_many

RULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")

# Text of any kind, and text out of the few pieces that escapes are made of.
PIECES = ["x", "_", "x40", "_x5f_", "4", "0a", "g", "/", "@", "é", "😀", ".", " "]
NAMES = st.text() | st.lists(st.sampled_from(PIECES)).map("".join)


@given(NAMES)
@example("")
@example("\U0010ffff")
@example("\ud800")
@example("a\nb")
def test_decoding_gives_back_what_was_encoded(name):
    assert decode_name(encode_name(name)) == name


@given(NAMES)
@example("a\n")
def test_an_encoding_is_always_within_the_rule(name):
    assert RULE.fullmatch(encode_name(name))


@given(NAMES)
def test_an_encoding_has_as_many_segments_as_the_name(name):
    assert encode_name(name).count("/") == name.count("/")


def test_short_names_of_the_letters_of_escapes_all_come_back_and_never_share_an_encoding():
    names = {"".join(letters) for size in range(7) for letters in product("x_4/@", repeat=size)}
    encodings = {name: encode_name(name) for name in names}

    assert len(set(encodings.values())) == len(names)
    assert [name for name, encoded in encodings.items() if decode_name(encoded) != name] == []


@pytest.mark.parametrize(
    "name", "loss train/loss a/b/c 0 lr-group.0 top_5 max_x x x_axis xff a-".split()
)
def test_a_plain_name_is_stored_as_it_stands(name):
    assert is_plain_name(name)
    assert encode_name(name) == name


@pytest.mark.parametrize(
    ("name", "encoded"),
    [
        ("mean@1", "mean_x40_1"),
        ("_step", "x5f_step"),
        ("a//b", "a/x_/b"),
        ("/a", "x_/a"),
        ("a/", "a/x_"),
        ("train loss", "train_x20_loss"),
        ("mean_x40_1", "mean_x5f_x40_1"),
    ],
)
def test_the_encodings_that_stores_hold_do_not_change(name, encoded):
    assert encode_name(name) == encoded


@pytest.mark.parametrize("name", ["mean_x40_1", "x40_", "x_", "x78__", "x5f_step", "a/x_/b"])
def test_a_name_that_looks_encoded_is_encoded_once_more(name):
    assert not is_plain_name(name)
    assert encode_name(name) != name
    assert decode_name(encode_name(name)) == name
    assert decode_name(encode_name(encode_name(name))) == encode_name(name)


@pytest.mark.parametrize("name", ["", "/", "a/", "/a", "_a", "a b", "é", "a\n", "٣"])
def test_names_outside_the_rule_are_not_plain(name):
    assert not is_plain_name(name)


@given(NAMES)
@example("loss_xffffff_")
def test_decoding_a_name_that_was_never_encoded_does_not_fail(name):
    assert isinstance(decode_name(name), str)


@pytest.mark.parametrize("name", [None, 3, b"loss", ["loss"]])
def test_a_name_of_another_type_is_refused(name):
    with pytest.raises(SchemaValidationError, match=f"^metric_name .*{type(name).__name__}"):
        check_name(name, "metric_name")


@pytest.mark.parametrize("name", ["", " ", "\t\n", "/", "// /"])
def test_an_empty_name_is_refused(name):
    with pytest.raises(SchemaValidationError, match=r"^event_type .*empty"):
        check_name(name, "event_type")


def test_the_longest_name_is_taken_and_one_longer_refused():
    longest = "n" * MAX_NAME_LENGTH

    assert check_name(longest, "namespace") == longest
    with pytest.raises(SchemaValidationError, match=f"^namespace has {MAX_NAME_LENGTH + 1} "):
        check_name(longest + "n", "namespace")


@given(st.none() | NAMES, NAMES.filter(lambda name: "/" not in name))
def test_a_joined_key_splits_into_its_namespace_and_name(namespace, name):
    assert split_name(join_name(namespace, name)) == (namespace, name)


def test_the_key_of_a_name_that_fits_is_read_however_long_it_is(tmp_path):
    """Encoded, a name of 250 characters is stored under a key of up to 1,500."""
    name = "@" * MAX_NAME_LENGTH
    key = encode_name(name)
    assert len(key) > MAX_NAME_LENGTH
    assert check_key(key, "metric") == key
    for long in ("a" * (MAX_NAME_LENGTH + 1), encode_name("@" * (MAX_NAME_LENGTH + 1))):
        with pytest.raises(SchemaValidationError, match="metric has 251 characters"):
            check_key(long, "metric")
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        with pytest.warns(RuntimeWarning, match="naming rule"):
            metrics.log(name, 1.0, step=0)
        for asked in (name, key):
            assert metrics.columns(metric_key=asked)["value"].tolist() == [1.0]
            assert metrics.series(asked).last.tolist() == [1.0]
        found = read_series_many(
            session.open_run.reader, session.run_id, CurveQuery.build([key], entries=10)
        )
        assert [curve.key for curve in found.curves] == [key]
