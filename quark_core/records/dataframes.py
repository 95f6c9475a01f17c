"""Columns as tables of pandas, Polars and Arrow.

All three have the fields of the record type, in its order, with `timestamp`
(UTC, microseconds) in place of `time_us`; the derived column `finite` is left
out. None is a null everywhere, and a stored NaN stays a NaN.

    field             Arrow                          Polars       pandas
    step, epoch …     int64, null for None           Int64        Int64 (int64 where never None)
    mean, std …       float64, null for None         Float64      Float64 (float64 where never None)
    timestamp         timestamp[us, UTC]             Datetime     datetime64[us, UTC]
    texts             dictionary of string           String       object, None for None
    tensor_shape      list of int64                  List(Int64)  object: tuples
    payload, metadata string: JSON with sorted keys  String       object: dicts

An Arrow schema carries `quark.kind` and `quark.schema_version`; a field of
JSON text carries `quark.encoding` = `json`. None of the tables shares memory
that changing it would change the columns by.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from quark_core.errors import QuarkError
from quark_core.records import RECORD_TYPES
from quark_core.records.schema import CURRENT_SCHEMA_VERSION, column_types

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]
    import polars
    import pyarrow  # type: ignore[import-untyped]

    from quark_core.records.columns import Array, Columns

_LIST_ITEMS = {int: "i", float: "f", str: "t"}


class MissingLibraryError(QuarkError, ImportError):
    """A library that Quark does not need by itself is not installed; the message says how."""


class TableField(NamedTuple):
    """One field of a table.

    Attributes:
        name: Its name in the table.
        source: Its name in the columns.
        encoding: `i` integer, `f` float, `t` text, `u` time, `l` list, `j` JSON.
        nullable: Whether it may be None.
        item: Encoding of the items of a list, or "".
    """

    name: str
    source: str
    encoding: str
    nullable: bool
    item: str = ""


@cache
def table_fields(kind: str) -> tuple[TableField, ...]:
    """The fields of a kind's tables, in the order of its record type."""
    types = {"run_id": "t", "writer_id": "t", "attempt": "i", "rank": "i", **column_types(kind)}
    hints = get_type_hints(RECORD_TYPES[kind])
    fields = []
    for name in RECORD_TYPES[kind].__struct_fields__:
        if name == "time_us":
            fields.append(TableField("timestamp", name, "u", False))
            continue
        options = get_args(hints[name]) or (hints[name],)
        nullable = type(None) in options
        items = [get_args(option)[0] for option in (hints[name], *options) if _is_tuple(option)]
        if items and items[0] in _LIST_ITEMS:
            fields.append(TableField(name, name, "l", nullable, _LIST_ITEMS[items[0]]))
        else:
            fields.append(TableField(name, name, types[name], nullable))
    return tuple(fields)


def encode_canonical(value: Any) -> str:
    """A JSON value as text, with sorted keys and without blanks."""
    return msgspec.json.encode(value, order="deterministic").decode()


def build_arrow_schema(kind: str) -> pyarrow.Schema:
    """The schema of a kind's Arrow tables, the same however many rows there are.

    Raises:
        MissingLibraryError: pyarrow is not installed.
    """
    pa = import_library("pyarrow", "arrow", "to_arrow()")
    items = {"i": pa.int64(), "f": pa.float64(), "t": pa.string()}
    types = {
        **items,
        "t": pa.dictionary(pa.int32(), pa.string()),
        "u": pa.timestamp("us", tz="UTC"),
        "j": pa.string(),
    }
    return pa.schema(
        [
            pa.field(
                field.name,
                # As Parquet names the items of a list.
                pa.list_(pa.field("element", items[field.item]))
                if field.item
                else types[field.encoding],
                nullable=field.nullable,
                metadata={"quark.encoding": "json"} if field.encoding == "j" else None,
            )
            for field in table_fields(kind)
        ],
        metadata={"quark.kind": kind, "quark.schema_version": str(CURRENT_SCHEMA_VERSION)},
    )


