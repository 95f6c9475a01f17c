"""explain_change, over real runs: is there a change, what differs, and who did it."""

import numpy as np

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


def watch(project, samples, *, seed=0, level=0.9, file=1.0):
    """A run whose data have two fingerprints of one key: the file's, and that of what came."""
    values = {"lr": 0.1, "seed": seed}
    with quark.start_run(project=project.name, storage_dir=project.root, config=values) as session:
        session.fingerprint_data("train", np.arange(10.0) * file).wait(30)
        for _ in quark.watch_data([np.full((4, 2), sample) for sample in samples]):
            pass
        metrics = quark.MetricsLogger(session)
        for step in range(10):
            metrics.log("val/acc", level * (1 - 0.5 ** (step + 1)), step=step)
    return session.run_id


def test_samples_that_differ_are_told_by_what_came_and_not_by_the_file(project):
    found = project.explain(watch(project, (1.0, 2.0)), watch(project, (1.0, 3.0), level=0.2))
    data = [cause for cause in (*found.causes, *found.differences) if cause.kind == "data"]
    assert [cause.place for cause in data] == ["samples of train"]
    assert data[0].before != data[0].after
    assert ("data", "train") in {(remark.kind, remark.place) for remark in found.ruled_out}


def test_samples_that_differ_as_their_file_does_are_told_with_it(project):
    before = watch(project, (1.0, 2.0))
    found = project.explain(before, watch(project, (1.0, 3.0), level=0.2, file=2.0))
    (cause,) = [each for each in (*found.causes, *found.differences) if each.kind == "data"]
    assert cause.place == "train"
    assert cause.repeats == ("samples of train",)
    order = project.explain(before, watch(project, (2.0, 1.0), level=0.2))
    assert "data      samples of train  in another order" in str(order)


def test_several_runs_a_side_are_checked_by_one_of_each(project):
    seeds = range(4)
    before = [project.run({"lr": 0.1}, seed=seed, level=0.9) for seed in seeds]
    after = [project.run({"lr": 0.9}, seed=seed, level=0.5) for seed in seeds]
    (check,) = project.explain(before, after).checks
    assert check.command == f"quark why {before[0]} {after[0]} --check 3"


def test_a_run_is_held_against_a_good_one_that_has_another_name_in_its_configuration(project):
    seeds = [project.run({**BASE, "name": f"base-{seed}"}, seed=seed) for seed in range(3)]
    worse = project.run({**BASE, "name": "late"}, level=0.5, seed=1)
    assert project.explain(worse, None).before.run_id == seeds[1]


def test_printed_it_is_the_whole_answer(project):
    seeds = [project.run(BASE, seed=seed) for seed in range(5)]
    worse = project.run({**BASE, "augment": "none"}, level=0.8, seed=0)
    said = str(project.explain(seeds[0], worse))
    assert said.startswith("val/acc  0.9")
    assert 'augment  "strong" -> "none"' in said
    assert "Ruled out" in said
