"""What a module is made of, by digest: its functions and classes by name, and the rest."""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from quark.provenance.code_references import (
    ImportedName,
    list_imports,
    list_references,
)
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
        references: What it may reach, as `quark.provenance.code_references` lists it.
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