def to_arrow(columns: Columns) -> pyarrow.Table:
    """An Arrow table, of the types that this module lists.

    Raises:
        MissingLibraryError: pyarrow is not installed.
    """
    pa = import_library("pyarrow", "arrow", "to_arrow()")
    schema = build_arrow_schema(columns.kind)
    arrays = []
    for field, target in zip(table_fields(columns.kind), schema, strict=True):
        if field.encoding in ("i", "f", "u"):
            # Arrow shares the memory of an array that it is given.
            values = columns[field.source].copy()
            array = pa.array(values, mask=_find_nulls(columns, field), from_pandas=False)
            arrays.append(array.cast(target.type))
        elif field.encoding == "t":
            texts = pa.array(columns[field.source].tolist(), type=pa.string())
            arrays.append(texts.dictionary_encode().cast(target.type))
        else:
            arrays.append(pa.array(_list_objects(columns, field), type=target.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def to_pandas(columns: Columns) -> pandas.DataFrame:
    """A pandas DataFrame, of the types that this module lists; needs no pyarrow.

    Raises:
        MissingLibraryError: pandas is not installed.
    """
    pd = import_library("pandas", "pandas", "to_pandas()")
    masked = {"i": pd.arrays.IntegerArray, "f": pd.arrays.FloatingArray}
    series = {}
    for field in table_fields(columns.kind):
        values = columns[field.source]
        made: Any = values
        if field.encoding == "u":
            made = pd.DatetimeIndex(values.astype("datetime64[us]")).tz_localize("UTC")
        elif field.encoding in masked and field.nullable:
            made = masked[field.encoding](values.copy(), columns.is_null(field.source).copy())
        elif field.encoding == "j":
            made = _fill_objects([None if item is None else _copy_json(item) for item in values])
        dtype = object if field.encoding in ("t", "j", "l") else None
        series[field.name] = pd.Series(made, dtype=dtype, copy=True)
    frame: pandas.DataFrame = pd.DataFrame(series)
    return frame


def to_polars(columns: Columns) -> polars.DataFrame:
    """A Polars DataFrame, of the types that this module lists; needs no pandas or pyarrow.

    Raises:
        MissingLibraryError: Polars is not installed.
    """
    pl = import_library("polars", "polars", "to_polars()")
    plain = {"i": pl.Int64, "f": pl.Float64, "t": pl.String, "j": pl.String}
    series = []
    for field in table_fields(columns.kind):
        if field.encoding in ("i", "f", "u"):
            # Polars may share the memory of an array that it is given.
            made = pl.Series(field.name, columns[field.source].copy())
            nulls = _find_nulls(columns, field)
            if nulls is not None:
                nothing = pl.Series(field.name, [None], dtype=made.dtype)
                made = made.zip_with(pl.Series(~nulls), nothing.new_from_index(0, len(made)))
            if field.encoding == "u":
                made = made.cast(pl.Datetime("us", "UTC"))
        else:
            dtype = pl.List(plain[field.item]) if field.item else plain[field.encoding]
            made = pl.Series(field.name, _list_objects(columns, field), dtype=dtype)
        series.append(made)
    frame: polars.DataFrame = pl.DataFrame(series)
    return frame


def import_library(name: str, extra: str, call: str) -> Any:
    """Import a module of a library that comes with an extra.

    Raises:
        MissingLibraryError: It is not installed; the message says what needs
            it and how to install it.
    """
    try:
        return import_module(name)
    except ImportError as error:
        library = name.partition(".")[0]
        raise MissingLibraryError(
            f'{call} needs {library}, which is not installed: pip install "quark-tracker[{extra}]"',
            name=library,
        ) from error


def _find_nulls(columns: Columns, field: TableField) -> Array | None:
    """Which numbers are None; None where there is no such one."""
    if not field.nullable:
        return None
    nulls = columns.is_null(field.source)
    return nulls if nulls.any() else None


def _list_objects(columns: Columns, field: TableField) -> list[Any]:
    """Values of a column of objects as Arrow and Polars take them."""
    values: list[Any] = columns[field.source].tolist()
    if field.encoding == "j":
        return [None if value is None else encode_canonical(value) for value in values]
    if field.encoding == "l":
        return [None if value is None else list(value) for value in values]
    return values


def _fill_objects(values: list[Any]) -> Array:
    import numpy as np

    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def _copy_json(value: Any) -> Any:
    """A JSON value that its holder may change."""
    if isinstance(value, dict):
        return {key: _copy_json(item) for key, item in value.items()}
    return [_copy_json(item) for item in value] if isinstance(value, list) else value


def _is_tuple(option: Any) -> bool:
    return get_origin(option) is tuple
