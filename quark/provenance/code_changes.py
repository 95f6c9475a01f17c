"""Changes between two versions of a code, by function, and exchanged modules."""

from __future__ import annotations

import ast
import difflib
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from quark.provenance.code_fingerprints import (
    MODULE_UNIT,
    CodeUnit,
    FingerprintCache,
    ModuleFingerprint,
    fingerprint_module,
)
from quark.provenance.normal_form import LEVEL_SYNTAX

ChangeKind = Literal[
    "changed", "added", "removed", "renamed", "moved", "reordered", "cosmetic", "bytes", "unknown"
]
_PYTHON = (".py", ".pyw", ".pyi")


class SourceText(Protocol):
    """A source file as a run kept it: `SourceFile` is one."""

    @property
    def path(self) -> str:
        """Where it lies, relative to the root, with slashes."""

    @property
    def sha256(self) -> str:
        """Of the bytes as they were."""

    @property
    def text(self) -> str | None:
        """What stands in it, or None where it was not kept."""

    @property
    def reason(self) -> str | None:
        """Why there is no text, or that something was taken out of it."""


@dataclass(frozen=True)
class CodeChange:
    """One difference between two states of a code.

    Attributes:
        kind: changed, added, removed, renamed, moved (to another file), reordered (the same
            definitions in another order), cosmetic (only comments or layout), bytes (it differs,
            and at least one of the two could not be read as Python), unknown (it differs, and
            a text was not kept, or has something taken out).
        path: File of it, in the state after; of what was removed, in the state before.
        name: Qualified name of the function or class; empty for the rest of a module, and for
            a whole file.
        lines: How many lines differ, or None where that says nothing.
        before_path, before_name: Where it was, where that is another place.
        reason: Why no more is known, or None.
    """

    kind: ChangeKind
    path: str
    name: str = ""
    lines: int | None = None
    before_path: str | None = None
    before_name: str | None = None
    reason: str | None = None

    @property
    def is_logic(self) -> bool:
        """Whether what the code does may differ: not of comments, layout and other names."""
        return self.kind not in ("cosmetic", "renamed", "moved", "reordered")

    @property
    def place(self) -> str:
        """`model.py: Net.forward`, or the path alone for what no function has."""
        return f"{self.path}: {self.name}" if self.name else self.path

    def describe(self) -> str:
        """The change in words."""
        if self.kind == "changed":
            if self.lines is None:
                return f"{self.place} changed"
            return f"{self.place} changed, {self.lines} line{'' if self.lines == 1 else 's'}"
        if self.kind == "renamed":
            return f"{self.path}: {self.before_name} renamed to {self.name}"
        if self.kind == "moved":
            named = f"{self.name} " if self.name else ""
            return f"{named}moved from {self.before_path} to {self.path}"
        if self.kind == "reordered":
            return f"{self.place} has its definitions in a different order"
        if self.kind == "cosmetic":
            return f"{self.path} differs only in comments or layout"
        if self.kind in ("bytes", "unknown"):
            return f"{self.path} differs, details unknown: {self.reason}"
        return f"{self.place} {self.kind}"


def compare_modules(
    before: ModuleFingerprint,
    after: ModuleFingerprint,
    *,
    path: str = "",
    before_text: str | None = None,
    after_text: str | None = None,
) -> tuple[CodeChange, ...]:
    """What changed in one module.

    Args:
        before, after: Its fingerprints.
        path: How the module is called in the answer.
        before_text, after_text: Its texts: without them no lines are counted.

    Returns:
        Changes in the order of the text after, what was removed at the end; empty if both do
        the same in the same order under the same names.
    """
    if before.digest == after.digest and before.level == after.level:
        return ()
    if before.level != LEVEL_SYNTAX or before.level != after.level:
        reason = after.reason or before.reason
        return (CodeChange(kind="bytes", path=path, reason=reason),)
    old = {unit.name: unit for unit in before.units}
    new = {unit.name: unit for unit in after.units}
    renamed = _find_renamed(old, new)
    changes: list[CodeChange] = []
    for name, unit in new.items():
        was = old.get(name)
        if was is None:
            former = renamed.get(name)
            if former is not None:
                changes.append(CodeChange(kind="renamed", path=path, name=name, before_name=former))
            else:
                changes.append(CodeChange(kind="added", path=path, name=name))
        elif was.digest != unit.digest or was.kind != unit.kind:
            lines = _count_lines(before, after, was, unit, before_text, after_text)
            shown = "" if name == MODULE_UNIT else name
            changes.append(CodeChange(kind="changed", path=path, name=shown, lines=lines))
        elif was.layout != unit.layout and _is_reordered(before, after, name):
            shown = "" if name == MODULE_UNIT else name
            changes.append(CodeChange(kind="reordered", path=path, name=shown))
    gone = set(renamed.values())
    changes += [
        CodeChange(kind="removed", path=path, name=name)
        for name in old
        if name not in new and name not in gone
    ]
    if not changes:
        # Definitions stand elsewhere between the same statements.
        changes.append(CodeChange(kind="reordered", path=path))
    return tuple(_fold_members(changes))


