"""Nobody is called healthy without evidence that something was learned."""

import numpy as np
import pytest
from run_builder import RUN_ID, RunBuilder, falling

import quark
from quark.analysis.engine import analyze_run
from quark.analysis.run_data import RunData
from quark_core.backends.run_summary import StoredRun
from quark_core.records import ProjectRecord, RunRecord
from quark_core.records.runs import RunEnding


def score(builder, **settings):
    run = builder if isinstance(builder, RunData) else builder.build()
    scores = analyze_run(run, quark.AnalyzerEngineConfig(**settings)).health_scores
    return {item.score_key: item for item in scores}


def is_called_healthy(overall):
    return overall.known and overall.status == "healthy"


def noisy(level, count=200, noise=0.05, seed=1):
    return level + noise * np.random.default_rng(seed).standard_normal(count)


def validate(builder, values, key="val/loss"):
    return builder.metric(key, values, steps=range(9, 10 * len(values) + 9, 10))


def tuned():
    return validate(
        RunBuilder().metric("train/loss", noisy(0.20, noise=0.06)), falling(20, 0.33, 0.28, 0.002)
    )


def learned():
    builder = RunBuilder().metric("train/loss", falling())
    return validate(builder, falling(20, noise=0.01))


def test_a_run_that_learned_is_healthy_and_says_what_it_rests_on():
    overall = score(learned())["overall"]
    assert (overall.known, overall.score, overall.status) == (True, 100.0, "healthy")
    assert "train/loss went from 1.8 to 0.112, val/loss from" in overall.summary
    rules = overall.metadata
    assert f"{rules['rules_with_data']} of {rules['rules']} checks ran" in overall.summary
    (evidence,) = [item for item in overall.evidence if item.kind == "metric"]
    assert (evidence.source, evidence.observed_value) == ("train/loss", rules["learning"]["end"])


@pytest.mark.parametrize(
    "scores",
    [
        score(RunBuilder().metric("energy", falling()).metric("lr", [0.1] * 200)),
        score(RunBuilder().metric("train/loss", [2.0, 1.5, 1.0, 0.5])),
        score(RunBuilder()),
        score(learned(), rules=("plateau",)),
        score(RunBuilder().metric("energy", [0.1] * 200), objective="val/los"),
    ],
    ids=["no loss", "few steps", "nothing", "one rule", "never logged"],
)
def test_what_is_not_known_has_fifty_at_most_and_says_why(scores):
    overall = scores["overall"]
    assert (overall.known, overall.status) == (False, "watch")
    assert overall.unknown_reason
    assert overall.summary == f"Not known: {overall.unknown_reason}."
    assert all(item.known or item.score <= 50.0 for item in scores.values())


def test_a_run_without_a_loss_names_what_it_has_and_what_to_do():
    overall = score(RunBuilder().metric("energy", falling()).metric("lr", [0.1] * 200))["overall"]
    assert overall.unknown_reason == (
        "no loss was recognised among energy, lr; name it with objective="
    )


def test_too_few_points_are_counted():
    overall = score(RunBuilder().metric("train/loss", [2.0, 1.5, 1.0, 0.5]))["overall"]
    assert overall.unknown_reason == "4 points of train/loss are too few to judge by"
    lost = [2.0, 1.5, 1.0, *[np.nan] * 40]
    overall = score(RunBuilder().metric("my/loss", lost, steps=range(0, 430, 10)))["overall"]
    assert "3 finite points of my/loss are too few" in (
        overall.unknown_reason or overall.metadata["learning"]["reason"]
    )


