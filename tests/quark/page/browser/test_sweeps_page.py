"""The pages of sweeps: axes that are narrowed, a table beside them, a verdict, who has what."""

import warnings

import pytest
from browser_runs import HOSTILE
from page_sweeps import draw_trials, fill_sweep, make_worker, open_store
from test_hostile_names import check_nothing_ran

import quark
from quark_core.backends.coordination import NewTrial
from quark_core.records.sweeps import TrialResult

TRIALS = "window.quark.charts.find('trials')"
FITTING = f"{TRIALS}.lines.filter(line => line.isFit).map(line => line.number)"
SHOWN = (
    "[...document.querySelectorAll('.trials tbody tr[data-trial]')]"
    ".map(row => Number(row.dataset.trial))"
)


@pytest.fixture(scope="session")
def sweeps(tmp_path_factory):
    """Sweeps that tests only look at."""
    root = tmp_path_factory.mktemp("sweeps")
    ids = {"search": fill_sweep(root, "lr-search")}
    with open_store(root) as store:
        ids["empty"] = store.open_sweep("p", "empty", {"metric": "a"}, max_failures=1).id
        odd = {"metric": [HOSTILE, "b"], "mode": "max", "search": HOSTILE,
               "constraints": [HOSTILE], "space": {HOSTILE: {"type": "choices"}}}  # fmt: skip
        sweep = store.open_sweep("p", HOSTILE[:200], odd, max_failures=1)
        ids["hostile"] = sweep.id
        parameters = [{HOSTILE[:240]: HOSTILE, "__proto__": at} for at in range(6)]
        store.add_trials(sweep.id, [NewTrial(parameters=each) for each in parameters], key="a")
        for at in range(5):
            claimed = store.claim_trial(
                sweep.id, request_id=str(at), worker=make_worker(at, HOSTILE[:60]), lease_s=60.0
            )
            result = TrialResult(state="completed", values=(at, -at), constraints=(0.0,))
            if at == 1:
                result = TrialResult(state="failed", reason=HOSTILE)
            if at < 4:
                store.settle_trial(sweep.id, at, claimed.token, result, lease_s=60.0)
    return root, ids


@pytest.fixture
def open_sweep(visit, serve_shared, sweeps):
    """Opens the page of one of them."""
    root, ids = sweeps

    def begin(name="search", query="", **options):
        visitor = visit(serve_shared(root), f"sweep/{ids[name]}{query}", **options)
        if name != "empty":
            visitor.wait(TRIALS)
        return visitor

    return begin


def test_the_list_leads_to_a_sweep_and_back(visit, serve_shared, sweeps):
    root, ids = sweeps
    visitor = visit(serve_shared(root), "sweeps?project=p")
    visitor.wait(f"document.querySelector('tr[data-sweep=\"{ids['search']}\"]')")
    row = visitor.page.inner_text(f"tr[data-sweep='{ids['search']}']")
    row = " ".join(row.split())
    assert all(text in row for text in ("lr-search", "28 ✓ completed", "3 ▶ running", "35/50"))
    visitor.check_axe()
    visitor.page.get_by_role("link", name="lr-search").click()
    visitor.wait(TRIALS)
    assert visitor.page.url.endswith(f"sweep/{ids['search']}")
    assert visitor.page.title() == "lr-search · p · Quark"
    visitor.page.go_back()
    visitor.wait(f"document.querySelector('tr[data-sweep=\"{ids['search']}\"]')")
    check_nothing_ran(visitor)


def test_a_sweep_shows_its_trials_and_says_what_may_be_said(open_sweep):
    visitor = open_sweep()
    chart = visitor.evaluate(TRIALS)
    assert [axis["id"] for axis in chart["axes"]] == [
        "p:lr",
        "p:layers",
        "p:optimizer",
        "m:val/acc",
    ]
    assert chart["axes"][0]["isLog"] is True
    assert chart["axes"][2]["names"] == ["adam", "sgd"]
    assert len(chart["lines"]) == 40
    best = [line["number"] for line in chart["lines"] if line["isBest"]]
    assert len(best) == 1
    rates = {line["number"]: line["rate"] for line in chart["lines"]}
    assert rates[best[0]] == max(rate for rate in rates.values() if rate is not None)
    # Sorted by the metric, the best one first.
    assert visitor.evaluate(SHOWN)[0] == best[0]
    visitor.wait("document.querySelector('[data-verdict=cannot_tell]')")
    text = visitor.page.inner_text("main")
    for said in ("It is unknown if", "Run the best few again", "Which parameters matter",
                 "Best so far", "Live (3)", "Workers (3 with a trial)", "Rungs"):  # fmt: skip
        assert said in text
    visitor.wait("document.querySelector('.importances tbody th')?.innerText === 'lr'")
    points = visitor.evaluate("window.quark.charts.find('best so far').points")
    assert points[-1]["best"] == max(point["value"] for point in points if point["isBest"])
    # What was on its way before the script was there is not asked for again.
    assert (
        len(
            [
                url
                for url in visitor.requests
                if url.endswith(f"/api/sweeps/{visitor.page.url.rpartition('/')[2]}")
            ]
        )
        == 1
    )
    visitor.check_axe()


