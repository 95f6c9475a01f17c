"""One pass over a run's batches, and what is found out from it.

The formulas:

    mean, std       Arithmetic mean, and the standard deviation of a sample
                    (divided by n - 1).
    quantile        Linear interpolation between order statistics: type 7 of
                    Hyndman & Fan, "Sample Quantiles in Statistical Packages",
                    The American Statistician 50 (1996), numpy's default.
    z-score         (x - mean) / std. Among n values no |z| is above
                    (n - 1) / sqrt(n) (Shiffler, "Maximum Z Scores and
                    Outliers", The American Statistician 42 (1988)): a
                    threshold of 2.5 cannot be reached by fewer than 9.
    upper fence     Q3 + k (Q3 - Q1) (Tukey, "Exploratory Data Analysis",
                    1977, with k = 1.5).
    normalised      H / ln K with H = -sum p ln p (Shannon, "A Mathematical
    entropy         Theory of Communication", 1948) over the K classes seen:
                    1 where all are equally frequent (Pielou's evenness, 1966).
    imbalance       Count of the most over that of the least frequent class
    ratio           seen (Buda, Maki & Mazurowski, "A systematic study of the
                    class imbalance problem in convolutional neural networks",
                    Neural Networks 106 (2018)).

Values of any magnitude are scaled by a power of two first, so that no sum and
no difference overflows; that changes no bit of an ordinary result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from quark_core.records import BatchDiagnosticRecord
from quark_core.records.base import Record
from quark_core.records.json_object import JsonObject

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quark_core.records.columns import Columns

    Array = NDArray[Any]

# What DataDiagnostics finds out about a run's batches: immutable records with `to_dict()`.
#
# `quark_core.samples.survey` has the formulas and their sources.


class LossSummary(Record, frozen=True, gc=False):
    """Statistics of the losses of all batches in a range.

    Statistics are over the finite losses. Each batch counts once.

    Attributes:
        batch_count: Number of batches.
        non_finite_count: Number of batches with a NaN or infinite loss.
        mean: Mean. None if no loss is finite, like the following fields.
        std: Sample standard deviation (n - 1). None below two finite losses.
        min, max: Minimum and maximum.
        median: Median.
        q1, q3: First and third quartile.
    """

    batch_count: int
    non_finite_count: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    median: float | None
    q1: float | None
    q3: float | None


class SequenceLengthSummary(Record, frozen=True, gc=False):
    """Statistics of the sequence lengths of all batches that have them.

    Attributes:
        batch_count: Number of batches with lengths.
        sequence_count: Number of sequences.
        total_length: Sum of all lengths.
        mean: Mean length.
        std: Sample standard deviation (n - 1). None for a single sequence.
        min, max: Shortest and longest length.
        median: Median length.
    """

    batch_count: int
    sequence_count: int
    total_length: int
    mean: float
    std: float | None
    min: int
    max: int
    median: float


class SampleExposure(Record, frozen=True, gc=False):
    """Number of times that one sample was in a batch.

    Attributes:
        sample_id: ID of the sample.
        count: Number of times.
    """

    sample_id: int | str
    count: int


class ExposureSummary(Record, frozen=True, gc=False):
    """Classes, samples and lengths that the training has seen in a range.

    Attributes:
        batch_count: Number of batches, whatever their loss.
        sample_count: Sum of the known batch sizes.
        labeled_batch_count: Number of batches with class counts.
        class_counts: Label -> number of samples, most frequent first.
        class_fractions: Label -> share of all counts, from 0 to 1.
        imbalance_ratio: Largest class count divided by the smallest. None without classes.
        normalized_entropy: 1.0 if all classes are equally frequent, near 0 if one dominates. None
            below two classes.
        identified_batch_count: Number of batches with sample IDs.
        unique_sample_count: Number of different IDs.
        repeat_min, repeat_mean, repeat_max: How often a seen sample was seen. None without IDs.
        most_seen_samples: Up to ten samples that were seen most often.
        sequence_length_summary: Sequence lengths, or None.
    """

    batch_count: int
    sample_count: int
    labeled_batch_count: int
    class_counts: JsonObject
    class_fractions: JsonObject
    imbalance_ratio: float | None
    normalized_entropy: float | None
    identified_batch_count: int
    unique_sample_count: int
    repeat_min: int | None
    repeat_mean: float | None
    repeat_max: int | None
    most_seen_samples: tuple[SampleExposure, ...]
    sequence_length_summary: SequenceLengthSummary | None


@dataclass(frozen=True, slots=True)
class DiagnosticRules:
    """The thresholds of `DataDiagnosticsConfig`, which says what they mean."""

    z_score: float
    iqr_multiplier: float
    percentile: float
    min_batches: int


class DiagnosticThresholds(Record, frozen=True, gc=False):
    """Bounds that were applied to one quantity; None if a rule did not apply.

    Attributes:
        percentile: `hard_batch_percentile`, or None.
        percentile_value: Value at this percentile. None below two values.
        z_score: `outlier_z_score_threshold`. None below `min_batches_for_outlier_detection` values,
            or if all are equal.
        iqr_multiplier: `outlier_iqr_multiplier`. None below as many values, or if the quartiles are
            equal.
        upper_fence: Q3 + multiplier * (Q3 - Q1).
        mean, std, median: Statistics of the values.
    """

    percentile: float | None = None
    percentile_value: float | None = None
    z_score: float | None = None
    iqr_multiplier: float | None = None
    upper_fence: float | None = None
    mean: float | None = None
    std: float | None = None
    median: float | None = None


class HardBatchFinding(Record, frozen=True, gc=False):
    """Batch with a loss far above that of the others.

    Attributes:
        record_id: ID of its BatchDiagnosticRecord.
        rank: Global rank of the process that logged it.
        step, epoch: Counters, or None.
        loss: Loss of the batch; it may be NaN or infinite.
        batch_size: Number of samples, or None.
        sample_ids: IDs of the samples, or None.
        class_counts: Label -> number of samples, or None.
        reasons: Rules that apply: `non_finite_loss` (NaN or infinite), `high_loss_percentile` (at
            or above the percentile and above the median), `z_score_outlier` (z-score at or above
            the threshold), `iqr_outlier` (above the upper fence).
        z_score: Z-score of the loss among all finite losses. None if it is not finite, or if all
            are equal.
        thresholds: Bounds that were applied.
    """

    record_id: str
    rank: int
    step: int | None
    epoch: int | None
    loss: float
    batch_size: int | None
    sample_ids: tuple[int | str, ...] | None
    class_counts: JsonObject | None
    reasons: tuple[str, ...]
    z_score: float | None
    thresholds: DiagnosticThresholds


class BatchOutlier(Record, frozen=True, gc=False):
    """Batch with a loss or sequence length far from that of the others.

    Attributes:
        record_id: ID of its BatchDiagnosticRecord.
        rank: Global rank of the process that logged it.
        step, epoch: Counters, or None.
        quantity: `loss`, or `sequence_length` for the longest sequence of the batch.
        value: Value of the quantity.
        z_score: Z-score of the value. None if all are equal.
        reasons: Rules that apply: `z_score_outlier` (absolute z-score at or above the threshold),
            `iqr_outlier` (above the upper fence).
        sample_ids: IDs of the samples, or None.
    """

    record_id: str
    rank: int
    step: int | None
    epoch: int | None
    quantity: str
    value: float
    z_score: float | None
    reasons: tuple[str, ...]
    sample_ids: tuple[int | str, ...] | None


class DataDiagnosticsSummary(Record, frozen=True, gc=False):
    """Summary of all batches in a range, returned by `DataDiagnostics.summarize`.

    Attributes:
        batch_count: Number of batches.
        loss_summary: Losses. None without batches.
        sequence_length_summary: Sequence lengths, or None.
        exposure: Classes and samples seen.
        hard_batch_count: Number of all hard batches.
        hard_batches: The hardest batches, as from `find_hard_batches`.
        loss_outlier_count: Number of all batches with an outlying loss.
        loss_outliers: The outliers farthest from the mean, farthest first.
        sequence_length_outlier_count: Number of all batches with an outlying sequence length.
        sequence_length_outliers: The outliers farthest from the mean, farthest first.
        loss_thresholds: Bounds for the loss.
        sequence_length_thresholds: Bounds for the longest sequence of a batch.
        min_batches_for_outlier_detection: Minimum number of values for outlier detection.
    """

    batch_count: int
    loss_summary: LossSummary | None
    sequence_length_summary: SequenceLengthSummary | None
    exposure: ExposureSummary
    hard_batch_count: int
    hard_batches: tuple[HardBatchFinding, ...]
    loss_outlier_count: int
    loss_outliers: tuple[BatchOutlier, ...]
    sequence_length_outlier_count: int
    sequence_length_outliers: tuple[BatchOutlier, ...]
    loss_thresholds: DiagnosticThresholds
    sequence_length_thresholds: DiagnosticThresholds
    min_batches_for_outlier_detection: int


_LARGEST = 1.7976931348623157e308


class Distribution:
    """Statistics of at least one finite value.

    Attributes:
        count: Number of values.
        mean: Their mean.
        std: Their standard deviation; None for a single value, and where it
            is beyond float64. 0.0 where all are equal.
        low, high: The smallest and the largest.
        z_scores: Of each value; None where `std` is None or 0.
    """

    def __init__(self, values: Array) -> None:
        import numpy as np

        self._values = values
        self.count = len(values)
        self.low, self.high = float(values.min()), float(values.max())
        self._exponent = math.frexp(max(abs(self.low), abs(self.high)))[1]
        self._scaled = np.ldexp(values, -self._exponent)
        flat = self.low == self.high
        scaled_mean = float(self._scaled[0] if flat else np.mean(self._scaled))
        self.mean = self._unscale(scaled_mean) or 0.0
        self.std: float | None = None
        self.z_scores: Array | None = None
        if self.count < 2:
            return
        deviations = self._scaled - scaled_mean
        scaled_std = (
            0.0 if flat else math.sqrt(float(np.dot(deviations, deviations)) / (self.count - 1))
        )
        self.std = self._unscale(scaled_std)
        if scaled_std > 0.0:
            self.z_scores = deviations / scaled_std

    def quantile(self, share: float) -> float:
        """The value below which this share of all values lies."""
        import numpy as np

        found = self._unscale(float(np.quantile(self._scaled, share)))
        return self.high if found is None else min(max(found, self.low), self.high)

    def upper_fence(self, multiplier: float) -> float | None:
        """Tukey's upper fence; None where the quartiles are equal or it is beyond float64.

        Where half of all values are equal the fence would lie at that value,
        and whatever is above it would be an outlier.
        """
        import numpy as np

        q1, q3 = (float(q) for q in np.quantile(self._scaled, (0.25, 0.75)))
        return self._unscale(q3 + multiplier * (q3 - q1)) if q3 > q1 else None

    def _unscale(self, scaled: float) -> float | None:
        try:
            found = math.ldexp(scaled, self._exponent)
        except OverflowError:
            return None
        return found if math.isfinite(found) else None


@dataclass(frozen=True, slots=True)
class CountedDistribution:
    """Statistics of non-negative integers, exact but for the last rounding.

    Attributes:
        count: Number of values.
        total: Their sum.
        mean, std, median: As in `Distribution`; `std` is None for a single value.
        low, high: The smallest and the largest.
    """

    count: int
    total: int
    mean: float
    std: float | None
    median: float
    low: int
    high: int


def describe_counted(counts: Mapping[int, int]) -> CountedDistribution | None:
    """Statistics of values, each given with how often it occurs; None without any."""
    ordered = sorted((value, count) for value, count in counts.items() if count)
    if not ordered:
        return None
    number = sum(count for _, count in ordered)
    total = sum(value * count for value, count in ordered)
    std = None
    if number > 1:
        squares = sum(value * value * count for value, count in ordered)
        std = math.sqrt((number * squares - total * total) / (number * (number - 1)))
    low_middle = _find_place(ordered, (number - 1) // 2)
    high_middle = _find_place(ordered, number // 2)
    return CountedDistribution(
        number,
        total,
        total / number,
        std,
        (low_middle + high_middle) / 2,
        ordered[0][0],
        ordered[-1][0],
    )


def normalize_entropy(counts: Mapping[str, int]) -> float | None:
    """Entropy over its largest possible value, 0 to 1; None below two classes."""
    seen = [count for count in counts.values() if count]
    if len(seen) < 2:
        return None
    total = sum(seen)
    entropy = -math.fsum(count / total * math.log(count / total) for count in seen)
    return min(1.0, max(0.0, entropy / math.log(len(seen))))


def _find_place(ordered: list[tuple[int, int]], place: int) -> int:
    """The value that stands at a place of the sorted values."""
    for value, count in ordered:
        if place < count:
            return value
        place -= count
    raise IndexError("beyond the last value")


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
