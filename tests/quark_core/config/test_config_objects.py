"""Configs of attrs, pydantic and the standard library, each told without importing its library."""

import json
import sys
import warnings
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import cached_property
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import attr
import attrs
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.programs import run_code
from omegaconf import OmegaConf

from quark_core.config.redaction import REDACTED
from quark_core.config.snapshot import snapshot_config
from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import decode_json

if sys.version_info < (3, 14):
    # Not made for later versions of Python.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pydantic import v1
else:
    v1 = None


@attrs.define
class Slotted:
    lr: float = 0.1
    _private: int = 3
    unset: int = attrs.field(init=False)


@attrs.frozen
class Frozen:
    inner: Slotted = attrs.field(factory=Slotted)
    alias_is_ignored: int = attrs.field(default=1, alias="other")


@attr.s(auto_attribs=True)
class Classic:
    lr: float = 0.1
    _private: int = 3


class Optimizer(pydantic.BaseModel):
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)


class Settings(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", arbitrary_types_allowed=True)

    width: int = pydantic.Field(default=3, alias="WIDTH")
    optimizer: Optimizer = Optimizer()
    secret_word: pydantic.SecretStr = pydantic.SecretStr("hunter22")
    hidden: pydantic.SecretBytes = pydantic.SecretBytes(b"hunter22")
    slotted: Any = None
    _private: int = pydantic.PrivateAttr(default=7)

    @pydantic.computed_field
    @cached_property
    def area(self) -> int:
        return self.width**2


class WithOwnIteration(pydantic.RootModel[dict[str, int]]):
    def __iter__(self):
        raise RuntimeError("not for others")


class Pair(NamedTuple):
    lr: float
    betas: tuple


class Raising:
    """Of no library: it only raises when a field is read."""

    def __get__(self, instance, owner):
        if instance is None:
            return 0
        raise RuntimeError("no")

    def __set__(self, instance, value):
        pass


@dataclass
class PartlyBroken:
    broken: int = Raising()
    fine: int = 1


def test_attrs_classes_with_slots_without_and_frozen():
    slotted = {"lr": 0.1, "_private": 3, "unset": None}

    assert snapshot_config(Slotted()).values == slotted
    assert snapshot_config(Classic()).values == {"lr": 0.1, "_private": 3}
    snapshot = snapshot_config(Frozen())
    assert snapshot.values == {"inner": slotted, "alias_is_ignored": 1}
    assert snapshot.notes == ()
    assert snapshot.raw is None


def test_a_pydantic_model_gives_its_fields_and_extras_by_their_own_names():
    settings = Settings(WIDTH=4, more={"of": Slotted()}, slotted=Frozen())
    assert settings.area == 16

    snapshot = snapshot_config(settings)
    assert list(snapshot.values) == [*Settings.model_fields, "more"]
    assert snapshot.values["width"] == 4
    assert snapshot.values["optimizer"] == {"lr": 0.1, "betas": [0.9, 0.999]}
    assert snapshot.values["more"]["of"]["_private"] == 3
    assert snapshot.values["slotted"]["inner"]["lr"] == 0.1
    assert snapshot.values["hidden"] == "**********"
    assert snapshot.values["secret_word"] == REDACTED  # by its key
    assert b"hunter22" not in snapshot.values.encoded
    assert snapshot.notes == ()


def test_a_model_made_without_its_checks_gives_what_it_has():
    assert snapshot_config(Optimizer.model_construct(lr="x")).values == {
        "lr": "x",
        "betas": [0.9, 0.999],
    }
    assert snapshot_config(Optimizer.__new__(Optimizer)).values == {}


def test_a_model_with_a_root_is_its_root():
    assert snapshot_config(WithOwnIteration({"a": 1})).values == {"a": 1}
    assert snapshot_config({"x": WithOwnIteration({"a": 1})}).values == {"x": {"a": 1}}
    assert snapshot_config(pydantic.RootModel[list[int]]([1, 2])).values == {"config": [1, 2]}


def test_a_pydantic_dataclass_is_a_dataclass():
    @pydantic.dataclasses.dataclass
    class Inner:
        lr: float = 0.5
        word: pydantic.SecretStr = pydantic.SecretStr("hunter22")

    assert snapshot_config(Inner()).values == {"lr": 0.5, "word": "**********"}


@pytest.mark.skipif(v1 is None, reason="pydantic.v1 does not run on this Python")
def test_models_of_the_first_pydantic():
    class Inner(v1.BaseModel):
        word: v1.SecretStr = v1.SecretStr("hunter22")
        hidden: v1.SecretBytes = v1.SecretBytes(b"hunter22")

    class Outer(v1.BaseModel):
        class Config:
            extra = "allow"
            keep_untouched = (cached_property,)

        width: int = v1.Field(3, alias="WIDTH")
        inner: Inner = Inner()

        @cached_property
        def area(self) -> int:
            return self.width**2

    class Root(v1.BaseModel):
        __root__: dict[str, int]

    outer = Outer(WIDTH=4, more=1)
    assert outer.area == 16
    assert snapshot_config(outer).values == {
        "width": 4,
        "inner": {"word": "**********", "hidden": "**********"},
        "more": 1,
    }
    assert snapshot_config({"x": Root(__root__={"a": 1})}).values == {"x": {"a": 1}}


def test_namespaces_and_named_tuples():
    space = SimpleNamespace(lr=0.1, inner=SimpleNamespace(a=1), pair=Pair(0.1, (1, 2)))

    assert snapshot_config(space).values == {
        "lr": 0.1,
        "inner": {"a": 1},
        "pair": [0.1, [1, 2]],
    }
    assert snapshot_config(Pair(0.1, (1, 2))).values == {"lr": 0.1, "betas": [1, 2]}


def test_libraries_nest_in_each_other():
    @dataclass
    class Main:
        optimizer: Any = field(default_factory=Optimizer)
        data: Any = field(
            default_factory=lambda: OmegaConf.create({"root": "/d", "train": "${.root}/train"})
        )
        space: Any = field(default_factory=lambda: [SimpleNamespace(a=Slotted())])

    snapshot = snapshot_config(Main())
    assert snapshot.values["optimizer"]["betas"] == [0.9, 0.999]
    assert snapshot.values["data"] == {"root": "/d", "train": "/d/train"}
    assert snapshot.values["space"][0]["a"]["lr"] == 0.1
    assert snapshot.raw == {
        **snapshot.values,
        "data": {"root": "/d", "train": "${.root}/train"},
    }
    assert snapshot.notes == ()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (datetime(2026, 5, 7, 9, 30, tzinfo=UTC), "2026-05-07T09:30:00+00:00"),
        (date(2026, 5, 7), "2026-05-07"),
        (timedelta(hours=1), "1:00:00"),
        (Decimal("0.10"), "0.10"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (ip_address("10.0.0.1"), "10.0.0.1"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_with_one_spelling_are_spelled(value, text):
    snapshot = snapshot_config({"x": value})
    assert snapshot.values == {"x": text}
    assert snapshot.notes == ()


def test_a_field_that_raises_does_not_cost_the_others():
    snapshot = snapshot_config(PartlyBroken())

    assert snapshot.values == {"broken": "<unreadable>", "fine": 1}
    assert snapshot.notes == (
        "config.broken was stored as its repr: reading it raised RuntimeError",
    )


@pytest.mark.parametrize(
    "config", [Slotted, Settings, Optimizer, [Slotted()], OmegaConf.create([1]), object(), (1, 2)]
)
def test_the_error_lists_what_is_a_config(config):
    with pytest.raises(SchemaValidationError) as caught:
        snapshot_config(config)
    for word in ("dict", "Namespace", "dataclass", "attrs", "pydantic", "DictConfig"):
        assert word in str(caught.value)
    assert str(caught.value).endswith(f"not {type(config).__name__}")


def test_no_library_is_imported_to_recognise_its_objects():
    code = (
        "import sys; from dataclasses import make_dataclass;"
        "from quark_core.config.snapshot import snapshot_config as take;"
        "take({'a': object(), 'b': make_dataclass('D', ['x'])(1), 'c': [1, {'d': print}]});"
        "print(sorted({'attr', 'attrs', 'pydantic', 'omegaconf'} & set(sys.modules)))"
    )
    found = run_code(code)
    assert found.stdout.strip() == "[]"


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


def contain(items):
    try:
        return OmegaConf.create(items, flags={"allow_objects": True})
    except Exception:
        return items  # OmegaConf itself cannot take everything


def nest(children):
    names = st.dictionaries(st.from_regex("[a-z]{1,3}", fullmatch=True), children, max_size=3)
    return st.one_of(
        st.lists(children, max_size=3),
        names,
        names.map(lambda items: SimpleNamespace(**items)),
        names.map(lambda items: Settings(WIDTH=1, extra=items)),
        children.map(lambda item: Slotted(lr=item)),
        children.map(lambda item: Settings.model_construct(slotted=item)),
        children.map(lambda item: PartlyBroken(fine=item)),
        children.map(lambda item: Pair(item, (item,))),
        names.map(contain),
    )


@given(st.recursive(plain | st.just(object()) | st.binary(max_size=3), nest, max_leaves=10))
def test_any_nest_of_configs_is_taken(value):
    snapshot = snapshot_config({"x": value})
    assert decode_json(snapshot.values.encoded) == snapshot.values
    json.dumps(snapshot.to_dict(), allow_nan=False)