def test_an_axis_is_narrowed_by_keys_and_the_address_keeps_it(open_sweep):
    visitor = open_sweep()
    low = visitor.page.get_by_role("slider", name="layers, lowest shown")
    low.focus()
    visitor.press("ArrowUp", "ArrowUp")
    assert low.get_attribute("aria-valuetext") == "1.12"
    visitor.press("End")
    fitting = visitor.wait(
        f"() => {{ const found = {FITTING}; return found.length < 40 && found; }}"
    )
    visitor.wait(f"{SHOWN}.length === {len(fitting)}")
    assert f"{len(fitting)} of 40 trials match" in visitor.page.inner_text("main")
    assert "brush=" in visitor.page.url
    visitor.page.reload()
    visitor.wait(TRIALS)
    assert visitor.evaluate(FITTING) == fitting
    visitor.page.get_by_role("slider", name="layers, highest shown").focus()
    visitor.press("Escape")
    visitor.wait(f"{FITTING}.length === 40")
    assert "brush=" not in visitor.page.url


def test_an_axis_of_names_goes_from_one_to_the_next(open_sweep):
    visitor = open_sweep()
    high = visitor.page.get_by_role("slider", name="optimizer, highest shown")
    high.focus()
    assert high.get_attribute("aria-valuetext") == "sgd"
    visitor.press("ArrowDown")
    assert high.get_attribute("aria-valuetext") == "adam"
    cells = visitor.wait(
        """() => { const cells = [...document.querySelectorAll('.trials tbody tr[data-trial]')]
        .map(row => row.innerText); return cells.every(text => text.includes('adam')) && cells; }"""
    )
    assert 0 < len(cells) < 40
    visitor.page.get_by_role("button", name="Show all trials").click()
    visitor.wait(f"{FITTING}.length === 40")


def test_an_axis_is_narrowed_by_the_pointer(open_sweep):
    visitor = open_sweep()
    strip = visitor.page.locator(".axis-strip[aria-label='val/acc'] .axis-line")
    strip.scroll_into_view_if_needed()
    box = strip.bounding_box()
    middle = box["x"] + box["width"] / 2
    visitor.page.mouse.move(middle, box["y"] + 40)
    visitor.page.mouse.down()
    visitor.page.mouse.move(middle, box["y"] + 80)
    visitor.page.mouse.move(middle, box["y"] + box["height"] * 0.6)
    visitor.page.mouse.up()
    fitting = visitor.wait(
        f"() => {{ const found = {FITTING}; return found.length < 40 && found; }}"
    )
    assert fitting
    chart = visitor.evaluate(TRIALS)
    (brush,) = chart["brushes"]
    values = [line["places"][3] for line in chart["lines"] if line["isFit"]]
    assert all(0.39 < value < 0.87 for value in values)
    assert brush["id"] == "m:val/acc"
    # A click beside what is narrowed lets it go.
    visitor.page.mouse.click(middle, box["y"] + box["height"] - 20)
    visitor.wait(f"{FITTING}.length === 40")


def test_a_line_names_its_trial_and_the_table_is_sorted_by_any_column(open_sweep):
    visitor = open_sweep()
    place = visitor.evaluate(
        f"""() => {{ const chart = {TRIALS}; const line = chart.lines.find(each => each.isBest);
        const area = document.querySelector('.parallel-box canvas').getBoundingClientRect();
        const share = 30 / (chart.xs[1] - chart.xs[0]);
        const at = line.places[0] + (line.places[1] - line.places[0]) * share;
        return [area.x + chart.xs[0] + 30, area.y + chart.top + chart.height * (1 - at)]; }}"""
    )
    visitor.page.mouse.move(*place)
    visitor.wait("document.getElementById('under-pointer').innerText.startsWith('Trial ')")
    visitor.page.get_by_role("button", name="trial", exact=True).click()
    visitor.wait(f"{SHOWN}[0] === 0")
    assert (
        visitor.evaluate("document.querySelector('.trials th[aria-sort]').ariaSort") == "ascending"
    )
    assert "order=number" in visitor.page.url


