"""What an instrument is: it chooses modules, and makes a few numbers of each of their calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from quark_core.api import SchemaValidationError, check_name

Measured = Mapping[str, "Tensor | float"]
"""Name -> a number, or a tensor of one dimension, such as a value for each expert."""

Choice = str | Callable[[str, nn.Module], bool]
"""Which modules: a regular expression that is searched for in a name, or a function of both."""


class Instrument:
    """Measures something of some modules in probed steps; for `quark.watch(extras=[…])`.

    A class of your own says in `select` which modules it looks at, and in
    `measure` what it makes of one call. Forward hooks are there in probed steps only, so
    that other steps cost nothing. `measure` is called without gradients and must
    not keep its arguments. Numbers are averaged over the module's calls of a step, and
    become metrics `name/module/key`; of a tensor with one dimension
    `name/module/key/0` and so on. What it raises costs one event `instrumentation_failed`, and
    the instrument its further steps. Modules that `torch.compile` has compiled run no
    hooks and are told of once. Calls in which activation checkpointing runs a module
    again are left out.

    Attributes:
        name: What its metrics begin with; by default the name of the class.
    """

    name: str = ""

    def select(self, name: str, module: nn.Module) -> bool:
        """Whether it looks at a module; asked once for each.

        Args:
            name: The module's name, without the prefixes of wrappers.
            module: The module.
        """
        raise NotImplementedError

    def measure(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> Measured | None:
        """What one call of a module says, or None where it says nothing.

        Args:
            name: The module's name.
            module: The module.
            args, kwargs: What it was called with.
            output: What it gave.
        """
        raise NotImplementedError

    def prepare(
        self,
        name: str,  # noqa: ARG002 - for those that need it
        module: nn.Module,  # noqa: ARG002
        args: tuple[Any, ...],  # noqa: ARG002
        kwargs: dict[str, Any],  # noqa: ARG002
    ) -> dict[str, Any] | None:
        """Other keyword arguments for a call of a module in a probed step; None changes nothing.

        It is asked only where a class of instruments has one of its own.
        """
        return None

    def attach(self, model: nn.Module) -> None:
        """Told of the model once, before `select`."""

    def explain_silence(self) -> str | None:
        """Why nothing came of the calls of a step, where it knows."""
        return None


def make_choice(choice: Choice | None, usual: str) -> Callable[[str, nn.Module], bool]:
    """A function out of what was given as a choice of modules.

    Raises:
        SchemaValidationError: Neither a regular expression nor a function.
    """
    wanted = usual if choice is None else choice
    if callable(wanted):
        return wanted
    try:
        pattern = re.compile(wanted)
    except (re.error, TypeError) as error:
        raise SchemaValidationError(
            f"modules must be a regular expression or a function of name and module: {error}"
        ) from None
    return lambda name, _: pattern.search(name) is not None


def check_instrument(instrument: object) -> Instrument:
    """Return an instrument, or refuse it.

    Raises:
        SchemaValidationError: It is none; the message says what it lacks.
    """
    if not isinstance(instrument, Instrument):
        what = instrument.__name__ if isinstance(instrument, type) else type(instrument).__name__
        raise SchemaValidationError(
            "extras must hold instances of quark.Instrument, such as quark.RouterLoad(), "
            f"not {what}"
        )
    if not instrument.name:
        instrument.name = type(instrument).__name__
    check_name(instrument.name, f"{type(instrument).__name__}.name")
    return instrument
