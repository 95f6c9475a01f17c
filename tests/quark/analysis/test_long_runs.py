"""Runs of any length are analyzed in bounded memory, and short ones point by point."""

import math
import tracemalloc

import numpy as np
import pytest
from run_builder import make_part

import quark
from quark.analysis import run_data
from quark.analysis.engine import analyze_run
from quark.analysis.phases import analyze_phases
from quark.analysis.run_data import MetricSamples, RunData, sample_probes, sample_rows

ROWS = 65_536


def make_run(points):
    """A run whose data arise part by part, as they are asked for."""
    generator = np.random.default_rng(7)

    def iterate(kind, query):
        if kind != "metric":
            return
        for start in range(0, points, ROWS):
            steps = np.arange(start, min(start + ROWS, points))
            fall = np.exp(-5.0 * steps / points)
            for key, level in (("train/loss", 1.0), ("val/loss", 1.1)):
                noise = generator.normal(size=len(steps))
                yield make_part(key, start, 0.1 + level * fall * (1 + 0.05 * noise))

    def refuse(kind, query):
        raise AssertionError("everything was read at once")

    return RunData(refuse, "r", iterate=iterate)


@pytest.mark.long
def test_the_memory_of_an_analysis_does_not_grow_with_the_run():
    peaks = []
    for points in (400_000, 1_200_000):
        tracemalloc.start()
        try:
            run = make_run(points)
            result, phases = analyze_run(run), analyze_phases(run)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert result.alerts == ()
        assert (phases.phases[0].step_start, phases.phases[-1].step_end) == (0, points - 1)
        assert run.last_step == points - 1
    assert max(peaks) < 64 * 2**20
    assert peaks[1] < 1.2 * peaks[0]


@pytest.mark.parametrize("rows", [1_000, 7, 333])
def test_a_short_run_is_judged_by_every_point(rows):
    values = np.random.default_rng(1).normal(size=1_000)
    values[[5, 900]] = math.nan, math.inf
    samples = MetricSamples()
    for start in range(0, len(values), rows):
        samples.add(make_part("m", start, values[start : start + rows]))
    ((key, points),) = samples.take()
    assert key == "m"
    np.testing.assert_array_equal(points["value"], values)
    np.testing.assert_array_equal(points["step"], np.arange(1_000))


@pytest.fixture
def small(monkeypatch):
    """Bounds that a test can reach."""
    monkeypatch.setattr(run_data, "METRIC_POINTS", 4_096)
    monkeypatch.setattr(run_data, "TABLE_ROWS", 100)
    monkeypatch.setattr(run_data, "PROBE_ROWS", 100)


@pytest.mark.parametrize("rows", [97, 5_000, 60_000])
def test_a_sample_keeps_what_stands_out(small, rows):
    values = np.random.default_rng(2).normal(size=60_000)
    values[31_111] = 80.0
    values[44_445:44_448] = -60.0
    values[50_001] = math.nan
    values[59_990:] = math.nan
    samples = MetricSamples()
    for start in range(0, len(values), rows):
        samples.add(make_part("m", start, values[start : start + rows]))
    ((_, points),) = samples.take()
    kept = dict(zip(points["step"].tolist(), points["value"].tolist(), strict=True))
    assert 1_024 <= len(points) <= 4_096 + 1_100
    assert (np.diff(points["step"]) > 0).all()
    for step in (0, 31_111, 44_445, 44_446, 44_447, 50_000, 50_001, 50_002, 59_989, 59_990, 59_999):
        np.testing.assert_equal(kept[step], values[step])
    # A sample of single points: levels and noise are those of the run.
    finite = points["value"][np.isfinite(points["value"])]
    assert abs(np.median(finite)) < 0.1
    assert np.median(np.abs(finite)) == pytest.approx(0.6745, rel=0.1)


def test_of_very_many_metrics_the_longest_are_reduced(monkeypatch):
    monkeypatch.setattr(run_data, "ALL_POINTS", 10_000)
    samples = MetricSamples()
    samples.add(make_part("short", 0, np.arange(100)))
    for number in range(20):
        samples.add(make_part(f"long{number}", 0, np.arange(2_000)))
    found = dict(samples.take())
    assert len(found["short"]) == 100
    assert sum(map(len, found.values())) <= 10_000 + 20 * 4
    assert all(points["value"][[0, -1]].tolist() == [0, 1_999] for points in found.values()
               if len(points) != 100)  # fmt: skip


def test_rows_are_thinned_evenly_and_probes_stay_whole(small):
    parts = [make_part("m", start, np.zeros(30)) for start in range(0, 300, 30)]
    assert sample_rows("metric", parts)["step"].tolist() == list(range(0, 300, 4))
    assert sample_rows("metric", parts[:3])["step"].tolist() == list(range(90))
    # Two rows of each step: one that is kept is kept whole.
    parts = [make_part("m", 10 * (number // 2), np.zeros(10)) for number in range(20)]
    steps = sample_probes("metric", parts)["step"].tolist()
    assert len(steps) <= 100
    assert sorted(steps) == sorted(2 * [*range(0, 100, 2)])


def test_the_lowest_rank_speaks_wherever_it_begins():
    def iterate(kind, query):
        if kind == "metric":
            yield make_part("m", 0, np.ones(5), rank=2)
            yield make_part("m", 0, np.zeros(5), rank=1)
            yield make_part("m", 5, np.ones(5), rank=3)

    run = RunData(None, "r", iterate=iterate)
    assert run.metrics["m"].value.tolist() == [0.0] * 5


@pytest.mark.long
def test_a_run_that_was_opened_for_reading_is_not_written_unless_store_says_so(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for step in range(30):
            metrics.log("train/loss", 1.0 / (step + 1), step=step)
    opened = quark.open_run(session.run_id, tmp_path)
    for target in (opened, opened.context):
        engine, phases = quark.AnalyzerEngine(target), quark.PhaseAnalyzer(target)
        result, found = engine.analyze(), phases.analyze()
        assert (result.stored, result.generation, found.stored) == (False, None, False)
        assert "opened for reading only" in result.refusal
        assert "opened for reading only" in found.notes[-1]
        assert (engine.read_health_scores(), phases.read_phases()) == ((), ())
    assert engine.analyze(store=True).generation == 1
    assert phases.analyze(store=True).generation == 1
    assert engine.analyze(store=False).refusal == "store=False was passed"
    assert len(engine.read_health_scores()) == 5
    ended = quark.AnalyzerEngine(session)
    assert ended.analyze(store=False).generation is None
    assert ended.analyze().generation == 2
    for analyzer in (engine, phases):
        with pytest.raises(quark.SchemaValidationError, match="store"):
            analyzer.analyze(store="yes")
