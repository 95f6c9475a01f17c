"""Methods of a session whose work is done by a feature's plugin, such as fingerprints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from quark_core.backends.registry import default_registry
from quark_core.errors import QuarkError

# Method -> the function that does its work, once it was called.
_found: dict[str, Callable[..., Any]] = {}


def find_method(method: str, feature: str) -> Callable[..., Any]:
    """The function that does the work of a session's method; it gets the session first.

    Args:
        method: The method, as a plugin declares it by `quark_register_session_methods`.
        feature: The plugin of Quark that declares it, for the error.

    Raises:
        QuarkError: No plugin declares it.
    """
    known = _found.get(method)
    if known is not None:
        return known
    for _, declared in default_registry().collect("quark_register_session_methods"):
        place = declared.get(method) if isinstance(declared, Mapping) else None
        if isinstance(place, str):
            module, _, name = place.partition(":")
            function: Callable[..., Any] = getattr(import_module(module), name)
            _found[method] = function
            return function
    raise QuarkError(
        f"{method}: the feature {feature!r} of Quark is not installed here, or its plugin was left "
        "out with a warning; install quark-tracker again to have it"
    )
