"""Quark: records training runs, and explains what goes wrong in them.

from quark import MetricsLogger, TrainingSession

`__init__.pyi` lists the names. Each is imported when it is first used, so that `import quark` is
cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_STUB = __loader__.get_data(f"{__path__[0]}/__init__.pyi").decode()
_IMPORTS = [line.replace("(", "").split() for line in _STUB.split("\nfrom quark")[1:]]
_HOMES = {name: f"quark{home}" for home, _, name, *_ in _IMPORTS}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        value = _find_record_type(name)
        if value is None:
            habits = import_module("quark_core.config.migration_hints")
            raise habits.explain_attribute(import_module("quark"), name, "module", "module 'quark'")
    else:
        if home.endswith(".tracker_backend"):
            # A mirror that stands alone begins its run with it.
            import_module("quark.tracker.tracker")
        value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _find_record_type(name: str) -> Any:
    """A type of record that has been added; None where there is none of this name."""
    if not name.endswith("Record"):
        return None
    from quark_core.records import RECORD_TYPES

    return next((each for each in RECORD_TYPES.values() if each.__name__ == name), None)
