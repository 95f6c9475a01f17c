"""MetricsLogger: scalar metrics, logged and read back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice
from math import isfinite
from time import time_ns
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Never, NoReturn, Self, Unpack, overload

from quark_core.backends.run_summary import RunSummary
from quark_core.config.migration_hints import NOT_GIVEN, explain_arguments, hide_refused
from quark_core.config.redaction import redact_object, redact_text
from quark_core.delivery.channel import MetricKey, MetricRow, expand_row
from quark_core.errors import QuarkError, SchemaValidationError, SessionStoreError
from quark_core.ranks.statistics import RankStatistics, check_axis, compare_ranks
from quark_core.records import MetricRecord
from quark_core.records.base import check_timestamp, now_us
from quark_core.records.json_object import JsonObject, normalize_object
from quark_core.records.names import (
    check_name,
    check_text,
    encode_name,
    join_name,
    keep_encoded,
    split_name,
)
from quark_core.records.query import MetricFilters, Query, check_index, check_step, spell_out
from quark_core.runs.opening import resolve_target
from quark_core.runs.reading import describe_unknown_metric, encode_key, reduce_columns
from quark_core.runs.run_reader import iterate_run
from quark_core.runs.step_counters import read_step
from quark_core.writers.buffered_writer import BufferedWriter
from quark_core.writers.loop_metrics import LoopMetrics
from quark_core.writers.scalars import flatten, names_part, to_float

if TYPE_CHECKING:
    from quark_core.backends.series import Series
    from quark_core.records.columns import Columns
    from quark_core.runs.open_run import OpenRun

# Which step a call has that gives none: the session's, or one that its logger counts.
#
# `session.step(n)` is one attribute of the run, which every writer of this process looks at
# where a call gives no step. `StepCount` is of one logger made with `auto_step=True`.

_log = logging.getLogger("quark")

_MAX_NAMES = 100_000


class StepScope:
    """What `session.step(n)` returns: the step is set already, and a `with` block takes it back.

    As a context manager it puts back, at the end of the block, what was set before the call.
    Outside of a `with` block nothing need be done with it.
    """

    __slots__ = ("_before", "_run", "step")

    def __init__(self, run: OpenRun, step: object) -> None:
        self.step = read_step(run, step)
        self._run = run
        self._before = run.step
        run.step = self.step

    def __repr__(self) -> str:
        return f"StepScope({self.step})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._run.step = self._before


class StepCount:
    """Counts the steps of a logger whose calls give none; takes no lock.

    A call with several metrics is a step of its own. Single values belong to the step that is
    counted until one of their names comes again, which begins the next: `log("loss", …)` and
    `log("accuracy", …)` of one turn of a loop share a step.

    Args:
        first: The first step.
    """

    def __init__(self, first: int) -> None:
        self._numbers = count(first)
        self._current = -1
        self._names: dict[Any, int] = {}

    def count_call(self, names: Iterable[Any]) -> int:
        """The step of a call that logs several metrics."""
        self._current = step = next(self._numbers)
        if len(self._names) > _MAX_NAMES:
            self._names = {}
        self._names.update(dict.fromkeys(names, step))
        return step

    def count_value(self, name: Any) -> int:
        """The step of a call that logs one value."""
        step = self._current
        if step < 0 or self._names.get(name, -1) >= step:
            return self.count_call((name,))
        self._names[name] = step
        return step


def find_next_step(run: OpenRun) -> int:
    """The step that a logger of this run counts from: 0, or after the newest of a resumed run.

    A store that cannot be read now costs a warning: counting then begins at 0.
    """
    run_id = run.context.run_id
    if not run.context.run.attempt or run.reader is None or run_id is None:
        return 0
    from quark_core.runs.run_search import summarize_run

    try:
        if run.begun_offline:
            raise SessionStoreError("the run started without its store")
        run.flush()
        newest = summarize_run(run.reader, run_id).newest_step
    except QuarkError as error:
        _log.warning("run %s: its newest step cannot be read, so steps are counted from 0: %s",
                     run_id, error)  # fmt: skip
        return 0
    return 0 if newest is None else newest + 1


def describe_missing_step(call: str) -> SchemaValidationError:
    """The error of a call that gives neither step nor epoch.

    Args:
        call: What to write, but for the step: `log("loss", …`.
    """
    return SchemaValidationError(
        f"step or epoch is required: write metrics.{call}, step=step). Or call "
        "session.step(step) once for all calls that follow, or create the logger with "
        "MetricsLogger(session, auto_step=True), which counts the steps."
    )


class MetricReading:
    """The part of `MetricsLogger` that reads curves and parts."""

    _run: OpenRun

    def series(
        self,
        key: str,
        *,
        max_points: int | None = None,
        all_attempts: bool = False,
        rank: int | None = None,
    ) -> Series:
        """Flush, then read one metric as a curve, quickly for any number of points.

        Args:
            key: Key of the metric, as logged or as stored.
            max_points: Maximum number of entries. Each entry combines about equally many points,
                with their minimum and maximum. None returns each point.
            all_attempts: If True, include points that a later attempt replaced. Defaults to False.
            rank: Rank that logged the points. Defaults to all ranks: an entry then combines the
                points of all ranks at a step or range of steps.

        Returns:
            The curve; empty if the run does not have the metric.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            SessionStoreError: The store cannot be read.
        """
        return read_run_series(self._run, key, max_points, all_attempts, rank)

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
        """Flush, then read the statistics of one metric over all ranks.

        Computed from the values that each rank logged, so ranks do not wait for each other. For the
        curve of one rank, use `series(key, rank=...)`.

        Args:
            key: Key of the metric, as logged or as stored.
            by: "step" or "epoch": counter by which values are combined. Defaults to "step".
            step_min, step_max, epoch_min, epoch_max: Bounds, inclusive.
            all_attempts: If True, include points that a later attempt replaced. Defaults to False.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
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
        return compare_ranks(_read(self._run, query), stored_key, axis)

    @spell_out(MetricFilters, before="include_non_finite")
    def iterate(
        self,
        *,
        include_non_finite: bool = True,
        rows: int = 65_536,
        **filters: Unpack[MetricFilters],
    ) -> Iterator[Columns]:
        """Read metrics as NumPy arrays in parts, for data larger than memory.

        The run is flushed at the call. All parts are from that moment, in order of storage.

        Args:
            rows: Approximate number of rows per part. Defaults to 65,536.
            metric_key, namespace, metric_name, limit, rank, all_attempts, include_non_finite: See
                `read`.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            SessionStoreError: The store cannot be read.
        """
        query = build_metric_query(include_non_finite=include_non_finite, **filters)
        parts = iterate_run(self._run, MetricRecord.KIND, query, rows)
        return _tell_if_empty(self._run, query, parts)


