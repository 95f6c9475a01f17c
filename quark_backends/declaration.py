"""Declaration of the backends that come with Quark, with lazy imports.

A declaration must be cheap, so all that it leads to is imported when it is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from quark_core.api import Backend, BackendConfig, BackendDefinition, importing
from quark_core.hookspecs import hookimpl


def declare(definition: BackendDefinition) -> Callable[[], list[BackendDefinition]]:
    """The hook `quark_register_backends` of a plugin that declares one backend."""

    @hookimpl
    def quark_register_backends() -> list[BackendDefinition]:
        return [definition]

    return quark_register_backends


def load_late(target: str) -> Callable[..., Any]:
    """What imports `module:name` when it is called, and calls that; it can be pickled."""
    return partial(_call, target)


def _call(target: str, *arguments: Any, **keywords: Any) -> Any:
    return _load(target)(*arguments, **keywords)


def open_late(plugin: str, target: str) -> Callable[[BackendConfig], Backend]:
    """As `load_late`, of a backend, which threads of ours open: forks wait for the import.

    Args:
        plugin: The module that keeps the result as `_open`, where other processes find it.
        target: Class of the backend, as `module:name`.
    """

    def _open(config: BackendConfig) -> Backend:
        with importing():
            found = _load(target)
        return found(config)  # type: ignore[no-any-return]

    _open.__module__, _open.__qualname__ = plugin, "_open"
    return _open


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
