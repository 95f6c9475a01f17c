"""Runs without an alert that have learned, and are not called healthy; and what looks like them."""

import re

import numpy as np
import pytest
from run_builder import RunBuilder, falling

from quark.analysis.config import PhaseAnalyzerConfig
from quark.analysis.engine import analyze_run
from quark.analysis.observations import format_number
from quark.analysis.phases import analyze_phases
from quark.analysis.run_data import RunData
from quark_core.records.columns import Columns

STEPS = list(range(0, 240, 5))
COUNT = len(STEPS)
CLASSES = 10
GUESSES = float(np.log(CLASSES))


def judge(run):
    run = run if isinstance(run, RunData) else run.build()
    analysis = analyze_run(run)
    return next(item for item in analysis.health_scores if item.score_key == "overall")


def doubt(run):
    overall = judge(run)
    assert overall.known
    return overall.metadata["learning"]["doubt"]


def train(train_end, held_out, *, start=GUESSES, layers=(), accuracy=None, head=CLASSES):
    """A classifier whose losses begin as guesses and end at `train_end` and with `held_out`."""
    builder = RunBuilder().metric(
        "train/loss", falling(240, start=start, end=train_end, noise=0.02, rate=8.0)
    )
    builder.metric("val/loss", held_out, steps=range(11, 240, 12))
    if accuracy is not None:
        builder.metric("val/accuracy", accuracy, steps=range(11, 240, 12))
    for name, kind, figures in (*layers, ("head", "Linear", {"element_count": 32 * head})):
        builder.layer(name, kind, steps=STEPS, std=1.0, **figures)
    return builder.parameter("head.bias", steps=STEPS, role="bias", element_count=head)


def validate(end, *, start=2.0, noise=0.005):
    return falling(20, start=start, end=end, noise=noise, rate=8.0)


def with_config(builder, **config):
    def read(kind, _query):
        return Columns.from_records(kind, builder.records.get(kind, []))

    return RunData(read, "run-a", config=config)


def test_a_training_and_a_validation_that_agree_are_healthy():
    overall = judge(train(0.3, validate(0.35)))
    assert (overall.status, overall.metadata["learning"]["doubt"]) == ("healthy", None)


# What is trained on is harder than what is held out.


def test_a_training_loss_that_stays_above_the_validation_is_told():
    said = doubt(train(0.9, validate(0.4)))
    assert "what is trained on is harder than what is held out" in said
    # More than dropout makes of it.
    assert doubt(train(1.2, validate(0.4), layers=(("drop", "Dropout", {}),))) == doubt(
        train(1.2, validate(0.4))
    )
    assert judge(train(0.9, validate(0.4))).status == "watch"


@pytest.mark.parametrize(
    "run",
    [
        train(0.9, validate(0.4), layers=(("drop", "Dropout", {}),)),
        with_config(train(0.9, validate(0.4)), mixup_alpha=0.2),
        train(0.5, validate(0.42)),
        # Of another measure, as where a penalty or a sum is part of one of them.
        train(3.0, validate(0.4), start=20.0),
        train(0.05, validate(0.01)),
    ],
    ids=["dropout", "named augmentation", "hardly", "a penalty", "both little"],
)
def test_training_losses_that_are_above_for_a_reason(run):
    assert doubt(run) is None


def test_augmentation_that_is_switched_off_is_no_reason():
    assert doubt(with_config(train(0.9, validate(0.4)), mixup_alpha=0.0)) is not None


# What is held out has won little of what the training has.


def test_what_holds_for_the_training_alone_is_told():
    said = doubt(train(0.02, validate(0.8)))
    assert "of what was won holds for what is held out" in said


def test_a_small_gap_or_a_good_accuracy_is_none():
    assert doubt(train(0.1, validate(0.5))) is None
    good = np.minimum(np.linspace(0.3, 1.5, 20), 0.95)
    assert doubt(train(0.02, validate(0.8), accuracy=good)) is None


def test_a_validation_on_another_scale_than_the_training_is_told():
    builder = RunBuilder().metric("train/loss", falling(240, start=0.1, end=0.02, noise=1e-3))
    builder.metric("val/loss", validate(0.5, start=0.9), steps=range(11, 240, 12))
    assert "are not made in one way for both" in doubt(builder)


def test_another_measure_that_falls_by_as_large_a_share_is_none():
    """Such as squared errors beside a cross-entropy."""
    builder = RunBuilder().metric("train/loss", falling(240, start=0.7, end=0.2, noise=1e-3))
    builder.metric("val/loss", validate(1.2, start=5.2), steps=range(11, 240, 12))
    assert doubt(builder) is None


def test_held_out_losses_above_those_of_guesses_are_told():
    said = doubt(train(0.3, validate(2.6, start=3.4), accuracy=np.linspace(0.3, 0.92, 20)))
    assert "is said wrongly with confidence" in said


def test_a_loss_that_is_summed_over_a_batch_is_not_held_against_guesses():
    builder = train(10.0, validate(20.0, start=60.0), start=32 * GUESSES,
                    accuracy=np.linspace(0.3, 0.92, 20))  # fmt: skip
    assert doubt(builder) is None


def test_few_classes_can_be_told_better_than_that():
    assert "how low it can go is not known" in doubt(train(1.5, validate(1.5)))
    assert doubt(train(1.3, validate(1.3))) is None
    # Of symbols in a row the next one cannot be known.
    symbols = train(1.5, validate(1.5), layers=(("embed", "Embedding", {}),))
    assert doubt(symbols) is None


# What was won, and lost again.