_SHOWN = 128


def series(
    run: object,
    key: str,
    *,
    max_points: int | None = None,
    all_attempts: bool = False,
    rank: int | None = None,
) -> Series:
    """Read one metric of a run as a curve, quickly for any number of points.

    An open run is flushed first.

    Args:
        run: A TrainingSession or a RunContext.
        key: Key of the metric, as logged or as stored.
        max_points: Maximum number of entries. Each entry combines about equally many points, with
            their minimum and maximum. None returns each point.
        all_attempts: If True, include points that a later attempt replaced. Defaults to False.
        rank: Rank that logged the points. Defaults to all ranks: an entry then combines the points
            of all ranks at a step or range of steps.

    Returns:
        The curve; empty if the run does not have the metric. `ranks` lists the ranks of the points.

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
        SessionStoreError: The store cannot be read.
    """
    if isinstance(run, (str, RunSummary)):
        run_id = run if isinstance(run, str) else run.run_id
        raise SchemaValidationError(
            f"run must be an open run, not {type(run).__name__}. Pass "
            f"quark.open_run({run_id[:_SHOWN]!r})"
        )
    try:
        target = resolve_target(run)
    except SchemaValidationError as error:
        message = str(error).replace("session", "run", 1)
        raise SchemaValidationError(f"{message}; quark.open_run(run_id) opens a run") from None
    return read_run_series(target, key, max_points, all_attempts, rank)


