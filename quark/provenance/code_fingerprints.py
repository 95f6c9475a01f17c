"""Fingerprints of the functions and classes of a module, and which of them a function reaches."""

from __future__ import annotations

import ast
import builtins
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

import msgspec

from quark.provenance.name_scopes import Scope
from quark.provenance.normal_form import (
    LEVEL_BYTES,
    LEVEL_SYNTAX,
    NORMAL_FORM_VERSION,
    NormalForm,
    UnreadableSourceError,
    digest_bytes,
    parse_source,
)

# What a piece of code may reach, by name: rather too much than too little.
#
# References are texts, so that they can be kept beside a fingerprint:
#
# - `a`, `a.b.c`: a name that is looked up, and what is looked up in it.
# - `.b`: an attribute of something that nobody knows.
# - `a()`, `a.b()`, `.b()`, `()`: that it is called.
# - `.__add__`: what the syntax calls by itself.

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


MODULE_UNIT: Final = "<module>"
"""What is left of a module without its functions and classes."""
_FINGERPRINT_VERSION = 1
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
_MOST_IN_SHARD = 400
_SHARD_DIGITS = 2


class CodeUnit(msgspec.Struct, frozen=True, gc=False):
    """One function or class of a module, or what is around them.

    Attributes:
        name: Its qualified name, such as `Net.forward`; one that is defined again has `#2`.
        kind: function, class (without its methods) or module (the rest).
        digest: Of its normal form, whatever it is called.
        layout: The same with the names and places of what is defined in it.
        first_line, last_line: Where it stands, counted from 1, decorators included.
        trace: Name that `@quark.trace` gives it, or None.
        references: What it may reach, as `quark.provenance.code_fingerprints` lists it.
    """

    name: str
    kind: str
    digest: str
    layout: str
    first_line: int
    last_line: int
    trace: str | None = None
    references: tuple[str, ...] = ()


class ModuleFingerprint(msgspec.Struct, frozen=True):
    """What one module is made of.

    Attributes:
        digest: Equal if, and only if, all units of two modules are.
        level: syntax, or bytes where the text could not be read: then there are no units.
        units: The rest first, then functions and classes as they stand in the text.
        imports: What the module imports, anywhere in it.
        variables: Names that the module's own statements store into, sorted.
        reason: Why the text could not be read, or None.
    """

    digest: str
    level: str
    units: tuple[CodeUnit, ...] = ()
    imports: tuple[ImportedName, ...] = ()
    variables: tuple[str, ...] = ()
    reason: str | None = None

    def find(self, name: str) -> CodeUnit | None:
        """The unit of a qualified name, or None."""
        for unit in self.units:
            if unit.name == name:
                return unit
        return None

    def find_traced(self) -> dict[str, CodeUnit]:
        """The functions with `@quark.trace`, by the name that it gives them."""
        return {unit.trace: unit for unit in self.units if unit.trace is not None}


def fingerprint_module(source: str | bytes) -> ModuleFingerprint:
    """Say what a module is made of. A text that cannot be read has a digest of its bytes.

    Costs 3 ms for 1,000 lines; never to be called in a process that trains.
    """
    try:
        tree = parse_source(source)
    except UnreadableSourceError as error:
        return ModuleFingerprint(
            digest=digest_bytes(b"bytes", _to_bytes(source)), level=LEVEL_BYTES, reason=str(error)
        )
    return fingerprint_tree(tree)


def fingerprint_tree(tree: ast.Module) -> ModuleFingerprint:
    """Say what a module that is read already is made of; the tree is the caller's."""
    return _Splitter(tree).split(tree)


