"""Some functions of one state of a module in another: this differs, and nothing else."""

import pytest

from quark.provenance.code_changes import compare_modules, exchange_units
from quark.provenance.code_fingerprints import fingerprint_module

BEFORE = """
import math

K = 1

class Net:
    rate = 2

    def step(self, x):
        return x * self.rate

    @staticmethod
    def loss(x):
        return x

def clip(r):
    return min(r, 10)

def gone(r):
    return r - 1

print(clip(3))"""
AFTER = """
import math

K = 2

class Net:
    rate = 3

    def extra(self):
        return 1

    def step(self, x):
        return x * self.rate + self.extra()

    @staticmethod
    def loss(x):
        return x + 1

def helper(r):
    return r * 7

def clip(r):
    return min(r, 20) + helper(0)

print(clip(3))"""


def list_changes(text):
    found = compare_modules(fingerprint_module(BEFORE), fingerprint_module(text))
    return {(each.kind, each.name) for each in found}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["clip"], {("changed", "clip"), ("added", "helper")}),
        (["Net.loss"], {("changed", "Net.loss"), ("added", "Net.extra"), ("added", "helper")}),
        (["Net"], {("changed", "Net"), ("added", "Net.extra"), ("added", "helper")}),
        (["gone"], {("removed", "gone"), ("added", "helper")}),
        (["", "gone"], {("changed", ""), ("removed", "gone"), ("added", "helper")}),
    ],
)
def test_what_is_named_differs_and_what_was_added_comes_with_it(names, expected):
    assert list_changes(exchange_units(BEFORE, AFTER, names)) == expected


def test_all_that_differs_makes_the_state_after():
    names = ["", "Net", "Net.step", "Net.loss", "Net.extra", "clip", "gone", "helper"]
    assert exchange_units(BEFORE, AFTER, names) == AFTER


def test_what_cannot_be_put_together_is_refused():
    # The rest of the module without the function that it no longer has is another change.
    assert exchange_units(BEFORE, AFTER, [""]) is None
    assert exchange_units(BEFORE, "def clip(:", ["clip"]) is None


def test_a_text_that_ends_without_a_line_feed_stays_readable():
    one, two = "x = 1\ndef f(): return 1", "x = 1\ndef f(): return 2\ndef g(): return 3"
    text = exchange_units(one, two, ["f"])
    namespace = {}
    exec(text, namespace)
    assert (namespace["f"](), namespace["g"]()) == (2, 3)
