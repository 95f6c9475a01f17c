"""The columns that a read returns, in persistence order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from quark_core.errors import import_library
from quark_core.records import RECORD_TYPES, StreamRecord
from quark_core.records.codec import (
    MISSING_INDEX,
    Column,
    DecodedBody,
    encode_columns,
    encode_float_array,
    encode_integer_array,
)
from quark_core.records.query import Query
from quark_core.records.schema import (
    CURRENT_SCHEMA_VERSION,
    boolean_fields,
    column_types,
    optional_fields,
)

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]
    import polars
    import pyarrow  # type: ignore[import-untyped]

Array = NDArray[Any]
"""A NumPy array of any type."""
MakeArray = Callable[[], Array]
"""Makes a column when it is first read."""

# What a kind of record measures; not finite only where the data was not.
_MEASURED = {"metric": "value", "batch": "loss"}
_ORIGIN = ("run_id", "writer_id", "attempt", "rank")


class Columns(Mapping[str, Array]):
    """Rows of one kind of record as a read-only mapping of numpy arrays.

    The rows stand in persistence order: by attempt, rank, start of the
    writer, then sequence. Every field of the record type is there. Integers
    are int64, with -1 where the record has None; floats are float64, with NaN
    for None (`is_null` tells it from a stored NaN); texts and JSON values are
    objects. Metrics have one more column, `finite`, False where the value is
    NaN or infinite; the value itself is kept as it was.

    Columns that nobody asks for are not made.

    Args:
        kind: Kind of the records.
        count: Number of rows.
        arrays: Field name -> array, or a function that makes it.
        nulls: Name of a column of floats -> which of its values are None.
        constants: Field name -> value, of fields that are known to be the same
            in every row, as the records have it.
    """

    __slots__ = ("_arrays", "_constants", "_nulls", "count", "kind")

    def __init__(
        self,
        kind: str,
        count: int,
        arrays: Mapping[str, Array | MakeArray],
        nulls: Mapping[str, Array] | None = None,
        constants: Mapping[str, Any] | None = None,
    ) -> None:
        self.kind = kind
        self.count = count
        self._arrays = dict(arrays)
        self._nulls = dict(nulls or {})
        self._constants = dict(constants or {})

    @classmethod
    def empty(cls, kind: str) -> Columns:
        """Columns of no rows."""
        dtypes = {"i": np.int64, "f": np.float64}
        arrays: dict[str, Array | MakeArray] = {
            name: np.empty(0, dtype=object if name.endswith("_id") else np.int64)
            for name in _ORIGIN
        }
        for name, encoding in column_types(kind).items():
            arrays[name] = np.empty(0, dtype=dtypes.get(encoding, object))
        return cls(kind, 0, arrays)

    @classmethod
    def from_records(cls, kind: str, records: Sequence[StreamRecord]) -> Columns:
        """Columns of records, in their order."""
        arrays: dict[str, Array | MakeArray] = {}
        nulls = {}
        for name, array in cls.empty(kind).items():
            if name == "finite":
                continue
            values = [getattr(record, name) for record in records]
            if array.dtype == object:
                arrays[name] = _fill_objects(values)
                continue
            is_null = np.array([value is None for value in values], dtype=np.bool_)
            missing = MISSING_INDEX if array.dtype == np.int64 else np.nan
            filled = [missing if value is None else value for value in values]
            arrays[name] = np.array(filled, dtype=array.dtype)
            if array.dtype == np.float64 and is_null.any():
                nulls[name] = is_null
        return cls(kind, len(records), arrays, nulls)

    @classmethod
    def from_body(
        cls, body: DecodedBody, origin: Mapping[str, Any], rows: Array | None = None
    ) -> Columns:
        """Columns of a batch's body, with the fields that the batch itself carries.

        Args:
            body: The body.
            origin: Values of the fields that all its rows have in common.
            rows: The places of those rows that are wanted; all by default.
        """
        count = body.count if rows is None else len(rows)
        arrays: dict[str, Array | MakeArray] = {
            name: partial(fill_array, count, origin[name]) for name in _ORIGIN
        }
        nulls = {}
        constants = {name: origin[name] for name in _ORIGIN}
        for name, encoding in column_types(body.kind).items():
            arrays[name] = partial(body.to_array, name, rows)
            column = body.column(name)
            if column.encoding == "c":
                constants[name] = column.head
            if encoding == "f":
                is_null = body.nulls(name)
                if is_null is not None:
                    nulls[name] = is_null if rows is None else is_null[rows]
        return cls(body.kind, count, arrays, nulls, constants)

    @classmethod
    def from_body_where(
        cls, body: DecodedBody, origin: Mapping[str, Any], equals: Mapping[str, str]
    ) -> Columns:
        """Of a batch's body only the rows whose texts are these; the others are not decoded."""
        mask: Array | bool = True
        for name, value in equals.items():
            mask = mask & body.column(name).equals(value, body.count)
            if mask is False:
                return cls.empty(body.kind)
        found = cls.from_body(body, origin, None if mask is True else np.flatnonzero(mask))
        for name, value in equals.items():
            found._arrays[name] = partial(fill_array, found.count, value)
            found._constants[name] = value
        return found

    @classmethod
    def concatenate(cls, kind: str, parts: Sequence[Columns]) -> Columns:
        """Rows of several parts, one after the other."""
        if not parts:
            return cls.empty(kind)
        if len(parts) == 1:
            return parts[0]
        kept = tuple(parts)

        def join(name: str) -> Array:
            return np.concatenate([part[name] for part in kept])

        count = sum(part.count for part in parts)
        arrays: dict[str, Array | MakeArray] = {
            name: partial(join, name) for name in parts[0]._arrays
        }
        with_nulls = {name for part in parts for name in part._nulls}
        nulls = {
            name: np.concatenate([part.is_null(name) for part in parts]) for name in with_nulls
        }
        constants = {
            name: value
            for name, value in parts[0]._constants.items()
            if all(part._has_constant(name, value) for part in parts)
        }
        types = column_types(kind)
        for name, value in constants.items():
            if name in _ORIGIN or types[name] == "t":
                # Nobody needs the parts for it.
                arrays[name] = partial(fill_array, count, value)
        return cls(kind, count, arrays, nulls, constants)

    def __getitem__(self, name: str) -> Array:
        try:
            found = self._arrays[name]
        except KeyError:
            if name == "finite" and self.kind == "metric":
                return np.isfinite(self["value"])
            raise KeyError(f"{self.kind} columns are {', '.join(self)}, not {name!r}") from None
        if callable(found):
            # Two threads may both make it; the arrays are equal and either may stay.
            found = found()
            # Kept for the next reader, so that nobody may write into it.
            found.setflags(write=False)
            self._arrays[name] = found
        return found

    def __iter__(self) -> Iterator[str]:
        yield from self._arrays
        if self.kind == "metric":
            yield "finite"

    def __len__(self) -> int:
        return len(self._arrays) + (self.kind == "metric")

    def __reduce__(self) -> tuple[type[Columns], tuple[Any, ...]]:
        # What makes a column may be a function that no other process can have.
        arrays = {name: self[name] for name in self}
        return Columns, (self.kind, self.count, arrays, self._nulls, self._constants)

    def __repr__(self) -> str:
        return f"Columns({self.kind}, {self.count} rows: {', '.join(self)})"

    def find_constant(self, name: str) -> tuple[Any] | None:
        """The value of a field that is known to be the same in every row, in a tuple.

        None where it is not known; nothing is looked at to find out.
        """
        return (self._constants[name],) if name in self._constants else None

    def _has_constant(self, name: str, value: Any) -> bool:
        if name not in self._constants:
            return False
        found = self._constants[name]
        return type(found) is type(value) and bool(found == value)

    def is_null(self, name: str) -> Array:
        """Which values of a column stand for None."""
        found = self._nulls.get(name)
        if found is not None:
            return found
        values = self[name]
        if values.dtype == object:
            return np.array([value is None for value in values], dtype=np.bool_)
        if values.dtype == np.int64 and name in optional_fields(self.kind):
            return np.asarray(values == MISSING_INDEX, dtype=np.bool_)
        return np.zeros(self.count, dtype=np.bool_)

    def make_all(self) -> Columns:
        """Make every column now, and let go of what they were made from."""
        for name in self._arrays:
            self[name]
        return self

    def take(self, rows: Array | slice) -> Columns:
        """Only these rows: a mask, an index array or a slice."""
        if isinstance(rows, np.ndarray) and rows.dtype == np.bool_:
            rows = np.flatnonzero(rows)
        count = len(range(*rows.indices(self.count))) if isinstance(rows, slice) else len(rows)

        def pick(name: str) -> Array:
            return self[name][rows]

        arrays = {name: partial(pick, name) for name in self._arrays}
        nulls = {name: mask[rows] for name, mask in self._nulls.items()}
        return Columns(self.kind, count, arrays, nulls, self._constants)

    def order_by_sequence(self) -> Columns:
        """Rows in the order of `sequence`; as it is where they already are."""
        sequence = self["sequence"]
        if self.count < 2 or bool((sequence[1:] >= sequence[:-1]).all()):
            return self
        return self.take(np.argsort(sequence, kind="stable"))

    def select(self, query: Query) -> Columns:
        """Rows that fit all filters, the newest `limit` of them."""
        mask = match_rows(query, self.kind, self.__getitem__, self._match_value)
        chosen = self if mask is True else self.take(np.full(self.count, mask) & mask)
        return chosen.keep_newest(query.limit)

    def shift_attempts(self, by: int) -> Columns:
        """The same rows, with `by` added to the numbers of their attempts."""
        arrays = {**self._arrays, "attempt": lambda: self["attempt"] + by}
        constants = dict(self._constants)
        if "attempt" in constants:
            constants["attempt"] += by
        return Columns(self.kind, self.count, arrays, self._nulls, constants)

    def _match_value(self, name: str, value: str | int) -> Array | bool:
        """Which rows have a value; True or False where all have the same, without a look."""
        constant = self.find_constant(name)
        if constant is not None:
            return bool(constant[0] == value)
        return np.asarray(self[name] == value)

    def keep_newest(self, limit: int | None) -> Columns:
        """The last `limit` rows; all of them for None."""
        if limit is None or limit >= self.count:
            return self
        return self.take(slice(self.count - limit, None))

    def to_records(self) -> tuple[StreamRecord, ...]:
        """One immutable record for each row."""
        record_type: Any = RECORD_TYPES[self.kind]
        types, optional = column_types(self.kind), optional_fields(self.kind)
        booleans = boolean_fields(self.kind)
        lists = []
        for name in record_type.__struct_fields__:
            values = self[name].tolist()
            if types.get(name) == "i" and name in optional and MISSING_INDEX in values:
                values = [None if value == MISSING_INDEX else value for value in values]
            if name in booleans:
                values = [None if value is None else bool(value) for value in values]
            elif name in self._nulls:
                nulls = self._nulls[name].tolist()
                values = [None if n else value for n, value in zip(nulls, values, strict=True)]
            lists.append(values)
        return tuple(record_type(*row) for row in zip(*lists, strict=True))

    def to_pandas(self) -> pandas.DataFrame:
        """A pandas DataFrame (extra `pandas`); `quark_core.records.columns` lists its types."""
        return to_pandas(self)

    def to_polars(self) -> polars.DataFrame:
        """A Polars DataFrame (extra `polars`); `quark_core.records.columns` lists its types."""
        return to_polars(self)

    def to_arrow(self) -> pyarrow.Table:
        """An Arrow table (extra `arrow`); `quark_core.records.columns` lists its types."""
        return to_arrow(self)


