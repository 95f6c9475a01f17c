"""Layers over steps: which of them changed, from when on, and what one of them did."""

import math

import pytest
from browser_runs import HOSTILE, log_run, make_falling, make_layers

import quark
from quark_core.records import LayerSummaryRecord, ParameterDistributionRecord
from quark_core.records.base import start_fields

BLOCKS = 6
PARTS = ("attn.proj", "mlp.fc1", "mlp.fc2")
NAMES = ["embed", *(f"blocks.{block}.{part}" for block in range(BLOCKS) for part in PARTS), "head"]
STEPS = range(0, 600, 10)
SINCE = 400
BROKEN = "blocks.4.mlp.fc1"
MAPS = "[...document.querySelectorAll('[data-map]')].map(map => map.dataset.map)"
DRAWN = "window.quark.charts.describe().filter(chart => chart.type === 'map')"
GRADIENT = "window.quark?.charts.find('gradient norm')"


def find_norm(name, step):
    """A gradient that is a thousand times as large in one block from a step on, and ends as NaN."""
    place = NAMES.index(name)
    norm = (place % 4 + 1) * (1 + 0.1 * math.sin(place + step))
    if not name.startswith("blocks.4.") or step < SINCE:
        return norm
    return norm * 1000


def make_layer(name, step):
    """A gradient and an activation of one layer at one step."""
    is_lost = name == BROKEN and step == STEPS[-1]
    norm = None if is_lost else find_norm(name, step)
    dead = min(1.0, max(0.01, (step - 200) / 300)) if name == "blocks.5.mlp.fc1" else 0.01
    origin = (name, "Linear")
    return [
        LayerSummaryRecord(
            *start_fields(None), *origin, "gradient", "backward", 0, 100, step, norm=norm,
            nan_count=100 if is_lost else 0, inf_count=0,
        ),
        LayerSummaryRecord(
            *start_fields(None), *origin, "activation", "forward", 0, 100, step, norm=2.0,
            dead_unit_ratio=dead, nan_count=0, inf_count=0,
        ),
    ]  # fmt: skip


def log_layers(session):
    session.write([record for step in STEPS for name in NAMES for record in make_layer(name, step)])
    edges = tuple(place / 8 - 1 for place in range(17))
    session.write([
        ParameterDistributionRecord(
            *start_fields(None), BROKEN, "Linear", f"{BROKEN}.weight", "weight", "gradient", 100,
            100, step, bin_edges=edges,
            counts=tuple(int(99 * math.exp(-((edge * 9 - step / 100) ** 2))) for edge in edges[1:]),
        )
        for step in STEPS[::10]
    ])  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("layers")
    log_run(root, "deep", {"train/loss": make_falling(600)}, name="deep", more=log_layers)
    log_run(
        root, "fresh", {"train/loss": make_falling(600)}, name="fresh", more=log_layers,
        analyzes=False,
    )  # fmt: skip
    log_run(root, "flat", {"train/loss": make_falling(9)}, name="flat", analyzes=False)
    return root


@pytest.fixture
def look(visit, serve_shared, root):
    """Opens the page of layers, once its maps are there."""

    def begin(path="run/deep/layers", **options):
        visitor = visit(serve_shared(root), path, **options)
        visitor.wait(f"{MAPS}.length === 3 && {DRAWN}.length === 3")
        # With it come the phases above the maps.
        visitor.wait("document.querySelector('.title .facts')")
        return visitor

    return begin


