"""ComparisonEngine over real runs in the embedded store."""

import json

import numpy as np
import pytest
from comparison_runs import decay

import quark
from quark import MetricsLogger
from quark.analysis.comparison.engine import ComparisonEngine
from quark.analysis.comparison.results import RunComparisonResult
from quark.analysis.config import ComparisonEngineConfig, MetricTargetSpec
from quark.analysis.engine import AnalyzerEngine
from quark.analysis.phases import PhaseAnalyzer
from quark_core.errors import RunNotFoundError, SchemaValidationError
from quark_core.records.schema import CURRENT_SCHEMA_VERSION


def log(session, curves):
    with MetricsLogger(session) as metrics:
        for key, values in curves.items():
            for step, value in enumerate(values):
                metrics.log(key, value, step=step)


def train(folder, seed=0, config=None, curves=None, **options):
    """A run that has ended."""
    settings = {"seed": seed, "lr": 0.1, **(config or {})}
    with quark.start_run(project="p", config=settings, storage_dir=folder) as session:
        log(session, {"val/loss": decay(seed, **options)} if curves is None else curves)
    return session


def as_dict(result):
    """The result without its moment, as JSON shows it."""
    found = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert found.pop("generated_at").endswith("Z")
    return found


@pytest.mark.long
def test_the_guide(tmp_path):
    baseline = train(tmp_path, 1, {"lr": 0.2}, {"val/accuracy": [0.5, 0.7, 0.82, 0.85, 0.9]})
    with quark.start_run(project="p", config={"lr": 0.1, "seed": 1}, storage_dir=tmp_path) as s:
        log(s, {"val/accuracy": [0.6, 0.81, 0.85, 0.9, 0.9]})
        comparison = ComparisonEngine(
            s,
            config=ComparisonEngineConfig(
                metric_targets=(
                    MetricTargetSpec(
                        metric_key="val/accuracy", target_value=0.80, direction="at_least"
                    ),
                ),
            ),
        ).compare_to_baseline(baseline.run_id)
    assert isinstance(comparison, RunComparisonResult)
    assert comparison.mode == "baseline"
    assert comparison.primary.to_dict()["run_id"] == s.run_id
    assert comparison.reference.to_dict()["run_id"] == baseline.run_id
    (diff,) = comparison.metric_diffs
    assert diff.time_to_target_step == -1
    for part in (*comparison.phase_diffs, *comparison.layer_summary_diffs, comparison.alert_diff):
        assert part.to_dict()
    found = comparison.to_dict()
    assert list(found)[:3] == ["schema_version", "generated_at", "mode"]
    assert found["schema_version"] == CURRENT_SCHEMA_VERSION
    names = {"metric_diffs", "alert_diff", "phase_diffs", "layer_summary_diffs", "changes"}
    assert names <= found.keys()
    # What changed stands before what came of it.
    assert list(found).index("changes") < list(found).index("metric_diffs")


@pytest.mark.long
def test_every_kind_of_target_gives_the_same(tmp_path):
    one, two = train(tmp_path, 1), train(tmp_path, 2, {"lr": 0.3})
    opened = quark.open_run(two.run_id, tmp_path)
    expected = as_dict(ComparisonEngine(one).compare(two))
    assert expected["mode"] == "pairwise"
    for other in (two.run_id, two.context, opened, opened.context, [two.run_id], (two,)):
        assert as_dict(ComparisonEngine(one.context).compare(other)) == expected
    assert as_dict(ComparisonEngine.compare_runs(one.run_id, two)) == expected
    again = as_dict(ComparisonEngine.compare_runs([one], [two], baseline=True))
    assert again == {**expected, "mode": "baseline"}


@pytest.mark.long
def test_comparing_alters_nothing(tmp_path):
    one, two = train(tmp_path, 1), train(tmp_path, 2)
    before = one.reload(), len(quark.EventLogger(quark.open_run(one.run_id, tmp_path)).read())
    ComparisonEngine(one).compare(two)
    assert one.reload() == before[0]
    opened = quark.open_run(one.run_id, tmp_path)
    assert len(quark.EventLogger(opened).read()) == before[1]
    assert AnalyzerEngine(opened).read_health_scores() == ()


