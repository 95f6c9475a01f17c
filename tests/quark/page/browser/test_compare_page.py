"""The page that compares: groups, verdict, curves that keep their colours, runs as points."""

import warnings

import pytest
from browser_runs import HOSTILE, log_run, make_falling

import quark

LOSS = "window.quark.charts.find('val/loss')"


def shift(values, by):
    return [value + by for value in values]


@pytest.fixture(scope="session")
def sides(tmp_path_factory):
    """Three seeds each of two rates, the second of which ends higher, and hostile names."""
    root = tmp_path_factory.mktemp("sides")
    for name, rate, by in (("low", 0.1, 0.0), ("high", 1.0, 0.6)):
        for seed in range(3):
            end = by * (1 + 0.02 * (seed % 2)) + 0.01 * seed
            log_run(
                root, f"{name}-{seed}", {"val/loss": shift(make_falling(80), end)},
                name=f"{name} {seed}", config={"lr": rate, "seed": seed},
            )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        log_run(root, "hostile", {f"{HOSTILE}/loss": make_falling(20), "val/loss": [1.0, 0.9]},
                name=HOSTILE, config={HOSTILE: HOSTILE, "__proto__": 1})  # fmt: skip
    return root


ALL = "&".join(f"run={name}-{seed}" for name in ("low", "high") for seed in range(3))


def test_groups_of_seeds_have_a_verdict_and_bands(visit, serve_shared, sides):
    visitor = visit(serve_shared(sides), f"compare?{ALL}&group=lr")
    visitor.wait("document.querySelector('tr.headline .verdict-worse')")
    row = visitor.evaluate("document.querySelector('tr.headline').innerText").split("\t")
    assert row[0] == "val/loss"
    low, high = row[2].partition("[")[2].rstrip("]").split(", ")
    assert 0.4 < float(low) < 0.6 < float(high) < 0.8
    chart = visitor.wait_for_chart("val/loss")
    assert [line["name"] for line in chart["lines"]] == ["lr=0.1 (n=3)", "lr=1.0 (n=3)"]
    assert all(set(line["count"]) == {3} for line in chart["lines"])
    assert all(
        high > low for line in chart["lines"]
        for low, high in zip(line["low"], line["high"], strict=True)
    )  # fmt: skip
    # What was on its way before the script was there is not asked for again.
    assert len([url for url in visitor.requests if "api/compare?" in url]) == 1
    assert "lr" in visitor.evaluate(
        "document.querySelector('#settings-title').parentElement.innerText"
    )
    visitor.check_axe()


def test_hiding_a_side_changes_no_other_and_is_in_the_address(visit, serve_shared, sides):
    visitor = visit(serve_shared(sides), f"compare?{ALL}")
    visitor.wait(f"() => {LOSS}?.lines.length === 6")
    before = visitor.evaluate(f"() => {LOSS}.lines")
    visitor.page.locator("tr[data-side='0'] input[type=checkbox]").uncheck()
    visitor.wait(f"() => {LOSS}.lines.length === 5")
    assert visitor.evaluate(f"() => {LOSS}.lines") == before[1:]
    assert "hide=0" in visitor.page.url
    visitor.page.reload()
    visitor.wait(f"() => {LOSS}?.lines.length === 5")
    assert visitor.evaluate(f"() => {LOSS}.lines") == before[1:]


def test_the_difference_to_the_baseline_and_each_run_are_drawn(visit, serve_shared, sides):
    visitor = visit(serve_shared(sides), f"compare?{ALL}&group=lr")
    visitor.wait_for_chart("val/loss")
    visitor.page.get_by_label("difference to the baseline").check()
    chart = visitor.wait_for_chart("val/loss less lr=0.1")
    assert [line["index"] if "index" in line else line["name"] for line in chart["lines"]] == [
        "lr=1.0 (n=3)"
    ]
    assert all(0.55 < value < 0.65 for value in chart["lines"][0]["mean"])
    assert chart["threshold"] == 0
    visitor.page.get_by_label("difference to the baseline").uncheck()
    visitor.page.get_by_label("each run").check()
    visitor.wait(f"() => {LOSS}?.lines.filter(line => line.isThin).length === 6")
    visitor.page.locator("select:has(option[value=relative])").select_option("relative")
    visitor.wait(f"() => {LOSS}?.x.kind === 'relative'")


def test_what_is_judged_and_the_baseline_are_chosen_and_the_time_to_a_target(
    visit, serve_shared, sides
):
    visitor = visit(serve_shared(sides), f"compare?{ALL}&group=lr")
    visitor.wait("document.querySelector('tr.headline .verdict-worse')")
    visitor.page.get_by_label("Judge lr=0.1").check()
    visitor.wait("document.querySelector('tr.headline .verdict-better')")
    visitor.page.locator("#target").fill("0.5")
    visitor.press("Tab")
    visitor.wait("/3 of 3/.test(document.querySelector('tr.headline').innerText)")
    for tab in ("Layers by change", "Phases", "Scatter", "Parallel"):
        visitor.page.get_by_role("tab", name=tab).click()
        visitor.wait(
            "name => document.querySelector('[role=tab][aria-selected=true]').innerText === name",
            tab,
        )
    visitor.wait("document.querySelectorAll('path.parallel[d^=M]').length === 6")
    visitor.page.get_by_role("tab", name="Scatter").click()
    visitor.wait("document.querySelectorAll('.scatter circle').length === 6")
    visitor.check_axe()


