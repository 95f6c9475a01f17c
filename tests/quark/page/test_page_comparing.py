"""What the page's server says of sides: groups, what differs, curves of groups, verdicts."""

import math
import random
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_client import DEADLINE_S, wait_for_answer, wait_for_verdict

import quark
from quark.page.routes.curves import RunCurve, merge_runs


def log_seeds(root, name, rate, *, seeds, shift=0.0, steps=60):
    """Runs of one configuration whose losses end at about `0.3 + shift`."""
    found = []
    for seed in range(seeds):
        chance = random.Random(f"{name} {seed}")
        session = quark.start_run(
            project="p", name=f"{name} s{seed}", storage_dir=root,
            config={"lr": rate, "seed": seed, "model": {"width": 8}},
        )  # fmt: skip
        end = 0.3 + shift + chance.gauss(0, 0.01)
        with session, quark.MetricsLogger(session) as metrics:
            for step in range(steps):
                noise = chance.gauss(0, 0.002)
                metrics.log("val/loss", end + 2 * 0.9**step + noise, step=step)
            metrics.log("train/only", rate, step=0)
        found.append(session.run_id)
    return found


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Two configurations of three seeds; the second ends 0.5 higher."""
    root = tmp_path_factory.mktemp("seeds")
    return (
        root,
        log_seeds(root, "low", 0.1, seeds=3),
        log_seeds(root, "high", 1.0, seeds=3, shift=0.5),
    )


@pytest.fixture
def client(seeds, look):
    return look(seeds[0])


def read_curves(client, **parameters):
    """Side -> its curve; with members a list for each side."""
    head, columns = client.pack("/api/compare/curves", **parameters)
    found = []
    for place, said in enumerate(head["curves"]):
        its = {k.partition(".")[2]: v for k, v in columns.items() if k.startswith(f"{place}.")}
        found.append({**said, **its})
    return found


def test_runs_are_grouped_by_any_setting_or_by_all_but_their_seeds(client, seeds):
    _, low, high = seeds
    runs = [*low, *high]
    by_rate = client.json("/api/compare", run=runs, group="lr")
    assert [side["runs"] for side in by_rate["sides"]] == [low, high]
    assert [side["name"] for side in by_rate["sides"]] == ["lr=0.1", "lr=1.0"]
    by_all = client.json("/api/compare", run=runs, group="seed")
    assert [side["runs"] for side in by_all["sides"]] == [low, high]
    by_both = client.json("/api/compare", run=runs, group=["lr", "seed"])
    assert [side["runs"] for side in by_both["sides"]] == [low, high]
    single = client.json("/api/compare", run=runs)
    assert [side["runs"] for side in single["sides"]] == [[run] for run in runs]
    assert single["group_keys"] == ["lr", "seed"]
    unknown = client.json("/api/compare", run=runs, group="nothing")
    assert [side["runs"] for side in unknown["sides"]] == [runs]
    assert unknown["sides"][0]["name"] == "nothing=none"


def test_what_differs_is_told_and_what_is_equal_is_counted(client, seeds):
    _, low, high = seeds
    said = client.json("/api/compare", side=[",".join(low), ",".join(high)])
    differs = {each["path"]: each for each in said["differs"] if each["section"] == "config"}
    assert list(differs) == ["lr"]
    assert differs["lr"]["values"] == [[0.1], [1.0]]
    assert {"section": "config", "path": "model.width", "value": 8} in said["equal"]
    assert said["equal_count"] >= len(said["equal"]) > 5
    # The runs of one side differ in their seeds, and so do the seeds of two single runs.
    alone = client.json("/api/compare", side=low[:2])
    assert [each["path"] for each in alone["differs"] if each["section"] == "config"] == ["seed"]
    assert alone["differs"][0]["is_seed"]
    # No sources are kept in this process: only the commit of a clean checkout says what ran.
    agree = "No recorded setting changed: configuration"
    if alone["code_notes"]:
        assert alone["agreement"].startswith(f"{agree} and environment agree. Not compared: code.")
        assert "The code was not compared" in alone["code_notes"][0]
    else:
        assert alone["agreement"].startswith(f"{agree}, code and environment agree.")


def test_metrics_of_all_sides_come_first_with_the_mean_of_their_last_values(client, seeds):
    _, low, high = seeds
    said = client.json("/api/compare", side=[",".join(low), high[0]])
    assert said["main"] == "val/loss"
    loss = next(row for row in said["metrics"] if row["key"] == "val/loss")
    assert loss["count"] == [3, 1]
    lasts = [said["runs"][run]["main"]["last"] for run in low]
    assert loss["last"][0] == pytest.approx(sum(lasts) / 3)


def test_a_group_is_the_mean_and_the_range_of_its_runs(client, seeds):
    _, low, high = seeds
    found = read_curves(client, side=[",".join(low), ",".join(high)], key="val/loss", members=1)
    group = found[0]
    members = [curve for curve in found if curve["side"] == 0 and "run" in curve]
    assert [curve["run"] for curve in members] == low
    values = np.stack([curve["mean"] for curve in members])
    np.testing.assert_allclose(group["mean"], values.mean(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(group["low"], values.min(axis=0))
    np.testing.assert_array_equal(group["high"], values.max(axis=0))
    assert set(group["count"].tolist()) == {3}
    assert (group["runs"], group["points"], group["exact"]) == (3, 180, True)


def test_adding_or_leaving_out_a_side_changes_no_other(client, seeds):
    _, low, high = seeds
    one = ",".join(low)
    alone = read_curves(client, side=one, key="val/loss")[0]
    for others in ([",".join(high)], high, [high[0], ",".join(high[1:])]):
        beside = read_curves(client, side=[*others, one], key="val/loss")[-1]
        for column in ("step", "mean", "low", "high", "count"):
            np.testing.assert_array_equal(alone[column], beside[column])


def test_a_group_of_one_is_the_run_itself(client, seeds):
    run_id = seeds[1][0]
    _, own = client.curves(run_id, "val/loss")
    alone = read_curves(client, side=run_id, key="val/loss")[0]
    np.testing.assert_array_equal(alone["mean"], own["val/loss"][0]["mean"])
    np.testing.assert_array_equal(alone["step"], own["val/loss"][0]["step"])
    assert "count" not in alone


def test_a_window_and_another_axis_cut_each_run_by_itself(client, seeds):
    side = ",".join(seeds[1])
    cut = read_curves(client, side=side, key="val/loss", low=10, high=19)[0]
    assert cut["step"].tolist() == list(range(10, 20))
    timed = read_curves(client, side=side, key="val/loss", x="relative")[0]
    assert 0 <= timed["step"][0] < timed["step"][-1] < DEADLINE_S
    # Runs that took other times than one another are there only while each went on.
    assert set(timed["count"].tolist()) <= {1, 2, 3}
    assert timed["points"] == 180


def test_runs_without_a_common_metric_have_their_own_curves_and_a_verdict(tmp_path, look):
    ids = []
    for name in ("a", "b"):
        session = quark.start_run(project="p", storage_dir=tmp_path, name=name)
        with session, quark.MetricsLogger(session) as metrics:
            for step in range(5):
                metrics.log(f"train/{name}", step, step=step)
        ids.append(session.run_id)
    client = look(tmp_path)
    found = read_curves(client, side=ids, key=["train/a", "train/b"])
    assert [(curve["side"], curve["key"]) for curve in found] == [(0, "train/a"), (1, "train/b")]
    said = wait_for_verdict(client, side=ids)
    assert {diff["presence"] for diff in said["result"]["metric_diffs"]} == {
        "primary_only", "reference_only",
    }  # fmt: skip


def log_curve(root, name, points, **config):
    """A run with a loss at these places: dicts of step or epoch, and value."""
    session = quark.start_run(project="p", storage_dir=root, name=name, config=config)
    with session, quark.MetricsLogger(session) as metrics:
        for place, value in points:
            metrics.log("val/loss", value, **place)
    return session.run_id


def test_metrics_on_different_x_are_drawn_each_on_its_own(tmp_path, look):
    """Steps of other lengths, other steps, and epochs alone."""
    ids = [
        log_curve(tmp_path, "dense", [({"step": step}, 1 / (step + 1)) for step in range(100)]),
        log_curve(tmp_path, "sparse", [({"step": step}, 2.0) for step in range(5, 400, 50)]),
        log_curve(tmp_path, "epochs", [({"epoch": epoch}, 3.0) for epoch in range(4)]),
        log_curve(tmp_path, "one", [({"step": 7}, 4.0)]),
    ]
    client = look(tmp_path)
    found = read_curves(client, side=ids, key="val/loss")
    assert [curve["side"] for curve in found] == [0, 1, 2, 3]
    assert [curve["step"].tolist()[-1] for curve in found] == [99, 355, 3, 7]
    # As one group: where a run has no value it has none, and the count says so.
    (group,) = read_curves(client, side=",".join(ids[:2]), key="val/loss")
    places = dict(zip(group["step"].tolist(), group["count"].tolist(), strict=True))
    assert (places[0], places[5], places[99], places[355]) == (1, 2, 2, 1)
    by_epoch = read_curves(client, side=ids, key="val/loss", x="epoch")
    assert [curve["side"] for curve in by_epoch] == [2]
    for pair in (ids[:2], ids[1:3], ids[2:]):
        said = wait_for_verdict(client, side=pair)
        assert (said["state"], said["note"]) == ("computed", None)
        (diff,) = said["result"]["metric_diffs"]
        assert diff["presence"] == "both"
        # Whether anything is called or not, it is said why.
        assert diff["reason"]


def test_the_verdict_is_that_of_the_engine(client, seeds):
    root, low, high = seeds
    sides = [",".join(high), ",".join(low)]
    said = wait_for_verdict(client, side=sides, target="val/loss", direction="at_most", value="0.5")
    assert (said["state"], said["note"]) == ("computed", None)
    headline = said["result"]["metric_diffs"][0]
    assert (headline["metric_key"], headline["verdict"]) == ("val/loss", "worse")
    sessions = [[quark.open_run(run, storage_dir=root) for run in side] for side in (high, low)]
    own = quark.ComparisonEngine.compare_runs(*sessions).to_dict()["metric_diffs"][0]
    for name in ("interval_low", "interval_high", "p_value", "effect_size", "method", "reason"):
        assert headline[name] == own[name]
    target = headline["time_to_target"]
    assert (target["primary"]["reached_count"], target["reference"]["reached_count"]) == (0, 3)
    again = wait_for_verdict(
        client, side=sides, target="val/loss", direction="at_most", value="0.5"
    )
    assert again == said


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ({}, "side"),
        ({"side": "x", "run": "y"}, "side"),
        ({"side": ",".join(f"run{number}" for number in range(51))}, "at most 50"),
        ({"run": [f"run{number}" for number in range(51)]}, "run"),
    ],
)
def test_a_bad_side_is_refused_by_name(client, parameters, names):
    assert names in client.refused(400, "/api/compare", **parameters)


def test_what_the_page_asks_for_first_is_on_its_way(client):
    def find(query):
        text = client.get(f"/compare?{query}").text
        return text.partition('rel="preload" as="fetch" crossorigin="anonymous" href="')[2]

    asked = find("tab=curves&run=a&group=model.width&run=b.1&run=c")
    assert asked.startswith('./api/compare?run=a&amp;run=b.1&amp;run=c&amp;group=model.width"')
    assert find("side=a,b&side=c").startswith('./api/compare?side=a%2Cb&amp;side=c"')
    # What might be written in another way than the page writes it would be asked for twice.
    for query in ("", "tab=curves", "run=%22%3E%3Cscript%3E", "run=a&group=learning%20rate"):
        assert find(query) == ""


def test_curves_rest_on_what_was_read_of_the_runs_a_moment_ago(client, seeds, monkeypatch):
    moment = [1000.0]
    monkeypatch.setattr("quark.page.routes.page_source.time.monotonic", lambda: moment[0])
    low = seeds[1]
    client.json("/api/compare", run=low)
    reads = []
    summarize = client.source.summarize
    monkeypatch.setattr(
        client.source, "summarize", lambda run_id: (reads.append(run_id), summarize(run_id))[1]
    )
    first = read_curves(client, side=low, key="val/loss")
    assert reads == []
    moment[0] += 3
    again = read_curves(client, side=low, key="val/loss")
    assert reads == low
    np.testing.assert_array_equal(first[0]["mean"], again[0]["mean"])
    client.json("/api/compare", run=low)
    assert reads == low * 2


def test_ranks_and_attempts_are_nothing_that_curves_of_groups_ask_for(client, seeds):
    plain = read_curves(client, side=seeds[1], key="val/loss")
    asked = read_curves(client, side=seeds[1], key="val/loss", ranks="abc", attempts="zzz")
    np.testing.assert_array_equal(asked[0]["mean"], plain[0]["mean"])


def test_what_is_wrong_with_curves_and_verdicts_is_named(client, seeds):
    low = seeds[1]
    assert "no-such-run" in client.refused(404, "/api/compare", side=[low[0], "no-such-run"])
    assert "key" in client.refused(400, "/api/compare/curves", side=low[0])
    assert "low" in client.refused(400, "/api/compare/curves", side=low[0], key="a", low=3, high=2)
    assert "two sides" in client.refused(400, "/api/compare/verdict", side=low)
    for value in ("", "x"):
        refusal = client.refused(400, "/api/compare/verdict", side=low[:2], target="a", value=value)
        assert refusal.startswith("value must be a number")
    assert "direction" in client.refused(
        400, "/api/compare/verdict", side=low[:2], target="a", direction="up", value="1"
    )


def test_names_that_are_odd_stay_what_they_are(tmp_path, look):
    ids = []
    for name in ("__proto__", "<b>x</b>"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            session = quark.start_run(
                project="p", storage_dir=tmp_path, name=name, config={"__proto__": {name: 1}}
            )
            with session, quark.MetricsLogger(session) as metrics:
                metrics.log(f"{name}/loss", 1.0, step=0)
        ids.append(session.run_id)
    said = look(tmp_path).json("/api/compare", run=ids)
    assert [side["name"] for side in said["sides"]] == ["__proto__", "<b>x</b>"]
    assert {row["name"] for row in said["metrics"]} == {"__proto__/loss", "<b>x</b>/loss"}


def make_curve(points, *, bad=0):
    x = np.array([place for place, _ in points], dtype=float)
    mean = np.array([value for _, value in points], dtype=float)
    non_finite = np.zeros(len(x), dtype=np.int64)
    non_finite[:bad] = 1
    return RunCurve(
        x=x, mean=mean, low=mean, high=mean, non_finite=non_finite, points=len(x), exact=True
    )


def make_points():
    values = st.floats(-1e6, 1e6) | st.just(math.nan)
    places = st.lists(st.integers(0, 300), min_size=1, max_size=40, unique=True).map(sorted)
    return places.flatmap(
        lambda xs: st.lists(values, min_size=len(xs), max_size=len(xs)).map(
            lambda ys: list(zip(xs, ys, strict=True))
        )
    )


@given(st.lists(make_points(), min_size=2, max_size=6), st.integers(2, 60))
def test_a_group_lies_between_its_runs_wherever_they_are(listed, entries):
    runs = [make_curve(points, bad=len(points) // 3) for points in listed]
    group = merge_runs(runs, entries)
    assert (np.diff(group.x) > 0).all()
    assert group.non_finite.sum() == sum(run.non_finite.sum() for run in runs)
    for place, mean, low, high, count in zip(
        group.x, group.mean, group.low, group.high, group.count, strict=True
    ):
        known = []
        for run in runs:
            finite = np.isfinite(run.mean)
            if finite.any() and run.x[finite][0] <= place <= run.x[finite][-1]:
                known.append(np.interp(place, run.x[finite], run.mean[finite]))
        if all(np.array_equal(run.x, runs[0].x) for run in runs):
            # Places in common: a run that has no value there has none.
            at = int(np.flatnonzero(runs[0].x == place)[0])
            known = [run.mean[at] for run in runs if np.isfinite(run.mean[at])]
        assert count == len(known)
        if known:
            assert (low, high) == pytest.approx((min(known), max(known)))
            assert mean == pytest.approx(sum(known) / len(known), abs=1e-6)
        else:
            assert math.isnan(mean)


def test_the_order_of_runs_changes_nothing():
    runs = [make_curve([(0, 1.0), (5, 2.0)]), make_curve([(1, 4.0), (6, 3.0)])]
    one, other = merge_runs(runs, 100), merge_runs(runs[::-1], 100)
    for name in ("x", "mean", "low", "high", "count"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_every_column_that_is_offered_can_be_asked_for(tmp_path, look):
    odd = {"a`b": 1, "x y": 2, "__proto__": 3, "and": {"or": 4}, "": 5, "plain": {"lr": 0.1}}
    session = quark.start_run(project="p", storage_dir=tmp_path, config=odd)
    with session, quark.MetricsLogger(session) as metrics, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for name in ("a`b", "x y/z", "or", "step", "ü" * 200):
            metrics.log(name, 1.0, step=0)
    client = look(tmp_path)
    said = client.json("/api/compare", run=session.run_id)
    assert "plain.lr" in {each["name"] for each in said["settings"]}
    columns = [each["written"] for each in said["settings"]]
    columns += [f"last({row['written']})" for row in said["metrics"]]
    assert len(said["metrics"]) == 5
    standing = client.json("/api/standings", run=session.run_id, column=columns)["standings"]
    values = standing[session.run_id]["values"]
    assert values[len(said["settings"]) :] == [1.0] * 5
    assert all(value is not None for value in values)


def test_why_two_sides_differ_is_told_in_the_words_of_the_command(client, seeds):
    _, low, high = seeds
    asked = {"side": [",".join(high), ",".join(low)]}
    said = wait_for_answer(client, "/api/compare/why", **asked)
    assert said["state"] == "computed"
    result = said["result"]
    assert {run["run_id"] for run in result["before"]["members"]} == set(low)
    assert result["headline"].startswith(result["metric_key"])
    assert {row["label"] for row in result["rows"]} & {"Probably", "Possibly", "Differs"}
    assert "two sides" in client.refused(400, "/api/compare/why", side=low)
    refused = wait_for_answer(client, "/api/compare/why", metric="absent", **asked)
    assert refused["state"] == "failed"
    assert "absent" in refused["note"]
