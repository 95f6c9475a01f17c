"""DataDiagnostics: what was in each training batch and what it cost, without any sample itself.

Also how that is read back, and what is found out from it.
"""

from __future__ import annotations

import logging
import re
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import PurePath
from time import time_ns
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from quark_core.config.redaction import cut_text
from quark_core.errors import SchemaValidationError
from quark_core.records import BatchDiagnosticRecord
from quark_core.records.base import check_timestamp, now_us
from quark_core.records.json_object import normalize_object
from quark_core.records.query import Query, ReadBounds, check_index, check_step, spell_out
from quark_core.runs.run_reader import iterate_run
from quark_core.runs.step_counters import read_step
from quark_core.samples.metadata import (
    BatchContents,
    BatchMetadata,
    BatchMetadataAdapter,
    MappingBatchMetadataAdapter,
    is_like_mapping,
    spell_sample_id,
)
from quark_core.samples.survey import (
    DataDiagnosticsSummary,
    DiagnosticRules,
    ExposureSummary,
    HardBatchFinding,
)
from quark_core.writers.buffered_writer import BufferedWriter
from quark_core.writers.scalars import to_amount

if TYPE_CHECKING:
    from quark_core.records.columns import Columns
    from quark_core.runs.open_run import OpenRun
    from quark_core.runs.run_reader import RunReader

_PART_ROWS = 4096


