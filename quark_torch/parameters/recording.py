"""Makes records of what was found of parameters, and reads them back."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, get_args

import numpy as np

from quark_core.api import (
    BufferedWriter,
    JsonObject,
    ParameterDistributionRecord,
    ParameterDistributionType,
    ParameterSummaryRecord,
    Query,
    ReadBounds,
    check_choice,
    check_index,
    spell_out,
)
from quark_torch.checks import check_flags, check_names
from quark_torch.measuring.measures import Histogram
from quark_torch.measuring.tensor_statistics import TensorStatistics
from quark_torch.parameters.listing import ListedParameter
from quark_torch.parameters.measuring import ParameterReading

if TYPE_CHECKING:
    from quark_core.api import Columns, OpenRun

_ABSENT = TensorStatistics(0, 0, 0, 0, None, None, None, None, None)


class SummaryWriter(BufferedWriter[ParameterSummaryRecord]):
    """Writes the summaries of snapshots."""

    KIND: ClassVar[str] = ParameterSummaryRecord.KIND

    def bind(self) -> None:
        """Take up the run's stream, and what its records begin with."""
        super().bind()
        origin = self._run.origin
        self._origin = (origin.run_id, origin.writer_id, origin.attempt, origin.rank)
        # Guards snapshots and steps, and is new where a fork may have left it locked.
        self.lock = threading.RLock()

    def add(
        self,
        reading: ParameterReading,
        time_us: int,
        step: int,
        epoch: int | None,
        metadata: JsonObject | None,
        *,
        has_optimizer: bool,
    ) -> ParameterSummaryRecord:
        """Record what was found of one parameter."""
        listed, place = reading.listed, reading.place
        value = reading.value or _ABSENT
        gradient = reading.gradient or _ABSENT
        update = reading.update or _ABSENT
        ratio = None
        if update.norm is not None and reading.before_norm:
            ratio = update.norm / reading.before_norm
        record = ParameterSummaryRecord(
            *self._origin,
            sequence=self._channel.take_sequence(),
            time_us=time_us,
            module_name=listed.module_name,
            module_type=listed.module_type,
            parameter_name=listed.name,
            parameter_role=listed.role,
            dtype=str(listed.parameter.dtype).removeprefix("torch."),
            element_count=reading.local.numel(),
            requires_grad=listed.parameter.requires_grad,
            in_optimizer=place is not None if has_optimizer else None,
            step=step,
            epoch=epoch,
            shape=tuple(reading.local.shape),
            value_mean=value.mean,
            value_std=value.std,
            value_min=value.minimum,
            value_max=value.maximum,
            value_norm=value.norm,
            value_near_zero_ratio=_find_near_zero_ratio(value),
            gradient_mean=gradient.mean,
            gradient_std=gradient.std,
            gradient_min=gradient.minimum,
            gradient_max=gradient.maximum,
            gradient_norm=gradient.norm,
            gradient_near_zero_ratio=_find_near_zero_ratio(gradient),
            update_mean=update.mean,
            update_std=update.std,
            update_min=update.minimum,
            update_max=update.maximum,
            update_norm=update.norm,
            update_to_parameter_ratio=ratio,
            non_finite_value_count=_count_non_finite(reading.value),
            non_finite_gradient_count=_count_non_finite(reading.gradient),
            optimizer_name=place.optimizer_name if place is not None else None,
            optimizer_group_index=place.group_index if place is not None else None,
            optimizer_group_name=place.group_name if place is not None else None,
            learning_rate=place.find_number("lr") if place is not None else None,
            weight_decay=place.find_number("weight_decay") if place is not None else None,
            metadata=metadata,
        )
        record = self._put_record(record)
        self._remember(record, 1)
        return record


class DistributionWriter(BufferedWriter[ParameterDistributionRecord]):
    """Writes the histograms of snapshots."""

    KIND: ClassVar[str] = ParameterDistributionRecord.KIND

    def bind(self) -> None:
        """Take up the run's stream, and what its records begin with."""
        super().bind()
        origin = self._run.origin
        self._origin = (origin.run_id, origin.writer_id, origin.attempt, origin.rank)

    def add(
        self,
        listed: ListedParameter,
        distribution_type: str,
        histogram: Histogram,
        time_us: int,
        step: int,
        epoch: int | None,
        metadata: JsonObject | None,
    ) -> ParameterDistributionRecord:
        """Record one histogram."""
        record = ParameterDistributionRecord(
            *self._origin,
            sequence=self._channel.take_sequence(),
            time_us=time_us,
            module_name=listed.module_name,
            module_type=listed.module_type,
            parameter_name=listed.name,
            parameter_role=listed.role,
            distribution_type=distribution_type,
            sample_count=histogram.sample_count,
            total_count=histogram.total_count,
            step=step,
            epoch=epoch,
            bin_edges=histogram.edges,
            counts=histogram.counts,
            metadata=metadata,
        )
        record = self._put_record(record)
        self._remember(record, 1)
        return record


