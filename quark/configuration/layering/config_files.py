"""Reads and writes configurations in files: JSON, TOML and YAML, with the line of each setting."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import normalize_json

# Configurations in files: JSON, TOML and YAML, with the line of each setting.
#
# Nothing in a file is evaluated: YAML is read by the safe loader of PyYAML, which knows no Python.
# A file may be a stranger's, so that its size, its depth and the number of its values have bounds;
# aliases of YAML, which unfold, are counted as what they unfold to.

FILE_ENDINGS = (".json", ".toml", ".yaml", ".yml")
"""How the names of files end that can be read."""

_MOST_BYTES = 4_000_000
_MOST_VALUES = 100_000
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class FileValues:
    """What stands in a file.

    Attributes:
        values: Its values, in plain types.
        lines: Setting -> the line that it stands in, as far as that is known.
    """

    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)


def read_config_file(path: Path) -> FileValues:
    """Read a configuration from a file, by the ending of its name.

    Raises:
        SchemaValidationError: Another ending, no file, too large, or not what its name says; the
            message names the file and, where that is known, the line.
    """
    if path.suffix.lower() not in FILE_ENDINGS:
        raise SchemaValidationError(
            f"{path}: the name of a config file must end with {', '.join(FILE_ENDINGS)}"
        )
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise SchemaValidationError(f"{path} cannot be read: {said}") from error
    if len(content) > _MOST_BYTES:
        raise SchemaValidationError(
            f"{path} has more than {_MOST_BYTES // 1000000} MB, the maximum for a config file"
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SchemaValidationError(f"{path} is not UTF-8: {error.reason}") from error
    return read_config_text(text, path.suffix.lower(), str(path))


def read_config_text(text: str, ending: str, name: str) -> FileValues:
    """Read a configuration from the text of a file.

    Args:
        text: The text.
        ending: `.json`, `.toml`, `.yaml` or `.yml`.
        name: The file, for messages.

    Raises:
        SchemaValidationError: As `read_config_file`.
    """
    try:
        if ending == ".json":
            found: Any = json.loads(text, object_pairs_hook=_refuse_twins)
            lines = dict(_find_json_lines(text))
        elif ending == ".toml":
            found = tomllib.loads(text)
            lines = dict(_find_toml_lines(text))
        else:
            found, lines = _read_yaml(text)
    except SchemaValidationError as error:
        raise SchemaValidationError(f"{name}: {error}") from None
    except (ValueError, RecursionError) as error:
        said = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise SchemaValidationError(f"{name} cannot be read: {said!s:.200}") from error
    found = {} if found is None else found
    if not isinstance(found, dict):
        raise SchemaValidationError(
            f"{name} contains a {type(found).__name__}, but a config must be a mapping"
        )
    _check_size(found, name)
    return FileValues(found, lines)


def _refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [key for key, _ in pairs]
        twin = next(key for key in names if names.count(key) > 1)
        raise SchemaValidationError(f"the key {twin[:60]!r} occurs twice in one object")
    return found


def _check_size(values: Mapping[str, Any], name: str) -> None:
    """Refuse what unfolds to more than a configuration has, before anything walks over it."""
    count = 0
    waiting: list[tuple[Any, int]] = [(values, 0)]
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if count > _MOST_VALUES:
            raise SchemaValidationError(
                f"{name} has more than {_MOST_VALUES:,} values, the maximum for a config"
            )
        if depth > _MAX_DEPTH:
            raise SchemaValidationError(f"{name} is nested deeper than {_MAX_DEPTH} levels")
        if isinstance(value, dict):
            waiting += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            waiting += [(item, depth + 1) for item in value]


# YAML


def _import_yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise SchemaValidationError(
            "YAML requires PyYAML: pip install 'quark-tracker[yaml]'. JSON and TOML do not"
        ) from None
    return yaml


def _read_yaml(text: str) -> tuple[Any, dict[str, int]]:
    yaml = _import_yaml()
    loader = yaml.SafeLoader(text)
    # As everybody means them: 1e-3 is a number, and 2026-05-07 the text that it is.
    resolvers = {
        first: [each for each in known if each[0] not in (_FLOAT_TAG, _TIME_TAG)]
        for first, known in loader.yaml_implicit_resolvers.items()
    }
    for first in "-+0123456789.":
        resolvers.setdefault(first, []).append((_FLOAT_TAG, _YAML_FLOAT))
    loader.yaml_implicit_resolvers = resolvers
    try:
        root = loader.get_single_node()
        lines = {} if root is None else dict(_find_yaml_lines(root, yaml))
        return (None if root is None else loader.construct_document(root)), lines
    except yaml.YAMLError as error:
        spot = getattr(error, "problem_mark", None)
        where = f"line {spot.line + 1}: " if spot is not None else ""
        said = getattr(error, "problem", None) or error
        raise SchemaValidationError(f"{where}{said!s:.200}") from error
    finally:
        loader.dispose()


_FLOAT_TAG = "tag:yaml.org,2002:float"
_TIME_TAG = "tag:yaml.org,2002:timestamp"
_YAML_FLOAT = re.compile(
    r"""^(?:[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)
    |[-+]?\.[0-9_]+(?:[eE][-+]?[0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)


def _find_yaml_lines(root: Any, yaml: Any) -> Iterator[tuple[str, int]]:
    """Setting and line; refuses a key that is there twice, and what unfolds without end."""
    count = 0
    waiting: list[tuple[Any, str, int]] = [(root, "", 0)]
    while waiting:
        node, above, depth = waiting.pop()
        count += 1
        if count > _MOST_VALUES or depth > _MAX_DEPTH:
            raise SchemaValidationError(
                f"it expands to more than {_MOST_VALUES:,} values, or {_MAX_DEPTH} levels"
            )
        if isinstance(node, yaml.SequenceNode):
            waiting += [(item, "", depth + 1) for item in node.value]
            continue
        if not isinstance(node, yaml.MappingNode):
            continue
        seen: set[str] = set()
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen and name != "<<":
                raise SchemaValidationError(f"line {line}: the key {name[:60]!r} occurs twice")
            seen.add(name)
            path = f"{above}{name}"
            if above is not None and name != "<<":
                yield path, line
            # What is merged in stands elsewhere, and has the same keys.
            waiting.append((value, above if name == "<<" else f"{path}.", depth + 1))


# JSON and TOML: their parsers tell no lines

_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:\n]')


def _find_json_lines(text: str) -> Iterator[tuple[str, int]]:
    """Setting and line of a text that is known to be JSON."""
    line = 1
    # Of each open bracket: the path above it, or None within a list; and the key that is open.
    above: list[str | None] = []
    waiting, key_line = "", 1
    expects_key = False
    for found in _JSON_TOKEN.finditer(text):
        mark = found[0]
        if mark == "\n":
            line += 1
        elif mark == "{":
            inside = above[-1] if above else ""
            is_listed = bool(above) and inside is None
            above.append(None if is_listed else f"{inside}{waiting}{'.' if above else ''}")
            expects_key = True
        elif mark == "[":
            above.append(None)
            expects_key = False
        elif mark in "}]":
            above.pop()
            expects_key = False
        elif mark == ",":
            expects_key = bool(above) and above[-1] is not None
        elif mark == ":":
            expects_key = False
        elif expects_key and above and above[-1] is not None:
            waiting, key_line = json.loads(mark), line
            yield f"{above[-1]}{waiting}", key_line
            expects_key = False


_TOML_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_TOML_PATH = rf"{_TOML_KEY}(?:[ \t]*\.[ \t]*{_TOML_KEY})*"
_TOML_LINE = re.compile(
    rf"[ \t]*(?:\[(?P<many>\[)?[ \t]*(?P<table>{_TOML_PATH})[ \t]*\]|(?P<key>{_TOML_PATH})[ \t]*=)"
)
_TOML_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|\'\'\'.*?\'\'\'|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*|[\[\]{}\n]',
    re.DOTALL,
)


