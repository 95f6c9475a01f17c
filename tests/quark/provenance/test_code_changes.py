"""What changed between two states of a code, told by function."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest

from quark.provenance import code_fingerprints
from quark.provenance.code_changes import compare_sources
from quark.provenance.code_fingerprints import FingerprintCache, fingerprint_module

MODEL = '''"""A model."""
import torch

WIDTH = 3


class Net(torch.nn.Module):
    depth = 2

    def __init__(self):
        self.a = 1

    def forward(self, x):
        y = self.a * x
        return y


def crop(image, size=4):
    """Cut."""
    return image[:size]


if WIDTH > 2:
    def pick(a):
        return a
else:
    def pick(a):
        return -a
'''


@pytest.fixture
def cache(tmp_path):
    return FingerprintCache(tmp_path / "cache")


@pytest.fixture
def tell(cache):
    def tell(before, after, reason=None):
        sides = [
            [
                SimpleNamespace(
                    path=path,
                    text=text,
                    sha256=hashlib.sha256(repr(text).encode()).hexdigest(),
                    reason=reason,
                )
                for path, text in side.items()
            ]
            for side in (before, after)
        ]
        changes = compare_sources(*sides, cache)
        return [(change.describe(), change.is_logic) for change in changes]

    return tell


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("self.a * x", "self.a * x * 2", ("m.py: Net.forward changed, 1 line", True)),
        ("size=4", "size=5", ("m.py: crop changed, 1 line", True)),
        (
            "return -a",
            "b = -a\n        c = b\n        return c",
            ("m.py: pick#2 changed, 3 lines", True),
        ),
        ("WIDTH = 3", "WIDTH = 4", ("m.py changed, 1 line", True)),
        ("depth = 2", "depth = 3", ("m.py: Net changed, 1 line", True)),
        ("torch.nn.Module", "torch.nn.Sequential", ("m.py: Net changed, 1 line", True)),
        ("def crop", "def cut", ("m.py: crop renamed to cut", False)),
        ("class Net", "class Network", ("m.py: Net renamed to Network", False)),
        ("def forward", "def backward", ("m.py: Net.forward renamed to Net.backward", False)),
        (
            "        return y\n",
            "        return y\n\n    def more(self):\n        pass\n",
            ("m.py: Net.more added", True),
        ),
        ("    def __init__(self):\n        self.a = 1\n", "", ("m.py: Net.__init__ removed", True)),
        ("Cut.", "Cut it.", ("m.py differs only in comments or layout", False)),
        (
            "y = self.a * x\n        return y",
            "z = self.a * x\n        return z",
            ("m.py differs only in comments or layout", False),
        ),
        (
            "WIDTH = 3",
            "WIDTH = (",
            ("m.py differs, details unknown: reading it raised SyntaxError", True),
        ),
    ],
)
def test_a_change_is_told_by_its_function(tell, old, new, told):
    assert MODEL.count(old) == 1
    assert tell({"m.py": MODEL}, {"m.py": MODEL.replace(old, new)}) == [told]
    assert tell({"m.py": MODEL}, {"m.py": MODEL}) == []


def test_a_class_comes_goes_and_moves_as_a_whole(tell):
    net = "class Net:\n    def f(self):\n        return 1\n    def g(self):\n        return 2\n"
    rest = "x = 1\n"
    assert tell({"a.py": rest}, {"a.py": rest + net}) == [("a.py: Net added", True)]
    assert tell({"a.py": rest + net}, {"a.py": rest}) == [("a.py: Net removed", True)]
    moved = tell({"a.py": rest + net, "b.py": rest}, {"a.py": rest, "b.py": rest + net})
    assert moved == [("Net moved from a.py to b.py", False)]


def test_what_moves_and_changes_is_told_as_both(tell):
    one, two = "def f():\n    return 1\n", "def f():\n    return 2\n"
    assert tell({"a.py": one, "b.py": ""}, {"a.py": "", "b.py": two}) == [
        ("a.py: f removed", True),
        ("b.py: f added", True),
    ]


def test_files_come_go_and_have_other_names(tell):
    assert tell({"a.py": MODEL}, {"src/b.py": MODEL}) == [("moved from a.py to src/b.py", False)]
    assert tell({"a.py": MODEL}, {"a.py": MODEL, "b.py": "x = 1"}) == [("b.py added", True)]
    assert tell({"a.py": MODEL, "b.py": "x = 1"}, {"a.py": MODEL}) == [("b.py removed", True)]
    assert tell({"a.yaml": "lr: 1\nb: 2\n"}, {"a.yaml": "lr: 2\nb: 2\n"}) == [
        ("a.yaml changed, 1 line", True)
    ]


def test_two_functions_in_another_order(tell):
    one, two = "def f():\n    return 1\n", "def g():\n    return 2\n"
    assert tell({"a.py": one + two}, {"a.py": two + one}) == [
        ("a.py has its definitions in a different order", False)
    ]


def test_a_definition_that_moves_past_a_statement_is_no_nothing(tell):
    one = "def f():\n    return 1\nx = f\ndef f():\n    return 2\n"
    two = "def f():\n    return 1\ndef f():\n    return 2\nx = f\n"
    assert tell({"a.py": one}, {"a.py": two}) != []
    assert fingerprint_module(one).digest != fingerprint_module(two).digest


def test_what_was_taken_out_or_not_kept_is_unknown_and_never_the_same(tell):
    changed = MODEL + "# more\n"
    (told,) = tell({"m.py": MODEL}, {"m.py": changed}, reason="redacted")
    assert told == ("m.py differs, details unknown: redacted", True)
    ((words, is_logic),) = tell({"m.py": None}, {"m.py": MODEL})
    assert "not stored" in words
    assert is_logic


def test_only_what_changed_is_parsed(tmp_path, monkeypatch):
    parsed = []
    parse = code_fingerprints.parse_source
    monkeypatch.setattr(
        code_fingerprints, "parse_source", lambda source: parsed.append(source) or parse(source)
    )
    first = FingerprintCache(tmp_path)
    known = first.fingerprint(MODEL)
    assert (first.fingerprint(MODEL), len(parsed)) == (known, 1)
    second = FingerprintCache(tmp_path)
    assert (second.fingerprint(MODEL.encode()), len(parsed)) == (known, 1)
    assert second.fingerprint(MODEL + "x = 1").digest != known.digest
    assert len(parsed) == 2


def test_a_cache_that_others_wrote_or_nobody_can_write_is_as_if_it_were_empty(tmp_path):
    cache = FingerprintCache(tmp_path / "a")
    known = cache.fingerprint(MODEL)
    (place,) = (tmp_path / "a").rglob("*.json")
    for text in (b"", b"\xff", b"{}", b'{"content": "other", "fingerprint": null}', b"[" * 9999):
        place.write_bytes(text)
        assert FingerprintCache(tmp_path / "a").fingerprint(MODEL) == known
    # What belongs to another text is not taken for this one's.
    other = FingerprintCache(tmp_path / "b")
    other.fingerprint("x = 1")
    (strange,) = (tmp_path / "b").rglob("*.json")
    place.write_bytes(strange.read_bytes())
    assert FingerprintCache(tmp_path / "a").fingerprint(MODEL) == known
    file = tmp_path / "file"
    file.write_text("")
    assert FingerprintCache(file / "below").fingerprint(MODEL) == known


def test_a_cache_does_not_grow_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(code_fingerprints, "_MOST_IN_SHARD", 4)
    monkeypatch.setattr(code_fingerprints, "_SHARD_DIGITS", 0)
    cache = FingerprintCache(tmp_path)
    for number in range(30):
        cache.fingerprint(f"x = {number}")
    assert 1 <= len(list(tmp_path.rglob("*.json"))) <= 4