def test_the_block_that_explodes_is_seen_with_its_step_and_what_is_not_finite(look):
    visitor = look()
    assert visitor.evaluate(MAPS) == ["gradient", "dead", "activation"]
    drawn = visitor.wait(GRADIENT)
    rows = {row["name"]: row for row in drawn["rows"]}
    assert list(rows) == NAMES
    assert drawn["scale"] == {"low": -3, "high": 3, "isLog": True}
    assert {name for name, row in rows.items() if row["furthest"] > 500} == {
        f"blocks.4.{part}" for part in PARTS
    }
    assert rows[BROKEN]["step"] >= SINCE
    assert [name for name, row in rows.items() if row["bad"]] == [BROKEN]
    assert drawn["readout"] == f"not finite: {BROKEN} at {STEPS[-1]}"
    dead = visitor.evaluate("window.quark.charts.find('dead units')")
    assert (dead["mode"], dead["scale"]["high"]) == ("absolute", 1)
    assert dead["readout"] == "maximum: blocks.5.mlp.fc1  1 at 500"
    activation = visitor.evaluate("window.quark.charts.find('activation norm')")
    assert activation["readout"] == "largest change: embed  2 (\u00d71) at 0"


def test_alerts_are_marked_on_the_rows_that_they_name(look):
    marks = look().wait(f"{GRADIENT}?.marks")
    assert marks
    assert {mark["name"].rsplit(".", 2)[0] for mark in marks} <= {"blocks.4", "blocks.5"}
    assert any(abs(mark["step"] - SINCE) <= 20 for mark in marks)


def test_what_is_found_while_one_looks_is_marked_and_the_phases_come(look):
    visitor = look("run/fresh/layers")
    visitor.wait(f"{GRADIENT}.marks.length > 0")
    visitor.wait("document.querySelector('.map-phase')")


def test_red_is_on_the_canvas_where_a_cell_is_not_finite(look):
    visitor = look()
    count = visitor.evaluate(
        """() => {
        // Read from a copy: the browser warns where the canvas itself is read.
        const shown = document.querySelector("[data-map=gradient] .map-body canvas");
        const canvas = new OffscreenCanvas(shown.width, shown.height);
        canvas.getContext("2d").drawImage(shown, 0, 0);
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let count = 0;
        for (let i = 0; i < data.length; i += 4) {
            count += data[i] === 0xe8 && data[i + 1] === 0x11 && data[i + 2] === 0x2d;
        }
        return count;
    }"""
    )
    assert count >= 16


def test_keys_find_fold_zoom_and_open_a_layer_and_the_address_holds_it_all(look):
    visitor = look()
    visitor.press("/")
    visitor.page.keyboard.type("fc1")
    rows = f"{GRADIENT}.rows.map(row => row.name)"
    visitor.wait(f"{rows}.length === {BLOCKS}")
    visitor.press("Escape", "w")
    visitor.wait(f"{GRADIENT}.x.max - {GRADIENT}.x.min < {STEPS[-1]}")
    shown = visitor.evaluate(f"{GRADIENT}.x")
    visitor.page.focus("[data-map=gradient] .map-area")
    visitor.press(*["ArrowDown"] * 4)
    assert visitor.evaluate(f"{GRADIENT}.readout").startswith(BROKEN)
    visitor.press("Enter")
    visitor.wait_for_chart(f"gradient norm of {BROKEN}")
    drawn = visitor.wait_for_chart(f"gradient of {BROKEN}.weight")
    assert drawn["type"] == "ridges"
    visitor.page.reload()
    visitor.wait_for_chart(f"gradient norm of {BROKEN}")
    assert visitor.evaluate(f"{GRADIENT}.x") == shown
    assert visitor.evaluate(f"{rows}.length") == BLOCKS
    visitor.press("Escape")
    visitor.wait("!document.querySelector('.layers-open')")
    visitor.press("0")
    visitor.wait(f"{GRADIENT}.x.max >= {STEPS[-1]}")


def test_blocks_fold_to_one_row_that_shows_the_furthest_of_it(look):
    visitor = look()
    visitor.press("f")
    folded = visitor.wait(f"(drawn => drawn.rows.length < {len(NAMES)} && drawn)({GRADIENT})")
    assert [row["name"] for row in folded["rows"]] == [
        "embed", *(f"blocks.{block}" for block in range(BLOCKS)), "head",
    ]  # fmt: skip
    visitor.page.click("[data-map=gradient] .map-row[title='unfold blocks.4']")
    visitor.wait(f"{GRADIENT}.rows.some(row => row.name === '{BROKEN}')")
    visitor.page.focus("[data-map=gradient] .map-area")
    visitor.press(*["ArrowDown"] * 6, "Space")
    visitor.wait(f"!{GRADIENT}.rows.some(row => row.name === '{BROKEN}')")


