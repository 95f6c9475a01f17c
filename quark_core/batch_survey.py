"""One pass over a run's batches, and what is found out from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from quark_core.batch_statistics import Distribution, describe_counted, normalize_entropy
from quark_core.batch_summaries import (
    BatchOutlier,
    DiagnosticRules,
    DiagnosticThresholds,
    ExposureSummary,
    HardBatchFinding,
    LossSummary,
    SampleExposure,
    SequenceLengthSummary,
)
from quark_core.json_object import JsonObject
from quark_core.records import BatchDiagnosticRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark_core.columns import Columns

    Array = NDArray[Any]

__all__ = ["BatchSurvey", "ExposureCount", "RankedBatches"]

_MOST_SEEN = 10
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class RankedBatches:
    """Batches that rules have found.

    Attributes:
        rows: Their rows in the survey, the worst first.
        reasons: Which rules have found each.
        z_scores: One for each, or None.
        thresholds: The bounds that were applied.
    """

    rows: Sequence[int]
    reasons: Sequence[tuple[str, ...]]
    z_scores: Sequence[float | None]
    thresholds: DiagnosticThresholds

    def __len__(self) -> int:
        return len(self.rows)

    def keep(self, limit: int | None) -> RankedBatches:
        """The worst `limit` of them; all for None."""
        rows, reasons, z_scores = self.rows[:limit], self.reasons[:limit], self.z_scores[:limit]
        return RankedBatches(rows, reasons, z_scores, self.thresholds)


class BatchSurvey:
    """The numbers of all batches of a range, in persistence order.

    Args:
        parts: Their columns.
        exposure: Counts what was seen, in the same pass; None where nobody asks.
        lengths: Whether the longest sequence of each batch is wanted.
    """

    def __init__(
        self,
        parts: Iterable[Columns],
        *,
        exposure: ExposureCount | None = None,
        lengths: bool = False,
    ) -> None:
        import numpy as np

        losses, steps, sequences, writers, longest = [], [], [], [], []
        for part in parts:
            losses.append(part["loss"])
            steps.append(part["step"])
            sequences.append(part["sequence"])
            writers.append(part["writer_id"])
            if lengths:
                found = [max(row) if row else -1.0 for row in part["sequence_lengths"]]
                longest.append(np.array(found, dtype=np.float64))
            if exposure is not None:
                exposure.add(part)
        floats, integers = np.empty(0), np.empty(0, dtype=np.int64)
        self._loss = np.concatenate([floats, *losses])
        self._step = np.concatenate([integers, *steps])
        self._sequence = np.concatenate([integers, *sequences])
        self._writer = np.concatenate([np.empty(0, dtype=object), *writers])
        self._longest = np.concatenate([floats, *longest])
        self._is_finite = np.isfinite(self._loss)

    def __len__(self) -> int:
        return len(self._loss)

    def summarize_loss(self) -> LossSummary | None:
        """None without batches."""
        if not len(self):
            return None
        values = self._loss[self._is_finite]
        counts = len(self), len(self) - len(values)
        if not len(values):
            return LossSummary(*counts, None, None, None, None, None, None, None)
        found = Distribution(values)
        quartiles = [found.quantile(share) for share in (0.5, 0.25, 0.75)]
        return LossSummary(*counts, found.mean, found.std, found.low, found.high, *quartiles)

    def find_hard(self, rules: DiagnosticRules) -> RankedBatches:
        """Hard batches: those without a finite loss first, then by loss, step and order."""
        import numpy as np

        hard = ~self._is_finite
        marks = {"non_finite_loss": hard}
        z_scores: Array | None = None
        thresholds = DiagnosticThresholds()
        if self._is_finite.any():
            found = Distribution(self._loss[self._is_finite])
            thresholds = _set_thresholds(found, rules, percentile=True)
            # Every comparison with NaN is False.
            loss = np.where(self._is_finite, self._loss, np.nan)
            if thresholds.percentile_value is not None:
                above = (loss >= thresholds.percentile_value) & (loss > thresholds.median)
                marks["high_loss_percentile"] = above
            if found.z_scores is not None:
                z_scores = np.full(len(self), np.nan)
                z_scores[self._is_finite] = found.z_scores
                if thresholds.z_score is not None:
                    marks["z_score_outlier"] = z_scores >= thresholds.z_score
            if thresholds.upper_fence is not None:
                marks["iqr_outlier"] = loss > thresholds.upper_fence
        hardness = np.where(self._is_finite, self._loss, np.inf)
        return self._rank(marks, hardness, z_scores, thresholds)

    def find_loss_outliers(self, rules: DiagnosticRules) -> RankedBatches:
        """Finite losses that are far from the others, the farthest first."""
        return self._find_outliers(self._loss, self._is_finite, rules)

    def find_length_outliers(self, rules: DiagnosticRules) -> RankedBatches:
        """The same for the longest sequence of each batch."""
        return self._find_outliers(self._longest, self._longest >= 0, rules)

    def fetch(
        self, parts: Iterable[Columns], *ranked: RankedBatches
    ) -> dict[int, BatchDiagnosticRecord]:
        """Row -> record of the batches that were found, from a second pass over the same rows."""
        import numpy as np

        rows = {
            (self._writer[row], int(self._sequence[row])): row
            for found in ranked
            for row in found.rows
        }
        sequences = np.array(sorted({sequence for _, sequence in rows}), dtype=np.int64)
        records: dict[int, BatchDiagnosticRecord] = {}
        if not rows:
            return records
        for part in parts:
            places = np.flatnonzero(np.isin(part["sequence"], sequences))
            writers, numbers = part["writer_id"], part["sequence"]
            chosen = [place for place in places if (writers[place], numbers[place]) in rows]
            if not chosen:
                continue
            record: Any
            for record in part.take(np.array(chosen)).to_records():
                records[rows[record.writer_id, record.sequence]] = record
            if len(records) == len(rows):
                break
        return records

    def describe_outliers(
        self, found: RankedBatches, records: dict[int, BatchDiagnosticRecord], quantity: str
    ) -> tuple[BatchOutlier, ...]:
        """What was found, with the records that `fetch` has returned."""
        values = self._loss if quantity == "loss" else self._longest
        return tuple(
            BatchOutlier(
                record.id,
                record.rank,
                record.step,
                record.epoch,
                quantity,
                float(values[row]),
                z_score,
                reasons,
                record.sample_ids,
            )
            for row, reasons, z_score in zip(found.rows, found.reasons, found.z_scores, strict=True)
            if (record := records.get(row)) is not None
        )

    @staticmethod
    def describe_hard(
        found: RankedBatches, records: dict[int, BatchDiagnosticRecord]
    ) -> tuple[HardBatchFinding, ...]:
        """What was found, with the records that `fetch` has returned."""
        return tuple(
            HardBatchFinding(
                record.id,
                record.rank,
                record.step,
                record.epoch,
                record.loss,
                record.batch_size,
                record.sample_ids,
                record.class_counts,
                reasons,
                z_score,
                found.thresholds,
            )
            for row, reasons, z_score in zip(found.rows, found.reasons, found.z_scores, strict=True)
            if (record := records.get(row)) is not None
        )

    def _find_outliers(
        self, values: Array, is_known: Array, rules: DiagnosticRules
    ) -> RankedBatches:
        import numpy as np

        if not is_known.any():
            return RankedBatches((), (), (), DiagnosticThresholds())
        found = Distribution(values[is_known])
        thresholds = _set_thresholds(found, rules, percentile=False)
        if found.z_scores is None:
            return RankedBatches((), (), (), thresholds)
        z_scores = np.full(len(values), np.nan)
        z_scores[is_known] = found.z_scores
        distance = np.abs(z_scores)
        marks = {}
        if thresholds.z_score is not None:
            marks["z_score_outlier"] = distance >= thresholds.z_score
        if thresholds.upper_fence is not None:
            marks["iqr_outlier"] = is_known & (values > thresholds.upper_fence)
        return self._rank(marks, np.where(is_known, distance, 0.0), z_scores, thresholds)

    def _rank(
        self,
        marks: dict[str, Array],
        badness: Array,
        z_scores: Array | None,
        thresholds: DiagnosticThresholds,
    ) -> RankedBatches:
        """The marked rows, by badness, then step, then their order."""
        import numpy as np

        marked = np.zeros(len(self), dtype=np.bool_)
        for mark in marks.values():
            marked |= mark
        rows = np.flatnonzero(marked)
        step = np.where(self._step[rows] < 0, _INT64_MAX, self._step[rows])
        rows = rows[np.lexsort((step, -badness[rows]))]
        reasons = [tuple(name for name, mark in marks.items() if mark[row]) for row in rows]
        if z_scores is None:
            scores: list[float | None] = [None] * len(rows)
        else:
            scores = [None if z != z else z for z in z_scores[rows].tolist()]
        return RankedBatches(rows.tolist(), reasons, scores, thresholds)


class ExposureCount:
    """Counts what the training has seen, part by part."""

    def __init__(self) -> None:
        self._batches = self._samples = self._labeled = self._identified = self._measured = 0
        self._classes: dict[str, int] = {}
        self._ids: Counter[int | str] = Counter()
        self._lengths: Counter[int] = Counter()

    def add(self, part: Columns) -> None:
        """Count the batches of a part."""
        self._batches += part.count
        self._samples += sum(size for size in part["batch_size"].tolist() if size > 0)
        classes = self._classes
        for counts in part["class_counts"]:
            if counts is not None:
                self._labeled += 1
                for label, count in counts.items():
                    classes[label] = classes.get(label, 0) + count
        with_ids = [ids for ids in part["sample_ids"] if ids is not None]
        self._identified += len(with_ids)
        self._ids.update(chain.from_iterable(with_ids))
        with_lengths = [lengths for lengths in part["sequence_lengths"] if lengths is not None]
        self._measured += len(with_lengths)
        self._lengths.update(chain.from_iterable(with_lengths))

    def summarize(self) -> ExposureSummary:
        """What was counted so far."""
        ordered = sorted(self._classes.items(), key=lambda item: (-item[1], item[0]))
        total = sum(self._classes.values())
        seen = [count for _, count in ordered if count]
        repeats = self._ids.values()
        most = sorted(self._ids.items(), key=_order_sample)[:_MOST_SEEN]
        return ExposureSummary(
            batch_count=self._batches,
            sample_count=self._samples,
            labeled_batch_count=self._labeled,
            class_counts=JsonObject(ordered),
            class_fractions=JsonObject(
                (label, count / total if total else 0.0) for label, count in ordered
            ),
            imbalance_ratio=seen[0] / seen[-1] if seen else None,
            normalized_entropy=normalize_entropy(self._classes),
            identified_batch_count=self._identified,
            unique_sample_count=len(self._ids),
            repeat_min=min(repeats, default=None),
            repeat_mean=sum(repeats) / len(repeats) if repeats else None,
            repeat_max=max(repeats, default=None),
            most_seen_samples=tuple(SampleExposure(*item) for item in most),
            sequence_length_summary=self.summarize_lengths(),
        )

    def summarize_lengths(self) -> SequenceLengthSummary | None:
        """None where no sequence was counted."""
        found = describe_counted(self._lengths)
        if found is None:
            return None
        return SequenceLengthSummary(
            self._measured,
            found.count,
            found.total,
            found.mean,
            found.std,
            found.low,
            found.high,
            found.median,
        )


def _order_sample(item: tuple[int | str, int]) -> tuple[int, bool, int, str]:
    """Most frequent first; numbers before texts."""
    sample_id, count = item
    is_text = isinstance(sample_id, str)
    return (-count, is_text, 0 if is_text else int(sample_id), str(sample_id))


def _set_thresholds(
    found: Distribution, rules: DiagnosticRules, *, percentile: bool
) -> DiagnosticThresholds:
    """The bounds that hold for a quantity; None for rules that are at rest."""
    enough = found.count >= rules.min_batches
    fence = found.upper_fence(rules.iqr_multiplier) if enough else None
    has_percentile = percentile and found.count >= 2
    return DiagnosticThresholds(
        percentile=rules.percentile if percentile else None,
        percentile_value=found.quantile(rules.percentile) if has_percentile else None,
        z_score=rules.z_score if enough and found.z_scores is not None else None,
        iqr_multiplier=None if fence is None else rules.iqr_multiplier,
        upper_fence=fence,
        mean=found.mean,
        std=found.std,
        median=found.quantile(0.5),
    )
