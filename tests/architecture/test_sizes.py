"""How long a function and a file may be; ruff's C901 says how many ways lead through a function."""

import ast
from pathlib import Path

import pytest
from code_lines import count_python_lines

ROOT = Path(__file__).parents[2]
PACKAGES = ("quark", "quark_backends", "quark_core", "quark_torch")
MAX_CODE_LINES = 700  # without blank lines, comments and docstrings
MAX_FUNCTION_LINES = 80


def find_functions(source):
    """Name and number of lines of each function of a module, without its decorators."""
    return [
        (node.name, node.end_lineno - node.lineno + 1)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def read_modules(package):
    return {path: path.read_text("utf-8") for path in sorted((ROOT / package).rglob("*.py"))}


def test_a_function_is_counted_from_its_def_to_its_last_line():
    assert find_functions("@cache\ndef outer():\n    def inner():\n        pass\n") == [
        ("outer", 3),
        ("inner", 2),
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_files_have_at_most_700_lines_of_code(package):
    modules = read_modules(package)
    assert modules
    lengths = {path: count_python_lines(source) for path, source in modules.items()}
    assert [path for path, lines in lengths.items() if lines > MAX_CODE_LINES] == []


@pytest.mark.long
def test_functions_have_at_most_80_lines():
    too_long = [
        f"{path.relative_to(ROOT).as_posix()} {name}"
        for package in PACKAGES
        for path, source in read_modules(package).items()
        for name, lines in find_functions(source)
        if lines > MAX_FUNCTION_LINES
    ]
    assert too_long == []