def test_a_third_of_what_was_won_that_is_lost_again_is_told():
    held_out = np.concatenate([validate(0.4)[:12], np.linspace(0.5, 1.2, 8)])
    overall = judge(train(0.3, held_out))
    assert overall.status != "healthy"


# What is noted beside the losses.


def note(key, values):
    values = np.asarray(values, dtype=float)
    builder = train(0.3, validate(0.35))
    return builder.metric(key, values, steps=range(11, 11 + 12 * len(values), 12))


@pytest.mark.parametrize("key", ["val/recall", "eval_kappa", "valid.mIoU", "test/recall@5", "r2"])
def test_a_score_that_stays_at_nothing_is_told_whatever_the_loss_says(key):
    said = doubt(note(key, [0.2, 0.1, *[0.0] * 10]))
    assert said.startswith(f"{key} ends at 0: nothing is found")
    assert judge(note(key, np.zeros(12))).status == "watch"


def test_features_whose_deviation_is_gone_are_told():
    said = doubt(note("train/feature_std", np.geomspace(0.7, 0.06, 12)))
    assert said.startswith("train/feature_std went from 0.")


@pytest.mark.parametrize(
    "run",
    [
        note("val/recall", [0.0] * 8 + [0.3] * 4),
        note("val/false_recall_rate", np.zeros(12)),
        note("val/recall", [0.0, 0.0]),
        note("train/feature_std", np.linspace(0.9, 0.4, 12)),
        note("train/posterior_std", np.geomspace(0.9, 0.01, 12)),
    ],
    ids=["found late", "another name", "too few", "it falls a little", "of a posterior"],
)
def test_what_is_noted_beside_the_losses_and_is_as_it_should_be(run):
    assert doubt(run) is None


# One class for all.


def say_always(share, *, flat=True, loss=None):
    alone = -share * np.log(share) - (1 - share) * np.log(1 - share)
    accuracy = np.full(20, share) if flat else share + np.linspace(-0.02, 0.02, 20)
    held_out = validate(alone if loss is None else loss, start=0.6, noise=1e-3)
    return train(alone if loss is None else loss, held_out, start=0.69, accuracy=accuracy, head=2)


def test_who_always_says_the_more_frequent_class_is_found_by_what_that_gives():
    said = doubt(say_always(0.95))
    assert "who always says the more frequent class" in said
    assert judge(say_always(0.95)).status == "watch"


@pytest.mark.parametrize(
    "run",
    [say_always(0.95, flat=False), say_always(0.95, loss=0.08)],
    ids=["it moves", "it knows more"],
)
def test_accuracies_that_only_resemble_one_class(run):
    assert doubt(run) is None


# Layers that pass nothing on but signs.


def saturate(level, *, kind="Tanh", name="act"):
    figures = {"saturation_ratio": level, "dead_unit_ratio": 0.0}
    return train(0.3, validate(0.35), layers=(("body", "Linear", {}), (name, kind, figures)))


def test_a_hidden_layer_that_is_lost_is_told_though_the_loss_falls():
    run = saturate(0.995).build()
    (alert,) = [item for item in analyze_run(run).alerts if item.rule_id == "activation_collapse"
                and item.severity != "info"]  # fmt: skip
    assert (alert.severity, alert.culprit, alert.title) == (
        "warning", "body", "Units are saturated",
    )  # fmt: skip
    assert judge(run).status == "watch"


@pytest.mark.parametrize(
    "level",
    [0.9, np.where(np.arange(COUNT) < COUNT - 10, 0.99, 0.5)],
    ids=["much of it", "it came back"],
)
def test_layers_that_are_not_lost(level):
    overall = judge(saturate(level))
    assert overall.status == "healthy"


def test_outputs_may_be_at_their_ends():
    builder = RunBuilder().metric("train/loss", falling(240, start=0.69, end=0.05))
    builder.metric("val/loss", validate(0.06, start=0.6), steps=range(11, 240, 12))
    builder.layer("head", steps=STEPS, std=1.0)
    builder.layer("share", "Sigmoid", steps=STEPS, std=0.5, saturation_ratio=0.99)
    assert judge(builder).status == "healthy"


def test_what_is_said_of_a_lost_layer_holds_where_paths_lead_past_it():
    """In a residual network what comes before it is trained by its shortcut."""
    said = doubt(saturate(0.98))
    assert said.startswith("98 % of act is saturated at the end: ")
    assert "no gradient passes through act;" in said
    assert "before" not in said


# The best is the best that was logged, whoever says it.


@pytest.mark.parametrize("end", [0.9, 3.0])
def test_all_texts_say_the_same_best(end):
    lost = np.concatenate([falling(120, end=0.4, noise=0.05), np.linspace(0.4, end, 120)])
    lost[120:] += np.random.default_rng(5).normal(0.0, 0.05, 120)
    run = RunBuilder().metric("train/loss", falling(240, noise=0.02)).metric("val/loss", lost)
    worse = RunBuilder().metric("train/loss", lost)
    for each in (run.build(), worse.build()):
        analysis = analyze_run(each)
        texts = [alert.fact for alert in analysis.alerts]
        texts += [score.summary for score in analysis.health_scores]
        texts += [phase.summary for phase in analyze_phases(each, PhaseAnalyzerConfig()).phases]
        said = [
            found[1] or found[2]
            for text in texts
            for found in re.finditer(r"(\S+) at its best|was best at step \d+ \(([^)]+)\)", text)
        ]
        steps = re.findall(r"(?:at its best \(|best at )step (\d+)", " ".join(texts))
        assert len(said) > 1, texts
        assert set(said) == {format_number(lost.min())}, texts
        assert set(steps) == {str(lost.argmin())}
