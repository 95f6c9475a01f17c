"""A space of parameters as people write it: `lr=log:1e-5:1e-1`, or a file of JSON, TOML or YAML."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quark.sweeps.space import RANGE_TEXT, integers, uniform
from quark_core.errors import SchemaValidationError

FORMS = "log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH or logint:LOW:HIGH, or choices A,B,C"
"""What stands behind a parameter's name, for messages."""

_MOST_BYTES = 1_000_000
_DESCRIBING = {"type", "param_type", "values", "value", "min", "max"}
_RANGES = ("log", "uniform", "int", "logint")


def read_setting(text: str, argument: str = "--set") -> tuple[str, object]:
    """The name and the values of a parameter, as `NAME=VALUES` says it.

    Values are a range, `log:1e-5:1e-1`, `uniform:0:0.5`, `int:1:4` or `logint:1:1000`, behind
    which a third number says how many values a grid takes; or choices with commas between,
    `adam,sgd` or `1,2,4`, of which one alone is fixed. A choice is read as JSON where it is some,
    and is a text otherwise; `["a,b", "c"]` has a comma in one.

    Raises:
        SchemaValidationError: It is no such thing; the message begins with `argument`.
    """
    name, equals, values = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise SchemaValidationError(f"{argument} must be NAME=VALUES, got {text[:60]!r}")
    return name, _read_text(values.strip(), f"{argument} {name}")


def read_space_file(path: Path) -> dict[str, object]:
    """The space in a file: names with their values, in JSON, TOML or YAML by its suffix.

    Values are texts as `read_setting` reads them, lists of choices, single values, or mappings:
    `{"type": "uniform", "low": …, "high": …, "log": …}`, those of Ato (`param_type`,
    `param_range`, `num_samples`, which is how many values a grid takes, `space_type`,
    `categories`), or those of W&B (`min`, `max`, `values`, `value`, `distribution`). They may
    stand below `space` or `parameters`.

    Raises:
        SchemaValidationError: It cannot be read, or holds no space; the message names it.
    """
    content = _read_file(path)
    for key in ("space", "parameters"):
        inner = content.get(key)
        # A parameter may be called so itself.
        if isinstance(inner, Mapping) and not _DESCRIBING & set(inner):
            content = inner
            break
    if not content:
        raise SchemaValidationError(f"--space {path}: there is no parameter in it")
    return {
        str(name): _read_value(value, f"--space {path}: {name}") for name, value in content.items()
    }


def _read_file(path: Path) -> Mapping[str, Any]:
    where = f"--space {path}"
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise SchemaValidationError(f"{where} cannot be read: {error.strerror or error}") from None
    if len(data) > _MOST_BYTES:
        raise SchemaValidationError(f"{where} is larger than {_MOST_BYTES:,} bytes")
    content = _PARSERS.get(path.suffix.lower(), _parse_any)(data, where)
    if not isinstance(content, Mapping):
        raise SchemaValidationError(f"{where} must hold names with their values")
    return content


def _parse_json(data: bytes, where: str) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SchemaValidationError(f"{where} is no JSON: {error}") from None


def _parse_toml(data: bytes, where: str) -> object:
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise SchemaValidationError(f"{where} is no TOML: {error}") from None


def _parse_yaml(data: bytes, where: str) -> object:
    try:
        import yaml
    except ImportError:
        raise SchemaValidationError(
            f"{where}: YAML needs PyYAML (pip install pyyaml); JSON and TOML need nothing"
        ) from None
    try:
        return yaml.safe_load(data.decode("utf-8"))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise SchemaValidationError(f"{where} is no YAML: {' '.join(str(error).split())}") from None


def _parse_any(data: bytes, where: str) -> object:  # noqa: ARG001
    raise SchemaValidationError(f"{where} must end with .json, .toml, .yaml or .yml")


_PARSERS: dict[str, Callable[[bytes, str], object]] = {
    ".json": _parse_json,
    ".toml": _parse_toml,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
}


def _read_value(value: object, where: str) -> object:
    if isinstance(value, str):
        return _read_text(value, where)
    if isinstance(value, Mapping):
        return _read_mapping({str(key): item for key, item in value.items()}, where)
    return _check_choices(list(value) if isinstance(value, (list, tuple)) else [value], where)


def _read_text(text: str, where: str) -> object:
    kind, colon, rest = text.partition(":")
    if colon and kind in _RANGES:
        return _read_range(kind, rest.split(":"), where)
    if RANGE_TEXT.match(text):
        raise SchemaValidationError(
            f"{where}: there is no range {kind!r}; it must be {FORMS}. A text that looks like a "
            f"range and is meant as it stands is written as {json.dumps([text])}"
        )
    if not text:
        raise SchemaValidationError(f"{where} needs values: {FORMS}")
    found = _read_scalar(text)
    if isinstance(found, list):
        return _check_choices(found, where)
    return _check_choices([_read_scalar(part.strip()) for part in text.split(",")], where)


