"""The options of a command follow from the signature of its function.

    @click.command()
    @takes_options
    def runs(*, limit: int = option("Runs to show.", "-n", default=20)) -> None:

The type of a parameter says what its option is: a flag, a number, a choice, a path, one that may be
repeated (a tuple).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


@dataclass(frozen=True, slots=True)
class Declared:
    """An option or argument, without what its parameter says already.

    Attributes:
        make: What click has for it.
        names: How it is written, where that is not `--` and the parameter's name.
        settings: As of click's own.
        bounds: Of a number: the least and the greatest, or None.
    """

    make: type[click.Parameter]
    names: tuple[str, ...]
    settings: Mapping[str, Any]
    bounds: tuple[Any, Any] = (None, None)


@dataclass(frozen=True, slots=True)
class Combined:
    """A parameter that several options make.

    Attributes:
        make: Makes it of their values.
        parts: Name of each -> its type, and what it is declared as.
    """

    make: Callable[..., Any]
    parts: Mapping[str, tuple[Any, Any]]


def option(
    help_text: str, *names: str, least: float | None = None, most: float | None = None, **given: Any
) -> Any:
    """An option, as the default of a parameter.

    Args:
        help_text: What it is for.
        *names: A short name, and a long one that is not the parameter's.
        least, most: Bounds of a number.
        **given: As of `click.option`.
    """
    return Declared(click.Option, names, {"help": help_text, **given}, (least, most))


def argument(**given: Any) -> Any:
    """An argument, as the default of a parameter; its settings are those of `click.argument`."""
    return Declared(click.Argument, (), given)


def takes_options(function: F) -> F:
    """Have a command take what its function's parameters declare, in their order."""
    whole: dict[str, Combined] = {}
    made: list[click.Parameter] = []
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        declared = parameter.default
        if isinstance(declared, Combined):
            whole[name] = declared
            made += [_build(part, *says) for part, says in declared.parts.items()]
        elif isinstance(declared, Declared):
            made.append(_build(name, hints[name], declared))

    @wraps(function)
    def call(*context: Any, **given: Any) -> Any:
        for name, combined in whole.items():
            parts = {part: given.pop(part) for part in combined.parts}
            given[name] = combined.make(**parts)
        return function(*context, **given)

    call.__click_params__ = made[::-1]  # type: ignore[attr-defined] # as click's decorators do
    return call  # type: ignore[return-value]


def _build(name: str, kind: Any, declared: Declared) -> click.Parameter:
    """The option or argument of a parameter."""
    settings = {**dict(_read_type(kind, declared)), **declared.settings}
    if declared.make is click.Argument:
        is_optional = get_origin(kind) in (Union, UnionType, tuple)
        return click.Argument([name], **{"required": not is_optional, **settings})
    if settings.get("default") is not None:
        settings.setdefault("show_default", True)
    is_long_said = any(each.startswith("--") for each in declared.names)
    long = () if is_long_said else (f"--{name.replace('_', '-')}",)
    option_kind: type[click.Option] = settings.pop("cls", click.Option)
    return option_kind([name, *declared.names, *long], **settings)


def _read_type(kind: Any, declared: Declared) -> Iterator[tuple[str, Any]]:
    """Options of click that follow from the type of a parameter."""
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is tuple:
        yield ("nargs", -1) if declared.make is click.Argument else ("multiple", True)
        kind = get_args(kind)[0]
    if kind is bool:
        yield "is_flag", True
    elif get_origin(kind) is Literal:
        yield "type", click.Choice(get_args(kind))
    elif kind is Path:
        yield "type", click.Path(path_type=Path)
    elif declared.bounds != (None, None):
        bounded = click.IntRange if kind is int else click.FloatRange
        yield "type", bounded(*declared.bounds)
    else:
        yield "type", kind
