"""Checks of arguments; each message names the argument."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from quark_core.api import OpenRun, SchemaValidationError, read_step


def check_type(value: object, name: str, kind: type) -> None:
    """Whether a value is an instance of this class."""
    if not isinstance(value, kind):
        raise SchemaValidationError(f"{name} must be a {kind.__name__}, not {_say_type(value)}")


def check_model(model: object) -> None:
    """Whether it is a module of PyTorch."""
    if not isinstance(model, nn.Module):
        raise SchemaValidationError(f"model must be a torch.nn.Module, not {_say_type(model)}")


def check_flags(**flags: object) -> None:
    """Whether each of them is True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise SchemaValidationError(f"{name} must be True or False, not {_say_type(flag)}")


def check_names(**names: object) -> None:
    """Whether each of them is a text or None."""
    for name, value in names.items():
        if value is not None and not isinstance(value, str):
            raise SchemaValidationError(f"{name} must be a str, not {_say_type(value)}")


def take_step(run: OpenRun, step: object, told: str = "step is required") -> int:
    """The number of a step; what is told of None can be given."""
    number = read_step(run, step)
    if number is None:
        raise SchemaValidationError(told)
    return number


def check_scaler(scaler: Any) -> None:
    """Whether it tells a scale, as a GradScaler does, or is None."""
    if scaler is not None and not callable(getattr(scaler, "get_scale", scaler)):
        raise SchemaValidationError(
            "grad_scaler must be a GradScaler, a function that returns its scale, or None, not "
            f"{_say_type(scaler)}"
        )


def take_texts(value: object, name: str) -> tuple[str, ...]:
    """The texts of an iterable, which must not be a text itself."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        found = f"such as ({value!r},)" if isinstance(value, str) else f"not {_say_type(value)}"
        raise SchemaValidationError(f"{name} must be a tuple of str, {found}")
    texts = tuple(value)
    for text in texts:
        if not isinstance(text, str):
            raise SchemaValidationError(
                f"{name} must be a tuple of str, but contains {_say_type(text)}"
            )
    return texts


def take_patterns(value: object, name: str) -> tuple[str, ...]:
    """The regular expressions of an iterable."""
    texts = take_texts(value, name)
    for text in texts:
        try:
            re.compile(text)
        except re.error as error:
            raise SchemaValidationError(
                f"{name} has an invalid regular expression {text!r:.80}: {error}"
            ) from error
    return texts


def _say_type(value: object) -> str:
    return type(value).__name__
