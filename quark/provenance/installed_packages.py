"""Which distributions are installed, and which of them this program has imported.

Their folders' names say what they are: no metadata is parsed, which would take a second.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from operator import itemgetter

_INFO = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+?)-(?P<version>[0-9][^-]*)(?:-[^/]*)?\.(?:dist|egg)-info"
)
_LETTERS = re.compile(r"[-_.]+")
_MOST_PLACES = 200
_MOST_PACKAGES = 5000
# How much of a list of files is looked at once, and of a list of modules at all.
_BLOCK_BYTES = 64 * 1024
_MOST_LIST_BYTES = 8 * 1024 * 1024
# After so many folders others may run.
_FOLDERS_AT_ONCE = 20
_PAUSE_S = 0.0005
# What Quark imports when it needs it, and every interpreter of an environment at its start: that
# it has done so says nothing of a run.
_IDLE_MODULES = frozenset(
    "__main__ __mp_main__ _distutils_hack _virtualenv backports psutil pynvml zstandard".split()
)
_EDITABLE = "__editable__"


@dataclass(frozen=True, slots=True)
class InstalledPackages:
    """What was found.

    Attributes:
        versions: Name of each distribution, as it calls itself, -> its version.
        imported: Names of those of which anything was imported, sorted.
        modules: Top-level modules that were looked for.
    """

    versions: dict[str, str]
    imported: tuple[str, ...]
    modules: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        """All of them, a line each."""
        return "".join(f"{name}=={version}\n" for name, version in sorted(self.versions.items()))


@dataclass(frozen=True, slots=True)
class _Distribution:
    name: str
    version: str
    info: str


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found out in this process; its next run mostly has the same.

    Attributes:
        seen: What it depends on: the path, when each folder on it was changed, and what was
            imported from where.
    """

    seen: tuple[object, ...]
    packages: InstalledPackages


_known: _Known | None = None
# Info of a distribution -> modules that were looked for in its list of files, and those in it.
_listed: dict[str, tuple[frozenset[str], frozenset[str]]] = {}


def find_packages(before: InstalledPackages | None = None) -> InstalledPackages:
    """What is installed on the path of this interpreter, and what of it was imported.

    Meant for a background thread; takes some 10 ms, and lets others run in between. What a run
    before found out in this process is not looked for again. What is imported from a folder without
    distributions (a project's own, an editable one) counts where it is called as its distribution
    is.

    Args:
        before: What was found before: the same again where nothing else was imported since.
    """
    global _known
    modules = _list_imported()
    if before is not None and before.modules == modules.keys():
        return before
    seen = _describe_path(), tuple(sorted(modules.items(), key=itemgetter(0)))
    known = _known
    if known is not None and known.seen[0] != seen[0]:
        _listed.clear()
    if known is None or known.seen != seen:
        known = _known = _Known(seen, _find_packages(modules))
    return known.packages


def _describe_path() -> tuple[object, ...]:
    """The folders on the path, and when each was last given a distribution or lost one."""
    changed: list[object] = []
    for folder in list(sys.path)[:_MOST_PLACES]:
        try:
            changed.append((folder, os.stat(folder or ".").st_mtime_ns))
        except (OSError, ValueError):
            changed.append(folder)
    return tuple(changed)


def _find_packages(modules: Mapping[str, str | None]) -> InstalledPackages:
    found: dict[str, _Distribution] = {}
    folders: set[str] = set()
    for folder in list(sys.path)[:_MOST_PLACES]:
        for distribution in _list_distributions(folder):
            folders.add(folder)
            # What comes first on the path is what is imported.
            found.setdefault(_normalize(distribution.name), distribution)
            if len(found) >= _MOST_PACKAGES:
                break
    imported = {_normalize(name) for name in modules} & found.keys()
    missing = {
        name: place is None
        for name, place in modules.items()
        if _normalize(name) not in found and (place is None or place in folders)
    }
    for number, (key, distribution) in enumerate(found.items()):
        if not missing:
            break
        if number % _FOLDERS_AT_ONCE == _FOLDERS_AT_ONCE - 1:
            time.sleep(_PAUSE_S)
        if key not in imported and (brought := _list_brought(distribution, missing)):
            imported.add(key)
            for name in brought:
                if not missing[name]:
                    del missing[name]
    versions = {distribution.name: distribution.version for distribution in found.values()}
    names = tuple(sorted(found[key].name for key in imported))
    return InstalledPackages(versions, names, frozenset(modules))


def _list_distributions(folder: str) -> Iterator[_Distribution]:
    try:
        with os.scandir(folder or ".") as entries:
            for entry in entries:
                match = _INFO.fullmatch(entry.name)
                if match is not None:
                    # Folders have underscores where names have hyphens.
                    name = match["name"].replace("_", "-")
                    yield _Distribution(name, match["version"], entry.path)
    except OSError:
        return


def _list_imported() -> dict[str, str | None]:
    """Names of imported modules, at the top -> the folder in which the module lies.

    None where it has no file, as a namespace that several distributions may share. Those of the
    standard library are left out.
    """
    library = os.path.dirname(os.__file__)
    names = {name.partition(".")[0] for name in list(sys.modules)}
    found: dict[str, str | None] = {}
    for name in names - sys.stdlib_module_names - _IDLE_MODULES - {""}:
        try:
            values = object.__getattribute__(sys.modules.get(name), "__dict__")
            file = values.get("__file__")
        except Exception:  # noqa: BLE001 - a module may be of any type
            file = None
        place = None
        if type(file) is str:
            place, base = os.path.split(file)
            if base.startswith("__init__."):
                place = os.path.dirname(place)
        if place != library and not name.startswith(_EDITABLE):
            found[name] = place
    return found


def _list_brought(distribution: _Distribution, modules: Mapping[str, bool]) -> list[str]:
    """Which of some modules a distribution brings, at the top."""
    asked, brought = _listed.get(distribution.info, (frozenset(), frozenset()))
    new = modules.keys() - asked
    if new:
        asked, brought = asked | new, brought | _find_listed(distribution, new)
        _listed[distribution.info] = asked, brought
    return [name for name in modules if name in brought]


def _find_listed(distribution: _Distribution, modules: Set[str]) -> Set[str]:
    """Those of some modules that are in a distribution's list of its files, at the top."""
    listed = _read(os.path.join(distribution.info, "top_level.txt"))
    if listed is not None:
        return modules & {line.strip() for line in listed.splitlines()}
    names = "|".join(re.escape(name) for name in modules).encode("utf-8", "replace")
    pattern = re.compile(rb"^(" + names + rb")[/.]", re.MULTILINE)
    found: set[bytes] = set()
    try:
        with open(os.path.join(distribution.info, "RECORD"), "rb", buffering=0) as file:
            # A list of a hundred thousand files is none to have in memory.
            end = b""
            while block := file.read(_BLOCK_BYTES):
                lines, _, end = (end + block).rpartition(b"\n")
                found.update(pattern.findall(lines))
                if len(end) > _BLOCK_BYTES:
                    break
            found.update(pattern.findall(end))
    except OSError:
        return set()
    return {name for name in modules if name.encode("utf-8", "replace") in found}


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_LIST_BYTES)
    except OSError:
        return None


def _normalize(name: str) -> str:
    return _LETTERS.sub("-", name).lower()
