"""Summaries, exposure, hard batches and outliers of what was logged."""

import json
import math
import statistics

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tiers import count_examples

import quark
from quark import DataDiagnostics, DataDiagnosticsConfig, MappingBatchMetadataAdapter
from quark_core.errors import SchemaValidationError
from quark_core.records import BatchDiagnosticRecord
from quark_core.records.columns import Columns
from quark_core.records.schema import validate_record
from quark_core.samples.survey import (
    BatchSurvey,
    DiagnosticRules,
    Distribution,
    describe_counted,
    normalize_entropy,
)


def survey_of(losses, steps=None, lengths=None):
    """A survey of batches that nobody has logged."""
    records = [
        BatchDiagnosticRecord(
            "run", "w", 0, 0, row, row, loss, None if steps is None else steps[row], None, None,
            None, None, None if lengths is None else lengths[row],
        )
        for row, loss in enumerate(losses)
    ]  # fmt: skip
    parts = [
        Columns.from_records("batch", records[start : start + 7])
        for start in range(0, len(records), 7)
    ]
    return BatchSurvey(parts, lengths=lengths is not None)


def rules(z_score=2.5, iqr_multiplier=1.5, percentile=0.9, min_batches=5):
    return DiagnosticRules(z_score, iqr_multiplier, percentile, min_batches)


def log(diagnostics, losses, **arguments):
    return [diagnostics.log_batch(loss, step=step, **arguments) for step, loss in enumerate(losses)]


def test_the_program_of_the_guide(tmp_path, capsys):
    train_loader = [
        {
            "inputs": [[0.0] * 4] * 8,
            "labels": [(step + i) % 3 for i in range(8)],
            "sample_ids": [8 * (step % 5) + i for i in range(8)],
            "lengths": [10 + i for i in range(8)],
            "loader": "train",
        }
        for step in range(20)
    ]
    adapter = MappingBatchMetadataAdapter(
        sample_id_key="sample_ids",
        label_key="labels",
        sequence_length_key="lengths",
        metadata_keys=("loader",),
    )
    with (
        quark.TrainingSession.start_run(project="demo", storage_dir=tmp_path) as session,
        DataDiagnostics(
            session, config=DataDiagnosticsConfig(batch_size=32, adapter=adapter)
        ) as diagnostics,
    ):
        for step, batch in enumerate(train_loader):
            loss = 9.0 if step == 13 else 1.0 + 0.01 * step
            diagnostics.log_batch(float(loss), step=step, epoch=0, batch=batch)
        summary = diagnostics.summarize(hard_batch_limit=5)
        exposure = diagnostics.summarize_exposure()
        hard_batches = diagnostics.find_hard_batches(limit=5)
        print(summary.loss_summary.to_dict() if summary.loss_summary else None)
        print(exposure.to_dict())
        print([finding.to_dict() for finding in hard_batches])
    assert "class_fractions" in capsys.readouterr().out
    assert summary.batch_count == 20
    assert summary.exposure == exposure
    assert summary.hard_batches == hard_batches
    first = hard_batches[0]
    assert (first.step, first.epoch, first.loss, first.batch_size) == (13, 0, 9.0, 8)
    assert first.reasons == ("high_loss_percentile", "z_score_outlier", "iqr_outlier")
    assert first.sample_ids == tuple(range(24, 32))
    assert sum(first.class_counts.values()) == 8
    assert [finding.step for finding in hard_batches] == [13, 19]
    assert hard_batches[1].reasons == ("high_loss_percentile",)
    (outlier,) = summary.loss_outliers
    assert (outlier.step, outlier.value, outlier.quantity) == (13, 9.0, "loss")
    assert outlier.record_id == first.record_id
    assert summary.sequence_length_outliers == ()
    assert exposure.class_counts == {"0": 53, "1": 54, "2": 53}
    assert exposure.sample_count == 160
    assert (exposure.unique_sample_count, exposure.repeat_min, exposure.repeat_max) == (40, 4, 4)


