"""OmegaConf: resolved leaf by leaf, kept as it was written as well, and without secrets in both."""

import json
import warnings
from argparse import Namespace
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf

import quark
from quark_core.config.redaction import REDACTED
from quark_core.config.snapshot import snapshot_config
from quark_core.records import ConfigSnapshot
from quark_core.records.json_object import JsonObject, decode_json
from quark_core.runs.config_reading import read_config


@pytest.fixture
def raising_resolver():
    def fail(*_args):
        raise LookupError("no such thing: hunter22")

    with warnings.catch_warnings():
        # Version 2.4 gave it another name, which meant something else before.
        warnings.simplefilter("ignore")
        OmegaConf.register_new_resolver("fails", fail)
    yield
    OmegaConf.clear_resolver("fails")


def test_without_interpolations_there_is_no_raw_form():
    config = OmegaConf.create({"lr": 0.1, "layers": [1, None, {"a": True}], "empty": {}})
    snapshot = snapshot_config(config)

    assert snapshot.values == {"lr": 0.1, "layers": [1, None, {"a": True}], "empty": {}}
    assert snapshot == ConfigSnapshot(snapshot.values)


def test_values_are_what_omegaconf_resolves_and_raw_is_what_was_written():
    config = OmegaConf.create(
        {
            "base": 32,
            "width": "${base}",
            "name": "run-${base}-${.width}",
            "model": {"dims": ["${base}", "${...width}", 3], "alias": "${optimizer}"},
            "optimizer": {"lr": 0.1, "decay": "${.lr}"},
            "decoded": "${oc.decode:'[1, 2]'}",
        }
    )
    snapshot = snapshot_config(config)

    assert snapshot.values == OmegaConf.to_container(config, resolve=True)
    assert snapshot.raw == OmegaConf.to_container(config, resolve=False)
    assert snapshot.notes == ()


def test_what_cannot_be_resolved_stays_as_written_and_costs_nothing_else(raising_resolver):
    config = OmegaConf.create(
        {
            "lr": 0.1,
            "missing": "???",
            "to_missing": "${missing}",
            "broken": "${no.such.key}",
            "loop": "${loop}",
            "syntax_of_a_resolver": "${absent:1}",
            "raises": "${fails:1}",
            "fine": "${lr}",
            "list": ["${no_such}", "${lr}", "???"],
        }
    )
    snapshot = snapshot_config(config)

    written = OmegaConf.to_container(config)
    assert snapshot.values == {**written, "fine": 0.1, "list": ["${no_such}", 0.1, "???"]}
    assert snapshot.raw == written
    named = {note.partition(" ")[0] for note in snapshot.notes}
    assert named == {
        f"config.{path}"
        for path in (
            "missing to_missing broken loop syntax_of_a_resolver raises list[0] list[2]".split()
        )
    }
    assert all("as it is written" in note for note in snapshot.notes)
    assert "hunter22" not in "".join(snapshot.notes)


@pytest.mark.parametrize("node", [DictConfig, ListConfig])
def test_containers_without_content(node):
    snapshot = snapshot_config({"none": node(None), "missing": node("???"), "kept": 1})

    assert snapshot.values == {"none": None, "missing": "???", "kept": 1}
    assert len(snapshot.notes) == 1
    assert snapshot_config(DictConfig(None)).values == {"config": None}


def test_a_container_that_leads_back_to_itself_ends_there():
    config = OmegaConf.create({"a": {"b": "${a}", "c": 1}, "d": {"e": "${f}"}, "f": {"g": "${d}"}})
    snapshot = snapshot_config(config)

    assert snapshot.values["a"] == {"b": "${a}", "c": 1}
    assert snapshot.values["d"] == {"e": {"g": "${d}"}}
    assert len(snapshot.notes) == 3


def test_a_tree_of_aliases_does_not_take_for_ever():
    config = {"x0": {"leaf": 1}}
    for level in range(30):
        config[f"x{level + 1}"] = {"left": f"${{x{level}}}", "right": f"${{x{level}}}"}
    snapshot = snapshot_config(OmegaConf.create({"x30": "${y.x30}", "y": config}))

    assert 1 <= len(snapshot.notes) <= 100


class Mode(Enum):
    FAST = "fast"


@dataclass
class Model:
    width: int = 8
    depth: int = MISSING
    twice: int = "${.width}"


@dataclass
class Main:
    mode: Mode = Mode.FAST
    model: Model = field(default_factory=Model)
    names: dict[str, int] = field(default_factory=dict)
    anything: Any = "${mode}"


def test_structured_configs():
    snapshot = snapshot_config(OmegaConf.structured(Main))

    model = {"width": 8, "depth": "???", "twice": 8}
    assert snapshot.values == {"mode": "fast", "model": model, "names": {}, "anything": "fast"}
    assert snapshot.raw["model"] == {"width": 8, "depth": "???", "twice": "${.width}"}
    assert len(snapshot.notes) == 1
    assert snapshot.notes[0].startswith("config.model.depth ")


def test_a_read_only_config_and_one_that_may_not_be_asked_for_more():
    config = OmegaConf.create({"a": 1, "b": "${a}"})
    OmegaConf.set_readonly(config, True)
    OmegaConf.set_struct(config, True)

    assert snapshot_config(config).values == {"a": 1, "b": 1}


