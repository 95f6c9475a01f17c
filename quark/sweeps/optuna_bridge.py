"""The way to Optuna, which is imported when a sweep needs it and not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quark_core.errors import SchemaValidationError

if TYPE_CHECKING:
    from quark.sweeps.definition import Search, SweepDefinition
    from quark_core.backends.coordination import SupportsCoordination


def open_optuna_search(
    definition: SweepDefinition, sweep_id: str, store: SupportsCoordination, given: object = None
) -> Search:
    """A search by Optuna: `tpe`, `hyperband`, `cmaes`, one that a plugin names, or objects.

    Args:
        definition: What the sweep was opened with.
        sweep_id: The sweep.
        store: Its store, whose log `<sweep_id>/optuna` Optuna's journal is kept in.
        given: Optuna's sampler, pruner, or both as a pair, as this process was given them; None
            where it was given a name, or has joined.

    Raises:
        SchemaValidationError: Optuna is not installed, there is no such search, it was opened
            with objects and this process has none, or it cannot do what the sweep asks for.
    """
    _import_optuna(given if given is not None else str(definition.search))
    from quark.sweeps.optuna_samplers import choose_methods
    from quark.sweeps.optuna_search import OptunaSearch

    return OptunaSearch(definition, sweep_id, store, choose_methods(definition, given))


def describe_optuna_search(given: object) -> str:
    """What a definition says of Optuna's objects: their types, such as `optuna:GPSampler`.

    Raises:
        SchemaValidationError: They are no sampler, pruner or pair of both, or such that keep
            pickles in the store.
    """
    _import_optuna(given)
    from quark.sweeps.optuna_samplers import describe_objects

    return describe_objects(given)


def _import_optuna(wanted: object) -> None:
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        what = repr(wanted[:60]) if isinstance(wanted, str) else type(wanted).__name__
        raise SchemaValidationError(
            f'search={what} needs Optuna, which is not installed: pip install "quark-tracker'
            f'[sweep]"; "grid", "random", "halving" and "asha" need nothing ({error})'
        ) from None
