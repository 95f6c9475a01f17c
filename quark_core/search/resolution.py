"""Looks up the names of a search among those that the searched runs have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from quark_core.errors import SchemaValidationError
from quark_core.names import decode_name, encode_name
from quark_core.search.expression import (
    Field,
    Place,
    RunSearch,
    Scope,
    find_fields,
    map_fields,
)
from quark_core.search.mistakes import point_at, suggest_names
from quark_core.search.run_fields import ALIASES, RUN_FIELDS

__all__ = ["Vocabulary", "resolve_names", "spell_name", "write_name"]

_LISTED = 6
# As the grammar has them.
_BARE = re.compile(r"[^\W\d][\w./@:#%$~^+-]*")
_BARE_LEVEL = re.compile(r"[\w/@:#%$~^+-]+")
_WORDS = frozenset(("and", "or", "not", "in", "true", "false", "null", "none", "inf", "nan"))


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
        SchemaValidationError: A metric or a configuration key that no run has,
            or a metric that is compared with what is no number.
    """
    if not vocabulary.has_runs():
        if search.where is not None:
            for field in find_fields(search.where):
                _check_use(field)
        return None
    known: dict[Field, Field] = {}

    def resolve(field: Field) -> Field:
        if field not in known:
            known[field] = _resolve(field, vocabulary)
        _check_use(field)
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


def write_name(scope: Scope, name: str) -> str:
    """How a stored name is written in a search, in backticks where it must be."""
    if scope == "config":
        return _write_key(name)
    if scope == "run":
        return name
    decoded = decode_name(name)
    if encode_name(decoded) == name and _can_be_quoted(decoded):
        name = decoded
    if name in RUN_FIELDS or name in ALIASES:
        return f"metric.{name}"
    if (
        _BARE.fullmatch(name)
        and name.lower() not in _WORDS
        and not name.startswith(("config.", "metric.", "run."))
    ):
        return name
    return f"`{name}`"


def _write_key(key: str) -> str:
    levels = key.split(".")
    if not _can_be_quoted(key) or all(map(_BARE_LEVEL.fullmatch, levels)):
        return f"config.{key}"
    if not all(levels):
        return f"config.`{key}`"
    written = (each if _BARE_LEVEL.fullmatch(each) else f"`{each}`" for each in levels)
    return f"config.{'.'.join(written)}"


def _can_be_quoted(name: str) -> bool:
    return "`" not in name and name.isprintable()


def _check_use(field: Field) -> None:
    wrong = field.mismatch
    if wrong is not None:
        hint = _suggest_tags(field)
        raise point_at(wrong.place, f"{wrong.message}; {hint}" if hint else wrong.message)


def _suggest_tags(field: Field) -> str:
    text = None if field.mismatch is None else field.mismatch.text
    if text is None or field.name.lower() not in ("tag", "tags"):
        return ""
    return f"did you mean {text} in tags?"


def _resolve(field: Field, vocabulary: Vocabulary) -> Field:
    if field.scope == "run":
        return field
    for name in spell_name(field):
        if vocabulary.has(field.scope, name):
            return replace(field, name=name)
    raise _unknown_name(field, vocabulary)


def _unknown_name(field: Field, vocabulary: Vocabulary) -> SchemaValidationError:
    wanted = write_name(field.scope, field.name) if field.scope == "config" else field.name
    place = field.place or Place("where", wanted, 1, len(wanted))
    keys = sorted(vocabulary.list_names("config"))
    # What people compare with the name they wrote -> how it is written.
    names = {f"config.{key}": _write_key(key) for key in keys}
    if field.scope == "config":
        inside = [_write_key(key) for key in keys if key.startswith(f"{field.name}.")]
        if inside:
            message = f"{wanted} is a group and no value; in it there is {_list(inside)}"
            return point_at(place, message)
        what, own = "has this in its configuration", list(names.values())
        near = suggest_names(f"config.{field.name}", names)
    else:
        what = "has this metric"
        metrics = {
            decode_name(key): write_name("metric", key)
            for key in sorted(vocabulary.list_names("metric"))
        }
        own = list(metrics.values())
        names = {**dict(zip(RUN_FIELDS, RUN_FIELDS, strict=True)), **names, **metrics}
        near = suggest_names(field.name, [*metrics, *names])
    if hint := _suggest_tags(field):
        pass
    elif near:
        hint = f"the nearest names are {', '.join(names[name] for name in near)}"
    elif own:
        hint = f"there is {_list(own)}"
    else:
        hint = "no run has any" if field.scope == "metric" else "no run has a configuration"
    return point_at(place, f"no run here {what}: {wanted}; {hint}")


def _list(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "")