def _find_renamed(old: dict[str, CodeUnit], new: dict[str, CodeUnit]) -> dict[str, str]:
    """New name -> old name, of what is equal but for it."""
    gone = [unit for name, unit in old.items() if name not in new]
    found: dict[str, str] = {}
    for name, unit in new.items():
        if name in old:
            continue
        equal = [each for each in gone if each.digest == unit.digest and each.kind == unit.kind]
        if not equal:
            continue
        # Of many that are equal, the method of that name in a class that was renamed.
        leaf = name.rpartition(".")[2]
        former = next((each for each in equal if each.name.rpartition(".")[2] == leaf), equal[0])
        found[name] = former.name
        gone.remove(former)
    return found


def _is_reordered(before: ModuleFingerprint, after: ModuleFingerprint, name: str) -> bool:
    one, two = _list_inside(before, name), _list_inside(after, name)
    return one != two and Counter(one) == Counter(two)


def _list_inside(module: ModuleFingerprint, name: str) -> list[str]:
    """What stands directly in a class or a module, in its order."""
    prefix = "" if name == MODULE_UNIT else f"{name}."
    return [
        unit.name
        for unit in sorted(module.units, key=lambda unit: unit.first_line)
        if unit.name != MODULE_UNIT
        and unit.name.startswith(prefix)
        and "." not in unit.name[len(prefix) :]
    ]


def _fold_members(changes: list[CodeChange]) -> list[CodeChange]:
    """Without the methods of a class that came, went or was renamed as a whole."""
    whole = {
        (change.kind, change.path, change.before_path, change.name): change.before_name
        for change in changes
    }
    kept = []
    for change in changes:
        owner, _, leaf = change.name.rpartition(".")
        key = (change.kind, change.path, change.before_path, owner)
        if owner and change.kind in ("added", "removed", "renamed", "moved") and key in whole:
            former = whole[key]
            if change.kind != "renamed" or change.before_name == f"{former}.{leaf}":
                continue
        kept.append(change)
    return kept


def compare_sources(
    before: Iterable[SourceText],
    after: Iterable[SourceText],
    cache: FingerprintCache | None = None,
) -> tuple[CodeChange, ...]:
    """What changed between the sources of two runs. Files of one content are not looked into.

    Args:
        before, after: The files, each path once.
        cache: Where fingerprints of modules are kept.
    """
    cache = cache or FingerprintCache()
    old = {source.path: source for source in before}
    new = {source.path: source for source in after}
    changes: list[CodeChange] = []
    fingerprints: dict[tuple[str, bool], ModuleFingerprint] = {}
    for path, source in new.items():
        was = old.get(path)
        if was is not None and was.sha256 != source.sha256:
            changes += _compare_files(was, source, cache, fingerprints)
    changes += _compare_whole_files(old, new, cache, fingerprints)
    return tuple(_fold_members(_find_moved(changes, fingerprints)))


def _compare_files(
    was: SourceText,
    source: SourceText,
    cache: FingerprintCache,
    fingerprints: dict[tuple[str, bool], ModuleFingerprint],
) -> tuple[CodeChange, ...]:
    path = source.path
    if was.text is None or source.text is None:
        reason = was.reason or source.reason or "its text was not stored"
        return (CodeChange(kind="unknown", path=path, reason=reason),)
    if not path.endswith(_PYTHON):
        lines = _count_text_lines(was.text.splitlines(), source.text.splitlines())
        if lines or not (was.reason or source.reason):
            return (CodeChange(kind="changed", path=path, lines=lines),)
        return (CodeChange(kind="unknown", path=path, reason=was.reason or source.reason),)
    one = fingerprints[path, False] = cache.fingerprint(was.text)
    two = fingerprints[path, True] = cache.fingerprint(source.text)
    changes = compare_modules(one, two, path=path, before_text=was.text, after_text=source.text)
    if changes:
        return changes
    if was.reason or source.reason:
        # What differs is perhaps what was taken out of the texts.
        return (CodeChange(kind="unknown", path=path, reason=was.reason or source.reason),)
    return (CodeChange(kind="cosmetic", path=path),)