def fill_array(count: int, value: Any) -> Array:
    """An array of one value: int64, float64, or objects."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        out = np.empty(count, dtype=object)
        out.fill(value)
        return out
    return np.full(count, value)


def match_rows(
    query: Query,
    kind: str,
    get: Callable[[str], Array],
    equals: Callable[[str, str | int], Array | bool],
) -> Array | bool:
    """Which rows fit a query's filters (its limit aside); True or False for all or none.

    Args:
        query: The filters.
        kind: Kind of the rows.
        get: Returns a column as an array.
        equals: Returns which rows of a column hold a value.
    """
    mask: Array | bool = True
    for name, value in query.equals.items():
        mask = mask & equals(name, value)
        if mask is False:
            return False
    for name, values in query.any_of.items():
        found: Array | bool = False
        for value in values:
            found = found | equals(name, value)
        mask = mask & found
        if mask is False:
            return False
    if query.rank is not None:
        mask = mask & equals("rank", query.rank)
        if mask is False:
            return False
    for name in ("step", "epoch"):
        exact, low, high = (getattr(query, name + end) for end in ("", "_min", "_max"))
        if (exact, low, high) == (None, None, None):
            continue
        column = get(name)
        # A missing step is -1, so a lower bound of 0 leaves it out.
        mask = mask & (column >= (0 if low is None else low))
        if exact is not None:
            mask = mask & (column == exact)
        if high is not None:
            mask = mask & (column <= high)
    if not query.include_non_finite and kind in _MEASURED:
        finite = np.isfinite(get(_MEASURED[kind]))
        mask = mask if bool(finite.all()) else mask & finite
    return mask


def encode_rows(columns: Columns, *, compress: bool = True) -> bytes:
    """The rows as `quark_core.records.codec.decode_body` reads them, without their origin."""
    types, optional = column_types(columns.kind), optional_fields(columns.kind)
    encoded: dict[str, Any] = {}
    for name, encoding in types.items():
        constant = columns.find_constant(name)
        if constant is not None and (encoding != "j" or constant[0] is None):
            encoded[name] = _encode_constant(name, encoding, constant[0], name in optional)
        elif encoding == "i" and columns[name].dtype == np.int64:
            encoded[name] = _encode_integers(name, columns[name], name in optional)
        elif encoding == "f":
            encoded[name] = _encode_floats(name, columns[name], columns.is_null(name))
        else:
            encoded[name] = columns[name].tolist()
    if not columns.count:
        encoded = {}
    return encode_columns(columns.kind, columns.count, encoded, compress)


def split_by_origin(columns: Columns) -> list[Columns]:
    """The rows in parts whose rows have one origin each, in order."""
    if columns.count < 2 or all(columns.find_constant(name) is not None for name in _ORIGIN):
        return [columns] if columns.count else []
    changes = np.zeros(columns.count - 1, dtype=np.bool_)
    for name in _ORIGIN:
        if columns.find_constant(name) is None:
            values = columns[name]
            changes |= values[1:] != values[:-1]
    edges = [0, *(np.flatnonzero(changes) + 1).tolist(), columns.count]
    return [columns.take(slice(a, b)) for a, b in pairwise(edges)]


def _encode_constant(name: str, encoding: str, value: Any, optional: bool) -> Column:
    if encoding == "i" and value is not None:
        value = None if optional and value == MISSING_INDEX else int(value)
    return Column(name, "c", value)


def _encode_integers(name: str, values: Array, optional: bool) -> Column:
    first = int(values[0])
    if first == values[-1] and bool((values == first).all()):
        return _encode_constant(name, "i", first, optional)
    return encode_integer_array(name, values, values == MISSING_INDEX if optional else None)


def _encode_floats(name: str, values: Array, nulls: Array) -> Column:
    if nulls.any():
        if nulls.all():
            return Column(name, "c", None)
        return Column(name, "f", None, nulls.tobytes(), values.astype("<f8").tobytes())
    return encode_float_array(name, values)


# Tables of pandas, Polars and Arrow.
#
# All three have the fields of the record type, in its order, with `timestamp`
# (UTC, microseconds) in place of `time_us`; the derived column `finite` is left
# out. None is a null everywhere, and a stored NaN stays a NaN.
#
# field             Arrow                          Polars       pandas
# step, epoch …     int64, null for None           Int64        Int64 (int64 where never None)
# mean, std …       float64, null for None         Float64      Float64 (float64 where never None)
# timestamp         timestamp[us, UTC]             Datetime     datetime64[us, UTC]
# texts             dictionary of string           String       object, None for None
# tensor_shape      list of int64                  List(Int64)  object: tuples
# payload, metadata string: JSON with sorted keys  String       object: dicts
#
# An Arrow schema carries `quark.kind` and `quark.schema_version`; a field of
# JSON text carries `quark.encoding` = `json`. None of the tables shares memory
# that changing it would change the columns by.

_LIST_ITEMS = {int: "i", float: "f", str: "t"}


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
        items = [
            get_args(option)[0] for option in (hints[name], *options) if get_origin(option) is tuple
        ]
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
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def _copy_json(value: Any) -> Any:
    """A JSON value that its holder may change."""
    if isinstance(value, dict):
        return {key: _copy_json(item) for key, item in value.items()}
    return [_copy_json(item) for item in value] if isinstance(value, list) else value
