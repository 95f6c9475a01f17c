"""Which distributions are installed, and which of them this program has imported.

Their folders' names say what they are: no metadata is parsed, which would take a second.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

__all__ = ["InstalledPackages", "find_packages"]

_INFO = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+?)-(?P<version>[0-9][^-]*)(?:-[^/]*)?\.(?:dist|egg)-info"
)
_LETTERS = re.compile(r"[-_.]+")
_MOST_PLACES = 200
_MOST_PACKAGES = 5000
_MOST_LIST_BYTES = 8 * 1024 * 1024
# After so many folders others may run.
_FOLDERS_AT_ONCE = 20
_PAUSE_S = 0.0005


@dataclass(frozen=True, slots=True)
class InstalledPackages:
    """What was found.

    Attributes:
        versions: Name of each distribution, as it calls itself, -> its version.
        imported: Names of those of which anything was imported, sorted.
    """

    versions: dict[str, str]
    imported: tuple[str, ...]

    @property
    def text(self) -> str:
        """All of them, a line each."""
        return "".join(f"{name}=={version}\n" for name, version in sorted(self.versions.items()))


@dataclass(frozen=True, slots=True)
class _Distribution:
    name: str
    version: str
    info: str


def find_packages(is_ending: Callable[[], bool] = lambda: False) -> InstalledPackages:
    """What is installed on the path of this interpreter, and what of it was imported.

    Meant for a background thread; takes some 10 ms, and lets others run in between.

    Args:
        is_ending: Whether somebody waits for this: then it makes no pauses.
    """
    found: dict[str, _Distribution] = {}
    for folder in list(sys.path)[:_MOST_PLACES]:
        for distribution in _list_distributions(folder):
            # What comes first on the path is what is imported.
            found.setdefault(_normalize(distribution.name), distribution)
            if len(found) >= _MOST_PACKAGES:
                break
    modules = {name.partition(".")[0] for name in list(sys.modules)}
    modules = {name for name in modules if name and name not in sys.stdlib_module_names}
    imported = {_normalize(name) for name in modules} & found.keys()
    missing = {name for name in modules if _normalize(name) not in found}
    for number, (key, distribution) in enumerate(found.items()):
        if not missing:
            break
        if number % _FOLDERS_AT_ONCE == _FOLDERS_AT_ONCE - 1 and not is_ending():
            time.sleep(_PAUSE_S)
        if key not in imported and any(name in missing for name in _list_tops(distribution)):
            imported.add(key)
    versions = {distribution.name: distribution.version for distribution in found.values()}
    return InstalledPackages(versions, tuple(sorted(found[key].name for key in imported)))


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


def _list_tops(distribution: _Distribution) -> Iterable[str]:
    """Names of the modules that a distribution brings, at the top."""
    text = _read(os.path.join(distribution.info, "top_level.txt"))
    if text is not None:
        return {line.strip() for line in text.splitlines() if line.strip()}
    text = _read(os.path.join(distribution.info, "RECORD"))
    if text is None:
        return ()
    tops = set()
    for line in text.splitlines():
        top = line.partition(",")[0].partition("/")[0]
        tops.add(top.partition(".")[0])
    return tops


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_LIST_BYTES)
    except OSError:
        return None


def _normalize(name: str) -> str:
    return _LETTERS.sub("-", name).lower()
