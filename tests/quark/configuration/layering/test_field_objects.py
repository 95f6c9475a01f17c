"""Objects with fields in a configuration: one field is set, the others stay as they are."""

import argparse
import collections
import dataclasses
import types

import pytest

from quark import LayeredConfig, Layers, SchemaValidationError


@dataclasses.dataclass
class Inner:
    beta: float = 0.9
    steps: int = 3


@dataclasses.dataclass(frozen=True)
class Opt:
    lr: float = 0.1
    name: str = "adam"
    inner: Inner = dataclasses.field(default_factory=Inner)

    def __post_init__(self):
        if self.lr < 0:
            raise ValueError("lr is negative")


Pair = collections.namedtuple("Pair", ["lr", "name"])


def make_attrs():
    attrs = pytest.importorskip("attrs")
    return attrs.make_class("Attrs", ["lr", "name"], frozen=True)(0.1, "adam")


def make_model():
    pydantic = pytest.importorskip("pydantic")
    return pydantic.create_model("Model", lr=(float, 0.1), name=(str, "adam"))()


OBJECTS = {
    "dataclass": Opt,
    "tuple": lambda: Pair(0.1, "adam"),
    "namespace": lambda: argparse.Namespace(lr=0.1, name="adam"),
    "simple": lambda: types.SimpleNamespace(lr=0.1, name="adam"),
    "attrs": make_attrs,
    "pydantic": make_model,
}


def resolve(make, *argv):
    layers = Layers()
    layers.add(lambda c: c.update(opt=make()), name="defaults", default=True)
    return layers.resolve(list(argv))


@pytest.mark.parametrize("kind", OBJECTS)
def test_one_field_is_set_and_the_others_stay(kind):
    config = resolve(OBJECTS[kind], "opt.lr=0.2")
    assert (config.opt.lr, config.opt.name) == (0.2, "adam")
    assert config["opt.lr"] == 0.2
    assert type(config.opt).__name__ == type(OBJECTS[kind]()).__name__


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_unknown_field_is_refused(kind):
    with pytest.raises(SchemaValidationError, match="has no field 'nmae'; did you mean 'name'"):
        resolve(OBJECTS[kind], "opt.nmae=x")


def test_fields_of_fields():
    config = resolve(Opt, "opt.inner.beta=0.5")
    assert config.opt == Opt(inner=Inner(0.5, 3))
    with pytest.raises(SchemaValidationError, match="Inner has no field 'gamma'"):
        config["opt.inner.gamma"] = 1
    with pytest.raises(SchemaValidationError, match=r"cannot be '-1'.*lr is negative"):
        config["opt.lr"] = -1
    assert "opt.inner.gamma" not in config


def test_the_object_of_the_caller_is_not_changed():
    mine = Inner()
    config = LayeredConfig(opt=mine)
    config["opt.beta"] = 0.5
    assert mine == Inner()
    assert "0.5" in config.why("opt")


def test_a_mapping_is_merged_into_the_fields():
    config = LayeredConfig(opt=Opt())
    config.update({"opt": {"lr": 0.3, "inner": Inner(0.1)}})
    assert config.opt == Opt(0.3, "adam", Inner(0.1))
    assert config["opt"] is config.opt
    config["opt"] = {"lr": 0.4}
    assert config.to_dict() == {"opt": {"lr": 0.4}}
