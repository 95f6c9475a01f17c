"""What DataDiagnostics finds out about a run's batches: immutable records with `to_dict()`.

`quark_core.samples.survey` has the formulas and their sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from quark_core.records.base import Record
from quark_core.records.json_object import JsonObject


class LossSummary(Record, frozen=True, gc=False):
    """The losses of all batches; statistics are over the finite ones, each batch counting once.

    Attributes:
        batch_count: Batches, whatever their loss.
        non_finite_count: Batches of which the loss is NaN or infinite.
        mean: Arithmetic mean; None where no loss is finite, as are the next ones.
        std: Standard deviation of a sample (n - 1); also None below two
            finite losses, and 0.0 where all are equal.
        min, max: Smallest and largest.
        median: The 0.5 quantile.
        q1, q3: The 0.25 and the 0.75 quantile.
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
    """Lengths of all sequences of the batches that say them, in what they were logged in.

    Attributes:
        batch_count: Batches with lengths.
        sequence_count: Sequences in them.
        total_length: Sum of all lengths.
        mean: Mean length of a sequence.
        std: Standard deviation of a sample (n - 1); None for a single sequence.
        min, max: Shortest and longest.
        median: The middle length, or the mean of the two middle ones.
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
    """How often one sample was in a batch.

    Attributes:
        sample_id: Its id.
        count: Number of times.
    """

    sample_id: int | str
    count: int


class ExposureSummary(Record, frozen=True, gc=False):
    """What the training has seen, in all batches of the range, whatever their loss.

    Attributes:
        batch_count: Batches.
        sample_count: Sum of the batch sizes that are known.
        labeled_batch_count: Batches with class counts.
        class_counts: Label -> number of samples; the most frequent first,
            then by label.
        class_fractions: The same over the sum of all counts, 0 to 1.
        imbalance_ratio: Largest over smallest count of the classes seen; None without any.
        normalized_entropy: 1.0 where all classes seen are equally frequent,
            near 0 where one prevails; None below two classes.
        identified_batch_count: Batches with sample ids.
        unique_sample_count: Different ids.
        repeat_min, repeat_mean, repeat_max: How often a sample that was seen
            was seen; None without ids.
        most_seen_samples: The samples seen most often, at most ten, the most
            frequent first, then by id.
        sequence_length_summary: None where no batch has lengths.
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
    """The bounds that were applied to one quantity of the batches; None where a rule is at rest.

    Attributes:
        percentile: `hard_batch_percentile`, or None for what it is not applied to.
        percentile_value: The quantile at it; None below two values.
        z_score: `outlier_z_score_threshold`; at rest below
            `min_batches_for_outlier_detection` values, and where all are equal.
        iqr_multiplier: `outlier_iqr_multiplier`; at rest below as many values,
            and where the quartiles are equal.
        upper_fence: Q3 + multiplier * (Q3 - Q1).
        mean, std, median: Of the values, for those that want to check.
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
    """A batch whose loss is far above the others'.

    Attributes:
        record_id: `id` of its BatchDiagnosticRecord.
        rank: Global rank of the process that logged it.
        step, epoch: Counters, or None.
        loss: Its loss; NaN or infinite where `reasons` says so.
        batch_size: Number of samples, or None.
        sample_ids: Ids of the samples, or None.
        class_counts: Label -> number of samples, or None.
        reasons: Which rules found it, at least one of
            `non_finite_loss`: the loss is NaN or infinite;
            `high_loss_percentile`: it is at or above the percentile's value, and above the median;
            `z_score_outlier`: its z-score is at or above the threshold;
            `iqr_outlier`: it is above the upper fence.
        z_score: Of the loss among all finite ones; None for one that is not,
            and where all are equal.
        thresholds: The bounds.
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
    """A batch of which one quantity is far from that of the others, on either side.

    Attributes:
        record_id: `id` of its BatchDiagnosticRecord.
        rank: Global rank of the process that logged it.
        step, epoch: Counters, or None.
        quantity: `loss`, or `sequence_length`: that of the batch's longest sequence.
        value: The quantity.
        z_score: Of the value among all; None where all are equal.
        reasons: Which rules found it, at least one of
            `z_score_outlier`: |z_score| is at or above the threshold;
            `iqr_outlier`: the value is above the upper fence.
        sample_ids: Ids of the samples, or None.
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
    """Everything that DataDiagnostics finds out about the batches of a range.

    Attributes:
        batch_count: Batches, whatever their loss.
        loss_summary: None without batches.
        sequence_length_summary: None where no batch has lengths.
        exposure: What the training has seen.
        hard_batch_count: Hard batches in all.
        hard_batches: The hardest of them, as `find_hard_batches` returns them.
        loss_outlier_count: Batches in all whose loss is an outlier.
        loss_outliers: The farthest of them from the mean, farthest first.
        sequence_length_outlier_count: Batches in all whose longest sequence is an outlier.
        sequence_length_outliers: The farthest of them from the mean, farthest first.
        loss_thresholds: The bounds on the loss.
        sequence_length_thresholds: Those on the longest sequence of a batch.
        min_batches_for_outlier_detection: Values from which on outliers are looked for.
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