def read_run_series(
    run: OpenRun,
    key: str,
    max_points: int | None,
    all_attempts: bool = False,
    rank: int | None = None,
) -> Series:
    """Flush, then read one metric; arguments and errors as in `series`."""
    from quark_core.backends.series import check_max_points
    from quark_core.records.columns import Columns
    from quark_core.runs.following import read_series

    stored_key = encode_key(key, "key")
    bound, wanted = check_max_points(max_points), check_index(rank, "rank")
    run.catch_up()
    reader, run_id = run.reader, run.context.run_id
    if reader is None or run_id is None:
        return reduce_columns(stored_key, Columns.empty(MetricRecord.KIND), bound)
    found = read_series(reader, run_id, stored_key, bound, bool(all_attempts), wanted)
    if not len(found.count):
        tell_unknown_metric(run, stored_key)
    return found


def tell_unknown_metric(run: OpenRun, key: str) -> None:
    """Warn once of a metric that was read and that the run does not have, where one is near it.

    Costs nothing more once it was looked up: a script may ask again and again for what is
    yet to be logged.

    Args:
        run: The run, flushed.
        key: The stored key.
    """
    from quark_core.runs.run_search import summarize_run

    if run.reader is None or run.context.run_id is None or not run.warns_first("missed", key):
        return
    try:
        keys = summarize_run(run.reader, run.context.run_id).metrics
    except QuarkError:
        return
    if key not in keys and (said := describe_unknown_metric(key, keys)):
        _log.warning("run %s %s; nothing was read", run.context.run_id, said)


def build_metric_query(
    *, include_non_finite: bool = True, **filters: Unpack[MetricFilters]
) -> Query:
    """The query of a reader's arguments; names may be as they were logged or as they are stored.

    Raises:
        SchemaValidationError: A bad argument; the message names it.
    """
    bounds: dict[str, Any] = {**filters}
    equals = {
        argument: None if name is None else encode_key(name, argument)
        for argument in ("metric_key", "namespace", "metric_name")
        for name in (bounds.pop(argument, None),)
    }
    return Query.build(equals=equals, include_non_finite=include_non_finite, **bounds)


def _read(run: OpenRun, query: Query) -> Columns:
    found = run.read(MetricRecord.KIND, query)
    if not found.count and "metric_key" in query.equals:
        tell_unknown_metric(run, query.equals["metric_key"])
    return found


def _tell_if_empty(run: OpenRun, query: Query, parts: Iterator[Columns]) -> Iterator[Columns]:
    count = 0
    for part in parts:
        count += part.count
        yield part
    if not count and "metric_key" in query.equals:
        tell_unknown_metric(run, query.equals["metric_key"])


_INT64_MAX = 2**63 - 1
_ONLY_FLOATS = {float}
# Bounds what a script that makes up names as it goes can keep in memory.
_MAX_CACHED_KEYS = 100_000
_MAX_CACHED_SHAPES = 1_000
_MAX_TOLD = 1_000