class BatchReading:
    """The part of `DataDiagnostics` that reads.

    Args:
        run: The run.
        rules: What makes a batch a hard one; those of the default settings for None.
    """

    def __init__(self, run: OpenRun | RunReader, rules: DiagnosticRules | None = None) -> None:
        # A writer has an OpenRun here; what reads needs no more than both can do.
        self._run: Any = run
        self._rules = _make_rules(DataDiagnosticsConfig()) if rules is None else rules

    @spell_out(ReadBounds, before="limit")
    def read(
        self,
        *,
        sample_id: int | str | None = None,
        limit: int | None = None,
        include_non_finite: bool = False,
        all_attempts: bool = False,
        **bounds: Unpack[ReadBounds],
    ) -> tuple[BatchDiagnosticRecord, ...]:
        """Flush, then read the run's batch records in order of storage.

        Args:
            sample_id: ID of a sample in the batch. 17 and "17" are the same ID.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.
            limit: Maximum number of records; the newest are kept. Defaults to all.
            include_non_finite: Whether to include batches with a NaN or infinite loss. Defaults to
                False.
            all_attempts: If True, include batches that a later attempt replaced. Defaults to False.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            SessionStoreError: The store cannot be read.
        """
        query = Query.build(
            **bounds,
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

    @spell_out(ReadBounds, before="all_attempts")
    def summarize_exposure(
        self,
        *,
        all_attempts: bool = False,
        **bounds: Unpack[ReadBounds],
    ) -> ExposureSummary:
        """Flush, then count the classes, samples and lengths that the training has seen.

        Batches with a non-finite loss are included.

        Args:
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.
            all_attempts: If True, include batches that a later attempt replaced. Defaults to False.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            SessionStoreError: The store cannot be read.
        """
        from quark_core.samples.survey import ExposureCount

        count = ExposureCount()
        query = Query.build(all_attempts=all_attempts, **bounds)
        for part in self._iterate(query):
            count.add(part)
        return count.summarize()

    @spell_out(ReadBounds, before="limit")
    def find_hard_batches(
        self,
        *,
        limit: int | None = 10,
        all_attempts: bool = False,
        **bounds: Unpack[ReadBounds],
    ) -> tuple[HardBatchFinding, ...]:
        """Flush, then return the batches with a loss far above that of the others.

        Batches with a non-finite loss come first, then the highest loss. If all losses are equal,
        no finite one is hard.

        Args:
            limit: Maximum number of batches. None returns all. Defaults to 10.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.
            all_attempts: If True, include batches that a later attempt replaced. Defaults to False.

        Returns:
            The findings. `reasons` of a finding lists the rules that apply within the range.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            SessionStoreError: The store cannot be read.
        """
        from quark_core.samples.survey import BatchSurvey

        bound = check_index(limit, "limit")
        query = Query.build(all_attempts=all_attempts, **bounds)
        survey = BatchSurvey(self._iterate(query))
        hard = survey.find_hard(self._rules).keep(bound)
        return survey.describe_hard(hard, survey.fetch(self._iterate(query), hard))

    @spell_out(ReadBounds, before="hard_batch_limit")
    def summarize(
        self,
        *,
        hard_batch_limit: int | None = 10,
        all_attempts: bool = False,
        **bounds: Unpack[ReadBounds],
    ) -> DataDiagnosticsSummary:
        """Flush, then summarize the batches of a range.

        Args:
            hard_batch_limit: Maximum number of hard batches, and of outliers per quantity, to list.
                None lists all. Counts include all of them. Defaults to 10.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.
            all_attempts: If True, include batches that a later attempt replaced. Defaults to False.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            SessionStoreError: The store cannot be read.
        """
        from quark_core.samples.survey import BatchSurvey, ExposureCount

        bound = check_index(hard_batch_limit, "hard_batch_limit")
        query = Query.build(all_attempts=all_attempts, **bounds)
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


_log = logging.getLogger("quark")

_INT64_MAX = 2**63 - 1
_MAX_REASONS = 20
_MAX_REASON_LENGTH = 300
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDiagnosticsConfig:
    """Options of DataDiagnostics.

    Attributes:
        batch_size: Number of records that `flush()` returns and that are written together.
            Unrelated to the size of a training batch.
        adapter: Adapter that reads IDs, labels and lengths from the `batch` passed to `log_batch`.
            Defaults to `MappingBatchMetadataAdapter()` for mappings.
        outlier_z_score_threshold: Absolute z-score from which a loss or longest sequence is an
            outlier; above 0.
        outlier_iqr_multiplier: Values above Q3 + multiplier * (Q3 - Q1) are outliers too, if the
            quartiles differ; 0 or more.
        hard_batch_percentile: Quantile of the loss, 0 to 1, from which a batch is hard if it is
            also above the median. Needs two batches.
        min_batches_for_outlier_detection: Minimum number of values for the two outlier rules; 1 or
            more.

    Raises:
        SchemaValidationError: A field is out of range. The message names it.
    """

    batch_size: int = 100
    adapter: BatchMetadataAdapter | None = None
    outlier_z_score_threshold: float = 2.5
    outlier_iqr_multiplier: float = 1.5
    hard_batch_percentile: float = 0.9
    min_batches_for_outlier_detection: int = 5

    def __post_init__(self) -> None:
        for name in ("batch_size", "min_batches_for_outlier_detection"):
            number = check_index(getattr(self, name), name)
            if not number:
                raise SchemaValidationError(f"{name} must be a positive integer, got {number}")
            object.__setattr__(self, name, number)
        for name, low, high in (
            ("outlier_z_score_threshold", 0.0, None),
            ("outlier_iqr_multiplier", 0.0, None),
            ("hard_batch_percentile", 0.0, 1.0),
        ):
            value = to_amount(getattr(self, name), name, "DataDiagnosticsConfig")
            if not isfinite(value) or value < low or (high is not None and value > high):
                wanted = "a finite number, 0 or more" if high is None else "from 0 to 1"
                raise SchemaValidationError(f"{name} must be {wanted}, got {value}")
            object.__setattr__(self, name, value)
        if self.outlier_z_score_threshold == 0:
            raise SchemaValidationError("outlier_z_score_threshold must be above 0, got 0.0")
        extract = getattr(self.adapter, "extract_batch_metadata", None)
        if self.adapter is not None and (not callable(extract) or isinstance(self.adapter, type)):
            what = getattr(self.adapter, "__name__", None) or type(self.adapter).__name__
            raise SchemaValidationError(
                f"adapter must be an instance of BatchMetadataAdapter or None, not {what:.60}"
            )


def _make_rules(config: DataDiagnosticsConfig) -> DiagnosticRules:
    return DiagnosticRules(
        config.outlier_z_score_threshold,
        config.outlier_iqr_multiplier,
        config.hard_batch_percentile,
        config.min_batches_for_outlier_detection,
    )


class DataDiagnostics(BufferedWriter[BatchDiagnosticRecord], BatchReading):
    """Writer and reader of per-batch losses, sample IDs, class counts and lengths.

    Samples are not stored: labels are counted, and the length of IDs and labels is limited.
    `log_batch` takes microseconds and does not wait for a store. A tensor on a GPU makes it wait
    for the GPU. Thread-safe.

    Args:
        session: A TrainingSession, or its RunContext.
        config: Options. Defaults to `DataDiagnosticsConfig()`.

    Raises:
        SchemaValidationError: An argument has the wrong type.
    """

    KIND: ClassVar[str] = BatchDiagnosticRecord.KIND

    def __init__(self, session: object, *, config: DataDiagnosticsConfig | None = None) -> None:
        if config is None:
            config = DataDiagnosticsConfig()
        elif not isinstance(config, DataDiagnosticsConfig):
            raise SchemaValidationError(
                f"config must be a DataDiagnosticsConfig or None, not {type(config).__name__}"
            )
        super().__init__(session, batch_size=config.batch_size)
        self._config = config
        self._rules = _make_rules(config)
        self._usual_adapter = MappingBatchMetadataAdapter()

    def bind(self) -> None:
        """Connect to the run's stream."""
        super().bind()
        # Guards what is counted of bad batches, and is new where a fork may have left it locked.
        self._lock = threading.Lock()

    def _begin(self) -> None:
        super()._begin()
        self._non_finite = 0
        self._failed_batches = 0
        self._reasons: dict[str, tuple[str, int]] = {}

    @property
    def config(self) -> DataDiagnosticsConfig:
        """The options."""
        return self._config

    def log_batch(
        self,
        loss: float,
        *,
        step: int | None = None,
        epoch: int | None = None,
        batch: Any | None = None,
        batch_size: int | None = None,
        labels: Any | None = None,
        sample_ids: Any | None = None,
        sequence_lengths: Any | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
        class_counts: Any | None = None,
    ) -> BatchDiagnosticRecord:
        """Log one batch, and return its record at once.

        Arguments override the data that the adapter reads from `batch`. Metadata is merged.

        Args:
            loss: Loss: a Python, NumPy or 0-d torch number. A non-finite loss is stored and logged
                as `non_finite_loss`, its end as `loss_recovered`.
            step, epoch: Counters, both optional. The step defaults to the step set by
                `session.step`.
            batch: Batch for the adapter. It is not kept.
            batch_size: Number of samples. Defaults to the number of IDs, labels or lengths.
            labels: One label per sample: ints, strings, bools, floats or enum members, as a list,
                tuple, array or tensor. They are counted as text: "3" for 3 and 3.0.
            sample_ids: One ID per sample: ints or strings (bytes, paths and UUIDs become strings)
                of up to 1,000 characters.
            sequence_lengths: One non-negative integer per sample.
            metadata: JSON values; copied.
            timestamp: Time as ISO 8601 text. Defaults to now.
            class_counts: Mapping of label to number of samples, instead of `labels`. The sum may
                differ from `batch_size`.

        Raises:
            SchemaValidationError: An argument is invalid, or the numbers of labels, IDs, lengths
                and `batch_size` differ. In strict mode, also for a non-finite loss and a failed
                adapter. Otherwise such a batch is logged without the missing data, with a
                `batch_metadata_failed` event per reason.
            InvalidRunStateError: This object is closed or the run has ended.
        """
        if self._closed or self._run.refusal is not None:
            self._check_open("log_batch")
        if type(loss) is not float:
            loss = to_amount(loss, "loss", "DataDiagnostics.log_batch")
        if step is None:
            step = self._run.step
        elif type(step) is not int or step < 0 or step > _INT64_MAX:
            step = read_step(self._run, step)
        if epoch is not None and (type(epoch) is not int or epoch < 0 or epoch > _INT64_MAX):
            epoch = check_step(epoch, "epoch")
        time_us = time_ns() // 1000 if timestamp is None else check_timestamp(timestamp)
        contents = BatchContents(
            batch_size, sample_ids, labels, class_counts, sequence_lengths, metadata
        )
        if not isfinite(loss) and self._run.strict:
            raise SchemaValidationError(f"loss must be finite, got {loss}")
        if batch is not None:
            self._extract(batch, contents, step, epoch)
        if not isfinite(loss) or self._non_finite:
            self._note_finiteness(loss, step, epoch)
        record = self._put_record(self._make_record(time_us, loss, step, epoch, contents))
        self._remember(record, 1)
        return record

    def _make_record(
        self,
        time_us: int,
        loss: float,
        step: int | None,
        epoch: int | None,
        contents: BatchContents,
    ) -> BatchDiagnosticRecord:
        return BatchDiagnosticRecord(
            *self._origin,
            self._take_sequence(),
            time_us,
            loss,
            step,
            epoch,
            contents.size,
            contents.sample_ids,
            contents.class_counts,
            contents.sequence_lengths,
            contents.metadata,
        )

    def close(self) -> None:
        """Accept no more batches; reading still works. A second call does nothing.

        If the adapter failed for several batches, a `batch_metadata_failed` event counts them by
        reason.

        Raises:
            SessionStoreError: In strict mode, the primary store's first delivery error.
        """
        with self._lock:
            failed, self._failed_batches = self._failed_batches, 0
        if failed > 1 and not self._closed and not self._run.is_over:
            reasons = [{"reason": text, "count": count} for text, count in self._reasons.values()]
            payload = {"adapter": self._name_adapter(), "count": failed, "reasons": reasons}
            self._emit("batch_metadata_failed", "warning", None, None, payload)
        super().close()

    def _extract(
        self, batch: Any, contents: BatchContents, step: int | None, epoch: int | None
    ) -> None:
        """Fill in what the adapter finds in a batch."""
        adapter = self._config.adapter
        if adapter is None:
            if not is_like_mapping(batch):
                raise SchemaValidationError(
                    f"batch is a {type(batch).__name__}, which cannot be read without an adapter. "
                    "Pass a BatchMetadataAdapter to DataDiagnosticsConfig(adapter=...), or pass "
                    "labels, sample_ids and sequence_lengths here"
                )
            adapter = self._usual_adapter
        problems: list[SchemaValidationError] = []
        try:
            found: Any = adapter.extract_batch_metadata(batch)
            if isinstance(found, BatchMetadata):
                contents.fill(found, problems.append)
            else:
                what = type(found).__name__
                problems.append(
                    SchemaValidationError(
                        f"extract_batch_metadata must return a BatchMetadata, not {what}"
                    )
                )
        except Exception as error:  # noqa: BLE001 - an adapter may raise anything
            problems.append(_describe_error(error))
        if not problems:
            return
        if self._run.strict:
            first = problems[0]
            raise SchemaValidationError(f"{self._name_adapter()}: {first}") from (
                first.__cause__ or first
            )
        self._note_problems([str(problem) for problem in problems], step, epoch)

    def _note_problems(self, reasons: list[str], step: int | None, epoch: int | None) -> None:
        """Count why a batch could not be read, and tell of each reason once."""
        new = []
        with self._lock:
            self._failed_batches += 1
            for reason in reasons:
                text = cut_text(reason, _MAX_REASON_LENGTH)
                # The same reason with other numbers, such as another count, is the same.
                key = _DIGITS.sub("#", text)
                if key not in self._reasons and len(self._reasons) >= _MAX_REASONS:
                    key, text = "", "other reasons"
                if key not in self._reasons:
                    new.append(text)
                known, count = self._reasons.get(key, (text, 0))
                self._reasons[key] = (known, count + 1)
        for text in new:
            payload = {"adapter": self._name_adapter(), "reason": text, "count": 1}
            self._emit("batch_metadata_failed", "warning", step, epoch, payload)
            _log.warning(
                "run %s: batches are logged without all of their contents: %s: %s",
                self._run_id,
                self._name_adapter(),
                text,
            )

    def _note_finiteness(self, loss: float, step: int | None, epoch: int | None) -> None:
        """Tell once when the loss stops being finite, and once when it is so again."""
        with self._lock:
            seen = self._non_finite
            self._non_finite = 0 if isfinite(loss) else seen + 1
        if not isfinite(loss) and not seen:
            self._emit("non_finite_loss", "warning", step, epoch, {"loss": loss})
        elif isfinite(loss) and seen:
            self._emit("loss_recovered", "info", step, epoch, {"non_finite_count": seen})

    def _emit(
        self,
        event_type: str,
        severity: str,
        step: int | None,
        epoch: int | None,
        payload: Mapping[str, Any],
    ) -> None:
        self._run.emit_event(
            event_type,
            severity,
            step=step,
            epoch=epoch,
            payload=normalize_object(payload, "payload"),
            time_us=now_us(),
        )

    def _name_adapter(self) -> str:
        return type(self._config.adapter or self._usual_adapter).__name__


def _describe_error(error: Exception) -> SchemaValidationError:
    """Where an adapter went wrong, without its words: they may hold a piece of a sample."""
    if isinstance(error, SchemaValidationError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    place = ""
    if len(frames) > 1:
        # The first frame is ours.
        at = frames[1]
        place = f" at {PurePath(at.filename).name}:{at.lineno} in {at.name}"
    found = SchemaValidationError(f"the adapter raised {type(error).__name__}{place}")
    found.__cause__ = error
    return found
