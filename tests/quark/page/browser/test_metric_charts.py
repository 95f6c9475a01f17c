"""What a chart answers to the pointer and to buttons, and what it says without being seen."""

import pytest
from browser_runs import log_run, make_falling

POINTS = 6000
SPIKE_AT = 3210
FIRST, SECOND = "train/accuracy", "train/loss"
READOUTS = "[...document.querySelectorAll('.tile-chart .chart-readout')].map(e => e.textContent)"


def make_spiked():
    values = make_falling(POINTS)
    values[SPIKE_AT] = 400.0
    values[1000:1003] = [float("nan"), float("inf"), float("nan")]
    return values


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("charts")
    values = {FIRST: [step / POINTS for step in range(POINTS)], SECOND: make_spiked()}
    log_run(root, "spiked", values, name="spiked", analyzes=False)
    return root


@pytest.fixture
def look(visit, serve_shared, root):
    def begin(query="", **options):
        visitor = visit(serve_shared(root), f"run/spiked{query}", **options)
        visitor.wait_for_chart(FIRST)
        visitor.wait_for_chart(SECOND)
        visitor.wait_until_looked_at()
        visitor.page.locator(".tile-chart .u-over").nth(1).scroll_into_view_if_needed()
        return visitor

    return begin


def find_box(visitor, place):
    return visitor.find_place(".tile-chart .u-over", place)


def test_the_cursor_of_one_chart_is_that_of_all(look):
    visitor = look()
    box = find_box(visitor, 0)
    visitor.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    first, second = visitor.wait(
        f"(said => said.every(text => / at (2,9|3,0)\\d\\d/.test(text)) && said)({READOUTS})"
    )
    assert first.startswith(("0.49", "0.5"))
    assert second.startswith("0.")


@pytest.mark.long
def test_a_caret_that_is_clicked_gives_the_full_range_and_the_button_takes_it_back(look):
    visitor = look()
    drawn = visitor.wait_for_chart(SECOND)
    assert drawn["y"]["max"] < 100
    (caret,) = [caret for caret in drawn["carets"] if caret["value"] == 400]
    assert (caret["step"], caret["side"]) == (SPIKE_AT, "above")
    box, whole = find_box(visitor, 1), drawn["x"]
    share = (caret["x"] - whole["min"]) / (whole["max"] - whole["min"])
    visitor.page.mouse.click(box["x"] + box["width"] * share, box["y"] + 4)
    visitor.wait(f"window.quark.charts.find('{SECOND}').y.max >= 400")
    visitor.page.locator(".tile-chart").get_by_role("button", name="full range").click()
    visitor.wait(f"window.quark.charts.find('{SECOND}').y.max < 100")


def test_what_is_not_finite_stands_at_its_steps_and_is_counted(look):
    visitor = look()
    drawn = visitor.wait_for_chart(SECOND)
    assert drawn["badge"].endswith("3 not finite")
    assert sum(bad["count"] for bad in drawn["lines"][0]["bad"]) == 3
    assert all(995 <= bad["step"] <= 1002 for bad in drawn["lines"][0]["bad"])
    assert "3 not finite at 1,00" in drawn["bad"][0]["text"]
    # What draws the grid finds its ink as it has left it, or the next grid is as red as they are.
    inks = visitor.evaluate(
        """[...document.querySelectorAll('.tile-chart canvas')]
        .map(canvas => canvas.getContext("2d").strokeStyle)"""
    )
    assert set(inks) == {"#e4e7eb"}


def test_smoothing_adds_a_line_and_leaves_the_band_as_it_is(look):
    raw = look().wait_for_chart(SECOND)["lines"][0]
    visitor = look("?smooth=0.9")
    smooth = visitor.wait(f"window.quark.charts.find('{SECOND}').lines[0]")
    assert raw["smoothed"] is None
    assert (smooth["low"], smooth["high"]) == (raw["low"], raw["high"])
    assert max(smooth["high"]) == 400
    assert max(smooth["smoothed"]) < 20


def test_a_chart_is_a_table_too(look):
    visitor = look()
    visitor.page.locator(".tile-chart").get_by_role("button", name="as table").nth(1).click()
    rows = visitor.wait(
        """(() => {
        const rows = [...document.querySelectorAll(".chart-table tr")];
        return rows.length > 10 && rows.map(row => [...row.cells].map(cell => cell.textContent));
    })()"""
    )
    assert rows[0] == ["step", "mean", "low", "high"]
    assert rows[1][0] == "0"
    assert len(rows) <= 201