def _compare_whole_files(
    old: dict[str, SourceText],
    new: dict[str, SourceText],
    cache: FingerprintCache,
    fingerprints: dict[tuple[str, bool], ModuleFingerprint],
) -> list[CodeChange]:
    """Files that came, went, or have another name."""
    gone = [source for path, source in old.items() if path not in new]
    come = [source for path, source in new.items() if path not in old]
    for sources, is_after in ((gone, False), (come, True)):
        for source in sources:
            if source.text is not None and source.path.endswith(_PYTHON):
                fingerprints[source.path, is_after] = cache.fingerprint(source.text)
    changes = []
    for source in come:
        former = next((each for each in gone if _is_same(each, source, fingerprints)), None)
        if former is None:
            changes.append(CodeChange(kind="added", path=source.path))
        else:
            gone.remove(former)
            changes.append(CodeChange(kind="moved", path=source.path, before_path=former.path))
    changes += [CodeChange(kind="removed", path=source.path) for source in gone]
    return changes


def _is_same(
    was: SourceText,
    source: SourceText,
    fingerprints: dict[tuple[str, bool], ModuleFingerprint],
) -> bool:
    if was.sha256 == source.sha256:
        return True
    one = fingerprints.get((was.path, False))
    two = fingerprints.get((source.path, True))
    if one is None or two is None or was.reason or source.reason:
        return False
    return one.level == two.level == LEVEL_SYNTAX and one.digest == two.digest


def _find_moved(
    changes: list[CodeChange],
    fingerprints: dict[tuple[str, bool], ModuleFingerprint],
) -> list[CodeChange]:
    """Joins what went from one file and came in another."""
    gone: list[tuple[str, CodeUnit]] = []
    for change in changes:
        module = fingerprints.get((change.path, False))
        if change.kind == "removed" and module is not None:
            gone += [(change.path, unit) for unit in _list_units(module, change.name)]
    found: list[CodeChange] = []
    taken: set[tuple[str, str]] = set()
    for change in changes:
        module = fingerprints.get((change.path, True))
        if change.kind != "added" or module is None:
            found.append(change)
            continue
        units = _list_units(module, change.name)
        moved = [_find_former(unit, change.path, gone, taken) for unit in units]
        if not change.name or not all(moved):
            found.append(change)
        for unit, former in zip(units, moved, strict=True):
            if former is not None:
                found.append(
                    CodeChange(kind="moved", path=change.path, name=unit.name, before_path=former)
                )
    return [
        change
        for change in found
        if change.kind != "removed" or (change.path, change.name) not in taken
    ]


def _list_units(module: ModuleFingerprint, name: str) -> list[CodeUnit]:
    if not name:
        return [unit for unit in module.units if unit.name != MODULE_UNIT]
    return [unit for unit in module.units if unit.name == name or unit.name.startswith(f"{name}.")]


def _find_former(
    unit: CodeUnit, path: str, gone: list[tuple[str, CodeUnit]], taken: set[tuple[str, str]]
) -> str | None:
    for former, was in gone:
        same = was.name == unit.name and was.digest == unit.digest and was.kind == unit.kind
        if same and former != path and (former, was.name) not in taken:
            taken.add((former, was.name))
            return former
    return None


def _count_lines(
    before: ModuleFingerprint,
    after: ModuleFingerprint,
    was: CodeUnit,
    unit: CodeUnit,
    before_text: str | None,
    after_text: str | None,
) -> int | None:
    """Lines that differ, comments and layout left out: one at least, since something does."""
    if before_text is None or after_text is None:
        return None
    one = _take_lines(before_text, before, was)
    two = _take_lines(after_text, after, unit)
    return max(1, _count_text_lines(one, two))


def _count_text_lines(one: list[str], two: list[str]) -> int:
    changed = 0
    matcher = difflib.SequenceMatcher(None, one, two, autojunk=False)
    for word, first, last, start, end in matcher.get_opcodes():
        if word != "equal":
            changed += max(last - first, end - start)
    return changed


def count_changed_lines(before: str, after: str) -> int:
    """How many lines of two texts differ, comments, docstrings and layout left out."""
    return _count_text_lines(_make_plain(before.splitlines()), _make_plain(after.splitlines()))


def _take_lines(text: str, module: ModuleFingerprint, unit: CodeUnit) -> list[str]:
    lines = text.splitlines()
    hidden: set[int] = set()
    if unit.kind != "function":
        for other in module.units:
            inside = unit.first_line <= other.first_line and other.last_line <= unit.last_line
            if other is not unit and other.kind != "module" and inside:
                hidden.update(range(other.first_line, other.last_line + 1))
    numbers = range(unit.first_line, min(unit.last_line, len(lines)) + 1)
    taken = [lines[number - 1] for number in numbers if number not in hidden]
    return _make_plain(taken)