@pytest.mark.long
def test_where_the_analysis_comes_from(tmp_path):
    one, two = train(tmp_path, 1), train(tmp_path, 2)
    result = ComparisonEngine(one).compare(two)
    assert (result.primary.analysis, result.reference.analysis) == ("in_memory", "in_memory")
    assert any("analyzed in memory" in note for note in result.notes)
    for session in (one, two):
        AnalyzerEngine(session).analyze()
        PhaseAnalyzer(session).analyze()
    stored = ComparisonEngine(one).compare(two)
    assert (stored.primary.analysis, stored.reference.analysis) == ("stored", "stored")
    assert not any("memory" in note for note in stored.notes)
    assert stored.alert_diff == result.alert_diff
    assert stored.phase_diffs == result.phase_diffs
    assert stored.health_score_diffs == result.health_score_diffs
    assert {diff.score_key for diff in stored.health_score_diffs} >= {"overall"}


@pytest.mark.long
def test_an_analysis_that_records_came_after_is_made_anew(tmp_path):
    other = train(tmp_path, 2)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        log(session, {"train/loss": [2.0 / (1 + step / 20) for step in range(100)]})
        assert AnalyzerEngine(session).analyze().alerts == ()
        PhaseAnalyzer(session).analyze()
        assert ComparisonEngine(session).compare(other).primary.analysis == "stored"
        with MetricsLogger(session) as metrics:
            for step in range(100, 300):
                metrics.log("train/loss", 0.3 + 0.1 * (step - 100), step=step)
    result = ComparisonEngine(session).compare(other)
    assert result.primary.analysis == "in_memory"
    assert any("records arrived after its stored analysis" in note for note in result.notes)
    assert "divergence" in {alert.rule_id for alert in result.alert_diff.primary_only}
    assert "divergence" in {phase.phase_name for phase in result.phase_diffs}


@pytest.mark.long
def test_groups_of_seeds(tmp_path):
    good = [train(tmp_path, seed, level=0.2) for seed in range(5)]
    bad = [train(tmp_path, seed, {"lr": 0.5}, level=0.3) for seed in (5, 6, 7, 8, 9)]
    result = ComparisonEngine(good).compare_to_baseline([run.run_id for run in bad])
    assert (result.primary.run_count, result.reference.run_count) == (5, 5)
    assert [member.run_id for member in result.primary.members] == [run.run_id for run in good]
    assert [change.path for change in result.changes if change.section == "config"] == ["lr"]
    assert (result.metric_diffs[0].verdict, result.metric_diffs[0].method) == ("better", "welch")
    assert "val/loss: better" in result.summary
    assert not any("paired" in note or "in more than seeds" in note for note in result.notes)


@pytest.mark.long
def test_matching_seeds_are_paired(tmp_path):
    one = [train(tmp_path, seed) for seed in (0, 1, 2)]
    two = [train(tmp_path, seed, {"lr": 0.2}, level=0.31) for seed in (2, 0, 1)]
    result = ComparisonEngine(one).compare(two)
    assert result.metric_diffs[0].method == "paired"
    assert "The runs are paired by their seeds." in result.notes
    never = ComparisonEngineConfig(pairing="never")
    result = ComparisonEngine(one, config=never).compare(two)
    assert result.metric_diffs[0].method == "welch"


@pytest.mark.long
def test_a_group_that_is_no_group_of_seeds_is_told(tmp_path):
    mixed = [train(tmp_path, 0), train(tmp_path, 1, {"lr": 0.7})]
    result = ComparisonEngine(mixed).compare([train(tmp_path, 3), train(tmp_path, 4)])
    assert any("differ in more than seeds: lr" in note for note in result.notes)
    (change,) = [item for item in result.changes if item.section == "config"]
    assert (change.kind, change.primary, change.reference) == ("varies", [0.1, 0.7], [0.1])


@pytest.mark.long
def test_the_same_run_on_both_sides(tmp_path):
    run = train(tmp_path)
    result = ComparisonEngine(run).compare(run.run_id)
    assert result.metric_diffs[0].verdict == "equivalent"
    assert result.changes == ()
    assert "Both sides are the same runs." in result.notes
    named_twice = ComparisonEngine([run, run.run_id]).compare([train(tmp_path, 1), run])
    assert named_twice.primary.run_count == 1
    assert any(note.startswith("On both sides:") for note in named_twice.notes)


