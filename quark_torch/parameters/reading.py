"""How snapshots of parameters are read back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack, get_args

import numpy as np

from quark_core.api import (
    ParameterDistributionRecord,
    ParameterDistributionType,
    ParameterSummaryRecord,
    Query,
    ReadBounds,
    SchemaValidationError,
    check_choice,
    check_index,
    spell_out,
)

if TYPE_CHECKING:
    from quark_core.api import Columns, OpenRun

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
        """Flush, then return the run's summaries that fit, in persistence order.

        Args:
            module_name, module_type: Only of this module, of this class of modules.
            parameter_name, parameter_role: Only of this parameter, of this role.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.
            latest_only: Of each parameter (and rank) only the last record that fits.
            limit: The newest N of what is left.
            all_attempts: Also records that a later attempt, resumed from an
                earlier step, has hidden.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
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
        """Flush, then return the run's histograms that fit, in persistence order.

        Args:
            distribution_type: Only of value, gradient or update.
            latest_only: Of each parameter, type (and rank) only the last record that fits.
            module_name, module_type, parameter_name, parameter_role, step,
            step_min, step_max, epoch, epoch_min, epoch_max, limit,
            all_attempts: As in `read_summaries`.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
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
        """Flush, then return all of the run's summaries and histograms.

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
        for name, value in equals.items():
            if value is not None and not isinstance(value, str):
                raise SchemaValidationError(f"{name} must be a str, not {type(value).__name__}")
        if not isinstance(latest_only, bool):
            raise SchemaValidationError(
                f"latest_only must be True or False, not a {type(latest_only).__name__}"
            )
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
