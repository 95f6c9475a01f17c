"""Configs: whatever people pass becomes plain JSON, with a note where it could not."""

import json
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from quark_core.config.redaction import REDACTED
from quark_core.config.snapshot import snapshot_config
from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import decode_json

torch = pytest.importorskip("torch")


class Level(IntEnum):
    HIGH = 3


class Mode(Enum):
    FAST = "fast"
    PAIR = (1, 2)


@dataclass
class Optimizer:
    lr: float = 0.1
    betas: tuple = (0.9, 0.999)
    path: Path = Path("a/b")
    extra: dict = field(default_factory=lambda: {"amsgrad": False})


class RaisingRepr:
    def __repr__(self):
        raise RuntimeError("no repr")


class RaisingStr:
    def __str__(self):
        raise RuntimeError("no str")


class RaisingMapping(Mapping):
    def __getitem__(self, key):
        raise RuntimeError("mandatory value is missing")

    def __iter__(self):
        return iter(["a"])

    def __len__(self):
        return 1


class CountingLoop(dict):
    """Holds itself twice, and gives up on whoever goes through it again and again."""

    def __init__(self):
        super().__init__(left=self, right=self)
        self.visits = 0

    def items(self):
        self.visits += 1
        if self.visits > 20_000:
            raise MemoryError("a small config was walked through more than 20,000 times")
        return super().items()


def take(value):
    """What a value becomes inside a config, and the notes about it."""
    snapshot = snapshot_config({"x": value})
    assert decode_json(snapshot.values.encoded) == snapshot.values
    json.dumps(snapshot.to_dict(), allow_nan=False)
    return snapshot.values["x"], snapshot.notes


class Dotted(MutableMapping):
    """A dictionary as Ato's `ADict` is one: of no type of Python's, nested, and it freezes."""

    def __init__(self, **values):
        vars(self).update(_values=values, _frozen=False, _read=set())

    def __getitem__(self, key):
        self._read.add(key)
        return self._values[key]

    def __setitem__(self, key, value):
        if self._frozen:
            raise ValueError("frozen")
        self._values[key] = value

    def __delitem__(self, key):
        del self._values[key]

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)

    def __getattr__(self, key):
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None

    __setattr__ = __setitem__


OPTIMIZER = {"lr": 0.1, "betas": [0.9, 0.999], "path": "a/b", "extra": {"amsgrad": False}}


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (None, {}),
        ({"lr": 0.1, "layers": [1, None]}, {"lr": 0.1, "layers": [1, None]}),
        (OrderedDict(a=1), {"a": 1}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (Namespace(lr=0.1, nested=Namespace(a=1)), {"lr": 0.1, "nested": {"a": 1}}),
        (Optimizer(), OPTIMIZER),
        ({"optimizer": Optimizer()}, {"optimizer": OPTIMIZER}),
    ],
    ids=repr,
)
def test_mappings_namespaces_and_dataclasses_are_configs(config, values):
    snapshot = snapshot_config(config)

    assert snapshot.values == values
    assert snapshot.notes == ()


def test_a_dictionary_of_another_library_that_is_none_of_pythons_is_a_config():
    config = Dotted(lr=0.1, model=Dotted(depth=3, layers=[64, 128]))
    vars(config)["_frozen"] = True
    snapshot = snapshot_config(config)
    assert snapshot.values == {"lr": 0.1, "model": {"depth": 3, "layers": [64, 128]}}
    assert snapshot.notes == ()


@pytest.mark.parametrize("config", [[("lr", 0.1)], "lr=0.1", 3, Optimizer, object(), Path("c.yml")])
def test_anything_else_is_no_config(config):
    with pytest.raises(SchemaValidationError, match=f"^config must be .*{type(config).__name__}$"):
        snapshot_config(config)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Mode.FAST, "fast"),
        (Mode.PAIR, "PAIR"),
        (Level.HIGH, "HIGH"),
        (Path("a/b"), "a/b"),
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array(3), 3),
        (np.dtype("float32"), "float32"),
        (np.float32, "numpy.float32"),
        (torch.tensor(2.5), 2.5),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.device("cuda", 1), "cuda:1"),
        (torch.Size([2, 3]), [2, 3]),
        (torch.nn.GELU, "torch.nn.modules.activation.GELU"),
        ((1, (2, None)), [1, [2, None]]),
        ({"b", "a"}, ["a", "b"]),
        (frozenset({10, 9, 2}), [2, 9, 10]),
        (float("nan"), "NaN"),
        (-float("inf"), "-Infinity"),
        ("\ud800", "?"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_common_values_become_plain_without_a_note(value, plain):
    found, notes = take(value)

    assert found == plain
    assert type(found) is type(plain)
    assert notes == ()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"ab", "b'ab'"),
        (1 + 2j, "(1+2j)"),
        (np.zeros(2), "array([0., 0.])"),
        (torch.zeros(2), "tensor([0., 0.])"),
    ],
    ids=repr,
)
def test_what_json_cannot_hold_becomes_its_repr_with_a_note(value, text):
    found, notes = take(value)

    assert found == text
    assert len(notes) == 1
    assert notes[0].startswith("config.x ")


