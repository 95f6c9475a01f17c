"""Every module path that is written as text, in code or in documents, leads to something."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = sorted(path.name for path in (ROOT / "quark").iterdir() if path.is_dir())
PACKAGES = ("quark", "quark_core", "quark_backends", "quark_torch")
# Names of columns, tags and loggers begin with `quark` too: of that package, only its rooms count.
_PACKAGE = rf"quark_(?:core|backends|torch)|quark[./](?:{'|'.join(ROOMS)})"
DOTTED = re.compile(rf"(?<![\w./-])((?:{_PACKAGE})(?:\.[A-Za-z_]\w*)+)(?![\w/-])")
SLASHED = re.compile(rf"(?<![\w./-])((?:{_PACKAGE}|benchmarks|tests)/[\w./-]*\w)(?![\w*{{])")
# An abbreviation ends with `_`; the rest is named before it is built, or is named as gone.
EXAMPLES = {
    "tests/test_mine.py",
    "quark_torch.kernels.probing",  # the compiled module
}


@cache
def find_names(path):
    """Names that a module defines at its top level, in its classes, and what it imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name) for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # the names of a lazy table
    return names


def leads_somewhere(dotted):
    """Whether a dotted path is a package, a module, or something in a module."""
    place, parts = ROOT, dotted.split(".")
    for depth, part in enumerate(parts):
        if (place / part).is_dir():
            place = place / part
            continue
        module, rest = place / f"{part}.py", parts[depth + 1 :]
        if not module.is_file():
            module, rest = place / "__init__.py", parts[depth:]
        return module.is_file() and (not rest or rest[0] in find_names(module))
    return True


def find_texts(path):
    """The texts of a file: a document as a whole, of Python the constants."""
    if path.suffix == ".md":
        return [path.read_text()]
    return [
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def find_lost(text):
    """Paths in a text that lead nowhere; those of tests may leave out the folder `tests`."""
    dotted = {name for name in DOTTED.findall(text) if not leads_somewhere(name)}
    slashed = {
        path
        for path in map(str.strip, SLASHED.findall(text))
        if not any((root / path).exists() for root in (ROOT, ROOT / "tests"))
    }
    return sorted(name for name in (dotted | slashed) - EXAMPLES if not name.endswith("_"))


def list_files():
    yield from (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    yield from (ROOT / "docs").rglob("*.md")
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md")


@pytest.mark.long
def test_every_path_leads_to_something():
    lost = {
        str(path.relative_to(ROOT)): found
        for path in list_files()
        if (found := sorted({name for text in find_texts(path) for name in find_lost(text)}))
    }
    assert lost == {}


@pytest.mark.parametrize(
    "text",
    ["quark_core.no_such_room", "`quark_core.errors.NoSuchError`", "see quark/page/no_such.py"],
)
def test_a_path_that_leads_nowhere_is_found(text):
    assert find_lost(text)
    assert not find_lost(
        "quark_core.errors.QuarkError, quark/page/static and `quark.TrainingSession`"
    )
