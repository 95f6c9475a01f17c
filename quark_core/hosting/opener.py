"""How another process finds the function that opens a backend."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

from quark_core.backends.contract import BackendDefinition
from quark_core.errors import BackendContractError

_MAIN = "__main__"
_HELP = (
    "its `open` is not a function of a module that another process can import, so that it "
    "cannot have a process of its own: write it as one, or declare the backend with "
    "own_process=False; it then works in the training process, and can end it"
)


def describe_opener(definition: BackendDefinition) -> tuple[str, str] | None:
    """Where another process finds a backend; None where it cannot.

    Returns:
        Its function as `module:name` and "", or "" and the plugin that
        declares it as `module:object`.
    """
    opener = definition.open
    module = str(getattr(opener, "__module__", ""))
    name = str(getattr(opener, "__qualname__", ""))
    if module != _MAIN and getattr(sys.modules.get(module), name, None) is opener:
        return f"{module}:{name}", ""
    if definition.plugin is not None and definition.plugin.partition(":")[0] != _MAIN:
        return "", definition.plugin
    return None


def refuse_hidden(definition: BackendDefinition) -> None:
    """Refuse a backend that is to have a process of its own, and that no other process finds.

    Raises:
        BackendContractError: It is such a one.
    """
    if definition.own_process and describe_opener(definition) is None:
        raise BackendContractError(f"backend {definition.name!r}: {_HELP}", backend=definition.name)


def load_definition(definition: BackendDefinition, opener: str, plugin: str) -> BackendDefinition:
    """In the other process: the definition with the function that opens it.

    Args:
        definition: It, with any function.
        opener: What `describe_opener` returned.
        plugin: Likewise.

    Raises:
        BackendContractError: The plugin does not declare it here.
    """
    if opener:
        module, _, name = opener.partition(":")
        return replace(definition, open=getattr(importlib.import_module(module), name))
    from importlib.metadata import EntryPoint

    from quark_core.backends.registry import BackendRegistry
    from quark_core.hookspecs import ENTRY_POINT_GROUP

    point = EntryPoint(definition.name, plugin, ENTRY_POINT_GROUP)
    registry = BackendRegistry.discover([point])
    return replace(definition, open=registry.find(definition.name).open)
