"""Types that plugins have told how to fingerprint, found by name when a value of one comes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from quark_core.backends.registry import default_registry

_log = logging.getLogger("quark")
_known: dict[str, Callable[[Any], object]] | None = None


def find_reducer(value: object) -> tuple[str, Callable[[Any], object]] | None:
    """Name of a value's registered type and what takes it apart, or None."""
    reducers = _load()
    if reducers:
        for kind in type(value).__mro__:
            name = f"{kind.__module__}.{kind.__qualname__}"
            found = reducers.get(name)
            if found is not None:
                return name, found
    return None


def _load() -> Mapping[str, Callable[[Any], object]]:
    global _known
    if _known is None:
        found: dict[str, Callable[[Any], object]] = {}
        for plugin, declared in default_registry().collect("quark_register_fingerprints"):
            if not isinstance(declared, Mapping):
                _log.warning("plugin %s: fingerprints must come as a mapping of type names", plugin)
                continue
            for name, reducer in declared.items():
                if isinstance(name, str) and callable(reducer):
                    found.setdefault(name, reducer)
                else:
                    _log.warning("plugin %s: no fingerprints of %.80r", plugin, name)
        _known = found
    return _known
