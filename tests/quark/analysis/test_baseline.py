"""What holds in a healthy run and breaks in another one of the same model."""

import numpy as np
import pytest
from run_builder import RunBuilder, falling

import quark
from quark.analysis.baseline import HealthyBaseline, is_alike
from quark.analysis.engine import analyze_run
from quark_core.errors import SchemaValidationError

STEPS = list(range(0, 200, 5))
COUNT = len(STEPS)


def build(seed=0, loss=None, parameter=None, layer=None, **options):
    """A run of three layers, with noise of its own; what is given counts for the second one."""
    rng = np.random.default_rng(seed)
    builder = RunBuilder().metric("train/loss", falling(seed=seed) if loss is None else loss)
    builder.metric("val/loss", falling(20, seed=seed + 50), steps=range(0, 200, 10))

    def vary(level):
        return level * np.exp(0.3 * rng.standard_normal(COUNT) + 0.3 * rng.standard_normal())

    for index in range(3):
        figures = {
            "value_norm": vary(5.0), "gradient_norm": vary(0.1), "update_norm": vary(5e-3),
            "update_to_parameter_ratio": vary(1e-3), "learning_rate": 1e-2,
        }  # fmt: skip
        seen = {"std": vary(1.0), "mean": 0.1, "norm": vary(10.0), "dead_unit_ratio": 0.2,
                "saturation_ratio": 0.1}  # fmt: skip
        if index == 1:
            figures |= parameter or {}
            seen |= layer or {}
        builder.parameter(f"layers.{index}.weight", steps=STEPS, **figures, **options)
        builder.layer(f"layers.{index}", "ReLU", steps=STEPS, **seen)
    return builder.build()


def compare(here, *there, severity="warning"):
    result = analyze_run(here, baseline=HealthyBaseline(there or (build(9),), severity))
    return [alert for alert in result.alerts if alert.rule_id == "healthy_baseline"]


@pytest.mark.parametrize("seed", range(20))
def test_another_seed_gives_nothing(seed):
    assert not compare(build(seed), build(seed + 100))


@pytest.mark.parametrize(
    ("word", "changed"),
    [
        ("Updates", {"parameter": {"update_to_parameter_ratio": 1e-5}}),
        ("Gradients", {"parameter": {"gradient_norm": 1e3}}),
        ("learning rate", {"parameter": {"learning_rate": 1e-4}}),
        ("Activations", {"layer": {"std": 100.0, "norm": 1e3}}),
        ("Activations", {"layer": {"dead_unit_ratio": 0.8}}),
        ("Steps are", {"metadata": {"update_missing": "no_optimizer_step"}}),
        ("Steps are", {"metadata": {"carried_over": True}}),
        ("share of the model", {"requires_grad": False}),
        ("share of the model", {"in_optimizer": False}),
    ],
)
def test_what_breaks_is_told_with_evidence_of_both(word, changed):
    (alert,) = [alert for alert in compare(build(**changed)) if word in alert.title]
    assert alert.severity == "warning"
    assert {"here", "in"} <= {text for piece in alert.evidence for text in piece.summary.split()}
    assert len({piece.observed_value for piece in alert.evidence}) > 1


def test_a_figure_counts_only_where_all_healthy_runs_agree():
    wide = build(9, layer={"dead_unit_ratio": 0.7})
    assert not compare(build(layer={"dead_unit_ratio": 0.8}), build(8), wide)


def test_only_a_stretch_that_both_have_is_compared():
    other = build(9)
    early = {"update_to_parameter_ratio": np.where(np.arange(COUNT) < 8, 1.0, 1e-3)}
    assert not compare(build(parameter=early), other)


def test_which_runs_are_trained_alike():
    assert is_alike(build(1), build(2))
    assert not is_alike(build(1), build(2, parameter={"learning_rate": 1.0}))
    assert not is_alike(build(1), build(2, element_count=7))


@pytest.fixture
def trained(tmp_path):
    """Trains a small model; returns the run's id."""
    torch = pytest.importorskip("torch")

    def train(seed=0, steps=True):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        goal, unseen = torch.ones(8, 1), torch.randn(64, 8)
        with quark.start_run(project="p", storage_dir=tmp_path) as session:
            metrics = quark.MetricsLogger(session)
            with quark.watch(session, model, optimizer, every_n_steps=4, telemetry=False) as watch:
                for step in range(80):
                    watch.step(step)
                    data = torch.randn(16, 8)
                    optimizer.zero_grad()
                    loss = (model(data) - data @ goal).square().mean()
                    loss.backward()
                    if steps:
                        optimizer.step()
                    metrics.log("train/loss", loss.item(), step=step)
                    if step % 8 == 7:
                        with torch.no_grad():
                            held_out = (model(unseen) - unseen @ goal).square().mean()
                        metrics.log("val/loss", held_out.item(), step=step)
        return quark.open_run(session.run_id, tmp_path)

    return train


def find(result):
    return [alert for alert in result.alerts if alert.rule_id == "healthy_baseline"]


@pytest.mark.long
def test_a_run_is_held_against_one_that_is_named(trained):
    good, other, bad = trained(), trained(1), trained(2, steps=False)
    assert not find(quark.AnalyzerEngine(other).analyze(against=good))
    titles = [alert.title for alert in find(quark.AnalyzerEngine(bad).analyze(against=[good]))]
    assert "Steps are not made as in the healthy run" in titles


@pytest.mark.long
def test_a_run_is_held_against_healthy_ones_of_its_project_by_itself(trained):
    good, bad = trained(), trained(2, steps=False)
    assert "healthy_baseline" not in quark.AnalyzerEngine(bad).analyze().verdicts
    scores = quark.AnalyzerEngine(good).analyze(store=True).health_scores
    assert scores[0].status == "healthy"
    result = quark.AnalyzerEngine(bad).analyze()
    assert find(result)
    assert {alert.severity for alert in find(result)} == {"info"}
    assert good.run_id in find(result)[0].fact


@pytest.mark.sampled
@pytest.mark.parametrize("against", ["a run", 3, []])
def test_what_is_no_run(trained, against):
    with pytest.raises(SchemaValidationError):
        quark.AnalyzerEngine(trained()).analyze(against=against)


def test_a_run_that_did_not_learn_is_no_reference(tmp_path):
    sessions = []
    for level in (0.0, 1.0):
        with quark.start_run(project="p", storage_dir=tmp_path) as session:
            metrics = quark.MetricsLogger(session)
            for step in range(60):
                metrics.log("train/loss", 2.3 * 0.97 ** (level * step), step=step)
        sessions.append(session)
    flat, fallen = sessions
    with pytest.raises(SchemaValidationError, match=r"is not healthy, .* did not get better"):
        quark.AnalyzerEngine(fallen).analyze(against=flat)
    assert quark.AnalyzerEngine(flat).analyze(against=fallen).health_scores


@pytest.mark.long
def test_what_was_stored_as_healthy_is_looked_at_again(trained, monkeypatch):
    good, other = trained(), trained(2)
    quark.AnalyzerEngine(good).analyze(store=True)
    assert "healthy_baseline" in quark.AnalyzerEngine(other).analyze(store=False).verdicts
    monkeypatch.setattr("quark.analysis.engine.is_sound", lambda _learning: False)
    assert "healthy_baseline" not in quark.AnalyzerEngine(other).analyze(store=False).verdicts
