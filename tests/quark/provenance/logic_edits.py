"""Edits of a module that change what it does: each makes one change, somewhere.

An edit looks for its places in a syntax tree that it may alter, takes one by chance, and
says whether it found any. What means nothing by the rules (docstrings, annotations of
functions without a decorator, `pass`, imports that stand together) is never a place.
"""

from __future__ import annotations

import ast
import itertools
import random
from collections.abc import Callable, Iterator

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_INNER_SCOPES = (
    *_FUNCTIONS,
    ast.Lambda,
    ast.ClassDef,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)
_OTHER_OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitXor,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.USub: ast.UAdd,
    ast.UAdd: ast.USub,
    ast.Invert: ast.USub,
    ast.Not: ast.USub,
}
_OTHER_COMPARISONS: dict[type, type] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


def edit(source: str, kind: str, choose: random.Random) -> str | None:
    """The module with one edit of a kind, or None where there is no place for it."""
    tree = ast.parse(source)
    places = list(EDITS[kind](tree, choose))
    if not places:
        return None
    choose.choice(places)()
    return ast.unparse(ast.fix_missing_locations(tree))


_Places = Iterator[Callable[[], None]]


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that mean something."""
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]
    while pending:
        node, in_function = pending.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name == "annotation" and in_function:
                continue
            if name == "returns":
                continue
            inside = in_function or isinstance(node, _FUNCTIONS)
            children = value if isinstance(value, list) else [value]
            for child in children:
                means = isinstance(child, ast.AST) and not _means_nothing(child)
                pending += [(child, inside)] if means else []


def _means_nothing(node: ast.AST) -> bool:
    return isinstance(node, ast.Pass) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in _walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                yield block


def _set(node: object, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(node, name, value)


def change_constant(tree: ast.AST, choose: random.Random) -> _Places:
    for node in _walk(tree):
        if isinstance(node, ast.Constant):
            yield _set(node, "value", _other_value(node.value, choose))


def _other_value(value: object, choose: random.Random) -> object:
    if isinstance(value, bool) or value is None:
        return choose.choice([each for each in (True, False, None, 0) if each is not value])
    if isinstance(value, int):
        return choose.choice([value + 1, value * 2 + 3, float(value), -1 if value >= 0 else 1])
    if isinstance(value, float):
        return choose.choice([value * 1.5 + 1.0, value + 1e-9 + abs(value) * 1e-12])
    if isinstance(value, str):
        return choose.choice([value + "x", "x" + value, value + " ", value.swapcase() + "_"])
    if isinstance(value, bytes):
        return value + b"x"
    return 0


def change_type(tree: ast.AST, _choose: random.Random) -> _Places:
    """1 becomes True or 1.0, text becomes bytes: values that are equal, or look alike."""
    for node in _walk(tree):
        if not isinstance(node, ast.Constant):
            continue
        if type(node.value) is bool:
            yield _set(node, "value", int(node.value))
        elif type(node.value) is int and node.value in (0, 1):
            yield _set(node, "value", bool(node.value))
        elif type(node.value) is int and abs(node.value) < 2**53:
            yield _set(node, "value", float(node.value))


def change_operator(tree: ast.AST, _choose: random.Random) -> _Places:
    for node in _walk(tree):
        if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp | ast.UnaryOp):
            yield _set(node, "op", _OTHER_OPERATORS[type(node.op)]())


def change_comparison(tree: ast.AST, _choose: random.Random) -> _Places:
    for node in _walk(tree):
        if isinstance(node, ast.Compare):
            yield _set(node, "ops", [_OTHER_COMPARISONS[type(node.ops[0])](), *node.ops[1:]])


def change_attribute(tree: ast.AST, choose: random.Random) -> _Places:
    for node in _walk(tree):
        if isinstance(node, ast.Attribute):
            other = choose.choice(["mean", "sum", "detach", node.attr + "_"])
            if other != node.attr:
                yield _set(node, "attr", other)


def swap_arguments(tree: ast.AST, _choose: random.Random) -> _Places:
    for node in _walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > 1:
            first, second, *rest = node.args
            if ast.dump(first) != ast.dump(second):
                yield _set(node, "args", [second, first, *rest])


def swap_operands(tree: ast.AST, _choose: random.Random) -> _Places:
    for node in _walk(tree):
        if isinstance(node, ast.BinOp) and ast.dump(node.left) != ast.dump(node.right):

            def swap(node: ast.BinOp = node) -> None:
                node.left, node.right = node.right, node.left

            yield swap


def drop_argument(tree: ast.AST, _choose: random.Random) -> _Places:
    for node in _walk(tree):
        if isinstance(node, ast.Call) and node.args:
            yield _set(node, "args", node.args[:-1])
        if isinstance(node, ast.Call) and node.keywords:
            yield _set(node, "keywords", node.keywords[:-1])


def rename_keyword(tree: ast.AST, _choose: random.Random) -> _Places:
    for node in _walk(tree):
        if isinstance(node, ast.keyword) and node.arg is not None:
            yield _set(node, "arg", node.arg + "_")


def drop_statement(tree: ast.AST, _choose: random.Random) -> _Places:
    for block in _blocks(tree):
        for place, statement in enumerate(block):
            bare = isinstance(statement, ast.AnnAssign) and statement.value is None
            if _means_nothing(statement) or bare or _is_import(statement):
                continue

            def drop(block: list[ast.stmt] = block, place: int = place) -> None:
                block[place] = ast.Pass()

            yield drop


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def move_statement(tree: ast.AST, _choose: random.Random) -> _Places:
    for block in _blocks(tree):
        lasting = [
            place
            for place, each in enumerate(block)
            if not _means_nothing(each)
            and not (isinstance(each, ast.AnnAssign) and each.value is None)
        ]
        for one, two in itertools.pairwise(lasting):
            if _is_import(block[one]) or _is_import(block[two]):
                continue
            if ast.dump(block[one]) == ast.dump(block[two]):
                continue

            def swap(block: list[ast.stmt] = block, one: int = one, two: int = two) -> None:
                block[one], block[two] = block[two], block[one]

            yield swap


def repeat_statement(tree: ast.AST, _choose: random.Random) -> _Places:
    for block in _blocks(tree):
        for place, statement in enumerate(block):
            if isinstance(statement, ast.Assign | ast.AugAssign | ast.Return) or (
                isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            ):
                yield lambda block=block, place=place: block.insert(place, block[place])


def negate_condition(tree: ast.AST, _choose: random.Random) -> _Places:
    for node in _walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            yield _set(node, "test", ast.UnaryOp(op=ast.Not(), operand=node.test))


def swap_branches(tree: ast.AST, _choose: random.Random) -> _Places:
    for node in _walk(tree):
        if isinstance(node, ast.IfExp) and ast.dump(node.body) != ast.dump(node.orelse):

            def swap(node: ast.IfExp = node) -> None:
                node.body, node.orelse = node.orelse, node.body

            yield swap


def change_default(tree: ast.AST, _choose: random.Random) -> _Places:
    for node in _walk(tree):
        if isinstance(node, ast.arguments) and node.defaults:
            other = ast.Constant(value="another default")
            yield _set(node, "defaults", [*node.defaults[:-1], other])
        if isinstance(node, ast.arguments) and any(node.kw_defaults):
            yield _set(node, "kw_defaults", [None] * len(node.kw_defaults))


def rename_parameter(tree: ast.AST, _choose: random.Random) -> _Places:
    for node in _walk(tree):
        if isinstance(node, ast.arg):
            yield _set(node, "arg", node.arg + "_other")


def take_other_local(tree: ast.AST, choose: random.Random) -> _Places:
    """One use of a local variable becomes one of another: the flow of values changes."""
    for function in _walk(tree):
        if not isinstance(function, _FUNCTIONS):
            continue
        own = list(_find_own_names(function))
        stored = sorted({node.id for node in own if isinstance(node.ctx, ast.Store)})
        for node in own:
            others = [name for name in stored if name != node.id]
            if node.id in stored and others:
                yield _set(node, "id", choose.choice(others))


def _find_own_names(function: ast.AST) -> Iterator[ast.Name]:
    """The names in a function that are looked up in it, and in no scope inside of it."""
    pending: list[ast.AST] = list(function.body)  # type: ignore[attr-defined]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name):
            yield node
        if isinstance(node, ast.AnnAssign):
            # Without a value it says nothing, whatever it names.
            pending += [node.target, node.value] if node.value is not None else []
        elif not isinstance(node, _INNER_SCOPES):
            pending += ast.iter_child_nodes(node)


def swap_locals(tree: ast.AST, _choose: random.Random) -> _Places:
    """Two neighbouring uses of two local variables change places."""
    for function in _walk(tree):
        if not isinstance(function, _FUNCTIONS):
            continue
        for statement in ast.walk(function):
            if not isinstance(statement, ast.Return | ast.Assign | ast.AugAssign | ast.Expr):
                continue
            used = [
                node
                for node in _walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
            ]
            for one, two in itertools.pairwise(used):
                if one.id != two.id:

                    def swap(one: ast.Name = one, two: ast.Name = two) -> None:
                        one.id, two.id = two.id, one.id

                    yield swap


def change_jump(tree: ast.AST, _choose: random.Random) -> _Places:
    for block in _blocks(tree):
        for place, statement in enumerate(block):
            if isinstance(statement, ast.Break | ast.Continue):
                other = ast.Continue() if isinstance(statement, ast.Break) else ast.Break()
                yield lambda block=block, place=place, other=other: block.__setitem__(place, other)
            elif isinstance(statement, ast.Return) and statement.value is not None:
                yield _set(statement, "value", None)


def drop_decorator(tree: ast.AST, _choose: random.Random) -> _Places:
    for node in _walk(tree):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and node.decorator_list:
            yield _set(node, "decorator_list", node.decorator_list[1:])


def change_base(tree: ast.AST, _choose: random.Random) -> _Places:
    for node in _walk(tree):
        if isinstance(node, ast.ClassDef):
            yield _set(node, "bases", [*node.bases[:-1], ast.Name(id="Other", ctx=ast.Load())])


def change_slice(tree: ast.AST, _choose: random.Random) -> _Places:
    for node in _walk(tree):
        if isinstance(node, ast.Subscript):
            yield _set(
                node,
                "slice",
                ast.Slice(
                    lower=node.slice if isinstance(node.slice, ast.Constant) else None,
                    upper=ast.Constant(value=977),
                ),
            )


def change_global(tree: ast.AST, _choose: random.Random) -> _Places:
    """A function or module that is used becomes another."""
    for node in _walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield _set(node.func, "id", node.func.id + "_other")


def swap_elements(tree: ast.AST, _choose: random.Random) -> _Places:
    """Of a tuple that is read: targets that change places may be other names, no more."""
    for node in _walk(tree):
        if not isinstance(node, ast.Tuple) or not isinstance(node.ctx, ast.Load):
            continue
        if len(node.elts) > 1 and ast.dump(node.elts[0]) != ast.dump(node.elts[1]):
            yield _set(node, "elts", [node.elts[1], node.elts[0], *node.elts[2:]])


def change_import(tree: ast.AST, _choose: random.Random) -> _Places:
    for node in _walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            yield _set(node.names[0], "name", node.names[0].name.replace("*", "s") + "_other")


EDITS: dict[str, Callable[[ast.AST, random.Random], _Places]] = {
    each.__name__: each
    for each in (
        change_constant,
        change_type,
        change_operator,
        change_comparison,
        change_attribute,
        swap_arguments,
        swap_operands,
        drop_argument,
        rename_keyword,
        drop_statement,
        move_statement,
        repeat_statement,
        negate_condition,
        swap_branches,
        change_default,
        rename_parameter,
        take_other_local,
        swap_locals,
        change_jump,
        drop_decorator,
        change_base,
        change_slice,
        change_global,
        swap_elements,
        change_import,
    )
}
