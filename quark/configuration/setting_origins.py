"""Origins of the settings of a configuration: found, redacted and bounded."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from quark.configuration.layering.command_line import ParsedArguments, parse_value
from quark.configuration.layering.layered_config import (
    ARGPARSE_DEFAULT,
    COMMAND_LINE,
    Assignment,
    LayeredConfig,
    find_place,
    read_assignments,
)
from quark_core.config.redaction import REDACTED, cut_text, redact_text, redact_values
from quark_core.config.snapshot import TrackedConfig, find_plain, make_converter
from quark_core.errors import SchemaValidationError
from quark_core.records import ConfigSnapshot
from quark_core.records.json_object import flatten_json
from quark_core.records.runs import SettingOrigin

Chains = dict[str, list[Assignment]]
"""Setting -> the values that it was given, the oldest first."""

_MAX_DEPTH = 4
_MOST_ARGUMENTS = 10_000
_log = logging.getLogger("quark")


def find_chains(config: object, parsed: ParsedArguments | None = None) -> Chains:
    """What a configuration knows of where its settings have their values from; raises nothing.

    Args:
        config: What was given to `start_run`.
        parsed: What its parser made of the command line, where it is a parser's.
    """
    try:
        if parsed is not None:
            return _read_parsed(parsed)
        return _find(config, "", 0)
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything, and a run matters more
        _log.debug("the origins of the config values are unknown: %r", error)
        return {}


def _read_parsed(parsed: ParsedArguments) -> Chains:
    return {
        key: [
            Assignment(
                COMMAND_LINE if key in parsed.given else ARGPARSE_DEFAULT,
                parsed.options.get(key, key),
                value,
            )
        ]
        for key, value in parsed.values.items()
    }


def _find(config: object, above: str, depth: int) -> Chains:
    if isinstance(config, TrackedConfig):
        config = find_plain(config)
    if isinstance(config, LayeredConfig):
        return {f"{above}{key}": each for key, each in read_assignments(config).items()}
    library = type(config).__module__.partition(".")[0]
    if library in ("mmengine", "mmcv"):
        from quark.configuration.framework_origins import find_openmmlab_chains

        return {f"{above}{key}": each for key, each in find_openmmlab_chains(config).items()}
    found: Chains = {}
    if not above and "hydra.core.hydra_config" in sys.modules:
        from quark.configuration.framework_origins import find_hydra_chains

        chains = find_hydra_chains()
        if library != "omegaconf":
            # Somebody's own mapping may have the same keys: what has the same values is Hydra's.
            plain = dict(flatten_json(config)) if isinstance(config, Mapping) else {}
            chains = {
                key: each for key, each in chains.items() if plain.get(key, each) == each[-1].value
            }
        found.update(chains)
    if isinstance(config, Mapping) and library != "omegaconf" and depth < _MAX_DEPTH:
        for key, value in config.items():
            if isinstance(value, (Mapping, TrackedConfig)) or _is_openmmlab(value):
                found.update(_find(value, f"{above}{key}.", depth + 1))
    return found


def _is_openmmlab(value: object) -> bool:
    return type(value).__module__.partition(".")[0] in ("mmengine", "mmcv")


def find_on_command_line(
    values: Mapping[str, Any], argv: Sequence[str] | None = None
) -> dict[str, str | None]:
    """Settings that the command line gives in so many words -> the option, where it is one.

    `--lr 0.1`, `--optimizer.lr=0.1` and `lr=0.1` say a setting of that name where it has that
    value; of `--lr` only where no other setting ends with that name.

    Args:
        values: Setting -> value.
        argv: The command line without the name of the program.
    """
    said: dict[str, list[tuple[str | None, str | None]]] = {}
    arguments = list(sys.argv[1:] if argv is None else argv)[:_MOST_ARGUMENTS]
    for number, argument in enumerate(arguments):
        name, equals, text = argument.partition("=")
        is_option = name.startswith("--") and len(name) > 2
        if not equals and not is_option:
            continue
        follows = arguments[number + 1] if number + 1 < len(arguments) else None
        key = name.lstrip("-+").replace("-", "_")
        said.setdefault(key, []).append((name if is_option else None, text if equals else follows))
    if not said:
        return {}
    ends: dict[str, int] = {}
    for key in values:
        end = key.rpartition(".")[2]
        ends[end] = ends.get(end, 0) + 1
    found: dict[str, str | None] = {}
    for key, value in values.items():
        end = key.rpartition(".")[2]
        names = [key, key.replace(".", "_"), *([end] if ends[end] == 1 else [])]
        for written, given in (each for name in names for each in said.get(name, ())):
            if says(given, value):
                found[key] = written
                break
    return found


def says(text: str | None, value: object) -> bool:
    """Whether the text of an argument says a value; an option without one says `True`."""
    if value is True and (text is None or text.startswith("-")):
        return True
    if text is None or len(text) > 10_000:
        return False
    if isinstance(value, str):
        return text == value or text == f"%{value}%"

    try:
        return bool(parse_value(text, "") == value) and isinstance(value, (int, float, list, dict))
    except SchemaValidationError:
        return False


# Of a setting, and of all: whoever has more has no configuration that anybody reads.
_MOST_OF_A_KEY = 12
_MOST_VALUE_BYTES = 400
_MOST_TEXT = 300
_MOST_BYTES = 256_000

_START = "start"
_CODE = "code"


def add_chains(snapshot: ConfigSnapshot, chains: Chains) -> ConfigSnapshot:
    """A configuration with its origins, of each setting the newest first.

    Args:
        snapshot: The configuration as it is kept, redacted.
        chains: What is known; settings that are not in it are let go.
    """
    convert = make_converter()
    settings = dict(flatten_json(snapshot.values))
    written = {} if snapshot.raw is None else dict(flatten_json(snapshot.raw))
    spelled = find_on_command_line(settings)
    found: dict[str, list[SettingOrigin]] = {}
    for key, value in settings.items():
        chain = list(chains.get(key, ()))
        if key in spelled and not chain:
            chain = [Assignment(COMMAND_LINE, spelled[key], value)]
        text = written.get(key)
        if isinstance(text, str) and "${" in text and text != value:
            chain.append(Assignment("interpolation", text, value))
        if chain:
            found[key] = _settle(key, value, chain, convert, spelled)
    origins, notes = _bound(found.items())
    return msgspec.structs.replace(snapshot, origins=origins, notes=(*snapshot.notes, *notes))


def _settle(
    key: str,
    value: object,
    chain: Iterable[Assignment],
    convert: Callable[[object], object],
    spelled: Mapping[str, str | None],
) -> list[SettingOrigin]:
    """One setting's origins; the newest has the value that is kept, whatever it was made from."""
    newest, *older = reversed(list(chain)[-_MOST_OF_A_KEY:])
    hidden = _is_hidden(value)
    if not hidden and newest.value is not value and convert(newest.value) != value:
        # What it was given last says something else: it was changed since.
        by = Assignment(_CODE, None, value)
        if key in spelled:
            by = Assignment(COMMAND_LINE, spelled[key], value)
        newest, older = by, [newest, *older]
    out = [_make(key, newest.source, newest.place, value, hidden=hidden)]
    out += [
        _make(key, each.source, each.place, convert(each.value), hidden=hidden) for each in older
    ]
    return out