def test_exposure(diagnostics):
    diagnostics.log_batch(1.0, step=0, labels=["cat", "cat", "dog"], sample_ids=[1, 2, "x"])
    diagnostics.log_batch(math.nan, step=1, labels=["cat"], sample_ids=[2])
    diagnostics.log_batch(1.0, step=2, class_counts={"bird": 2, "cow": 0}, batch_size=1)
    diagnostics.log_batch(1.0, step=3, sequence_lengths=[4, 8, 9, 9])
    diagnostics.log_batch(1.0, step=4)
    found = diagnostics.summarize_exposure()
    assert list(found.class_counts.items()) == [("cat", 3), ("bird", 2), ("dog", 1), ("cow", 0)]
    assert list(found.class_fractions.values()) == [3 / 6, 2 / 6, 1 / 6, 0.0]
    shares = np.array([3, 2, 1]) / 6
    assert found.normalized_entropy == pytest.approx(-(shares * np.log(shares)).sum() / math.log(3))
    assert found.imbalance_ratio == 3.0
    assert (found.batch_count, found.labeled_batch_count, found.identified_batch_count) == (5, 3, 2)
    assert found.sample_count == 3 + 1 + 1 + 4
    assert found.unique_sample_count == 3
    assert (found.repeat_min, found.repeat_mean, found.repeat_max) == (1, 4 / 3, 2)
    assert [(s.sample_id, s.count) for s in found.most_seen_samples] == [(2, 2), (1, 1), ("x", 1)]
    lengths = found.sequence_length_summary
    assert (lengths.batch_count, lengths.sequence_count, lengths.total_length) == (1, 4, 30)
    assert (lengths.min, lengths.max, lengths.mean, lengths.median) == (4, 9, 7.5, 8.5)
    assert lengths.std == pytest.approx(statistics.stdev([4, 8, 9, 9]))
    one = diagnostics.summarize_exposure(step=1)
    assert (one.class_counts, one.imbalance_ratio, one.normalized_entropy) == (
        {"cat": 1},
        1.0,
        None,
    )
    assert diagnostics.summarize_exposure(step_min=3, step_max=3).class_counts == {}


def test_only_ten_of_the_most_seen_samples_are_listed(diagnostics):
    diagnostics.log_batch(1.0, step=0, sample_ids=[*range(50), *range(20, 50)])
    found = diagnostics.summarize_exposure()
    assert [sample.sample_id for sample in found.most_seen_samples] == list(range(20, 30))
    assert found.unique_sample_count == 50


def test_an_empty_run(diagnostics):
    summary = diagnostics.summarize()
    assert summary.batch_count == summary.hard_batch_count == 0
    assert summary.loss_summary is summary.sequence_length_summary is None
    assert summary.hard_batches == summary.loss_outliers == ()
    assert diagnostics.find_hard_batches() == ()
    assert diagnostics.read(sample_id=1) == ()
    exposure = diagnostics.summarize_exposure()
    assert summary.exposure == exposure
    assert (exposure.class_counts, exposure.imbalance_ratio, exposure.repeat_mean) == (
        {},
        None,
        None,
    )
    assert json.loads(json.dumps(summary.to_dict())) == summary.to_dict()


def test_a_run_that_keeps_nothing(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="none") as session:
        diagnostics = DataDiagnostics(session)
        log(diagnostics, [1.0, 2.0])
        assert diagnostics.read() == diagnostics.find_hard_batches() == ()
        assert diagnostics.summarize().batch_count == 0


def test_one_batch(diagnostics):
    log(diagnostics, [3.0], sequence_lengths=[5])
    summary = diagnostics.summarize()
    found = summary.loss_summary
    assert (found.mean, found.std, found.min, found.median, found.max) == (3.0, None, 3.0, 3.0, 3.0)
    assert summary.hard_batches == summary.loss_outliers == summary.sequence_length_outliers == ()
    assert summary.loss_thresholds.percentile_value is None


def test_equal_losses_are_not_hard(diagnostics):
    log(diagnostics, [0.1] * 12, sequence_lengths=[5])
    summary = diagnostics.summarize()
    assert summary.loss_summary.std == 0.0
    assert summary.hard_batch_count == summary.loss_outlier_count == 0
    assert summary.sequence_length_outlier_count == 0


def test_losses_that_are_not_finite_come_first_and_disturb_nothing(diagnostics):
    plain = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    log(diagnostics, [*plain, math.inf, math.nan, -math.inf])
    found = diagnostics.find_hard_batches()
    assert [finding.step for finding in found] == [6, 7, 8, 5]
    assert [finding.reasons for finding in found[:3]] == [("non_finite_loss",)] * 3
    assert [finding.z_score is None for finding in found] == [True, True, True, False]
    summary = diagnostics.summarize()
    assert summary.loss_summary.batch_count == 9
    assert summary.loss_summary.non_finite_count == 3
    assert summary.loss_summary.mean == pytest.approx(statistics.fmean(plain))
    assert summary.loss_outliers == ()


