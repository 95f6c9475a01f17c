"""Finds runs by their metrics, configuration, tags and fields."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quark_core.backends.contract import SupportsPages, SupportsRead, SupportsSearch
from quark_core.backends.run_pages import (
    MOST_COLUMNS,
    MOST_NAMES,
    MOST_PAGE_RUNS,
    PageSearch,
    RunNames,
    RunPage,
)
from quark_core.backends.run_summary import RunsFound, RunSummary
from quark_core.config.arguments import resolve_storage_dir
from quark_core.config.migration_hints import explain_argument_errors
from quark_core.errors import SchemaValidationError
from quark_core.records.query import (
    Expression,
    OrderBy,
    RunSearch,
    SearchSource,
    check_index,
    find_fields,
)

_MAX_ORDERS = 10
_PAGE_RUNS = 200
_NAMES = 100
_MAX_CURSOR = 1_000_000
_MAX_TEXT = 1_000


@explain_argument_errors
def search_runs(
    *,
    storage_dir: str | Path | None = None,
    project: str | None = None,
    where: str | None = None,
    order_by: str | Sequence[str] | None = None,
    limit: int | None = None,
    archived: bool = False,
) -> tuple[RunSummary, ...]:
    """Find runs by metrics, config, tags and other fields.

    Does not read the points of curves.

    Args:
        storage_dir: Folder of the `.quark` store. Defaults to the working directory, the nearest
            parent that has a store, or the Quark server if one is configured.
        project: Name of the project. Defaults to all projects.
        where: Filter expression, such as "val/loss < 0.3 and config.lr == 3e-4 and 'baseline' in
            tags".
        order_by: Metric, `config.key` or run field, or a list of them. Prefix with `-` or append `
            desc` for descending order. Runs without the value come last. Defaults to newest first.
        limit: Maximum number of runs. Defaults to all.
        archived: Whether to include archived runs. Defaults to False.

    Returns:
        The runs, each with a summary of its metrics.

    Raises:
        SchemaValidationError: The expression is malformed, a name is unknown in the project, or the
            limit is negative. The message shows the position.
        SessionStoreError: The store does not exist, or cannot be read.

    Example:
        quark.search_runs(where="val/loss < 0.3 and config.lr == 3e-4", order_by="val/loss")
    """
    from quark_core.runs.backend_choice import open_reader

    search = build_search(
        project=project, where=where, order_by=order_by, limit=limit, archived=archived
    )
    reader = open_reader(resolve_storage_dir(storage_dir))
    try:
        return RunsFound(find_runs(reader, search))
    finally:
        reader.close()


def build_search(
    *,
    project: str | None = None,
    where: str | None = None,
    order_by: str | Sequence[str] | None = None,
    limit: int | None = None,
    archived: bool = False,
    where_argument: str = "where",
    order_argument: str = "order_by",
) -> RunSearch:
    """Check what is searched for; names are looked up when a store is searched.

    `where_argument` and `order_argument` are what messages call these two.

    Raises:
        SchemaValidationError: As `search_runs`.
    """
    if project is not None and not isinstance(project, str):
        raise SchemaValidationError(f"project must be a str, not {type(project).__name__}")
    limit = check_index(limit, "limit")
    expression = None
    if where is not None:
        # Late, here and below: the parser is only loaded for those who search.
        from quark_core.search.parser import parse_where

        expression = parse_where(where, where_argument)
    orders = _list_orders(order_by, order_argument)
    return RunSearch(
        project=project,
        where=expression,
        order_by=_parse_orders(orders, order_argument),
        limit=limit,
        archived=bool(archived) or (expression is not None and _names_archived(expression)),
        source=SearchSource(where, orders, where_argument, order_argument),
    )


def _names_archived(where: Expression) -> bool:
    """Whether an expression asks when runs were archived: then they are searched too."""
    return any(field.scope == "run" and field.name == "archived" for field in find_fields(where))


def find_runs(reader: SupportsRead, search: RunSearch) -> list[RunSummary]:
    """The runs of an opened store that fit, by its own search where it has one.

    Raises:
        SchemaValidationError: A name that no run of the project has.
        SessionStoreError: The store cannot be read.
    """
    if isinstance(reader, SupportsSearch):
        return reader.search(search)
    from quark_core.search.fallback import search_by_reading

    return search_by_reading(reader, search)


def build_page_search(
    *,
    project: str | None = None,
    where: str | None = None,
    order_by: str | Sequence[str] | None = None,
    columns: Sequence[str] = (),
    limit: int | None = None,
    archived: bool = False,
    after: str | None = None,
    count: bool = False,
    where_argument: str = "where",
    order_argument: str = "order_by",
    columns_argument: str = "columns",
) -> PageSearch:
    """Check which page of which runs is asked for, and with what columns.

    Args:
        project, where, order_by, where_argument, order_argument: As in `build_search`.
        columns: Metrics (`val/loss`, `min(val/loss)`), `config.key` and fields of the run,
            60 at most.
        limit: Rows of the page, 200 by default, 1000 at most.
        archived: As in `search_runs`.
        after: `next` of the page before.
        count: Whether all runs that fit are to be counted.
        columns_argument: What messages call the columns.

    Raises:
        SchemaValidationError: As `build_search`, and of a malformed column.
    """
    rows = check_index(limit, "limit")
    if rows is not None and rows > MOST_PAGE_RUNS:
        raise SchemaValidationError(f"limit must be at most {MOST_PAGE_RUNS}, got {rows}")
    search = build_search(
        project=project,
        where=where,
        order_by=order_by,
        limit=_PAGE_RUNS if rows is None else rows,
        archived=archived,
        where_argument=where_argument,
        order_argument=order_argument,
    )
    if isinstance(columns, str) or not isinstance(columns, Sequence):
        raise SchemaValidationError(f"{columns_argument} must be a sequence of str")
    if len(columns) > MOST_COLUMNS:
        raise SchemaValidationError(
            f"{columns_argument} has {len(columns)} entries; at most {MOST_COLUMNS} are allowed"
        )
    if after is not None and (not isinstance(after, str) or len(after) > _MAX_CURSOR):
        raise SchemaValidationError("after must be the value of `next` of the previous page")
    from quark_core.search.parser import parse_column

    return PageSearch(
        search=search,
        columns=tuple(parse_column(text, columns_argument) for text in columns),
        after=after,
        count=bool(count),
        column_texts=tuple(columns),
    )


def find_page(reader: SupportsRead, search: PageSearch) -> RunPage:
    """One page of the runs of an opened store that fit, by its own search where it has one.

    Raises:
        SchemaValidationError: A name in `where` or `order_by` that no run of the project
            has, or `after` is of another search.
        SessionStoreError: The store cannot be read.
    """
    if isinstance(reader, SupportsPages):
        return reader.search_page(search)
    from quark_core.search.fallback import search_page_by_reading

    return search_page_by_reading(reader, search)


def list_names(
    reader: SupportsRead,
    *,
    project: str | None = None,
    text: str = "",
    limit: int | None = None,
) -> RunNames:
    """The metrics, configuration keys and tags that runs of an opened store have.

    Args:
        reader: The store.
        project: Only of runs of this project.
        text: Only those that have this in them, in upper or lower case.
        limit: At most so many of each sort, 100 by default, 500 at most.

    Raises:
        SchemaValidationError: A bad argument; the message names it.
        SessionStoreError: The store cannot be read.
    """
    if project is not None and not isinstance(project, str):
        raise SchemaValidationError(f"project must be a str, not {type(project).__name__}")
    if not isinstance(text, str) or len(text) > _MAX_TEXT:
        raise SchemaValidationError(f"text must be a str of at most {_MAX_TEXT} characters")
    most = check_index(limit, "limit")
    most = _NAMES if most is None else min(most, MOST_NAMES)
    if isinstance(reader, SupportsPages):
        return reader.list_names(project, text, most)
    from quark_core.search.fallback import list_names_by_reading

    return list_names_by_reading(reader, project, text, most)


def summarize_run(reader: SupportsRead, run_id: str) -> RunSummary:
    """One run of an opened store with its metrics summed up.

    Raises:
        RunNotFoundError: The store has no such run.
    """
    if isinstance(reader, SupportsSearch):
        return reader.summarize(run_id)
    from quark_core.search.fallback import summarize_by_reading

    return summarize_by_reading(reader, run_id)


def _list_orders(order_by: str | Sequence[str] | None, argument: str) -> tuple[str, ...]:
    if order_by is None:
        return ()
    texts = [order_by] if isinstance(order_by, str) else order_by
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise SchemaValidationError(f"{argument} must be a str or a sequence of str")
    if len(texts) > _MAX_ORDERS:
        raise SchemaValidationError(
            f"{argument} has {len(texts)} entries; at most {_MAX_ORDERS} are allowed"
        )
    return tuple(texts)


def _parse_orders(texts: tuple[str, ...], argument: str) -> tuple[OrderBy, ...]:
    if not texts:
        return ()
    from quark_core.search.parser import parse_order

    return tuple(parse_order(text, argument) for text in texts)
