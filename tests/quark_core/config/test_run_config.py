"""Configs: whatever people pass becomes plain JSON, with a note where it could not."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from click.testing import CliRunner

import quark
from quark.cli.main import cli
from quark_core.config.arguments import find_storage_root
from quark_core.config.redaction import REDACTED
from quark_core.config.snapshot import list_reads, snapshot_config, tracked
from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import decode_json
from quark_core.records.query import Query

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


CONFIG = {"lr": 0.1, "never": 1, "optimizer": {"name": "sgd", "momentum": 0.9}}


def read_of(config):
    return list_reads(config)[0]


def test_keys_read_by_item_by_attribute_and_below_are_noted():
    config = tracked(CONFIG)
    assert config.lr == 0.1
    assert config["optimizer"].name == "sgd"
    assert config.get("absent") is None
    assert read_of(config) == ["lr", "optimizer.name"]


@pytest.mark.parametrize("walk", [dict, list, len, lambda c: {**c}, lambda c: list(c.items())])
def test_who_walks_over_it_has_read_all_of_it(walk):
    config = tracked(CONFIG)
    walk(config["optimizer"])
    assert read_of(config) == ["optimizer.momentum", "optimizer.name"]
    walk(config)
    assert read_of(config) == ["lr", "never", "optimizer.momentum", "optimizer.name"]


def test_asking_whether_a_key_is_there_reads_it():
    config = tracked(CONFIG)
    assert "never" in config
    assert read_of(config) == ["never"]


def test_a_pickle_and_a_deep_copy_count_as_having_read_all():
    for take in (copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))):
        config = tracked(CONFIG)
        assert take(config) == CONFIG
        assert len(read_of(config)) == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_reads_of_forked_children_count():
    config = tracked(CONFIG)
    child = os.fork()
    if child == 0:
        config.never  # noqa: B018
        os._exit(0)
    os.waitpid(child, 0)
    assert read_of(config) == ["never"]


def test_it_cannot_be_changed_and_says_so():
    config = tracked(Namespace(lr=0.1))
    for change in (lambda: setattr(config, "lr", 1), lambda: config.__setitem__("lr", 1)):
        with pytest.raises(TypeError, match="lr"):
            change()
    with pytest.raises(AttributeError, match="absent"):
        config.absent  # noqa: B018


def test_what_is_no_mapping_is_refused():
    with pytest.raises(quark.SchemaValidationError, match="tracked: config must be"):
        tracked([1])


def test_a_run_keeps_at_its_end_what_was_read_and_its_own_snapshot_reads_nothing(tmp_path):
    config = quark.tracked(CONFIG)
    with quark.start_run(project="p", storage_dir=tmp_path, config=config) as session:
        assert config.lr == 0.1
    run = quark.open_run(session.run_id, storage_dir=tmp_path)
    assert dict(run.config) == CONFIG
    (said,) = run.open_run.read("fingerprint", Query()).to_records()
    assert said.key == "config_reads"
    assert json.loads(json.dumps(said.metadata))["read"] == ["lr"]


def test_show_says_which_keys_were_never_read(tmp_path):
    """Ato's `get_minimal_config`: what is left of a configuration that matters."""
    config = quark.tracked(CONFIG)
    with quark.start_run(project="p", storage_dir=tmp_path, config=config) as session:
        assert config.lr == 0.1
    shown = CliRunner().invoke(cli, ["show", session.id, "-d", str(tmp_path)])
    unread = sorted({"optimizer.momentum", "optimizer.name", "never"})
    assert f"1 of 4 keys were read, never: {', '.join(unread)}" in " ".join(shown.output.split())


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a store, below a home of its own; the working directory is far below it."""
    home = tmp_path / "home"
    root = home / "project"
    (root / "src" / "deep").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    quark.start_run(project="p", storage_dir=root, name="first").end_run()
    monkeypatch.chdir(root / "src" / "deep")
    return root


def test_runs_and_readers_below_a_store_use_it(project):
    with quark.start_run(project="p") as session:
        assert session.context.storage_dir == project
    assert next(run.run_id for run in quark.search_runs()) == session.id
    assert quark.open_run(session.id).context.storage_dir == project
    assert not (project / "src" / "deep" / ".quark").exists()


def test_a_folder_that_is_named_wins(project):
    here = project / "src" / "deep"
    with quark.start_run(project="p", storage_dir=".") as session:
        assert session.context.storage_dir == here
    # And from then on that one is the next.
    assert find_storage_root(here) == here
    assert find_storage_root(project / "src") == project


def test_the_way_up_ends_at_home(project):
    home = project.parent
    shutil.move(project / ".quark", home / ".quark")
    assert find_storage_root(project / "src") == project / "src"
    # Who works there means it.
    assert find_storage_root(home) == home


def test_a_folder_called_so_that_is_no_store_is_passed_by(project):
    (project / "src" / ".quark").mkdir()
    assert find_storage_root(project / "src" / "deep") == project
    # In the working directory itself it is told, and not passed by.
    assert find_storage_root(project / "src") == project / "src"


def test_a_mark_that_is_a_link_marks_nothing(project):
    marker = project / ".quark" / "store.json"
    marker.rename(project / "elsewhere.json")
    marker.symlink_to(project / "elsewhere.json")
    assert find_storage_root(project / "src") == project / "src"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs owners of files")
def test_the_way_up_ends_at_a_folder_that_everybody_may_write(project):
    project.chmod(0o777)
    assert find_storage_root(project / "src") == project / "src"


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs to give files away"
)
@pytest.mark.parametrize("what", [".quark", ".quark/store.json", "."])
def test_a_store_of_somebody_else_is_told_and_left_alone(project, what, caplog):
    os.chown(project / what, 12345, 12345)
    here = project / "src" / "deep"
    assert find_storage_root(here) == here
    told = [record.getMessage() for record in caplog.records]
    if what != ".":
        assert len(told) == 1
        assert str(project) in told[0]
        assert "storage_dir=" in told[0]
    with quark.start_run(project="p") as session:
        assert session.context.storage_dir == here
    assert len(caplog.records) == len(told)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs to give files away"
)
def test_a_folder_of_somebody_else_on_the_way_ends_it(project):
    os.chown(project / "src", 12345, 12345)
    assert find_storage_root(project / "src" / "deep") == project / "src" / "deep"


def test_a_store_is_left_alone_by_git_and_what_is_said_there_stays(tmp_path):
    quark.start_run(project="p", storage_dir=tmp_path).end_run()
    ignore = tmp_path / ".quark" / ".gitignore"
    assert ignore.read_text() == "*\n"
    ignore.write_text("runs\n")
    quark.start_run(project="p", storage_dir=tmp_path).end_run()
    assert ignore.read_text() == "runs\n"