def _read_range(kind: str, parts: list[str], where: str) -> object:
    if len(parts) not in (2, 3):
        raise SchemaValidationError(
            f"{where} must be one of {FORMS}, got {kind}:{':'.join(parts)[:60]!r}"
        )
    low, high, *rest = (_read_number(part, where) for part in parts)
    count = _make_whole(rest[0], where) if rest else None
    is_whole = kind in ("int", "logint")
    return _make_range(low, high, where, log="log" in kind, is_whole=is_whole, count=count)


def _make_range(
    low: float, high: float, where: str, *, log: bool, is_whole: bool, count: int | None
) -> object:
    ends = [_make_whole(end, where) for end in (low, high)] if is_whole else []
    try:
        if is_whole:
            return integers(*ends, log=log, count=count)
        return uniform(low, high, log=log, count=count)
    except SchemaValidationError as error:
        raise SchemaValidationError(f"{where}: {error}") from None


def _read_number(value: object, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise SchemaValidationError(f"{where}: {str(value)[:40]!r} is no finite number")
    return number


def _make_whole(number: float, where: str) -> int:
    if number != int(number):
        raise SchemaValidationError(f"{where}: {number:g} is no whole number")
    return int(number)


def _read_scalar(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _check_choices(choices: list[object], where: str) -> list[object]:
    if not choices:
        raise SchemaValidationError(f"{where} has no choice")
    return choices


def _read_mapping(value: dict[str, Any], where: str) -> object:
    if "type" in value:
        return value  # as a definition has it; it is checked with the sweep
    if "param_type" in value:
        return _read_ato(value, where)
    if set(value) & {"min", "max", "values", "value"}:
        return _read_wandb(value, where)
    raise SchemaValidationError(
        f"{where} must be a text such as log:1e-5:1e-1, a list, "
        '{"type": "uniform", "low": …, "high": …}, or what Ato or W&B has there; '
        f"it has {', '.join(map(repr, value))[:80] or 'nothing'}"
    )


def _read_wandb(value: Mapping[str, Any], where: str) -> object:
    _allow(value, ("min", "max", "values", "value", "distribution"), where)
    if "values" in value:
        return _list_choices(value["values"], where)
    if "value" in value:
        return [value["value"]]
    kind = str(value.get("distribution", ""))
    known = ("", "uniform", "int_uniform", "log_uniform_values")
    if kind not in known or "min" not in value or "max" not in value:
        raise SchemaValidationError(
            f"{where}: of W&B's forms values, value, and min with max are read, the latter with "
            f"a distribution of uniform, int_uniform or log_uniform_values; got "
            f"{kind[:40] or 'one bound alone'!r}"
        )
    low, high = value["min"], value["max"]
    is_whole = kind == "int_uniform" or (not kind and all(type(end) is int for end in (low, high)))
    return _make_range(
        _read_number(low, where), _read_number(high, where), where,
        log=kind == "log_uniform_values", is_whole=is_whole, count=None,
    )  # fmt: skip


def _read_ato(value: Mapping[str, Any], where: str) -> object:
    allowed = ("param_type", "param_range", "num_samples", "space_type", "categories")
    _allow(value, allowed, where)
    kind = str(value["param_type"]).upper()
    if kind == "CATEGORY":
        return _list_choices(value.get("categories", ()), where)
    spacing = str(value.get("space_type", "LINEAR")).upper()
    if kind not in ("FLOAT", "INTEGER") or spacing not in ("LOG", "LINEAR"):
        raise SchemaValidationError(
            f"{where}: param_type must be FLOAT, INTEGER or CATEGORY, and space_type LOG or "
            f"LINEAR; got {kind[:40]!r} and {spacing[:40]!r}"
        )
    ends = value.get("param_range")
    if not isinstance(ends, (list, tuple)) or len(ends) != 2:
        raise SchemaValidationError(f"{where}: param_range must be [LOW, HIGH]")
    count = value.get("num_samples")
    if count is not None:
        count = _make_whole(_read_number(count, where), where)
    return _make_range(
        _read_number(ends[0], where), _read_number(ends[1], where), where,
        log=spacing == "LOG", is_whole=kind == "INTEGER", count=count,
    )  # fmt: skip


def _list_choices(choices: object, where: str) -> list[object]:
    if not isinstance(choices, (list, tuple)):
        raise SchemaValidationError(f"{where} must have a list of choices")
    return _check_choices(list(choices), where)


def _allow(value: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    odd = [name for name in value if name not in names]
    if odd:
        raise SchemaValidationError(
            f"{where}: {odd[0]!r} is not known here; there are {', '.join(names)}"
        )
