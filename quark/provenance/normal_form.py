"""The normal form of Python code: what is left when everything that means nothing is gone.

Two texts of one normal form do the same. The form is written by this module alone, out of the
syntax tree: neither `ast.dump` nor bytecode, which every version of Python has otherwise. So
the digests of one text are equal on all versions that can read it.

Left out: comments, layout, quotes, parentheses, `pass`, docstrings, the order of imports that
stand together, names of local variables, annotations of functions that have no decorator, and
`@quark.trace`. What looks like these and means something is kept: names in a function that
looks at its own variables, annotations that a decorator may read, the docstring of a module
that reads it.
"""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quark.provenance.name_scopes import Scope, ScopeKind, Scopes, find_scopes

NORMAL_FORM_VERSION = 1
"""Digests of two versions say nothing of each other."""
LEVEL_SYNTAX = "syntax"
"""The digest is of the normal form."""
LEVEL_BYTES = "bytes"
"""The digest is of the bytes: the text could not be read as Python."""

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = FunctionNode | ast.ClassDef
# A generated table of a million lines is data, and would hold up whoever asks.
_MOST_BYTES = 4_000_000
_DIGEST_BYTES = 16


class UnreadableSourceError(ValueError):
    """A text that this Python cannot read as a module."""


def parse_source(source: str | bytes) -> ast.Module:
    """Read a module.

    Raises:
        UnreadableSourceError: No Python, Python of a newer version, nested too deeply, or more
            than 4 MB.
    """
    if len(source) > _MOST_BYTES:
        raise UnreadableSourceError(f"it has more than {_MOST_BYTES} bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
        # The error's text may quote the source, which may hold anything.
        raise UnreadableSourceError(f"reading it raised {type(error).__name__}") from None


def digest_bytes(*parts: bytes) -> str:
    """The digest of a normal form, or of anything else: 32 hexadecimal characters."""
    whole = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        whole.update(part)
    return whole.hexdigest()


def digest_source(source: str | bytes | ast.Module) -> tuple[str, str]:
    """Digest of a whole module's normal form, and the level that it has.

    Args:
        source: Its text, or what the text was read to.

    Returns:
        The digest with `syntax`, or with `bytes` where the text cannot be read.
    """
    try:
        tree = source if isinstance(source, ast.Module) else parse_source(source)
    except UnreadableSourceError:
        raw = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
        assert isinstance(raw, bytes)
        return digest_bytes(b"bytes", raw), LEVEL_BYTES
    form = NormalForm(tree)
    return digest_bytes(b"".join(form.write_whole(tree))), LEVEL_SYNTAX


@dataclass(slots=True)
class _Imported:
    """One name that is imported: `import a, b` is two of them."""

    key: bytes
    bound: str
    # `import a.b` binds `a`: to the same module, however many of them stand there.
    plain: bool


@dataclass(slots=True)
class _HandlerEdge:
    """Where the variable of `except ... as` begins and ends."""

    name: str
    scope: Scope
    begins: bool


@dataclass(slots=True)
class _Bound:
    """A name that something other than a Name binds."""

    name: str


class _Marker(bytes):
    """Where a function or class is defined that is written down by itself."""

    __slots__ = ()


_Item = object
_Items = list[_Item]
_Write = Callable[["NormalForm", ast.AST, _Items], None]


class _Form:
    """How a type of node is written: its fields, and which of them are blocks of statements."""

    __slots__ = ("fields", "leaf", "opening")

    def __init__(self, kind: type[ast.AST]) -> None:
        self.opening = b"(" + kind.__name__.encode()
        self.fields = tuple(
            (name, b"." + name.encode(), name in _BLOCKS)
            for name in reversed(kind._fields)
            if name not in _NO_FIELDS
        )
        self.leaf = self.opening + b")"


_BLOCKS = frozenset({"body", "orelse", "finalbody"})
_NO_FIELDS = frozenset({"ctx", "type_comment", "kind"})
_forms: dict[type, _Form] = {}


class NormalForm:
    """Writes the normal form of one module, or of parts of it.

    Functions and classes that no function contains are written down by themselves where
    `found` is given: it is called with each as it comes, and what is around them has a mark.

    Threads: one; it belongs to who made it, as does the tree.
    """

    def __init__(
        self, tree: ast.Module, found: Callable[[_Definition, Scope], bytes] | None = None
    ) -> None:
        self.scopes: Scopes = find_scopes(tree)
        self._found = found
        self._out: list[bytes] = []
        self._scope = self.scopes.module
        self._own_name: str | None = None
        self._variables = 0

    def write_whole(self, tree: ast.Module) -> list[bytes]:
        """What a module does, without the functions and classes that stand by themselves."""
        items: _Items = self._block(tree.body, self.scopes.module)
        if self.scopes.reads_docstring:
            items.append(_write_constant(ast.get_docstring(tree, clean=False)))
        return self._write(items, self.scopes.module, None)

    def write_function(self, node: FunctionNode, scope: Scope) -> list[bytes]:
        """What a function does, whatever it is called; `scope` is what it is defined in."""
        own = node.name if scope.kind is ScopeKind.MODULE else None
        return self._write(self._function_parts(node, scope), scope, own)

    def write_class(self, node: ast.ClassDef, scope: Scope) -> list[bytes]:
        """What a class is without its methods, whatever it is called."""
        own = node.name if scope.kind is ScopeKind.MODULE else None
        return self._write(self._class_parts(node, scope), scope, own)

    def find_trace(self, node: FunctionNode) -> ast.expr | None:
        """The function's `@quark.trace`, or None."""
        for decorator in node.decorator_list:
            if self._is_trace(decorator):
                return decorator
        return None

    def _write(self, items: _Items, scope: Scope, own_name: str | None) -> list[bytes]:
        self._out = []
        self._scope = scope
        self._own_name = own_name
        self._variables = 0
        stack = items[::-1]
        write = self._out.append
        pop = stack.pop
        while stack:
            item = pop()
            kind = type(item)
            if kind is bytes or kind is _Marker:
                write(item)  # type: ignore[arg-type]
            elif kind is ast.Name:
                write(self._resolve(item.id))  # type: ignore[attr-defined]
            elif kind is Scope:
                self._scope = item  # type: ignore[assignment]
            else:
                special = _WRITES.get(kind)
                if special is None:
                    self._generic(item, stack)  # type: ignore[arg-type]
                else:
                    special(self, item, stack)  # type: ignore[arg-type]
        return self._out

    def _generic(self, node: ast.AST, stack: _Items) -> None:
        kind = type(node)
        form = _forms.get(kind)
        if form is None:
            form = _forms[kind] = _Form(kind)
        if not form.fields:
            self._out.append(form.leaf)
            return
        self._out.append(form.opening)
        stack.append(b")")
        for name, label, is_block in form.fields:
            value = getattr(node, name, None)
            if value is None:
                continue
            if type(value) is list:
                if is_block:
                    value = self._block(value, self._scope)
                if value:
                    stack.append(b"]")
                    stack.extend([b"~" if item is None else item for item in reversed(value)])
                    stack.append(label + b"[")
            elif isinstance(value, ast.AST):
                stack.append(value)
                stack.append(label)
            else:
                stack.append(label + _write_plain(value))

    def _resolve(self, name: str) -> bytes:
        """What stands for a name: itself, or the number of the local variable that it is."""
        scope = self._scope
        token = scope.tokens.get(name)
        if token is not None:
            return token
        key = scope.mangle(name)
        owner = _find_scope(key, scope)
        if owner.raw or owner.kind in (ScopeKind.MODULE, ScopeKind.CLASS):
            active = owner.active.get(key)
            if active is not None:
                return active
            if owner.kind is ScopeKind.MODULE and name == self._own_name:
                return b"@own"
            token = _write_plain(name)
            if owner is not scope or owner.kind is ScopeKind.FUNCTION:
                self._remember(scope, owner, name, token)
            return token
        if key in owner.params:
            token = _write_plain(name)
        elif key in owner.split and key in owner.active:
            return owner.active[key]
        else:
            token = owner.numbers.get(key) or self._number(owner, key)
        if key not in owner.split:
            scope.tokens[name] = token
        return token

    def _remember(self, scope: Scope, owner: Scope, name: str, token: bytes) -> None:
        # Scopes that several parts share must forget who looked a name up.
        if scope.kind not in (ScopeKind.MODULE, ScopeKind.CLASS) and not owner.split:
            scope.tokens[name] = token

    def _number(self, owner: Scope, key: str) -> bytes:
        token = b"$%d;" % self._variables
        self._variables += 1
        owner.numbers[key] = token
        return token

    def _block(self, statements: Sequence[ast.stmt], scope: Scope) -> _Items:
        """Statements that do something, imports that stand together in one order."""
        items: _Items = []
        imports: list[_Imported] = []
        for statement in statements:
            kind = type(statement)
            if kind is ast.Import or kind is ast.ImportFrom:
                for imported in _split_import(statement):  # type: ignore[arg-type]
                    if imported is None:
                        items += _order_imports(imports)
                        imports = []
                        items.append(statement)
                    else:
                        imports.append(imported)
                continue
            if kind is ast.Pass or (
                kind is ast.Expr and type(statement.value) is ast.Constant  # type: ignore[attr-defined]
            ):
                continue
            if kind is ast.AnnAssign and _says_nothing(statement, scope):  # type: ignore[arg-type]
                continue
            if imports:
                items += _order_imports(imports)
                imports = []
            items.append(statement)
        if imports:
            items += _order_imports(imports)
        return items

    def _is_trace(self, decorator: ast.expr) -> bool:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(called, ast.Name):
            return called.id in self.scopes.trace_names
        return (
            isinstance(called, ast.Attribute)
            and called.attr == "trace"
            and isinstance(called.value, ast.Name)
            and called.value.id in self.scopes.quark_names
        )

    def _decorators(self, decorators: Iterable[ast.expr]) -> _Items:
        items: _Items = []
        for decorator in decorators:
            if not self._is_trace(decorator):
                items += [b"@(", decorator, b")"]
                continue
            # What is called before the function is logic; what is looked at afterwards is not.
            for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
                if keyword.arg == "init":
                    items += [b"@init(", keyword.value, b")"]
        return items

    def _types(self, node: ast.AST, scope: Scope) -> tuple[_Items, Scope]:
        types = self.scopes.of_types.get(id(node))
        if types is None:
            return [], scope
        params: list[ast.AST] = node.type_params  # type: ignore[attr-defined]
        return [types, b".types[", *params, b"]"], types

    def _function_parts(self, node: FunctionNode, outer: Scope) -> _Items:
        inner = self.scopes.of[id(node)]
        decorators = [each for each in node.decorator_list if not self._is_trace(each)]
        annotated = bool(decorators)
        inner.annotated = annotated
        types, _around = self._types(node, outer)
        items: _Items = [b"(", type(node).__name__.encode()]
        items += self._decorators(node.decorator_list)
        items += self._defaults(node.args)
        items += types
        items += self._arguments(node.args, annotated=annotated)
        if annotated and node.returns is not None:
            items += [b".returns", node.returns]
        items += [inner, b"{", *self._block(node.body, inner), b"})", outer]
        return items

    def _class_parts(self, node: ast.ClassDef, outer: Scope) -> _Items:
        inner = self.scopes.of[id(node)]
        types, _around = self._types(node, outer)
        items: _Items = [b"(ClassDef", *self._decorators(node.decorator_list), *types]
        items += [b".bases[", *node.bases, b"].keywords[", *node.keywords, b"]"]
        items += [inner, b"{", *self._block(node.body, inner), b"})", outer]
        return items

    def _defaults(self, arguments: ast.arguments) -> _Items:
        if not arguments.defaults and not arguments.kw_defaults:
            return []
        keyword_only = [b"~" if each is None else each for each in arguments.kw_defaults]
        return [b".defaults[", *arguments.defaults, b"|", *keyword_only, b"]"]

    def _arguments(self, arguments: ast.arguments, *, annotated: bool) -> _Items:
        marks = [
            (b"/", arguments.posonlyargs),
            (b"", arguments.args),
            (b"*", [arguments.vararg] if arguments.vararg else []),
            (b"k", arguments.kwonlyargs),
            (b"**", [arguments.kwarg] if arguments.kwarg else []),
        ]
        items: _Items = [b"<"]
        for mark, listed in marks:
            for argument in listed:
                items.append(mark + _write_plain(argument.arg))
                if annotated and argument.annotation is not None:
                    items += [b".as", argument.annotation]
        items.append(b">")
        return items

    def _function(self, node: FunctionNode, stack: _Items) -> None:
        scope = self._scope
        if self._found is not None and scope.is_top:
            self._out.append(_Marker(self._found(node, scope)))
            return
        self._out.append(b"def" + self._resolve(node.name))
        if any(not self._is_silent(each) for each in node.decorator_list):
            # A decorator may keep what it gets under the name that it has.
            self._out.append(b".name" + _write_plain(node.name))
        stack += self._function_parts(node, scope)[::-1]

    def _is_silent(self, decorator: ast.expr) -> bool:
        """Whether a decorator is known to ask for no name."""
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = getattr(called, "attr", None) or getattr(called, "id", None)
        return name == "wraps" or self._is_trace(decorator)

    def _class(self, node: ast.ClassDef, stack: _Items) -> None:
        scope = self._scope
        if self._found is not None and scope.is_top:
            self._out.append(_Marker(self._found(node, scope)))
            return
        # Of a class, the name is seen: in texts, in registries, in files.
        self._out.append(b"class" + self._resolve(node.name) + _write_plain(node.name))
        stack += self._class_parts(node, scope)[::-1]

    def _lambda(self, node: ast.Lambda, stack: _Items) -> None:
        inner = self.scopes.of[id(node)]
        items: _Items = [b"(Lambda", *self._defaults(node.args)]
        items += self._arguments(node.args, annotated=False)
        items += [inner, node.body, b")", self._scope]
        stack += items[::-1]

    def _comprehension(self, node: ast.AST, stack: _Items) -> None:
        outer = self._scope
        inner = self.scopes.of[id(node)]
        generators: list[ast.comprehension] = node.generators  # type: ignore[attr-defined]
        items: _Items = [b"(" + type(node).__name__.encode(), generators[0].iter, inner]
        for place, generator in enumerate(generators):
            items += [b"for", generator.target]
            if generator.is_async:
                items.append(b"async")
            if place:
                items += [b"in", generator.iter]
            items += [b"if[", *generator.ifs, b"]"]
        for name in ("elt", "key", "value"):
            part = getattr(node, name, None)
            if part is not None:
                items += [b"." + name.encode(), part]
        items += [outer, b")"]
        stack += items[::-1]

    def _handler(self, node: ast.ExceptHandler, stack: _Items) -> None:
        scope = self._scope
        items: _Items = [b"(ExceptHandler"]
        if node.type is not None:
            items += [b".type", node.type]
        body = self._block(node.body, scope)
        if node.name is None:
            items += [b"{", *body, b"})"]
        else:
            key = scope.mangle(node.name)
            alone = key in scope.split and key not in scope.active
            if alone:
                items.append(_HandlerEdge(key, scope, begins=True))
            items += [b".name", _Bound(node.name), b"{", *body, b"})"]
            if alone:
                items.append(_HandlerEdge(key, scope, begins=False))
        stack += items[::-1]

    def _edge(self, edge: _HandlerEdge, _stack: _Items) -> None:
        if edge.begins:
            edge.scope.active[edge.name] = b"$%d;" % self._variables
            self._variables += 1
        else:
            del edge.scope.active[edge.name]

    def _binding(self, bound: _Bound, _stack: _Items) -> None:
        self._out.append(self._resolve(bound.name))

    def _imported(self, imported: _Imported, _stack: _Items) -> None:
        self._out.append(imported.key + self._resolve(imported.bound))

    def _match_name(self, node: ast.AST, stack: _Items) -> None:
        name = getattr(node, "name", None) or getattr(node, "rest", None)
        items: _Items = [b"(" + type(node).__name__.encode()]
        for field in ("keys", "patterns"):
            listed = getattr(node, field, None)
            if listed:
                items += [b"." + field.encode() + b"[", *listed, b"]"]
        pattern = getattr(node, "pattern", None)
        if pattern is not None:
            items += [b".pattern", pattern]
        if name is not None:
            items += [b".name", _Bound(name)]
        items.append(b")")
        stack += items[::-1]

    def _singleton(self, node: ast.MatchSingleton, _stack: _Items) -> None:
        self._out.append(b"(MatchSingleton" + _write_constant(node.value) + b")")

    def _constant(self, node: ast.Constant, _stack: _Items) -> None:
        self._out.append(_write_constant(node.value))

    def _annotated(self, node: ast.AnnAssign, stack: _Items) -> None:
        if self._scope.annotated:
            self._generic(node, stack)
        elif node.value is not None:
            stack.append(ast.Assign(targets=[node.target], value=node.value))
        else:
            # The object whose attribute it is gets looked up, and no more.
            stack += [b")", node.target, b"(looked"]

    def _delete(self, node: ast.Delete, stack: _Items) -> None:
        items: _Items = [b"(Delete"]
        targets: list[ast.expr] = list(reversed(node.targets))
        while targets:
            target = targets.pop()
            if isinstance(target, ast.Tuple | ast.List):
                targets += reversed(target.elts)
            else:
                items.append(target)
        items.append(b")")
        stack += items[::-1]

    def _joined(self, node: ast.JoinedStr, stack: _Items) -> None:
        parts: list[str | ast.AST] = []
        for value in node.values:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                if parts and isinstance(parts[-1], str):
                    parts[-1] += value.value
                else:
                    parts.append(value.value)
            else:
                parts.append(value)
        if all(isinstance(part, str) for part in parts):
            self._out.append(_write_constant("".join(map(str, parts))))
            return
        items: _Items = [b"(JoinedStr"]
        items += [
            _write_constant(part) if isinstance(part, str) else part for part in parts if part
        ]
        items.append(b")")
        stack += items[::-1]

    def _formatted(self, node: ast.FormattedValue, stack: _Items) -> None:
        items: _Items = [b"(FormattedValue!%d" % node.conversion, node.value]
        spec = node.format_spec
        if isinstance(spec, ast.JoinedStr) and spec.values:
            items += [b":", spec]
        items.append(b")")
        stack += items[::-1]

    def _global(self, node: ast.Global, _stack: _Items) -> None:
        self._out.append(b"(Global" + b"".join(map(_write_plain, sorted(node.names))) + b")")

    def _nonlocal(self, node: ast.Nonlocal, _stack: _Items) -> None:
        self._out.append(b"(Nonlocal" + b"".join(map(self._resolve, node.names)) + b")")

    def _type_alias(self, node: ast.AST, stack: _Items) -> None:
        outer = self._scope
        types, around = self._types(node, outer)
        name: ast.AST = node.name  # type: ignore[attr-defined]
        value: ast.AST = node.value  # type: ignore[attr-defined]
        items: _Items = [b"(TypeAlias", name, *types, around, b"=", value, outer, b")"]
        stack += items[::-1]


def _find_scope(key: str, scope: Scope) -> Scope:
    """Whose variable a name is where it is looked up: a function's, the class's, the module's."""
    at = scope
    while at.parent is not None:
        if at.kind is ScopeKind.CLASS:
            if at is scope:
                if key in at.globals:
                    break
                if key in at.bound:
                    return at
        else:
            if key in at.globals:
                break
            if key in at.params or key in at.bound:
                return at
        at = at.parent
    while at.parent is not None:
        at = at.parent
    return at


def _split_import(node: ast.Import | ast.ImportFrom) -> list[_Imported | None]:
    """Each name that a statement imports; None for a star, which stays where it is."""
    found: list[_Imported | None] = []
    for alias in node.names:
        if alias.name == "*":
            return [None]
        if isinstance(node, ast.ImportFrom):
            origin = b"(from%d;" % node.level + _write_plain(node.module or "")
            key = origin + _write_plain(alias.name)
            found.append(_Imported(key, alias.asname or alias.name, plain=False))
            continue
        key = b"(import" + _write_plain(alias.name)
        root = alias.name.partition(".")[0]
        if alias.asname is None or alias.asname == alias.name:
            found.append(_Imported(key, root, plain=True))
        elif root == alias.name:
            # `import a as b` binds what `import a` binds.
            found.append(_Imported(key, alias.asname, plain=False))
        else:
            found.append(_Imported(key + b"as", alias.asname, plain=False))
    return found


def _order_imports(imports: list[_Imported]) -> _Items:
    """Imports in one order, unless one of them hides another."""
    owners: dict[str, tuple[bytes, bool]] = {}
    for imported in imports:
        known = owners.setdefault(imported.bound, (imported.key, imported.plain))
        if known[0] != imported.key and not (known[1] and imported.plain):
            return list(imports)
    once = {(imported.key, imported.bound): imported for imported in imports}
    return [once[place] for place in sorted(once)]


def _says_nothing(node: ast.AnnAssign, scope: Scope) -> bool:
    """Whether it is `x: int` in a function, which nobody keeps."""
    return node.value is None and isinstance(node.target, ast.Name) and not scope.annotated


def _write_plain(value: object) -> bytes:
    """A name, or a number that is part of a node."""
    if type(value) is str:
        text = value.encode("utf-8", "surrogatepass")
        return b"%d:" % len(text) + text
    if type(value) is int:
        return b"#%d;" % value
    return _write_constant(value)


def _write_constant(value: object) -> bytes:
    """A constant with its type: 1, 1.0 and True are three."""
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return b"s%d:" % len(text) + text
    if isinstance(value, bytes):
        return b"b%d:" % len(value) + value
    if isinstance(value, float):
        return b"f%s;" % value.hex().encode()
    if isinstance(value, complex):
        return b"j%s,%s;" % (value.real.hex().encode(), value.imag.hex().encode())
    if isinstance(value, int) and not isinstance(value, bool):
        # Decimal digits of a large number are refused, and would take their square of time.
        return b"i%s;" % hex(value).encode()
    return b"k%s;" % repr(value).encode()


_WRITES: dict[type, _Write] = {
    ast.Constant: NormalForm._constant,  # type: ignore[dict-item]
    ast.FunctionDef: NormalForm._function,  # type: ignore[dict-item]
    ast.AsyncFunctionDef: NormalForm._function,  # type: ignore[dict-item]
    ast.ClassDef: NormalForm._class,  # type: ignore[dict-item]
    ast.Lambda: NormalForm._lambda,  # type: ignore[dict-item]
    ast.ListComp: NormalForm._comprehension,
    ast.SetComp: NormalForm._comprehension,
    ast.DictComp: NormalForm._comprehension,
    ast.GeneratorExp: NormalForm._comprehension,
    ast.ExceptHandler: NormalForm._handler,  # type: ignore[dict-item]
    ast.MatchAs: NormalForm._match_name,
    ast.MatchStar: NormalForm._match_name,
    ast.MatchMapping: NormalForm._match_name,
    ast.MatchSingleton: NormalForm._singleton,  # type: ignore[dict-item]
    ast.AnnAssign: NormalForm._annotated,  # type: ignore[dict-item]
    ast.Delete: NormalForm._delete,  # type: ignore[dict-item]
    ast.JoinedStr: NormalForm._joined,  # type: ignore[dict-item]
    ast.FormattedValue: NormalForm._formatted,  # type: ignore[dict-item]
    ast.Global: NormalForm._global,  # type: ignore[dict-item]
    ast.Nonlocal: NormalForm._nonlocal,  # type: ignore[dict-item]
    _HandlerEdge: NormalForm._edge,  # type: ignore[dict-item]
    _Bound: NormalForm._binding,  # type: ignore[dict-item]
    _Imported: NormalForm._imported,  # type: ignore[dict-item]
}
if hasattr(ast, "TypeAlias"):
    _WRITES[ast.TypeAlias] = NormalForm._type_alias