class _Splitter:
    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, Scope]]
        self.found = []
        self.seen: dict[str, int] = {}
        self.prefix = ""
        self.form = NormalForm(tree, self.note)

    def note(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, scope: Scope
    ) -> bytes:
        name = self.prefix + node.name
        times = self.seen.get(name, 0) + 1
        self.seen[name] = times
        if times > 1:
            name = f"{name}#{times}"
        self.found.append((name, node, scope))
        return b"=" + name.encode() + b";"

    def split(self, tree: ast.Module) -> ModuleFingerprint:
        form = self.form
        last = max((node.end_lineno or 1 for node in tree.body), default=1)
        whole = form.write_whole(tree)
        units = [_make_unit(MODULE_UNIT, "module", whole, (1, last), list_references(tree.body))]
        place = 0
        while place < len(self.found):
            name, node, scope = self.found[place]
            place += 1
            lines = (
                min([node.lineno, *(each.lineno for each in node.decorator_list)]),
                node.end_lineno or node.lineno,
            )
            if isinstance(node, ast.ClassDef):
                self.prefix = f"{name}."
                written = form.write_class(node, scope)
                references = list_references([node], inside=True)
                units.append(_make_unit(name, "class", written, lines, references))
                continue
            trace = form.find_trace(node)
            written = form.write_function(node, scope)
            units.append(
                _make_unit(
                    name,
                    "function",
                    written,
                    lines,
                    list_references([node], inside=True),
                    None if trace is None else _name_trace(trace, name),
                )
            )
        parts = [f"{unit.name}\0{unit.kind}\0{unit.layout}\n" for unit in units]
        return ModuleFingerprint(
            digest=digest_bytes("".join(sorted(parts)).encode()),
            level=LEVEL_SYNTAX,
            units=tuple(units),
            imports=list_imports(tree),
            variables=tuple(sorted(form.scopes.variables)),
        )


def _make_unit(
    name: str,
    kind: str,
    written: list[bytes],
    lines: tuple[int, int],
    references: tuple[str, ...],
    trace: str | None = None,
) -> CodeUnit:
    # Markers are of a type of their own, so that a text cannot pass for one.
    digest = layout = digest_bytes(b"".join(written))
    if kind != "function":
        digest = digest_bytes(b"".join(part for part in written if type(part) is bytes))
    return CodeUnit(
        name=name,
        kind=kind,
        digest=digest,
        layout=layout,
        first_line=lines[0],
        last_line=lines[1],
        trace=trace,
        references=references,
    )


def _name_trace(decorator: ast.expr, name: str) -> str:
    if isinstance(decorator, ast.Call):
        given = [*decorator.args[:1]]
        given += [keyword.value for keyword in decorator.keywords if keyword.arg == "name"]
        for value in given:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                return value.value
    return name


def _to_bytes(source: str | bytes) -> bytes:
    return source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source


