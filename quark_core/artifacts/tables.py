"""Tables of all kinds as columns and rows of JSON values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import normalize_json

# As they are; anything else is looked at, one by one.
_PLAIN = (int, bool, type(None))
_NON_FINITE = ("NaN", "Infinity", "-Infinity")
_IMAGE_KEYS = {"image", "width", "height"}
_TEXTS = (str, float, list, dict, tuple)


def encode_table(
    data: Any,
    columns: Sequence[str] | None,
    keep_cell: Callable[[Any], dict[str, Any] | None] | None = None,
) -> dict[str, Any]:
    """A table as `{"columns": [names], "rows": [[values]]}`.

    Args:
        data: Rows (with `columns`), a mapping of columns, mappings as rows, or
            a table of pandas, Polars or pyarrow. What is missing in a pandas
            table becomes None; an index that is no mere numbering is a column.
        columns: Names of the columns; of a table that has names, which ones.
        keep_cell: Told of each value that is no JSON; what it returns stands for the value,
            unless that is None.

    Dates and times become ISO 8601, decimals texts; NaN and the infinities of
    plain rows become the strings that Quark's JSON has for them.

    Raises:
        SchemaValidationError: Nothing of these, names that repeat, rows of
            unequal length, or a value that JSON cannot hold; the message says where.
    """
    names = None if columns is None else _check_columns(columns)
    found, rows = _read(data, names)
    if names is not None and found != names:
        absent = [name for name in names if name not in found]
        if absent:
            raise SchemaValidationError(
                f"columns: {absent[0]!r:.60} is not one of the table's: {', '.join(found):.200}"
            )
        places = [found.index(name) for name in names]
        rows = [[row[place] for place in places] for row in rows]
        found = names
    _check_columns(found)
    width = len(found)
    cells = []
    for index, row in enumerate(rows):
        if len(row) != width:
            raise SchemaValidationError(
                f"rows[{index}] has {len(row)} values, but there are {width} columns"
            )
        cells.append([value if type(value) in _PLAIN else None for value in row])
        for place, value in enumerate(row):
            if type(value) not in _PLAIN:
                kept = keep_cell(value) if keep_cell and type(value) not in _TEXTS else None
                cells[-1][place] = (
                    kept if kept is not None else _settle(value, f"rows[{index}].{found[place]}")
                )
    return {"columns": found, "rows": cells}


def _read(data: Any, names: list[str] | None) -> tuple[list[str], list[Sequence[Any]]]:
    library = type(data).__module__.partition(".")[0]
    if library == "pandas" and hasattr(data, "to_frame") and not hasattr(data, "columns"):
        data = data.to_frame()
    if library == "pandas" and hasattr(data, "itertuples"):
        if type(data.index).__name__ != "RangeIndex":
            # An index that says something is a column, such as the groups of a groupby.
            data = data.reset_index()
        missing = data.isna()
        return [str(name) for name in data.columns], [
            [None if gone else value for value, gone in zip(row, gaps, strict=True)]
            for row, gaps in zip(
                data.itertuples(index=False, name=None),
                missing.itertuples(index=False, name=None),
                strict=True,
            )
        ]
    if library == "polars" and hasattr(data, "rows"):
        return list(data.columns), list(data.rows())
    if library == "pyarrow" and hasattr(data, "to_pydict"):
        _check_columns(data.schema.names)
        data = data.to_pydict()
    if isinstance(data, Mapping):
        return _read_columns(data)
    if hasattr(data, "tolist"):
        data = data.tolist()
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise SchemaValidationError(
            "data must be rows, a mapping of columns, or a table of pandas, Polars or pyarrow, "
            f"not {type(data).__name__}"
        )
    rows = list(data)
    if rows and all(isinstance(row, Mapping) for row in rows):
        found = list(dict.fromkeys(str(name) for row in rows for name in row))
        named = [{str(name): value for name, value in row.items()} for row in rows]
        for index, row in enumerate(rows):
            if len(named[index]) != len(row):
                raise SchemaValidationError(f"rows[{index}] has names that are equal as text")
        return found, [[row.get(name) for name in found] for row in named]
    if names is None:
        raise SchemaValidationError("columns must be given: the rows have no names")
    for index, row in enumerate(rows):
        rows[index] = row.tolist() if hasattr(row, "tolist") else row
        if isinstance(rows[index], (str, bytes, Mapping)) or not isinstance(rows[index], Sequence):
            raise SchemaValidationError(
                f"rows[{index}] must be a sequence of values, not {type(row).__name__}"
            )
    return names, rows


def _read_columns(data: Mapping[Any, Any]) -> tuple[list[str], list[Sequence[Any]]]:
    lists: dict[str, list[Any]] = {}
    for name, values in data.items():
        plain = values.tolist() if hasattr(values, "tolist") else values
        if isinstance(plain, (str, bytes, Mapping)) or not isinstance(plain, Iterable):
            raise SchemaValidationError(
                f"data[{name!r:.60}] must be a column of values, not {type(values).__name__}"
            )
        if str(name) in lists:
            raise SchemaValidationError(f"data has two columns {str(name)!r:.60}")
        lists[str(name)] = list(plain)
    lengths = {len(values) for values in lists.values()}
    if len(lengths) > 1:
        told = ", ".join(f"{name!r:.40}: {len(values)}" for name, values in lists.items())
        raise SchemaValidationError(f"data has columns of unequal length: {told:.300}")
    return list(lists), [list(row) for row in zip(*lists.values(), strict=True)]


def _check_columns(columns: Any) -> list[str]:
    if isinstance(columns, (str, bytes)) or not isinstance(columns, Iterable):
        raise SchemaValidationError(
            f"columns must be a sequence of str, not {type(columns).__name__}"
        )
    names = list(columns)
    for index, name in enumerate(names):
        if not isinstance(name, str):
            raise SchemaValidationError(
                f"columns[{index}] must be a str, not {type(name).__name__}"
            )
        if name in names[:index]:
            raise SchemaValidationError(f"columns holds {name!r:.60} twice")
    return [str(name) for name in names]


def _settle(value: Any, where: str) -> Any:
    kind = type(value)
    if kind is str or kind is int or value is None or kind is bool:
        return normalize_json(value, where)
    if kind is float and math.isfinite(value):
        return value
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if type(value).__name__ == "Timedelta":
        return str(value)
    return str(value) if isinstance(value, Decimal) else normalize_json(value, where)


def list_column_types(table: Mapping[str, Any]) -> list[str]:
    """What each column holds: number, boolean, text, image, json or mixed; empty for nothing.

    Args:
        table: As `encode_table` returns it.
    """
    found: list[set[str]] = [set() for _ in table["columns"]]
    for row in table["rows"]:
        for place, value in enumerate(row):
            found[place].add(_name_type(value))
    names = []
    for kinds in found:
        kinds.discard("empty")
        names.append(kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "empty")
    return names


def _name_type(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)) or value in _NON_FINITE:
        return "number"
    if isinstance(value, str):
        return "text"
    is_image = isinstance(value, dict) and "image" in value and set(value) <= _IMAGE_KEYS
    return "image" if is_image else "json"