def _find_toml_lines(text: str) -> Iterator[tuple[str, int]]:
    """Setting and line of a text that is known to be TOML, keys of inline tables left out."""
    table: str | None = ""
    for line, start in _list_toml_starts(text):
        found = _TOML_LINE.match(text, start)
        if found is None:
            continue
        if found["table"]:
            # Tables in a list have no keys of their own.
            table = None if found["many"] else f"{_spell_toml(found['table'])}."
        elif table is not None:
            yield f"{table}{_spell_toml(found['key'])}", line


def _list_toml_starts(text: str) -> Iterator[tuple[int, int]]:
    """Number and start of each line that begins outside of strings and brackets."""
    yield 1, 0
    line, depth = 1, 0
    for found in _TOML_TOKEN.finditer(text):
        mark = found[0]
        if mark == "\n":
            line += 1
            if depth == 0:
                yield line, found.end()
        elif mark in "[{":
            depth += 1
        elif mark in "]}":
            depth -= 1
        else:
            line += mark.count("\n")


def _spell_toml(path: str) -> str:
    return ".".join(each.strip().strip("\"'") for each in path.split("."))


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
        text = str(_import_yaml().safe_dump(plain, sort_keys=False, allow_unicode=True))
    else:
        raise SchemaValidationError(f"{path}: a config can be saved as .json, .toml, .yaml or .yml")
    path.write_text(text, encoding="utf-8")


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
        raise SchemaValidationError(f"config.{key} is None, which TOML cannot represent")
    return repr(value)