def test_a_drag_zooms_and_a_click_opens_the_row_at_its_step(look):
    visitor = look()
    area = visitor.find_place("[data-map=gradient] .map-area")
    middle = area["y"] + area["height"] / 2
    visitor.page.mouse.move(area["x"] + area["width"] / 2, middle)
    visitor.page.mouse.down()
    visitor.page.mouse.move(area["x"] + area["width"] * 0.99, middle, steps=3)
    visitor.page.mouse.up()
    shown = visitor.wait(f"(x => x.min > 250 && x)({GRADIENT}.x)")
    assert shown["min"] == pytest.approx(295, abs=15)
    row = NAMES.index(BROKEN)
    area = visitor.find_place("[data-map=gradient] .map-area")
    visitor.page.mouse.click(
        area["x"] + area["width"] / 2, area["y"] + area["height"] * (row + 0.5) / len(NAMES)
    )
    visitor.wait_for_chart(f"gradient norm of {BROKEN}")
    assert f"layer={BROKEN}" in visitor.page.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everyone_can_use_it(look, scheme):
    visitor = look(f"run/deep/layers?layer={BROKEN}&kind=layer", color_scheme=scheme)
    visitor.wait_for_chart(f"gradient of {BROKEN}.weight")
    visitor.page.click("[data-map=gradient] button")
    visitor.wait("document.querySelector('[data-map=gradient] table button')")
    visitor.check_axe()


def test_it_fits_a_narrow_screen(look):
    visitor = look(f"run/deep/layers?layer={BROKEN}", viewport={"width": 320, "height": 640})
    visitor.wait_for_chart(f"gradient norm of {BROKEN}")
    assert visitor.evaluate("document.documentElement.scrollWidth") <= 320


def test_what_could_not_be_read_of_a_live_run_is_read_again(visit, serve, tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_RUN_ID", "live")
    session = quark.start_run(project="digits", storage_dir=tmp_path)
    session.write(make_layers("head", range(10), [1.0] * 10))
    session.flush("stored")
    visitor = visit(serve(tmp_path), "run/live/layers", may_be_lost=True)
    visitor.wait(GRADIENT)
    # Whatever else has the maps read again has come by then.
    with visitor.page.expect_response(lambda got: "/changes?" in got.url and got.status == 204):
        pass
    refused = []

    def list_changes():
        return [url for url in visitor.requests if "/changes?" in url]

    def refuse_once(route):
        if refused:
            return route.continue_()
        refused.extend(list_changes())
        body = {"error": {"status": 503, "message": "busy"}}
        return route.fulfill(status=503, json=body)

    visitor.page.route(lambda url: "/grid?" in url and "gradient" in url, refuse_once)
    session.write(make_layers("head", range(10, 20), [1000.0] * 10))
    session.flush("stored")
    visitor.wait(f"{GRADIENT}.rows[0].furthest > 500")
    # By the same cursor, so that it does not take something else to come.
    assert list_changes()[len(refused)] == refused[-1]
    session.end_run()


def test_a_run_without_layers_says_how_to_have_them(visit, serve_shared, root):
    visitor = visit(serve_shared(root), "run/flat/layers")
    visitor.wait_for_text("no records of layers or parameters")


def test_names_of_layers_are_text(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/hostile/layers")
    drawn = visitor.wait(GRADIENT)
    assert [row["name"] for row in drawn["rows"]] == [HOSTILE]
    visitor.page.focus("[data-map=gradient] .map-area")
    visitor.press("ArrowRight", "Enter")
    visitor.wait("document.querySelector('.layers-open h2')")
    assert visitor.evaluate("document.querySelector('.layers-open h2').textContent") == HOSTILE
    assert visitor.evaluate("window.ran") is None
