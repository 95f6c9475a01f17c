"""Writes a configuration into a file: JSON, TOML or YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import normalize_json

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def save_values(values: Mapping[str, Any], path: Path) -> None:
    """Write values into a file, in the format that its name ends with.

    Raises:
        SchemaValidationError: Another ending, or a value that the format cannot hold.
        OSError: The file cannot be written.
    """
    ending = path.suffix.lower()
    plain = normalize_json(values, "config")
    if ending == ".json":
        text = json.dumps(plain, indent=2, ensure_ascii=False) + "\n"
    elif ending == ".toml":
        text = "\n".join(_write_table(plain, ())) + "\n"
    elif ending in (".yaml", ".yml"):
        text = _write_yaml(plain)
    else:
        raise SchemaValidationError(
            f"{path}: a configuration is saved as .json, .toml, .yaml or .yml"
        )
    path.write_text(text, encoding="utf-8")


def _write_yaml(values: dict[str, Any]) -> str:
    try:
        import yaml
    except ImportError:
        raise SchemaValidationError(
            "YAML needs PyYAML: pip install 'quark-tracker[yaml]'; JSON and TOML need nothing"
        ) from None
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def _write_table(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Lines of a table: its own settings first, since a table below ends it."""
    tables = {key: value for key, value in values.items() if isinstance(value, dict) and value}
    if path and (len(tables) < len(values) or not values):
        yield f"[{'.'.join(map(_write_key, path))}]"
    for key, value in values.items():
        if key not in tables:
            yield f"{_write_key(key)} = {_write_value(value, '.'.join((*path, key)))}"
    for key, value in tables.items():
        yield from _write_table(value, (*path, key))


def _write_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _write_text(key)


def _write_text(text: str) -> str:
    # What JSON escapes TOML does too, but for one character that only TOML does not take.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _write_value(value: Any, key: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _write_text(value)
    if isinstance(value, list):
        return f"[{', '.join(_write_value(item, key) for item in value)}]"
    if isinstance(value, dict):
        inner = (f"{_write_key(k)} = {_write_value(v, f'{key}.{k}')}" for k, v in value.items())
        return f"{{{', '.join(inner)}}}"
    if value is None:
        raise SchemaValidationError(f"config.{key} is None, which TOML has no word for")
    return repr(value)