def test_containers_inside_other_objects_are_in_the_raw_form_too():
    inner = OmegaConf.create({"a": 1, "b": "${a}"})
    snapshot = snapshot_config(Namespace(x=[inner, inner.a], y={"z": inner}, n=2))

    assert snapshot.values == {"x": [{"a": 1, "b": 1}, 1], "y": {"z": {"a": 1, "b": 1}}, "n": 2}
    assert snapshot.raw == {
        "x": [{"a": 1, "b": "${a}"}, 1],
        "y": {"z": {"a": 1, "b": "${a}"}},
        "n": 2,
    }


def test_a_part_of_a_config_resolves_against_the_whole():
    config = OmegaConf.create({"lr": 0.1, "part": {"lr": "${lr}"}})

    assert snapshot_config(config.part).values == {"lr": 0.1}
    assert snapshot_config({"part": config.part}).raw == {"part": {"lr": "${lr}"}}


def test_objects_in_a_config_are_taken_like_any():
    config = OmegaConf.create({"x": Namespace(a=1)}, flags={"allow_objects": True})

    assert snapshot_config(config).values == {"x": {"a": 1}}


SECRET = "hunter22-hunter22"


@pytest.mark.parametrize(
    "config",
    [
        {"api_key": "${oc.env:API_KEY}"},
        {"header": "${oc.env:API_KEY}"},
        {"header": "Bearer ${oc.env:API_KEY}"},
        {"header": "${oc.env:${name}_KEY}", "name": "API"},
        {"header": "${source}", "source": "${oc.env:API_KEY}"},
        {"db": {"password": SECRET}, "header": "x-${db.password}"},
        {"db": {"password": SECRET}, "header": "x-${copy.of}", "copy": {"of": "${db.password}"}},
        {"db": {"password": SECRET}, "alias": "${db}"},
        {"header": f"${{oc.env:NO_SUCH_API_KEY,{SECRET}}}"},
        {"credentials": {"of": SECRET}, "header": ["${credentials.of}"]},
        {"where": "${oc.env:ADDRESS}"},
    ],
    ids=repr,
)
def test_secrets_are_in_neither_form(config, monkeypatch):
    monkeypatch.setenv("API_KEY", SECRET)
    monkeypatch.setenv("ADDRESS", f"https://user:{SECRET}@host/path")
    snapshot = snapshot_config(OmegaConf.create({**config, "lr": 0.1, "kept": "${lr}"}))

    assert SECRET not in json.dumps(snapshot.to_dict())
    assert REDACTED in json.dumps(snapshot.values)
    assert snapshot.values["kept"] == 0.1
    assert snapshot.raw["kept"] == "${lr}"


def test_an_interpolation_that_names_a_secret_shows_its_name_in_the_raw_form(monkeypatch):
    monkeypatch.setenv("API_KEY", SECRET)
    snapshot = snapshot_config(OmegaConf.create({"header": "${oc.env:API_KEY}"}))

    assert snapshot.values == {"header": REDACTED}
    assert snapshot.raw == {"header": "${oc.env:API_KEY}"}


def test_names_that_only_sound_like_secrets_are_resolved():
    config = OmegaConf.create({"max_tokens": 5, "tokenizer": {"pad_token": "<pad>"}})
    config.a, config.b = "${max_tokens}", "${tokenizer.pad_token}"
    snapshot = snapshot_config(config)

    assert (snapshot.values["a"], snapshot.values["b"]) == (5, "<pad>")


@pytest.mark.parametrize("backends", [None, "csv"])
def test_a_stored_run_has_both_forms(tmp_path, backends):
    config = OmegaConf.create({"lr": 0.1, "same": "${lr}", "missing": "???"})
    with quark.start_run(
        project="p", config=config, storage_dir=tmp_path, backends=backends
    ) as session:
        run_id = session.run_id

    from quark_core.runs.backend_choice import open_reader

    if backends == "csv":
        from quark_backends.csv.files import RunFile

        (found,) = (path.parent for path in tmp_path.rglob("config.json"))
        stored = RunFile(found).load()
    else:
        stored = open_reader(tmp_path).load_run(run_id)
    assert stored.config == read_config(config)
    assert stored.config.values == {"lr": 0.1, "same": 0.1, "missing": "???"}
    assert stored.config.raw == {"lr": 0.1, "same": "${lr}", "missing": "???"}
    assert stored.to_dict()["config"]["raw"]["same"] == "${lr}"


def test_a_stored_config_without_a_raw_form_is_read():
    read = ConfigSnapshot.from_data({"values": {"a": 1}, "notes": ["n"]})

    assert read == ConfigSnapshot(JsonObject({"a": 1}), ("n",))
    assert read.raw is None


leaves = st.sampled_from(
    [
        "${a}",
        "${b.a}",
        "${.a}",
        "${..a}",
        "${oc.env:NO}",
        "${",
        "${a",
        "???",
        "${nope:${a}}",
        "x",
        1,
    ]
)
trees = st.recursive(
    leaves,
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "api_key"]), below, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), trees, min_size=1))
def test_any_interpolations_are_taken(tree):
    try:
        config = OmegaConf.create(tree)
    except Exception:
        return  # OmegaConf itself refuses what it cannot parse
    snapshot = snapshot_config(config)
    assert decode_json(snapshot.values.encoded) == snapshot.values
    assert set(snapshot.values) == set(tree)
    try:
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except Exception:
        return
    if "api_key" not in json.dumps(tree):
        assert snapshot.values == resolved
        assert snapshot.notes == ()