def merge_metadata(
    found: Mapping[str, Any], own: Mapping[str, Any] | None, shared: JsonObject | None
) -> JsonObject | None:
    """What was found and the caller's metadata, which wins.

    Args:
        found: What was found of one parameter.
        own: The caller's.
        shared: The caller's as it is kept, for where nothing was found.
    """
    return JsonObject({**found, **(own or {})}) if found else shared


def _count_non_finite(statistics: TensorStatistics | None) -> int | None:
    return None if statistics is None else statistics.nan_count + statistics.inf_count


def _find_near_zero_ratio(statistics: TensorStatistics) -> float | None:
    if statistics.near_zero_count is None or not statistics.finite_count:
        return None
    near_zero = statistics.near_zero_count
    if statistics.density is not None:
        # What a sparse tensor does not store is zero.
        stored = statistics.finite_count + statistics.nan_count + statistics.inf_count
        near_zero += statistics.element_count - stored
    return near_zero / statistics.element_count


_TYPES = get_args(ParameterDistributionType)
_EQUALS = ("module_name", "module_type", "parameter_name", "parameter_role", "distribution_type")


class ParameterReadback:
    """The part of `ParameterDiagnostics` that reads what is stored."""

    _run: OpenRun

    @spell_out(ReadBounds, before="latest_only")
    def read_summaries(
        self,
        *,
        module_name: str | None = None,
        module_type: str | None = None,
        parameter_name: str | None = None,
        parameter_role: str | None = None,
        latest_only: bool = False,
        limit: int | None = None,
        all_attempts: bool = False,
        **bounds: Unpack[ReadBounds],
    ) -> tuple[ParameterSummaryRecord, ...]:
        """Flush, then read the run's parameter statistics in order of storage.

        Args:
            module_name, module_type: Name or class of the module.
            parameter_name, parameter_role: Name or role of the parameter.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.
            latest_only: Whether to return only the last record of each parameter and rank. Defaults
                to False.
            limit: Maximum number of records; the newest are kept. Defaults to all.
            all_attempts: If True, include records that a later attempt replaced. Defaults to False.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            SessionStoreError: The store cannot be read.
        """
        equals = (module_name, module_type, parameter_name, parameter_role)
        found: tuple[ParameterSummaryRecord, ...] = self._read(
            ParameterSummaryRecord.KIND, equals, bounds, latest_only, limit, all_attempts
        )
        return found

    @spell_out(ReadBounds, before="latest_only")
    def read_distributions(
        self,
        *,
        module_name: str | None = None,
        module_type: str | None = None,
        parameter_name: str | None = None,
        parameter_role: str | None = None,
        distribution_type: str | None = None,
        latest_only: bool = False,
        limit: int | None = None,
        all_attempts: bool = False,
        **bounds: Unpack[ReadBounds],
    ) -> tuple[ParameterDistributionRecord, ...]:
        """Flush, then read the run's parameter histograms in order of storage.

        Args:
            module_name, module_type: Name or class of the module.
            parameter_name, parameter_role: Name or role of the parameter.
            distribution_type: `value`, `gradient` or `update`.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.
            latest_only: Whether to return only the last record of each parameter, type and rank.
                Defaults to False.
            limit: Maximum number of records; the newest are kept. Defaults to all.
            all_attempts: If True, include records that a later attempt replaced. Defaults to False.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            SessionStoreError: The store cannot be read.
        """
        if distribution_type is not None:
            check_choice(distribution_type, "distribution_type", _TYPES)
        equals = (module_name, module_type, parameter_name, parameter_role, distribution_type)
        found: tuple[ParameterDistributionRecord, ...] = self._read(
            ParameterDistributionRecord.KIND, equals, bounds, latest_only, limit, all_attempts
        )
        return found

    def read(
        self,
    ) -> tuple[tuple[ParameterSummaryRecord, ...], tuple[ParameterDistributionRecord, ...]]:
        """Flush, then read all parameter statistics and histograms of the run.

        Raises:
            SessionStoreError: The store cannot be read.
        """
        return self.read_summaries(), self.read_distributions()

    def _read(
        self,
        kind: str,
        values: tuple[str | None, ...],
        bounds: ReadBounds,
        latest_only: bool,
        limit: int | None,
        all_attempts: bool,
    ) -> Any:
        equals = dict(zip(_EQUALS, values, strict=False))
        check_names(**equals)
        check_flags(latest_only=latest_only)
        newest = check_index(limit, "limit")
        query = Query.build(
            equals=equals,
            limit=None if latest_only else newest,
            all_attempts=all_attempts,
            **bounds,
        )
        found = self._run.read(kind, query)
        if latest_only:
            found = _keep_latest(found).keep_newest(newest)
        return found.to_records()


def _keep_latest(columns: Columns) -> Columns:
    """Of each parameter, type of distribution and rank the last row."""
    keys = [columns["rank"], columns["parameter_name"]]
    if columns.kind == ParameterDistributionRecord.KIND:
        keys.append(columns["distribution_type"])
    last = {key: row for row, key in enumerate(zip(*keys, strict=True))}
    return columns.take(np.array(sorted(last.values()), dtype=np.int64))
