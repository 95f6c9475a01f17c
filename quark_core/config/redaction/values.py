"""JSON values and records: secrets go by their key, and out of every text that people wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

from quark_core.config.redaction.names import Sense, is_secret_key, is_short_password, read_name
from quark_core.config.redaction.shapes import REDACTED, redact_shapes
from quark_core.config.redaction.texts import redact_text
from quark_core.records import RECORD_TYPES, LifecycleRecord
from quark_core.records.base import Record, StreamRecord
from quark_core.records.fields import column_types
from quark_core.records.json_object import JsonObject, clean_text

_Object = TypeVar("_Object", JsonObject, None, JsonObject | None)

# Under what names a list of names and values has them.
_NAME_KEYS = ("name", "key", "variable", "header", "option")
_VALUE_KEYS = ("value", "val", "default")
# What says something only together with what it stands under, or what stands under it.
_HEADS = ("key", "keys", "token", "tokens", "pass", "pw", "auth", "cookie", "cookies")
# No key that is shorter holds a secret with a shape.
_SHORTEST_SHAPE = 15


def redact_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy JSON values with the secrets replaced by `REDACTED`, at any depth."""
    return _redact_mapping("", values)


def redact_object(value: _Object) -> _Object:
    """The same object where nothing in it is secret, else a redacted copy."""
    if not value:
        return value
    redacted = _redact_mapping("", value)
    return value if redacted == value else JsonObject(redacted)


def _redact_mapping(parent: str, values: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    named = _find_name(values)
    for key, item in values.items():
        known = key if key not in _VALUE_KEYS or not named else named
        if is_secret_key(known, item) or _is_secret_together(parent, key, item):
            item = REDACTED
        else:
            item = _redact(key, item)
        shown = key if len(key) < _SHORTEST_SHAPE else redact_shapes(key)
        while shown != key and shown in out:
            shown += "'"
        out[shown] = item
    return out


def _redact(key: str, value: Any) -> Any:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, JsonObject) and value.is_redacted:
        return value
    if isinstance(value, Mapping):
        return _redact_mapping(key, value)
    if isinstance(value, list):
        return _redact_list(key, value)
    return value


def _redact_list(key: str, values: list[Any]) -> list[Any]:
    if not values:
        return []
    if not all(isinstance(item, str) for item in values):
        return [REDACTED if is_secret_key(key, item) else _redact(key, item) for item in values]
    if read_name(key) is Sense.AUTH and len(values) == 2:
        return [REDACTED, REDACTED]
    if len(values) == 2 and is_secret_key(values[0], values[1]) and " " not in values[0]:
        return [values[0], REDACTED]
    if any(item.startswith("-") for item in values):
        return redact_arguments(values)
    return [REDACTED if is_secret_key(key, item) else redact_text(item) for item in values]


def _is_secret_together(parent: str, key: str, item: Any) -> bool:
    """Whether two names say together what neither does alone: `wandb` and `key`, `tokens`, `hf`."""
    if not parent:
        return False
    if key.lower() in _HEADS:
        return is_secret_key(f"{parent}_{key}", item)
    return parent.lower() in _HEADS and is_secret_key(f"{key}_{parent}", item)


def _find_name(values: Mapping[str, Any]) -> str:
    """What a mapping such as {"name": "DB_PASSWORD", "value": …} names, or nothing."""
    if len(values) > 8:
        return ""
    for key in _NAME_KEYS:
        name = values.get(key)
        if isinstance(name, str):
            return name
    return ""


_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
# `--use-password` and its like say whether, not what.
_SWITCH = re.compile(
    r"-+(?:use|no|with|without|has|is|ask|enable|disable|require|skip|show|hide|prompt|check|save|"
    r"allow|list|print|read)[_-]",
    re.IGNORECASE,
)
_USER_OPTIONS = re.compile(r"-[uU]\S*|--?(?:user|username|login|host)(?:=.*)?", re.DOTALL)
_USER_AND_PASSWORD = re.compile(r"(?P<user>[^\s:/=]+:)(?![/\d]+$)\S+")
_ATTACHED = re.compile(r"-p(?=[^\d\s=/.]*\d)(?![a-z]+\d{0,3}$)\S{4,}")


def redact_arguments(arguments: Iterable[str]) -> list[str]:
    """Redact a command line.

    `--password x`, `--password=x`, `password=x`, `-p x`, `-u name:x`, and
    whatever `redact_text` finds in an argument. The list stays as long as it is.
    """
    given = list(arguments)
    out: list[str] = []
    waiting = _Waiting()
    has_user = any(_USER_OPTIONS.fullmatch(argument) for argument in given)
    for argument in given:
        if waiting.takes(argument):
            out.append(REDACTED)
            continue
        waiting = _Waiting(argument)
        out.append(_redact_one(argument, out, given, has_user))
    return out


