"""Artifacts in the browser: long tables, texts, pictures, and what only looks like one of them."""

import pytest
from browser_runs import log_run

import quark

ROWS = 120_000
HOSTILE = "<img src=x onerror=window.ran=1>"


def log_payloads(session, folder):
    table = folder / "scores.csv"
    rows = (f"{row},{(row * 7919) % ROWS},{HOSTILE}\n" for row in range(ROWS))
    table.write_text("id,loss,=cmd()\n" + "".join(rows))
    with quark.ArtifactStore(session) as artifacts:
        artifacts.log_file(table)
        artifacts.log_table("small", [[1, "a"], [2, None]], columns=["n", HOSTILE])
        page = b"<!doctype html><script>window.ran=1</script>"
        artifacts.store("image", "page.png", page, payload_format="bytes")
        drawing = (
            '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="30"><script>'
            'window.ran = parent.ran = 1</script><rect width="40" height="30"/></svg>'
        )
        artifacts.store("figure", "drawing", drawing, payload_format="text")
        artifacts.store("note", "large", "one line\n" * 100_000, payload_format="text")
        deep = b"[" * 50_000 + b"]" * 50_000
        artifacts.store("odd", "deep", deep, payload_format="bytes")
    table.unlink()


@pytest.fixture(scope="module")
def payloads(tmp_path_factory):
    root = tmp_path_factory.mktemp("payloads")
    log_run(root, "held", {"train/loss": [1.0, 0.5]}, more=lambda session: log_payloads(
        session, root), analyzes=False)  # fmt: skip
    return root


CELLS = """() => [...document.querySelectorAll('.cells tbody tr:not(.gap)')].map(
    row => [...row.children].map(cell => cell.innerText))"""


FITTING = f"""text => {{
    const rows = ({CELLS})();
    return rows.length && rows.every(row => row.slice(1, 3).some(cell => cell.includes(text)));
}}"""


def find_row(visitor, number):
    """Wait until the row of this number is in the document."""
    return visitor.wait(
        f"""number => ({CELLS})().find(row => row[0] === number && row[1] !== "")""", number
    )


def test_a_long_table_is_read_as_one_scrolls_sorts_and_searches(visit, serve_shared, payloads):
    visitor = visit(serve_shared(payloads), "run/held?tab=artifacts")
    visitor.page.get_by_role("button", name="Show scores.csv as a table").click()
    assert find_row(visitor, "1")[1:] == ["0", "0", HOSTILE]
    assert visitor.evaluate("document.querySelector('.cells').ariaRowCount") == str(ROWS + 1)
    # The last row, by the end of the box.
    visitor.evaluate("document.querySelector('.table-view .table-box').scrollTo(0, 1e9)")
    assert find_row(visitor, f"{ROWS:,}")[1] == str(ROWS - 1)
    assert visitor.evaluate(f"({CELLS})().length") < 120
    visitor.page.get_by_role("columnheader", name="loss").get_by_role("button").click()
    visitor.page.get_by_role("columnheader", name="loss").get_by_role("button").click()
    visitor.wait(f"() => ({CELLS})()[0]?.[2] === '{ROWS - 1}'")
    assert "sort=-1" in visitor.page.url
    visitor.page.locator("#find-row").fill("77777")
    visitor.wait(FITTING, "77777")
    visitor.wait_until_quiet()
    visitor.page.reload()
    visitor.wait(f"() => ({CELLS})().some(row => row[1] === '77777')")
    assert visitor.evaluate("window.ran ?? null") is None
    visitor.check_axe()
    visitor.page.get_by_role("button", name="Close").click()
    visitor.wait("!document.querySelector('.table-view')")
    assert "table=" not in visitor.page.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_table_fits_a_narrow_screen(visit, serve_shared, payloads, scheme):
    options = {"viewport": {"width": 320, "height": 700}, "color_scheme": scheme}
    visitor = visit(serve_shared(payloads), "run/held?tab=artifacts", **options)
    visitor.page.get_by_role("button", name="Show small as a table").click()
    visitor.wait(f"() => ({CELLS})().length === 2")
    assert visitor.evaluate("document.documentElement.scrollWidth") <= 320
    visitor.check_axe()


def test_what_only_looks_like_a_picture_or_a_text_runs_nothing(visit, serve_shared, payloads):
    visitor = visit(serve_shared(payloads), "run/held?tab=artifacts")
    visitor.wait("[...document.images].some(image => image.complete && image.naturalWidth === 40)")
    assert visitor.evaluate("[...document.images].length") == 1
    visitor.page.get_by_text("Show large").click()
    visitor.wait_for_text("the beginning of 900.0 kB; download it to see all")
    shown = visitor.evaluate("document.querySelector('.payload').innerText.length")
    assert shown <= 200_000
    visitor.page.get_by_text("Show deep").click()
    visitor.wait("document.querySelectorAll('.payload')[1]?.innerText.startsWith('[[[[')")
    with visitor.page.expect_download():
        visitor.page.get_by_role("link", name="Download page.png").click()
    assert visitor.evaluate("window.ran ?? null") is None
    assert len(visitor.context.pages) == 1


def test_what_is_no_table_says_so_where_it_would_be(visit, serve_shared, payloads):
    visitor = visit(serve_shared(payloads), may_be_lost=True).sign_in()
    visitor.go(f"run/held?tab=artifacts&table=csv.{'0' * 64}")
    visitor.wait_for_text("has no artifact")
