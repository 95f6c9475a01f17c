"""The configuration on a run's page says what gave each setting its value."""

import pytest
from browser_runs import log_run

import quark

HOSTILE = "<img src=x onerror='window.ran = 1'>"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("origins")
    layers = quark.Layers()

    @layers.add(default=True)
    def defaults(c):
        c.lr, c.text = 0.001, HOSTILE
        c["__proto__"] = {"x": 1}
        c.constructor = 3

    @layers.add(name="hostile<svg/onload:alert(1)>", default=True)
    def hostile(c):
        c.text = HOSTILE * 2

    config = layers.resolve(["lr=0.02"])
    for name, given in (("layered", config), ("plain", {"constructor": 1, "lr": 2})):
        log_run(root, name, config=given, analyzes=False)
    return root


ROWS = """Object.fromEntries([...document.querySelectorAll("#panel .values tr")].map(row =>
    [row.querySelector("th").textContent, [...row.querySelectorAll("td")].map(each =>
        [each.textContent.trim(), each.querySelector("[title]")?.title ?? null])]))"""


@pytest.mark.long
def test_a_column_names_the_origin_and_its_title_what_was_before(visit, serve_shared, store):
    visitor = visit(serve_shared(store), "run/layered?tab=config")
    visitor.wait("document.querySelector('#panel .values')")
    rows = visitor.evaluate(ROWS)
    assert rows["lr"][1][0] == "command line · 1 before"
    assert rows["lr"][1][1].startswith("before: 0.001 by defaults (")
    assert rows["constructor"][1][0].startswith("defaults (")
    assert rows["__proto__.x"][1][0].startswith("defaults (")
    assert "hostile<svg/onload:alert(1)>" in rows["text"][1][0]
    assert visitor.evaluate("window.ran ?? null") is None
    visitor.check_axe()


def test_a_run_without_origins_has_no_such_column(visit, serve_shared, store):
    visitor = visit(serve_shared(store), "run/plain?tab=config")
    visitor.wait("document.querySelector('#panel .values')")
    assert visitor.evaluate("document.querySelector('#panel .values tr').cells.length") == 2


def test_a_narrow_screen_needs_no_scrolling_to_the_side(visit, serve_shared, store):
    visitor = visit(
        serve_shared(store), "run/layered?tab=config", viewport={"width": 320, "height": 640}
    )
    visitor.wait("document.querySelector('#panel .values')")
    assert visitor.evaluate("document.documentElement.scrollWidth") <= 320