@pytest.mark.parametrize(
    "builder",
    [
        RunBuilder().metric("train/loss", noisy(2.3)),
        RunBuilder().metric("train/loss", [2.303] * 200),
        RunBuilder().metric("train/loss", noisy(2.3) + np.linspace(0.0, 1.0, 200)),
        RunBuilder().metric("train/loss", np.concatenate([falling(100), noisy(1.7, 100)])),
        RunBuilder().metric("train/loss", np.full(200, np.nan)),
        RunBuilder().metric("train/loss", np.append(falling(199), np.inf)),
        RunBuilder().metric("train/loss", [4.0, 1e9, 1e15, 1e20, 1e22, *falling(195, 1e20, 1e13)]),
        RunBuilder().metric("train/loss", falling(start=2.31, end=2.30, noise=0.001)),
        validate(RunBuilder().metric("train/loss", falling()), noisy(2.0, 20, 0.02)),
        validate(RunBuilder().metric("train/loss", falling()), np.full(20, np.nan)),
        validate(
            RunBuilder().metric("train/loss", falling(start=5.0, end=2.3)),
            noisy(0.1, 20, 0.005), "val/accuracy",
        ),
    ],
    ids=[
        "chance level", "constant", "rising", "lost again", "never finite", "ends infinite",
        "explodes at the start", "too little", "validation stands still", "validation not finite",
        "accuracy of guesses",
    ],
)  # fmt: skip
def test_whose_objective_did_not_improve_is_not_healthy(builder):
    overall = score(builder)["overall"]
    assert overall.known
    assert overall.score <= 60.0
    assert overall.status != "healthy"


def test_an_explosion_of_the_first_steps_is_no_start_to_improve_upon():
    loss = [4.0, 1e9, 1e15, 1e20, 1e22, *falling(195, 1e20, 1e13)]
    overall = score(RunBuilder().metric("train/loss", loss))["overall"]
    assert overall.metadata["learning"]["state"] == "not_learned"
    assert "train/loss did not get better: 4 to " in overall.summary


def test_what_was_held_out_and_stands_still_is_no_fault_of_the_optimization():
    scores = score(validate(RunBuilder().metric("train/loss", falling()), noisy(2.0, 20, 0.02)))
    assert (scores["optimization"].score, scores["generalization"].score) == (100.0, 60.0)
    scores = score(validate(RunBuilder().metric("train/loss", noisy(2.3)), noisy(2.3, 20, 0.02)))
    assert scores["optimization"].score <= 60.0


def test_what_did_not_improve_is_said():
    overall = score(validate(learned(), noisy(0.1, 20, 0.005), "val/accuracy"))["overall"]
    assert "but val/accuracy did not get better: 0." in overall.summary


@pytest.mark.parametrize(
    "builder",
    [
        learned(),
        # A validation that begins when most is learned.
        validate(RunBuilder().metric("train/loss", falling(rate=40.0)), noisy(0.12, 20, 0.005)),
        # Fine-tuning: little is left to win, and the batches are noisy.
        tuned().parameter("head.bias", role="bias", steps=[0, 90], element_count=10),
        # Of a policy the loss stands still while the reward rises.
        RunBuilder().metric("policy_loss", noisy(0.01)).metric("reward", -falling()),
    ],
    ids=["both", "late validation", "fine-tuning", "reward"],
)
def test_who_learned_is_called_healthy(builder):
    assert is_called_healthy(score(builder)["overall"])


@pytest.mark.parametrize(
    "builder",
    [
        RunBuilder().metric("loss", falling(16), epochs=range(16)),
        RunBuilder().metric("train/loss", falling(300, start=10.0, end=-54.0, noise=1.0)),
        RunBuilder().metric("accuracy", 0.95 - 0.4 * falling()),
        RunBuilder().metric("loss", falling(noise=0.4, start=5.0, end=1.0)),
    ],
    ids=["epochs", "negative", "accuracy", "noisy"],
)
def test_who_was_never_validated_has_no_problem_found(builder):
    scores = score(builder)
    overall = scores["overall"]
    assert (overall.known, overall.score, overall.status) == (True, 80.0, "watch")
    assert overall.word == scores["optimization"].word == "no problem found"
    assert overall.summary.startswith("No problem found. ")
    ran = f"{overall.metadata['rules_with_data']} of {overall.metadata['rules']} checks ran"
    assert f'{ran}; metrics.log("val/loss", value, step=step) lets more run' in overall.summary