class FingerprintCache:
    """Fingerprints of modules by content, in a folder: what did not change is not parsed again.

    The folder may be lost, filled by others, or not writable: then it is as if it were empty.
    It takes some ten thousand entries; then the oldest of a shard go.

    Threads: any.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = _find_cache_folder() if folder is None else folder
        self._known: dict[str, ModuleFingerprint] = {}

    def fingerprint(self, source: str | bytes) -> ModuleFingerprint:
        """The fingerprint of a module, from the cache where it has it."""
        content = hashlib.sha256(_to_bytes(source)).hexdigest()
        known = self._known.get(content)
        if known is None:
            known = self._read(content)
            if known is None:
                known = fingerprint_module(source)
                # Another Python may be able to read it.
                if known.level == LEVEL_SYNTAX:
                    self._write(content, known)
            self._known[content] = known
        return known

    def _find_place(self, content: str) -> Path:
        version = f"v{NORMAL_FORM_VERSION}.{_FINGERPRINT_VERSION}"
        return self._folder / version / content[:_SHARD_DIGITS] / f"{content}.json"

    def _read(self, content: str) -> ModuleFingerprint | None:
        try:
            kept = msgspec.json.decode(self._find_place(content).read_bytes(), type=_Kept)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return kept.fingerprint if kept.content == content else None

    def _write(self, content: str, fingerprint: ModuleFingerprint) -> None:
        place = self._find_place(content)
        aside = place.with_suffix(f".{os.getpid()}.tmp")
        try:
            place.parent.mkdir(parents=True, exist_ok=True, mode=_FOLDER_MODE)
            _make_room(place.parent)
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _FILE_MODE)
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.encode(_Kept(content, fingerprint)))
            aside.replace(place)
        except OSError:
            # A cache that cannot be written costs time, and nothing else.
            return


class _Kept(msgspec.Struct, frozen=True):
    content: str
    fingerprint: ModuleFingerprint


def _make_room(shard: Path) -> None:
    entries = [entry for entry in os.scandir(shard) if entry.is_file(follow_symlinks=False)]
    if len(entries) < _MOST_IN_SHARD:
        return
    entries.sort(key=lambda entry: entry.stat(follow_symlinks=False).st_mtime_ns)
    for entry in entries[: _MOST_IN_SHARD // 2]:
        Path(entry.path).unlink(missing_ok=True)


def _find_cache_folder() -> Path:
    chosen = os.environ.get("XDG_CACHE_HOME")
    root = Path(chosen) if chosen and os.path.isabs(chosen) else Path("~/.cache").expanduser()
    return root / "quark" / "code"


def fingerprint_modules(
    sources: Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes]],
    cache: FingerprintCache | None = None,
) -> dict[str, ModuleFingerprint]:
    """Fingerprints of many modules, by their paths.

    Args:
        sources: Path of a file -> its text.
        cache: Where fingerprints are kept; None keeps them in the user's folder for caches.
    """
    cache = cache or FingerprintCache()
    pairs = sources.items() if isinstance(sources, Mapping) else sources
    return {path: cache.fingerprint(source) for path, source in pairs}


# Which functions of a project a function reaches by name, through as many imports as it takes.
#
# What cannot be told is reached: a method that is called on something unknown may be any method
# of that name, and an object that is called may be any that can be. So a change that nobody
# reaches is surely none of the function's, and a change that is reached may be.

_CALLED = ("__call__", "forward")
_BUILTINS = frozenset(dir(builtins))
_BUILTIN_METHODS = frozenset().union(
    *(dir(kind) for kind in (list, dict, set, str, bytes, tuple, int, float, object))
)
_PACKAGE_FILE = "__init__"


class CodePlace(NamedTuple):
    """A function, a class, or the rest of a module."""

    path: str
    name: str

    @property
    def label(self) -> str:
        """`model.py: Net.forward`, as changes are called."""
        return self.path if self.name == MODULE_UNIT else f"{self.path}: {self.name}"


class CodeReach:
    """Looks for what functions of one state of a project reach.

    Args:
        modules: Path of each module, relative to the root, with slashes -> its fingerprint.

    Threads: one.
    """

    def __init__(self, modules: Mapping[str, ModuleFingerprint]) -> None:
        self._modules = dict(modules)
        self._units: dict[CodePlace, CodeUnit] = {}
        # Last part of a qualified name -> functions of classes that have it.
        self._methods: dict[str, list[CodePlace]] = defaultdict(list)
        self._members: dict[CodePlace, list[CodePlace]] = defaultdict(list)
        # Last part of a module's dotted name -> its whole dotted name and path.
        self._dotted: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self._named: dict[tuple[str, str], list[CodePlace]] = defaultdict(list)
        self._imports: dict[tuple[str, str], list[ImportedName]] = defaultdict(list)
        for path, module in self._modules.items():
            self._index(path, module)

    def find(self, path: str, name: str) -> tuple[CodePlace, ...]:
        """All that a function reaches, itself first, then in the order of paths and names.

        Empty if the project has no such function.
        """
        start = CodePlace(path, name)
        if start not in self._units:
            return ()
        reached = {start}
        pending = [start]
        while pending:
            for place in self._follow(pending.pop()):
                if place not in reached:
                    reached.add(place)
                    pending.append(place)
        return (start, *sorted(reached - {start}))

    def digest(self, path: str, name: str) -> str | None:
        """A digest over all that a function reaches, or None if there is no such function.

        Neither its own name nor the names of files count, only what there is to be run.
        """
        reached = self.find(path, name)
        if not reached:
            return None
        first, *others = reached
        parts = sorted(
            f"{place.name}\0{unit.layout if unit.kind == 'class' else unit.digest}\n"
            for place, unit in ((place, self._units[place]) for place in others)
        )
        return digest_bytes(self._units[first].digest.encode(), "".join(parts).encode())

    def _index(self, path: str, module: ModuleFingerprint) -> None:
        parts = list(PurePosixPath(path).with_suffix("").parts)
        if parts and parts[-1] == _PACKAGE_FILE:
            parts.pop()
        if parts:
            self._dotted[parts[-1]].append((".".join(parts), path))
        for unit in module.units:
            place = CodePlace(path, unit.name)
            self._units[place] = unit
            plain = unit.name.partition("#")[0]
            owner, _, leaf = plain.rpartition(".")
            self._named[path, plain].append(place)
            if owner and unit.kind == "function":
                self._methods[leaf].append(place)
            while owner:
                self._members[CodePlace(path, owner)].append(place)
                owner = owner.rpartition(".")[0]
        for imported in module.imports:
            self._imports[path, imported.bound].append(imported)

    def _follow(self, place: CodePlace) -> Iterator[CodePlace]:
        unit = self._units[place]
        owner = unit.name.partition("#")[0].rpartition(".")[0]
        if owner:
            # A method has what its class has: not all other methods, which it calls by name.
            yield from self._named.get((place.path, owner), ())
        calls_unknown = False
        for reference in unit.references:
            name = reference.removesuffix("()")
            is_called = name != reference
            if not name:
                calls_unknown = True
            elif name[0] == ".":
                methods = self._methods.get(name[1:], ())
                yield from methods
                calls_unknown = calls_unknown or (is_called and self._is_unknown(name))
            else:
                found = list(self._resolve(place.path, name.split("."), set()))
                yield from found
                if is_called and not calls_unknown:
                    calls_unknown = self._calls_unknown(place.path, name, found)
        if calls_unknown:
            for name in _CALLED:
                yield from self._methods.get(name, ())

    def _is_unknown(self, attribute: str) -> bool:
        """Whether what is called may be an object that was put there: no method has the name."""
        leaf = attribute.rpartition(".")[2]
        return leaf not in self._methods and leaf not in _BUILTIN_METHODS

    def _calls_unknown(self, path: str, name: str, found: list[CodePlace]) -> bool:
        if found:
            return any(each.name == MODULE_UNIT for each in found)
        root = name.partition(".")[0]
        if self._imports.get((path, root)):
            # Of a library: what it calls in turn was handed over by name.
            return False
        return self._is_unknown(name) if "." in name else name not in _BUILTINS

    def _resolve(
        self, path: str, parts: list[str], seen: set[tuple[str, str]]
    ) -> Iterator[CodePlace]:
        """What a dotted name may be, looked up in a module."""
        first, *rest = parts
        if (path, first) in seen or len(seen) > len(self._modules) * 2 + 2:
            return
        seen.add((path, first))
        yield from self._named.get((path, first), ())
        # Who names a class may make one, and then all of it is to be had.
        yield from self._members.get(CodePlace(path, first), ())
        module = self._modules[path]
        for imported in self._imports.get((path, first), ()):
            yield from self._resolve_import(path, imported, rest, seen)
        for star in self._imports.get((path, "*"), ()):
            for target in self._find_modules(path, star.level, star.module):
                yield from self._resolve(target, parts, seen)
        if first in module.variables:
            # A variable of the module: its statements say what it is.
            yield CodePlace(path, MODULE_UNIT)

    def _resolve_import(
        self, path: str, imported: ImportedName, rest: list[str], seen: set[tuple[str, str]]
    ) -> Iterator[CodePlace]:
        if imported.name:
            for target in self._find_modules(path, imported.level, imported.module):
                yield from self._resolve(target, [imported.name, *rest], seen)
            whole = f"{imported.module}.{imported.name}".strip(".")
            for target in self._find_modules(path, imported.level, whole):
                yield from self._resolve_in(target, rest, seen)
            return
        root = imported.module.split(".")
        if imported.bound == root[0]:
            # `import a.b` binds `a`: what comes next may be a module of it.
            for length in range(len(rest), -1, -1):
                for target in self._find_modules(path, 0, ".".join([root[0], *rest[:length]])):
                    yield from self._resolve_in(target, rest[length:], seen)
        else:
            for target in self._find_modules(path, 0, imported.module):
                yield from self._resolve_in(target, rest, seen)

    def _resolve_in(
        self, path: str, rest: list[str], seen: set[tuple[str, str]]
    ) -> Iterator[CodePlace]:
        if rest:
            yield from self._resolve(path, rest, seen)
        else:
            # The module itself is handed over, or something of it is looked up elsewhere.
            yield CodePlace(path, MODULE_UNIT)

    def _find_modules(self, path: str, level: int, dotted: str) -> Iterator[str]:
        """Paths that a module of a name may have: roots are not known, so ends count."""
        if level:
            folder = list(PurePosixPath(path).parent.parts)
            folder = folder[: len(folder) - (level - 1)] if level > 1 else folder
            wanted = ".".join([*folder, *filter(None, dotted.split("."))])
            for known, found in self._dotted.get(wanted.rpartition(".")[2], ()):
                if known == wanted:
                    yield found
            return
        for known, found in self._dotted.get(dotted.rpartition(".")[2], ()):
            if known == dotted or known.endswith(f".{dotted}"):
                yield found
