"""Calls of the storage contract over HTTP: arguments and results follow from its annotations.

`POST /v1/call/{method}` takes an object with the method's arguments by name and answers with what
the method returns, both in msgpack or in JSON. In msgpack an array of numbers is `[type, shape,
bytes]` with little-endian bytes, and rows of records are `[kind, frames]` with frames as
`quark_backends.service.row_frames` describes them; in JSON the one is a list, with null for what is
not finite, and the other a list of records.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import msgspec
from msgspec import Meta

from quark_backends.service.protocol import JSON, MSGPACK
from quark_core.backends.methods import read_signature
from quark_core.backends.run_pages import MOST_COLUMNS, PageSearch
from quark_core.records.json_object import JsonObject, normalize_object
from quark_core.records.query import RunSearch

if TYPE_CHECKING:
    from quark_core.records import StreamRecord
    from quark_core.records.columns import Columns

# Rows of a reply that are records at once.
_PART_ROWS = 1000

CALL_ROUTE = "/v1/call/"
"""What stands before the name of a method in the path of its route."""

OF_STORE = frozenset(
    {"list_runs", "search", "search_page", "list_names", "list_groups", "load_project"}
)
"""Methods that may be asked of one project store alone, by the parameter `store`."""

_Text = Annotated[str, Meta(max_length=512)]


class SearchedRuns(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A search as the text that it was read from, in the language of docs/reference/search.md.

    Attributes:
        where, order_by, project, limit: As in `quark.search_runs`.
        archived: Whether archived runs are searched too.
        where_argument, order_argument: What messages call these two.
    """

    where: Annotated[str, Meta(max_length=10_000)] | None = None
    order_by: Annotated[tuple[str, ...], Meta(max_length=10)] = ()
    project: str | None = None
    limit: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    archived: bool = False
    where_argument: _Text = "where"
    order_argument: _Text = "order_by"


class SearchedPage(SearchedRuns, frozen=True, kw_only=True, omit_defaults=True):
    """One page of a search with chosen columns.

    Attributes:
        columns: Metrics and figures of them, `config.key`, fields of the run.
        after: `next` of the page before.
        count: Whether all runs that fit are to be counted.
        columns_argument: What messages call the columns.
    """

    columns: Annotated[tuple[str, ...], Meta(max_length=MOST_COLUMNS)] = ()
    after: str | None = None
    count: bool = False
    columns_argument: _Text = "columns"


_SENT_AS: Mapping[Any, Any] = {RunSearch: SearchedRuns, PageSearch: SearchedPage}
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_BOUNDED: Mapping[Any, Any] = {int: _Number, int | None: _Number | None}
# What whoever speaks HTTP need not say.
_DEFAULTS: Mapping[str, Any] = {"max_failures": 3, "lease_s": 60.0, "worker": None, "result": None}
_ARRAY_TYPES = frozenset({"<i8", "<f8", "|u1", "|b1"})


def describe_search(search: RunSearch | PageSearch) -> SearchedRuns | None:
    """A search as it is sent; None where nobody knows the text that it was read from."""
    page = search if isinstance(search, PageSearch) else None
    runs = search.search if isinstance(search, PageSearch) else search
    source = runs.source
    if source is None and (page is not None or runs.where is not None or runs.order_by):
        return None
    asked: dict[str, Any] = {"project": runs.project, "archived": runs.archived}
    if source is not None:
        names = ("where", "order_by", "where_argument", "order_argument")
        asked |= {name: getattr(source, name) for name in names}
    if page is None:
        return SearchedRuns(limit=runs.limit, **asked)
    if len(page.column_texts) != len(page.columns):
        return None
    return SearchedPage(
        limit=page.limit, columns=page.column_texts, after=page.after, count=page.count, **asked
    )


@cache
def make_arguments(method: str) -> type[msgspec.Struct]:
    """A struct with the arguments of a method of the contract."""
    signature, hints = read_signature(method)
    fields: list[Any] = []
    for name, parameter in signature.parameters.items():
        kind = {**_SENT_AS, **_BOUNDED}.get(hints[name], hints[name])
        if name in _DEFAULTS:
            default = _DEFAULTS[name]
            fields.append((name, kind | None if default is None else kind, default))
        elif parameter.default is inspect.Parameter.empty:
            fields.append((name, kind))
        else:
            fields.append((name, kind, parameter.default))
    title = "".join(map(str.capitalize, method.split("_")))
    return msgspec.defstruct(f"{title}Arguments", fields, kw_only=True, frozen=True)


def find_result(method: str) -> Any:
    """The type of what a method of the contract returns."""
    return read_signature(method)[1]["return"]


def encode_value(value: Any, media: str) -> bytes:
    """An argument or a result in JSON or msgpack."""
    if media == MSGPACK:
        return msgspec.msgpack.encode(value, enc_hook=_pack)
    return msgspec.json.encode(value, enc_hook=_list)


def decode_value(data: bytes, media: str, kind: Any) -> Any:
    """What `encode_value` was given in msgpack; in JSON only what has no arrays and no rows.

    Raises:
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError: It is nothing of the kind.
    """
    if media == JSON:
        return msgspec.json.decode(data, type=kind, dec_hook=unpack)
    return msgspec.msgpack.decode(data, type=kind, dec_hook=unpack)


# What numpy and rows need is imported late: a training that only writes does not wait for it.


def _pack(value: Any) -> Any:
    import numpy as np

    from quark_backends.service.row_frames import encode_columns
    from quark_core.records.columns import Columns

    if isinstance(value, np.ndarray):
        plain = value.astype(value.dtype.newbyteorder("<"), order="C", copy=False)
        return plain.dtype.str, plain.shape, plain.tobytes()
    if isinstance(value, Columns):
        return value.kind, b"".join(encode_columns(value))
    return _plain(value)


def _list(value: Any) -> Any:
    import numpy as np

    from quark_core.records.columns import Columns

    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Columns):
        # One record after the other: all of them as dicts would be many times the reply.
        records = (msgspec.json.encode(record.to_dict()) for record in _iterate_records(value))
        return msgspec.Raw(b"[" + b",".join(records) + b"]")
    return _plain(value)


def _iterate_records(columns: Columns) -> Iterator[StreamRecord]:
    for first in range(0, columns.count, _PART_ROWS):
        yield from columns.take(slice(first, first + _PART_ROWS)).to_records()


def _plain(value: Any) -> Any:
    import numpy as np

    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} is not a type of the contract")


def unpack(kind: Any, value: Any) -> Any:
    """A value of a type that msgspec does not know, out of what it was sent as.

    Raises:
        ValueError, TypeError: It is none.
    """
    if kind is JsonObject:
        return normalize_object(value, "reply") or JsonObject()
    import numpy as np

    from quark_backends.service.row_frames import decode_frames
    from quark_core.records.columns import Columns

    origin = get_origin(kind) or kind
    if origin is np.ndarray:
        dtype, shape, data = value
        if dtype not in _ARRAY_TYPES:
            raise ValueError(f"an array of {dtype!r:.20} is not numeric")
        return np.frombuffer(data, dtype).reshape([int(size) for size in shape])
    if origin is Columns:
        name, frames = value
        return Columns.concatenate(str(name), decode_frames(frames))
    raise NotImplementedError(f"{kind} is not a type of the contract")
