"""What people expect of a CSV logger, in a folder of their own choice.

    metrics.csv   one row per step; a column is added when its metric appears
    config.json   the configuration, merged into what the file has already
    <key>.csv     the newest table of that key

All of it is derived from the mirror's own files. A later run that publishes
into the same folder replaces metrics.csv and tables, and merges its config.

Payloads, which lie under their hashes, get names for people in the mirror's own
folder too.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quark_backends.csv.files import encode_rows
from quark_backends.mirroring.saved_state import replace_file
from quark_core.api import (
    ARTIFACT_STORAGE_LAYOUT,
    ArtifactRecord,
    PayloadFolder,
    decode_json,
    decode_name,
    is_sha256,
    object_path,
    split_path,
)

_OURS = ("metrics",)
_ROOT = ARTIFACT_STORAGE_LAYOUT["root"]


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
    replace_file(path, text.encode("utf-8", "replace"), is_synced=True)


def publish_table(
    directory: Path, key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> None:
    """Replace `<key>.csv`, whole; a slash in the key makes folders.

    Raises:
        OSError: The file cannot be written.
    """
    name = f"table-{key}" if key.lower() in _OURS else key
    path = directory.joinpath(*f"{name}.csv".split("/"))
    data = encode_rows([columns, *(list(map(_spell, row)) for row in rows)])
    replace_file(path, data, is_synced=True)


def find_tables(
    folder: Path, records: Sequence[ArtifactRecord]
) -> list[tuple[str, list[str], list[list[Any]]]]:
    """Key, columns and rows of the tables among artifacts whose payloads are in the mirror.

    Raises:
        OSError: A payload cannot be read.
    """
    found = []
    for record in records:
        if record.artifact_type != "table" or record.payload_format != "json":
            continue
        if record.payload_relative_path is None or split_path(record.artifact_key) is None:
            continue
        path = PayloadFolder(folder).find(record.sha256)
        if path is None:
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
    parts = split_path(given) or ("",)
    return given if all(part.strip(". ") for part in parts) else key


def _spell(value: Any) -> Any:
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return value


def name_payloads(folder: Path, records: Sequence[ArtifactRecord]) -> None:
    """Give payloads the names that their records have in the run's own directory.

    Raises:
        OSError: The disk takes no more.
    """
    for record in records:
        if not is_sha256(record.sha256):
            continue
        target = folder / object_path(record.sha256)
        path = _resolve(folder, record.payload_relative_path)
        if path is not None and path != target and target.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_symlink():
                # Without links the payload lies under its hash alone, as in the run's directory.
                with contextlib.suppress(FileExistsError, NotImplementedError, PermissionError):
                    os.symlink(os.path.relpath(target, path.parent), path)
        path = _resolve(folder, record.metadata_relative_path)
        if path is not None and not path.exists():
            text = msgspec.json.format(msgspec.json.encode(record.to_dict()), indent=2)
            replace_file(path, text, is_synced=True)


def _resolve(folder: Path, relative: str | None) -> Path | None:
    """A path of a record's, unless it leads out of the artifacts."""
    if relative is None:
        return None
    parts = split_path(relative)
    return None if parts is None or parts[0] != _ROOT else folder.joinpath(*parts)
