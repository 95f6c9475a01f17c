"""Sides that are odd: the same run twice, one that goes on, no metric in common, other projects."""

import math

import pytest
from known_project import Project

import quark
from quark.analysis.explanation.results import tell

BASE = {"lr": 0.1, "augment": "strong"}


def test_a_run_against_itself_is_no_change(project):
    one = project.run(BASE)
    found = project.explain(one, one)
    assert found.verdict == "no_difference"
    assert (found.causes, found.differences) == ((), ())
    assert "Both sides are the same runs." in found.notes


def test_sides_without_a_metric_in_common_cannot_be_told(project, tmp_path):
    one = project.run(BASE)
    with quark.start_run(project="vision", storage_dir=project.root, config=BASE) as session:
        quark.MetricsLogger(session).log("other/loss", 1.0, step=0)
    found = project.explain(one, session.run_id)
    assert found.verdict == "cannot_tell"
    assert found.first_difference.manner == "unknown"
    assert tell(found)


def test_a_metric_that_no_run_has_is_named(project):
    one = project.run(BASE)
    with pytest.raises(quark.SchemaValidationError, match=r"absent.*val/acc"):
        project.explain(one, one, metric="absent")


def test_a_run_that_ends_in_nan_is_worse_and_the_difference_is_named(project):
    seeds = [project.run(BASE, seed=seed) for seed in range(3)]
    broken = project.run({**BASE, "lr": 100.0}, level=math.nan)
    found = project.explain(seeds[0], broken)
    assert found.verdict == "worse"
    assert [cause.place for cause in found.causes] == ["lr"]
    tell(found)


def test_a_run_that_goes_on_is_told_as_it_is_now(project):
    one = project.run(BASE)
    session = quark.start_run(project="vision", storage_dir=project.root, config=BASE)
    quark.MetricsLogger(session).log("val/acc", 0.1, step=0)
    found = project.explain(one, session)
    assert any("Still running" in note for note in found.notes)
    session.end_run()


def test_runs_of_two_projects_are_explained_and_said_to_be(project):
    other = Project(project.root, "audio")
    found = project.explain(project.run(BASE), other.run({**BASE, "lr": 0.2}, level=0.2))
    assert any("audio, vision" in note for note in found.notes)
    assert [cause.place for cause in found.causes] == ["lr"]


@pytest.mark.long
def test_groups_of_seeds_are_compared_and_their_seeds_are_no_difference(project):
    before = [project.run(BASE, seed=seed) for seed in range(4)]
    after = [project.run({**BASE, "augment": "none"}, level=0.8, seed=s) for s in range(4, 8)]
    found = project.explain(before, after)
    assert found.verdict == "worse"
    assert [(cause.kind, cause.place) for cause in found.causes] == [("config", "augment")]
    assert found.before.run_count == 4


def test_one_run_is_held_against_the_last_good_run_of_its_configuration(project):
    good = [project.run(BASE, seed=seed) for seed in range(4)]
    project.run(BASE, level=0.5, noise=0.0, seed=5)
    project.run(BASE, seed=6, status="failed")
    bad = project.run(BASE, level=0.2, seed=3)
    found = project.explain(bad, None)
    assert found.before.run_id in good
    assert found.after.run_id == bad


def test_where_there_is_no_good_run_it_says_what_to_do(project):
    lone = project.run(BASE)
    with pytest.raises(
        quark.RunNotFoundError, match=rf"no other run in the store {project.root} .*quark why OTHER"
    ):
        project.explain(lone, None)
    with pytest.raises(quark.RunNotFoundError, match="no config"):
        project.explain(project.run(None), None)


def test_a_key_that_no_run_has_read_is_ruled_out(project):
    def run(lr, unread, level, seed):
        config = quark.tracked({"lr": lr, "unread": unread, "seed": seed})
        with quark.start_run(project="t", storage_dir=project.root, config=config) as session:
            metrics = quark.MetricsLogger(session)
            for step in range(20):
                metrics.log("val/acc", level + 0.001 * config.seed + 0 * config.lr, step=step)
        return session.run_id

    seeds = [run(0.1, 1, 0.9, seed) for seed in range(4)]
    found = project.explain(seeds[0], run(0.2, 2, 0.5, 0))
    assert [(cause.place, cause.standing) for cause in found.causes] == [("lr", "probable")]
    assert ("config", "unread") in {(each.kind, each.place) for each in found.ruled_out}


def test_pairs_of_other_runs_decide_between_two_differences(project):
    runs = [project.run(BASE, seed=seed) for seed in range(4)]
    for seed in range(10, 13):
        project.run({**BASE, "augment": "none"}, level=0.8, seed=seed)
        project.run({**BASE, "lr": 0.2}, seed=seed)
    both = project.run({"lr": 0.2, "augment": "none"}, level=0.8, seed=0)
    found = project.explain(runs[0], both)
    assert [(c.place, c.standing) for c in found.causes] == [
        ("augment", "probable"),
        ("lr", "unlikely"),
    ]
    effect = found.causes[0].effect
    assert effect.source == "pairs"
    assert effect.low < -0.1 < effect.high < 0
    assert {piece.kind for piece in found.causes[0].evidence} >= {"pairs"}
    assert found.to_dict()["causes"][0]["place"] == "augment"


@pytest.mark.parametrize("seed", [0, 9])
def test_a_change_that_nothing_recorded_explains_is_one_and_says_what_is_never_recorded(
    project, seed
):
    seeds = [project.run(BASE, seed=number) for number in range(6)]
    found = project.explain(seeds[0], project.run(BASE, level=0.6, seed=seed))
    assert found.verdict == "worse"
    assert [cause.place for cause in found.causes if cause.standing != "unlikely"] == []
    assert "environment variables" in {remark.place for remark in found.unknown}


def test_what_has_a_cause_needs_no_list_of_what_is_never_recorded(project):
    seeds = [project.run(BASE, seed=number) for number in range(6)]
    found = project.explain(seeds[0], project.run({**BASE, "lr": 3.0}, level=0.6))
    assert found.causes[0].standing == "probable"
    assert "environment variables" not in {remark.place for remark in found.unknown}


@pytest.mark.long
def test_what_always_changed_together_is_named_together_with_values_that_no_run_had(project):
    sizes = {(24, 2): 0.9, (12, 1): 0.87, (48, 3): 0.91}
    runs = [
        project.run(
            {"width": width, "depth": depth, "report": 5 + 5 * (seed % 2)}, level=level, seed=seed
        )
        for (width, depth), level in sizes.items()
        for seed in range(7)
    ]
    narrow = project.run({"width": 3, "depth": 1, "report": 10}, level=0.5)
    causes = {cause.place: cause for cause in project.explain(runs[0], narrow).causes}
    assert list(causes)[:2] == ["depth", "width"] or list(causes)[:2] == ["width", "depth"]
    assert causes["width"].together == ("depth",)
    assert causes["depth"].together == ("width",)