@pytest.mark.long
def test_what_changed(tmp_path):
    deep = {"model": {"width": 8, "act": "relu"}, "layers": [1, 2], "only": None}
    one = train(tmp_path, 1, deep)
    two = train(tmp_path, 2, {"model": {"width": 16, "act": "relu"}, "layers": [1, 3], "mine": 1})
    changes = {
        item.path: item for item in ComparisonEngine(one).compare(two).changes
        if item.section == "config"
    }  # fmt: skip
    assert list(changes) == ["layers", "mine", "model.width", "only", "seed"]
    assert (changes["layers"].kind, changes["layers"].reference) == ("changed", [1, 3])
    assert (changes["mine"].kind, changes["only"].kind) == ("removed", "added")
    assert (changes["model.width"].primary, changes["model.width"].reference) == (8, 16)
    assert (changes["seed"].primary, changes["seed"].reference) == (1, 2)
    # The same process and machine.
    everything = ComparisonEngine(one).compare(two).changes
    assert {item.section for item in everything} == {"config"}


@pytest.mark.long
def test_a_run_that_goes_on(tmp_path):
    done = train(tmp_path, 1)
    with (
        quark.start_run(project="p", storage_dir=tmp_path) as session,
        MetricsLogger(session) as metrics,
    ):
        for step, value in enumerate(decay(2)[:20]):
            metrics.log("val/loss", value, step=step)
        result = ComparisonEngine(session).compare(done)
        by_id = ComparisonEngine(done).compare(session.run_id)
    assert any("still running" in note for note in result.notes)
    assert (result.metric_diffs[0].common_start, result.metric_diffs[0].common_end) == (0, 19)
    assert by_id.metric_diffs[0].common_end == 19
    assert result.primary.state == "running"


@pytest.mark.long
def test_runs_without_metrics(tmp_path):
    empty, full = train(tmp_path, 1, curves={}), train(tmp_path, 2)
    result = ComparisonEngine(empty).compare(full)
    assert [diff.presence for diff in result.metric_diffs] == ["reference_only"]
    assert any("no metrics" in note for note in result.notes)
    assert ComparisonEngine(full).compare(empty).metric_diffs[0].presence == "primary_only"
    both = ComparisonEngine(empty).compare(train(tmp_path, 3, curves={}))
    assert both.metric_diffs == ()
    assert "Neither side has metrics." in both.summary


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:metric .* breaks:RuntimeWarning")
@pytest.mark.parametrize(
    "curves",
    [
        {"val/loss": [1.0]},
        {"val/loss": [float("nan")] * 30},
        {"val/loss": [float("inf")]},
        {"val/loss": [1e308, -1e308] * 20},
        {"val/loss": [0.0] * 50},
        {"val/accuracy@1": [0.5] * 5},
    ],
    ids=["one point", "NaN", "infinite", "huge", "constant", "encoded name"],
)
def test_bad_data(tmp_path, curves):
    odd, plain = train(tmp_path, 1, curves=curves), train(tmp_path, 2)
    for result in (
        ComparisonEngine(odd).compare(plain),
        ComparisonEngine(plain).compare(odd),
        ComparisonEngine(odd).compare(odd),
        ComparisonEngine([odd, plain]).compare([train(tmp_path, 3), train(tmp_path, 4)]),
    ):
        json.dumps(result.to_dict(), allow_nan=False)
        assert all(diff.reason for diff in result.metric_diffs)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:metric .* breaks:RuntimeWarning")
def test_an_encoded_name_is_found_as_it_was_logged(tmp_path):
    one = train(tmp_path, 1, curves={"acc@1": [0.5, 0.9, 0.9, 0.9]})
    two = train(tmp_path, 2, curves={"acc@1": [0.5, 0.5, 0.9, 0.9]})
    config = ComparisonEngineConfig(
        metric_targets=(MetricTargetSpec("acc@1", 0.8, "at_least"),), tolerances={"acc@1": 0.3}
    )
    (diff,) = ComparisonEngine(one, config=config).compare(two).metric_diffs
    assert diff.time_to_target_step == -1
    assert diff.tolerance == 0.3


@pytest.mark.long
def test_a_run_that_stopped_early_is_told(tmp_path):
    short = train(tmp_path, 1, curves={"val/loss": decay(1)[:20]})
    result = ComparisonEngine(train(tmp_path, 2)).compare([short, train(tmp_path, 3)])
    assert result.metric_diffs[0].common_end == 19
    assert result.notes[0].endswith(
        f"{short.run_id} and 1 more at steps 19 to 59: each run is compared at its own end."
    )