def _make(
    key: str, source: str, place: str | None, value: object, *, hidden: bool
) -> SettingOrigin:
    told = REDACTED if hidden else redact_values({"key": key, "value": value})["value"]
    return SettingOrigin(
        key,
        _cut(redact_text(source), _MOST_TEXT),
        None if place is None else _cut(redact_text(place), _MOST_TEXT),
        _shorten(told),
    )


def _is_hidden(value: object) -> bool:
    """Whether a value, or a part of it, is a secret: then it was one before, too."""
    return REDACTED.encode() in msgspec.json.encode(value)


def _shorten(value: object) -> object:
    encoded = msgspec.json.encode(value)
    if len(encoded) <= _MOST_VALUE_BYTES:
        return value
    return _cut(encoded.decode(), _MOST_VALUE_BYTES)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else cut_text(text, most - 1) + "…"


def _bound(
    found: Iterable[tuple[str, Iterable[SettingOrigin]]],
) -> tuple[tuple[SettingOrigin, ...], tuple[str, ...]]:
    kept: list[SettingOrigin] = []
    size = left_out = 0
    for _, chain in found:
        for origin in chain:
            size += len(msgspec.json.encode(origin.to_dict())) + 1
            if size > _MOST_BYTES:
                left_out += 1
            else:
                kept.append(origin)
    if not left_out:
        return tuple(kept), ()
    return tuple(kept), (
        (f"config: {left_out} origins were not stored, beyond {_MOST_BYTES // 1000} kB"),
    )


def keep_change(
    before: ConfigSnapshot, after: ConfigSnapshot, given: Iterable[ConfigSnapshot], call: str
) -> ConfigSnapshot:
    """A changed configuration with its origins: what is new was given by a call, at its line.

    Args:
        before: What the configuration was.
        after: What it is.
        given: What was given to the call, which may know where it is from.
        call: What was called.
    """
    known = before.group_origins()
    told: dict[str, tuple[SettingOrigin, ...]] = {}
    changed: dict[str, Any] = {}
    for each in given:
        told.update(each.group_origins())
        changed.update({key: after.values[key] for key in each.values})
    # A loop may change one of very many settings: the others are not gone through.
    was = dict(flatten_json({key: before.values[key] for key in changed if key in before.values}))
    place = find_place()
    found: dict[str, list[SettingOrigin]] = {key: list(its) for key, its in known.items()}
    now = dict(flatten_json(changed))
    for key in was.keys() - now.keys():
        found.pop(key, None)
    for key, value in now.items():
        old = list(known.get(key, ()))
        if key in was and was[key] == value:
            found[key] = old
            continue
        new = list(told.get(key, ())) or [_make(key, call, place, value, hidden=_is_hidden(value))]
        if key in was and not old:
            old = [_make(key, _START, None, was[key], hidden=_is_hidden(value))]
        found[key] = [*new, *(old if len(new) == 1 else [])][:_MOST_OF_A_KEY]
    origins, notes = _bound(found.items())
    return msgspec.structs.replace(
        after, origins=origins, notes=tuple(dict.fromkeys((*after.notes, *notes)))
    )


def note_source(
    snapshot: ConfigSnapshot, values: Mapping[str, Any], source: str, place: str | None = None
) -> ConfigSnapshot:
    """A configuration some settings of which have their values from a source, such as a trial.

    Args:
        snapshot: The configuration.
        values: The settings and their values; what has another one in it is let be.
        source, place: What has given them their values, and where that is told.
    """
    known = snapshot.group_origins()
    found: dict[str, list[SettingOrigin]] = {}
    for key, value in flatten_json(snapshot.values):
        older = list(known.get(key, ()))
        if key in values and values[key] == value:
            older = [_make(key, source, place, value, hidden=_is_hidden(value)), *older]
        found[key] = older[:_MOST_OF_A_KEY]
    origins, notes = _bound(found.items())
    return msgspec.structs.replace(snapshot, origins=origins, notes=(*snapshot.notes, *notes))