def test_chosen_runs_of_the_list_are_compared(visit, serve_shared, sides):
    visitor = visit(serve_shared(sides), "?chosen=low-0,low-1,high-0")
    visitor.wait("document.querySelector('.chosen a')")
    visitor.page.click(".chosen a")
    visitor.wait("document.querySelectorAll('tr[data-side]').length === 2")
    assert visitor.evaluate("document.querySelector('h1').innerText") == "2 sides, 3 runs"
    visitor.page.click("button[aria-label='Group no longer by seed']")
    visitor.wait("document.querySelectorAll('tr[data-side]').length === 3")
    visitor.page.go_back()
    visitor.wait("document.querySelectorAll('tr[data-side]').length === 2")


def test_hostile_names_are_text_and_a_narrow_page_scrolls_within(visit, serve_shared, sides):
    options = {"viewport": {"width": 320, "height": 700}}
    visitor = visit(serve_shared(sides), "compare?run=hostile&run=low-0", **options)
    visitor.wait("document.querySelector('.verdicts')")
    visitor.page.locator(".tile[data-metric='val/loss']").scroll_into_view_if_needed()
    visitor.wait_for_chart("val/loss")
    assert visitor.evaluate("window.ran ?? null") is None
    assert visitor.evaluate("document.documentElement.scrollWidth") <= 320
    visitor.page.get_by_role("tab", name="Scatter").click()
    visitor.wait("document.querySelector('.scatter')")
    assert visitor.evaluate("window.ran ?? null") is None


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    """Runs that have nothing in common, or the same metric over other places."""
    root = tmp_path_factory.mktemp("strangers")
    log_run(root, "alpha", {"train/alpha": [1.0, 0.5]}, config={"lr": 0.1}, analyzes=False)
    log_run(root, "beta", {"train/beta": [2.0, 0.5]}, config={"lr": 0.2}, analyzes=False)
    log_run(root, "dense", {"val/loss": make_falling(60)}, config={"lr": 0.1}, analyzes=False)
    log_run(root, "epochs", more=log_epochs, config={"lr": 0.2}, analyzes=False)
    return root


def log_epochs(session):
    with quark.MetricsLogger(session) as metrics:
        for epoch in range(5):
            metrics.log("val/loss", 1.0 - epoch / 10, epoch=epoch)


def test_runs_with_no_metric_in_common_have_their_own_curves(visit, serve_shared, strangers):
    visitor = visit(serve_shared(strangers), "compare?run=alpha&run=beta&group=lr")
    visitor.wait("document.querySelectorAll('.verdicts tbody tr').length === 2")
    said = visitor.evaluate("document.querySelector('.verdict').innerText")
    assert "only lr=0.1 has it" in said
    assert "only lr=0.2 has it" in said
    # Groups of one run each: a line, and no band that would mean something else.
    for name, side in (("train/alpha", "lr=0.1"), ("train/beta", "lr=0.2")):
        chart = visitor.wait_for_chart(name)
        assert [line["name"] for line in chart["lines"]] == [side]
    visitor.page.get_by_label("difference to the baseline").check()
    visitor.wait_for_text("no visible side has a value here")
    for tab in ("Layers by change", "Phases"):
        visitor.page.get_by_role("tab", name=tab).click()
        visitor.wait("!document.getElementById('panel').innerText.includes('…')")


def test_metrics_over_steps_and_over_epochs_stand_in_one_chart(visit, serve_shared, strangers):
    visitor = visit(serve_shared(strangers), "compare?run=dense&run=epochs")
    chart = visitor.wait_for_chart("val/loss")
    assert [line["name"] for line in chart["lines"]] == ["dense", "epochs"]
    visitor.wait("document.querySelector('.verdicts tbody tr')")
    visitor.page.locator("select:has(option[value=relative])").select_option("epoch")
    visitor.wait(f"() => {LOSS}?.lines.length === 1")


def test_runs_that_are_not_there_and_a_side_alone_say_so(visit, serve_shared, sides):
    server = serve_shared(sides)
    visitor = visit(server, "compare?run=low-0&run=none-such", may_be_lost=True)
    visitor.wait_for_text("none-such")
    visitor.go("compare?run=low-0")
    visitor.wait_for_text("Only one side")
    visitor.page.get_by_role("tab", name="Phases").click()
    visitor.wait_for_text("Add a second side to compare")
    visitor.go("compare")
    visitor.wait_for_text("These runs cannot be compared")


@pytest.mark.long
def test_why_names_what_differs(visit, serve_shared, sides):
    visitor = visit(serve_shared(sides), f"compare?{ALL}&group=lr&tab=why")
    visitor.wait("document.querySelector('.why .causes tbody tr')")
    row = visitor.evaluate("document.querySelector('.why .causes tbody tr').innerText").split("\t")
    assert row[:2] == ["Probably", "config"]
    assert row[2].split() == ["lr", "0.1", "->", "1.0"]
    assert "worse" in visitor.evaluate("document.querySelector('.why-verdict').innerText")
    visitor.check_axe()


def test_why_shows_names_of_others_as_text(visit, serve_shared, sides):
    visitor = visit(serve_shared(sides), "compare?run=low-0&run=hostile&tab=why")
    visitor.wait("document.querySelector('.why-verdict')")
    assert visitor.evaluate("document.querySelectorAll('.why img, .why script').length") == 0