def test_only_losses_that_are_not_finite(diagnostics):
    log(diagnostics, [math.nan] * 3)
    summary = diagnostics.summarize()
    assert (summary.loss_summary.non_finite_count, summary.loss_summary.mean) == (3, None)
    assert [finding.reasons for finding in summary.hard_batches] == [("non_finite_loss",)] * 3


def test_few_batches_have_no_outliers_but_may_be_hard(session):
    diagnostics = DataDiagnostics(
        session, config=DataDiagnosticsConfig(outlier_z_score_threshold=1.0)
    )
    log(diagnostics, [1.0, 1.1, 1.2, 50.0], sequence_lengths=[5])
    (hard,) = diagnostics.find_hard_batches()
    assert (hard.step, hard.reasons) == (3, ("high_loss_percentile",))
    assert hard.z_score == pytest.approx(1.5, abs=0.01)
    assert hard.thresholds.z_score is hard.thresholds.upper_fence is None
    assert diagnostics.summarize().loss_outliers == ()
    diagnostics.log_batch(1.05, step=4)
    (hard,) = diagnostics.find_hard_batches()
    assert hard.reasons == ("high_loss_percentile", "z_score_outlier", "iqr_outlier")


def test_outliers_of_sequence_lengths_are_told_by_the_longest_of_a_batch(diagnostics):
    for step in range(20):
        longest = {7: 900, 9: 1}.get(step, 100 + step)
        diagnostics.log_batch(
            1.0, step=step, sequence_lengths=[longest, 1, 1], sample_ids=[step, 98, 99]
        )
    diagnostics.log_batch(1.0, step=20, sequence_lengths=[])
    diagnostics.log_batch(1.0, step=21)
    summary = diagnostics.summarize()
    (outlier,) = summary.sequence_length_outliers
    assert (outlier.step, outlier.value, outlier.quantity) == (7, 900.0, "sequence_length")
    assert outlier.reasons == ("z_score_outlier", "iqr_outlier")
    assert outlier.sample_ids == (7, 98, 99)
    assert summary.sequence_length_outlier_count == 1
    assert summary.sequence_length_thresholds.percentile is None
    assert summary.sequence_length_thresholds.upper_fence < 900


def test_a_loss_far_below_is_an_outlier_but_not_hard(diagnostics):
    log(diagnostics, [10.0 + 0.01 * step for step in range(20)] + [-50.0])
    summary = diagnostics.summarize()
    (outlier,) = summary.loss_outliers
    assert (outlier.step, outlier.reasons) == (20, ("z_score_outlier",))
    assert outlier.z_score < -2.5
    assert 20 not in [finding.step for finding in summary.hard_batches]


@pytest.mark.long
def test_limits_and_ranges(diagnostics):
    log(diagnostics, [float(step) for step in range(40)], epoch=1)
    assert [f.step for f in diagnostics.find_hard_batches()] == [39, 38, 37, 36]
    assert [f.step for f in diagnostics.find_hard_batches(limit=2)] == [39, 38]
    assert [f.step for f in diagnostics.find_hard_batches(limit=None)] == [39, 38, 37, 36]
    assert diagnostics.find_hard_batches(limit=0) == ()
    assert [f.step for f in diagnostics.find_hard_batches(step_max=9)] == [9]
    assert [f.step for f in diagnostics.find_hard_batches(step_min=30, epoch=1)] == [39]
    assert diagnostics.find_hard_batches(epoch_min=2) == ()
    summary = diagnostics.summarize(step_max=19, hard_batch_limit=1)
    assert (summary.batch_count, summary.hard_batch_count) == (20, 2)
    assert [finding.step for finding in summary.hard_batches] == [19]
    assert diagnostics.summarize(epoch_max=0).batch_count == 0
    assert diagnostics.summarize(step=3).loss_summary.mean == 3.0


@pytest.mark.parametrize(
    ("call", "arguments", "named"),
    [
        ("find_hard_batches", {"limit": -1}, "limit"),
        ("find_hard_batches", {"step_min": "1"}, "step_min"),
        ("summarize", {"hard_batch_limit": -1}, "hard_batch_limit"),
        ("summarize_exposure", {"step": -1}, "step"),
        ("read", {"sample_id": 1.5}, "sample_id"),
        ("read", {"sample_id": [1]}, "sample_id"),
        ("read", {"sample_id": 1, "limit": -1}, "limit"),
    ],
    ids=str,
)
def test_bad_filters_are_named(diagnostics, call, arguments, named):
    with pytest.raises(SchemaValidationError, match=named):
        getattr(diagnostics, call)(**arguments)


