"""The console of a run: its newest lines, older ones, a search, and those that come."""

import re

import pytest

import quark
from quark_core.records.base import start_fields
from quark_core.records.kinds.console import ConsoleRecord

READ = "() => [...document.querySelectorAll('.console li')].map(line => line.textContent)"


def write(session, first, last):
    session.write(
        ConsoleRecord(*start_fields(None), "stdout", number, f"<i>line {number}</i>")
        for number in range(first, last)
    )
    session.flush()


@pytest.mark.long
def test_lines_are_shown_from_the_end_searched_and_followed(visit, serve, tmp_path):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    write(session, 0, 300)
    visitor = visit(serve(tmp_path), f"run/{session.run_id}?tab=console")
    newest = [f"<i>line {number}</i>" for number in range(300)]
    visitor.wait(f"() => ({READ})().at(-1) === {newest[-1]!r}")
    assert visitor.page.evaluate(READ) == newest[-100:]
    at_end = (
        "() => { const box = document.querySelector('.console');"
        " return box.scrollHeight - box.scrollTop - box.clientHeight < 2; }"
    )
    visitor.wait(at_end)
    visitor.page.get_by_role("button", name="older").click()
    visitor.wait(f"() => ({READ})().length === 200")
    write(session, 300, 310)
    visitor.wait(f"() => ({READ})().at(-1) === '<i>line 309</i>'")
    visitor.page.get_by_label("text").fill("line 123")
    visitor.wait(f"() => ({READ})().length === 1")
    assert visitor.page.evaluate(READ) == ["<i>line 123</i>"]
    session.end_run()


@pytest.fixture
def held(visit, serve, tmp_path):
    """A run of 300 lines, its console in a browser, and questions for older lines that wait."""
    session = quark.start_run(project="p", storage_dir=tmp_path)
    write(session, 0, 300)
    visitor = visit(serve(tmp_path), f"run/{session.run_id}?tab=console")
    visitor.wait(f"() => ({READ})().length === 100")
    waiting = []
    visitor.page.route(lambda url: "before=" in url, lambda route: waiting.append(route))
    visitor.page.get_by_role("button", name="older").click()
    visitor.wait_for_request("before=")

    def release():
        while not waiting:  # a click asks a moment later; a test that hangs is ended
            visitor.page.wait_for_timeout(20)
        for route in waiting:
            route.continue_()
        waiting.clear()
        visitor.wait_until_quiet()
        return [int(re.findall(r"\d+", line)[0]) for line in visitor.page.evaluate(READ)]

    yield visitor, session, release
    session.end_run()


def test_older_lines_that_are_asked_for_twice_come_once(held):
    visitor, _, release = held
    visitor.page.get_by_role("button", name="older").click()
    assert release() == list(range(100, 300))


@pytest.mark.long
def test_older_lines_that_come_after_a_burst_leave_no_hole(held):
    visitor, session, release = held
    write(session, 300, 450)
    visitor.wait(f"() => ({READ})().at(-1) === '<i>line 449</i>'")
    assert release() == list(range(350, 450))
    visitor.page.get_by_role("button", name="older").click()
    assert release() == list(range(250, 450))


def test_older_lines_that_come_after_a_search_are_not_shown(held):
    visitor, _, release = held
    visitor.page.get_by_label("text").fill("9</i>")
    visitor.wait(f"() => ({READ})().length === 30")
    assert release() == list(range(9, 300, 10))


@pytest.mark.long
def test_a_search_that_is_asked_for_twice_shows_only_what_fits(held):
    """Where a look for new lines comes before the answer to the search."""
    visitor, _, release = held
    searches = []

    def answer_the_second(route):
        searches.append(route)
        if len(searches) > 1:
            route.continue_()

    visitor.page.route(lambda url: "text=" in url, answer_the_second)
    visitor.page.get_by_label("text").fill("9</i>")
    visitor.wait(f"() => ({READ})().some(line => line.includes('line 9<'))")
    assert release() == list(range(9, 300, 10))
