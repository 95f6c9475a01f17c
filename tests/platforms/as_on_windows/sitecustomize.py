"""Hides from Quark's modules what Windows has not; the standard library of Linux keeps it.

Loaded by each interpreter that starts with this folder on its path, helper processes too. What is
hidden stands in `missing.json`, which the test takes from the stubs of the standard library.
"""

import builtins
import json
import sys
import types
from pathlib import Path

_HIDDEN = json.loads(Path(__file__).with_name("missing.json").read_text("utf-8"))
_import = builtins.__import__
_views = {}


def _view(module, hidden):
    """A module of the standard library without some of its names."""

    class View(types.ModuleType):
        def __getattribute__(self, name):
            if name in hidden:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return set() if name == "supports_dir_fd" else getattr(module, name)

        def __setattr__(self, name, value):
            setattr(module, name, value)

    return View(module.__name__)


def _import_as_on_windows(name, names=None, local=None, fromlist=(), level=0):
    who = (names or {}).get("__name__", "")
    if who == "__main__":
        who = getattr((names or {}).get("__spec__"), "name", "")
    if level or who.partition(".")[0] not in ("quark", "quark_core", "quark_backends"):
        return _import(name, names, local, fromlist, level)
    if name in _HIDDEN["modules"]:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = _import(name, names, local, fromlist, level)
    hidden = _HIDDEN["names"].get(module.__name__)
    if hidden is None:
        return module
    if module.__name__ not in _views:
        _views[module.__name__] = _view(module, frozenset(hidden))
    return _views[module.__name__]


builtins.__import__ = _import_as_on_windows
sys.modules["as_on_windows"] = types.ModuleType("as_on_windows")