def test_ties_stand_in_the_order_of_their_steps(diagnostics):
    for step in (5, 3, None, 4):
        diagnostics.log_batch(9.0, step=step, epoch=0)
    for step in range(10, 40):
        diagnostics.log_batch(1.0, step=step)
    assert [f.step for f in diagnostics.find_hard_batches()] == [3, 4, 5, None]


def test_everything_is_json(diagnostics):
    for step in range(30):
        diagnostics.log_batch(
            30.0 if step == 9 else 1.0 + step / 100,
            step=step,
            labels=["a", 1],
            sample_ids=[step, "s"],
            sequence_lengths=[500 if step == 3 else 3, 4],
        )
    summary = diagnostics.summarize()
    assert summary.loss_outliers
    assert summary.sequence_length_outliers
    for record in (summary, summary.exposure, *summary.hard_batches, summary.loss_summary):
        assert json.loads(json.dumps(record.to_dict())) == record.to_dict()
        assert validate_record(record) is record
        with pytest.raises(AttributeError):
            record.batch_count = 3
    assert list(summary.to_dict()["hard_batches"][0]) == [
        "record_id",
        "rank",
        "step",
        "epoch",
        "loss",
        "batch_size",
        "sample_ids",
        "class_counts",
        "reasons",
        "z_score",
        "thresholds",
    ]


FLOATS = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-3, 3).map(float)


@pytest.mark.long
@settings(deadline=None, max_examples=count_examples(200))
@given(
    st.lists(FLOATS, max_size=40),
    st.floats(0, 1),
    st.floats(0.1, 4),
    st.floats(0, 3),
    st.integers(1, 12),
)
def test_hard_batches_are_those_of_the_rules_written_out(losses, share, z_score, multiplier, least):
    survey = survey_of(losses)
    found = survey.find_hard(rules(z_score, multiplier, share, least))
    finite = [loss for loss in losses if math.isfinite(loss)]
    expected = {row for row, loss in enumerate(losses) if not math.isfinite(loss)}
    # With numbers of this size nothing can overflow, so that the formulas can be written out.
    if finite and max(map(abs, finite)) < 1e100 and len(finite) > 1:
        low, middle, cut, high = np.quantile(finite, (0.25, 0.5, share, 0.75))
        mean, deviation = statistics.fmean(finite), statistics.stdev(finite)
        certain, possible = set(expected), set(expected)
        slack = 1e-9 * max(map(abs, finite))
        for row, loss in enumerate(losses):
            if not math.isfinite(loss):
                continue
            margins = [min(loss - cut, loss - middle)]
            if len(finite) >= least and min(finite) < max(finite):
                margins.append(loss - mean - z_score * deviation)
                if high > low:
                    margins.append(loss - high - multiplier * (high - low))
            if max(margins) > slack:
                certain.add(row)
            if max(margins) >= -slack:
                possible.add(row)
        assert certain <= set(found.rows) <= possible
    ranks = [losses[row] if math.isfinite(losses[row]) else math.inf for row in found.rows]
    assert ranks == sorted(ranks, reverse=True)
    assert all(found.reasons)
    for rank, reasons in zip(ranks, found.reasons, strict=True):
        assert (reasons == ("non_finite_loss",)) == (rank == math.inf)
    if len(set(finite)) <= 1:
        assert set(found.rows) == expected


@settings(deadline=None, max_examples=count_examples(100))
@given(st.lists(st.lists(st.integers(0, 50), max_size=4).map(tuple), max_size=30))
def test_length_outliers_are_those_of_the_rules_written_out(lengths):
    survey = survey_of([1.0] * len(lengths), lengths=lengths)
    found = survey.find_length_outliers(rules(2.0))
    longest = {row: max(each) for row, each in enumerate(lengths) if each}
    certain, possible = set(), set()
    values = list(longest.values())
    if len(values) >= 5 and min(values) < max(values):
        low, high = np.quantile(values, (0.25, 0.75))
        mean, deviation = statistics.fmean(values), statistics.stdev(values)
        for row, value in longest.items():
            margins = [abs(value - mean) / deviation - 2.0]
            if high > low:
                margins.append(value - high - 1.5 * (high - low))
            if max(margins) > 1e-9:
                certain.add(row)
            if max(margins) >= -1e-9:
                possible.add(row)
    assert certain <= set(found.rows) <= possible
    distances = [abs(score) for score in found.z_scores]
    assert distances == sorted(distances, reverse=True)


# The formulas, against the statistics module and numpy.

_SETTINGS = settings(deadline=None, max_examples=count_examples(200))
VALUES = st.lists(st.floats(-1e9, 1e9, allow_subnormal=False), min_size=1, max_size=50)
ANY = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=30)


