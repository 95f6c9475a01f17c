"""Values encoded as canonical bytes: equal values give equal bytes in every process."""

from __future__ import annotations

import dataclasses
import logging
import math
import struct
import sys
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, cast
from uuid import UUID

from quark.provenance.arrays import ArrayForm, Unseen, form_array, form_foreign, split_sparse
from quark_core.backends.registry import default_registry

_log = logging.getLogger("quark")
_known: dict[str, Callable[[Any], object]] | None = None


def find_reducer(value: object) -> tuple[str, Callable[[Any], object]] | None:
    """Name of a value's registered type and what takes it apart, or None."""
    reducers = _load()
    if reducers:
        for kind in type(value).__mro__:
            name = f"{kind.__module__}.{kind.__qualname__}"
            found = reducers.get(name)
            if found is not None:
                return name, found
    return None


def _load() -> Mapping[str, Callable[[Any], object]]:
    global _known
    if _known is None:
        found: dict[str, Callable[[Any], object]] = {}
        for plugin, declared in default_registry().collect("quark_register_fingerprints"):
            if not isinstance(declared, Mapping):
                _log.warning("plugin %s: fingerprints must be a mapping of type names", plugin)
                continue
            for name, reducer in declared.items():
                if isinstance(name, str) and callable(reducer):
                    found.setdefault(name, reducer)
                else:
                    _log.warning("plugin %s: the fingerprints of %.80r are missing", plugin, name)
        _known = found
    return _known


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


SAMPLE_BYTES = 1024 * 1024
"""Arrays above this size are looked at in places, at level `sample`."""

_MOST_DEPTH = 32
_MOST_ITEMS = 1_000_000
_MOST_LEAVES = 4096
_MOST_UNSEEN = 16
_LONGEST_PATH = 120
_INT64_MAX = 2**63 - 1
_LEVELS = ("type", "partial", "sample", "full")
_TEXTUAL = (Decimal, Fraction, PurePath, UUID, date, datetime, time, timedelta)
_MAPPINGS = (dict, UserDict, ChainMap, MappingProxyType)
# Types whose subclasses are taken like them, with their own name.
_BASES: tuple[Any, ...] = (str, bytes, int, float, complex, list, tuple, set, frozenset)
_NUMERIC_LISTS: dict[type, str] = {float: "float64", int: "int64", bool: "bool"}


def name_type(value: object) -> str:
    """`module.Class` of a value; builtins by their name alone."""
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def spell_number(number: Any) -> Any:
    """A number as JSON has it; what is not finite, as text."""
    if isinstance(number, float) and not math.isfinite(number):
        return "nan" if number != number else "inf" if number > 0 else "-inf"
    if isinstance(number, int) and not isinstance(number, bool) and abs(number) > _INT64_MAX:
        return float(number)
    return number