class MetricsLogger(BufferedWriter[MetricRecord], MetricReading, LoopMetrics):
    """Writer and reader of scalar metrics.

    `log` and `log_many` take microseconds, without a lock or system call, and do not wait for a
    store. Thread-safe.

    Args:
        session: A TrainingSession, or its RunContext.
        batch_size: Number of records that `flush()` returns and that are written together. Defaults
            to 100.
        auto_step: Whether to count the step of calls that pass none: one step per call of
            `log({…})` and `log_many`. Single values share a step until a name repeats. The count
            starts at 0, or after the newest step of a resumed run. A call with a step is not
            counted, and `session.step` is ignored. Defaults to False.

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
    """

    KIND: ClassVar[str] = MetricRecord.KIND

    def __init__(self, session: object, *, batch_size: int = 100, auto_step: bool = False) -> None:
        if not isinstance(auto_step, bool):
            raise SchemaValidationError(
                f"auto_step must be True or False, not {type(auto_step).__name__}"
            )
        super().__init__(session, batch_size=batch_size)
        self._steps = StepCount(find_next_step(self._run)) if auto_step else None
        self._non_finite = self._run.non_finite
        # Plain tuples: a named one is taken apart three times as slowly.
        self._keys: dict[Any, tuple[str, str | None, str]] = {}
        self._shapes: dict[Any, tuple[MetricKey, ...]] = {}

    def bind(self) -> None:
        """Connect to the run's stream."""
        super().bind()
        self._bind_gatherings()

    @overload
    def log(
        self,
        metric: str,
        value: float,
        *,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> MetricRecord: ...

    @overload
    def log(
        self,
        metric: Mapping[str, Any],
        *,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        timestamp: str | None = None,
    ) -> None: ...

    @hide_refused
    def log(
        self,
        metric: str | Mapping[str, Any],
        value: Any = NOT_GIVEN,
        _third: Any = NOT_GIVEN,
        *,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
        **unknown: Never,
    ) -> MetricRecord | None:
        """Log one value, and return its record at once; `log({…}, step=…)` is `log_many`.

        Args:
            metric: Full key such as "train/loss", or a name within `namespace`. Or a mapping of
                names to values; the call then returns None.
            value: A Python, NumPy or torch number, a bool, or an array or tensor with one element.
                A CUDA tensor makes the call wait for the GPU. For a sharded tensor, the local part
                is logged, with a `metric_sharded` event.
            step, epoch: Counters. At least one is needed, unless `session.step(n)` or `auto_step`
                sets the step. Whole floats are accepted. A 32-bit counter that overflows is
                continued.
            namespace: Prefix of the key, joined with a slash.
            description: Description.
            metadata: JSON values; copied.
            timestamp: Time as ISO 8601 text. Defaults to now.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it. In strict mode,
                also for a non-finite value or an unusual name.
            InvalidRunStateError: The writer is closed or the run has ended.
        """
        if self._closed or self._run.refusal is not None:
            self._check_open("log")
        try:
            key = self._keys[metric if namespace is None else (namespace, metric)]
        except Exception:  # noqa: BLE001 - new, or an object that raises when it is hashed
            if isinstance(metric, Mapping):
                alone = (value, description, metadata)
                place = (step, epoch, namespace, timestamp)
                self._log_mapping(metric, alone, place, _third, unknown)
                return None
            key = self._resolve(metric, namespace)
        if _third is not NOT_GIVEN or unknown:
            _refuse_arguments("log", (_third,), unknown)
        if type(value) is not float:
            given, value = value, self._read_value(metric, value)
            if type(given) is not int and names_part(given):
                self._note_part(key[0], "value", step)
        if type(step) is not int or step < 0 or step > _INT64_MAX:
            step = read_step(self._run, step)
            if step is None:
                step = self._find_step(epoch, metric, value, key[0])
        if epoch is not None and (type(epoch) is not int or epoch < 0 or epoch > _INT64_MAX):
            epoch = check_step(epoch, "epoch")
        taken = None if metadata is None else redact_object(normalize_object(metadata, "metadata"))
        if description is not None:
            description = redact_text(check_text(description, "description"))
        time_us = time_ns() // 1000 if timestamp is None else check_timestamp(timestamp)
        metric_key, key_namespace, metric_name = key
        if self._non_finite or not isfinite(value):
            self._note_finiteness(metric_key, value, step, epoch)
        record = MetricRecord(
            self._run_id, self._writer_id, self._attempt, self._rank, self._take_sequence(),
            time_us, metric_key, key_namespace, metric_name, value, step, epoch, description,
            taken,
        )  # fmt: skip
        self._append(record)
        # Written out from _remember, since a call costs time.
        self._recent.append(record)
        self._recent_records += 1
        if self._recent_records >= self._batch_size:
            self._recent.clear()
            self._recent_records = 0
        return record

    @hide_refused
    def log_many(
        self,
        metrics: Mapping[str, Any],
        *surplus: Never,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        timestamp: str | None = None,
        **unknown: Never,
    ) -> None:
        """Log several metrics of one step, and return at once.

        Args:
            metrics: Key -> value, as in `log`. A mapping as value adds a namespace: `{"train":
                {"loss": 0.1}}` is `train/loss`.
            step, epoch, namespace, timestamp: See `log`.

        Raises:
            SchemaValidationError: An argument is invalid; no value is logged. In strict mode, also
                as in `log`, and for a value that is not a number. Otherwise such a value is
                omitted, with one `metric_refused` event.
            InvalidRunStateError: The writer is closed or the run has ended.
        """
        if self._closed or self._run.refusal is not None:
            self._check_open("log_many")
        try:
            names = tuple(metrics)
            values = list(metrics.values())
        except Exception:  # noqa: BLE001 - a foreign object may raise anything
            self._refuse_metrics(metrics)
        if len(names) != len(values):
            self._refuse_metrics(metrics)
        try:
            keys = self._shapes[names if namespace is None else (namespace, names)]
        except Exception:  # noqa: BLE001 - new, or an object that raises when it is hashed
            keys = self._resolve_many(names, values, namespace)
        if surplus or unknown:
            _refuse_arguments("log_many", surplus, unknown)
        if set(map(type, values)) != _ONLY_FLOATS:
            if not values:
                return
            if any(isinstance(value, Mapping) for value in values):
                flat = flatten(metrics, "metrics")
                self.log_many(
                    flat, step=step, epoch=epoch, namespace=namespace, timestamp=timestamp
                )
                return
            keys, values = self._read_values(names, keys, values, step)
            if not values:
                return
        if type(step) is not int or step < 0 or step > _INT64_MAX:
            step = read_step(self._run, step)
            if step is None:
                step = self._find_step_of_many(epoch, keys)
        if epoch is not None and (type(epoch) is not int or epoch < 0 or epoch > _INT64_MAX):
            epoch = check_step(epoch, "epoch")
        time_us = time_ns() // 1000 if timestamp is None else check_timestamp(timestamp)
        # A sum of finite values that overflows only costs the closer look.
        if not isfinite(sum(values)) or self._non_finite:
            for key, value in zip(keys, values, strict=True):
                self._note_finiteness(key[0], value, step, epoch)
        self._hand_over_row(time_us, step, epoch, keys, values)

    @spell_out(MetricFilters, before="include_non_finite")
    def read(
        self, *, include_non_finite: bool = True, **filters: Unpack[MetricFilters]
    ) -> tuple[MetricRecord, ...]:
        """Flush, then read the run's metric records in order of storage.

        Args:
            metric_key: Key, as logged or as stored. For an unknown key, the result is empty and
                similar names are logged once.
            namespace: Namespace of the key.
            metric_name: Last segment of the key.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.
            limit: Maximum number of records; the newest are kept. Defaults to all.
            include_non_finite: Whether to include NaN and infinite values. Defaults to True.
            all_attempts: If True, include points that a later attempt replaced. Defaults to False.
            rank: Rank that logged the values. Defaults to all ranks.

        Raises:
            SchemaValidationError: A bound is not a non-negative integer.
            SessionStoreError: The store cannot be read.
        """
        return self.columns(  # type: ignore[return-value]
            include_non_finite=include_non_finite, **filters
        ).to_records()

    @spell_out(MetricFilters, before="include_non_finite")
    def columns(
        self, *, include_non_finite: bool = True, **filters: Unpack[MetricFilters]
    ) -> Columns:
        """Read the same records as `read`, as NumPy arrays: `columns(...)["value"]`.

        Non-finite values are included, and the column `finite` is False for them. A missing step or
        epoch is -1.

        Args:
            metric_key, namespace, metric_name, limit, rank, all_attempts, include_non_finite: See
                `read`.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            SessionStoreError: The store cannot be read.
        """
        query = build_metric_query(include_non_finite=include_non_finite, **filters)
        return _read(self._run, query)

    def _expand(self, item: Any) -> list[MetricRecord]:
        if type(item) is not tuple:
            return [item]
        row: MetricRow = item
        return expand_row(row, self._origin)

    def _hand_over_row(
        self,
        time_us: int,
        step: int | None,
        epoch: int | None,
        keys: tuple[MetricKey, ...],
        values: list[float],
    ) -> None:
        count = len(values)
        sequences = list(islice(self._channel.sequence, count))
        if sequences[-1] - sequences[0] == count - 1:
            row = (sequences[0], time_us, step, epoch, keys, values)
            self._append(row)
            self._remember(row, count)
            return
        # Another thread drew numbers in between, which needs an interpreter without a GIL.
        for sequence, key, value in zip(sequences, keys, values, strict=True):
            single = (sequence, time_us, step, epoch, (key,), [value])
            self._append(single)
            self._remember(single, 1)

    def _log_mapping(
        self,
        metrics: Mapping[str, Any],
        alone: tuple[Any, ...],
        place: tuple[Any, ...],
        third: Any,
        unknown: Mapping[str, Any],
    ) -> None:
        """`log({…})`.

        Raises:
            SchemaValidationError, InvalidRunStateError: As of `log_many`; also arguments that a
                mapping has no use for.
            TypeError: Arguments of no known name.
        """
        value, description, metadata = alone
        if value is not NOT_GIVEN:
            raise SchemaValidationError(
                "metrics.log({…}) takes its step by name: write metrics.log({…}, step=step)"
            )
        if description is not None or metadata is not None:
            raise SchemaValidationError(
                "metrics.log({…}) takes no description or metadata, because they belong to one "
                "value. Write metrics.log(name, value, step=step, description=…, metadata=…)"
            )
        if unknown or third is not NOT_GIVEN:
            _refuse_arguments("log", (third,), unknown)
        step, epoch, namespace, timestamp = place
        self.log_many(metrics, step=step, epoch=epoch, namespace=namespace, timestamp=timestamp)

    def _read_values(
        self, names: tuple[str, ...], keys: tuple[MetricKey, ...], values: list[Any], step: object
    ) -> tuple[tuple[MetricKey, ...], list[float]]:
        """The values that are numbers, as floats, and their keys.

        Raises:
            SchemaValidationError: In strict mode, one is no number or a part of one.
        """
        kept, numbers = [], []
        for name, key, value in zip(names, keys, values, strict=True):
            if type(value) is float:
                kept.append(key)
                numbers.append(value)
                continue
            argument = f"metrics[{name!r}]"
            try:
                number = to_float(value, argument, "metrics.log_many")
            except SchemaValidationError as error:
                if self._run.strict:
                    raise
                self._tell_of_value("metric_refused", key[0], f"{error}; it is omitted", step)
                continue
            if type(value) is not int and names_part(value):
                self._note_part(key[0], argument, step)
            kept.append(key)
            numbers.append(number)
        return tuple(kept), numbers

    def _note_part(self, metric_key: str, argument: str, step: object) -> None:
        said = (
            f"{argument} is a sharded tensor, so only the part on this process is logged. For "
            "the whole, log value.full_tensor().item(), which all processes must call"
        )
        if self._run.strict:
            raise SchemaValidationError(said)
        self._tell_of_value("metric_sharded", metric_key, said, step)

    def _tell_of_value(self, event_type: str, metric_key: str, said: str, step: object) -> None:
        """Say once what is odd about a metric's values: in the log, and by an event."""
        if len(self._run.warned) >= _MAX_TOLD or not self._run.warns_first(event_type, metric_key):
            return
        if event_type != "metric_sharded":  # of which to_float has warned
            _log.warning("run %s: %s. This is logged once per metric.", self._run_id, said)
        self._run.emit_event(
            event_type,
            "warning",
            step=step if type(step) is int and 0 <= step <= _INT64_MAX else self._run.step,
            payload=normalize_object({"metric_key": metric_key, "message": said}, "payload"),
        )

    @staticmethod
    def _read_value(metric: object, value: Any) -> float:
        if value is NOT_GIVEN:
            raise TypeError(
                f"metrics.log() requires a value: write metrics.log({_show(metric)}, value, "
                'step=step), or metrics.log({"train/loss": value}, step=step) for several'
            )
        try:
            return to_float(value, "value", "metrics.log")
        except SchemaValidationError as error:
            raise SchemaValidationError(f"{error} (metric {_show(metric)})") from None

    def _find_step(
        self, epoch: int | None, metric: object, value: float, metric_key: str
    ) -> int | None:
        """The step of a call that gives none; None where it has an epoch instead.

        Raises:
            SchemaValidationError: It has neither.
        """
        steps = self._steps
        step = self._run.step if steps is None else steps.count_value(metric_key)
        if step is None and epoch is None:
            raise describe_missing_step(f"log({_show(metric)}, {value!r}")
        return step

    def _find_step_of_many(self, epoch: int | None, keys: tuple[MetricKey, ...]) -> int | None:
        """As `_find_step`, for a call with several metrics."""
        steps = self._steps
        step = self._run.step
        if steps is not None:
            step = steps.count_call([key.metric_key for key in keys])
        if step is None and epoch is None:
            raise describe_missing_step("log({…}")
        return step

    def _resolve(self, metric: object, namespace: object) -> tuple[str, str | None, str]:
        """Check and, where needed, encode a name seen for the first time."""
        name = check_name(metric, "metric")
        if namespace is not None:
            name = join_name(check_name(namespace, "namespace"), name)
            check_name(name, "namespace and metric together")
        stored = encode_name(name)
        keep_encoded(name, stored, "metric", "metric", strict=self._run.strict)
        key = (stored, *split_name(stored))
        if len(self._keys) >= _MAX_CACHED_KEYS:
            self._tell_many_names()
            self._keys.clear()
        self._keys[metric if namespace is None else (namespace, metric)] = key
        return key

    def _tell_many_names(self) -> None:
        """Say once in a run that it has so many names that something of them may be data."""
        if not self._run.warns_first("many_names"):
            return
        _log.warning(
            "run %s has more than %d metric names, the newest of them %r. All points are "
            "stored, but many names make delivery and reading slower. Put values that change "
            "with each call into step=, metadata= or an event.",
            self._run_id,
            len(self._keys),
            next(reversed(self._keys.values()))[0],
        )

    def _resolve_many(
        self, names: tuple[str, ...], values: list[Any], namespace: str | None
    ) -> tuple[MetricKey, ...]:
        if namespace is not None:
            check_name(namespace, "namespace")
        if any(isinstance(value, Mapping) for value in values):
            return ()  # the names are none of metrics: log_many flattens them first
        keys = []
        for name in names:
            try:
                known = self._keys.get(name if namespace is None else (namespace, name))
            except Exception:  # noqa: BLE001 - as in log_many
                known = None
            keys.append(MetricKey(*(known or self._resolve(name, namespace))))
        shape = tuple(keys)
        if len(self._shapes) >= _MAX_CACHED_SHAPES:
            self._shapes.clear()
        self._shapes[names if namespace is None else (namespace, names)] = shape
        return shape

    def _note_finiteness(
        self, metric_key: str, value: float, step: int | None, epoch: int | None
    ) -> None:
        """Tell once when a metric stops being finite, and once when it is so again."""
        seen = self._non_finite.get(metric_key, 0)
        if isfinite(value):
            if seen:
                self._non_finite.pop(metric_key, None)
                self._run.emit_event(
                    "metric_recovered",
                    "info",
                    step=step,
                    epoch=epoch,
                    payload=JsonObject({"metric_key": metric_key, "non_finite_count": seen}),
                    time_us=now_us(),
                )
            return
        if self._run.strict:
            raise SchemaValidationError(f"value of {metric_key!r} must be finite, got {value}")
        self._non_finite[metric_key] = seen + 1
        if not seen:
            self._run.emit_event(
                "non_finite_metric",
                "warning",
                step=step,
                epoch=epoch,
                payload=normalize_object({"metric_key": metric_key, "value": value}, "payload"),
                time_us=now_us(),
            )

    @staticmethod
    def _refuse_metrics(metrics: object) -> NoReturn:
        raise SchemaValidationError(
            f"metrics must be a mapping of names to numbers, not {type(metrics).__name__}"
        )


def _refuse_arguments(call: str, surplus: tuple[Any, ...], unknown: Mapping[str, Any]) -> NoReturn:
    """Say what to write in place of arguments that `log` and `log_many` do not have."""
    raise explain_arguments(getattr(MetricsLogger, call), f"metrics.{call}", surplus, unknown)


def _show(metric: object) -> str:
    return repr(metric)[:60] if isinstance(metric, str) else "name"
