"""What runs are searched by besides their metrics: tags and configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quark_backends.store.connection import StoreConnection

__all__ = ["flatten_config", "write_config", "write_tags"]


def write_tags(connection: StoreConnection, run_pk: int, tags: Iterable[str]) -> None:
    """Make the tags that are searched those of a run."""
    connection.execute("DELETE FROM run_tag WHERE run_pk = ?", (run_pk,))
    connection.executemany(
        "INSERT INTO run_tag (run_pk, tag) VALUES (?, ?)", [(run_pk, tag) for tag in set(tags)]
    )


def write_config(connection: StoreConnection, run_pk: int, values: Mapping[str, Any]) -> None:
    """Make the configuration that is searched that of a run."""
    connection.execute("DELETE FROM run_config WHERE run_pk = ?", (run_pk,))
    connection.executemany(
        "INSERT INTO run_config (run_pk, key, type, number, text) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (run_pk, key) DO UPDATE SET"
        " type = excluded.type, number = excluded.number, text = excluded.text",
        [(run_pk, *row) for row in flatten_config(values)],
    )


def flatten_config(
    values: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str, float | None, str | None]]:
    """Key, type, number and text of each leaf of a configuration; lists are leaves.

    Keys of nested mappings are joined by a dot.
    """
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flatten_config(value, f"{key}.")
        elif value is None:
            yield key, "null", None, None
        elif isinstance(value, bool):
            yield key, "bool", float(value), None
        elif isinstance(value, (int, float)):
            try:
                number = float(value)
                # SQLite keeps no NaN; no other database shall find one either.
                yield key, "number", None if number != number else number, None
            except OverflowError:
                yield key, "text", None, str(value)
        elif isinstance(value, str):
            yield key, "text", None, value
        else:
            yield key, "json", None, json.dumps(value, ensure_ascii=False)
