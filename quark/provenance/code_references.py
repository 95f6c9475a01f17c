"""What a piece of code may reach, by name: rather too much than too little.

References are texts, so that they can be kept beside a fingerprint:

- `a`, `a.b.c`: a name that is looked up, and what is looked up in it.
- `.b`: an attribute of something that nobody knows.
- `a()`, `a.b()`, `.b()`, `()`: that it is called.
- `.__add__`: what the syntax calls by itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

import msgspec

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "methodcaller", "attrgetter"})
_OPERATORS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.MatMult: "matmul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
    ast.BitOr: "or",
    ast.BitXor: "xor",
    ast.BitAnd: "and",
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.In: "contains",
    ast.NotIn: "contains",
    ast.USub: "neg",
    ast.UAdd: "pos",
    ast.Invert: "invert",
}
_ITERATION = (".__iter__", ".__next__", ".__getitem__", ".__len__")
_ENTERING = (".__enter__", ".__exit__", ".__aenter__", ".__aexit__")
# What the syntax of a node calls, whatever its operands are.
_IMPLIED: dict[type, tuple[str, ...]] = {
    ast.For: _ITERATION,
    ast.AsyncFor: (".__aiter__", ".__anext__"),
    ast.comprehension: (*_ITERATION, ".__aiter__", ".__anext__"),
    ast.Starred: _ITERATION,
    ast.YieldFrom: _ITERATION,
    ast.With: _ENTERING,
    ast.AsyncWith: _ENTERING,
    ast.Subscript: (".__getitem__", ".__setitem__", ".__delitem__"),
    ast.If: (".__bool__", ".__len__"),
    ast.IfExp: (".__bool__", ".__len__"),
    ast.While: (".__bool__", ".__len__"),
    ast.BoolOp: (".__bool__", ".__len__"),
    ast.Await: (".__await__",),
    ast.FormattedValue: (".__format__", ".__str__", ".__repr__"),
    **{
        operator: (f".__{word}__", f".__r{word}__", f".__i{word}__")
        for operator, word in _OPERATORS.items()
    },
}


class ImportedName(msgspec.Struct, frozen=True, gc=False):
    """One name that a module imports.

    Attributes:
        bound: What it is called here; `*` for everything.
        level: How many dots the import begins with.
        module: Where it is imported from, or the module itself; may be empty after dots.
        name: What is imported of the module; empty where it is the module itself.
    """

    bound: str
    level: int
    module: str
    name: str


def list_imports(tree: ast.Module) -> tuple[ImportedName, ...]:
    """All imports of a module, those in functions and in branches too."""
    found: dict[ImportedName, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                found[ImportedName(bound, 0, alias.name, "")] = None
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                bound = alias.asname or alias.name
                found[ImportedName(bound, node.level, node.module or "", alias.name)] = None
    return tuple(found)


def list_references(nodes: Iterable[ast.AST], *, inside: bool = False) -> tuple[str, ...]:
    """What some statements may reach, sorted.

    Args:
        nodes: Statements. Functions and classes among them, and what classes define, are left
            out: they are units of their own.
        inside: The nodes are such a unit: it is looked into.
    """
    found: set[str] = set()
    pending: list[tuple[ast.AST, bool]] = [(node, True) for node in nodes]
    is_first = inside
    while pending:
        node, is_top = pending.pop()
        kind = type(node)
        if kind in _FUNCTIONS or kind is ast.ClassDef:
            if is_top and not is_first:
                continue
            # Whatever a function contains belongs to it; of a class, what it contains does not.
            is_top = is_top and kind is ast.ClassDef
        is_first = False
        implied = _IMPLIED.get(kind)
        if implied is not None:
            found.update(implied)
        if kind is ast.Call:
            _note_call(node, found)  # type: ignore[arg-type]
        elif kind is ast.Name:
            found.add(node.id)  # type: ignore[attr-defined]
        elif kind is ast.Attribute:
            found.add(_write_chain(node))  # type: ignore[arg-type]
            found.add(f".{node.attr}")  # type: ignore[attr-defined]
        pending.extend((child, is_top) for child in ast.iter_child_nodes(node))
    return tuple(sorted(found))


def _note_call(node: ast.Call, found: set[str]) -> None:
    called = node.func
    if isinstance(called, ast.Name):
        found.add(f"{called.id}()")
        if called.id in _BY_NAME:
            found.update(
                f".{value.value}"
                for value in node.args
                if isinstance(value, ast.Constant) and isinstance(value.value, str)
            )
    elif isinstance(called, ast.Attribute):
        found.add(f"{_write_chain(called)}()")
    else:
        found.add("()")


def _write_chain(node: ast.Attribute) -> str:
    """`a.b.c`, or `.c` where its root is no name."""
    parts = [node.attr]
    at = node.value
    while isinstance(at, ast.Attribute):
        parts.append(at.attr)
        at = at.value
    if not isinstance(at, ast.Name):
        return f".{node.attr}"
    parts.append(at.id)
    return ".".join(reversed(parts))
