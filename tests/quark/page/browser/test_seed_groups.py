"""Groups of five seeds, as they are and shifted, in the page's data and in a browser."""

import math

import numpy as np
import pytest
from browser_runs import log_run
from page_client import wait_for_verdict

import quark

pytestmark = pytest.mark.long

GROUP = 5
NOT_TOLD, EQUIVALENT = "inconclusive", "equivalent"
# Metric -> its value before anything is learned, in the end, and what seeds differ by there.
METRICS = {
    "train/loss": (2.3, 0.3, 0.02),
    "val/loss": (2.3, 0.5, 0.03),
    "val/accuracy": (0.1, 0.9, 0.01),
}
STEPS = range(0, 200, 5)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """Ids of three groups: two of one configuration, and the second once more, but worse."""
    curves = [make_curves(seed) for seed in range(2 * GROUP)]
    shifted = [make_curves(seed, shift=3.0) for seed in range(GROUP, 2 * GROUP)]
    root = tmp_path_factory.mktemp("campaign")
    ids = []
    for group, runs in (("one", curves[:GROUP]), ("two", curves[GROUP:]), ("shifted", shifted)):
        ids.append([f"{group}-{place}" for place in range(GROUP)])
        first = 0 if group == "one" else GROUP
        for place, (run_id, run) in enumerate(zip(ids[-1], runs, strict=True)):
            config = {"group": group, "seed": first + place}
            log_run(root, run_id, config=config, analyzes=False, more=lambda session, run=run: (
                log_curves(session, run)))  # fmt: skip
    return root, ids


def make_curves(seed, *, shift=0.0):
    """What one seed logs; a shift is for the worse, in deviations between seeds."""
    draw = np.random.default_rng(seed)
    curves = {}
    for key, (first, last, deviation) in METRICS.items():
        worse = math.copysign(shift, first - last)
        end = last + deviation * (draw.normal() + worse)
        curves[key] = [
            end + (first - end) * math.exp(-step / 40) + draw.normal(0, deviation / 10)
            for step in STEPS
        ]
    return curves


def log_curves(session, curves):
    with quark.MetricsLogger(session) as metrics:
        for key, values in curves.items():
            for step, value in zip(STEPS, values, strict=True):
                metrics.log(key, value, step=step)


def ask(client, judged, baseline):
    said = wait_for_verdict(client, side=[",".join(judged), ",".join(baseline)])
    assert said["state"] == "computed"
    return {diff["metric_key"]: diff for diff in said["result"]["metric_diffs"]}


def test_the_page_tells_a_shift_from_the_noise_of_seeds(campaign, look):
    root, (one, two, shifted) = campaign
    client = look(root)
    same = ask(client, two, one)
    assert set(same) == set(METRICS)
    assert {diff["verdict"] for diff in same.values()} <= {"inconclusive", "equivalent"}
    for diff in same.values():
        assert diff["interval_low"] < 0 < diff["interval_high"]
    other = ask(client, shifted, one)
    assert other["val/loss"]["verdict"] == "worse"
    assert not any(diff["verdict"] == "better" for diff in other.values())
    # The interval is that of the comparison itself, to the last digit.
    sides = [[quark.open_run(run, storage_dir=root) for run in side] for side in (shifted, one)]
    engine = quark.ComparisonEngine.compare_runs(*sides).to_dict()["metric_diffs"]
    for diff in engine:
        shown = other[diff["metric_key"]]
        for name in ("verdict", "difference", "interval_low", "interval_high", "p_value", "method"):
            assert shown.get(name) == diff.get(name)


def read_verdicts(visitor):
    """Metric -> the cells of its row."""
    rows = visitor.wait(
        "document.querySelectorAll('.verdicts tbody tr').length >= 3 && [...document"
        ".querySelectorAll('.verdicts tbody tr')].map(row => [...row.children].map("
        "cell => cell.innerText))"
    )
    return {row[0]: row[1:] for row in rows}


def test_a_browser_shows_no_difference_and_then_the_interval(visit, serve_shared, campaign, look):
    root, (one, two, shifted) = campaign
    runs = "&".join(f"run={run_id}" for run_id in (*one, *two, *shifted))
    visitor = visit(serve_shared(root), f"compare?{runs}&group=group&other=1")
    visitor.wait("document.querySelector('#verdict-title')?.innerText === 'group=two against "
                 "group=one'")  # fmt: skip
    same = read_verdicts(visitor)
    assert set(same) == set(METRICS)
    assert {cells[0].partition(" ")[2] for cells in same.values()} <= {NOT_TOLD, EQUIVALENT}
    assert visitor.evaluate("document.querySelector('.verdict-better, .verdict-worse')") is None
    visitor.page.get_by_label("Judge group=shifted").check()
    visitor.wait("document.querySelector('tr.headline .verdict-worse')")
    cells = read_verdicts(visitor)["val/loss"]
    low, high = map(float, cells[1].partition("[")[2].rstrip("]").split(", "))
    own = ask(look(root), shifted, one)["val/loss"]
    assert math.isclose(low, own["interval_low"], rel_tol=1e-3)
    assert math.isclose(high, own["interval_high"], rel_tol=1e-3)
    assert 0 < low < high
