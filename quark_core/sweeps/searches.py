"""Which search a name stands for; whatever is not ours is Optuna's, or a third party's."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quark_core.backends.coordination import SupportsCoordination
from quark_core.errors import SchemaValidationError
from quark_core.sweeps.asha import AshaSearch
from quark_core.sweeps.definition import SearchChoice, SweepDefinition, parse_search
from quark_core.sweeps.grid import GridSearch
from quark_core.sweeps.halving import HalvingSearch
from quark_core.sweeps.random_search import RandomSearch
from quark_core.sweeps.search import Search
from quark_core.sweeps.search_options import read_options

__all__ = ["OWN_SEARCHES", "choose_search", "open_search"]

OWN_SEARCHES = ("random", "grid", "halving", "asha")
"""Searches that need nothing but Quark."""


def choose_search(given: object) -> SearchChoice:
    """The search that an argument asks for, as a definition has it.

    Args:
        given: A text, or what Optuna has for it.

    Raises:
        SchemaValidationError: No such search.
    """
    if isinstance(given, str):
        return parse_search(given)
    return parse_search(_load_bridge().describe_optuna_search(given))


def open_search(
    definition: SweepDefinition,
    sweep_id: str,
    store: SupportsCoordination,
    given: object = None,
) -> Search:
    """The search of a sweep, for one worker.

    Args:
        definition: What the sweep is.
        sweep_id: Its id.
        store: Where its trials and logs are.
        given: The object that stands for the search, where the user gave one.

    Raises:
        SchemaValidationError: No such search, or one that the definition does not fit.
    """
    name = definition.search.name
    if name == "halving":
        return HalvingSearch(definition)
    if name == "asha":
        return AshaSearch(definition, sweep_id, store)
    if name in ("random", "grid"):
        read_options(definition.search, {})
        return RandomSearch(definition) if name == "random" else GridSearch(definition)
    search: Search = _load_bridge().open_optuna_search(definition, sweep_id, store, given)
    return search


def _load_bridge() -> Any:
    try:
        return import_module("quark_core.sweeps.optuna_bridge")
    except ImportError as error:
        raise SchemaValidationError(
            f"search: own ones are {', '.join(OWN_SEARCHES)}; all others come from Optuna, which "
            f"is not installed: pip install 'quark-tracker[sweep]' ({error})"
        ) from None
