"""The console of a run: its newest lines, older ones, a search, and those that come."""

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
