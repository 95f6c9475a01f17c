"""The wire form: JSON with what is not finite, packs, and the files that JavaScript reads too."""

import json

import golden_packs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tiers import count_examples

from quark.page.pack import choose_floats, decode_pack, encode_json, encode_pack


@pytest.mark.parametrize("name", golden_packs.list_packs())
def test_golden_packs_are_what_is_encoded_now(name):
    head, columns = golden_packs.list_packs()[name]
    data = (golden_packs.FOLDER / f"{name}.pack").read_bytes()
    assert encode_pack(head, columns) == data
    said = json.loads((golden_packs.FOLDER / f"{name}.json").read_text())
    assert said == json.loads(json.dumps(golden_packs.describe(head, columns)))


@pytest.mark.parametrize("name", golden_packs.list_packs())
def test_golden_packs_read_back(name):
    head, columns = golden_packs.list_packs()[name]
    found_head, found = decode_pack((golden_packs.FOLDER / f"{name}.pack").read_bytes())
    found_head.pop("cols")
    assert found_head == golden_packs.describe(head, columns)["head"]
    assert found.keys() == columns.keys()
    for column, values in columns.items():
        assert np.array_equal(found[column], values.ravel(), equal_nan=values.dtype.kind == "f")
        assert found[column].dtype == values.dtype


@settings(max_examples=count_examples(60))
@given(
    st.dictionaries(
        st.text(max_size=8),
        arrays.arrays(st.sampled_from(["<f4", "<f8", "<i4", "|u1"]), st.integers(0, 9)),
        max_size=5,
    ),
    st.text(max_size=20),
)
def test_every_pack_reads_back_and_is_aligned(columns, text):
    data = encode_pack({"text": text}, columns)
    assert len(data) % 8 == 0
    head, found = decode_pack(data)
    body = 4 + int.from_bytes(data[:4], "little")
    assert body % 8 == 0
    for name, dtype, offset, length in head["cols"]:
        assert offset % 8 == 0
        assert (dtype, length) == (found[name].dtype.str[1:], len(found[name]))
    for name, values in columns.items():
        # By its bytes, since a NaN has some too.
        assert found[name].tobytes() == values.tobytes()


def test_what_is_no_pack_is_refused():
    whole = encode_pack({}, {"x": np.zeros(3)})
    for data in (b"", b"\0\0", whole[:9], whole[:-24], b"\x10\0\0\0" + b"x" * 40):
        with pytest.raises(ValueError, match=r"."):
            decode_pack(data)


def test_numbers_that_are_not_finite_are_texts():
    value = {"a": [float("nan"), float("inf"), -float("inf"), 1.5, None], "b\ud800": "c\ud800"}
    assert json.loads(encode_json(value)) == {
        "a": ["NaN", "Infinity", "-Infinity", 1.5, None],
        "b?": "c?",
    }


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([], "f4"),
        ([np.nan, np.inf], "f4"),
        ([0.0, 0.0], "f4"),
        ([0.1, 400.0], "f4"),
        ([5.0, 5.0], "f4"),
        ([1e9, 1e9 + 1.0], "f8"),
        ([100.0, 100.00001], "f8"),
        ([1e39, 2e39], "f8"),
        ([1e-42, 2e-42], "f8"),
    ],
)
def test_a_difference_that_shows_is_never_lost(values, dtype):
    assert choose_floats(np.array(values)) == dtype


@given(arrays.arrays("<f8", st.integers(2, 30), elements=st.floats(-1e30, 1e30)))
def test_curves_keep_their_shape_to_a_pixel(values):
    dtype = choose_floats(values)
    range_ = values.max() - values.min()
    sent = values.astype(dtype).astype("f8")
    assert np.all(np.abs(sent - values) <= max(range_ / 2000, 0.0)) or range_ == 0
