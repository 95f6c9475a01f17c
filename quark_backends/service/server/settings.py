"""Reads how a server is set up: options, then environment, then file, then defaults."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from quark_backends.service.server.config import Limits, ServiceConfig
from quark_core.errors import SchemaValidationError

__all__ = ["PREFIX", "load_config"]

PREFIX = "QUARK_SERVE_"
"""Every setting is an environment variable too: QUARK_SERVE_PORT, QUARK_SERVE_LIMITS_BODY_BYTES."""

_LIMITS = "limits"
# What users call the two places.
_NAMES = {"store_url": "store", "artifact_url": "artifacts"}


def load_config(
    options: Mapping[str, Any], environ: Mapping[str, str], path: Path | None = None
) -> ServiceConfig:
    """The configuration of a server.

    Args:
        options: Setting -> value, of the command line; None where it was not given.
        environ: The environment.
        path: A TOML file, with the settings at the top and a table `limits`.

    Raises:
        SchemaValidationError: A setting that is unknown or does not fit; the message
            names it and where it stands.
    """
    given: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    if path is not None:
        _take_file(path, given, limits)
    hints, limit_hints = get_type_hints(ServiceConfig), get_type_hints(Limits)
    for each in fields(ServiceConfig):
        if each.name == _LIMITS:
            continue
        name = _NAMES.get(each.name, each.name)
        variable = f"{PREFIX}{name.upper()}"
        if (text := environ.get(variable)) is not None:
            value = [part.strip() for part in text.split(",") if part.strip()]
            is_list = each.name == "allowed_hosts"
            given[each.name] = _convert(value if is_list else text, hints[each.name], variable)
        if (option := options.get(name)) is not None:
            given[each.name] = _convert(option, hints[each.name], f"--{name.replace('_', '-')}")
    for each in fields(Limits):
        variable = f"{PREFIX}LIMITS_{each.name.upper()}"
        if (text := environ.get(variable)) is not None:
            limits[each.name] = _convert(text, limit_hints[each.name], variable)
    if not given.get("store_url"):
        given.pop("store_url", None)
    config = ServiceConfig(**given, limits=Limits(**limits))
    _check(config)
    return config


def _take_file(path: Path, given: dict[str, Any], limits: dict[str, Any]) -> None:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SchemaValidationError(f"config {path} cannot be read: {error}") from error
    hints, limit_hints = get_type_hints(ServiceConfig), get_type_hints(Limits)
    names = {_NAMES.get(name, name): name for name in hints}
    for name, value in document.items():
        if name == _LIMITS and isinstance(value, dict):
            for limit, bound in value.items():
                if limit not in limit_hints:
                    raise _unknown(path, f"limits.{limit}", limit_hints)
                limits[limit] = _convert(bound, limit_hints[limit], f"{path}: limits.{limit}")
        elif name in names and name != _LIMITS:
            given[names[name]] = _convert(value, hints[names[name]], f"{path}: {name}")
        else:
            raise _unknown(path, name, names)


def _check(config: ServiceConfig) -> None:
    for name, low, high in (("port", 0, 65_535), ("workers", 1, 256), ("open_stores", 1, 100_000)):
        value = getattr(config, name)
        if not low <= value <= high:
            raise SchemaValidationError(f"{name} must be from {low} to {high}, got {value}")
    for each in fields(Limits):
        if getattr(config.limits, each.name) <= 0:
            raise SchemaValidationError(f"limits.{each.name} must be above 0")
    for name in ("key_cache_s", "shutdown_s", "drain_s"):
        if getattr(config, name) < 0:
            raise SchemaValidationError(f"{name} must not be negative")


def _convert(value: Any, hint: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError as error:
        raise SchemaValidationError(f"{where}: {error}") from None


def _unknown(path: Path, name: str, known: Mapping[str, Any]) -> SchemaValidationError:
    return SchemaValidationError(
        f"config {path}: there is no setting {name!r:.80}; there are {', '.join(sorted(known))}"
    )
