"""What a command line gives of an `argparse` parser's arguments, and what are its defaults."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
