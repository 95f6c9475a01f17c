"""Digests of values over canonical bytes, and how far two values are apart."""

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter, OrderedDict, namedtuple

import numpy as np
import pytest

from quark.provenance.fingerprint_comparison import compare_sketches
from quark.provenance.fingerprints import sketch_output

torch = pytest.importorskip("torch")

Point = namedtuple("Point", "x y")
LARGE = 200_000


@dataclasses.dataclass
class Output:
    logits: object
    label: str


def compare(a, b):
    return compare_sketches(sketch_output(a), sketch_output(b)).verdict


def test_order_of_sets_and_mappings_is_not_part_of_a_value():
    assert compare({"a": 1, "b": {3, 1, 2}}, {"b": {2, 3, 1}, "a": 1}) == "identical"
    assert compare({1: "a", "x": 2, None: 3}, {None: 3, "x": 2, 1: "a"}) == "identical"
    assert compare({("a", 1), ("b", 2)}, {("b", 2), ("a", 1)}) == "identical"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        ([1, 2], (1, 2)),
        ("ab", b"ab"),
        (["ab", "c"], ["a", "bc"]),
        ([[1], [2, 3]], [[1, 2], [3]]),
        (0.0, -0.0),
        (True, 1),
        ({"a": 1}, OrderedDict(a=1)),
        (np.float32(1), np.float64(1)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros(3), torch.zeros(3, dtype=torch.float64)),
        (None, "None"),
        (Point(1, 2), (1, 2)),
    ],
)
def test_what_is_not_the_same_has_another_digest(one, other):
    assert sketch_output(one).digest != sketch_output(other).digest


def test_a_digest_is_the_same_in_every_process(tmp_path):
    script = """
import json, sys
from collections import Counter
import numpy as np
from quark.provenance.fingerprints import sketch_output
value = {"s": {"x", "y", ("a", 1.5)}, "c": Counter("hello"), "n": float("nan"), "i": 10**30,
         "f": frozenset("abcdef"), "a": np.arange(6, dtype=">f4").reshape(2, 3), "b": b"1"}
print(sketch_output(value).digest)
"""
    digests = set()
    for seed in ("0", "1", "77"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout.strip())
    # The value that every version of Python has to give.
    assert digests == {"210dd7862540a30f877e93594b0920f4"}


def test_nan_is_nan_whatever_its_bits():
    payload = np.array([0x7FF8000000000001, 0xFFF8000000000000], dtype=np.uint64).view(np.float64)
    assert compare(payload, np.array([np.nan, np.nan])) == "identical"
    odd = torch.tensor([0x7FC1, 0x7F81 - 65536 + 65536], dtype=torch.int32).to(torch.int16)
    plain = torch.tensor([float("nan")] * 2, dtype=torch.bfloat16)
    assert compare(odd.view(torch.bfloat16), plain) == "identical"


@pytest.mark.parametrize(
    ("dtype", "rounding", "change"),
    [("float64", 1e-13, 1e-8), ("float32", 1e-6, 1e-3)],
)
def test_rounding_is_told_from_change_by_the_type_of_numbers(dtype, rounding, change):
    values = np.random.default_rng(1).normal(size=(64, 100)).astype(dtype)
    one = np.dtype(dtype).type
    assert compare(values, values * one(1 + rounding)) == "rounding"
    found = compare_sketches(sketch_output(values), sketch_output(values * one(1 + change)))
    assert found.verdict == "different"
    assert found.deviation == pytest.approx(change, rel=0.1)
    assert (
        compare(torch.from_numpy(values), torch.from_numpy(values * one(1 + change))) != "rounding"
    )


def test_whole_numbers_and_texts_never_differ_by_rounding():
    assert compare([10**9, 1], [10**9 + 1, 1]) == "different"
    values = np.linspace(0, 1, 50)
    near = values * (1 + 1e-13)
    assert compare(Output(values, "cat"), Output(near, "cat")) == "rounding"
    assert compare(Output(values, "cat"), Output(near, "dog")) == "different"


