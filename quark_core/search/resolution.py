"""The names in a search: the fields that runs have, and those of the runs that are searched.

Also the messages that point at what is wrong in an expression.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, Protocol

from quark_core.errors import SchemaValidationError
from quark_core.records.names import decode_name, encode_name
from quark_core.records.query import (
    Field,
    Place,
    RunSearch,
    Scope,
    find_fields,
    map_fields,
)

_WIDTH = 100
_CONTEXT = 60
_SUGGESTIONS = 3


def point_at(place: Place, message: str) -> SchemaValidationError:
    """The error for a mistake: what is wrong, the line, and a mark under the place.

    Args:
        place: Where the mistake is; its column may be one past the end.
        message: What is wrong and what to write instead.
    """
    start = place.text.rfind("\n", 0, place.column - 1) + 1
    end = place.text.find("\n", start)
    line = place.text[start:] if end < 0 else place.text[start:end]
    offset = place.column - 1 - start
    where = f"column {offset + 1}"
    if "\n" in place.text:
        number = place.text.count("\n", 0, start) + 1
        where = f"line {number}, {where}"
    line = "".join(" " if c.isspace() or not c.isprintable() else c for c in line)
    length = max(1, min(place.length, len(line) - offset))
    if len(line) > _WIDTH:
        first = max(0, offset - _CONTEXT)
        last = min(len(line), offset + _CONTEXT)
        head, tail = "… " if first else "", " …" if last < len(line) else ""
        line = f"{head}{line[first:last]}{tail}"
        offset += len(head) - first
        length = min(length, _CONTEXT)
    mark = " " * _measure(line[:offset]) + "^" * max(1, _measure(line[offset : offset + length]))
    return SchemaValidationError(f"{place.argument}, {where}: {message}\n  {line}\n  {mark}")


def suggest_names(name: str, known: Iterable[str]) -> list[str]:
    """The names nearest to one that does not exist, best first; none where none is near."""
    import difflib

    names = list(dict.fromkeys(known))
    folded: dict[str, str] = {}
    for candidate in names:
        folded.setdefault(candidate.lower(), candidate)
    near = difflib.get_close_matches(name.lower(), folded, _SUGGESTIONS, cutoff=0.6)
    found = [folded[candidate] for candidate in near]
    # `loss` is not near to `validation/loss` by its letters, but it is what people mean.
    tail = name.lower().rpartition("/")[2].rpartition(".")[2]
    tails = [candidate.lower().replace(".", "/").rpartition("/")[2] for candidate in names]
    near_tails = [tail, *difflib.get_close_matches(tail, set(tails), _SUGGESTIONS, cutoff=0.6)]
    for near_tail in near_tails:
        found += [name for name, each in zip(names, tails, strict=True) if each == near_tail]
    return list(dict.fromkeys(found))[:_SUGGESTIONS]


def _measure(text: str) -> int:
    """Columns of a terminal that a text takes."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


RunFieldType = Literal["text", "number", "time", "tags", "groups"]

RUN_FIELDS: dict[str, RunFieldType] = {
    "archived": "time",
    "attempt": "number",
    "code_digest": "text",
    "config_digest": "text",
    "created": "time",
    "duration": "number",
    "ended": "time",
    "environment_digest": "text",
    "git_commit": "text",
    "groups": "groups",
    "id": "text",
    "name": "text",
    "notes": "text",
    "parent": "text",
    "project": "text",
    "state": "text",
    "status": "text",
    "step": "number",
    "structure_digest": "text",
    "tags": "tags",
    "updated": "time",
}
"""Name of a field -> what it holds."""

ALIASES = {"started": "created", "group": "groups"}
"""Another name of a field -> its name: what the lists of runs call it."""

CHOICES: dict[str, tuple[str, ...]] = {
    "status": ("running", "completed", "failed", "interrupted"),
    "state": ("running", "completed", "failed", "interrupted", "lost"),
}
"""Fields that hold one of a few words."""


# Scopes whose names are written behind the scope, and what a run that lacks one is told.
_KEYED: dict[Scope, tuple[str, str]] = {
    "config": ("has the config key", "no run has a config"),
    "field": ("has the field", "no run has a field"),
    "fingerprint": ("has the fingerprint", "no run has a fingerprint"),
}
_PREFIXES = ("config.", "field.", "fingerprint.", "metric.", "run.")
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
    if scope in _KEYED:
        return _write_key(scope, name)
    if scope == "run":
        return name
    decoded = decode_name(name)
    if encode_name(decoded) == name and _can_be_quoted(decoded):
        name = decoded
    if name in RUN_FIELDS or name in ALIASES:
        return f"metric.{name}"
    if _BARE.fullmatch(name) and name.lower() not in _WORDS and not name.startswith(_PREFIXES):
        return name
    return f"`{name}`"


def _write_key(scope: Scope, key: str) -> str:
    levels = key.split(".")
    if not _can_be_quoted(key) or all(map(_BARE_LEVEL.fullmatch, levels)):
        return f"{scope}.{key}"
    if not all(levels):
        return f"{scope}.`{key}`"
    written = (each if _BARE_LEVEL.fullmatch(each) else f"`{each}`" for each in levels)
    return f"{scope}.{'.'.join(written)}"


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
    scope = field.scope
    wanted = write_name(scope, field.name) if scope in _KEYED else field.name
    place = field.place or Place("where", wanted, 1, len(wanted))
    listed: Scope = scope if scope in _KEYED else "config"
    keys = sorted(vocabulary.list_names(listed))
    # What people compare with the name they wrote -> how it is written.
    names = {f"{listed}.{key}": _write_key(listed, key) for key in keys}
    if scope in _KEYED:
        inside = [_write_key(scope, key) for key in keys if key.startswith(f"{field.name}.")]
        if inside:
            message = f"{wanted} is a group, not a value; it contains {_list(inside)}"
            return point_at(place, message)
        what, own = _KEYED[scope][0], list(names.values())
        near = suggest_names(f"{scope}.{field.name}", names)
    else:
        what = "has the metric"
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
        hint = f"the names are {_list(own)}"
    else:
        hint = "no run has a metric" if scope == "metric" else _KEYED[scope][1]
    return point_at(place, f"no run {what} {wanted!r}; {hint}")


def _list(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "")
