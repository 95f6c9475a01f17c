"""Counts lines of code: lines that are not blank and hold more than a comment or a docstring."""

import ast
import re

# Strings come first, so that what looks like a comment in one is none.
_STRING_OR_COMMENT = re.compile(
    r"""
      (?P<string>
        \"{3} (?:\\.|.)*? \"{3} | \'{3} (?:\\.|.)*? \'{3}
      | " (?:\\.|[^"\\\n])* " | ' (?:\\.|[^'\\\n])* '
      )
    | \#[^\n]*
    """,
    re.VERBOSE | re.DOTALL,
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count_python_lines(source, tree=None):
    """Count the lines of code of a Python module.

    A line of a string that is no docstring is code, also where it looks like a comment. A blank
    line of such a string is blank.
    """
    text = _STRING_OR_COMMENT.sub(lambda found: found["string"] or "", source)
    code = {number for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    return len(code - _find_docstring_lines(tree or ast.parse(source), source.split("\n")))


def iterate_statements(node):
    """Yield a node and all statements in it, which is quicker than all nodes (ast.walk)."""
    yield node
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, block, ()):
            yield from iterate_statements(child)


def _find_docstring_lines(tree, lines):
    found = set()
    for node in iterate_statements(tree):
        if not isinstance(node, _DOCUMENTED) or ast.get_docstring(node, clean=False) is None:
            continue
        docstring = node.body[0]
        stands_alone = not lines[docstring.lineno - 1].encode()[: docstring.col_offset].strip()
        found.update(range(docstring.lineno + (not stands_alone), docstring.end_lineno + 1))
    return found


# A slash begins a regular expression where no value stands before it.
_IN_CODE = re.compile(
    r"""
      (?P<comment> //[^\n]* | /\*.*?\*/ )
    | (?P<regex> (?<=[=(,:\[!&|?{};>]) [ ]? /(?![/*]) (?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+ /)
    | (?P<string> "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )
    | (?P<template> ` )
    | (?P<open> \{ )
    | (?P<close> \} )
    | (?P<blank> \s+ )
    | (?P<code> [^\s`'"{}/]+ | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_TEMPLATE = re.compile(
    r"""
      (?P<template> ` )
    | (?P<open> \$\{ )
    | (?P<blank> \s+ )
    | (?P<code> (?:\\.|[^\s`$\\]|\$(?!\{))+ )
    """,
    re.VERBOSE | re.DOTALL,
)


def count_javascript_lines(source):
    """Count the lines of code of a JavaScript module; JSDoc is a comment like others."""
    code = set()
    nesting = []  # what encloses the place: a template, or braces of code
    place, line = 0, 1
    while place < len(source):
        in_template = bool(nesting) and nesting[-1] == "template"
        found = (_IN_TEMPLATE if in_template else _IN_CODE).match(source, place)
        kind, text = found.lastgroup, found.group()
        if kind not in ("blank", "comment"):
            code.update(range(line, line + text.count("\n") + 1))
        if kind == "template":
            nesting.pop() if in_template else nesting.append("template")
        elif kind == "open":
            nesting.append("braces")
        elif kind == "close" and nesting:
            nesting.pop()
        place, line = found.end(), line + text.count("\n")
    return len(code)