@pytest.mark.long
def test_a_sweep_that_goes_on_is_followed(tmp_path, visit, serve):
    sweep_id = fill_sweep(tmp_path, live=0)
    visitor = visit(serve(tmp_path), f"sweep/{sweep_id}")
    visitor.wait(TRIALS)
    with open_store(tmp_path) as store:
        trial = store.claim_trial(sweep_id, request_id="x", worker=make_worker(77), lease_s=60.0)
    visitor.wait_for_text("node-1 · 1077")
    visitor.wait(f"document.querySelector('[data-live=\"{trial.number}\"]')")
    with open_store(tmp_path) as store:
        result = TrialResult(state="completed", values=(2.0,), step=100)
        store.settle_trial(sweep_id, trial.number, trial.token, result, lease_s=60.0)
        store.add_trials(sweep_id, draw_trials(3, 9), key="more")
    visitor.wait(f"{TRIALS}.lines.length === 43")
    visitor.wait(f"{TRIALS}.lines.find(line => line.isBest).number === {trial.number}")
    visitor.wait(f"!document.querySelector('[data-live=\"{trial.number}\"]')")
    visitor.wait_for_text(f"It is unknown if trial {trial.number} is really the best")


def test_an_empty_sweep_says_what_is_next(open_sweep):
    visitor = open_sweep("empty")
    visitor.wait_for_text("No trials yet")
    visitor.check_axe()


def test_whatever_a_sweep_is_called_is_text(open_sweep):
    visitor = open_sweep("hostile")
    visitor.wait_for_text("onerror")
    visitor.wait("document.querySelectorAll('[data-verdict]').length === 2")
    visitor.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    high = visitor.page.get_by_role("slider").first
    high.focus()
    visitor.press("ArrowUp")
    check_nothing_ran(visitor)
    visitor.check_axe()


def test_a_sweep_that_is_not_there_is_told(visit, serve_shared, sweeps):
    visitor = visit(serve_shared(sweeps[0]), "sweep/s0000000000000000", may_be_lost=True)
    visitor.wait_for_text("This sweep cannot be shown")
    visitor.wait_for_text("does not exist in this store")


@pytest.mark.sampled
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_page_scrolls_its_parts_and_not_itself(open_sweep, scheme):
    options = {"viewport": {"width": 320, "height": 640}, "color_scheme": scheme}
    visitor = open_sweep(**options)
    visitor.wait("document.querySelector('[data-verdict]')")
    assert visitor.evaluate("document.documentElement.scrollWidth") <= 320
    assert visitor.evaluate("document.querySelector('.parallel-axes').scrollWidth") > 320
    # Which trial it is stands there too.
    assert visitor.page.locator(".trials tbody th").first.is_visible()
    visitor.check_axe()


def test_a_run_leads_to_its_sweep(tmp_path, visit, serve):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sweep = quark.sweep("s", project="p", space={"lr": [0.1, 0.2]}, metric="val/acc",
                            mode="max", search="grid", storage_dir=tmp_path)  # fmt: skip
        trial = sweep.claim()
        with trial.start_run() as session:
            quark.MetricsLogger(session).log("val/acc", 0.5, step=1)
        sweep.close()
    visitor = visit(serve(tmp_path), f"run/{session.run_id}")
    visitor.wait("document.getElementById('trial-note')")
    assert "Trial 0 of the sweep s" in visitor.page.inner_text("#trial-note")
    visitor.page.locator("#trial-note a").click()
    visitor.wait(TRIALS)
    assert visitor.page.locator(f".trials a[href$='run/{session.run_id}']").count() == 1


def test_thousands_of_trials_are_drawn_and_narrowed(tmp_path, visit, serve):
    with open_store(tmp_path) as store:
        definition = {"metric": "val/acc", "mode": "max"}
        sweep = store.open_sweep("p", "many", definition, max_failures=1)
        store.add_trials(sweep.id, draw_trials(2_000), key="a")
    visitor = visit(serve(tmp_path), f"sweep/{sweep.id}")
    visitor.wait(f"{TRIALS}?.lines.length === 2000")
    # Only the rows in sight are in the document.
    assert visitor.evaluate(f"{SHOWN}.length") < 100
    visitor.page.get_by_role("slider", name="optimizer, lowest shown").focus()
    visitor.press("ArrowUp")
    visitor.wait(f"{FITTING}.length < 1200")
