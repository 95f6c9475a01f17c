"""The surface for plugins: `quark_core.api` and `quark_core.hookspecs`."""

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import core_modules
import pytest

from quark_core import api, hookspecs

PAGE = Path(__file__).parents[2] / "docs/extend/plugin-surface.md"
MOST_NAMES = 150
# Beside the surface; this number should only become smaller.
MOST_MODULES = 93
HOOKS = sorted(name for name in vars(hookspecs) if name.startswith("quark_"))


def find_docs(module, name):
    """The docstring of a name, or the text below a constant or an alias, where it is assigned."""
    value = getattr(module, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        doc = inspect.getdoc(value) or ""
        # A dataclass or a struct without a docstring shows its signature.
        return "" if doc.startswith(f"{name}(") else doc
    source = ast.parse(Path(module.__file__).read_text("utf-8"))
    for statement, below in zip(source.body, source.body[1:], strict=False):
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        targets = [inner for each in targets for inner in getattr(each, "elts", [each])]
        if any(isinstance(each, ast.Name) and each.id == name for each in targets):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            return below.value.value if is_text else ""
        if isinstance(statement, ast.ImportFrom) and name in {
            each.name for each in statement.names
        }:
            return find_docs(import_module(statement.module), name)
    return ""


def test_the_surface_is_small_and_each_name_of_it_is_documented():
    assert len(api.__all__) + len(hookspecs.__all__) <= MOST_NAMES
    named = [(import_module(api._HOMES[name]), name) for name in api.__all__]
    named += [(hookspecs, name) for name in [*hookspecs.__all__, *HOOKS]]
    assert [name for module, name in named if not find_docs(module, name)] == []


def test_what_a_type_checker_sees_is_what_is_imported():
    (block,) = [
        node for node in ast.parse(Path(api.__file__).read_text()).body if isinstance(node, ast.If)
    ]
    seen = {each.asname: (line.module, each.name) for line in block.body for each in line.names}
    assert seen == {name: (home, name) for name, home in api._HOMES.items()}
    for name, home in api._HOMES.items():
        assert getattr(api, name) is getattr(import_module(home), name)
    with pytest.raises(AttributeError, match="absent"):
        api.absent  # noqa: B018


def test_importing_the_surface_imports_nothing_of_the_core():
    code = "import sys, quark_core; before = set(sys.modules); import quark_core.api, quark_torch\n"
    code += "print(*(name for name in set(sys.modules) - before if name.startswith('quark')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == ["quark_core.api", "quark_torch"]


def test_the_reference_page_shows_each_name():
    page, names = PAGE.read_text().split("## Names in quark_core.api")
    assert sorted(re.findall(r"`(\w+)`", names)) == sorted(api.__all__)
    assert sorted(re.findall(r"^- `(quark_\w+)\(", page, re.MULTILINE)) == HOOKS
    assert [name for name in hookspecs.__all__ if not re.search(rf"\b{name}\b", page)] == []
    for name, given in re.findall(r"^- `(quark_\w+)\((.*?)\)`", page, re.MULTILINE):
        assert given == ", ".join(inspect.signature(getattr(hookspecs, name)).parameters)


def test_the_page_lists_the_modules_of_the_core_that_stores_and_features_import():
    used = core_modules.find_used_names()
    assert core_modules.read_lists() == core_modules.write_lists(used)
    assert len(used) <= MOST_MODULES


def test_each_name_that_stores_and_features_import_is_public_and_documented():
    used = [
        (import_module(module), name)
        for module, names in core_modules.find_used_names().items()
        for name in names
    ]
    private = [(module.__name__, name) for module, name in used if is_private(name)]
    assert private == []
    unknown = [(module.__name__, name) for module, name in used if not find_docs(module, name)]
    assert unknown == []


def is_private(name):
    return name.startswith("_") and not name.endswith("__")
