"""A report in a browser: from the disk, with the network off, in a notebook's frame, on paper."""

import pytest
from browser_runs import HOSTILE
from test_hostile_names import check_nothing_ran

import quark
from quark.page.notebook import show_report


class Opened:
    """What stands in the place of a server: there is none."""

    port = 0
    page = None


@pytest.fixture(scope="session")
def saved(runs, tmp_path_factory):
    """Reports of the runs that tests look at."""
    folder = tmp_path_factory.mktemp("reports")

    def save(*run_ids):
        path = folder / f"{'-'.join(run_ids)}.html"
        if not path.exists():
            quark.report(list(run_ids), storage_dir=runs).save(path)
        return path

    return save


@pytest.fixture
def read(visit):
    """Opens a file with the network off."""

    def begin(path, **options):
        visitor = visit(Opened(), **options)
        visitor.context.set_offline(True)
        visitor.page.goto(path.as_uri())
        visitor.wait("document.documentElement.dataset.drawn === 'true'")
        # The file is what was asked for; whatever else is asked for is not of 127.0.0.1 either.
        visitor.requests.remove(path.as_uri())
        return visitor

    return begin


def test_a_report_draws_what_shows_its_findings(read, saved):
    visitor = read(saved("exploding", "quiet"))
    chart = visitor.wait(
        "() => window.quark.charts.describe().find(chart => chart.type === 'evidence')"
    )
    assert chart["lines"][0]["entries"] == 300
    assert chart["shade"][0] == 200
    assert visitor.wait_for_chart("val/loss")["lines"][0]["points"] == 50
    assert visitor.evaluate("document.querySelectorAll('.report-run').length") == 2
    assert visitor.evaluate("document.querySelectorAll('.static').length") == 0
    assert visitor.evaluate("document.querySelectorAll('.comparison table').length") == 1
    # All is drawn, not only what is in sight, so that it prints whole.
    drawn = visitor.evaluate("document.querySelectorAll('.tile canvas').length")
    assert drawn == visitor.evaluate("document.querySelectorAll('.tile').length") == 5
    visitor.page.click(".finding-foot button >> nth=0")
    zoomed = visitor.wait(
        "() => [window.quark.charts.find('train/loss')].find(chart => chart.x.min > 0)"
    )
    assert zoomed["x"]["min"] < 200
    visitor.check_axe()


def test_names_in_a_report_are_text(read, saved):
    visitor = read(saved("hostile", "quiet"))
    visitor.wait_for_chart(HOSTILE[:60])
    visitor.wait("document.querySelectorAll('.finding').length > 0")
    visitor.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    visitor.wait_for_text("onerror")
    check_nothing_ran(visitor)


@pytest.mark.sampled
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_report_fits_and_keeps_nobody_out(read, saved, scheme):
    visitor = read(
        saved("exploding", "quiet"), viewport={"width": 320, "height": 800}, color_scheme=scheme
    )
    assert visitor.evaluate("document.documentElement.scrollWidth") <= 320
    visitor.check_axe()


def test_paper_is_light_and_holds_the_charts(read, saved):
    visitor = read(saved("exploding"), color_scheme="dark")
    visitor.wait("window.quark.charts.describe().length >= 4")
    assert visitor.page.pdf(format="A4").startswith(b"%PDF")
    visitor.page.emulate_media(media="print", color_scheme="dark")
    visitor.wait("getComputedStyle(document.querySelector('.report-bar')).display === 'none'")
    wide = visitor.evaluate(
        """[...document.querySelectorAll('canvas')].filter(canvas =>
        canvas.getBoundingClientRect().right > innerWidth + 1).length"""
    )
    assert wide == 0


def test_a_notebook_shows_the_report_in_a_frame_that_may_only_draw(visit, runs, tmp_path):
    made = quark.report("exploding", storage_dir=runs)
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><title>n</title>{show_report(made)}", "utf-8")
    visitor = visit(Opened())
    visitor.context.set_offline(True)
    visitor.page.goto(path.as_uri())
    visitor.requests.remove(path.as_uri())
    visitor.wait("document.querySelector('iframe') !== null")
    frame = visitor.page.frames[1]
    deadline_ms, waited_ms = 60_000, 0
    while not frame.evaluate("window.quark?.charts.describe().length ?? 0"):
        visitor.page.wait_for_timeout(50)
        waited_ms += 50
        assert waited_ms < deadline_ms
    assert frame.evaluate("origin") == "null"
    visitor.requests[:] = [url for url in visitor.requests if url != "about:srcdoc"]
