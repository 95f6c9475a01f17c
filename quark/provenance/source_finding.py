"""Which files a program is made of, as far as the interpreter can say; nothing is walked."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CELLS_PATH = "notebook-cells.py"
"""Under which the executed cells of a notebook are kept, as one document."""
COMMAND_PATH = "command-line.py"
"""Under which the code that follows `python -c` is kept."""

_PYTHON_SUFFIXES = (".py", ".pyw")
_ENVIRONMENT_PARTS = ("site-packages", "dist-packages", "node_modules", "__pypackages__")
_OWN_PACKAGES = frozenset({"quark", "quark_backends", "quark_core", "quark_torch"})
# A checkout that is worked in is the project's folder too; what it trains is not made of it.
_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_OWN_PREFIXES = tuple(os.path.join(_OWN_FOLDER, name, "") for name in sorted(_OWN_PACKAGES))
# What lies about in sys.modules and has no file of the project's.
_MOST_OUTSIDE = 50
_MOST_FILES = 20_000
_MOST_LEVELS = 100
# Options of Python whose value may be the next argument.
_VALUED_LETTERS = "WX"
_VALUED_OPTIONS = ("--check-hash-based-pycs",)


@dataclass(frozen=True, slots=True)
class SourceRoot:
    """Where a project's sources lie.

    Attributes:
        path: The folder.
        prefixes: What the paths of its files begin with, links followed and not.
        main: The main script, or None where there is none.
        entry: How the program was begun: script, module, notebook, command, stdin, interactive,
            frozen or other.
    """

    path: str
    prefixes: tuple[str, ...]
    main: str | None
    entry: str


@dataclass(slots=True)
class SourceSurvey:
    """What was found at one look.

    Attributes:
        files: Path relative to the root, with slashes -> where the file lies.
        texts: The same -> the text of what has no file: a notebook's cells.
        left_out: The same, or what else names it -> why it is not kept.
        outside: Top-level packages that come neither from the root nor from an environment.
    """

    files: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    outside: tuple[str, ...] = ()


def find_root(working_directory: str) -> SourceRoot:
    """Where the project lies: its git tree, or pyproject.toml, or the script's folder.

    Looks at the folders above the main script alone, which takes tens of microseconds. Where the
    script is one of an environment (a console script, a launcher), above the working directory.
    """
    script, entry = _find_main()
    folder = os.path.dirname(script) if script is not None else working_directory
    top = _find_top(folder) or folder or working_directory
    prefixes = {_with_separator(top)}
    # There may be a loop of links, or the folder be gone.
    with contextlib.suppress(OSError, ValueError):
        prefixes.add(_with_separator(os.path.realpath(top)))
    return SourceRoot(top, tuple(sorted(prefixes)), script, entry)


def survey_sources(root: SourceRoot) -> SourceSurvey:
    """The modules that lie under the root and in no environment, the main script, the cells.

    Looks at what was imported and at no folder, so that it does not matter how much lies there.
    Runs none of the modules' own code: a module may be anything that somebody put there.
    """
    survey = SourceSurvey()
    if root.entry == "frozen":
        survey.left_out["<frozen>"] = "the program is frozen: its sources are not there"
        return survey
    environment = _list_environment_prefixes(root)
    outside: set[str] = set()
    if root.main is not None:
        _add(survey, root, root.main, ())
    for name, module in list(sys.modules.items()):
        if len(survey.files) >= _MOST_FILES:
            survey.left_out["<more>"] = f"more than {_MOST_FILES} modules"
            break
        path = _find_file(module)
        if path is None or path.startswith(_OWN_PREFIXES):
            continue
        if _add(survey, root, path, environment):
            continue
        if len(outside) < _MOST_OUTSIDE and not _is_environment(path, environment):
            outside.add(name.partition(".")[0])
    survey.outside = tuple(sorted(outside - _OWN_PACKAGES - {"__main__", "__mp_main__"}))
    _add_entry(survey, root)
    return survey


def _find_main() -> tuple[str | None, str]:
    if getattr(sys, "frozen", False):
        return None, "frozen"
    if _find_shell() is not None:
        return None, "notebook"
    path = _find_file(sys.modules.get("__main__"))
    if path is None:
        arguments = sys.orig_argv
        if _find_command(arguments) is not None:
            return None, "command"
        if getattr(sys, "ps1", None) is not None:
            return None, "interactive"
        return None, "stdin" if arguments[1:2] in ([], ["-"]) else "other"
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    entry = "script" if spec is None else "module"
    if any(f"{os.sep}{part}{os.sep}" in path for part in _ENVIRONMENT_PARTS) or _is_executable_of(
        path
    ):
        return None, entry
    return path, entry


def _find_command(arguments: Sequence[str]) -> str | None:
    """The code behind `-c`, as Python itself reads its arguments; None where there is none."""
    rest = iter(arguments[1:])
    for argument in rest:
        if not argument.startswith("-") or argument == "-":
            return None
        if argument.startswith("--"):
            if argument in _VALUED_OPTIONS:
                next(rest, None)
            continue
        for place, letter in enumerate(argument[1:], 2):
            value = argument[place:]
            if letter == "c":
                return value or next(rest, None)
            if letter == "m":
                return None
            if letter in _VALUED_LETTERS:
                if not value:
                    next(rest, None)
                break
    return None


def _is_executable_of(path: str) -> bool:
    """Whether a script is one that an environment made, such as `torchrun`."""
    return os.path.dirname(path) == os.path.dirname(sys.executable)


def _find_shell() -> Any | None:
    """The IPython that runs this, or None; what is not imported is not asked."""
    ipython = sys.modules.get("IPython")
    try:
        return None if ipython is None else ipython.get_ipython()
    except Exception:  # noqa: BLE001 - anything may be called IPython
        return None


def _find_top(folder: str) -> str | None:
    """The folder above with a git tree, else the nearest one with a pyproject.toml."""
    project: str | None = None
    place = os.path.abspath(folder)
    home = os.path.expanduser("~")
    for _ in range(_MOST_LEVELS):
        # A home or a whole disk under git is no project: its dot files are kept so.
        if place == home or place == os.path.dirname(place):
            break
        if os.path.exists(os.path.join(place, ".git")):
            return place
        if project is None and os.path.isfile(os.path.join(place, "pyproject.toml")):
            project = place
        place = os.path.dirname(place)
    return project


def _find_file(module: object) -> str | None:
    """Where a module says that it comes from; without running anything of its own."""
    try:
        names: Any = object.__getattribute__(module, "__dict__")
        path = names.get("__file__") if isinstance(names, Mapping) else None
    except Exception:  # noqa: BLE001 - a module may be of any type
        return None
    # What is read from a pipe calls its file `<stdin>`.
    if type(path) is not str or not path or "\0" in path or path.startswith("<"):
        return None
    return path if os.path.isabs(path) else os.path.abspath(path)


def _add(survey: SourceSurvey, root: SourceRoot, path: str, environment: tuple[str, ...]) -> bool:
    """Take a file up where it is one of the project's; whether it is."""
    prefix = next((prefix for prefix in root.prefixes if path.startswith(prefix)), None)
    if prefix is None or _is_environment(path, environment):
        return False
    relative = os.path.normpath(path[len(prefix) :]).replace(os.sep, "/")
    if relative.startswith("../") or relative in survey.files:
        return relative in survey.files
    if not path.endswith(_PYTHON_SUFFIXES) and path != root.main:
        survey.left_out[relative] = "it is no Python source"
    else:
        survey.files[relative] = path
    return True