@pytest.mark.long
def test_disjoint_steps(tmp_path):
    one = train(tmp_path, 1)
    with (
        quark.start_run(project="p", storage_dir=tmp_path) as session,
        MetricsLogger(session) as metrics,
    ):
        for step in range(500, 520):
            metrics.log("val/loss", 1.0, step=step)
    result = ComparisonEngine(one).compare(session)
    assert result.metric_diffs[0].verdict == "inconclusive"
    assert "The sides have no common steps of any metric." in result.notes


@pytest.mark.long
def test_layers_and_parameters_of_real_models(tmp_path):
    torch = pytest.importorskip("torch")

    class Wrapper(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.module = inner

        def forward(self, x):
            return self.module(x)

    def run(scale, wrapped, extra):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)]
        if extra:
            layers.append(torch.nn.Tanh())
        model = torch.nn.Sequential(*layers)
        if wrapped:
            model = Wrapper(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4 * scale)
        with (
            quark.start_run(project="p", storage_dir=tmp_path) as session,
            quark.HookEngine(session, model, optimizer) as hooks,
            quark.ParameterDiagnostics(session, model, optimizer) as parameters,
        ):
            for step in range(6):
                with hooks.step(step):
                    optimizer.zero_grad()
                    model(scale * torch.randn(16, 4)).pow(2).mean().backward()
                    optimizer.step()
                parameters.snapshot(step)
        return session

    result = ComparisonEngine(run(10.0, True, False)).compare(run(1.0, False, True))
    layers = {(item.module_name, item.summary_type): item for item in result.layer_summary_diffs}
    first = layers["0", "activation"]
    assert (first.presence, first.notable) == ("both", True)
    assert first.log_ratio > 1.0
    assert layers["3", "activation"].presence == "reference_only"
    parameters = {item.parameter_name: item for item in result.parameter_diffs}
    assert parameters["0.weight"].presence == "both"
    assert parameters["0.weight"].notable
    json.dumps(result.to_dict(), allow_nan=False)


@pytest.mark.long
def test_alerts_are_compared(tmp_path):
    broken = np.append(decay(1, points=100), np.full(20, np.nan))
    one = train(tmp_path, 1, curves={"train/loss": broken})
    two = train(tmp_path, 2, curves={"train/loss": decay(2, points=120)})
    result = ComparisonEngine(one).compare(two)
    assert result.alert_diff.primary_count > 0
    assert {item.rule_id for item in result.alert_diff.primary_only} & {"non_finite_values"}
    assert "only on the primary" in result.summary


def test_targets_of_another_type_are_refused(tmp_path):
    run = train(tmp_path)
    for bad in (None, 3, [], "", [None], {"a": 1}, object()):
        with pytest.raises(SchemaValidationError, match=r"^other must"):
            ComparisonEngine(run).compare(bad)
        with pytest.raises(SchemaValidationError, match=r"^session must"):
            ComparisonEngine(bad)
        with pytest.raises(SchemaValidationError, match=r"^primary must"):
            ComparisonEngine.compare_runs(bad, run)
        with pytest.raises(SchemaValidationError, match=r"^baseline_run must"):
            ComparisonEngine(run).compare_to_baseline(bad)


@pytest.mark.long
def test_unknown_runs_and_configs(tmp_path):
    run = train(tmp_path)
    with pytest.raises(RunNotFoundError):
        ComparisonEngine(run).compare("absent")
    with pytest.raises(SchemaValidationError, match="config"):
        ComparisonEngine(run, config={"metric_targets": ()})


@pytest.mark.long
def test_an_analysis_that_fails_is_told(tmp_path, monkeypatch):
    from quark.analysis import engine

    def fail(_data):
        raise ZeroDivisionError("a rule of somebody's")

    one, two = train(tmp_path, 1), train(tmp_path, 2)
    monkeypatch.setattr(engine, "analyze_run", fail)
    result = ComparisonEngine(one).compare(two)
    assert result.primary.analysis == "none"
    assert any("ZeroDivisionError: a rule of somebody's" in note for note in result.notes)
    assert result.metric_diffs[0].common_end == 59
