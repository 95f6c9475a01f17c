"""How metrics are read where records of all of them would be too much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from quark_core.query import Query, check_index
from quark_core.rank_statistics import RankStatistics, check_axis, compare_ranks
from quark_core.records import MetricRecord
from quark_core.run_reading import encode_key, iterate_run, read_run_series

if TYPE_CHECKING:
    from quark_core.columns import Columns
    from quark_core.open_run import OpenRun
    from quark_core.series import Series

__all__ = ["MetricReading", "build_metric_query", "read_rank"]


class MetricReading:
    """The part of `MetricsLogger` that reads curves and parts."""

    _run: OpenRun

    def series(
        self, key: str, *, max_points: int | None = None, all_attempts: bool = False
    ) -> Series:
        """Flush, then return one metric as a curve, cheap however many points it has.

        Args:
            key: The metric's key, as it was logged or as it is stored.
            max_points: At most so many entries, each of which stands for
                about equally many points, with their extremes; None gives
                every point.
            all_attempts: Also points that a later attempt, resumed from an
                earlier step, has hidden.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
            SessionStoreError: The store cannot be read.
        """
        return read_run_series(self._run, key, max_points, all_attempts)

    def read_across_ranks(
        self,
        key: str,
        *,
        by: Literal["step", "epoch"] = "step",
        step_min: int | None = None,
        step_max: int | None = None,
        epoch_min: int | None = None,
        epoch_max: int | None = None,
        all_attempts: bool = False,
    ) -> RankStatistics:
        """Flush, then return one metric over all ranks: mean, extremes, std and spread.

        Worked out here from what each rank has logged, so that no rank ever
        waits for another; the series of one rank is `columns(rank=...)`.

        Args:
            key: The metric's key, as it was logged or as it is stored.
            by: Whether values belong together by their step or their epoch.
            step_min, step_max, epoch_min, epoch_max: Bounds, inclusive.
            all_attempts: Also points that a later attempt, resumed from an
                earlier step, has hidden.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
            SessionStoreError: The store cannot be read.
        """
        axis = check_axis(by)
        stored_key = encode_key(key, "key")
        query = Query.build(
            equals={"metric_key": stored_key},
            step_min=step_min,
            step_max=step_max,
            epoch_min=epoch_min,
            epoch_max=epoch_max,
            all_attempts=all_attempts,
        )
        return compare_ranks(self._run.read(MetricRecord.KIND, query), stored_key, axis)

    def iterate(
        self,
        *,
        metric_key: str | None = None,
        namespace: str | None = None,
        metric_name: str | None = None,
        step: int | None = None,
        step_min: int | None = None,
        step_max: int | None = None,
        epoch: int | None = None,
        epoch_min: int | None = None,
        epoch_max: int | None = None,
        limit: int | None = None,
        include_non_finite: bool = True,
        all_attempts: bool = False,
        rows: int = 65_536,
    ) -> Iterator[Columns]:
        """The same as `columns`, in parts, for what does not fit in memory.

        Flushes at the call; the parts are those of one moment, in persistence
        order.

        Args:
            all_attempts: Also points that a later attempt, resumed from an
                earlier step, has hidden.
            rows: About how many rows a part has.
            metric_key, namespace, metric_name, step, step_min, step_max, epoch,
                epoch_min, epoch_max, limit, include_non_finite: As in `columns`.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
            SessionStoreError: The store cannot be read.
        """
        query = build_metric_query(
            metric_key,
            namespace,
            metric_name,
            step=step,
            step_min=step_min,
            step_max=step_max,
            epoch=epoch,
            epoch_min=epoch_min,
            epoch_max=epoch_max,
            limit=limit,
            include_non_finite=include_non_finite,
            all_attempts=all_attempts,
        )
        return iterate_run(self._run, MetricRecord.KIND, query, rows)


def read_rank(run: OpenRun, query: Query, rank: int | None) -> Columns:
    """The metrics that fit a query, of one rank or of all.

    Raises:
        SchemaValidationError: `rank` is no non-negative integer.
    """
    wanted = check_index(rank, "rank")
    if wanted is None:
        return run.read(MetricRecord.KIND, query)
    found = run.read(MetricRecord.KIND, replace(query, limit=None))
    return found.take(found["rank"] == wanted).keep_newest(query.limit)


def build_metric_query(
    metric_key: str | None, namespace: str | None, metric_name: str | None, **filters: Any
) -> Query:
    """The query of a reader's arguments; names may be as they were logged or as they are stored.

    Raises:
        SchemaValidationError: A bad argument; the message names it.
    """
    names = {"metric_key": metric_key, "namespace": namespace, "metric_name": metric_name}
    equals = {
        argument: None if name is None else encode_key(name, argument)
        for argument, name in names.items()
    }
    return Query.build(equals=equals, **filters)