@pytest.mark.parametrize(
    "builder",
    [
        validate(
            RunBuilder().metric("train/loss", falling(start=3.5, end=2.8)),
            falling(20, start=3.0, end=2.8, noise=0.005),
        ),
        validate(
            RunBuilder().metric("mse", noisy(1.0, noise=0.1)),
            falling(20, start=1.1, end=1.0, noise=0.005),
        ),
        RunBuilder().metric("loss", falling(start=0.69, end=0.6, noise=0.01)),
        tuned(),
    ],
    ids=["letters", "regression", "two classes", "fine-tuning of who knows what"],
)
def test_who_keeps_most_of_the_loss_is_watched(builder):
    overall = score(builder)["overall"]
    assert (overall.known, overall.score, overall.status) == (True, 80.0, "watch")
    assert "how low it can go is not known" in overall.summary
    assert overall.metadata["learning"]["state"] == "learned"


def test_a_validation_that_falls_tells_what_the_noise_of_the_training_hides():
    builder = RunBuilder().metric("train/huber", noisy(0.8, noise=0.4))
    overall = score(validate(builder, falling(20, 0.4, 0.08, 0.002), "val/huber"))["overall"]
    assert overall.metadata["learning"]["metric"] == "val/huber"
    assert is_called_healthy(overall)


@pytest.mark.parametrize("more", [("accuracy", 0.95 - 0.4 * falling()), ("reward", -falling())])
def test_a_score_tells_that_what_is_left_of_the_loss_is_little(more):
    builder = RunBuilder().metric("loss", falling(start=3.5, end=2.8)).metric(*more)
    assert is_called_healthy(score(validate(builder, falling(20, 3.5, 2.8, 0.01)))["overall"])


def test_a_loss_that_comes_down_to_that_of_guesses_has_learned_nothing():
    def classify(end, start=2.2, **more):
        builder = RunBuilder().metric("train/loss", falling(start=start, end=end, noise=0.03))
        builder.parameter("head.bias", role="bias", steps=[0, 90], element_count=5)
        for key, values in more.items():
            builder.metric(f"val/{key}", values, steps=range(9, 200, 10))
        return score(builder)["overall"]

    overall = classify(1.6)
    assert (overall.status, overall.metadata["learning"]["state"]) == ("degraded", "not_learned")
    assert "guesses among 5 outputs have 1.61" in overall.summary
    assert classify(1.3).metadata["learning"]["state"] == "learned"
    assert classify(1.6, start=5.0).metadata["learning"]["state"] == "learned"
    risen = 0.7 - 0.2 * falling(20)
    assert classify(1.6, accuracy=risen).metadata["learning"]["state"] == "learned"


def speak(end, *, head=24 * 32, kind="Linear", last="Linear"):
    """A model of 32 symbols and 24 features that says each symbol of what it reads."""
    builder = validate(
        RunBuilder().metric("train/loss", falling(start=3.5, end=end)),
        falling(20, start=2.5, end=end, noise=0.005),
    )
    steps = range(0, 200, 10)
    builder.layer("embed", "Embedding", steps=steps, element_count=16 * 24, std=0.1)
    builder.layer("mix", kind, steps=steps, element_count=16 * 24, std=0.1)
    builder.layer("head", last, steps=steps, element_count=16 * 32, std=0.1)
    builder.parameter("embed.weight", steps=steps, kind="Embedding", element_count=24 * 32)
    return builder.parameter("head.weight", steps=steps, element_count=head)


def test_who_foresees_every_symbol_has_seen_it():
    overall = score(speak(0.1))["overall"]
    assert (overall.known, overall.status) == (True, "watch")
    assert "a guess among 32 symbols has 3.47: make sure that no place sees" in overall.summary


@pytest.mark.parametrize(
    "builder",
    [speak(0.8), speak(0.1, kind="GRU"), speak(0.1, head=24 * 5)],
    ids=["a text", "one that reads on", "a classifier"],
)
def test_who_does_not_foresee_every_symbol_is_healthy(builder):
    assert is_called_healthy(score(builder)["overall"])


def test_a_run_that_was_never_validated_is_not_a_hundred():
    scores = score(RunBuilder().metric("train/loss", falling()))
    assert scores["overall"].score == 80.0
    assert "it was never validated" in scores["overall"].summary
    assert scores["generalization"].known is False


