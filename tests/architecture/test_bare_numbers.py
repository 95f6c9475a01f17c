"""Numbers in the rules of the analysis have names and reasons."""

import ast
from pathlib import Path

import pytest

import quark.analysis.rules

# 0, 1 and 2 count, index and double, a half halves, and 100 makes percent of a share: each is its
# own name. A sign before one of them is no other number.
PLAIN = {0, 1, 2, 0.5, 100}

RULES = Path(quark.analysis.rules.__path__[0])
FILES = sorted(RULES.glob("*.py"))


def find_bare_numbers(source):
    """(line, number) of every literal in a function's body that has no name."""
    functions = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    bodies = [
        statement
        for node in functions
        for statement in (node.body if isinstance(node.body, list) else [node.body])
    ]
    return sorted(
        {
            (node.lineno, node.value)
            for body in bodies
            for node in ast.walk(body)
            if isinstance(node, ast.Constant)
            and type(node.value) in (int, float)
            and node.value not in PLAIN
        }
    )


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_rule_has_no_number_without_a_name_in_a_body(path):
    assert find_bare_numbers(path.read_text()) == []


def test_a_planted_number_is_found():
    planted = "LIMIT = 7\ndef check(value: int = 9):\n    return value > 0.25 * LIMIT + 1\n"
    assert find_bare_numbers(planted) == [(3, 0.25)]
