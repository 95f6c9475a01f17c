"""Which search a name stands for; whatever is not ours is Optuna's, or a third party's."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quark.sweeps.asha import AshaSearch
from quark.sweeps.definition import SearchChoice, SweepDefinition, parse_search
from quark.sweeps.grid import GridSearch
from quark.sweeps.halving import HalvingSearch
from quark.sweeps.random_search import RandomSearch
from quark.sweeps.search import Search
from quark.sweeps.search_options import read_options
from quark_core.backends.coordination import SupportsCoordination
from quark_core.errors import SchemaValidationError

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
        return import_module("quark.sweeps.optuna_bridge")
    except ImportError as error:
        raise SchemaValidationError(
            f"search: own ones are {', '.join(OWN_SEARCHES)}; all others come from Optuna, which "
            f"is not installed: pip install 'quark-tracker[sweep]' ({error})"
        ) from None