@_SETTINGS
@given(VALUES)
def test_mean_deviation_and_scores_are_those_of_the_statistics_module(values):
    found = Distribution(np.array(values))
    size = max(map(abs, values))
    assert (found.count, found.low, found.high) == (len(values), min(values), max(values))
    assert found.mean == pytest.approx(statistics.fmean(values), rel=1e-12, abs=1e-14 * size)
    if len(values) == 1:
        assert found.std is found.z_scores is None
        return
    deviation = statistics.stdev(values)
    assert found.std == pytest.approx(deviation, rel=1e-9, abs=1e-14 * size)
    if min(values) == max(values):
        assert found.std == 0.0
        assert found.z_scores is None
        return
    assume(deviation > 1e-6 * size)
    expected = [(value - statistics.fmean(values)) / deviation for value in values]
    np.testing.assert_allclose(found.z_scores, expected, rtol=1e-6, atol=1e-6)


@_SETTINGS
@given(VALUES, st.floats(0, 1))
def test_quantiles_are_those_of_numpy(values, share):
    found = Distribution(np.array(values))
    assert found.quantile(share) == pytest.approx(np.quantile(values, share), rel=1e-12, abs=1e-300)
    if len(values) > 1:
        first, second, third = statistics.quantiles(values, n=4, method="inclusive")
        assert found.quantile(0.5) == pytest.approx(second, rel=1e-9, abs=1e-5)
        fence = found.upper_fence(1.5)
        if fence is not None and third - first > 1e-3:
            assert fence == pytest.approx(third + 1.5 * (third - first), rel=1e-9, abs=1e-5)


@_SETTINGS
@given(ANY)
@example([1.7e308, -1.7e308])
@example([1.7e308] * 4 + [1.6e308])
@example([5e-324, 0.0, 1e-323])
@example([-0.0, 0.0])
@example([1.7e308, 5e-324, -1.7e308, 0.0])
def test_no_magnitude_gives_nan(values):
    found = Distribution(np.array(values))
    assert found.low <= found.mean <= found.high
    assert found.std is None or (math.isfinite(found.std) and found.std >= 0)
    for share in (0, 0.25, 0.5, 0.9, 1):
        assert found.low <= found.quantile(share) <= found.high
    fence = found.upper_fence(1.5)
    assert fence is None or fence >= found.quantile(0.75)
    if found.z_scores is not None:
        assert np.isfinite(found.z_scores).all()
        # Shiffler's bound.
        count = len(values)
        assert np.abs(found.z_scores).max() <= (count - 1) / math.sqrt(count) * (1 + 1e-9)


def test_equal_values_are_flat_however_they_round():
    for value in (0.1, 1 / 3, 1e300, -7.7, 5e-324):
        found = Distribution(np.array([value] * 7))
        assert (found.mean, found.std, found.z_scores) == (value, 0.0, None)
        assert found.upper_fence(1.5) is None


def test_a_fence_between_equal_quartiles_is_at_rest():
    assert Distribution(np.array([1.0] * 9 + [5.0])).upper_fence(1.5) is None
    assert Distribution(np.array([1.0, 2.0, 3.0, 4.0])).upper_fence(0.0) == 3.25


@_SETTINGS
@given(st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 9), min_size=1, max_size=60))
def test_counted_integers_are_exact(values):
    counts = {value: values.count(value) for value in values}
    found = describe_counted({**counts, 123_456: counts.get(123_456, 0)})
    assert (found.count, found.total) == (len(values), sum(values))
    assert (found.low, found.high) == (min(values), max(values))
    assert found.mean == pytest.approx(statistics.fmean(values), rel=1e-12)
    assert found.median == pytest.approx(statistics.median(values), rel=1e-12)
    if len(values) > 1:
        assert found.std == pytest.approx(statistics.stdev(values), rel=1e-9)
    else:
        assert found.std is None


def test_nothing_counted():
    assert describe_counted({}) is None
    assert describe_counted({3: 0}) is None


@_SETTINGS
@given(st.dictionaries(st.text(max_size=2), st.integers(0, 1000), max_size=20))
def test_entropy(counts):
    found = normalize_entropy(counts)
    seen = [count for count in counts.values() if count]
    if len(seen) < 2:
        assert found is None
        return
    shares = np.array(seen) / sum(seen)
    expected = -(shares * np.log(shares)).sum() / np.log(len(seen))
    assert found == pytest.approx(expected, rel=1e-9)
    assert 0 <= found <= 1
    assert normalize_entropy(dict.fromkeys("abc", 7)) == pytest.approx(1.0)
