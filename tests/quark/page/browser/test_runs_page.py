"""The list of runs: searched, sorted, with columns of one's choice, however long it is."""

import pytest
from browser_runs import log_run, make_falling

OFFERS = "[...document.querySelectorAll('#offers li span')].map(offer => offer.innerText)"
READ_NAMES = "[...document.querySelectorAll('.runs tbody th a')].map(link => link.innerText)"


@pytest.fixture(scope="session")
def sweep(tmp_path_factory):
    """Twelve runs of a sweep, of which the names count up and the losses down."""
    root = tmp_path_factory.mktemp("sweep")
    for number in range(1, 13):
        values = {"train/loss": make_falling(20), "val/loss": [1.0 / number, 2.0 / number]}
        log_run(root, f"id-{number}", values, name=f"m{number}", analyzes=False,
                tags=["odd"] if number % 2 else ["even"], config={"lr": number / 100})  # fmt: skip
    return root


@pytest.mark.long
def test_a_search_is_in_the_address_and_finds(visit, serve_shared, sweep):
    visitor = visit(serve_shared(sweep), "")
    visitor.wait(f"{READ_NAMES}.length === 12")
    visitor.press("/")
    visitor.page.keyboard.type("config.lr < 0.035 and 'odd' in tags")
    visitor.press("Enter")
    visitor.wait(f"{READ_NAMES}.sort().join() === 'm1,m3'")
    assert "find=config.lr" in visitor.page.url
    visitor.page.go_back()
    visitor.wait(f"{READ_NAMES}.length === 12")
    assert visitor.page.input_value("#find") == ""


def test_a_mistake_is_shown_with_its_caret(visit, serve_shared, sweep):
    visitor = visit(serve_shared(sweep), "?find=val%2Flos+%3C+1", may_be_lost=True)
    lines = visitor.wait("document.querySelector('.mistake')?.innerText").splitlines()
    assert "val/loss" in lines[0]
    assert lines[2].strip("^ ") == ""
    assert lines[2].index("^") == lines[1].index("val/los")
    assert (
        visitor.evaluate("getComputedStyle(document.querySelector('.mistake')).whiteSpace") == "pre"
    )


def test_names_are_completed_by_the_keyboard(visit, serve_shared, sweep):
    visitor = visit(serve_shared(sweep), "")
    visitor.wait(f"{READ_NAMES}.length === 12")
    visitor.press("/")
    visitor.page.keyboard.type("val/l")
    visitor.wait_for_request("prefix=val%2Fl")
    visitor.wait_until_quiet()
    visitor.wait(OFFERS + ".length > 0")
    visitor.press("ArrowDown", "Enter")
    visitor.wait("document.getElementById('find').value === 'val/loss'")
    visitor.page.keyboard.type(" < 0.4 and config.l")
    # Each letter may bring new offers, of which none is chosen yet.
    visitor.wait_for_request("prefix=config.l")
    visitor.wait_until_quiet()
    visitor.wait(OFFERS + ".includes('config.lr')")
    visitor.press("ArrowDown", "Tab")
    visitor.page.keyboard.type(" > 0.1")
    visitor.press("Enter")
    visitor.wait(f"{READ_NAMES}.sort().join() === 'm11,m12'")


def test_columns_are_chosen_shown_and_sorted_by(visit, serve_shared, sweep):
    visitor = visit(serve_shared(sweep), "")
    visitor.wait(f"{READ_NAMES}.length === 12")
    visitor.page.click(".chooser summary")
    visitor.page.get_by_label("min", exact=True).last.check()
    visitor.page.click(".chooser summary")
    visitor.wait("document.querySelector('.runs thead').innerText.includes('min(val/loss)')")
    visitor.page.get_by_role("button", name="min(val/loss)").click()
    visitor.wait(f"{READ_NAMES}[0] === 'm12'")
    visitor.page.get_by_role("button", name="min(val/loss)").click()
    visitor.wait(f"{READ_NAMES}[0] === 'm1'")
    assert visitor.evaluate("document.querySelector('th[aria-sort]').ariaSort") == "descending"
    visitor.page.reload()
    visitor.wait(
        f"{READ_NAMES}[0] === 'm1' && document.querySelector('.runs').innerText.includes('0.08333')"
    )


