"""`quark compare` says what changed, what differs, and whether that means anything."""

import math
import os
import re

import pytest
from calls import read_json, squeeze
from diagnosed_runs import overfit, succeed

import quark

SECTIONS = ["Changes", "Metrics", "Health", "Alerts", "Phases", "Notes"]


@pytest.fixture
def store(tmp_path, log_run):
    """Two runs that differ by far."""
    common = {"data": {"noise": 0.1}, "seed": 0}
    log_run(tmp_path, "good-1", values=succeed(), name="good", config={"lr": 0.05, **common})
    config = {"lr": 0.5, "warmup": 10, **common}
    log_run(tmp_path, "over-1", values=overfit(), name="overfit", config=config)
    return tmp_path


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Three seeds of a configuration, and three of a much worse one."""
    root = tmp_path_factory.mktemp("groups")
    for name, end in (("a", 0.6), ("b", 0.2)):
        for seed in (1, 2, 3):
            os.environ["QUARK_RUN_ID"] = f"{name}{seed}"
            config = {"end": end, "seed": seed}
            with quark.start_run(project="vision", storage_dir=root, config=config) as session:
                metrics = quark.MetricsLogger(session)
                for key, points in succeed(seed, end=end + 0.01 * seed).items():
                    for step, value in enumerate(points):
                        metrics.log(key, value, step=step)
            del os.environ["QUARK_RUN_ID"]
    return root


def compare_json(invoke, *arguments):
    return read_json(invoke("compare", *arguments, "--json"))


def find_block(text, key):
    """The lines of one metric."""
    lines = text.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith(f"  {key} "))
    end = next(
        (i for i in range(at + 1, len(lines)) if not lines[i].startswith("    ")), len(lines)
    )
    return lines[at:end]


@pytest.mark.long
def test_what_changed_comes_first(invoke, store):
    text = invoke("compare", "good", "over", "-d", store).stdout
    places = [text.index(f"\n{name}") for name in SECTIONS]
    assert places == sorted(places)
    head = text.splitlines()[:2]
    assert re.match(r"old +vision good-1  good ", head[0])
    assert re.match(r"new +vision over-1  overfit  completed  to step 239  seed 0", head[1])
    assert re.search(r"^ +lr +0\.05 +0\.5$", text, re.M)
    assert re.search(r"^ +warmup +- +10$", text, re.M)
    assert "data.noise" not in text


@pytest.mark.long
def test_a_metric_has_its_figures_and_its_verdict(invoke, store):
    found = {
        diff["metric_key"]: diff
        for diff in compare_json(invoke, "good", "over", "-d", store)["metric_diffs"]
    }
    text = invoke("compare", "good", "over", "-d", store).stdout
    assert re.search(r"^Metrics +last +best +tail median +AUC$", text, re.M)
    for key, diff in found.items():
        head, reference, primary, *reason = find_block(text, key)
        verdict = diff["verdict"]
        assert (verdict.upper() if verdict in ("better", "worse") else verdict) in head.split()
        assert f"{diff['last']['difference']:+.3g}" in head
        for side, line in (("primary", primary), ("reference", reference)):
            names = ("last", "best", "tail_median", "area")
            figures = [float(word) for word in line.replace("↓", "").split()[1:]]
            expected = [diff[name][side] for name in names]
            assert figures == pytest.approx(expected, rel=1e-4)
        assert squeeze(" ".join(reason)) == squeeze(diff["reason"])
    verdicts = {key: diff["verdict"] for key, diff in found.items()}
    # One run a side, however far the two are apart.
    assert verdicts == {"val/loss": "inconclusive", "train/loss": "inconclusive"}


@pytest.mark.long
def test_groups_of_seeds_get_an_interval_and_an_effect(invoke, groups):
    sides = ["b1,b2,b3", "a1,a2, a3"]
    (headline, *_) = compare_json(invoke, *sides, "-d", groups)["metric_diffs"]
    assert (headline["headline"], headline["verdict"]) == (True, "worse")
    text = invoke("compare", *sides, "-d", groups, columns=100).stdout
    head = squeeze(find_block(text, headline["metric_key"])[0])
    low, high = headline["interval_low"], headline["interval_high"]
    assert f"(95 % interval {low:.3g} to {high:.3g})" in head
    assert f"effect {headline['effect_size']:.3g}" in head
    for run_id in ("a1", "a2", "a3", "b1", "b2", "b3"):
        assert re.search(rf"vision {run_id} .* seed {run_id[1]}$", text, re.M)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("sides", "status"),
    [(["b1,b2,b3", "a1,a2,a3"], 3), (["a1,a2,a3", "b1,b2,b3"], 0), (["a1", "a1"], 0)],
)
def test_the_exit_status_says_whether_a_metric_is_worse(invoke, groups, sides, status):
    assert invoke("compare", *sides, "-d", groups).exit_code == 0
    for extra in ([], ["--json"]):
        result = invoke("compare", *sides, "-d", groups, "--fail-on-worse", *extra)
        assert result.exit_code == status


@pytest.mark.long
def test_time_to_target_is_told_for_both_sides(invoke, groups):
    arguments = ["b1", "a1", "-d", groups, "--target", "val/loss", "at_most", "0.4"]
    (found,) = [
        diff["time_to_target"]
        for diff in compare_json(invoke, *arguments)["metric_diffs"]
        if diff["time_to_target"] is not None
    ]
    text = invoke("compare", *arguments).stdout
    part = squeeze(text[text.index("Steps to a target") :])
    assert "val/loss at most 0.4" in part
    assert f"new {found['primary']['summary']}" in part
    assert "new not reached by step 239" in part
    assert f"old reached at step {found['reference']['step']:g}" in part


@pytest.mark.long
def test_alerts_are_gained_lost_or_common(invoke, store, log_run):
    text = invoke("compare", "good", "over", "-d", store).stdout
    assert re.search(r"^  only new  [A-Z]+ +Overfitting sets in at val/loss, step \d+", text, re.M)
    assert re.search(r"^Health  overall \d+ -> \d+, generalization \d+ -> \d+", text, re.M)
    text = invoke("compare", "over", "good", "-d", store).stdout
    assert re.search(r"^  only old +[A-Z]+ +Overfitting sets in", text, re.M)
    log_run(store, "over-2", values=overfit(seed=1))
    text = invoke("compare", "over-1", "over-2", "-d", store).stdout
    assert re.search(r"^  both  [A-Z]+ +Overfitting sets in", text, re.M)
    log_run(store, "good-2", values=succeed(seed=1))
    assert "No alerts on either side." in invoke("compare", "good-2", "good-1", "-d", store).stdout


@pytest.mark.long
def test_phases_are_a_bar_a_side(invoke, store):
    diffs = compare_json(invoke, "good", "over", "-d", store)["phase_diffs"]
    lines = invoke("compare", "good", "over", "-d", store, columns=80).stdout.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("Phases"))
    sides = {"old": "reference", "new": "primary"}
    for line, (label, side) in zip(lines[at + 1 : at + 3], sides.items(), strict=True):
        assert line.split()[0] == label
        expected = {
            str(number) for number, d in enumerate(diffs, 1) if d[f"{side}_start"] is not None
        }
        assert {mark for mark in line if mark.isdigit()} == expected
    for number, diff in enumerate(diffs, start=1):
        row = squeeze(lines[at + 3 + number])
        assert row.startswith(f"{number} {diff['display_name']} ")
        if diff["primary_start"] is not None:
            assert f"{diff['primary_start']:g} to {diff['primary_end']:g}" in row


@pytest.mark.long
def test_layers_that_differ_most_are_listed(invoke, tmp_path):
    torch = pytest.importorskip("torch")
    for scale in (1.0, 50.0):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)]
        if scale > 1.0:
            layers.append(torch.nn.Tanh())
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        with (
            quark.start_run(project="vision", storage_dir=tmp_path, name=f"x{scale:g}") as session,
            quark.watch(session, model, optimizer, every_n_steps=1, telemetry=False) as watch,
        ):
            for step in range(20):
                watch.step(step)
                optimizer.zero_grad()
                (model(scale * torch.randn(16, 4)) ** 2).mean().backward()
                optimizer.step()
    text = invoke("compare", "x1", "x50", "-d", tmp_path).stdout
    part = text[text.index("Layers that differ most") :]
    assert re.search(r"^  0 \(activation\) +\w+ [\d.]+ times larger", part, re.M)
    assert re.search(r"^  only new +2 \(activation\)", part, re.M)
    factors = [float(number) for number in re.findall(r"\)  +[a-z ]+ ([\d.e+]+) times", part)]
    assert factors
    assert factors == sorted(factors, reverse=True)


@pytest.mark.long
def test_what_to_know_is_told(invoke, groups):
    sides = ["b1,b2,b3", "a1,a2,a3"]
    text = invoke("compare", *sides, "-d", groups, columns=80).stdout
    part = squeeze(text[text.index("\nNotes") :])
    notes = compare_json(invoke, *sides, "-d", groups)["notes"]
    assert notes
    for note in notes:
        assert f"- {squeeze(note)}" in part


@pytest.mark.long
def test_json_is_one_document_and_nothing_else(quark_command, store):
    done = quark_command("compare", "good", "over", "-d", store, "--baseline", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = read_json(done)
    assert found["mode"] == "baseline"
    assert (found["primary"]["run_id"], found["reference"]["run_id"]) == ("over-1", "good-1")
    assert {"schema_version", "generated_at", "changes", "metric_diffs", "notes"} < {*found}


@pytest.mark.long
def test_a_baseline_is_called_so(invoke, store):
    text = invoke("compare", "good", "over", "-d", store, "--baseline").stdout
    assert re.search(r"^baseline +vision good-1", text, re.M)


@pytest.mark.long
def test_nothing_is_stored(invoke, store):
    invoke("compare", "good", "over", "-d", store)
    for run_id in ("over-1", "good-1"):
        engine = quark.AnalyzerEngine(quark.open_run(run_id, store))
        assert engine.read_health_scores() == ()


@pytest.mark.sampled
@pytest.mark.parametrize("sides", [("good", "good"), ("good-1,over-1", "over-1,good-1")])
def test_the_same_runs_on_both_sides_are_equivalent(invoke, store, sides):
    result = invoke("compare", *sides, "-d", store, "--fail-on-worse")
    assert result.exit_code == 0
    assert "Both sides are the same runs." in result.stdout
    assert {d["verdict"] for d in compare_json(invoke, *sides, "-d", store)["metric_diffs"]} == {
        "equivalent"
    }


@pytest.mark.sampled
@pytest.mark.parametrize("values", [{}, {"other": [1.0, 2.0]}, {"val/loss": [math.nan] * 9}])
def test_a_run_with_next_to_nothing_is_compared(invoke, store, log_run, values):
    log_run(store, "bare", values=values)
    for sides in (("bare", "good"), ("good", "bare"), ("bare", "bare")):
        result = invoke("compare", *sides, "-d", store, columns=80)
        assert result.exit_code == 0
    if not values:
        assert "Neither side has metrics." in result.stdout
        text = invoke("compare", "good", "bare", "-d", store).stdout
        assert "only old" in text


@pytest.mark.long
def test_a_run_that_goes_on_is_compared_from_outside(quark_command, store, start):
    with start(store, "live") as session:
        metrics = quark.MetricsLogger(session)
        for step, value in enumerate(overfit()["val/loss"]):
            metrics.log("val/loss", value, step=step)
        session.flush("stored")
        done = quark_command("compare", "good", "live", "-d", store)
        assert (done.returncode, done.stderr) == (0, "")
        assert re.search(r"^new +vision live  running", done.stdout, re.M)


def test_it_says_where_code_and_data_are_compared(invoke, store):
    result = invoke("compare", "good-1", "over-1", "-d", store)
    assert result.stdout.splitlines()[-1].endswith("quark why good-1 over-1")
