"""Whoever looks: without sight, without a mouse, in the dark, on paper, on a narrow screen."""

import pytest
from browser_runs import log_run, make_exploding

PAGES = {
    "": "document.querySelector('.runs tbody a') && document.querySelector('.runs .health')"
    " && document.querySelectorAll('.project option').length > 2",
    "run/exploding": "document.querySelector('.evidence-chart canvas')",
    "run/quiet?tab=config": "document.querySelector('.values')",
    "run/hostile?tab=events": "document.querySelector('.events li')",
    "run/hostile/layers": "document.querySelector('main canvas')",
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_axe_finds_nothing(visit, serve_shared, runs, path, scheme):
    visitor = visit(serve_shared(runs), path, color_scheme=scheme)
    visitor.wait(PAGES[path])
    visitor.check_axe()


def test_axe_finds_nothing_in_what_opens(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "?find=train%2Floss+%3C", may_be_lost=True)
    visitor.wait("document.querySelector('.mistake')")
    visitor.page.click(".chooser summary")
    visitor.wait("document.querySelectorAll('.figures').length > 0")
    visitor.check_axe()
    visitor.page.click("footer button")
    visitor.wait("document.querySelector('dialog').open")
    visitor.check_axe()


@pytest.mark.parametrize("path", PAGES)
def test_a_screen_of_320_pixels_needs_no_scrolling_to_the_side(visit, serve_shared, runs, path):
    visitor = visit(serve_shared(runs), path, viewport={"width": 320, "height": 640})
    visitor.wait(PAGES[path])
    assert visitor.evaluate("document.documentElement.scrollWidth") <= 320


def test_a_screen_of_4k_is_used(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/exploding", viewport={"width": 3840, "height": 2160})
    visitor.wait_for_chart("train/loss")
    assert visitor.evaluate("document.querySelector('main').getBoundingClientRect().width") > 2000


def test_dark_and_light_are_as_the_reader_has_them(visit, serve_shared, runs):
    read = "getComputedStyle(document.body).backgroundColor"
    visitor = visit(serve_shared(runs), "run/quiet", color_scheme="light")
    assert visitor.evaluate(read) == "rgb(255, 255, 255)"
    light = visitor.wait_for_chart("train/loss")["lines"][0]["colour"]
    visitor.page.emulate_media(color_scheme="dark")
    assert visitor.evaluate(read) == "rgb(20, 23, 28)"
    visitor.wait("light => quark.charts.find('train/loss').lines[0].colour !== light", light)


def test_paper_is_white_and_has_the_findings_and_no_controls(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/exploding", color_scheme="dark")
    visitor.wait_for_chart("train/loss")
    visitor.page.emulate_media(media="print")
    hidden = ".controls, .tabs, .finding-foot > button"
    assert visitor.evaluate(
        "names => [...document.querySelectorAll(names)].every(item => item.offsetParent === null)",
        hidden,
    )
    assert (
        visitor.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )
    assert len(visitor.page.pdf(format="A4")) > 10_000


@pytest.mark.long
def test_paper_has_every_chart_as_wide_as_it_is(visit, serve_shared, tmp_path):
    """Also those that nobody has scrolled to, and those of a screen that is wider than paper."""
    keys = [f"train/loss{at}" for at in range(20)]
    log_run(
        tmp_path, "many", {"train/loss": make_exploding(300), **{key: [1.0, 2.0] for key in keys}}
    )
    visitor = visit(serve_shared(tmp_path), "run/many")
    visitor.wait_for_chart("train/loss")
    visitor.wait_until_quiet()
    undrawn = (
        "[...document.querySelectorAll('.tile')].filter(tile => !tile.querySelector('canvas'))"
    )
    assert visitor.evaluate(f"{undrawn}.length") > 0
    visitor.evaluate(f"addEventListener('afterprint', () => window.missed = {undrawn}.length)")
    visitor.page.pdf(format="A4")
    assert visitor.evaluate("window.missed") == 0
    names = visitor.evaluate("window.quark.charts.describe().map(chart => chart.name)")
    assert set(keys) <= set(names)
    visitor.page.emulate_media(media="print")
    # No chart is told of the width of paper before it is printed.
    assert visitor.evaluate(
        """[...document.querySelectorAll('.chart-plot')].every(host => {
            host.style.width = '150px';
            const { left, right, height } = host.querySelector('canvas').getBoundingClientRect();
            const { height: whole } = host.getBoundingClientRect();
            return right - left <= 150 && height > 20 && whole >= height;
        })"""
    )


def test_without_javascript_a_sentence_says_what_to_do(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/quiet", java_script_enabled=False)
    assert "quark show RUN" in visitor.page.inner_text("noscript, body")


def test_the_first_key_leads_past_the_head_and_all_controls_are_reached(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/exploding")
    visitor.wait_for_chart("train/loss")
    visitor.press("Tab")
    assert visitor.evaluate("document.activeElement.className") == "skip"
    visitor.press("Enter")
    assert visitor.evaluate("document.activeElement.id") == "main"
    reached = set()
    for _ in range(60):
        visitor.press("Tab")
        reached.add(visitor.evaluate("document.activeElement.id || document.activeElement.tagName"))
        if "tab-charts" in reached:
            break
    visitor.press("ArrowRight")
    visitor.wait(
        "document.activeElement.id === 'tab-events' && location.search.includes('tab=events')"
    )


def test_single_keys_can_be_switched_off(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/exploding")
    visitor.wait_for_chart("train/loss")
    visitor.page.click("footer button")
    visitor.page.click("dialog input[type=checkbox]")
    visitor.press("Escape", "l", "j")
    assert visitor.page.url.endswith("run/exploding")
