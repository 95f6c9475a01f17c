"""Objects with fields in a configuration: a dataclass keeps its other fields when one is set."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from quark_core.errors import SchemaValidationError

_PLAIN = frozenset({type(None), bool, int, float, str, bytes, list, dict, tuple, set})


def has_fields(value: object) -> bool:
    """Whether a value is an object whose settings are its fields, and no mapping."""
    if type(value) in _PLAIN:
        return False
    return not isinstance(value, Mapping) and _read(value) is not None


def replace_field(held: Any, names: Sequence[str], value: Any, key: str) -> Any:
    """A copy of an object with one field set, and the others as they are.

    Args:
        held: The object.
        names: The field, and those within it.
        value: Its new value.
        key: How the configuration calls the field, for messages.

    Raises:
        SchemaValidationError: There is no such field, or the object refuses the value.
    """
    known, (name, *inner) = _read(held), names
    if known is None or name not in known:
        # Late: every run imports this module, and few ask for what is not there.
        import difflib

        near = difflib.get_close_matches(name, list(known or ()), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SchemaValidationError(
            f"config: {key!r}: {type(held).__name__} has no field {name!r}{hint}"
        )
    if inner:
        value = replace_field(known[name], inner, value, key)
    try:
        if isinstance(held, tuple):
            return held._replace(**{name: value})  # type: ignore[attr-defined]
        if dataclasses.is_dataclass(held) and not isinstance(held, type):
            return dataclasses.replace(held, **{name: value})
        made = copy.copy(held)
        try:
            setattr(made, name, value)
        except AttributeError:  # a frozen class of attrs
            object.__setattr__(made, name, value)
        return made
    except Exception as error:  # a class may check its fields, and raise anything
        raise SchemaValidationError(
            f"config: {key!r} cannot be {str(value)[:60]!r}: {type(error).__name__}: {error}"
        ) from error


def _read(value: object) -> Mapping[str, Any] | None:
    # Late: what takes configurations apart reads layered ones, too.
    from quark_core.config.snapshot import read_fields, read_named_tuple

    named = read_named_tuple(value)
    return read_fields(value) if named is None else named
