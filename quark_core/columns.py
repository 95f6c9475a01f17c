"""What a read returns before anyone asks for records: columns in persistence order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark_core.codec import MISSING_INDEX, column_types
from quark_core.query import Query
from quark_core.records import RECORD_TYPES, StreamRecord

__all__ = ["Columns", "match_rows"]

Array = NDArray[Any]

_ORIGIN = ("run_id", "writer_id", "attempt", "rank")


class Columns(Mapping[str, Array]):
    """Rows of one kind of record as a read-only mapping of numpy arrays.

    The rows stand in persistence order: by attempt, rank, start of the
    writer, then sequence. Every field of the record type is there. Integers
    are int64, with -1 where the record has None; floats are float64, texts
    and JSON values are objects. Metrics have one more column, `finite`, False
    where the value is NaN or infinite; the value itself is kept as it was.
    """

    __slots__ = ("_arrays", "count", "kind")

    def __init__(self, kind: str, count: int, arrays: Mapping[str, Array]) -> None:
        self.kind = kind
        self.count = count
        self._arrays = dict(arrays)

    @classmethod
    def empty(cls, kind: str) -> Columns:
        """Columns of no rows."""
        dtypes = {"i": np.int64, "f": np.float64}
        arrays: dict[str, Array] = {
            name: np.empty(0, dtype=dtypes.get(encoding, object))
            for name, encoding in column_types(kind).items()
        }
        for name in _ORIGIN:
            arrays[name] = np.empty(0, dtype=object if name.endswith("_id") else np.int64)
        return cls(kind, 0, arrays)

    @classmethod
    def from_records(cls, kind: str, records: Sequence[StreamRecord]) -> Columns:
        """Columns of records, in their order."""
        out = cls.empty(kind)
        for name, array in out._arrays.items():
            values = [getattr(record, name) for record in records]
            if array.dtype == object:
                out._arrays[name] = np.empty(len(values), dtype=object)
                out._arrays[name][:] = values
            else:
                missing = MISSING_INDEX if array.dtype == np.int64 else np.nan
                filled = [missing if value is None else value for value in values]
                out._arrays[name] = np.array(filled, dtype=array.dtype)
        out.count = len(records)
        return out

    @classmethod
    def concatenate(cls, kind: str, parts: Sequence[Columns]) -> Columns:
        """Rows of several parts, one after the other."""
        if not parts:
            return cls.empty(kind)
        if len(parts) == 1:
            return parts[0]
        names = parts[0]._arrays
        return cls(
            kind,
            sum(part.count for part in parts),
            {name: np.concatenate([part._arrays[name] for part in parts]) for name in names},
        )

    def __getitem__(self, name: str) -> Array:
        if name == "finite" and self.kind == "metric":
            return np.isfinite(self._arrays["value"])
        try:
            return self._arrays[name]
        except KeyError:
            raise KeyError(f"{self.kind} columns are {', '.join(self)}, not {name!r}") from None

    def __iter__(self) -> Iterator[str]:
        yield from self._arrays
        if self.kind == "metric":
            yield "finite"

    def __len__(self) -> int:
        return len(self._arrays) + (self.kind == "metric")

    def __repr__(self) -> str:
        return f"Columns({self.kind}, {self.count} rows: {', '.join(self)})"

    def take(self, rows: Array | slice) -> Columns:
        """Only these rows: a mask, an index array or a slice."""
        arrays = {name: array[rows] for name, array in self._arrays.items()}
        return Columns(self.kind, len(arrays["sequence"]), arrays)

    def order_by_sequence(self) -> Columns:
        """Rows in the order of `sequence`; as it is where they already are."""
        sequence = self._arrays["sequence"]
        if self.count < 2 or bool((sequence[1:] >= sequence[:-1]).all()):
            return self
        return self.take(np.argsort(sequence, kind="stable"))

    def select(self, query: Query) -> Columns:
        """Rows that fit all filters, the newest `limit` of them."""
        mask = match_rows(query, self.kind, self.__getitem__, lambda name, v: self[name] == v)
        chosen = self if mask is True else self.take(np.full(self.count, mask) & mask)
        return chosen.keep_newest(query.limit)

    def keep_newest(self, limit: int | None) -> Columns:
        """The last `limit` rows; all of them for None."""
        if limit is None or limit >= self.count:
            return self
        return self.take(slice(self.count - limit, None))

    def to_records(self) -> tuple[StreamRecord, ...]:
        """One immutable record for each row."""
        record_type: Any = RECORD_TYPES[self.kind]
        types = column_types(self.kind)
        lists = []
        for name in record_type.__struct_fields__:
            values = self._arrays[name].tolist()
            if types.get(name) == "i" and MISSING_INDEX in values:
                values = [None if value == MISSING_INDEX else value for value in values]
            lists.append(values)
        return tuple(record_type(*row) for row in zip(*lists, strict=True))


def match_rows(
    query: Query,
    kind: str,
    get: Callable[[str], Array],
    equals: Callable[[str, str], Array | bool],
) -> Array | bool:
    """Which rows fit a query's filters (its limit aside); True or False for all or none.

    Args:
        query: The filters.
        kind: Kind of the rows.
        get: Returns a column as an array.
        equals: Returns which rows of a text column hold a value.
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
    if not query.include_non_finite and kind == "metric":
        finite = np.isfinite(get("value"))
        mask = mask if bool(finite.all()) else mask & finite
    return mask