def _make_plain(lines: list[str]) -> list[str]:
    """Lines as Python itself would write them, or as they are where it cannot read them."""
    try:
        tree = ast.parse(textwrap.dedent("\n".join(lines)))
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if ast.get_docstring(node, clean=False) is not None and len(node.body) > 1:
                del node.body[0]
        return ast.unparse(tree).splitlines()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [line.strip() for line in lines if line.strip() and line.strip()[0] != "#"]


def exchange_units(before: str, after: str, names: Collection[str]) -> str | None:
    """The text of a module with some functions and classes of its state after.

    Functions and classes that the state after has added come with it, and methods where something
    of their class is exchanged: nothing of the state before calls them, and what is exchanged
    may. What is removed stays, unless it is named.

    Args:
        before, after: The two texts.
        names: What is exchanged, as `CodeUnit.name` has it; "" is the rest of the module.

    Returns:
        The text, or None where it cannot be put together so that this differs and nothing else.
    """
    one, two = fingerprint_module(before), fingerprint_module(after)
    if one.level != LEVEL_SYNTAX or two.level != LEVEL_SYNTAX:
        return None
    wanted = {name or MODULE_UNIT for name in names}
    text = _Composer((before, one), (after, two), wanted).compose()
    made = fingerprint_module(text)
    if made.level != LEVEL_SYNTAX:
        return None
    found = compare_modules(one, made)
    changed = {each.name or MODULE_UNIT for each in found if each.kind in ("changed", "removed")}
    unwanted = changed - wanted
    lacking = {name for name in wanted if _digest(made, name) != _digest(two, name)}
    return None if unwanted or lacking else text


def _digest(module: ModuleFingerprint, name: str) -> str | None:
    return next((unit.digest for unit in module.units if unit.name == name), None)


class _Composer:
    """Puts a text together, unit by unit."""

    def __init__(
        self,
        before: tuple[str, ModuleFingerprint],
        after: tuple[str, ModuleFingerprint],
        wanted: set[str],
    ) -> None:
        self._lines = [text.splitlines(keepends=True) for text, _ in (before, after)]
        self._units = [{unit.name: unit for unit in module.units} for _, module in (before, after)]
        self._wanted = wanted

    def compose(self) -> str:
        return "".join(self._build(MODULE_UNIT))

    def _build(self, name: str) -> list[str]:
        """The lines of a unit, of the side that is wanted, with those of what is inside."""
        side = 1 if name not in self._units[0] or name in self._wanted else 0
        lines, (first, last) = self._lines[side], self._find_span(side, name)
        out: list[str] = []
        at = first
        inside = self._list_inside(side, name)
        for child in inside:
            out += lines[at - 1 : child.first_line - 1]
            if side == 0:
                out += self._add_before(name, child, inside)
            if child.name in self._units[1 - side]:
                out += self._build(child.name)
            elif side == 1 or child.name not in self._wanted:
                out += lines[child.first_line - 1 : child.last_line]
            at = child.last_line + 1
        out += lines[at - 1 : last]
        if side == 0:
            if out and not out[-1].endswith("\n"):
                out[-1] += "\n"
            out += self._add_before(name, None, inside)
        return out

    def _find_span(self, side: int, name: str) -> tuple[int, int]:
        if name == MODULE_UNIT:
            return 1, len(self._lines[side])
        unit = self._units[side][name]
        return unit.first_line, unit.last_line

    def _list_inside(self, side: int, name: str) -> list[CodeUnit]:
        """What is defined directly in a unit, in the order of the text."""
        prefix = "" if name == MODULE_UNIT else f"{name}."
        found = [
            unit
            for unit in self._units[side].values()
            if unit.name != MODULE_UNIT
            and unit.name.startswith(prefix)
            and unit.name != name
            and "." not in unit.name[len(prefix) :]
        ]
        return sorted(found, key=lambda unit: unit.first_line)

    def _add_before(
        self, name: str, child: CodeUnit | None, inside: list[CodeUnit]
    ) -> Iterator[str]:
        """What the state after has added and stands before a unit there; None: before the end."""
        known = {unit.name for unit in inside}
        added: list[CodeUnit] = []
        for unit in self._list_inside(1, name) if name in self._units[1] else ():
            if unit.name in known:
                if child is not None and unit.name == child.name:
                    break
                added = []
            elif unit.name not in self._units[0] and self._may_add(name, unit.name):
                added.append(unit)
        else:
            if child is not None:
                return
        for unit in added:
            yield from self._lines[1][unit.first_line - 1 : unit.last_line]
            yield "\n"

    def _may_add(self, owner: str, name: str) -> bool:
        return (
            owner == MODULE_UNIT
            or name in self._wanted
            or any(each == owner or each.startswith(f"{owner}.") for each in self._wanted)
        )
