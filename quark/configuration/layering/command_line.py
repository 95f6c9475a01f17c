"""Parsing of a script's command line: names of layers, and config values.

    train.py high_lr batch_size=64 model=%resnet101% --optimizer.name adam

Values are read as JSON, else they are words. None is ever evaluated.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quark_core.errors import SchemaValidationError

_LONGEST_VALUE = 1_000_000
_SETTING = re.compile(r"(?P<insists>\+{0,2})(?P<key>[A-Za-z_][\w.-]*)=(?P<value>.*)", re.DOTALL)
_OPTION = re.compile(r"--(?P<key>[A-Za-z_][\w.-]*)(?:=(?P<value>.*))?", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?!0\d)(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?")
_WORDS = {"True": True, "False": False, "None": None}
_MANUAL = ("manual", "--manual", "--help", "-h")


@dataclass(frozen=True, slots=True)
class Given:
    """One setting of the command line.

    Attributes:
        key: Which.
        value: Its value.
        place: How it is written there: `lr=`, `--lr`.
        insists: Whether it is to be taken although it looks like a misspelling (`+lr=1`).
    """

    key: str
    value: Any
    place: str
    insists: bool = False


@dataclass(slots=True)
class CommandLine:
    """What the command line says.

    Attributes:
        layers: Names of layers, in their order.
        settings: Settings, in their order.
        asks_for_manual: Whether it asks how the configuration comes about.
    """

    layers: list[str] = field(default_factory=list)
    settings: list[Given] = field(default_factory=list)
    asks_for_manual: bool = False


def read_command_line(arguments: Sequence[str]) -> CommandLine:
    """Read names of layers, `key=value`, `--key=value`, `--key value` and `manual`.

    An option without a value, or with another option after it, is true. `--` ends what is read.

    Raises:
        SchemaValidationError: An argument that is none of these, or a value that cannot be read.
    """
    said = CommandLine()
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not isinstance(argument, str):
            raise SchemaValidationError(
                f"argv must be a list of str, but contains {type(argument).__name__}"
            )
        if argument == "--":
            break
        if argument in _MANUAL:
            said.asks_for_manual = True
            continue
        setting, option = _SETTING.fullmatch(argument), _OPTION.fullmatch(argument)
        if setting is not None:
            key = setting["key"]
            value = parse_value(setting["value"], f"{key}=")
            said.settings.append(Given(key, value, f"{key}=", bool(setting["insists"])))
        elif option is not None:
            said.settings.append(_read_option(option, waiting))
        elif argument.startswith("-"):
            raise SchemaValidationError(
                f"{argument[:60]!r} on the command line is not a config value. Write key=value "
                "or --key value. To use your own options, pass their parser: resolve(parser=…)"
            )
        else:
            said.layers.append(argument)
    return said


def _read_option(option: re.Match[str], waiting: list[str]) -> Given:
    # Python has no dashes in names, and command lines have.
    key = option["key"].replace("-", "_")
    place = f"--{option['key']}"
    text = option["value"]
    if text is None:
        if not waiting or waiting[0].startswith("--"):
            return Given(key, True, place)
        text = waiting.pop(0)
    return Given(key, parse_value(text, place), place)


def parse_value(text: str, place: str) -> Any:
    """The value that a text says: JSON, a number, `%text%` for a text as it is, else the text.

    `true`, `null`, `[1, 2]`, `{"a": 1}`, `1e-3`, `.5`; also `True`, `False` and `None`. What begins
    with a bracket must be JSON: half a list is a mistake, and no text.

    Args:
        text: The text.
        place: Where it stands, for messages.

    Raises:
        SchemaValidationError: It begins with a bracket and is no JSON, or is too long.
    """
    if len(text) > _LONGEST_VALUE:
        raise SchemaValidationError(
            f"{place} has {len(text):,} characters; at most {_LONGEST_VALUE:,} are allowed"
        )
    if len(text) >= 2 and text[0] == text[-1] == "%":
        return text[1:-1]
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if text[:1] in ("[", "{"):
        raise SchemaValidationError(
            f"{place} starts like JSON but is not valid JSON: {text[:60]!r}. Quote the strings "
            'in it: ["a", "b"]. For a text with a bracket, write %[a]%'
        )
    if _NUMBER.fullmatch(text):
        try:
            return float(text) if set(text) & set(".eE") else int(text)
        except ValueError:
            return text
    return text


_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class ParsedArguments:
    """What a parser makes of a command line.

    Attributes:
        values: Argument -> value, defaults included.
        given: The arguments that the command line gives.
        options: Argument -> how it is written: `--lr`.
        rest: What the parser does not know.
    """

    values: dict[str, Any]
    given: frozenset[str]
    options: dict[str, str]
    rest: list[str]


def parse_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> ParsedArguments:
    """Parse as the parser does, which ends the program for `--help` and for a bad value.

    Args:
        parser: The parser.
        argv: The arguments; those of `sys.argv` by default.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    namespace, rest = parser.parse_known_args(arguments)
    options: dict[str, str] = {}
    _collect_options(parser, options, 0)
    values = dict(vars(namespace))
    given = _find_given(parser, arguments)
    if given is None:
        given = frozenset(key for key in values if values[key] != parser.get_default(key))
    return ParsedArguments(values, given, options, list(rest))


def _collect_options(parser: argparse.ArgumentParser, options: dict[str, str], depth: int) -> None:
    for action in parser._actions:
        written = max(action.option_strings, key=len, default=action.dest)
        options.setdefault(action.dest, written)
        for each in _list_subparsers(action, depth):
            _collect_options(each, options, depth + 1)


def _list_subparsers(action: argparse.Action, depth: int) -> list[argparse.ArgumentParser]:
    if not isinstance(action, argparse._SubParsersAction) or depth >= _MAX_DEPTH:
        return []
    return list({id(each): each for each in action.choices.values()}.values())


def _find_given(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> frozenset[str] | None:
    """Parse once more by a twin that has no defaults and converts nothing."""
    try:
        twin = copy.deepcopy(parser)
        _strip(twin, 0)
        found, _ = twin.parse_known_args(list(arguments))
    except (Exception, SystemExit):  # noqa: BLE001 - an action of somebody's may do anything
        return None
    return frozenset(vars(found))


def _strip(parser: argparse.ArgumentParser, depth: int) -> None:
    parser._defaults.clear()
    parser.argument_default = argparse.SUPPRESS
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        # What opens a file, or asks a server, has done so once.
        action.type = None
        subparsers = _list_subparsers(action, depth)
        for each in subparsers:
            _strip(each, depth + 1)
        if not subparsers:
            action.choices = None
