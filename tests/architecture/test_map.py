"""The map of the house names what is there."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["contributing/architecture.md", "reference/glossary.md", "reference/stability.md"]
NAME = re.compile(r"`(quark(?:_core|_backends|_torch)?(?:\.\w+)+)`")
# Names of entry-point groups look like modules.
GROUPS = {"quark.backends", "quark.plugins", "quark.rules"}
FOLDER = re.compile(r"`((?:tests|docs|benchmarks)/[\w./-]+)`")


def exists(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("page", PAGES)
def test_every_module_and_folder_that_a_page_names_is_there(page):
    text = (ROOT / "docs" / page).read_text()
    modules = {name for name in NAME.findall(text) if not re.search(r"\.[A-Z_]", name)} - GROUPS
    assert modules
    assert [name for name in sorted(modules) if not exists(name)] == []
    assert [path for path in FOLDER.findall(text) if not (ROOT / path).exists()] == []


def test_the_map_has_every_room_on_its_floor():
    text = (ROOT / "docs/contributing/architecture.md").read_text()
    told = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (floors,) = (one for one in contracts["contracts"] if one.get("containers") == ["quark_core"])
    layers = [set(layer.split(" | ")) - {"api", "version"} for layer in reversed(floors["layers"])]
    assert {room for _, room in told} == set().union(*layers)
    for height, room in told:
        assert room in layers[int(height) - 1]


@pytest.mark.parametrize("package", ["quark", "quark_backends", "quark_torch"])
def test_the_list_of_packages_names_each_folder_and_module(package):
    text = (ROOT / "docs/contributing/architecture.md").read_text()
    # The import rules begin with a line of the same form, so the list is the last one.
    told = re.findall(rf"^- `{package}`((?:.|\n(?=  ))+)", text, re.MULTILINE)[-1]
    there = {
        path.stem
        for path in (ROOT / package).iterdir()
        if not path.name.startswith("_") and (path.is_dir() or path.suffix == ".py")
    }
    # Modules that a folder of the package uses alone need no place on the map.
    small = {"quark_backends": {"removal"}, "quark_torch": {"checks", "failures", "layer_filter"}}
    assert there - small.get(package, set()) - set(re.findall(r"`(\w+)`", told)) == set()
