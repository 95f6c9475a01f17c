"""Which functions of a project a function reaches."""

from __future__ import annotations

import pytest

from quark.provenance.code_fingerprints import CodeReach, fingerprint_module

PROJECT = {
    "train.py": """
import quark
from losses import weigh as w
import tools.images as images
from tools import *
import tools.deep.text

CLIP = 1.0
UNUSED = 2.0

@quark.trace("step")
def step(model, batch):
    out = model(batch)
    return w(images.crop(out)) * clip() + tools.deep.text.count(batch)

def clip():
    return CLIP

def never():
    return unknown_thing()

def main():
    return apply(step)

def apply(f):
    return f(Net(), 1)

from models import Net
""",
    "losses.py": """
import train

def weigh(x):
    return helper(x)

def helper(x):
    return train.clip() * x

def alone(): pass
""",
    "tools/__init__.py": """
from .images import pad
from . import images
from .deep import inner
""",
    "tools/images.py": """
def crop(x):
    return pad(x)

def pad(x):
    return x

def unused(x):
    return x
""",
    "tools/deep/__init__.py": "from ..images import unused as inner",
    "tools/deep/text.py": """
from ...losses import alone
from ..images import pad

def count(x):
    return pad(x)
""",
    "models.py": """
import torch

class Base(torch.nn.Module):
    def forward(self, x):
        return self.scale(x)

    def scale(self, x):
        return 2 * x

class Net(Base):
    size = 3

    def forward(self, x):
        with guard():
            return super().forward(x) + self.size

class Other:
    def extra(self):
        return 1

def guard():
    return Other()
""",
}


def make(changes=()):
    project = dict(PROJECT)
    for path, old, new in changes:
        assert old in project[path]
        project[path] = project[path].replace(old, new)
    return CodeReach({path: fingerprint_module(text) for path, text in project.items()})


def labels(path, name):
    return {place.label for place in make().find(path, name)}


def test_what_is_called_by_name_is_reached_through_imports_and_their_circles():
    reached = labels("train.py", "step")
    assert {
        "train.py: step",
        "train.py: clip",
        "losses.py: weigh",
        "losses.py: helper",
        "tools/images.py: crop",
        "tools/images.py: pad",
        "tools/deep/text.py: count",
    } <= reached
    assert "train.py" in reached  # CLIP
    assert not reached & {
        "train.py: never",
        "train.py: main",
        "losses.py: alone",
        "tools/images.py: unused",
    }


def test_an_object_that_is_called_may_be_any_that_can_be():
    assert {
        "models.py: Net.forward",
        "models.py: Base.forward",
        "models.py: Base.scale",
        "models.py: guard",
    } <= labels("train.py", "step")


def test_a_class_that_is_made_is_reached_with_its_methods_and_bases():
    reached = labels("train.py", "apply")
    assert {
        "models.py: Net",
        "models.py: Net.forward",
        "models.py: Base",
        "models.py: Other.extra",
    } <= reached


def test_a_function_that_is_handed_over_is_reached():
    assert "train.py: step" in labels("train.py", "main")


def test_stars_and_packages_hand_names_on():
    project = {
        "a.py": "from b import *\ndef f():\n    return g() + h()\n",
        "b/__init__.py": "from .c import *\nfrom .d import k as h\n",
        "b/c.py": "def g():\n    return 1\n",
        "b/d.py": "def k():\n    return 1\n",
    }
    reach = CodeReach({path: fingerprint_module(text) for path, text in project.items()})
    assert {place.label for place in reach.find("a.py", "f")} == {
        "a.py: f",
        "b/c.py: g",
        "b/d.py: k",
    }


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("losses.py", "train.clip() * x", "train.clip() + x"),
        ("tools/images.py", "def pad(x):\n    return x", "def pad(x):\n    return -x"),
        ("train.py", "CLIP = 1.0", "CLIP = 2.0"),
        ("models.py", "2 * x", "3 * x"),
        ("models.py", "size = 3", "size = 4"),
        ("models.py", "class Net(Base)", "class Net(torch.nn.Module)"),
        ("train.py", "model(batch)", "model(batch, 1)"),
        ("models.py", "return Other()", "return Other"),
    ],
)
def test_what_is_reached_changes_the_second_digest(path, old, new):
    assert make([(path, old, new)]).digest("train.py", "step") != make().digest("train.py", "step")


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("losses.py", "def alone(): pass", "def alone(): return 3"),
        ("train.py", "unknown_thing()", "unknown_thing(1)"),
        ("tools/images.py", "def pad(x):\n    return x", "def pad(x):\n    # same\n    return (x)"),
    ],
)
def test_what_is_not_reached_does_not(path, old, new):
    assert make([(path, old, new)]).digest("train.py", "step") == make().digest("train.py", "step")


def test_what_is_not_there_reaches_nothing():
    assert make().find("train.py", "no") == ()
    assert make().digest("no.py", "step") is None


def test_imports_that_only_name_each_other_end():
    project = {"a.py": "from b import x\ndef f():\n    return x()\n", "b.py": "from a import x\n"}
    reach = CodeReach({path: fingerprint_module(text) for path, text in project.items()})
    assert reach.find("a.py", "f")[0].label == "a.py: f"
