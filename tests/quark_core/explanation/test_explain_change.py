"""explain_change, over real runs: is there a change, what differs, and who did it."""

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
