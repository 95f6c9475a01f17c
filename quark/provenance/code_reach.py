"""Which functions of a project a function reaches by name, through as many imports as it takes.

What cannot be told is reached: a method that is called on something unknown may be any method
of that name, and an object that is called may be any that can be. So a change that nobody
reaches is surely none of the function's, and a change that is reached may be.
"""

from __future__ import annotations

import builtins
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from quark.provenance.code_fingerprints import (
    MODULE_UNIT,
    CodeUnit,
    ModuleFingerprint,
)
from quark.provenance.code_references import ImportedName
from quark.provenance.normal_form import digest_bytes

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
