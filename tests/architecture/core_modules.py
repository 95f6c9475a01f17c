"""The modules of the core that stores and features import, beside the surface for plugins.

    python tests/architecture/core_modules.py          compares them with the page
    python tests/architecture/core_modules.py --write  writes that page's lists anew

The page is docs/contributing/core-modules.md. Each of these modules is documented, so that a store
or a feature of a third party can be built from the same ones. The list should shrink.
"""

import ast
import inspect
import re
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path

from code_lines import iterate_statements

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/contributing/core-modules.md"
SURFACE = {"quark_core.api", "quark_core.hookspecs"}
# The kit is for tests, and documented for them.
OTHERS = "quark_core.testing"


def find_used_names(packages=("quark", "quark_backends", "quark_torch")):
    """The names of the core that other packages import: module -> names, without the surface."""
    used = defaultdict(set)
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in iterate_statements(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                    "quark_core"
                ):
                    _note_names(used, node.module, [alias.name for alias in node.names])
                elif isinstance(node, ast.Import):
                    for alias in node.names:
                        if alias.name.startswith("quark_core"):
                            _note_names(used, alias.name, [])
    return {module: used[module] for module in sorted(used)}


def _note_names(used, module, names):
    for name in names or [None]:
        inner = f"{module}.{name}"
        home, found = (inner, None) if name and _is_module(inner) else (module, name)
        if home not in SURFACE and not home.startswith(OTHERS):
            used[home] |= {found} - {None}


def _is_module(name):
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def describe(module):
    """The first sentence of a module's docstring."""
    text = " ".join((inspect.getdoc(import_module(module)) or "").split())
    return re.split(r"(?<=\.)\s", f"{text} ")[0].strip().rstrip(".")


def write_lists(used):
    """The lists of the page: for each folder its modules."""
    rooms = defaultdict(list)
    for module in used:
        rooms[module.split(".")[1]].append(module)
    lines = []
    for room, modules in rooms.items():
        lines += [f"## {room}", ""]
        lines += [f"- `{module}`: {describe(module)}." for module in modules]
        lines += [""]
    return "\n".join(lines)


def read_lists():
    """The lists that the page has."""
    text = PAGE.read_text("utf-8")
    return text[text.index("\n## ") + 1 :]


def main():
    lists = write_lists(find_used_names())
    if "--write" in sys.argv:
        text = PAGE.read_text("utf-8")
        PAGE.write_text(text[: text.index("\n## ") + 1] + lists, "utf-8")
    elif lists != read_lists():
        sys.exit(f"{PAGE.name} is not up to date: python {sys.argv[0]} --write")


if __name__ == "__main__":
    main()