def test_rows_have_a_curve_and_runs_are_opened_by_keys(visit, serve_shared, sweep):
    visitor = visit(serve_shared(sweep), "?order=name")
    visitor.wait("document.querySelectorAll('.runs svg.spark').length === 12")
    visitor.press("j", "j")
    visitor.wait("document.activeElement.innerText === " + "(" + READ_NAMES + ")[1]")
    visitor.press("k", "Enter")
    visitor.wait("location.pathname.endsWith('/run/id-1')")
    visitor.wait_for_chart("val/loss")
    visitor.page.go_back()
    visitor.wait(f"{READ_NAMES}.length === 12")


def test_back_finds_the_list_and_forward_the_run_as_they_were_left(visit, serve_shared, sweep):
    visitor = visit(serve_shared(sweep), "?order=name", viewport={"width": 1280, "height": 330})
    visitor.wait(f"{READ_NAMES}.length === 12")
    tops = (
        "[document.querySelector('.table-box')?.scrollTop ?? 0, document.documentElement.scrollTop]"
    )
    lowest = visitor.evaluate(
        """() => {
        const box = document.querySelector(".table-box");
        box.scrollTop = 1e6;
        return box.scrollTop;
    }"""
    )
    assert lowest > 50
    visitor.evaluate("[...document.querySelectorAll('.runs tbody th a')].at(-1).click()")
    visitor.wait_for_chart("val/loss")
    assert visitor.evaluate(tops) == [0, 0]
    visitor.wait_until_quiet()
    visitor.evaluate("scrollTo(0, 200)")
    assert visitor.evaluate(tops) == [0, 200]
    visitor.page.go_back()
    visitor.wait(f"{tops}.join() === '{lowest},0'")
    visitor.page.go_forward()
    visitor.wait(f"{tops}.join() === '0,200'")
    visitor.page.reload()
    visitor.wait(f"{tops}.join() === '0,200'")


def test_chosen_runs_are_in_the_address_and_can_be_shown_alone(visit, serve_shared, sweep):
    visitor = visit(serve_shared(sweep), "")
    visitor.wait(f"{READ_NAMES}.length === 12")
    visitor.page.get_by_label("Choose m2", exact=True).check()
    visitor.page.get_by_label("Choose m12", exact=True).check()
    visitor.wait_for_text("2 runs chosen")
    visitor.page.click("text=Show only these")
    visitor.wait(f"{READ_NAMES}.sort().join() === 'm12,m2'")
    assert "chosen=" in visitor.page.url


def test_of_many_runs_only_the_rows_in_sight_are_in_the_document(visit, serve_shared, sweep):
    visitor = visit(serve_shared(sweep), None)
    visitor.sign_in()
    rows = [
        {"id": f"r{n}", "project": "p", "name": f"run {n}", "state": "completed", "tags": [],
         "created_at": "2026-01-01T00:00:00Z", "newest_step": n, "values": [], "main": None}
        for n in range(10_000)
    ]  # fmt: skip

    def answer(route, request):
        """A page of a store of 10,000 runs, which would take minutes to log."""
        from urllib.parse import parse_qs, urlsplit

        asked = parse_qs(urlsplit(request.url).query)
        start, limit = int(asked.get("after", ["0"])[0]), int(asked["limit"][0])
        end = min(start + limit, len(rows))
        route.fulfill(json={"rows": rows[start:end], "count": len(rows), "columns": [],
                            "next": str(end) if end < len(rows) else None})  # fmt: skip

    visitor.page.route("**/api/runs?*", answer)
    visitor.go()
    visitor.wait_for_text("of 10,000")
    assert visitor.evaluate("document.querySelectorAll('.runs tbody tr').length") < 80
    visitor.evaluate("document.querySelector('.table-box').scrollTop = 5000 * 34")
    visitor.wait(f"{READ_NAMES}.includes('run 5005')")
    visitor.evaluate("document.querySelector('.table-box').scrollTop = 1e9")
    visitor.wait(f"{READ_NAMES}.includes('run 9999')")
    assert visitor.evaluate("document.querySelectorAll('.runs tbody tr').length") < 80
