"""One page of a list of runs with the columns that were asked for, and the names there are."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable
from zlib import crc32

import msgspec

from quark_core.errors import SchemaValidationError
from quark_core.records.query import VALUE_SCOPES, Field, RunSearch

MOST_PAGE_RUNS = 1_000
"""A page has so many runs at most."""
MOST_COLUMNS = 60
"""A page has so many columns at most."""
MOST_NAMES = 500
"""A list of names has so many at most."""


class RunLabel(NamedTuple):
    """What tells a run from others in a list.

    Attributes:
        run_id: Its id.
        project: Name of its project.
        name: Its name, or None.
        status: Its status as it was stored.
    """

    run_id: str
    project: str
    name: str | None
    status: str


@runtime_checkable
class SupportsLabels(Protocol):
    """What a backend may have besides, so that ids are found by their beginning at once.

    Others are served by `quark_core.runs.run_ids`, which searches them or lists their runs.
    """

    def list_labels(self, beginning: str, limit: int | None) -> list[RunLabel]:
        """Runs whose id begins so, newest first, archived ones too; none out of the trash."""


class RunConfiguration(NamedTuple):
    """What a run was set to, and no more of it.

    Attributes:
        run_id: Its id.
        is_archived: Whether it was archived.
        values: Values of its configuration; empty without one.
    """

    run_id: str
    is_archived: bool
    values: Mapping[str, Any]


@runtime_checkable
class SupportsConfigurations(Protocol):
    """What a backend may have besides, so that many configurations are compared at once.

    Of others `quark.analysis.run_search` lists whole runs.
    """

    def list_configurations(
        self, *, project: str | None = None, limit: int | None = None
    ) -> list[RunConfiguration]:
        """The configurations of the runs that `list_runs` lists, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSearch:
    """Which page of which runs, and what of each.

    Attributes:
        search: Which runs and in which order; its limit is the most rows of the page.
        columns: What of each run. A name that no run has is no mistake: nothing is there.
        after: `next` of the page before; None for the first page.
        count: Whether all runs that fit are to be counted.
        column_texts: The columns as they were written.
    """

    search: RunSearch
    columns: tuple[Field, ...] = ()
    after: str | None = None
    count: bool = False
    column_texts: tuple[str, ...] = dataclass_field(default=(), compare=False)

    @property
    def limit(self) -> int:
        """Rows of the page."""
        limit = self.search.limit
        return MOST_PAGE_RUNS if limit is None else min(limit, MOST_PAGE_RUNS)


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run of a page.

    Attributes:
        run_id: The run.
        values: Of each column what the run has there, or None. A number of a metric is NaN
            where the run has the metric and the figure is not finite; a time is microseconds
            since the epoch; tags and groups are a tuple of texts; a duration is in seconds. A
            value of the configuration, or of a field, is a float, a text, a truth value, or a
            list.
    """

    run_id: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """One page of runs.

    Attributes:
        columns: The columns as they were written.
        rows: The runs, in the order that was asked for.
        next: Where the next page begins, to be given as `after`; None on the last page.
            It stays good while runs come, go and change: a run is shown twice or left out
            only where it has itself moved across the end of a page.
        count: How many runs fit, on all pages; None where nobody asked.
    """

    columns: tuple[str, ...]
    rows: tuple[RunRow, ...]
    next: str | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True)
class ConfigName:
    """A key of configurations.

    Attributes:
        key: The flattened key, such as `optimizer.lr`.
        written: How a search writes it, such as `config.optimizer.lr`.
        types: What it holds: some of number, bool, text, null, json.
        values: Some of the values of numbers, truth values and texts that runs have there,
            each once, the most recent first.
    """

    key: str
    written: str
    types: tuple[str, ...]
    values: tuple[float | str | bool, ...]


@dataclass(frozen=True, slots=True)
class TagName:
    """A tag, and how many runs have it."""

    tag: str
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNames:
    """The names that runs have, for completion; sorted as people read them, nearest first.

    Attributes:
        metrics: How a search writes each metric, such as `train/loss`.
        config: Keys of configurations.
        tags: Tags.
        complete: Whether these are all that have the text in them: neither cut off at the
            limit nor, where names are found by reading runs, of the newest runs only.
    """

    metrics: tuple[str, ...] = ()
    config: tuple[ConfigName, ...] = ()
    tags: tuple[TagName, ...] = ()
    complete: bool = True


_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Key = None | _Int64 | float | Annotated[str, msgspec.Meta(max_length=100_000)]


class PageCursor(msgspec.Struct, array_like=True, frozen=True):
    """Where a page ended: at its last run.

    Attributes:
        search: Checksum of which runs and which order it is of.
        at_us: What counted as the present for the first page.
        created_us: When the run was made, in microseconds since the epoch.
        run_id: The run.
        keys: What it was sorted by: of a configuration's value its type, number and text, of
            all else the value.
    """

    search: int
    at_us: _Int64
    created_us: _Int64
    run_id: Annotated[str, msgspec.Meta(max_length=512)]
    keys: Annotated[list[_Key], msgspec.Meta(max_length=100)]

    @classmethod
    def decode(cls, text: str, search: RunSearch) -> PageCursor:
        """The cursor of a page of this search.

        Args:
            text: What `encode` returned.
            search: What is searched for now, before its names are resolved.

        Raises:
            SchemaValidationError: It is none, or one of another search.
        """
        try:
            padded = text.encode("ascii") + b"=" * (-len(text) % 4)
            found = msgspec.msgpack.decode(base64.urlsafe_b64decode(padded), type=cls)
        except (msgspec.MsgspecError, AttributeError, UnicodeError, binascii.Error, ValueError):
            raise SchemaValidationError(
                "after must be the value of `next` of the previous page"
            ) from None
        keys = sum(3 if order.field.scope in VALUE_SCOPES else 1 for order in search.order_by)
        if found.search != checksum_search(search) or len(found.keys) != keys:
            raise SchemaValidationError(
                "after is from another search. If you change project, where or order_by, start "
                "again at the first page"
            )
        return found

    def encode(self) -> str:
        """The cursor as a text of letters, digits, - and _."""
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")


def checksum_search(search: RunSearch) -> int:
    """A number that tells which runs are searched for, and in which order."""
    order = [
        (each.field.scope, each.field.name, each.field.statistic, each.descending)
        for each in search.order_by
    ]
    source = search.source
    where = repr(search.where) if source is None else source.where
    # What was made before there were archived runs stays good.
    archived = (True,) if search.archived else ()
    return crc32(repr((search.project, where, order, *archived)).encode())
