"""Variants of a module that do what it does: made by formatters, `ast.unparse` and `symtable`.

Nothing here is taken from the code under test: what may be renamed says `symtable`, the
compiler's own.
"""

from __future__ import annotations

import ast
import io
import random
import subprocess
import symtable
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path

_FRAME_WORDS = ("locals(", "eval(", "exec(", "vars(", "dir(", "_getframe", "currentframe", "=}")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def format_all(folder: Path, options: list[str]) -> None:
    """Rewrite all files of a folder by ruff's formatter, or by its sorting of imports."""
    subprocess.run(
        [sys.executable, "-m", "ruff", *options, "--isolated", "--no-cache", str(folder)],
        check=False,
        capture_output=True,
        timeout=120,
    )


def lose_layout(source: str, _choose: random.Random) -> str:
    return ast.unparse(ast.parse(source))


def remove_docstrings(source: str, _choose: random.Random) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module) and "__doc__" in source:
            continue
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Module)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def remove_annotations(source: str, _choose: random.Random) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS) and not node.decorator_list:
            node.returns = None
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            _Unannotated(node).visit_body()
    return ast.unparse(tree)


class _Unannotated(ast.NodeTransformer):
    """Takes annotations out of one function's own statements."""

    def __init__(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.function = function

    def visit_body(self) -> None:
        body: list[ast.stmt] = []
        for statement in self.function.body:
            seen = self.visit(statement)
            if seen is not None:
                body.append(seen)
        self.function.body = body or [ast.Pass()]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is not None:
            return ast.fix_missing_locations(ast.Assign(targets=[node.target], value=node.value))
        return ast.Pass() if isinstance(node.target, ast.Name) else node


def add_comments(source: str, choose: random.Random) -> str:
    """Comments and empty lines between statements, and behind them."""
    lines = source.splitlines(keepends=True)
    before, behind = set(), set()
    fresh = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            continue
        if token.type == tokenize.NEWLINE:
            behind.add(token.start[0])
            fresh = True
        elif fresh:
            before.add(token.start[0])
            fresh = False
    made = []
    for number, line in enumerate(lines, 1):
        if number in before and choose.random() < 0.3:
            made.append(" " * choose.randrange(8) + "# why this is here: 1 + 1 == 2\n\n")
        if number in behind and line.endswith("\n") and choose.random() < 0.3:
            line = line[:-1] + "   # pragma: 'so'\n"
        made.append(line)
    return "".join(made)


def add_passes(source: str, choose: random.Random) -> str:
    """`pass` in bodies, and texts that nobody keeps."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if not isinstance(block, list) or not block or isinstance(node, ast.Module):
                continue
            # A docstring stays the first, and an import stays beside its neighbours.
            places = [
                place
                for place in range(1, len(block) + 1)
                if not isinstance(block[place - 1], ast.Import | ast.ImportFrom)
            ]
            for place in sorted(places, reverse=True):
                if choose.random() < 0.3:
                    block.insert(place, ast.Pass())
    return ast.unparse(ast.fix_missing_locations(tree))


def add_parentheses(source: str, choose: random.Random) -> str:
    """Parentheses around calls, attributes and sums that need none."""
    tree = ast.parse(source)
    kept: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            kept.update(map(id, ast.walk(node)))
    edits: list[tuple[int, int, bytes]] = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call | ast.BinOp | ast.Compare | ast.BoolOp)
            and id(node) not in kept
            and choose.random() < 0.5
        ):
            edits.append((node.lineno, node.col_offset, b"(("))
            edits.append((node.end_lineno or 0, node.end_col_offset or 0, b"))"))
    # Where one ends and the next begins, the end comes first.
    edits.sort(key=lambda edit: (edit[0], edit[1], edit[2] == b"(("), reverse=True)
    lines = source.encode().splitlines(keepends=True)
    for line, column, text in edits:
        whole = lines[line - 1]
        lines[line - 1] = whole[:column] + text + whole[column:]
    return b"".join(lines).decode()


def shuffle_imports(source: str, choose: random.Random) -> str:
    """Imports that stand together in another order, some of them split or joined."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                _shuffle_block(block, choose)
    return ast.unparse(ast.fix_missing_locations(tree))


def _shuffle_block(block: list[ast.stmt], choose: random.Random) -> None:
    start = 0
    while start < len(block):
        end = start
        while end < len(block) and _may_move(block[end]):
            end += 1
        group = block[start:end]
        names = [alias.asname or alias.name for node in group for alias in node.names]  # type: ignore[attr-defined]
        roots = {name.partition(".")[0] for name in names}
        if len(group) > 1 and len(set(names)) == len(names) and len(roots) == len(names):
            split: list[ast.stmt] = []
            for node in group:
                for alias in node.names:  # type: ignore[attr-defined]
                    if isinstance(node, ast.Import):
                        split.append(ast.Import(names=[alias]))
                    else:
                        split.append(
                            ast.ImportFrom(module=node.module, names=[alias], level=node.level)  # type: ignore[attr-defined]
                        )
            choose.shuffle(split)
            block[start:end] = split
            end = start + len(split)
        start = max(end, start + 1)


def _may_move(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module != "__future__" and all(alias.name != "*" for alias in node.names)
    return isinstance(node, ast.Import)


def rename_locals(source: str, choose: random.Random) -> str:
    """Other names for all local variables of functions, by what the compiler says of them."""
    tree = ast.parse(source)
    _Renamer(symtable.symtable(source, "m", "exec"), choose, source).visit_block(tree)
    return ast.unparse(tree)


class _Renamer(ast.NodeVisitor):
    """Renames by the compiler's tables, which come in the order in which scopes stand."""

    def __init__(
        self,
        table: symtable.SymbolTable,
        choose: random.Random,
        source: str,
        outer: dict[str, str] | None = None,
        kept: set[str] | None = None,
    ) -> None:
        self.table = table
        self.choose = choose
        self.source = source
        self.children = list(table.get_children())
        self.names: dict[str, str] = {}
        outer = outer or {}
        kept = kept or set()
        for symbol in table.get_symbols():
            name = symbol.get_name()
            if symbol.is_free():
                if name in outer:
                    self.names[name] = outer[name]
            elif (
                table.get_type() == "function"
                and symbol.is_local()
                and not symbol.is_parameter()
                and not name.startswith("__")
                and not name.startswith(".")
                and name not in kept
            ):
                self.names[name] = f"renamed_{choose.randrange(10**6)}_{name[::-1]}"
        self.visible = {**outer, **self.names} if table.get_type() == "class" else self.names

    def visit_block(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self.visit(child)

    def _open(self, node: ast.AST, name: str) -> _Renamer:
        line = min(
            [node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))]  # type: ignore[attr-defined]
        )
        for place, child in enumerate(self.children):
            if child.get_name() == name and child.get_lineno() in (line, node.lineno):  # type: ignore[attr-defined]
                del self.children[place]
                kept = _find_seen_names(node)
                return _Renamer(child, self.choose, self.source, self.visible, kept)
        raise AssertionError(f"the compiler has no table of {name} in line {line}")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for outside in (*node.decorator_list, node.args):
            self.visit(outside)
        if node.returns is not None:
            self.visit(node.returns)
        inner = self._open(node, node.name)
        text = ast.get_source_segment(self.source, node) or ""
        if any(word in text for word in (*_FRAME_WORDS, ".query(", ".evaluate(")):
            # Its names are seen: they stay, and so does what it takes from around it.
            return
        node.name = self.names.get(node.name, node.name)
        for statement in node.body:
            inner.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for outside in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(outside)
        inner = self._open(node, node.name)
        for statement in node.body:
            inner.visit(statement)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self._open(node, "lambda").visit(node.body)

    def visit_ListComp(self, node: ast.AST) -> None:
        names = {"ListComp": "listcomp", "SetComp": "setcomp", "DictComp": "dictcomp"}
        generators = node.generators  # type: ignore[attr-defined]
        self.visit(generators[0].iter)
        inner = self._open(node, names.get(type(node).__name__, "genexpr"))
        for place, generator in enumerate(generators):
            inner.visit(generator.target)
            if place:
                inner.visit(generator.iter)
            for test in generator.ifs:
                inner.visit(test)
        for name in ("elt", "key", "value"):
            if hasattr(node, name):
                inner.visit(getattr(node, name))

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_Name(self, node: ast.Name) -> None:
        node.id = self.names.get(node.id, node.id)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        node.name = self.names.get(node.name, node.name) if node.name else None
        self.generic_visit(node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        node.names = [self.names.get(name, name) for name in node.names]

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            bound = alias.asname or alias.name
            if bound in self.names:
                alias.asname = self.names[bound]

    visit_ImportFrom = visit_Import

    def visit_MatchAs(self, node: ast.AST) -> None:
        for field in ("name", "rest"):
            name = getattr(node, field, None)
            if name is not None:
                setattr(node, field, self.names.get(name, name))
        self.generic_visit(node)

    visit_MatchStar = visit_MatchMapping = visit_MatchAs


def _find_seen_names(function: ast.AST) -> set[str]:
    """What others see the names of: classes, functions that a decorator gets, packages."""
    packages = {
        alias.name.partition(".")[0]
        for node in ast.walk(function)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname is None and "." in alias.name
    }
    return packages | {
        node.name
        for node in ast.walk(function)
        if isinstance(node, ast.ClassDef)
        or (
            isinstance(node, _FUNCTIONS)
            and any(not _is_wraps(each) for each in node.decorator_list)
        )
    }


def _is_wraps(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return "wraps" in ast.unparse(called)


VARIANTS: dict[str, Callable[[str, random.Random], str]] = {
    "layout": lose_layout,
    "docstrings": remove_docstrings,
    "annotations": remove_annotations,
    "comments": add_comments,
    "passes": add_passes,
    "parentheses": add_parentheses,
    "imports": shuffle_imports,
    "locals": rename_locals,
}