class CanonicalWalk:
    """Feeds a value, part by part, into a digest of what it is and one of its form.

    Attributes:
        leaves: Path and array of what has numbers, the first 4,096 of them.
        leaf_count: How many there were.
        unseen: What was taken by its type alone.
    """

    def __init__(self, level: str) -> None:
        import xxhash

        self._make_hash: Callable[[], Any] = xxhash.xxh3_128
        self._hash = self._make_hash()
        self._form = self._make_hash()
        self._exact = self._make_hash()
        self._is_sampled = level == "sample"
        self._weakest = len(_LEVELS) - 1
        self._items = 0
        self._seen_something = False
        self._above: list[int] = []
        self._is_key = False
        self.leaves: list[tuple[str, ArrayForm]] = []
        self.leaf_count = 0
        self.unseen: list[str] = []
        self.type_name = ""

    @property
    def digest(self) -> str:
        """Of everything that was taken."""
        return str(self._hash.hexdigest())

    @property
    def form_digest(self) -> str:
        """Of types, keys and shapes alone."""
        return str(self._form.hexdigest())

    @property
    def exact_digest(self) -> str:
        """Of all but the numbers that may differ by rounding."""
        return str(self._exact.hexdigest())

    @property
    def level(self) -> str:
        """How much was looked at."""
        weakest = _LEVELS[self._weakest]
        return "partial" if weakest == "type" and self._seen_something else weakest

    def take(self, value: object) -> None:
        """Take a whole value; whatever it raises is told as `unseen`."""
        self.type_name = name_type(value)
        self._take(value, "")

    def _take(self, value: Any, path: str) -> None:
        self._items += 1
        mark = id(value)
        if len(self._above) >= _MOST_DEPTH or mark in self._above or self._items > _MOST_ITEMS:
            cause = "it contains itself" if mark in self._above else "there is too much of it"
            self._pass_over(value, path, cause)
            return
        self._above.append(mark)
        try:
            if not self._take_plain(value) and not self._take_container(value, path):
                self._take_foreign(value, path)
        except Unseen as cause:
            self._pass_over(value, path, str(cause))
        except Exception as error:  # noqa: BLE001 - a foreign object may raise anything
            self._pass_over(value, path, f"{type(error).__name__}: {error}")
        finally:
            self._above.pop()

    def _put(self, tag: bytes, data: Any = b"", *, form: bool = True, rounds: bool = False) -> None:
        """A tag, a length and bytes: so no two different values run into each other."""
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        head = tag + struct.pack("<q", size)
        self._hash.update(head)
        self._hash.update(data)
        if not rounds:
            self._exact.update(head)
            self._exact.update(data)
        if form:
            self._form.update(head)
            self._form.update(data)
        self._seen_something = self._seen_something or size > 0

    def _put_plain(self, tag: bytes, data: Any, *, rounds: bool = False) -> None:
        """A value of whose form the tag says all."""
        self._form.update(tag)
        self._put(tag, data, form=False, rounds=rounds)

    def _take_plain(self, value: Any) -> bool:
        kind = type(value)
        if value is None or value is Ellipsis or value is NotImplemented:
            self._put_plain(b"N", repr(value).encode())
        elif kind is str:
            self._put_plain(b"s", value.encode("utf-8", "surrogatepass"))
        elif kind is bool or kind is int:
            # hex() has no limit of digits.
            self._put_plain(b"i" if kind is int else b"B", hex(value).encode())
            self._leave_number(value)
        elif kind is float:
            number = math.nan if value != value else value
            self._put_plain(b"f", struct.pack("<d", number), rounds=True)
            self._leave_number(value)
        elif kind is complex:
            both = (math.nan if part != part else part for part in (value.real, value.imag))
            self._put_plain(b"c", struct.pack("<dd", *both), rounds=True)
            self._leave_number(value)
        elif kind in (bytes, bytearray, memoryview):
            self._put_plain(b"b", value if kind is bytes else memoryview(bytes(value)))
        else:
            return False
        return True

    def _leave_number(self, value: Any) -> None:
        import numpy as np

        if self._is_key:
            return
        self.leaf_count += 1
        if len(self.leaves) >= _MOST_LEAVES:
            return
        if isinstance(value, int) and abs(value) > _INT64_MAX:
            return
        array = np.asarray([value])
        name = "int64" if type(value) is int else array.dtype.name
        # The path is known by whoever took the number.
        form = ArrayForm(type(value).__name__, name, (), array, _keep)
        self.leaves.append((self._path, form))

    _path = ""

    def _take_container(self, value: Any, path: str) -> bool:
        kind = type(value)
        self._path = path
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            self._put(b"n", name_type(value).encode())
            self._take_fields(zip(kind._fields, value, strict=True), path)
        elif kind in (list, tuple, deque, UserList):
            self._take_sequence(value, path)
        elif kind in (set, frozenset):
            digests = sorted(self._digest(item) for item in value)
            self._put(b"S", struct.pack("<q", len(digests)))
            self._put(b"S", b"".join(digests), form=False)
        elif isinstance(value, Enum):
            self._put(b"e", f"{name_type(value)}.{value.name}".encode())
        elif isinstance(value, _TEXTUAL):
            self._put_plain(b"x", f"{kind.__name__}:{value}".encode("utf-8", "surrogatepass"))
        elif isinstance(value, range):
            self._put(b"r", f"{value.start}:{value.stop}:{value.step}".encode())
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            self._put(b"d", name_type(value).encode())
            names = [one.name for one in dataclasses.fields(value)]
            self._take_fields(((name, getattr(value, name)) for name in names), path)
        elif isinstance(value, _MAPPINGS):
            self._put(b"m", f"{kind.__name__} {len(value)}".encode())
            self._take_mapping(value, path)
        else:
            return False
        return True

    def _take_fields(self, items: Iterable[tuple[str, Any]], path: str) -> None:
        for name, item in items:
            self._put(b"k", name.encode())
            self._descend(item, f"{path}.{name}")

    def _take_sequence(self, value: Any, path: str) -> None:
        tag = type(value).__name__
        self._put(b"l", f"{tag} {len(value)}".encode())
        kinds = set(map(type, value)) if len(value) > 1 else set()
        only = next(iter(kinds)) if len(kinds) == 1 else None
        if only in _NUMERIC_LISTS and self._take_numbers(value, only, path):
            return
        if only is str:
            encoded = [text.encode("utf-8", "surrogatepass") for text in value]
            self._items += len(encoded)
            self._put(b"L", struct.pack(f"<{len(encoded)}q", *map(len, encoded)), form=False)
            self._put(b"L", b"".join(encoded), form=False)
            return
        for index, item in enumerate(value):
            self._descend(item, f"{path}[{index}]")

    def _take_numbers(self, value: Any, only: type, path: str) -> bool:
        """A list of numbers of one type is an array."""
        import numpy as np

        try:
            array = np.array(list(value), dtype=_NUMERIC_LISTS[only])
        except OverflowError:
            return False
        self._take_array(form_array(array), path, of=type(value).__name__)
        return True

    def _take_mapping(self, value: Mapping[Any, Any], path: str) -> None:
        if all(type(key) is str for key in value):
            keys = sorted(value)
        else:
            keys = sorted(value, key=self._digest)
        for key in keys:
            outer, self._is_key = self._is_key, True
            self._descend(key, "")
            self._is_key = outer
            if type(key) is str:
                self._form.update(key.encode("utf-8", "surrogatepass"))
            self._descend(value[key], f"{path}[{key!r:.40}]")

    def _descend(self, item: Any, path: str) -> None:
        self._path = path[:_LONGEST_PATH]
        self._take(item, self._path)

    def _digest(self, item: Any) -> bytes:
        """Of one item alone, by which items without an order are sorted."""
        inner = CanonicalWalk("full")
        inner._is_key = True
        inner._above = self._above
        inner._items = self._items
        inner._take(item, "")
        self._items = inner._items
        self._weaken(inner._weakest)
        return bytes(inner._hash.digest())

    def _take_foreign(self, value: Any, path: str) -> None:
        found = find_reducer(value)
        if found is not None:
            name, reducer = found
            taken = reducer(value)
            self._put(b"t", name.encode())
            self._descend(taken, path)
            return
        form = form_array(value) if not _is_sparse(value) else None
        if form is not None:
            self._take_array(form, path)
            return
        if _is_sparse(value):
            self._put(b"t", f"{value.layout} {value.dtype} {tuple(value.shape)}".encode())
            self._take_fields(split_sparse(sys.modules["torch"], value).items(), path)
            return
        for kind in type(value).__mro__:
            name = f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
            take_apart = TABLE_FORMS.get(name)
            if take_apart is not None:
                taken = take_apart(value)
                self._put(b"t", name.encode())
                self._descend(taken, path)
                return
        self._take_objects(value, path)

    def _take_objects(self, value: Any, path: str) -> None:
        """Arrays of objects and structures, and what becomes an array of numpy by itself."""
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            self._put(b"o", f"{value.dtype.name} {value.shape}".encode())
            if value.dtype.names is not None:
                names = value.dtype.names
                self._take_fields(((name, value[name]) for name in names), path)
            elif value.dtype.kind in "OT":
                self._descend(value.reshape(-1).tolist(), path)
            else:
                raise Unseen(f"items of dtype {value.dtype}")
            return
        if hasattr(type(value), "__array__") and hasattr(value, "dtype"):
            form = form_foreign(value, name_type(value))
            if form is not None:
                self._take_array(form, path)
                return
        for base in _BASES:
            if isinstance(value, base):
                self._put(b"t", name_type(value).encode())
                self._descend(base(value), path)
                return
        raise Unseen("Quark does not support its type")

    def _take_array(self, form: ArrayForm | None, path: str, *, of: str = "") -> None:
        assert form is not None
        head = f"{of or form.kind} {form.dtype} {form.shape} {form.extra}"
        self._put(b"a", head.encode())
        self._seen_something = True
        if self._is_sampled and form.size_bytes > SAMPLE_BYTES:
            self._weaken(_LEVELS.index("sample"))
            pieces = form.places()
        else:
            pieces = form.pieces()
        rounds = form.clean is not None
        for piece in pieces:
            raw: Any = (piece if piece.flags.c_contiguous else piece.copy()).view("u1")
            self._hash.update(raw)
            if not rounds:
                self._exact.update(raw)
        if self._is_key:
            return
        self.leaf_count += 1
        if len(self.leaves) < _MOST_LEAVES:
            self.leaves.append((path, form))

    def _weaken(self, level: int) -> None:
        self._weakest = min(self._weakest, level)

    def _pass_over(self, value: object, path: str, cause: str) -> None:
        """Only of which type it is."""
        self._weaken(_LEVELS.index("type"))
        name = name_type(value)
        # A value may have failed half way, after a part of it was taken: this is what is said.
        self._hash.update(b"?" + name.encode())
        self._form.update(b"?" + name.encode())
        if len(self.unseen) < _MOST_UNSEEN:
            self.unseen.append(f"{path or 'value'} ({name}): {cause:.120}")


def _keep(piece: Any) -> Any:
    return piece


def _is_sparse(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    tensor: Any = getattr(torch, "Tensor", ())
    if not isinstance(value, tensor):
        return False
    value = cast("Any", value)
    return bool(value.layout is not torch.strided and not value.is_meta)
