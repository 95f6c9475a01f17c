"""Tables and images of other libraries, taken apart into arrays and lists."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any


def _take_pandas_frame(frame: Any) -> object:
    columns = [(name, _take_pandas_series(frame.iloc[:, at])) for at, name in enumerate(frame)]
    return [len(frame), _take_pandas_values(frame.index), columns]


def _take_pandas_series(series: Any) -> object:
    return [str(series.dtype), _take_pandas_values(series)]


def _take_pandas_values(values: Any) -> object:
    """Numbers as an array; everything else value by value, missing ones as None."""
    dtype = values.dtype
    if getattr(dtype, "kind", "O") in "biufc" and type(dtype).__module__.startswith("numpy"):
        return values.to_numpy()
    if getattr(dtype, "kind", "O") in "mM":
        return [str(dtype), values.to_numpy(dtype="int64" if dtype.kind == "m" else None)]
    items = values.array.tolist() if hasattr(values.array, "tolist") else list(values.array)
    return [None if _is_missing(item) else item for item in items]


def _is_missing(item: Any) -> bool:
    return item is None or type(item).__name__ in ("NAType", "NaTType") or item != item


def _take_polars_frame(frame: Any) -> object:
    return [(series.name, _take_polars_series(series)) for series in frame.get_columns()]


def _take_polars_series(series: Any) -> object:
    dtype = str(series.dtype)
    if series.dtype.is_numeric() and not series.null_count() and "Decimal" not in dtype:
        return [dtype, series.to_numpy()]
    return [dtype, series.to_list()]


def _take_arrow_table(table: Any) -> object:
    names = table.schema.names
    return [(name, _take_arrow_column(table.column(at))) for at, name in enumerate(names)]


def _take_arrow_column(column: Any) -> object:
    pa: Any = sys.modules["pyarrow"]

    kind = column.type
    is_plain = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if is_plain and not column.null_count:
        return [str(kind), column.to_numpy()]
    return [str(kind), column.to_pylist()]


def _take_image(image: Any) -> object:
    import numpy as np

    return [image.mode, image.size, image.getpalette(), np.asarray(image)]


def _take_masked(array: Any) -> object:
    return [array.filled(0), array.mask]


TABLE_FORMS: Mapping[str, Callable[[Any], object]] = {
    "numpy.MaskedArray": _take_masked,
    "pandas.DataFrame": _take_pandas_frame,
    "pandas.Series": _take_pandas_series,
    "pandas.Index": _take_pandas_values,
    "polars.DataFrame": _take_polars_frame,
    "polars.Series": _take_polars_series,
    "pyarrow.Table": _take_arrow_table,
    "pyarrow.RecordBatch": _take_arrow_table,
    "pyarrow.ChunkedArray": _take_arrow_column,
    "pyarrow.Array": _take_arrow_column,
    "PIL.Image": _take_image,
}
"""Name of a type, with the package that it is of -> what takes a value of it apart."""
