"""Checks of where a run belongs and what is noted of it: paths of groups, and typed fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from quark_core.config.arguments import check_label, check_tags, describe_argument, list_given
from quark_core.config.redaction import redact_values
from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import JsonObject, encode_json, normalize_json

REVISION_FIELD = "revision"
"""Which one of the runs of one configuration a run is, from 1 on, where it was asked for."""

UID_FIELD = "uid"
"""What a run was started as (configuration, seeds and version in one), where it was asked for."""

VERSION_FIELD = "version"
"""What a run's code is called, where `start_run(version=)` says it."""

MAX_FIELD_BYTES = 16_384
"""How much JSON the value of one field may be."""

EXCHANGED_FIELD = "why_exchanged"
"""What `quark why --check` has put from one run into another, in the run that it has made so."""

IfDone = Literal["skip", "resume", "again"]
"""What a start does where its configuration has been run before."""

_MAX_FIELDS = 1_000
_MAX_GROUPS = 100
_MAX_LEVELS = 16


def check_group_path(path: object, argument: str = "group") -> str:
    """Return the path of a group, such as `paper/fig3`, without secrets, or refuse it.

    Raises:
        SchemaValidationError: Not a str, empty, too long or too deep, with an empty part or
            space around one, or with a character that cannot be seen.
    """
    text = check_label(path, argument)
    if not text.isprintable():
        raise SchemaValidationError(
            f"{argument} holds a character that cannot be seen: {text[:60]!r}"
        )
    parts = text.split("/")
    if len(parts) > _MAX_LEVELS:
        raise SchemaValidationError(
            f"{argument} has {len(parts)} levels; at most {_MAX_LEVELS} are allowed"
        )
    if "" in parts:
        raise SchemaValidationError(
            f"{argument} must be a path such as 'paper/fig3', without a slash at its ends and "
            f"without an empty part, got {text[:60]!r}"
        )
    if any(part != part.strip() for part in parts):
        raise SchemaValidationError(f"{argument} has space around a part: {text[:60]!r}")
    return text


def check_groups(groups: str | Iterable[str] | None, argument: str = "group") -> tuple[str, ...]:
    """Sorted paths of groups without duplicates, of one text or of several.

    Raises:
        SchemaValidationError: Neither, too many, or one of them is no path.
    """
    if groups is None:
        return ()
    if isinstance(groups, str):
        return (check_group_path(groups, argument),)
    if not isinstance(groups, Iterable) or isinstance(groups, (bytes, Mapping)):
        raise SchemaValidationError(
            f"{argument} must be a str or an iterable of str, not {type(groups).__name__}"
        )
    listed = list_given(groups, argument, _MAX_GROUPS)
    if len(listed) > _MAX_GROUPS:
        raise SchemaValidationError(
            f"{argument} has more than {_MAX_GROUPS} paths, which is how many are allowed"
        )
    paths = {check_group_path(path, f"{argument}[{i}]") for i, path in enumerate(listed)}
    return tuple(sorted(paths))


def is_below(path: str, group: str) -> bool:
    """Whether a path is a group or lies in it."""
    return path == group or path.startswith(f"{group}/")


def check_fields(fields: object, argument: str = "fields") -> JsonObject:
    """Fields as they are kept: plain JSON values under checked names, secrets redacted.

    Raises:
        SchemaValidationError: No mapping, too many, or one whose name or value cannot be kept;
            the message names it.
    """
    if not isinstance(fields, Mapping):
        raise SchemaValidationError(
            f"{argument} must be a mapping of names and values, not {type(fields).__name__}"
        )
    try:
        listed = list(fields.items())
    except Exception as error:
        raise SchemaValidationError(
            f"{argument} cannot be gone through: {type(error).__name__}: {error!s:.60}"
        ) from error
    if len(listed) > _MAX_FIELDS:
        raise SchemaValidationError(
            f"{argument} has {len(listed)} entries; at most {_MAX_FIELDS} are allowed"
        )
    checked: dict[str, Any] = {}
    for name, value in listed:
        known = _check_field_name(name, f"{argument}: the name {describe_argument(name)}")
        normal = normalize_json(value, f"{argument}[{known[:60]!r}]")
        size = len(encode_json(normal))
        if size > MAX_FIELD_BYTES:
            raise SchemaValidationError(
                f"{argument}[{known[:60]!r}] has {size} bytes of JSON; at most {MAX_FIELD_BYTES} "
                "are allowed. Log what is larger as an artifact"
            )
        checked[known] = normal
    return JsonObject(redact_values(checked))


def check_field_names(names: Iterable[str] | None, argument: str = "fields") -> tuple[str, ...]:
    """Sorted names of fields without duplicates.

    Raises:
        SchemaValidationError: Not an iterable of good names.
    """
    return tuple(_check_field_name(name, argument) for name in check_tags(names, argument))


def _check_field_name(name: object, argument: str) -> str:
    text = check_label(name, argument)
    if not text.isprintable() or text != text.strip():
        raise SchemaValidationError(f"{argument} must be printable, and without space around it")
    return text


def check_if_done(if_done: object) -> IfDone | None:
    """Return what was asked for, or refuse it.

    Raises:
        SchemaValidationError: Not one of its words.
    """
    if if_done is None:
        return None
    if not isinstance(if_done, str) or if_done not in get_args(IfDone):
        raise SchemaValidationError(
            f"if_done must be one of {', '.join(get_args(IfDone))}, or None, "
            f"got {describe_argument(if_done)}"
        )
    return if_done  # type: ignore[return-value]
