"""What people expect of a CSV logger, in a folder of their own choice.

    metrics.csv   one row per step; a column is added when its metric appears
    config.json   the configuration, merged into what the file has already
    <key>.csv     the newest table of that key

All of it is derived from the mirror's own files. A later run that publishes
into the same folder replaces metrics.csv and tables, and merges its config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quark_backends.csv.files import encode_rows, write_atomically
from quark_core.artifacts.layout import object_path
from quark_core.json_object import decode_json
from quark_core.names import decode_name
from quark_core.records import ArtifactRecord

__all__ = ["find_tables", "publish_config", "publish_table"]

_OURS = ("metrics",)


def publish_config(directory: Path, values: Mapping[str, Any]) -> None:
    """Merge a configuration into config.json; what is no JSON object there is replaced.

    Raises:
        OSError: The file cannot be written.
    """
    path = directory / "config.json"
    merged: dict[str, Any] = {}
    try:
        loaded = json.loads(path.read_text("utf-8"))
        merged = loaded if isinstance(loaded, dict) else {}
    except (FileNotFoundError, ValueError):
        pass
    merged.update(values)
    text = json.dumps(merged, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, text.encode("utf-8", "replace"))


def publish_table(
    directory: Path, key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> None:
    """Replace `<key>.csv`, whole; a slash in the key makes folders.

    Raises:
        OSError: The file cannot be written.
    """
    name = f"table-{key}" if key.lower() in _OURS else key
    path = directory.joinpath(*f"{name}.csv".split("/"))
    write_atomically(path, encode_rows([columns, *(list(map(_spell, row)) for row in rows)]))


def find_tables(
    folder: Path, records: Sequence[ArtifactRecord]
) -> list[tuple[str, list[str], list[list[Any]]]]:
    """Key, columns and rows of the tables among artifacts whose payloads are in the mirror.

    Raises:
        OSError: A payload cannot be read.
    """
    found = []
    for record in records:
        path = folder / object_path(record.sha256)
        if record.artifact_type != "table" or record.payload_format != "json":
            continue
        if record.payload_relative_path is None or not path.is_file():
            continue
        try:
            table = decode_json(path.read_bytes())
            columns, rows = list(table["columns"]), [list(row) for row in table["rows"]]
        except (ValueError, KeyError, TypeError):
            # An artifact of that type whose payload is no table of ours.
            continue
        found.append((_to_file_key(record.artifact_key), columns, rows))
    return found


def _to_file_key(key: str) -> str:
    """The key as it was given, where that is a path that leads nowhere else."""
    given = decode_name(key)
    harmless = given.isprintable() and "\\" not in given and not given.startswith("/")
    parts = given.split("/")
    return given if harmless and all(part.strip(". ") for part in parts) else key


def _spell(value: Any) -> Any:
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return value