def _add_entry(survey: SourceSurvey, root: SourceRoot) -> None:
    if root.entry == "notebook":
        cells = _read_cells()
        if cells:
            survey.texts[CELLS_PATH] = cells
    elif root.entry == "command":
        survey.texts[COMMAND_PATH] = _find_command(sys.orig_argv) or ""
    elif root.entry in ("stdin", "interactive", "other"):
        survey.left_out[f"<{root.entry}>"] = "code that lies in no file"


def _read_cells() -> str:
    """The cells that were executed, without what they have printed."""
    shell = _find_shell()
    cells = getattr(getattr(shell, "history_manager", None), "input_hist_parsed", None)
    if not isinstance(cells, list):
        return ""
    # The first is none, since cells are counted from 1.
    told = [
        f"# In[{number}]:\n{text.rstrip()}\n"
        for number, text in enumerate(cells)
        if number and isinstance(text, str) and text.strip()
    ]
    return "\n".join(told)


def _list_environment_prefixes(root: SourceRoot) -> tuple[str, ...]:
    """Folders within the project that are none of its own, and the standard library."""
    found = {os.path.dirname(os.__file__), sysconfig.get_path("stdlib")}
    for place in (sys.prefix, sys.exec_prefix):
        # A project may well lie in a prefix, such as /usr/src/app in /usr.
        if any(_with_separator(place).startswith(prefix) for prefix in root.prefixes) and (
            _with_separator(place) not in root.prefixes
        ):
            found.add(place)
    return tuple(_with_separator(place) for place in sorted(found) if place)


def _is_environment(path: str, prefixes: tuple[str, ...]) -> bool:
    return path.startswith(prefixes) or any(
        f"{os.sep}{part}{os.sep}" in path for part in _ENVIRONMENT_PARTS
    )


def _with_separator(path: str) -> str:
    return path if path.endswith(os.sep) else path + os.sep