class _Waiting:
    """Whether the next argument is the secret that an option asks for.

    Args:
        option: The argument before it.
    """

    def __init__(self, option: str = "") -> None:
        is_option = _OPTION.fullmatch(option) is not None and _SWITCH.match(option) is None
        self._name = option if is_option and len(option) > 2 else ""
        self._sense = read_name(self._name) if self._name else Sense.NONE
        # `--api-keys a b c`
        self._several = self._name.endswith("s")

    def takes(self, argument: str) -> bool:
        """Whether it takes an argument; one that takes a single one takes no more."""
        if self._sense is Sense.NONE or not argument:
            return False
        if argument.startswith("--"):
            taken = _OPTION.fullmatch(argument.partition("=")[0]) is None
        elif argument.startswith("-"):
            taken = len(argument) > 2 or not argument[1:].isalpha()
        else:
            taken = is_secret_key(self._name, argument)
        if not taken or not self._several:
            self._sense = Sense.NONE
        return taken


def _redact_one(argument: str, before: Sequence[str], given: Sequence[str], has_user: bool) -> str:
    name, equals, value = argument.partition("=")
    if equals and is_secret_key(name, value):
        return f"{name}={REDACTED}"
    option = given[len(before) - 1] if before else ""
    if option in ("-p", "-P") and not _OPTION.fullmatch(argument):
        plain = argument.isdigit() or (not has_user and not is_short_password(argument))
        return redact_text(argument) if plain else REDACTED
    if option in ("-u", "--user"):
        both = _USER_AND_PASSWORD.fullmatch(argument)
        if both is not None:
            return f"{both['user']}{REDACTED}"
    if has_user and _ATTACHED.fullmatch(argument):
        return f"-p{REDACTED}"
    return redact_text(argument)


_Record = TypeVar("_Record", bound=StreamRecord)

# No secret with a shape is shorter, and a batch has thousands of ids.
_SHORTEST_ITEM = 12
# Where the start of a run says in what folders it lies: they must stay what they are called.
_PLACES = (("project", "root_path"), ("run", "run_path"), ("store", "path"))


@cache
def _list_written(kind: str) -> tuple[str, ...]:
    """The fields that hold what people write.

    What names something, is one of a few words, or is plain by its type's rules, is not among
    them: values are found again by it.
    """
    rules = RECORD_TYPES[kind].RULES
    left_out = {*rules.names, *rules.words, *rules.plain}
    fields = column_types(kind).items()
    return tuple(name for name, encoding in fields if encoding in "tj" and name not in left_out)


def redact_record(record: _Record) -> _Record:
    """The same record where nothing in it is secret, else a redacted copy."""
    changes: dict[str, Any] = {}
    if isinstance(record, LifecycleRecord) and record.data:
        changes["data"] = _redact_data(record.action, record.data)
    for name in _list_written(record.KIND):
        value = getattr(record, name)
        if value:
            is_labelled = name in record.RULES.labelled
            changes[name] = _redact_labels(value) if is_labelled else _redact_field(value)
    if all(getattr(record, name) is value for name, value in changes.items()):
        return record
    return msgspec.structs.replace(record, **changes)


def _redact_data(action: str, data: JsonObject) -> JsonObject:
    redacted = redact_values(data)
    if action == "start":
        for part, name in _PLACES:
            given = data.get(part)
            if isinstance(given, dict) and name in given:
                redacted[part][name] = given[name]
    return data if redacted == data else JsonObject(redacted)


def _redact_field(value: Any) -> Any:
    if isinstance(value, str):
        # Whoever keeps it, the black box first, encodes it, and one text must not cost others.
        redacted = clean_text(redact_text(value))
        return value if redacted == value else redacted
    if isinstance(value, JsonObject):
        return redact_object(value)
    # Ids of samples are numbers mostly.
    if isinstance(value, tuple) and set(map(type, value)) != {int}:
        items = tuple(_redact_item(item) for item in value)
        return value if items == value else items
    return value


def _redact_labels(counts: JsonObject) -> JsonObject:
    """What is counted may be called `password`, and is no secret for it."""
    labels = {redact_shapes(label): count for label, count in counts.items()}
    return counts if labels == counts else JsonObject(labels)


def _redact_item(item: Any) -> Any:
    if isinstance(item, str):
        return clean_text(item if len(item) < _SHORTEST_ITEM else redact_text(item))
    if isinstance(item, Record):
        texts = {
            name: clean_text(redact_text(text))
            for name in item.__struct_fields__
            if isinstance(text := getattr(item, name), str)
        }
        return msgspec.structs.replace(item, **texts)
    return item