def end_as(state, ending=None):
    """A run as its store knows it, that has ended so."""
    at = "2026-01-02T03:04:05.000000Z"
    project = ProjectRecord("project-a", "p", "", at, at)
    status = "running" if state == "lost" else state
    run = RunRecord(
        RUN_ID, "project-a", "p", status, None, None, 0, "", None, False, (), 0, None, None, at,
        at, None if state == "lost" else at,
    )  # fmt: skip
    return StoredRun(project=project, run=run, state=state, ending=ending, lost_reason="it is gone")


@pytest.mark.parametrize(
    ("stored", "status", "points"),
    [
        (end_as("failed"), "critical", 30.0),
        (end_as("failed", RunEnding("exception", "OSError: no space")), "critical", 30.0),
        (end_as("lost"), "critical", 30.0),
        (end_as("interrupted"), "degraded", 60.0),
        (end_as("interrupted", RunEnding("exit_status", "exit status 3")), "critical", 30.0),
        (end_as("interrupted", RunEnding("signal", "SIGTERM")), "critical", 30.0),
        (end_as("interrupted", RunEnding("signal", "SIGINT (Ctrl-C)")), "watch", 80.0),
    ],
    ids=lambda value: value.describe_end() if isinstance(value, StoredRun) else None,
)
def test_a_run_that_broke_off_is_not_healthy_and_says_why(stored, status, points):
    builder = learned()
    assert is_called_healthy(score(builder)["overall"])
    result = analyze_run(RunData(builder.read, RUN_ID, stored=stored))
    overall = {item.score_key: item for item in result.health_scores}["overall"]
    assert (overall.known, overall.status, overall.score) == (True, status, points)
    first = result.alerts[0]
    assert (first.rule_id, first.id) == ("broken_off", overall.contributing_alert_ids[0])
    assert overall.summary.startswith(first.fact)
    assert stored.ending is None or stored.ending.message in first.fact
    # What rules say of it is what it was.
    assert result.health_scores[1:4] == analyze_run(builder.build()).health_scores[1:4]


@pytest.mark.parametrize("mode", ["adaptive", "absolute"])
def test_no_setting_leaves_out_that_a_run_broke_off(mode):
    config = quark.AnalyzerEngineConfig(
        rules=("plateau",) if mode == "adaptive" else None, mode=mode
    )
    builder = RunBuilder().metric("train/loss", falling(3))
    result = analyze_run(RunData(builder.read, RUN_ID, stored=end_as("failed")), config)
    assert [alert.rule_id for alert in result.alerts] == ["broken_off"]
    assert result.health_scores[0].known


def test_what_nobody_knows_stays_unknown_where_somebody_stopped_the_run():
    builder = RunBuilder().metric("energy", falling())
    stopped = end_as("interrupted", RunEnding("stop_request", "ada asked for it"))
    result = analyze_run(RunData(builder.read, RUN_ID, stored=stopped))
    assert result.alerts[0].severity == "warning"
    assert not result.health_scores[0].known


@pytest.mark.parametrize("state", ["running", "completed"])
def test_a_run_that_goes_on_or_has_completed_has_no_such_alert(state):
    builder = learned()
    assert analyze_run(RunData(builder.read, RUN_ID, stored=end_as(state))).alerts == ()


def test_losses_of_two_players_say_nothing_until_something_is_named():
    builder = RunBuilder().metric("train/d_loss", noisy(0.69)).metric("train/g_loss", noisy(0.7))
    builder.metric("distance", falling())
    overall = score(builder)["overall"]
    assert (overall.known, "objective=" in overall.unknown_reason) == (False, True)
    assert is_called_healthy(score(builder, objective="distance")["overall"])


def test_an_alert_without_a_loss_is_known_all_the_same():
    builder = RunBuilder().metric("energy", falling())
    builder.layer("fc", steps=range(0, 200, 10), nan_count=50, norm=1.0, std=1.0)
    overall = score(builder)["overall"]
    assert (overall.known, overall.status) == (True, "degraded")
