"""How batches are read back, and what is found out from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from quark_core.batch_contents import spell_sample_id
from quark_core.batch_summaries import (
    DataDiagnosticsSummary,
    DiagnosticRules,
    ExposureSummary,
    HardBatchFinding,
)
from quark_core.query import Query, check_index
from quark_core.records import BatchDiagnosticRecord
from quark_core.run_reading import iterate_run

if TYPE_CHECKING:
    from quark_core.columns import Columns
    from quark_core.open_run import OpenRun

__all__ = ["BatchReading"]

_PART_ROWS = 4096


class BatchReading:
    """The part of `DataDiagnostics` that reads."""

    _run: OpenRun
    _rules: DiagnosticRules

    def read(
        self,
        *,
        sample_id: int | str | None = None,
        step: int | None = None,
        step_min: int | None = None,
        step_max: int | None = None,
        epoch: int | None = None,
        epoch_min: int | None = None,
        epoch_max: int | None = None,
        limit: int | None = None,
        include_non_finite: bool = False,
        all_attempts: bool = False,
    ) -> tuple[BatchDiagnosticRecord, ...]:
        """Flush, then return the run's batch records that fit, in persistence order.

        Args:
            sample_id: Only batches with this sample. 17 and "17" are the same
                sample, however the id was logged.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.
            limit: The newest N of those that fit everything else.
            include_non_finite: Also batches whose loss is NaN or infinite.
            all_attempts: Also batches that a later attempt, resumed from an
                earlier step, has hidden.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
            SessionStoreError: The store cannot be read.
        """
        query = Query.build(
            step=step,
            step_min=step_min,
            step_max=step_max,
            epoch=epoch,
            epoch_min=epoch_min,
            epoch_max=epoch_max,
            limit=limit if sample_id is None else None,
            include_non_finite=include_non_finite,
            all_attempts=all_attempts,
        )
        found: Any
        if sample_id is None:
            found = self._run.read(BatchDiagnosticRecord.KIND, query).to_records()
            return found  # type: ignore[no-any-return]
        import numpy as np

        wanted = _spell_either_way(sample_id)
        newest = check_index(limit, "limit")
        chosen: list[Any] = []
        for part in self._iterate(query):
            rows = [
                row
                for row, ids in enumerate(part["sample_ids"])
                if ids is not None and not wanted.isdisjoint(ids)
            ]
            if rows:
                chosen.extend(part.take(np.array(rows)).to_records())
                # What is too old is let go of, so that it is never all in memory.
                if newest is not None:
                    del chosen[: max(0, len(chosen) - newest)]
        return tuple(chosen)

    def summarize_exposure(
        self,
        *,
        step: int | None = None,
        step_min: int | None = None,
        step_max: int | None = None,
        epoch: int | None = None,
        epoch_min: int | None = None,
        epoch_max: int | None = None,
        all_attempts: bool = False,
    ) -> ExposureSummary:
        """Flush, then count what the training has seen: classes, samples and lengths.

        Batches whose loss is not finite were seen too, and are counted.

        Args:
            step, step_min, step_max, epoch, epoch_min, epoch_max, all_attempts: As in `read`.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
            SessionStoreError: The store cannot be read.
        """
        from quark_core.batch_survey import ExposureCount

        count = ExposureCount()
        query = _build_range(step, step_min, step_max, epoch, epoch_min, epoch_max, all_attempts)
        for part in self._iterate(query):
            count.add(part)
        return count.summarize()

    def find_hard_batches(
        self,
        *,
        step: int | None = None,
        step_min: int | None = None,
        step_max: int | None = None,
        epoch: int | None = None,
        epoch_min: int | None = None,
        epoch_max: int | None = None,
        limit: int | None = 10,
        all_attempts: bool = False,
    ) -> tuple[HardBatchFinding, ...]:
        """Flush, then return the batches whose loss is far above that of the others.

        `HardBatchFinding.reasons` lists the rules. Batches whose loss is not
        finite come first, in the order of their steps; then by loss, the
        highest first; among equal ones by step and order of logging. Where all
        losses are equal no finite one is hard.

        Args:
            limit: At most so many; None for all.
            step, step_min, step_max, epoch, epoch_min, epoch_max, all_attempts:
                As in `read`. "The others" are those of the same range.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
            SessionStoreError: The store cannot be read.
        """
        from quark_core.batch_survey import BatchSurvey

        bound = check_index(limit, "limit")
        query = _build_range(step, step_min, step_max, epoch, epoch_min, epoch_max, all_attempts)
        survey = BatchSurvey(self._iterate(query))
        hard = survey.find_hard(self._rules).keep(bound)
        return survey.describe_hard(hard, survey.fetch(self._iterate(query), hard))

    def summarize(
        self,
        *,
        step: int | None = None,
        step_min: int | None = None,
        step_max: int | None = None,
        epoch: int | None = None,
        epoch_min: int | None = None,
        epoch_max: int | None = None,
        hard_batch_limit: int | None = 10,
        all_attempts: bool = False,
    ) -> DataDiagnosticsSummary:
        """Flush, then return everything that is found out about the batches of a range.

        Args:
            hard_batch_limit: At most so many hard batches, and outliers of each
                quantity, are listed; None for all. They are all counted.
            step, step_min, step_max, epoch, epoch_min, epoch_max, all_attempts: As in `read`.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
            SessionStoreError: The store cannot be read.
        """
        from quark_core.batch_survey import BatchSurvey, ExposureCount

        bound = check_index(hard_batch_limit, "hard_batch_limit")
        query = _build_range(step, step_min, step_max, epoch, epoch_min, epoch_max, all_attempts)
        exposure = ExposureCount()
        survey = BatchSurvey(self._iterate(query), exposure=exposure, lengths=True)
        rules = self._rules
        everything = (
            survey.find_hard(rules),
            survey.find_loss_outliers(rules),
            survey.find_length_outliers(rules),
        )
        hard, losses, lengths = (found.keep(bound) for found in everything)
        records = survey.fetch(self._iterate(query), hard, losses, lengths)
        return DataDiagnosticsSummary(
            batch_count=len(survey),
            loss_summary=survey.summarize_loss(),
            sequence_length_summary=exposure.summarize_lengths(),
            exposure=exposure.summarize(),
            hard_batch_count=len(everything[0]),
            hard_batches=survey.describe_hard(hard, records),
            loss_outlier_count=len(everything[1]),
            loss_outliers=survey.describe_outliers(losses, records, "loss"),
            sequence_length_outlier_count=len(everything[2]),
            sequence_length_outliers=survey.describe_outliers(lengths, records, "sequence_length"),
            loss_thresholds=hard.thresholds,
            sequence_length_thresholds=lengths.thresholds,
            min_batches_for_outlier_detection=rules.min_batches,
        )

    def _iterate(self, query: Query) -> Iterator[Columns]:
        return iterate_run(self._run, BatchDiagnosticRecord.KIND, query, _PART_ROWS)


def _spell_either_way(sample_id: int | str) -> set[int | str]:
    """An id as a number and as text."""
    found = spell_sample_id(sample_id, "sample_id")
    if isinstance(found, int):
        return {found, str(found)}
    digits = found.removeprefix("-")
    if digits.isascii() and digits.isdecimal() and len(digits) < 20 and str(int(found)) == found:
        return {found, int(found)}
    return {found}


def _build_range(
    step: int | None,
    step_min: int | None,
    step_max: int | None,
    epoch: int | None,
    epoch_min: int | None,
    epoch_max: int | None,
    all_attempts: bool,
) -> Query:
    return Query.build(
        step=step,
        step_min=step_min,
        step_max=step_max,
        epoch=epoch,
        epoch_min=epoch_min,
        epoch_max=epoch_max,
        all_attempts=all_attempts,
    )