def test_another_shape_type_or_key_is_told_as_such():
    assert compare(np.zeros((2, 3)), np.zeros((2, 4))) == "other_form"
    assert compare(np.zeros(3), np.zeros(3, dtype="f4")) == "other_form"
    assert compare({"a": 1.0}, {"b": 1.0}) == "other_form"
    words = compare_sketches(sketch_output(np.zeros(2)), sketch_output(np.zeros(3))).words
    assert words == "another shape: [2] against [3]"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(4.0, requires_grad=True),
        lambda: torch.arange(6).reshape(2, 3).T,
        lambda: torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        lambda: torch.tensor([1.5, 2.5]).to(torch.float8_e4m3fn),
        lambda: torch.tensor([1 + 2j]).conj(),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: np.array(["a", "bb"]),
        lambda: np.array([1, "a", None], dtype=object),
        lambda: np.zeros(2, dtype=[("a", "f4"), ("b", "i2")]),
        lambda: np.array(["2020-01-01"], dtype="M8[D]"),
        lambda: np.longdouble(3),
        lambda: np.ma.masked_array([1, 2], [0, 1]),
        lambda: [Point(1, 2), Counter("aab"), 10**400, 1j, range(3), torch.Size([2])],
    ],
)
def test_values_of_many_kinds_are_looked_at_whole(make):
    one, other = sketch_output(make()), sketch_output(make())
    assert one.level == "full"
    assert one.digest == other.digest
    assert json.loads(json.dumps(one.sketch)) == one.sketch


def test_layout_in_memory_is_not_part_of_a_value():
    plain = np.arange(60_000.0).reshape(200, 300)
    assert sketch_output(plain).digest == sketch_output(np.asfortranarray(plain)).digest
    assert sketch_output(plain[::2, ::3]).digest == sketch_output(plain[::2, ::3].copy()).digest


def test_what_is_not_known_is_told_by_its_type_and_never_called_the_same():
    found = sketch_output([object(), 1])
    assert found.level == "partial"
    assert "object" in found.unseen[0]
    assert compare(object(), object()) == "unknown"
    assert sketch_output(torch.empty(3, device="meta")).level == "type"


def test_a_value_that_raises_or_holds_itself_or_is_too_deep_is_no_error():
    class Hostile:
        @property
        def __array__(self):
            raise RuntimeError("no")

        dtype = "f4"

    endless = []
    endless.append(endless)
    deep = None
    for _ in range(2000):
        deep = [deep]
    for value in (Hostile(), endless, deep, {"a": Hostile()}):
        assert sketch_output(value).level in ("partial", "type")


def test_a_large_array_is_looked_at_in_places():
    values = np.zeros(LARGE * 10)
    found = sketch_output(values, level="sample")
    assert found.level == "sample"
    changed = values.copy()
    changed[-1] = 1
    assert sketch_output(changed, level="sample").digest != found.digest
    assert sketch_output(values[:10], level="sample").level == "full"


def test_tables_are_taken_by_value():
    pd = pytest.importorskip("pandas")
    pl = pytest.importorskip("polars")
    pa = pytest.importorskip("pyarrow")

    def make(word):
        return {"n": [1, 2, 3], "t": ["x", None, word], "f": [0.5, 1.5, float("nan")]}

    for build in (pd.DataFrame, pl.DataFrame, pa.table):
        one = sketch_output(build(make("z")))
        assert one.level == "full", one.unseen
        assert one.digest == sketch_output(build(make("z"))).digest
        assert one.digest != sketch_output(build(make("y"))).digest
    frame = pd.DataFrame({"o": pd.Series([{1, 2}, [1], None], dtype=object)})
    assert sketch_output(frame).digest == sketch_output(frame.copy(deep=True)).digest


def test_images_are_taken_by_their_pixels():
    image = pytest.importorskip("PIL.Image")
    one, other = image.new("RGB", (4, 4)), image.new("RGB", (4, 4), (0, 0, 1))
    assert compare(one, one.copy()) == "identical"
    assert compare(one, other) == "different"
