"""Asks a configuration where its settings have their values from."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from quark.configuration.layering.assignments import (
    ARGPARSE_DEFAULT,
    COMMAND_LINE,
    Assignment,
)
from quark.configuration.layering.layered_config import LayeredConfig, read_assignments
from quark.configuration.layering.parsers import ParsedArguments
from quark_core.config.snapshot import TrackedConfig, find_plain
from quark_core.records.json_object import flatten_json

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
        _log.debug("origins of the configuration are not known: %r", error)
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
        from quark.configuration.origins.openmmlab_configs import find_openmmlab_chains

        return {f"{above}{key}": each for key, each in find_openmmlab_chains(config).items()}
    found: Chains = {}
    if not above and "hydra.core.hydra_config" in sys.modules:
        from quark.configuration.origins.hydra_configs import find_hydra_chains

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
    from quark.configuration.layering.command_line import parse_value
    from quark_core.errors import SchemaValidationError

    try:
        return bool(parse_value(text, "") == value) and isinstance(value, (int, float, list, dict))
    except SchemaValidationError:
        return False
