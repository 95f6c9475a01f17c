"""A module with some of its functions as another state of it has them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from quark.provenance.code_changes import compare_modules
from quark.provenance.code_fingerprints import (
    MODULE_UNIT,
    CodeUnit,
    ModuleFingerprint,
    fingerprint_module,
)
from quark.provenance.normal_form import LEVEL_SYNTAX


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
