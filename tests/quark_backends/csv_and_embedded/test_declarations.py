"""Backends that come with Quark are declared without being loaded, and found where they are."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from quark_core.hosting.protocol import describe_opener, load_definition

ROOT = Path(__file__).parents[3]
PLUGINS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
    "quark.backends"
]
TARGET = re.compile(r'"(quark_backends[\w.]*):(\w+)"')


def find_targets(plugin):
    return TARGET.findall(ROOT.joinpath(*plugin.split(".")).with_suffix(".py").read_text())


@pytest.mark.parametrize("plugin", sorted(PLUGINS.values()))
def test_what_a_declaration_loads_late_is_there(plugin):
    for module, name in find_targets(plugin):
        assert callable(getattr(importlib.import_module(module), name))


def test_the_mirrors_declare_what_they_load_late():
    loaded = {plugin: len(find_targets(plugin)) for plugin in PLUGINS.values()}
    assert {name for name, count in loaded.items() if not count} == {
        "quark_backends.embedded.plugin"  # which of two it opens, the place decides
    }


def test_a_declaration_loads_nothing_else():
    code = (
        "import sys, importlib\n"
        "for name in sys.argv[1:]:\n"
        "    (one,) = importlib.import_module(name).quark_register_backends()\n"
        "    assert name == f'quark_backends.{one.name}.plugin', name\n"
        "print(*(m for m in sys.modules if m.startswith('quark_backends.') and m.count('.') > 1))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *PLUGINS.values()], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == set(PLUGINS.values())


@pytest.mark.parametrize("name", sorted(set(PLUGINS) - {"service"}))
def test_another_process_finds_what_opens_a_backend(name):
    (definition,) = importlib.import_module(PLUGINS[name]).quark_register_backends()
    found = describe_opener(definition)
    assert found == (f"{PLUGINS[name]}:_open", "")
    assert load_definition(definition, *found).open is definition.open
