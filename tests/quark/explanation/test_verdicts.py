"""`why` says what `compare` says, by the same figures, and counts what both sides have."""

import re

import pytest

import quark
from quark.analysis.explanation.results import describe_change

SAME = {
    "better": "better",
    "worse": "worse",
    "equivalent": "no_difference",
    "inconclusive": "cannot_tell",
}


def make_side(project, name, seeds, level, **options):
    return [project.run({"method": name}, level=level, seed=seed, **options) for seed in seeds]


def compare(project, before, after):
    sides = [[quark.open_run(run, project.root) for run in side] for side in (after, before)]
    return quark.ComparisonEngine.compare_runs(*sides).find_metric("val/acc")


@pytest.mark.parametrize(
    ("level", "noise", "steps"),
    [(0.8, 0.003, 30), (0.99, 0.003, 45), (0.9005, 0.003, 30), (0.9, 0.05, 38)],
)
@pytest.mark.long
def test_groups_have_the_verdict_and_the_figures_of_the_comparison(project, level, noise, steps):
    before = make_side(project, "plain", range(5), 0.9, noise=noise)
    after = make_side(project, "new", range(10, 15), level, noise=noise, steps=steps)
    diff = compare(project, before, after)
    found = project.explain(before, after)
    assert found.verdict == SAME[diff.verdict]
    assert found.metric.to_dict() == diff.to_dict()
    said = describe_change(found).split()
    lasts = [float(said[1]), float(said[3])]
    assert said[2] == "->"
    assert lasts == pytest.approx([diff.last.reference, diff.last.primary], rel=2e-3)
    # So many digits that the difference can be read off.
    assert lasts[1] - lasts[0] == pytest.approx(diff.last.difference, rel=0.06)
    # What chance does as well is nobody's fault.
    assert bool(found.causes) == (diff.verdict in ("better", "worse"))


@pytest.mark.long
def test_no_change_needs_the_power_to_see_one(project):
    before = make_side(project, "plain", range(5), 0.9, noise=0.05)
    after = make_side(project, "new", range(10, 15), 0.9, noise=0.05)
    found = project.explain(before, after)
    assert "inconclusive" in describe_change(found)
    told = re.match(r"inconclusive with 5 runs; (\d+|more than \d+) would decide", found.reason)
    assert told, found.reason
    assert found.causes == ()
    calm = [make_side(project, name, range(5), 0.9, noise=1e-4) for name in ("a", "b")]
    assert "no change beyond seed noise" in describe_change(project.explain(*calm))


@pytest.mark.long
def test_a_shorter_schedule_is_taken_by_its_own_end_and_only_common_points_are_counted(project):
    long, short = (project.run({"method": "plain"}, steps=steps) for steps in (228, 38))
    found = project.explain(long, short)
    assert found.first_difference.manner == "identical"
    assert found.first_difference.summary.startswith("all 38 common points")
    assert found.notes[0] == f"{long} ends at step 227, {short} at step 37: " \
        "each run is compared at its own end."  # fmt: skip
    back = project.explain(short, long)
    assert back.first_difference.equal_points == 38


@pytest.mark.long
def test_points_that_one_run_alone_logged_are_not_counted_before_the_parting(project):
    def log(every, wrong_from):
        with (
            quark.start_run(project="vision", storage_dir=project.root) as session,
            quark.MetricsLogger(session) as metrics,
        ):
            for step in range(0, 100, every):
                metrics.log("val/acc", step / 100 + (step >= wrong_from), step=step)
        return session.run_id

    found = project.explain(log(1, 1000), log(10, 50)).first_difference
    assert (found.manner, found.step, found.equal_points) == ("later", 50, 5)