def test_a_note_names_the_whole_path():
    snapshot = snapshot_config({"model": {"layers": [1, {"act": object()}]}, "fine": 1})

    assert len(snapshot.notes) == 1
    assert snapshot.notes[0].startswith("config.model.layers[1].act ")


def test_a_long_repr_is_cut():
    found, _ = take(b"x" * 100_000)

    assert len(found) < 1000


@pytest.mark.parametrize(
    "value",
    [
        RaisingRepr(),
        [RaisingRepr()],
        {RaisingRepr(), 1},
        {RaisingStr(): 1},
        RaisingMapping(),
        torch.tensor(1.0, device="meta"),
        10**5000,
        {10**5000: 1},
    ],
    ids=["repr", "in list", "in set", "key", "mapping", "meta tensor", "huge int", "huge key"],
)
def test_no_value_makes_the_call_fail(value):
    snapshot = snapshot_config({"x": value, "kept": 1})

    assert snapshot.values["kept"] == 1
    assert len(snapshot.notes) >= 1
    assert decode_json(snapshot.values.encoded) == snapshot.values


def test_deep_nesting_is_cut_with_a_note():
    value = 0
    for _ in range(5000):
        value = [value]
    _, notes = take(value)

    assert len(notes) == 1


def test_twenty_levels_are_kept():
    value = "bottom"
    for _ in range(20):
        value = {"a": value}

    assert take(value) == (value, ())


@pytest.mark.parametrize("wrap", [lambda loop: loop, lambda loop: [loop]], ids=["dict", "list"])
def test_a_config_that_holds_itself_is_cut_with_a_note(wrap):
    loop = {"lr": 0.1}
    loop["again"] = wrap(loop)
    snapshot = snapshot_config(loop)

    assert snapshot.values["lr"] == 0.1
    assert len(snapshot.notes) == 1


def test_a_config_that_holds_itself_twice_does_not_take_for_ever():
    snapshot = snapshot_config(CountingLoop())

    assert len(snapshot.notes) >= 1


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({1: 10, "1": 20}, {"1": 10, "1 (str)": 20}),
        ({"1": 20, 1: 10}, {"1": 20, "1 (int)": 10}),
        ({True: 1, "True": 2, None: 3, "None": 4}, None),
        ({Level.HIGH: 1, "HIGH": 2}, {"HIGH": 1, "HIGH (str)": 2}),
        ({1: 10, "1": 20, "1 (str)": 30}, None),
    ],
    ids=repr,
)
def test_keys_that_become_one_are_both_kept_and_told_of(config, values):
    found, notes = take(config)
    assert list(found.values()) == list(config.values())
    assert found == (values or found)
    assert any("has two keys" in note for note in notes)


def test_keys_become_text():
    config = {1: "int", 0.5: "float", None: "none", Mode.FAST: "enum", (1, 2): "tuple"}
    values, _ = take(config)
    assert list(values) == ["1", "0.5", "None", "fast", "(1, 2)"]
    assert list(values.values()) == list(config.values())


def test_a_config_is_taken_as_it_is_at_the_call():
    config = {"layers": [1, 2], "inner": {"a": 1}}
    snapshot = snapshot_config(config)
    config["layers"].append(3)
    config["inner"]["a"] = 2

    assert snapshot.values == {"layers": [1, 2], "inner": {"a": 1}}


def test_secrets_go():
    config = {"hf_token": "s3cr3t", "db": Namespace(password="s3cr3t"), "num_tokens": 5}
    snapshot = snapshot_config(config)

    assert snapshot.values == {"hf_token": REDACTED, "db": {"password": REDACTED}, "num_tokens": 5}
    assert b"s3cr3t" not in snapshot.values.encoded
