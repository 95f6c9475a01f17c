"""Methods of the contract of backends, as its annotations declare them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, get_type_hints

from quark_core.backends.registry import PROTOCOLS

CHANGING_METHODS = frozenset(
    {
        *("edit_run", "request_stop", "update_project", "update_group"),
        *("open_sweep", "update_sweep", "add_trials", "claim_trial", "settle_trial"),
        *("append_entries", "compare_and_set", "compare_and_set_group"),
        *("trash_runs", "restore_runs", "collect_trash", "write_generation"),
    }
)
"""Methods that change a store, apart from those that take batches and payloads."""

# Modules of the types that the contract imports for type checkers alone, since training does not
# wait for numpy; and the names of some types that these again import so.
_TYPE_MODULES = (
    "quark_core.backends.contract",
    "quark_core.backends.curves",
    "quark_core.backends.grids",
    "quark_core.backends.run_pages",
    "quark_core.backends.run_summary",
    "quark_core.backends.series",
    "quark_core.records",
    "quark_core.records.columns",
    "quark_core.records.query",
)
_LATE_NAMES = ("Columns", "NDArray")


def list_methods(protocol: type) -> Iterator[Callable[..., Any]]:
    """The methods that a protocol of the contract declares itself."""
    for name, found in vars(protocol).items():
        if inspect.isfunction(found) and not name.startswith("_"):
            yield found


def find_method(name: str) -> Callable[..., Any]:
    """The method of this name, as the contract declares it.

    Raises:
        KeyError: There is none.
    """
    return _find_all()[name]


@cache
def _find_all() -> dict[str, Callable[..., Any]]:
    return {each.__name__: each for kind in PROTOCOLS.values() for each in list_methods(kind)}


@cache
def read_signature(name: str) -> tuple[inspect.Signature, dict[str, Any]]:
    """The signature of a method without `self`, and the types of its arguments and `return`."""
    method = find_method(name)
    signature = inspect.signature(method)
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    hints = get_type_hints(method, {**_load_types(), **method.__globals__}, include_extras=True)
    return signature.replace(parameters=parameters), hints


@cache
def _load_types() -> dict[str, Any]:
    found: dict[str, Any] = dict(vars(importlib.import_module("numpy.typing")))
    modules = [importlib.import_module(name) for name in _TYPE_MODULES]
    for module in modules:
        found.update(vars(module))
    for module in modules:
        for name in _LATE_NAMES:
            vars(module).setdefault(name, found[name])
    return found
