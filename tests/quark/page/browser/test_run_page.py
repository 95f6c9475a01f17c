"""One run: findings with what shows them, charts that say the truth, addresses that say it all."""

import pytest
from browser_runs import log_ranked, log_run, make_dying, make_exploding, make_falling

import quark

READ_VIEW = """() => window.quark.charts.describe().filter(chart => !chart.shade).map(
    chart => [chart.name, chart.x.kind, chart.x.min, chart.x.max, chart.y.isLog, chart.smooth])"""


def test_each_finding_has_its_evidence_drawn_at_its_step(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/exploding")
    visitor.wait("document.querySelectorAll('.finding').length >= 2")
    steps = visitor.wait(
        """() => {
        const found = [...document.querySelectorAll(".findings > .finding")];
        found.forEach(finding => finding.scrollIntoView());
        const drawn = window.quark.charts.describe().filter(chart => chart.shade);
        return drawn.length === found.length && drawn.map(
            chart => [chart.shade[0], chart.marks[0].step, chart.x.min, chart.x.max]);
    }"""
    )
    for first, mark, low, high in steps:
        assert low <= first <= high
        assert 195 <= mark <= 205


def test_evidence_that_exploded_and_then_died_has_a_log_axis_by_itself(
    visit, serve_shared, tmp_path_factory
):
    root = tmp_path_factory.mktemp("died")
    values = {"train/loss": make_exploding(300), "grad_norm": make_dying(300)}
    log_run(root, "died", values)
    visitor = visit(serve_shared(root), "run/died")
    drawn = visitor.wait(
        """() => {
        document.querySelector(".finding").scrollIntoView();
        const found = quark.charts.describe().find(
            chart => chart.type === "evidence" && chart.name === "grad_norm");
        const own = quark.charts.find("grad_norm");
        return found && own?.type === "metric" && {
            y: found.y, carets: found.carets, line: found.lines[0], own: own.y};
    }"""
    )
    assert drawn["y"]["isLog"]
    assert drawn["line"]["points"] == 300
    assert drawn["y"]["min"] <= 0.01
    assert drawn["y"]["max"] >= max(drawn["line"]["mean"]) > 1e5
    # What is zero has no place on such an axis, and is shown at its edge.
    assert {(caret["side"], caret["value"]) for caret in drawn["carets"]} == {("below", 0)}
    assert min(caret["step"] for caret in drawn["carets"]) == 182
    # The chart of the metric is as it was asked for.
    assert not drawn["own"]["isLog"]


def test_ranks_are_shown_together_each_or_one_alone(visit, serve, tmp_path):
    log_ranked(tmp_path, "ranked", 3, 40)
    visitor = visit(serve(tmp_path), "run/ranked")
    read = """() => quark.charts.find("train/loss").lines.map(
        line => [line.name, line.points, line.mean[0], line.mean.at(-1)])"""
    control = visitor.page.get_by_label("ranks")
    (together,) = visitor.wait_for_chart("train/loss")["lines"]
    assert (together["points"], together["mean"][0], together["mean"][-1]) == (120, 10, 49)
    assert (together["low"][0], together["high"][0]) == (0, 24)
    assert control.locator("option").all_inner_texts() == [
        "mean of all", "each", "rank 0", "rank 1", "rank 2",
    ]  # fmt: skip
    control.select_option("each")
    visitor.wait("() => quark.charts.find('train/loss').lines.length === 3")
    each = [[f"rank {rank}", 40, 6 * rank**2, 6 * rank**2 + 39] for rank in range(3)]
    assert visitor.evaluate(read) == each
    assert "ranks=each" in visitor.page.url
    control.select_option("1")
    visitor.wait("() => quark.charts.find('train/loss').lines.length === 1")
    assert visitor.evaluate(read)[0][1:] == [40, 6, 45]
    visitor.page.reload()
    visitor.wait_for_chart("train/loss")
    assert visitor.evaluate(read)[0][1:] == [40, 6, 45]
    assert visitor.page.get_by_label("ranks").input_value() == "1"
    visitor.page.go_back()
    visitor.wait("() => quark.charts.find('train/loss').lines.length === 3")
    visitor.page.get_by_label("ranks").select_option("mean")
    visitor.wait("() => quark.charts.find('train/loss').lines[0].points === 120")
    assert "ranks=" not in visitor.page.url


def test_a_cause_stands_above_what_follows_from_it_and_says_what_to_do(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/exploding")
    visitor.wait("document.querySelectorAll('.finding').length >= 2")
    depths = visitor.evaluate(
        """[...document.querySelectorAll('.findings > .finding')]
        .map(item => item.className.match(/depth-(.)/)[1])"""
    )
    assert depths[0] == "0"
    assert set(depths[1:]) <= {"0", "1", "2", "3"}
    assert visitor.evaluate("document.querySelector('.finding .advice').innerText").startswith("→")
    fix = visitor.evaluate("document.querySelector('.finding details.fix').textContent")
    assert fix.startswith("How to fix it")
    assert "In the code: " in fix
    assert visitor.evaluate("document.querySelector('.finding .severity').innerText").split()[
        1
    ] in (
        "critical",
        "error",
    )


def test_a_quiet_run_says_how_many_rules_looked_and_why_not_the_others(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/quiet")
    visitor.wait_for_text("No problem found;")
    visitor.wait("/No problem found; \\d+ of \\d+ checks ran/.test(document.body.innerText)")
    visitor.page.click(".unseen summary")
    assert visitor.evaluate("document.querySelectorAll('.unseen dt').length") > 3


def test_health_that_rests_on_nothing_is_not_known(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/one-point")
    visitor.wait("document.querySelector('.health')?.innerText.includes('not known')")
    assert "50" not in visitor.evaluate("document.querySelector('.health').innerText")


def test_a_run_of_one_point_and_one_of_nan_alone_are_drawn(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/one-point")
    assert visitor.wait_for_chart("train/loss")["lines"][0]["mean"] == [1.0]
    visitor.go("run/only-nan")
    chart = visitor.wait_for_chart("train/loss")
    assert "20 not finite" in chart["badge"]
    assert sum(bad["count"] for bad in chart["lines"][0]["bad"]) == 20


@pytest.mark.parametrize("points", [40_000, pytest.param(1_000_000)])
def test_a_spike_of_one_point_is_in_the_band_and_named_at_the_edge(
    visit, serve_shared, tmp_path_factory, points
):
    root = tmp_path_factory.mktemp("spike")
    values = make_falling(points)
    values[25_201] = 400.0
    log_run(root, "spike", {"train/loss": values}, analyzes=False)
    visitor = visit(serve_shared(root), "run/spike")
    chart = visitor.wait_for_chart("train/loss")
    assert chart["lines"][0]["points"] == points
    assert len(chart["lines"][0]["xs"]) < 10_000
    assert max(chart["lines"][0]["high"]) == 400.0
    assert chart["y"]["max"] < 400
    assert [
        (caret["value"], caret["step"]) for caret in chart["carets"] if caret["side"] == "above"
    ] == [(400.0, 25_201)]


QUERIES = [
    "?log=1&smooth=0.6&from=10&to=40",
    *(pytest.param(query) for query in ("", "?x=relative", "?smooth=0.9")),
]


@pytest.mark.long
@pytest.mark.parametrize("query", QUERIES)
def test_a_link_and_a_reload_give_the_same_picture(visit, serve_shared, runs, query):
    visitor = visit(serve_shared(runs), f"run/quiet{query}")
    visitor.wait_for_chart("train/loss")
    visitor.wait_for_chart("val/loss")
    before = visitor.evaluate(READ_VIEW)
    visitor.page.reload()
    visitor.wait_for_chart("val/loss")
    visitor.wait("before => JSON.stringify((" + READ_VIEW + ")()) === before", visitor.evaluate(
        "before => JSON.stringify(before)", before))  # fmt: skip
    other = visit(visitor.server, visitor.page.url.removeprefix(visitor.server.page.url))
    other.wait("before => JSON.stringify((" + READ_VIEW + ")()) === before", visitor.evaluate(
        "before => JSON.stringify(before)", before))  # fmt: skip


def test_zooming_by_keys_is_in_the_address_and_back_undoes_it(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/quiet")
    whole = visitor.wait_for_chart("train/loss")["x"]
    visitor.press("w")
    narrow = visitor.wait(
        """width => {
            const x = quark.charts.find("train/loss").x;
            return x.max - x.min < 0.9 * width && x;
        }""",
        whole["max"] - whole["min"],
    )
    assert "from=" in visitor.page.url
    assert "to=" in visitor.page.url
    visitor.press("d")
    visitor.wait("low => quark.charts.find('train/loss').x.min > low", narrow["min"])
    visitor.page.go_back()
    visitor.wait(
        """([low, high]) => {
            const x = quark.charts.find("train/loss").x;
            return x.min === low && x.max === high;
        }""",
        [narrow["min"], narrow["max"]],
    )
    visitor.page.go_back()
    visitor.wait("high => quark.charts.find('train/loss').x.max === high", whole["max"])
    assert "from=" not in visitor.page.url
    visitor.press("w", "0")
    visitor.wait("high => quark.charts.find('train/loss').x.max === high", whole["max"])


def test_a_phase_zooms_all_charts(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/quiet")
    visitor.wait_for_chart("train/loss")
    visitor.wait("document.querySelectorAll('.phase').length > 0")
    visitor.page.click(".phase >> nth=0")
    visitor.wait("document.querySelector('.phase[aria-pressed=true]')")
    # What is pressed is drawn first, and the charts after it.
    visitor.wait(
        """() => {
            const from = Number(new URLSearchParams(location.search).get("from"));
            const to = Number(new URLSearchParams(location.search).get("to"));
            const shown = quark.charts.describe().filter(chart => !chart.shade);
            return to > from && shown.every(({x}) => x.min === from && x.max === to);
        }"""
    )


def test_findings_are_gone_through_by_keys_alone(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/exploding")
    visitor.wait_for_chart("train/loss")
    visitor.wait("document.querySelector('.finding')")
    visitor.press("j")
    visitor.wait("document.activeElement.matches('.finding.active')")
    assert "#alert-" in visitor.page.url
    visitor.press("Enter")
    visitor.wait("() => quark.charts.describe().find(chart => !chart.shade).x.min > 0")
    visitor.press("l")
    visitor.wait("() => quark.charts.describe().find(chart => !chart.shade).y.isLog")
    visitor.press("0", "/")
    visitor.wait("document.activeElement.id === 'find'")
    visitor.page.keyboard.type("cpu")
    visitor.wait_for_chart("system/cpu")
    visitor.press("Escape", "?")
    visitor.wait("document.querySelector('dialog').open")
    visitor.press("Escape")
    visitor.wait("!document.querySelector('dialog').open")


def test_a_finding_that_is_linked_to_is_in_sight(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/exploding")
    last = visitor.wait("() => [...document.querySelectorAll('.findings > .finding')].at(-1)?.id")
    visitor.go(f"run/exploding#{last}")
    visitor.page.reload()
    visitor.wait("id => document.getElementById(id)?.classList.contains('active')", last)
    visitor.wait(
        """id => {
            const box = document.getElementById(id).getBoundingClientRect();
            return box.top < innerHeight && box.bottom > 0;
        }""",
        last,
    )


def test_only_charts_in_sight_are_read_and_folded_groups_are_not_built(
    visit, serve_shared, tmp_path_factory
):
    root = tmp_path_factory.mktemp("many")
    values = {f"g{group}/m{number}": [1.0, 2.0] for group in range(10) for number in range(100)}
    log_run(root, "many", values, analyzes=False)
    visitor = visit(serve_shared(root), "run/many")
    visitor.wait_for_chart("g0/m0")
    assert visitor.evaluate("document.querySelectorAll('.tile').length") < 100
    names = visitor.evaluate(
        "[...document.querySelectorAll('.tile')].slice(0, 12).map(tile => tile.dataset.metric)"
    )
    assert names == [f"g0/m{number}" for number in range(12)]
    asked = sum(url.count("key=") for url in visitor.requests if "/series?" in url)
    assert 0 < asked < 60
    visitor.page.fill("#find", "g7/m42")
    visitor.wait_for_chart("g7/m42")
    assert visitor.evaluate("document.querySelectorAll('.tile').length") == 1


def test_x_may_be_another_metric_or_the_time_since_the_start(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/quiet?x=metric%3Atrain%2Floss")
    drawn = visitor.wait(
        "(chart => chart?.x.kind === 'metric' && chart.lines.length && chart)"
        "(quark.charts.find('val/loss'))"
    )
    assert drawn["x"]["max"] < 5
    visitor.page.select_option(".controls select", "relative")
    visitor.wait("() => quark.charts.find('val/loss')?.x.kind === 'relative'")
    assert 0 <= visitor.evaluate("quark.charts.find('val/loss').x.min") < 60


def test_a_run_that_is_not_there_says_so(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/nobody", may_be_lost=True)
    visitor.wait_for_text("This run cannot be shown")
    assert "nobody" in visitor.page.inner_text("main")


def test_all_of_it_works_below_a_path_that_a_proxy_keeps(visit, serve, runs):
    visitor = visit(serve(runs, "/user/me/quark"), "")
    visitor.wait("document.querySelector('.runs tbody a')")
    visitor.page.get_by_role("link", name="exploding", exact=True).click()
    visitor.wait_for_chart("train/loss")
    assert visitor.page.url.endswith("/user/me/quark/run/exploding")
    visitor.page.reload()
    visitor.wait_for_chart("train/loss")
    visitor.page.click(".brand")
    visitor.wait("document.querySelector('.runs tbody a')")
    assert visitor.page.url.endswith("/user/me/quark/")
    visitor.page.go_back()
    visitor.wait_for_chart("train/loss")
    outside = [url for url in visitor.requests if "/user/me/quark/" not in url]
    assert [url for url in outside if not url.startswith("data:")] == []


def test_dragging_over_a_chart_zooms_all_of_them(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/quiet")
    visitor.wait_for_chart("train/loss")
    visitor.wait_for_chart("val/loss")
    box = visitor.find_place(".tile .u-over")
    middle = box["y"] + box["height"] / 2
    visitor.page.mouse.move(box["x"] + box["width"] * 0.25, middle)
    visitor.page.mouse.down()
    visitor.page.mouse.move(box["x"] + box["width"] * 0.5, middle, steps=4)
    visitor.page.mouse.up()
    visitor.wait("location.search.includes('from=') && location.search.includes('to=')")
    visitor.wait(
        """() => {
        const both = ["train/loss", "val/loss"].map(name => quark.charts.find(name)?.x);
        return both.every(x => x && x.min > 20 && x.max < 120) && both[0].min === both[1].min;
    }"""
    )


def test_attempts_are_lines_of_their_own_where_they_are_asked_for(visit, serve, tmp_path):
    log_run(tmp_path, "twice", {"train/loss": make_falling(60)}, status="failed", analyzes=False)
    session = quark.resume_run(run_id="twice", storage_dir=tmp_path, from_step=40)
    with quark.MetricsLogger(session) as metrics:
        for step in range(40, 100):
            metrics.log("train/loss", 0.1, step=step)
    session.end_run("completed")
    visitor = visit(serve(tmp_path), "run/twice")
    lines = visitor.wait_for_chart("train/loss")["lines"]
    assert sum(line["points"] for line in lines) == 100
    visitor.page.get_by_label("attempts").select_option("all")
    visitor.wait("location.search.includes('attempts=all')")
    visitor.wait(
        """() => {
        const lines = quark.charts.find("train/loss").lines;
        return lines.length === 2 && lines[0].points + lines[1].points === 120;
    }"""
    )


def test_a_run_that_failed_says_why_on_its_page_and_in_the_list(visit, serve, tmp_path):
    def fail(session):
        try:
            raise OSError("no space left on <b>device</b>")
        except OSError:
            session.end_run("failed")

    log_run(tmp_path, "full", {"train/loss": make_falling(60)}, status=None, more=fail)
    said = "OSError: no space left on <b>device</b>"
    served = serve(tmp_path)
    visitor = visit(served, "run/full")
    assert visitor.wait("document.querySelector('#ending')?.textContent") == said
    first = visitor.wait("document.querySelector('.findings > .finding')?.innerText")
    assert " ".join(first.split()).startswith("■ critical The run failed since step 59")
    assert f"The run failed after step 59: {said}." in first
    trace = visitor.evaluate("document.querySelector('.traceback pre').textContent")
    assert 'raise OSError("no space left on <b>device</b>")' in trace
    assert trace.strip().endswith(said)
    listed = visit(served, "")
    row = listed.wait(
        """() => {
        const row = document.querySelector("tr[data-run=full]");
        return row?.querySelector(".health-critical") && row.querySelector("td small[title]")
            && row.innerText;
    }"""
    )
    assert "failed" in row
    assert said in row
    assert "The run failed" in row
