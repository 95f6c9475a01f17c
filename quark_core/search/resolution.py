"""Looks up the names of a search among those that the searched runs have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from quark_core.errors import SchemaValidationError
from quark_core.names import decode_name, encode_name
from quark_core.search.expression import Field, Place, RunSearch, Scope, map_fields
from quark_core.search.mistakes import point_at, suggest_names
from quark_core.search.run_fields import RUN_FIELDS

__all__ = ["Vocabulary", "resolve_names", "spell_name"]

_LISTED = 6


class Vocabulary(Protocol):
    """The names that the runs of a search have, as their store has them."""

    def has_runs(self) -> bool:
        """Whether there is any run to search."""

    def has(self, scope: Scope, name: str) -> bool:
        """Whether a run has a metric of this stored key, or this key in its configuration."""

    def list_names(self, scope: Scope) -> Iterable[str]:
        """All of them, for suggestions."""


def resolve_names(search: RunSearch, vocabulary: Vocabulary) -> RunSearch | None:
    """The search with every metric under its stored key; None where there are no runs.

    Raises:
        SchemaValidationError: A metric or a configuration key that no run has.
    """
    if not vocabulary.has_runs():
        return None
    known: dict[Field, Field] = {}

    def resolve(field: Field) -> Field:
        if field not in known:
            known[field] = _resolve(field, vocabulary)
        return known[field]

    return replace(
        search,
        where=None if search.where is None else map_fields(search.where, resolve),
        order_by=tuple(replace(order, field=resolve(order.field)) for order in search.order_by),
    )


def spell_name(field: Field) -> tuple[str, ...]:
    """The names under which a store may have a field, the likeliest first."""
    if field.scope != "metric":
        return (field.name,)
    encoded = encode_name(field.name)
    # As readers do: a name that decodes to something else is itself a stored form.
    if decode_name(field.name) != field.name:
        return field.name, encoded
    return encoded, field.name


def _resolve(field: Field, vocabulary: Vocabulary) -> Field:
    if field.scope == "run":
        return field
    for name in spell_name(field):
        if vocabulary.has(field.scope, name):
            return replace(field, name=name)
    raise _unknown_name(field, vocabulary)


def _unknown_name(field: Field, vocabulary: Vocabulary) -> SchemaValidationError:
    settings = [f"config.{key}" for key in vocabulary.list_names("config")]
    if field.scope == "config":
        what, wanted, own = "has this in its configuration", f"config.{field.name}", settings
        names = settings
    else:
        what, wanted, own = "has this metric", field.name, sorted(vocabulary.list_names("metric"))
        names = [*own, *settings, *RUN_FIELDS]
    near = suggest_names(wanted, names)
    if near:
        hint = f"the nearest names are {', '.join(near)}"
    elif own:
        more = ", …" if len(own) > _LISTED else ""
        hint = f"there is {', '.join(own[:_LISTED])}{more}"
    else:
        hint = "no run has any" if field.scope == "metric" else "no run has a configuration"
    place = field.place or Place("where", wanted, 1, len(wanted))
    return point_at(place, f"no run here {what}: {wanted}; {hint}")
