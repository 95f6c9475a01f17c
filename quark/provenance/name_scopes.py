"""The scopes of the names in a syntax tree, and the names that may be renamed.

Scopes are found as the language has them, in one walk that asks for no recursion: a deep
expression is as good as a flat one. Names are kept as they are mangled in classes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum


class ScopeKind(Enum):
    """What makes a scope."""

    MODULE = "module"
    CLASS = "class"
    FUNCTION = "function"
    COMPREHENSION = "comprehension"
    # Of `def f[T]`, `class C[T]`, `type X[T]`: its names are looked up like those of a function.
    TYPES = "types"


# Who calls these sees the names of local variables.
_FRAME_NAMES = frozenset({"locals", "eval", "exec", "vars", "dir"})
_FRAME_ATTRIBUTES = frozenset({"_getframe", "currentframe"})
# Methods that read the caller's variables out of a text, as pandas and numexpr do.
_TEXT_METHODS = frozenset({"eval", "query", "evaluate"})
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(slots=True, eq=False)
class Scope:
    """The names of one module, class, function, lambda or comprehension."""

    kind: ScopeKind
    parent: Scope | None
    # Name of the innermost class, without leading underscores: it mangles `__names`.
    private: str | None
    params: set[str] = field(default_factory=set)
    bound: set[str] = field(default_factory=set)
    globals: set[str] = field(default_factory=set)
    nonlocals: set[str] = field(default_factory=set)
    # Names of `except ... as`, and those of them that nothing else binds or captures.
    handlers: set[str] = field(default_factory=set)
    split: frozenset[str] = frozenset()
    captured: set[str] = field(default_factory=set)
    loads: set[str] = field(default_factory=set)
    # Somebody here looks at the names of variables.
    raw: bool = False
    # Annotations of the body mean something, as of a function with a decorator.
    annotated: bool = field(init=False)
    # State of whoever writes the scope down.
    numbers: dict[str, bytes] = field(default_factory=dict)
    tokens: dict[str, bytes] = field(default_factory=dict)
    active: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.annotated = self.kind in (ScopeKind.MODULE, ScopeKind.CLASS)

    def mangle(self, name: str) -> str:
        """The name as Python looks it up."""
        if self.private is None or not name.startswith("__") or name.endswith("__"):
            return name
        return f"_{self.private}{name}"

    @property
    def is_top(self) -> bool:
        """Whether no function is around it: what is defined here has a qualified name."""
        scope: Scope | None = self
        while scope is not None:
            if scope.kind in (ScopeKind.FUNCTION, ScopeKind.COMPREHENSION):
                return False
            scope = scope.parent
        return True


class Scopes:
    """The scopes of one module, by the nodes that make them, and how it calls `quark.trace`."""

    def __init__(self, module: Scope) -> None:
        self.module = module
        self.of: dict[int, Scope] = {}
        self.of_types: dict[int, Scope] = {}
        # Names that are the package, and names that are its decorator.
        self.quark_names: set[str] = set()
        self.trace_names: set[str] = set()
        # Names that the module's own statements store into: no functions, classes, imports.
        self.variables: set[str] = set()
        # Whether the module reads its own docstring, as docopt has it: then it is logic.
        self.reads_docstring = False


_Pending = list[tuple[ast.AST, Scope]]
_Visit = Callable[["_Finder", ast.AST, Scope], None]
# Children of a node, by its type: fields that can hold nodes, in the order of the grammar.
_fields: dict[type, tuple[str, ...]] = {}
_PLAIN_FIELDS = frozenset({"ctx", "op", "ops", "type_comment", "kind", "id", "attr", "lineno"})


def find_scopes(tree: ast.Module) -> Scopes:
    """Find all scopes of a module.

    Threads: any; the tree belongs to the caller, and has to live as long as the answer.
    """
    finder = _Finder()
    finder.walk(tree)
    finder.finish()
    return finder.scopes


def list_arguments(arguments: ast.arguments) -> list[ast.arg]:
    """All parameters of a function, in the order of its signature."""
    listed = [*arguments.posonlyargs, *arguments.args]
    if arguments.vararg is not None:
        listed.append(arguments.vararg)
    listed += arguments.kwonlyargs
    if arguments.kwarg is not None:
        listed.append(arguments.kwarg)
    return listed


class _Finder:
    def __init__(self) -> None:
        module = Scope(ScopeKind.MODULE, None, None)
        self.scopes = Scopes(module)
        self.all = [module]
        self.tainted: list[Scope] = []
        self.looking: list[tuple[str, Scope]] = []
        self.pending: _Pending = []

    def walk(self, tree: ast.Module) -> None:
        self.push(tree.body, self.scopes.module)
        pending = self.pending
        while pending:
            node, scope = pending.pop()
            kind = type(node)
            if kind is ast.Name:
                self.visit_name(node, scope)  # type: ignore[arg-type]
                continue
            visit = _VISITS.get(kind)
            if visit is None:
                self.push_children(node, scope)
            else:
                visit(self, node, scope)

    def push(self, nodes: Iterable[ast.AST | None], scope: Scope) -> None:
        self.pending.extend((node, scope) for node in nodes if node is not None)

    def push_children(self, node: ast.AST, scope: Scope) -> None:
        kind = type(node)
        fields = _fields.get(kind)
        if fields is None:
            fields = tuple(name for name in kind._fields if name not in _PLAIN_FIELDS)
            _fields[kind] = fields
        pending = self.pending
        for name in fields:
            value = getattr(node, name, None)
            if type(value) is list:
                pending.extend((child, scope) for child in value if isinstance(child, ast.AST))
            elif isinstance(value, ast.AST):
                pending.append((value, scope))

    def open(self, kind: ScopeKind, parent: Scope, private: str | None) -> Scope:
        scope = Scope(kind, parent, private)
        # A scope of a function whose names are looked at is seen through it.
        self.all.append(scope)
        return scope

    def open_types(self, node: ast.AST, scope: Scope) -> Scope:
        params = getattr(node, "type_params", None)
        if not params:
            return scope
        types = self.open(ScopeKind.TYPES, scope, scope.private)
        types.params.update(scope.mangle(param.name) for param in params)
        self.scopes.of_types[id(node)] = types
        self.push(params, types)
        return types

    def bind(self, name: str, scope: Scope) -> None:
        scope.bound.add(scope.mangle(name))

    def visit_name(self, node: ast.Name, scope: Scope) -> None:
        if type(node.ctx) is ast.Load:
            name = node.id
            scope.loads.add(scope.mangle(name))
            if name in _FRAME_NAMES:
                self.looking.append((name, scope))
            elif name == "__doc__":
                self.scopes.reads_docstring = True
        else:
            self.bind(node.id, scope)
            if scope.parent is None:
                self.scopes.variables.add(node.id)

    def visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        self.bind(node.name, scope)
        self.push(node.decorator_list, scope)
        types = self.open_types(node, scope)
        if node.decorator_list:
            self.push([node.returns], types)
        inner = self.open_function(node, node.args, types, bool(node.decorator_list))
        self.push([*node.args.defaults, *node.args.kw_defaults], scope)
        self.push(node.body, inner)

    def open_function(
        self, node: ast.AST, arguments: ast.arguments, outer: Scope, annotated: bool
    ) -> Scope:
        inner = self.open(ScopeKind.FUNCTION, outer, outer.private)
        for argument in list_arguments(arguments):
            inner.params.add(inner.mangle(argument.arg))
            if annotated:
                self.push([argument.annotation], outer)
        self.scopes.of[id(node)] = inner
        return inner

    def visit_lambda(self, node: ast.Lambda, scope: Scope) -> None:
        self.push([*node.args.defaults, *node.args.kw_defaults], scope)
        self.push([node.body], self.open_function(node, node.args, scope, False))

    def visit_class(self, node: ast.ClassDef, scope: Scope) -> None:
        self.bind(node.name, scope)
        self.push(node.decorator_list, scope)
        types = self.open_types(node, scope)
        self.push(node.bases, types)
        self.push(node.keywords, types)
        inner = self.open(ScopeKind.CLASS, types, node.name.lstrip("_") or None)
        self.scopes.of[id(node)] = inner
        self.push(node.body, inner)

    def visit_type_alias(self, node: ast.AST, scope: Scope) -> None:
        self.push([getattr(node, "name", None)], scope)
        self.push([getattr(node, "value", None)], self.open_types(node, scope))

    def visit_comprehension(self, node: ast.AST, scope: Scope) -> None:
        inner = self.open(ScopeKind.COMPREHENSION, scope, scope.private)
        self.scopes.of[id(node)] = inner
        for name in ("elt", "key", "value"):
            self.push([getattr(node, name, None)], inner)
        generators: list[ast.comprehension] = node.generators  # type: ignore[attr-defined]
        for place, generator in enumerate(generators):
            # The first iterable belongs to who makes the comprehension.
            self.push([generator.iter], inner if place else scope)
            self.push([generator.target, *generator.ifs], inner)

    def visit_walrus(self, node: ast.NamedExpr, scope: Scope) -> None:
        owner = scope
        while owner.kind is ScopeKind.COMPREHENSION and owner.parent is not None:
            owner = owner.parent
        self.bind(node.target.id, owner)
        self.push([node.value], scope)

    def visit_handler(self, node: ast.ExceptHandler, scope: Scope) -> None:
        if node.name is not None:
            scope.handlers.add(scope.mangle(node.name))
        self.push([node.type], scope)
        self.push(node.body, scope)

    def visit_import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        module = node.module if isinstance(node, ast.ImportFrom) else None
        absolute = isinstance(node, ast.Import) or not node.level
        for alias in node.names:
            bound = alias.asname or alias.name.partition(".")[0]
            if alias.name != "*":
                self.bind(bound, scope)
            if absolute and module is None and alias.name == "quark":
                self.scopes.quark_names.add(bound)
            elif absolute and module == "quark" and alias.name == "trace":
                self.scopes.trace_names.add(bound)

    def visit_global(self, node: ast.Global, scope: Scope) -> None:
        scope.globals.update(map(scope.mangle, node.names))

    def visit_nonlocal(self, node: ast.Nonlocal, scope: Scope) -> None:
        scope.nonlocals.update(map(scope.mangle, node.names))

    def visit_match_name(self, node: ast.AST, scope: Scope) -> None:
        # `MatchAs` and `MatchStar` call it name, `MatchMapping` rest.
        name = getattr(node, "name", None) or getattr(node, "rest", None)
        if name is not None:
            self.bind(name, scope)
        self.push_children(node, scope)

    def visit_call(self, node: ast.Call, scope: Scope) -> None:
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in _TEXT_METHODS and node.args:
            first = node.args[0]
            if isinstance(first, ast.JoinedStr) or (
                isinstance(first, ast.Constant) and isinstance(first.value, str)
            ):
                self.tainted.append(scope)
        self.push_children(node, scope)

    def visit_attribute(self, node: ast.Attribute, scope: Scope) -> None:
        if node.attr in _FRAME_ATTRIBUTES or (
            node.attr in _FRAME_NAMES
            and isinstance(node.value, ast.Name)
            and node.value.id in ("builtins", "__builtins__")
        ):
            self.tainted.append(scope)
        self.pending.append((node.value, scope))

    def visit_annotated(self, node: ast.AnnAssign, scope: Scope) -> None:
        self.push([node.target, node.value], scope)
        if scope.kind is not ScopeKind.FUNCTION:
            self.push([node.annotation], scope)

    def finish(self) -> None:
        for scope in self.all:
            scope.handlers -= scope.globals | scope.nonlocals | scope.params
            alone = scope.handlers - scope.bound
            scope.bound |= scope.handlers
            scope.bound -= scope.globals | scope.nonlocals
            scope.split = frozenset(alone)
        watched = frozenset().union(*(scope.split for scope in self.all))
        if watched:
            self._mark_captured(watched)
        for name, scope in self.looking:
            if not _is_variable(name, scope):
                self.tainted.append(scope)
        for scope in self.tainted:
            _keep_names(scope)
        for scope in self.all:
            parent = scope.parent
            # What looks at the names of a module or a class sees none of their functions'.
            if parent is not None and parent.raw and not parent.is_top:
                scope.raw = True
            scope.split -= scope.captured
            if scope.raw:
                scope.split = frozenset()

    def _mark_captured(self, watched: frozenset[str]) -> None:
        for scope in self.all:
            for name in (scope.loads | scope.nonlocals | scope.globals) & watched:
                owner = _find_owner(name, scope)
                if owner is not None:
                    owner.captured.add(name)


def _find_owner(name: str, scope: Scope) -> Scope | None:
    """Who has the variable, where a function in between takes it along; else None."""
    crossed = False
    at: Scope = scope
    while True:
        if name in at.globals:
            crossed = True
            while at.parent is not None:
                at = at.parent
            return at
        sees = at.kind is not ScopeKind.CLASS or at is scope
        if at.parent is None or (sees and name in at.bound | at.params):
            return at if crossed else None
        # What a comprehension looks up is looked up while it is made, but a generator waits.
        crossed = crossed or at.kind is not ScopeKind.COMPREHENSION
        at = at.parent


def _is_variable(name: str, scope: Scope) -> bool:
    """Whether a function has a variable of the name, such as one that is called `dir`."""
    at: Scope | None = scope
    while at is not None:
        if name in at.globals:
            return False
        is_function = at.kind in (ScopeKind.FUNCTION, ScopeKind.COMPREHENSION)
        if is_function and name in at.bound | at.params:
            return True
        at = at.parent
    return False


def _keep_names(scope: Scope) -> None:
    top: Scope | None = None
    at: Scope | None = scope
    while at is not None and at.kind is not ScopeKind.MODULE:
        if at.kind in (ScopeKind.FUNCTION, ScopeKind.COMPREHENSION):
            top = at
        at = at.parent
    (top or scope).raw = True


_VISITS: dict[type, _Visit] = {
    ast.FunctionDef: _Finder.visit_function,  # type: ignore[dict-item]
    ast.AsyncFunctionDef: _Finder.visit_function,  # type: ignore[dict-item]
    ast.Lambda: _Finder.visit_lambda,  # type: ignore[dict-item]
    ast.ClassDef: _Finder.visit_class,  # type: ignore[dict-item]
    ast.NamedExpr: _Finder.visit_walrus,  # type: ignore[dict-item]
    ast.ExceptHandler: _Finder.visit_handler,  # type: ignore[dict-item]
    ast.Import: _Finder.visit_import,  # type: ignore[dict-item]
    ast.ImportFrom: _Finder.visit_import,  # type: ignore[dict-item]
    ast.Global: _Finder.visit_global,  # type: ignore[dict-item]
    ast.Nonlocal: _Finder.visit_nonlocal,  # type: ignore[dict-item]
    ast.MatchAs: _Finder.visit_match_name,
    ast.MatchStar: _Finder.visit_match_name,
    ast.MatchMapping: _Finder.visit_match_name,
    ast.Call: _Finder.visit_call,  # type: ignore[dict-item]
    ast.Attribute: _Finder.visit_attribute,  # type: ignore[dict-item]
    ast.AnnAssign: _Finder.visit_annotated,  # type: ignore[dict-item]
    **dict.fromkeys(_COMPREHENSIONS, _Finder.visit_comprehension),
}
if hasattr(ast, "TypeAlias"):
    _VISITS[ast.TypeAlias] = _Finder.visit_type_alias
