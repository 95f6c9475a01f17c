"""explain_change, over real runs: is there a change, what differs, and who did it."""

import os
import re

import numpy as np
import pytest

import quark

BASE = {"lr": 0.1, "augment": "strong", "log_every": 50}


def test_the_only_difference_of_a_change_beyond_chance_is_probably_the_cause(project):
    seeds = [project.run(BASE, seed=seed) for seed in range(5)]
    worse = project.run({**BASE, "augment": "none"}, level=0.8, seed=0)
    found = project.explain(seeds[0], worse)
    assert found.verdict == "worse"
    assert found.metric_key == "val/acc"
    (cause,) = found.causes
    assert (cause.kind, cause.place, cause.standing) == ("config", "augment", "probable")
    assert (cause.before, cause.after) == ("strong", "none")


def test_where_chance_does_as_much_nobody_is_accused(project):
    seeds = [project.run(BASE, seed=seed) for seed in range(6)]
    other = project.run({**BASE, "log_every": 100}, seed=7)
    found = project.explain(seeds[0], other)
    assert found.verdict == "no_difference"
    assert found.causes == ()
    assert {cause.place for cause in found.differences} == {"log_every", "seed"}


def test_without_seeds_of_one_configuration_it_cannot_be_told(project):
    one = project.run(BASE)
    other = project.run({**BASE, "lr": 0.2}, level=0.89)
    found = project.explain(one, other)
    assert found.verdict == "cannot_tell"
    (cause,) = found.causes
    assert (cause.place, cause.standing) == ("lr", "possible")


def test_what_was_not_recorded_is_unknown_and_never_the_same(project):
    found = project.explain(project.run(None), project.run(BASE))
    unknown = {remark.kind for remark in found.unknown if not remark.place}
    assert {"config", "data", "code", "seed"} <= unknown
    assert not {"config", "data", "code", "seed"} & {remark.kind for remark in found.ruled_out}


def test_runs_of_different_lengths_are_taken_by_their_own_ends(project):
    seeds = [project.run({**BASE, "steps": 60}, seed=seed, steps=60) for seed in range(4)]
    short = project.run({**BASE, "steps": 6}, seed=0, steps=6)
    found = project.explain(seeds[0], short)
    assert found.verdict == "worse"
    assert [cause.place for cause in found.causes] == ["steps"]
    assert any("own end" in note for note in found.notes)


def watch(project, samples, *, seed=0, level=0.9, file=1.0, given=("train",), **config):
    """A run whose data have two fingerprints of one key: the file's, and that of what came.

    Its code multiplies what it reads by an environment variable, which no run records.
    """
    scale = float(os.environ.get("SCALE", "1"))
    values = {"lr": 0.1, "seed": seed, **config}
    with quark.start_run(project=project.name, storage_dir=project.root, config=values) as session:
        for key in given:
            session.fingerprint_data(key, np.arange(10.0) * file).wait(30)
        batches = [np.full((4, 2), sample * scale) for sample in samples]
        for _ in quark.watch_data(batches, name="train"):
            pass
        metrics = quark.MetricsLogger(session)
        for step in range(10):
            metrics.log("val/acc", level * (1 - 0.5 ** (step + 1)), step=step)
    return session.run_id


def list_data(found):
    return [each.place for each in (*found.causes, *found.differences) if each.kind == "data"]


def list_unknown(found):
    return {remark.place: remark.words for remark in found.unknown if remark.kind == "data"}


@pytest.mark.parametrize("config", [{}, {"log_every": 50}])
@pytest.mark.parametrize("given", [("train",), ("images", "labels")])
def test_batches_that_an_environment_variable_alters_are_unknown(
    project, monkeypatch, given, config
):
    before = watch(project, (1.0, 2.0), given=given)
    monkeypatch.setenv("SCALE", "3")
    found = project.explain(before, watch(project, (1.0, 2.0), level=0.2, given=given, **config))
    assert list_data(found) == []
    assert "environment variable" in list_unknown(found)["samples of train"]
    assert {("data", key) for key in given} <= {(each.kind, each.place) for each in found.ruled_out}
    assert all(cause.standing == "possible" for cause in found.causes)


@pytest.mark.parametrize("given", [("train",), ()])
def test_batches_that_come_in_another_order_are_unknown(project, given):
    """Another order says that the data are the same, with or without a fingerprint of them."""
    before = watch(project, (1.0, 2.0), given=given)
    found = project.explain(before, watch(project, (2.0, 1.0), level=0.2, given=given))
    assert list_data(found) == []
    assert "in a different order" in list_unknown(found)["samples of train"]


@pytest.mark.parametrize("given", [(), ("images",)])
def test_batches_of_data_that_may_differ_are_possibly_the_cause(project, given):
    before = watch(project, (1.0, 2.0), given=given)
    found = project.explain(before, watch(project, (1.0, 3.0), level=0.2, given=given, file=2.0))
    expected = ["images", "samples of train"] if given else ["samples of train"]
    assert list_data(found) == expected
    (samples,) = [each for each in found.causes if each.place == "samples of train"]
    assert samples.standing == "possible"
    assert samples.before != samples.after


def test_batches_that_may_follow_from_a_recorded_difference_are_told_after_it(project):
    before = watch(project, (1.0, 2.0))
    found = project.explain(before, watch(project, (1.0, 3.0), level=0.2, augment="none"))
    assert [cause.place for cause in found.causes] == ["augment", "samples of train"]


def test_samples_that_differ_as_their_file_does_are_told_with_it(project):
    before = watch(project, (1.0, 2.0))
    found = project.explain(before, watch(project, (1.0, 3.0), level=0.2, file=2.0))
    (cause,) = [each for each in (*found.causes, *found.differences) if each.kind == "data"]
    assert cause.place == "train"
    assert cause.repeats == ("samples of train",)


def test_a_check_that_cannot_be_run_is_not_suggested(project):
    """These runs have no command line that sets the rate, and no sources of a script."""
    seeds = range(4)
    before = [project.run({"lr": 0.1}, seed=seed, level=0.9) for seed in seeds]
    after = [project.run({"lr": 0.9}, seed=seed, level=0.5) for seed in seeds]
    found = project.explain(before, after)
    assert [cause.place for cause in found.causes] == ["lr"]
    assert found.checks == ()
    assert "--check" not in str(found)


def test_a_run_is_held_against_a_good_one_that_has_another_name_in_its_configuration(project):
    seeds = [project.run({**BASE, "name": f"base-{seed}"}, seed=seed) for seed in range(3)]
    worse = project.run({**BASE, "name": "late"}, level=0.5, seed=1)
    assert project.explain(worse, None).before.run_id == seeds[1]


def test_printed_it_is_the_whole_answer(project):
    seeds = [project.run(BASE, seed=seed) for seed in range(5)]
    worse = project.run({**BASE, "augment": "none"}, level=0.8, seed=0)
    said = str(project.explain(seeds[0], worse))
    assert re.match(r"val/acc  0\.(9|89)\d* -> 0\.[78]\d*  worse", said)
    assert 'augment  "strong" -> "none"' in said
    assert "Ruled out" in said
